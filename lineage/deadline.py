"""Deadlines: the database itself ends a query that takes too long.

A revision, a search or a history that another user asks for may cost anything up to the deadline. SQLite checks the clock while it works,
PostgreSQL is given a ``statement_timeout``, and no further statement begins. Without a deadline nothing is ended.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from sqlalchemy import event, text

from datastates.errors import InvalidInput

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

__all__ = ["enforced", "is_set", "overdue", "within"]

_STEPS = 10_000  # of SQLite's virtual machine between two checks of the clock: some 100 us
_until: ContextVar[tuple[float, float] | None] = ContextVar("datastates_deadline", default=None)


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Give everything that this thread or task reads in the block one common deadline; a deadline set before still holds.

    :raises InvalidInput: (raised by the reads) it took longer.
    """
    token = _until.set(_until.get() or (time.monotonic() + seconds, seconds))
    try:
        yield
    finally:
        _until.reset(token)


def is_set() -> bool:
    """Whether a deadline holds for this thread or task."""
    return _until.get() is not None


def _check(*_: object) -> None:
    until = _until.get()
    if until is not None and time.monotonic() > until[0]:
        raise overdue()


@contextmanager
def enforced(session: Session) -> Iterator[None]:
    """Have the database end reads in a session when the deadline passes, if there is one."""
    until = _until.get()
    if until is None:
        yield
        return
    at, connection = until[0], session.connection()
    event.listen(connection, "before_cursor_execute", _check)  # of this connection alone, which ends with the session
    if connection.dialect.name != "sqlite":
        milliseconds = max(1, int((at - time.monotonic()) * 1000))
        connection.execute(text(f"SET LOCAL statement_timeout = {milliseconds}"))
        yield
        return
    raw: Any = connection.connection.dbapi_connection
    raw.set_progress_handler(lambda: time.monotonic() > at, _STEPS)
    try:
        yield
    finally:
        raw.set_progress_handler(None, 0)


def overdue() -> InvalidInput:
    """The error for a query that takes too long."""
    until = _until.get()
    given = "" if until is None else f" more than {until[1]:g} s"
    return InvalidInput(f"the answer takes{given}, and was given up: ask for less (fewer heads, fewer '@best', a narrower search)")
