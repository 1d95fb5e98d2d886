"""The events of all refs, in the order of their ids, for readers that must miss nothing.

``read`` stops at a gap in the ids until every transaction that may still fill it has ended (``search/settled``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from sqlalchemy import Select, bindparam, select

from datastates.lineage.change.refs import last_event
from datastates.lineage.schema import RefEventRow, StateRow, from_us, table
from datastates.lineage.search.settled import writers
from datastates.lineage.states import RefEvent, RefKind

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

__all__ = ["Events", "Horizon", "newest", "read", "settle"]

_PAGE = 500


@dataclass(frozen=True, slots=True)
class Horizon:
    """An id, and the transactions that may yet commit an event below it.

    Once it is settled, a transaction that begins afterwards sees all events up to the id that there will ever be.
    """

    id: int
    writers: frozenset[str]

    @property
    def is_settled(self) -> bool:
        """Whether all of these transactions have ended."""
        return not self.writers


@dataclass(frozen=True, slots=True)
class Events:
    """Events by rising ids, with none missing. If ``horizon`` is set there are more, after a gap: pass it to the next ``read``.

    Call that at once, in a new transaction, if the horizon is settled; else after a while.
    """

    items: tuple[RefEvent, ...]
    horizon: Horizon | None


def newest(session: Session) -> Horizon:
    """The newest event's id, 0 when there is none, and the transactions that may yet commit an older one."""
    return Horizon(last_event(session), _writers(session))


def settle(session: Session, horizon: Horizon) -> Horizon:
    """The horizon without the transactions that have ended since."""
    return horizon if horizon.is_settled else replace(horizon, writers=horizon.writers & _writers(session))


def read(session: Session, after: int, *, horizon: Horizon | None = None, limit: int = _PAGE) -> Events:
    """The events after the id ``after``, up to where more may still come in between; ``horizon`` is the one that the last call returned.

    ``after`` is 0 or an id up to which nothing was missing: that of an event read here, or of a settled horizon.
    """
    rows = session.execute(_AFTER, {"after": after, "limit": limit}).all()
    settled = horizon.id if horizon is not None and horizon.is_settled else 0
    items: list[RefEvent] = []
    for row in rows:
        missing = row.id - 1
        if missing > max(after, settled):
            return Events(tuple(items), _wait_for(session, missing, rows[-1].id, horizon))
        items.append(RefEvent(row.id, row.name, RefKind(row.kind), row.old, row.new, row.reason, from_us(row.created_at)))
        after = row.id
    return Events(tuple(items), None)


def _wait_for(session: Session, missing: int, seen: int, horizon: Horizon | None) -> Horizon:
    """The transactions that may still write the event ``missing``, given that ``seen`` exists. They are read after the events, in the same
    transaction.
    """
    if horizon is not None and missing <= horizon.id:
        return settle(session, horizon)
    return Horizon(seen, _writers(session))


def _writers(session: Session) -> frozenset[str]:
    return writers(session, [RefEventRow])


_event, _state = table(RefEventRow), table(StateRow)
_old, _new = _state.alias("old"), _state.alias("new")
_AFTER: Select[Any] = (
    select(_event.c.id, _event.c.name, _event.c.kind, _event.c.reason, _event.c.created_at)
    .add_columns(_old.c.uid.label("old"), _new.c.uid.label("new"))
    .outerjoin_from(_event, _old, _old.c.id == _event.c.old_id)
    .outerjoin(_new, _new.c.id == _event.c.new_id)
    .where(_event.c.id > bindparam("after"))
    .order_by(_event.c.id)
    .limit(bindparam("limit"))
)
