"""The first step: computes the digests of the chunks, and of the whole."""

from __future__ import annotations

import msgspec

from datastates.content.digest import chunk_digest, digest_of
from datastates.content.manifest import VERSION, Chunk, Content, Manifest, Origin
from datastates.lineage.schema import to_us
from datastates.lineage.states import State, StateFacts
from datastates.store.arena import Arena
from datastates.store.pouring import on_threads

from .contract import Priority
from .work import Work

__all__ = ["Digest", "finished", "manifest_of"]


class Digest:
    """Computes xxh3_128 of each chunk that its device did not digest, and BLAKE3 of the content and the parents' digests."""

    name, priority = "digest", int(Priority.DIGEST)

    def __init__(self, arena: Arena) -> None:
        self._arena = arena

    def process(self, work: Work) -> None:
        """Make the state's manifest."""
        found = dict(work.known)

        def look_at(index: int) -> None:
            found[index] = chunk_digest(self._arena.memory(work.slots[index], work.lengths[index]))

        left = [index for index in range(len(work.lengths)) if index not in found]
        if work.is_from_device:  # a state crosses faster than one core reads it
            on_threads(left, look_at)
        else:  # the other cores belong to the training
            for index in left:
                look_at(index)
        chunks = tuple(Chunk(found[index], length) for index, length in enumerate(work.lengths))
        content = msgspec.structs.replace(work.content, chunks=chunks)
        work.manifest = manifest_of(work.facts, content, work.parent_digests, rank=work.rank or 0)


def manifest_of(facts: StateFacts, content: Content, parent_digests: tuple[str, ...], *, rank: int = 0) -> Manifest:
    """The manifest that is kept beside the bytes of a state made here; ``parent_digests`` are those of ``facts.parents``, in order.

    A part of several names no parents yet, because it cannot know them: see ``finished``.
    """
    is_part = facts.world_size > 1
    origin = Origin(
        uid=facts.uid,
        parents=() if is_part else facts.parents,
        parent_digests=() if is_part else parent_digests,
        run=facts.run,
        branch=facts.branch,
        step=facts.step,
        micro_step=facts.micro_step,
        created_at_us=to_us(facts.created_at),
        message=facts.message,
        metrics=facts.metrics,
        attributes=facts.attributes,
        rank=rank,
        world_size=facts.world_size,
    )
    return Manifest(VERSION, digest_of(content, origin), origin, content)


def finished(part: Manifest, state: State, parent_digests: tuple[str, ...]) -> Manifest:
    """The manifest of a part once its state is whole: it has the lineage's facts of the state, so that any part can tell them."""
    origin = msgspec.structs.replace(
        part.origin,
        parents=state.parents,
        parent_digests=parent_digests,
        created_at_us=to_us(state.created_at),
        message=state.message,
        metrics=state.metrics,
        attributes=state.attributes,
    )
    return msgspec.structs.replace(part, origin=origin)
