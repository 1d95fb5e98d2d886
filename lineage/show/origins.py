"""Where states come from: the branch to which each belongs; and which states came last."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from sqlalchemy import BigInteger, bindparam, func, select

from datastates.lineage.batches import batches
from datastates.lineage.lookup import states
from datastates.lineage.schema import SegmentRow, StateRow, table
from datastates.lineage.states import State

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

__all__ = ["branches_of", "newest_id", "states_after"]

_BATCH = 1000
_segment, _state = table(SegmentRow), table(StateRow)
_NEWEST = select(func.max(_state.c.id))
_AFTER = select(_state.c.id).where(_state.c.id > bindparam("last", type_=BigInteger)).order_by(_state.c.id)
_SEGMENTS = (
    select(_state.c.uid, func.coalesce(_segment.c.branch, _segment.c.name).label("name"))
    .join_from(_state, _segment, _segment.c.id == _state.c.segment_id)
    .where(_state.c.uid.in_(bindparam("uids", expanding=True)))
)


def branches_of(session: Session, uids: Sequence[str]) -> dict[str, str]:
    """The branch to which each of some states belongs, by uid: the one that captured it. States that no branch ever had are left out."""
    found: dict[str, str] = {}
    for some in batches(uids, _BATCH):
        found.update((row.uid, row.name) for row in session.execute(_SEGMENTS, {"uids": some}))
    return found


def newest_id(session: Session) -> int:
    """The row id of the state that was recorded last; 0 when there is none."""
    return int(session.execute(_NEWEST).scalar() or 0)


def states_after(session: Session, last: int) -> list[State]:
    """The states with higher row ids, parents before children."""
    return states(session, list(session.execute(_AFTER, {"last": last}).scalars()))
