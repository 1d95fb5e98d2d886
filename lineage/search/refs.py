"""Branches and tags as they stand, and where they stood before. ``change.refs`` changes them."""

from __future__ import annotations

from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from sqlalchemy import BigInteger, Select, bindparam, func, select

from datastates import values
from datastates.errors import NotFound
from datastates.lineage.batches import batches
from datastates.lineage.schema import RefEventRow, RefRow, StateRow, from_us, table
from datastates.lineage.states import Ref, RefEvent, RefKind

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

__all__ = ["find", "get", "last_event", "moved", "near", "nearest", "reflog", "refs"]

_BATCH = 1000  # names in one IN list
_NEAR = 100

_ref, _event, _state = table(RefRow), table(RefEventRow), table(StateRow)
_old, _new = _state.alias("old"), _state.alias("new")


def get(session: Session, name: str) -> Ref:
    """The ref of this name.

    :raises NotFound: there is no such ref; the error names the nearest.
    """
    found = find(session, name)
    if found is None:
        raise NotFound(f"there is no branch or tag {name!r}{nearest(session, name)}")
    return found


def find(session: Session, name: str) -> Ref | None:
    """The ref of this name, or None."""
    row = session.execute(_REFS.where(_ref.c.name == bindparam("ref")), {"ref": values.text(name, "the name of a branch or a tag")}).first()
    return None if row is None else _to_ref(row)


def refs(session: Session, kind: RefKind | None = None) -> list[Ref]:
    """All refs, or those of one kind, by name."""
    query = _REFS if kind is None else _REFS.where(_ref.c.kind == kind.value)
    return sorted((_to_ref(row) for row in session.execute(query)), key=lambda ref: ref.name)


def moved(session: Session, after: int) -> dict[str, Ref | None]:
    """The refs that have a line of the reflog after the line ``after``, by name; None if they are deleted. All refs if that is negative."""
    if after < 0:
        return {ref.name: ref for ref in refs(session)}
    found: dict[str, Ref | None] = dict.fromkeys(session.execute(_MOVED, {"after": after}).scalars())
    for some in batches(list(found), _BATCH):
        found.update((row.name, _to_ref(row)) for row in session.execute(_REFS.where(_ref.c.name.in_(some))))
    return found


def reflog(session: Session, name: str, *, limit: int | None = None, before: int | None = None) -> list[RefEvent]:
    """The moves of a ref, newest first, even after it was deleted; with ``before`` only those with lower ids.

    :raises NotFound: there never was such a ref; the error names the nearest that exists.
    """
    name = values.text(name, "the name of a branch or a tag")
    query = _EVENTS if before is None else _EVENTS.where(_event.c.id < before)
    rows = session.execute(query.limit(limit), {"ref": name}).all()
    if not rows and limit != 0 and before is None:
        raise NotFound(f"there never was a branch or tag {name!r}{nearest(session, name)}")
    return [RefEvent(row.id, row.name, RefKind(row.kind), row.old, row.new, row.reason, from_us(row.created_at)) for row in rows]


def last_event(session: Session) -> int:
    """The id of the newest line of any reflog, 0 when there is none: one look-up shows whether a reflog has grown."""
    return int(session.execute(_LAST_EVENT).scalar() or 0)


def _to_ref(row: Any) -> Ref:
    return Ref(row.name, RefKind(row.kind), row.uid, row.version, row.message)


def nearest(session: Session, name: str) -> str:
    """The hint of an error message that lists similar names; empty if there are none."""
    names = get_close_matches(name, near(session, name), n=3)
    return f": did you mean {' or '.join(repr(each) for each in names)}?" if names else ""


def near(session: Session, name: str, kind: RefKind | None = None) -> list[str]:
    """Names that may be meant by this one: its neighbors in alphabetical order, and the names of the newest states.

    Each of the three groups has at most ``_NEAR`` names, because to compare 60,000 names takes a second.
    """
    query = select(_ref.c.name) if kind is None else select(_ref.c.name).where(_ref.c.kind == kind.value)
    before, behind = query.where(_ref.c.name < name).order_by(_ref.c.name.desc()), query.where(_ref.c.name > name).order_by(_ref.c.name)
    newest = query.order_by(_ref.c.state_id.desc())
    return sorted({each for some in (before, behind, newest) for each in session.execute(some.limit(_NEAR)).scalars()})


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
_MOVED = select(_event.c.name).where(_event.c.id > bindparam("after", type_=BigInteger)).distinct()
_LAST_EVENT = select(func.max(_event.c.id))
