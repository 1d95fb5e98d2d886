"""An old lineage comes to the newest schema wholly or not at all: by several processes at once, on a full disk, by one that is killed."""

from __future__ import annotations

import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from alembic import command
from sqlalchemy import create_engine, text

from datastates.lineage import Database, NewState, State
from datastates.lineage import database as database_module
from datastates.lineage.change import record, refs
from datastates.lineage.migrations import AS_IS, HEAD, KNOWN, upgrade
from datastates.lineage.search import walk
from datastates.lineage.show import overview
from tests.support import warm
from tests.support.at_once import errors_of
from tests.support.effort import part

STATES = 150
OLDEST = KNOWN[0]

OPEN_AT_ONCE = """
import sys
import alembic.command
from datastates.lineage import Database
print("ready", flush=True)
sys.stdin.readline()
Database(sys.argv[1], create=False).close()
"""
KILLED = """
import os, signal, sys
import alembic.command
from sqlalchemy import Engine, event
from datastates.lineage import Database
seen = 0
def step(*_):
    global seen
    seen += 1
    if seen == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)
event.listen(Engine, "before_cursor_execute", step)
event.listen(Engine, "commit", step)
Database(sys.argv[1]).close()
print(seen)
"""
WITHOUT_ROOM = """
import resource, sys
import alembic.command
from datastates.errors import Unavailable
from datastates.lineage import Database
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), int(sys.argv[2])))
try:
    Database(sys.argv[1]).close()
except Unavailable as error:
    print(error)
"""


class Old:
    """A lineage of the oldest schema, and what was recorded in it."""

    def __init__(self, url: str, new_state: Callable[..., NewState]) -> None:
        self.url = url
        self.states: list[State] = []
        database = Database(url)
        with database.write() as session:
            for step in range(STATES):
                parent = self.states[-1].uid if self.states else None
                told = new_state(parent, branch="main", step=step, metrics={"loss": 1 / (step + 1), "accuracy": step / STATES})
                self.states.append(record.record(session, told))
            refs.branch(session, "side", self.states[STATES // 2].uid)
        database.close()
        self.age()

    def age(self) -> None:
        """Make it old again."""
        database = Database(self.url)
        with database.write() as session:
            command.downgrade(upgrade.config(session.connection()), OLDEST)
        database.close()

    def version(self) -> str:
        """The schema that it has now, whose tables hold every state."""
        engine = create_engine(self.url)
        with engine.connect() as connection:
            assert connection.execute(text("SELECT count(*) FROM state")).scalar_one() == STATES
            found = str(connection.execute(text("SELECT version_num FROM alembic_version")).scalar_one())
        engine.dispose()
        return found

    def check(self) -> None:
        """It is of the newest schema, with everything that was recorded."""
        assert self.version() == HEAD
        database = Database(self.url, create=False)
        with database.read() as session:
            assert walk.log(session, self.states[-1].uid) == self.states[::-1]
            found = {each.name: (each.states, each.last and each.last.value) for each in overview.branches(session, metric="loss")}
        database.close()
        assert found == {"main": (STATES, 1 / STATES), "side": (0, None)}


@pytest.fixture
def old(empty_url: str, new_state: Callable[..., NewState]) -> Old:
    return Old(empty_url, new_state)


@pytest.fixture
def old_file(tmp_path: Path, new_state: Callable[..., NewState]) -> Old:
    """One of SQLite."""
    return Old(f"sqlite:///{tmp_path / 'lineage.db'}", new_state)


def test_processes_that_upgrade_a_lineage_at_once_all_find_the_newest_schema(old: Old) -> None:
    pipe = subprocess.PIPE
    children = [warm.Popen([sys.executable, "-c", OPEN_AT_ONCE, old.url], stdin=pipe, stdout=pipe, stderr=pipe) for _ in range(4)]
    assert errors_of(children) == [("", 0)] * 4
    old.check()


def test_an_upgrade_that_is_killed_leaves_the_old_lineage_and_is_done_again(old: Old) -> None:
    def upgraded(at: int) -> subprocess.CompletedProcess[str]:
        return warm.run([sys.executable, "-c", KILLED, old.url, str(at)], capture_output=True, text=True, check=False)

    counted = upgraded(at=0)
    assert counted.returncode == 0, counted.stderr
    old.check()
    old.age()
    for at in part(range(1, int(counted.stdout) + 1, 3)):
        assert upgraded(at).returncode == -signal.SIGKILL
        assert old.version() == OLDEST, f"killed before step {at}"
    Database(old.url).close()
    old.check()


@pytest.mark.parametrize("most_bytes", [0, 20_000, 60_000])
def test_an_upgrade_that_finds_no_room_says_so_and_leaves_the_old_lineage(old_file: Old, most_bytes: int) -> None:
    """No file can grow past so many bytes, which is as near to a full disk as a process comes without one of its own."""
    command = [sys.executable, "-c", WITHOUT_ROOM, old_file.url, str(most_bytes)]
    done = warm.run(command, capture_output=True, text=True, check=False)
    assert (done.stderr, done.returncode) == ("", 0)
    assert done.stdout.startswith(f"{old_file.url} cannot be written (disk I/O error): "), done.stdout
    assert old_file.version() == OLDEST
    Database(old_file.url).close()
    old_file.check()


def test_an_upgrade_waits_for_another_that_takes_longer_than_a_write_may(old_file: Old, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database_module, "BUSY_TIMEOUT_S", 0.01)
    with closing(sqlite3.connect(old_file.url.removeprefix("sqlite:///"), isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        since = time.monotonic()

        def waiting() -> None:
            if other.in_transaction and time.monotonic() > since + 0.2:
                other.execute("ROLLBACK")

        monkeypatch.setattr(database_module, "checkpoint", waiting)
        Database(old_file.url).close()
        assert not other.in_transaction
    old_file.check()


@pytest.mark.parametrize("version", sorted(AS_IS))
def test_a_version_that_is_read_as_it_is_has_the_newest_tables_in_sqlite(tmp_path: Path, version: str) -> None:
    def tables() -> list[tuple[object, ...]]:
        with closing(sqlite3.connect(tmp_path / "lineage.db")) as connection:
            return connection.execute("SELECT type, name, tbl_name, sql FROM sqlite_master ORDER BY type, name").fetchall()

    with closing(Database(f"sqlite:///{tmp_path / 'lineage.db'}")) as database:
        newest = tables()
        with database.write() as session:
            command.downgrade(upgrade.config(session.connection()), version)
    assert tables() == newest
