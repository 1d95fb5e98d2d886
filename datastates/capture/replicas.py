"""Finds whether the copies of a tensor on several ranks are equal, by a digest of each, and which of them differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

import msgspec

from datastates.content.digest import chunk_digest
from datastates.content.division import Box, held_by
from datastates.content.tree import Leaf
from datastates.objects.placements import holdings_of

from .shares import bytes_at

__all__ = ["Copy", "Difference", "copies_of", "differences"]


class Copy(msgspec.Struct, frozen=True, array_like=True):
    """One rank's copy of a box of a tensor that others hold, too."""

    path: str
    offset: tuple[int, ...]
    digest: bytes


class Difference(msgspec.Struct, frozen=True):
    """A tensor whose copies are not equal: ``ranks`` are those that differ from the most common copy; of equally common ones, the first."""

    path: str
    ranks: tuple[int, ...]


def copies_of(
    leaves: Sequence[Leaf], rank: int, size: int, *, apart: Collection[int] = (), members: Sequence[int] | None = None
) -> list[Copy]:
    """A digest of this rank's copy of each tensor that should be equal on several ranks, all of it read once. No capture may be in flight.

    ``apart`` are ids of tensors that may differ; ``members`` is as for ``holdings_of``.
    """
    found = []
    for leaf in leaves:
        if id(leaf.tensor) in apart:
            continue
        for box in held_by(holdings_of(leaf.tensor, size, members), rank):
            if len(box.owners) > 1 and box.length:
                share = Box(box.offset, box.local_shape, box.place or (0,) * len(box.shape))
                data, _ = bytes_at(leaf.tensor, share, box.strides)
                found.append(Copy(leaf.path, box.offset, chunk_digest(data.cpu().numpy().data)))  # waits for a device
    return found


def differences(copies: Sequence[Sequence[Copy]]) -> list[Difference]:
    """The differences between the copies of all ranks, which are given by rank; in order of path. What a rank does not have is not
    compared."""
    by_box: dict[tuple[str, tuple[int, ...]], dict[int, bytes]] = {}
    for rank, of_rank in enumerate(copies):
        for copy in of_rank:
            by_box.setdefault((copy.path, copy.offset), {})[rank] = copy.digest
    odd: dict[str, set[int]] = {}
    for (path, _), digests in by_box.items():
        common, count = Counter(digests.values()).most_common(1)[0]
        if count < len(digests):
            odd.setdefault(path, set()).update(rank for rank, digest in digests.items() if digest != common)
    return [Difference(path, tuple(sorted(ranks))) for path, ranks in sorted(odd.items())]
