"""Look-ups in a lineage that only tests need."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sqlalchemy import select

from datastates.errors import NotFound
from datastates.lineage import NewState, State
from datastates.lineage.lookup import state
from datastates.lineage.schema import PART
from datastates.lineage.write.clones import Clone, listing
from datastates.lineage.write.parts import PartReport, record_parts
from datastates.lineage.write.record import FIRST, Reduce

if TYPE_CHECKING:
    from datastates.lineage.session import Session


def record_part(
    session: Session, new: NewState, *, rank: int, reduce: Reduce = FIRST
) -> State | None:
    """Record one rank's part; returns the state if it is complete then."""
    record_parts(session, [PartReport(new, rank, reduce)])
    try:
        return state(session, new.uid)
    except NotFound:
        return None


def part_digests(session: Session, uid: str) -> tuple[str, ...]:
    """The digests of a complete state's parts, by rank; for a state of one part, its own."""
    found = state(session, uid)
    if found.world_size == 1:
        return (found.digest,)
    of_state = (PART.c.state_uid == uid, PART.c.rank >= 0)
    digests = select(PART.c.digest).where(*of_state).order_by(PART.c.rank)
    return tuple(session.execute(digests).scalars())


def clones_of(session: Session, uid: str) -> list[Clone]:
    """Every arrival of a state, newest first."""
    return [clone for _, _, clone in listing(session, limit=1000) if clone.state == uid]
