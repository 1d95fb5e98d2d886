"""Checks that what should be equal on all ranks is equal, by comparing a digest of each rank's copy over all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from datastates.capture.replicas import Copy, Difference, copies_of, differences
from datastates.content.tree import flatten
from datastates.errors import InvalidInput
from datastates.objects.owned import owned

if TYPE_CHECKING:
    from .training import Training

__all__ = ["check_replicas", "differing"]

_BATCH = 2_000
"""The number of digests, with their names, that go into one exchange."""

_SHOWN = 10


def check_replicas(training: Training) -> None:
    """Raise unless everything that should be equal on all ranks is equal. Collective.

    :raises InvalidInput: it is not; names what differs, with the same message on every rank.
    """
    found = differing(training)
    if found:
        shown = [f"{each.path} (rank {', '.join(map(str, each.ranks))})" for each in found[:_SHOWN]]
        more = f", and {len(found) - len(shown)} more" if len(found) > len(shown) else ""
        raise InvalidInput(
            f"branch {training.branch!r}: a state has one value of what all ranks hold, and these differ: {', '.join(shown)}{more}."
            " Make them equal (DistributedDataParallel does so when it wraps a model: track it afterwards), name what is each rank's own"
            " in own=…, or pass check=None"
        )


def differing(training: Training) -> list[Difference]:
    """The differences between ranks that should hold the same, by path. Collective; it waits for copies and devices."""
    ranks = training.ranks
    if ranks.size == 1:
        return []
    with ranks.united("look at what it holds"):
        training.fence()
        apart = {id(tensor) for tensor in training.adapted.buffers()}
        tree = owned({**training.adapted.outlook(is_shared=True), **training.values}, training.own)
        copies = copies_of(flatten(tree).tensors, ranks.rank, ranks.size, apart=apart, members=ranks.group.members)
    everyone: list[list[Copy]] = [[] for _ in range(ranks.size)]
    count = max(int(said) for said in ranks.group.exchange(str(len(copies)).encode()))
    for start in range(0, count, _BATCH):
        for rank, said in enumerate(ranks.group.exchange(msgspec.msgpack.encode(copies[start : start + _BATCH]))):
            everyone[rank] += msgspec.msgpack.decode(said, type=list[Copy])
    return differences(everyone)
