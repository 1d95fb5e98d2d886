"""Norms of a state's tensors: read once, a few MiB at a time, and cached."""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING

from datastates.algebra.diff import pieces, untied
from datastates.store.reading import specs_of

from .models import TensorInfo

if TYPE_CHECKING:
    from datastates.store.tier import Reader

__all__ = ["Norms", "tensors_of"]

_TENSORS = 200_000  # how many tensors' norms are kept, over all states


class Norms:
    """Euclidean norms by state and path. Safe from any thread."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, dict[str, float]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, uid: str) -> dict[str, float] | None:
        """The norms of a state, if they are kept."""
        with self._lock:
            if uid in self._kept:
                self._kept.move_to_end(uid)
            return self._kept.get(uid)

    def read(self, uid: str, reader: Reader, on_progress: Callable[[], None]) -> dict[str, float]:
        """The norms of an open state, read now. ``on_progress`` is called after each MiB or so; an exception from it ends the reading.

        :raises Corrupt: a chunk fails its digest.
        """
        norms: dict[str, float] = {}
        for spec in untied(reader):
            square = 0.0
            for piece in pieces(reader, spec):
                square += float(piece.dot(piece))
                on_progress()
            norms[spec.path] = math.sqrt(square)
        with self._lock:
            self._kept[uid] = norms
            while len(self._kept) > 1 and sum(map(len, self._kept.values())) > _TENSORS:
                self._kept.popitem(last=False)
        return norms


def tensors_of(reader: Reader, norms: dict[str, float] | None) -> list[TensorInfo]:
    """What the manifest says of each tensor, in tree order; a tied tensor has the bytes of the one it is tied to."""
    specs = specs_of(reader)
    return [
        TensorInfo(
            path=spec.path,
            dtype=placed.dtype,
            shape=placed.shape,
            bytes=sum(shard.length for shard in placed.shards),
            tied_to=None if spec.alias is None else specs[spec.alias].path,
            norm=None if norms is None else norms[spec.path],
        )
        for spec, placed in zip(specs, untied(reader), strict=True)
    ]
