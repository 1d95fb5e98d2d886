"""A state joined from its parts, one for each rank: one content whose stream is those of the parts, one after the other.

Every part has the whole tree, and for each tensor the whole geometry and the shards that its rank holds. So a tensor's shards are those
of all parts together. A part knows nothing of the others, because it was made without them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import msgspec

from datastates.errors import Corrupt, NotFound

from .check import tensors_of
from .digest import root_digest
from .manifest import CHUNK_BYTES, Content, Manifest, TensorSpec
from .shards import covers

__all__ = ["first_chunks", "join"]


def first_chunks(parts: Sequence[Manifest]) -> list[int]:
    """The index in the joined content of the first chunk of each part, and of the end."""
    return list(accumulate((len(part.content.chunks) for part in parts), initial=0))


def join(parts: Sequence[Manifest], *, rank: int = 0) -> Manifest:
    """The whole state, from the checked manifests of all its parts by rank. A single part is the whole state.

    Values that are not tensors, and the content of ``origin``, are those of ``rank``; the digest is the state's. The manifest does not say
    where its chunks lie: each part knows that for its own chunks.

    :raises Corrupt: the parts are not those of one state, or a tensor is not whole; names the state and the contradiction.
    :raises NotFound: the state has no such rank.
    """
    first = parts[0]
    _check_same(parts)
    if not 0 <= rank < len(parts):
        raise NotFound(f"state {first.origin.uid} has {len(parts)} parts, and none of rank {rank}")
    if len(parts) == 1:
        return first
    chosen = parts[rank]
    content = Content(
        first.content.skeleton,
        chosen.content.values,
        msgspec.Raw(msgspec.msgpack.encode(_tensors(parts))),
        tuple(chunk for part in parts for chunk in part.content.chunks),
    )
    digest = root_digest([part.digest for part in parts], first.origin.parent_digests)
    return Manifest(first.version, digest, chosen.origin, content)


def _check_same(parts: Sequence[Manifest]) -> None:
    """Raise unless the parts are all those of one state, in order."""
    first = parts[0]
    for rank, part in enumerate(parts):
        origin = part.origin
        if (origin.uid, origin.rank, origin.world_size) != (first.origin.uid, rank, len(parts)):
            raise Corrupt(
                f"rank {origin.rank} of {origin.world_size} of state {origin.uid} is no part of state {first.origin.uid}, "
                f"of which rank {rank} of {len(parts)} is wanted"
            )
        if (origin.parents, origin.parent_digests) != (first.origin.parents, first.origin.parent_digests):
            raise Corrupt(f"state {origin.uid}: rank {rank} names other parents than rank 0")
        if bytes(part.content.skeleton) != bytes(first.content.skeleton):
            raise Corrupt(f"state {origin.uid}: rank {rank} has another tree than rank 0")


def _tensors(parts: Sequence[Manifest]) -> list[TensorSpec]:
    uid, starts = parts[0].origin.uid, first_chunks(parts)
    joined = list(tensors_of(parts[0].content))
    for rank, part in enumerate(parts[1:], 1):
        specs = tensors_of(part.content)
        if len(specs) != len(joined):
            raise Corrupt(f"state {uid}: rank {rank} has {len(specs)} tensors, rank 0 {len(joined)}")
        for index, (ours, theirs) in enumerate(zip(joined, specs, strict=True)):
            if msgspec.structs.replace(theirs, shards=()) != msgspec.structs.replace(ours, shards=()):
                raise Corrupt(f"state {uid}: {theirs.path[:200]} of rank {rank} has another geometry than {ours.path[:200]} of rank 0")
            moved = (msgspec.structs.replace(shard, start=shard.start + starts[rank] * CHUNK_BYTES) for shard in theirs.shards)
            joined[index] = msgspec.structs.replace(ours, shards=(*ours.shards, *moved))
    for spec in joined:
        if spec.alias is None and not covers(spec):
            raise Corrupt(f"state {uid}: the {len(spec.shards)} shards of {spec.path[:200]} in all its parts overlap, or leave holes")
    return joined
