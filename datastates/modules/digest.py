"""The first step: digests of the chunks, and of the whole."""

from __future__ import annotations

import msgspec

from datastates.content.digest import chunk_digest, state_digest
from datastates.content.manifest import VERSION, Chunk, Content, Manifest, Origin
from datastates.lineage.schema import to_us
from datastates.lineage.states import StateFacts
from datastates.store.arena import Arena

from .contract import Priority
from .work import Work

__all__ = ["Digest", "manifest_of"]


class Digest:
    """xxh3_128 of each chunk where it lies, BLAKE3 of the content and the parents' digests."""

    name, priority = "digest", int(Priority.DIGEST)

    def __init__(self, arena: Arena) -> None:
        self._arena = arena

    def process(self, work: Work) -> None:
        """Make the state's manifest."""
        places = zip(work.slots, work.lengths, strict=True)
        chunks = tuple(Chunk(chunk_digest(self._arena.memory(slot, length)), length) for slot, length in places)
        content = msgspec.structs.replace(work.content, chunks=chunks)
        work.manifest = manifest_of(work.facts, content, work.parent_digests)


def manifest_of(facts: StateFacts, content: Content, parent_digests: tuple[str, ...]) -> Manifest:
    """What is kept beside the bytes of a state that is made here: ``parent_digests`` are those of ``facts.parents``, in order."""
    origin = Origin(
        uid=facts.uid,
        parents=facts.parents,
        parent_digests=parent_digests,
        run=facts.run,
        branch=facts.branch,
        step=facts.step,
        micro_step=facts.micro_step,
        created_at_us=to_us(facts.created_at),
        message=facts.message,
        metrics=facts.metrics,
        attributes=facts.attributes,
        world_size=facts.world_size,
    )
    return Manifest(VERSION, state_digest(content, parent_digests), origin, content)
