"""A lineage in a file, used by a process that copies that file, and opened by others meanwhile."""

from __future__ import annotations

import gc
import os
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from sqlalchemy import event, text

from datastates.errors import Closed
from datastates.lineage import sqlite_files
from datastates.lineage.database import Database

OPENED = (
    "import sys; from datastates.lineage.database import Database; base ="
    " Database(sys.argv[1])\nwith base.read(): pass\nbase.close()"
)
WRITING = "import sqlite3, sys; sqlite3.connect(sys.argv[1], timeout=0).execute('BEGIN IMMEDIATE')"
FILES = ("", "-wal", "-shm")


def open_elsewhere(url: str) -> None:
    """Another process opens the lineage, reads and closes it."""
    subprocess.run([sys.executable, "-c", OPENED, url], check=True, timeout=60)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "lineage.db"


def copied(path: Path) -> None:
    """Opened and closed by this process, as whoever copies it does."""
    for suffix in FILES:
        Path(f"{path}{suffix}").read_bytes()


def test_a_process_that_copies_its_lineage_keeps_it_while_others_come_and_go(path: Path) -> None:
    database = Database(f"sqlite:///{path}")
    index = Path(f"{path}-shm")
    before = index.stat()
    for _ in range(2):
        copied(path)
        open_elsewhere(database.url)
        assert (index.stat().st_ino, index.stat().st_size) == (before.st_ino, before.st_size)
        with database.write() as session:
            session.execute(text("CREATE TABLE IF NOT EXISTS seen (value INTEGER)"))
            session.execute(text("INSERT INTO seen VALUES (1)"))
    other = Database(database.url)
    with other.read() as session:
        assert session.execute(text("SELECT count(*) FROM seen")).scalar() == 2
    other.close()
    database.close()


def is_anchored(path: Path) -> bool:
    status = path.stat()
    return (status.st_dev, status.st_ino) in sqlite_files._anchors


def test_the_last_one_to_close_leaves_one_file(path: Path) -> None:
    databases = [Database(f"sqlite:///{path}") for _ in range(3)]
    for each in databases[:2]:
        each.close()
        each.close()
        assert Path(f"{path}-shm").exists()
    databases[2].close()
    assert [Path(f"{path}{suffix}").exists() for suffix in FILES] == [True, False, False]
    assert not is_anchored(path)


@pytest.mark.parametrize("is_closed_by_another_thread", [False, True])
def test_a_transaction_that_is_under_way_at_the_close_keeps_its_locks_to_its_end(
    path: Path, is_closed_by_another_thread: bool
) -> None:
    database = Database(f"sqlite:///{path}")
    with database.write() as session:
        session.execute(text("CREATE TABLE seen (value INTEGER)"))
        if is_closed_by_another_thread:
            (closing := threading.Thread(target=database.close)).start()
            closing.join(60)
        else:
            database.close()
        with pytest.raises(Closed), database.read():
            raise AssertionError
        done = subprocess.run(
            [sys.executable, "-c", WRITING, path],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.stderr.endswith("database is locked\n")
        session.execute(text("INSERT INTO seen VALUES (1)"))
    assert [Path(f"{path}{suffix}").exists() for suffix in FILES] == [True, False, False]
    assert not is_anchored(path)
    again = Database(database.url)
    with again.read() as session:
        assert session.execute(text("SELECT count(*) FROM seen")).scalar() == 1
    again.close()


def test_one_that_is_dropped_lets_go(path: Path) -> None:
    database = Database(f"sqlite:///{path}")
    assert is_anchored(path)
    connections: list[sqlite3.Connection] = []
    event.listen(database.engine, "connect", lambda raw, _: connections.append(raw))
    database.engine.dispose()
    with database.read() as first, database.read() as second:
        assert first.execute(text("SELECT 1")).scalar() == second.execute(text("SELECT 1")).scalar()
    del database
    gc.collect()
    assert not is_anchored(path)
    assert len(connections) == 2
    for connection in connections:
        with pytest.raises(sqlite3.ProgrammingError, match="closed"):
            connection.execute("SELECT 1")
    with Database(f"sqlite:///{path}").read() as session:
        assert session.execute(text("SELECT count(*) FROM state")).scalar() == 0


def test_a_forked_child_leaves_the_locks_of_its_parent_alone(path: Path) -> None:
    database = Database(f"sqlite:///{path}")
    child = os.fork()
    if child == 0:
        os._exit(int(bool(sqlite_files._anchors)))
    assert os.waitpid(child, 0)[1] == 0
    index = Path(f"{path}-shm").stat()
    copied(path)
    open_elsewhere(database.url)
    assert (Path(f"{path}-shm").stat().st_ino, Path(f"{path}-shm").stat().st_size) == (
        index.st_ino,
        index.st_size,
    )
    database.close()
