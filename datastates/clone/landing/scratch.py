"""A few reusable buffers of one chunk each, for bytes that cannot be received in place."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from datastates.content.manifest import CHUNK_BYTES
from datastates.system.devices import Mark, devices

__all__ = ["Scratch"]


class Scratch:
    """At most ``count`` buffers, made when first needed; ``is_pinned``: their contents go on to a device."""

    def __init__(self, count: int, *, is_pinned: bool = False) -> None:
        self._left, self._free = count, list[tuple[torch.Tensor, Sequence[Mark]]]()
        self._is_pinned = is_pinned
        self._lock = threading.Lock()

    def take(self) -> torch.Tensor | None:
        """A buffer of ``CHUNK_BYTES``; None if all are in use. Waits if only devices still use the last ones."""
        with self._lock:
            order = range(len(self._free)) if self._is_pinned else reversed(range(len(self._free)))  # devices are done with the first ones
            ready = (index for index in order if all(mark.query() for mark in self._free[index][1]))
            index = next(ready, None)
            if index is not None:
                return self._free.pop(index)[0]
            if not self._left and not self._free:
                return None
            given = None if self._left else self._free.pop(0)
            self._left -= given is None
        if given is not None:
            for mark in given[1]:
                mark.synchronize()
            return given[0]
        if self._is_pinned:
            return devices().pinned((CHUNK_BYTES,), torch.uint8)
        return torch.empty(CHUNK_BYTES, dtype=torch.uint8, device="cpu")

    def give(self, buffer: torch.Tensor, marks: Sequence[Mark] = ()) -> None:
        """Take back a buffer, which is free again once these marks are reached."""
        with self._lock:
            self._free.append((buffer, marks))
