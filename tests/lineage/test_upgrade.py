"""A lineage comes to the next revision wholly or not at all: by several processes at once, on a
full disk, by one that is killed."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from sqlalchemy import create_engine, text

from datastates.lineage import Database, NewState, State
from datastates.lineage.migrations import HEAD
from datastates.lineage.query import walk
from datastates.lineage.views import branches
from datastates.lineage.write import record, refs
from tests.support import revisions, warm
from tests.support.at_once import errors_of
from tests.support.effort import part

STATES = 150

KNOWING = """
import sys
from pathlib import Path
import pytest
from tests.support import revisions
revisions.add(Path(sys.argv[2]), pytest.MonkeyPatch())
"""

OPEN_AT_ONCE = f"""{KNOWING}
import alembic.command
from datastates.lineage import Database
print("ready", flush=True)
sys.stdin.readline()
Database(sys.argv[1], create=False).close()
"""
KILLED = f"""{KNOWING}
import os, signal
import alembic.command
from sqlalchemy import Engine, event
from datastates.lineage import Database
seen = 0
def step(*_):
    global seen
    seen += 1
    if seen == int(sys.argv[3]):
        os.kill(os.getpid(), signal.SIGKILL)
event.listen(Engine, "before_cursor_execute", step)
event.listen(Engine, "commit", step)
Database(sys.argv[1]).close()
print(seen)
"""
WITHOUT_ROOM = f"""{KNOWING}
import resource
import alembic.command
from datastates.errors import Unavailable
from datastates.lineage import Database
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]), int(sys.argv[3])))
try:
    Database(sys.argv[1]).close()
except Unavailable as error:
    print(error)
"""


class Old:
    """A lineage of our schema, and what was recorded in it. ``folder`` has the next revision."""

    def __init__(self, url: str, folder: Path, new_state: Callable[..., NewState]) -> None:
        self.url, self.folder = url, folder
        self.states: list[State] = []
        database = Database(url)
        with database.write() as session:
            for step in range(STATES):
                parent = self.states[-1].uid if self.states else None
                told = new_state(
                    parent,
                    branch="main",
                    step=step,
                    metrics={"loss": 1 / (step + 1), "accuracy": step / STATES},
                )
                self.states.append(record.record(session, told))
            refs.branch(session, "side", self.states[STATES // 2].uid)
        database.close()

    def command(self, script: str, *arguments: object) -> list[str]:
        """What runs a script that knows the next revision."""
        return [sys.executable, "-c", script, self.url, str(self.folder), *map(str, arguments)]

    def version(self) -> str:
        """The schema that it has now, whose tables hold every state."""
        engine = create_engine(self.url)
        with engine.connect() as connection:
            assert connection.execute(text("SELECT count(*) FROM state")).scalar_one() == STATES
            found = str(
                connection.execute(text("SELECT version_num FROM alembic_version")).scalar_one()
            )
        engine.dispose()
        return found

    def check(self) -> None:
        """It is of the next revision, with everything that was recorded."""
        assert self.version() == revisions.NEXT
        with pytest.MonkeyPatch.context() as patch:
            revisions.add(self.folder, patch)
            database = Database(self.url, create=False)
        with database.read() as session:
            assert walk.log(session, self.states[-1].uid) == self.states[::-1]
            found = {
                each.name: (each.states, each.last and each.last.value)
                for each in branches.branches(session, metric="loss")
            }
            assert (
                session.execute(
                    text("SELECT count(*) FROM state WHERE mood LIKE 'good %'")
                ).scalar_one()
                == STATES
            )
        database.close()
        assert found == {"main": (STATES, 1 / STATES), "side": (0, 1 / (STATES // 2 + 1))}


@pytest.fixture
def old(empty_url: str, tmp_path: Path, new_state: Callable[..., NewState]) -> Old:
    return Old(empty_url, tmp_path / "next", new_state)


@pytest.fixture
def old_file(tmp_path: Path, new_state: Callable[..., NewState]) -> Old:
    """One of SQLite."""
    return Old(f"sqlite:///{tmp_path / 'lineage.db'}", tmp_path / "next", new_state)


def test_processes_that_upgrade_a_lineage_at_once_all_find_the_newest_schema(old: Old) -> None:
    pipe = subprocess.PIPE
    children = [
        warm.Popen(old.command(OPEN_AT_ONCE), stdin=pipe, stdout=pipe, stderr=pipe)
        for _ in range(4)
    ]
    assert errors_of(children) == [("", 0)] * 4
    old.check()


def test_an_upgrade_that_is_killed_leaves_the_old_lineage_and_is_done_again(old: Old) -> None:
    for at in part(range(1, STATES, 7)):
        killed = warm.run(old.command(KILLED, at), capture_output=True, text=True, check=False)
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        assert old.version() == HEAD, f"killed before step {at}"
    done = warm.run(old.command(KILLED, 0), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert int(done.stdout) > STATES, "each was killed on its way"
    old.check()


@pytest.mark.parametrize("most_bytes", [0, 20_000, 60_000])
def test_an_upgrade_that_finds_no_room_says_so_and_leaves_the_old_lineage(
    old_file: Old, most_bytes: int
) -> None:
    """No file can grow past so many bytes, which is as near to a full disk as a process comes
    without one of its own."""
    done = warm.run(
        old_file.command(WITHOUT_ROOM, most_bytes), capture_output=True, text=True, check=False
    )
    assert (done.stderr, done.returncode) == ("", 0)
    assert done.stdout.startswith(f"{old_file.url} cannot be written (disk I/O error): "), (
        done.stdout
    )
    assert old_file.version() == HEAD
    done = warm.run(old_file.command(KILLED, 0), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    old_file.check()
