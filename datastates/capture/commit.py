"""The one place where a state becomes part of memory and lineage: captures, merges and clones all come here."""

from __future__ import annotations

from datastates.content.digest import state_digest
from datastates.content.manifest import VERSION, Content, Manifest, Origin
from datastates.lineage.schema import to_us
from datastates.lineage.states import StateFacts

__all__ = ["manifest_of"]


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
