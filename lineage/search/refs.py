"""Branches and tags as they stand, and where they stood before. ``change.refs`` changes them."""

from __future__ import annotations

from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from sqlalchemy import Select, bindparam, func, select

from datastates import values
from datastates.errors import NotFound
from datastates.lineage.schema import RefEventRow, RefRow, StateRow, from_us, table
from datastates.lineage.states import Ref, RefEvent, RefKind

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

__all__ = ["get", "last_event", "reflog", "refs"]

_ref, _event, _state = table(RefRow), table(RefEventRow), table(StateRow)
_old, _new = _state.alias("old"), _state.alias("new")


def get(session: Session, name: str) -> Ref:
    """The ref of this name.

    :raises NotFound: there is no such ref; the error names the nearest.
    """
    row = session.execute(_REFS.where(_ref.c.name == bindparam("ref")), {"ref": values.text(name, "the name of a branch or a tag")}).first()
    if row is None:
        raise NotFound(f"there is no branch or tag {name!r}{_nearest(session, name)}")
    return _to_ref(row)


def refs(session: Session, kind: RefKind | None = None) -> list[Ref]:
    """All refs, or those of one kind, by name."""
    query = _REFS if kind is None else _REFS.where(_ref.c.kind == kind.value)
    return sorted((_to_ref(row) for row in session.execute(query)), key=lambda ref: ref.name)


def reflog(session: Session, name: str, *, limit: int | None = None, before: int | None = None) -> list[RefEvent]:
    """The moves of a ref, newest first, even after it was deleted; with ``before`` only those with lower ids.

    :raises NotFound: there never was such a ref; the error names the nearest that exists.
    """
    name = values.text(name, "the name of a branch or a tag")
    query = _EVENTS if before is None else _EVENTS.where(_event.c.id < before)
    rows = session.execute(query.limit(limit), {"ref": name}).all()
    if not rows and limit != 0 and before is None:
        raise NotFound(f"there never was a branch or tag {name!r}{_nearest(session, name)}")
    return [RefEvent(row.id, row.name, RefKind(row.kind), row.old, row.new, row.reason, from_us(row.created_at)) for row in rows]


def last_event(session: Session) -> int:
    """The id of the newest line of any reflog, 0 when there is none: one look-up shows whether a reflog has grown."""
    return int(session.execute(_LAST_EVENT).scalar() or 0)


def _to_ref(row: Any) -> Ref:
    return Ref(row.name, RefKind(row.kind), row.uid, row.version, row.message)


def _nearest(session: Session, name: str) -> str:
    names = get_close_matches(name, session.execute(select(_ref.c.name)).scalars().all(), n=3)
    return f": did you mean {' or '.join(repr(each) for each in names)}?" if names else ""


_REFS: Select[Any] = select(_ref.c.name, _ref.c.kind, _ref.c.version, _ref.c.message, _state.c.uid).join_from(
    _ref, _state, _state.c.id == _ref.c.state_id
)
_EVENTS: Select[Any] = (
    select(_event.c.id, _event.c.name, _event.c.kind, _event.c.reason, _event.c.created_at)
    .add_columns(_old.c.uid.label("old"), _new.c.uid.label("new"))
    .outerjoin_from(_event, _old, _old.c.id == _event.c.old_id)
    .outerjoin(_new, _new.c.id == _event.c.new_id)
    .where(_event.c.name == bindparam("ref"))
    .order_by(_event.c.id.desc())
)
_LAST_EVENT = select(func.max(_event.c.id))
