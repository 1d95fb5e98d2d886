"""A lineage that is made at once is the one that the migrations make."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from datastates.lineage import Database
from datastates.lineage.migrations import new, upgrade

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


def test_a_new_lineage_is_the_migrated_one_under_another_uid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = [made(tmp_path / f"written-{count}.db") for count in range(2)]
    monkeypatch.setattr(new, "write", upgrade.upgrade)
    migrated = made(tmp_path / "migrated.db")
    assert len({uid(path) for path in (migrated, *written)}) == 3
    assert {len(uid(path)) for path in (migrated, *written)} == {24}
    assert dump(written[0]) == dump(written[1])
    assert dump(written[0]) == dump(migrated), (
        "after a migration was added: .venv/bin/python -m tests.lineage.write_new"
    )


def test_a_new_lineage_needs_no_alembic(tmp_path: Path) -> None:
    script = (
        "import sys; from datastates.lineage import Database; Database(sys.argv[1]).close();"
        " print('alembic' in sys.modules)"
    )
    command = [sys.executable, "-c", script, f"sqlite:///{tmp_path}/new.db"]
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout == "False\n"
