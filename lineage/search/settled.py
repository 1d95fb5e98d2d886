"""The rows of tables that only grow, as far as none can still come in between.

On SQLite ids rise with commits. On PostgreSQL they are drawn before the commit: a reader that has seen 7 may find a 6 committed later.
The transactions that may still do so are those that hold the lock which PostgreSQL gives a writer of the table before it draws an id, and
releases after its commit.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sqlalchemy import func, select, text

from datastates.errors import Unavailable
from datastates.lineage.schema import AmendmentRow, Base, CloneRow, RefEventRow, RunRow, StateRow, table
from datastates.system.interrupts import checkpoint

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

    from datastates.lineage.database import Database

__all__ = ["EVERYTHING", "Settled", "settled", "writers"]

_LAST = 2**63 - 1
_PAUSE_S = 0.01


@dataclass(frozen=True, slots=True)
class Settled:
    """An id of each table: a transaction that begins now sees all rows up to it that there will ever be."""

    run: int = _LAST
    state: int = _LAST
    event: int = _LAST
    clone: int = _LAST
    amendment: int = _LAST


EVERYTHING = Settled()


def settled(database: Database, *, timeout_s: float) -> Settled:
    """The newest rows, once every transaction that may still commit an older one has ended; it waits for these, and for no others.

    :raises Unavailable: one of them did not end within ``timeout_s``.
    """
    if database.is_sqlite:
        return EVERYTHING
    end = time.monotonic() + timeout_s
    with database.read() as session:
        newest = Settled(*(id_ or 0 for id_ in session.execute(_NEWEST).one()))
        waiting = writers(session, _TABLES)  # read after the rows, or one that commits in between would be missed
    while waiting:
        if time.monotonic() > end:
            raise Unavailable(f"a transaction that writes to the lineage did not end within {timeout_s:g} s: what is newer is told later")
        checkpoint()
        time.sleep(_PAUSE_S)
        with database.read() as session:
            waiting &= writers(session, _TABLES)
    return newest


def writers(session: Session, tables: Iterable[type[Base]]) -> frozenset[str]:
    """The transactions that may commit rows to one of these tables whose ids they have drawn already; none on SQLite."""
    if session.get_bind().dialect.name != "postgresql":
        return frozenset()  # it has one writer at a time
    return frozenset(session.execute(_WRITERS, {"tables": [each.__tablename__ for each in tables]}).scalars())


_TABLES = (RunRow, StateRow, RefEventRow, CloneRow, AmendmentRow)
_NEWEST = select(*(select(func.max(table(each).c.id)).scalar_subquery() for each in _TABLES))
_WRITERS = text(
    "SELECT DISTINCT virtualtransaction FROM pg_locks WHERE locktype = 'relation' AND mode = 'RowExclusiveLock' AND granted"
    " AND relation = ANY(CAST(CAST(:tables AS text[]) AS regclass[]))"
    " AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
)
