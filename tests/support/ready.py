"""New SQLite lineages for tests, quickly: the tables that the migrations make, without running the migrations for each of them.

Alembic takes 60 ms for a lineage that holds nothing yet, and thousands of tests begin with one. Real are: every other process than the
tests' own, PostgreSQL, lineages that hold something, thorough runs, and the tests that ask for ``real_migrations``.
"""

from __future__ import annotations

import functools
import secrets

from sqlalchemy import Connection, create_engine

from datastates.lineage.migrations import upgrade as module

__all__ = ["migrate", "statements", "write"]

migrate = module.upgrade


@functools.cache
def statements() -> tuple[str, ...]:
    """What makes an empty lineage: all that the migrations leave in an empty database."""
    engine = create_engine("sqlite://")
    try:
        with engine.begin() as connection:
            migrate(connection)
        with engine.connect() as connection:
            found = connection.connection.driver_connection
            assert found is not None
            return tuple(line for line in found.iterdump() if line not in ("BEGIN TRANSACTION;", "COMMIT;"))
    finally:
        engine.dispose()


def write(connection: Connection) -> None:
    """Do what ``upgrade`` does, in the transaction of ``connection``."""
    if connection.dialect.name != "sqlite" or connection.exec_driver_sql("SELECT 1 FROM sqlite_master").first() is not None:
        migrate(connection)
        return
    cursor = connection.connection.cursor()
    for statement in statements():
        cursor.execute(statement)
    cursor.execute("UPDATE repository SET uid = ?", [secrets.token_hex(12)])  # a lineage of its own
