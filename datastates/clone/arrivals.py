"""Landing a state from another process in a repository: first in its memory, then in its lineage."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from datastates.capture.commit import Coming
from datastates.config import BackPressure
from datastates.content.parts import first_chunks
from datastates.errors import Conflict, Corrupt, InvalidInput, NotFound, Unavailable
from datastates.lineage.change import clones, refs
from datastates.lineage.states import NewState, Ref, RefKind, State
from datastates.opening.core import Core
from datastates.store.comparing import are_equal
from datastates.system.interrupts import undisturbed

from .landing import CheckedManifest, StateSink

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

__all__ = ["abandon", "lacks_parents", "land", "make_room", "make_tags", "missing_ancestry"]

_logger = logging.getLogger(__name__)


def make_room(
    core: Core,
    checked: CheckedManifest,
    *,
    party: str,
    relatives: Iterable[str] = (),
    acquire: Callable[[Sequence[int]], Sequence[int] | None] | None = None,
) -> StateSink:
    """Room for the chunks of a state in the repository's arena. May wait for room, as a capture does, unless ``acquire`` gets it.

    ``party`` is the sender, as ``land`` will record it. Parents and ``relatives`` that are on disk lend the state their chunks, if they
    were captured here or came from the same party.

    :raises OverBudget: the state can never fit.
    """
    with core.database.read() as session:
        sound = clones.trusted(session, dict.fromkeys((*checked.manifest.origin.parents, *relatives)), party=party)
    engaged = core.engage()

    def wait(lengths: Sequence[int]) -> Sequence[int] | None:
        return engaged.host.acquire(lengths, BackPressure.WAIT)

    return StateSink(checked, engaged.memory, engaged.arena, acquire or wait, party=party, lender=core.tiers.durable, relatives=sound)


def abandon(core: Core, sink: StateSink) -> None:
    """Free the memory of a clone that ended without landing."""
    with undisturbed():
        sink.abandon()
        if core.running is not None:
            core.running.release([])  # tells captures that wait for room


def missing_ancestry(core: Core, states: Sequence[State]) -> list[State]:
    """Those of the states that the repository does not have."""
    with core.database.read() as session:
        here = clones.known(session, (state.uid for state in states))
    return [state for state in states if state.uid not in here]


def lacks_parents(core: Core, states: Sequence[State]) -> bool:
    """Whether some parent of these states is neither among them nor in the repository."""
    wanted = {parent for state in states for parent in state.parents}.difference(state.uid for state in states)
    with core.database.read() as session:
        return len(clones.known(session, wanted)) < len(wanted)


def land(
    core: Core,
    sink: StateSink,
    state: State,
    *,
    ancestry: Sequence[State],
    tags: Sequence[Ref],
    came: clones.Provenance,
) -> State:
    """Make a state whose chunks are all here one of the repository's, with the ancestry and tags that came with it.

    An interrupt is raised once the state is in the lineage, in memory and known to the engine.

    :raises Conflict: a state of the same uid and another digest is here.
    """
    engaged = core.engage()
    host, run = engaged.host, engaged.run_uid

    def record(session: Session, new: NewState) -> State:
        clones.import_ancestry(session, ancestry, came.runs)
        parts = [(part.digest, sum(chunk.length for chunk in part.content.chunks)) for part in sink.parts]
        bytes_new = new.bytes_new
        return clones.arrive(session, state, run=run, tier=new.tier, node=core.node, bytes_new=bytes_new, came=came, parts=parts)

    with undisturbed():
        _check_on_disk(core, sink)
        now = host.take_in(Coming(state.facts, state.digest, state.bytes_total, sink.adopt), record)
    make_tags(core, tags)
    host.refs_changed()
    return now


def _check_on_disk(core: Core, sink: StateSink) -> None:
    """Raise unless the state on disk is the same, because memory is read before disk. A state that was damaged on disk may come again.

    :raises Conflict: it is not the same.
    """
    uid, parts = sink.manifest.origin.uid, sink.parts or (sink.manifest,)
    for rank, first in enumerate(first_chunks(parts)[:-1]):
        with suppress(Corrupt, NotFound, Unavailable), core.tiers.durable.open_part(uid, rank) as reader:
            if reader.manifest.digest != parts[rank].digest or not all(
                are_equal(reader.chunk(index), piece)
                for index in range(len(reader.manifest.content.chunks))
                for piece in sink.pieces(first + index) or ()
            ):
                raise Conflict(
                    f"another state of the uid {uid} is on disk here, of other bytes: one of them is forged; drop the one that is"
                )


def make_tags(core: Core, tags: Sequence[Ref]) -> None:
    """Take over tags. Tags whose name is taken, or whose state is not here, are left out with a warning. Branches are not taken over."""
    left: list[str] = []
    for tag in tags:
        if tag.kind is not RefKind.TAG:
            continue
        try:
            with core.database.write(durable=True) as session:
                refs.tag(session, tag.name, tag.state, message=tag.message)
        except (Conflict, InvalidInput, NotFound) as exc:
            left.append(f"{tag.name[:255]!r} ({exc})")
    if left:
        _logger.warning("of %d tags %d were not taken over: %s%s", len(tags), len(left), "; ".join(left[:3]), "; …" if left[3:] else "")
