"""Creates a new SQLite lineage at once, from ``new.sql``: the result of running all migrations on
an empty database.

Importing Alembic and running every migration takes 150 ms, at the start of each training that
creates its repository. A test compares the file with the result of the migrations; ``python -m
tests.lineage.write_new`` rewrites it after a migration was added.
"""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sqlalchemy import Connection

FILE = Path(__file__).with_name("new.sql")
"""The statements; a semicolon at the end of a line ends one."""


def write(connection: Connection) -> None:
    """Create the tables in the transaction of ``connection``, on an empty SQLite database, and
    give the lineage a new uid."""
    cursor = connection.connection.cursor()
    for statement in FILE.read_text(encoding="utf-8").removesuffix(";\n").split(";\n"):
        cursor.execute(statement)
    cursor.execute("UPDATE repository SET uid = ?", [secrets.token_hex(12)])
