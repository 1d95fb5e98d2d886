"""A transaction on the lineage, as functions of this package take it.

It is the part of SQLAlchemy's session that those functions use. The original comes with the ORM,
whose import takes a third of the time that a terminal command needs to start. Type checkers take it
for SQLAlchemy's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sqlalchemy import Connection, CursorResult, Engine, Executable, NestedTransaction
    from sqlalchemy.orm import Session as Session
else:

    class Session:
        """One connection, from the first statement on.

        What is not committed by its end is rolled back."""

        __slots__ = ("_connection", "_engine")

        def __init__(self, engine: Engine) -> None:
            self._engine = engine
            self._connection: Connection | None = None

        def get_bind(self) -> Engine:
            """The engine, with the options of this transaction."""
            return self._engine

        def connection(self) -> Connection:
            """The connection, inside a transaction."""
            if self._connection is None:
                self._connection = self._engine.connect()
            if not self._connection.in_transaction():
                self._connection.begin()
            return self._connection

        def execute(
            self,
            statement: Executable,
            parameters: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        ) -> CursorResult[Any]:
            """The result of a statement; with several parameter sets it runs once for each."""
            return self.connection().execute(statement, parameters)

        def begin_nested(self) -> NestedTransaction:
            """A savepoint, which ends with its block."""
            return self.connection().begin_nested()

        def commit(self) -> None:
            """Make the changes permanent."""
            if self._connection is not None:
                self._connection.commit()

        def rollback(self) -> None:
            """Undo what was done since the last commit."""
            if self._connection is not None:
                self._connection.rollback()

        def close(self) -> None:
            """Return the connection."""
            connection, self._connection = self._connection, None
            if connection is not None:
                connection.close()

        def __enter__(self) -> Self:
            return self

        def __exit__(self, *_: object) -> None:
            self.close()
