"""A database of the tests' server that was given back is as a new one."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

import pytest
from sqlalchemy import select, text

from datastates.lineage import Database
from datastates.lineage.schema import metadata
from datastates.lineage.write import record
from tests.support.lineages import told

if TYPE_CHECKING:
    from tests.conftest import Postgresql


def fill(url: str, count: int) -> tuple[str, int]:
    """Record states; the lineage's uid, and the first number that a state got."""
    database = Database(url)
    with database.write() as session:
        for step in range(count):
            record.record(
                session,
                told(
                    secrets.token_hex(12), secrets.token_hex(32), None, f"branch-{step}", None, step
                ),
            )
        uid = str(session.execute(text("SELECT uid FROM repository")).scalar_one())
        first = int(session.execute(text("SELECT min(id) FROM state")).scalar_one())
    database.close()
    return uid, first


@pytest.mark.parametrize("count", [2, 500], ids=["few rows", "many rows"])
def test_what_was_given_back_is_as_new(postgresql: Postgresql, count: int) -> None:
    url = postgresql.migrated()
    before = fill(url, count)
    postgresql.give_back(url)
    assert postgresql.migrated() == url
    database = Database(url, create=False)
    with database.read() as session:
        for table in metadata.sorted_tables:
            assert len(session.execute(select(table)).all()) == (table.name == "repository"), (
                table.name
            )
    database.close()
    after = fill(url, 1)
    assert before[1] == after[1] == 1
    assert before[0] != after[0]
    postgresql.give_back(url)


def test_a_database_whose_tables_were_changed_serves_nobody_else(postgresql: Postgresql) -> None:
    url = postgresql.migrated()
    database = Database(url)
    with database.write() as session:
        session.execute(text("DROP TABLE ref_event"))
    database.close()
    postgresql.give_back(url)
    assert postgresql.migrated() != url
