"""A summary of a lineage: how much there is, which branches were active, and what came last."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sqlalchemy import ColumnElement, func, select

from datastates.lineage.lookup import states
from datastates.lineage.schema import RefRow, StateRow, table
from datastates.lineage.states import Ref, RefKind, State

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

__all__ = ["Summary", "summary"]

_state, _ref = table(StateRow), table(RefRow)
_KINDS = select(_ref.c.kind, func.count().label("number")).group_by(_ref.c.kind)


@dataclass(frozen=True, slots=True)
class Summary:
    """``heads`` are branches and where they stand; ``newest`` are states, newest first, so children before their parents.

    ``named`` are the refs of ``newest``.
    """

    states: int
    branches: int
    tags: int
    heads: tuple[tuple[Ref, State], ...]
    newest: tuple[State, ...]
    named: tuple[Ref, ...]


def summary(session: Session, *, heads: int, newest: int) -> Summary:
    """The ``heads`` branches that moved last, and the ``newest`` states; a handful of queries, however much there is."""
    count = session.execute(select(func.count()).select_from(_state)).scalar_one()
    kinds = {row.kind: int(row.number) for row in session.execute(_KINDS)}
    ids = list(session.execute(select(_state.c.id).order_by(_state.c.id.desc()).limit(newest)).scalars())
    branches = _refs(session, _ref.c.kind == RefKind.BRANCH.value, heads)
    return Summary(
        states=int(count),
        branches=kinds.get(RefKind.BRANCH.value, 0),
        tags=kinds.get(RefKind.TAG.value, 0),
        heads=tuple(zip(branches, states(session, [ref.state for ref in branches]), strict=True)),
        newest=tuple(states(session, ids)),
        named=tuple(_refs(session, _ref.c.state_id.in_(ids), None)),
    )


def _refs(session: Session, where: ColumnElement[bool], limit: int | None) -> list[Ref]:
    """Refs, those that name the newest states first."""
    columns: tuple[ColumnElement[Any], ...] = (_ref.c.name, _ref.c.kind, _state.c.uid, _ref.c.version, _ref.c.message)
    query = select(*columns).join(_state, _state.c.id == _ref.c.state_id).where(where)
    rows = session.execute(query.order_by(_ref.c.state_id.desc(), _ref.c.name).limit(limit))
    return [Ref(name, RefKind(kind), uid, version, message) for name, kind, uid, version, message in rows]
