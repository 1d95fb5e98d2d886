"""Whether what every rank should hold alike is alike: a digest of each rank's copy, compared over all of them."""

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
"""So many digests, with their names, go into one exchange."""

_SHOWN = 10


def check_replicas(training: Training) -> None:
    """Raise unless all ranks hold the same where they should. Collective.

    :raises InvalidInput: they do not; names what differs, on every rank alike.
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
    """What differs between ranks that should hold the same, by path. Collective; it waits for copies and devices."""
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
