"""Write ``lineage/migrations/new.sql``, what the migrations leave in an empty SQLite database:

.venv/bin/python -m tests.lineage.write_new
"""

from __future__ import annotations

from sqlalchemy import create_engine

from datastates.lineage.migrations import new, upgrade

_END = ("BEGIN TRANSACTION;", "COMMIT;")


def statements() -> str:
    """The contents of the file; the lineage's uid, which is drawn at random, is empty in it."""
    engine = create_engine("sqlite://")
    try:
        with engine.begin() as connection:
            upgrade.upgrade(connection)
            connection.exec_driver_sql("UPDATE repository SET uid = ''")
        with engine.connect() as connection:
            found = connection.connection.driver_connection
            assert found is not None
            return "".join(f"{line}\n" for line in found.iterdump() if line not in _END)
    finally:
        engine.dispose()


if __name__ == "__main__":
    new.FILE.write_text(statements(), encoding="utf-8")
