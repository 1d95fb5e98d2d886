"""The surroundings of one state: names, children, and the first parents before it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sqlalchemy import BigInteger, Integer, bindparam, literal, select, union

from datastates.errors import InvalidInput, NotFound
from datastates.lineage.lookup import id_of, states
from datastates.lineage.schema import EdgeRow, RefRow, StateRow, table
from datastates.lineage.search.walk import first_parent_at
from datastates.lineage.states import Ref, RefKind, State

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

__all__ = ["child_uids", "first_parents", "refs_at"]

_state, _edge, _ref = table(StateRow), table(EdgeRow), table(RefRow)
_next = _state.alias("next")
_REFS_AT = (
    select(_ref.c.name, _ref.c.kind, _ref.c.version, _ref.c.message, _state.c.uid)
    .join_from(_ref, _state, _state.c.id == _ref.c.state_id)
    .where(_ref.c.state_id == bindparam("state", type_=BigInteger))
)
_below = union(
    select(_state.c.id).where(_state.c.parent_id == bindparam("state", type_=BigInteger)),
    select(_edge.c.child_id).where(_edge.c.parent_id == bindparam("state", type_=BigInteger)),
).subquery()
_CHILDREN = select(_state.c.uid).join_from(_below, _state, _state.c.id == _below.c.id).order_by(_state.c.id)
_walk = select(_state.c.id, _state.c.parent_id, literal(1).label("place")).where(_state.c.id == bindparam("start", type_=BigInteger))
_chain = _walk.cte("chain", recursive=True)
_chain = _chain.union_all(
    select(_next.c.id, _next.c.parent_id, _chain.c.place + 1)
    .join_from(_chain, _next, _next.c.id == _chain.c.parent_id)
    .where(_chain.c.place < bindparam("count", type_=Integer))
)
_FIRST_PARENTS = select(_chain.c.id).order_by(_chain.c.place)


def refs_at(session: Session, uid: str) -> list[Ref]:
    """The branches and tags that name a state, by name.

    :raises NotFound: there is no such state.
    """
    rows = session.execute(_REFS_AT, {"state": id_of(session, uid)})
    return sorted((Ref(row.name, RefKind(row.kind), row.uid, row.version, row.message) for row in rows), key=lambda ref: ref.name)


def child_uids(session: Session, uid: str) -> list[str]:
    """The uids of ``walk.children``, oldest first."""
    return list(session.execute(_CHILDREN, {"state": id_of(session, uid)}).scalars())


def first_parents(session: Session, uid: str, *, limit: int, after: str | None = None) -> tuple[list[State], str | None]:
    """A state and its first parents, newest first; and the uid to continue ``after``, None when the root is among them.

    :raises NotFound: there is no such state.
    :raises InvalidInput: ``after`` is not one of them.
    """
    start, skipped = id_of(session, uid), 0
    if after is not None:
        last = id_of(session, after)
        if not _is_first_parent(session, last, start):
            raise InvalidInput(f"{after} is not among the first parents of {uid}: pass the uid of the last state that came")
        start, skipped = last, 1
    ids = list(session.execute(_FIRST_PARENTS, {"start": start, "count": limit + skipped + 1}).scalars())[skipped:]
    found = states(session, ids[:limit])
    return found, found[-1].uid if len(ids) > limit else None


def _is_first_parent(session: Session, old: int, new: int) -> bool:
    try:
        return first_parent_at(session, new, old) == old
    except NotFound:
        return False
