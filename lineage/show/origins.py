"""Where states come from, the branch on which each was captured, as the reflog tells it; and which came last."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from sqlalchemy import BigInteger, bindparam, func, select

from datastates.lineage.lookup import ids_of, states
from datastates.lineage.schema import RefEventRow, StateRow, table
from datastates.lineage.states import RefKind, State

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

__all__ = ["branches_of", "newest_id", "states_after"]

_event, _state = table(RefEventRow), table(StateRow)
_NEWEST = select(func.max(_state.c.id))
_AFTER = select(_state.c.id).where(_state.c.id > bindparam("last", type_=BigInteger)).order_by(_state.c.id)
_MOVES = (
    select(_event.c.new_id, _event.c.name)
    .where(_event.c.new_id.in_(bindparam("ids", type_=BigInteger, expanding=True)), _event.c.kind == RefKind.BRANCH.value)
    .order_by(_event.c.id.desc())
)


def branches_of(session: Session, uids: Collection[str]) -> dict[str, str]:
    """The branch that first stood at each of some states, by uid; nothing for states that no branch ever stood at."""
    ids = dict(zip(ids_of(session, list(uids)), uids, strict=True))
    return {ids[row.new_id]: row.name for row in session.execute(_MOVES, {"ids": list(ids)})}


def newest_id(session: Session) -> int:
    """The row id of the state that was recorded last; 0 when there is none."""
    return int(session.execute(_NEWEST).scalar() or 0)


def states_after(session: Session, last: int) -> list[State]:
    """The states with higher row ids, parents before children."""
    return states(session, list(session.execute(_AFTER, {"last": last}).scalars()))
