"""A lineage that was written at once is the one that the migrations make."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from alembic import command
from sqlalchemy import text

from datastates.lineage import Database
from datastates.lineage.migrations import HEAD, upgrade
from tests.support import ready

if TYPE_CHECKING:
    import pytest


def dump(path: Path) -> list[str]:
    """All that it holds, in the order in which it lies there, but its name."""
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("UPDATE repository SET uid = 'its own'")
        return [
            *connection.iterdump(),
            *map(str, connection.execute("PRAGMA user_version")),
            *map(str, connection.execute("PRAGMA journal_mode")),
        ]


def uid(path: Path) -> str:
    with closing(sqlite3.connect(path)) as connection:
        (found,) = connection.execute("SELECT uid FROM repository").fetchone()
        return str(found)


def made(path: Path) -> Path:
    Database(f"sqlite:///{path}").close()
    return path


def test_it_holds_what_the_migrations_make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upgrade, "upgrade", ready.migrate)
    migrated = made(tmp_path / "migrated.db")
    monkeypatch.setattr(upgrade, "upgrade", ready.write)
    written = [made(tmp_path / f"written-{count}.db") for count in range(2)]
    assert len({uid(path) for path in (migrated, *written)}) == 3
    assert {len(uid(path)) for path in (migrated, *written)} == {24}
    assert dump(written[0]) == dump(written[1]) == dump(migrated)


def test_what_holds_something_is_migrated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upgrade, "upgrade", ready.write)
    database = Database(f"sqlite:///{tmp_path}/lineage.db")
    with database.write() as session:
        command.downgrade(upgrade.config(session.connection()), "datastates_0001")
    database.close()
    database = Database(f"sqlite:///{tmp_path}/lineage.db")
    with database.read() as session:
        assert session.execute(text("SELECT version_num FROM alembic_version")).scalars().all() == [HEAD]
    database.close()
