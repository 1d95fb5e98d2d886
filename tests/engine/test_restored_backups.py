"""A backup of the database is restored while a training runs: what the backup lacks is recorded
again, and nothing is lost."""

from __future__ import annotations

import os
import re
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from sqlalchemy import make_url

import datastates
from datastates.config import Config
from datastates.engine import outbox, runner
from datastates.errors import Unavailable
from datastates.lineage import Database
from datastates.repository import Repository
from datastates.state.manifest import CHUNK_BYTES
from datastates.training.tracker import Tracker

if TYPE_CHECKING:
    from tests.conftest import Postgresql

MEMORY = Config(memory_bytes=4 * CHUNK_BYTES, durable_interval_s=None)
"""So little that most states leave memory."""


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "CHECK_EVERY_S", 0.01)


class Training:
    """Captures states one upon the other; every third is durable."""

    def __init__(self, repo: Repository, branch: str = "main") -> None:
        self.repo, self.weight, self.uids = repo, torch.zeros(CHUNK_BYTES // 4), list[str]()
        self.run: Tracker = repo.track(branch=branch, weight=self.weight, rng=False)

    def capture(self, count: int) -> None:
        for _ in range(count):
            self.weight += 1
            made = self.run.capture(metrics={"loss": 1.0})
            self.uids.append(made.uid)
            made.wait("durable" if len(self.uids) % 3 == 0 else "captured")

    def capture_unheard(self, count: int) -> None:
        """While the database does not answer."""
        for _ in range(count):
            self.weight += 1
            self.uids.append(self.run.capture().uid)


def copy(root: Path) -> Path:
    """A backup of an SQLite lineage."""
    made = root / "backup.db"
    with (
        closing(sqlite3.connect(root / "lineage.db")) as source,
        closing(sqlite3.connect(made)) as target,
    ):
        source.backup(target)
    return made


def put_back(backup: Path) -> None:
    """Move a backup over the file of the lineage, whose log holds little."""
    with closing(sqlite3.connect(backup.with_name("lineage.db"))) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    os.replace(backup, backup.with_name("lineage.db"))


def recorded(repo: Repository) -> set[str]:
    return {state.uid for state in repo.log(limit=10_000)}


def check(url: Path | str, training: Training, packs: Path | None = None) -> None:
    """Nothing that the training captured is missing, and its branch is at the newest state."""
    with datastates.open(url, packs=packs) as repo:
        assert recorded(repo) >= set(training.uids)
        assert repo.state("main").uid == training.uids[-1]
        assert not repo.verify().damage
        assert repo.state(training.uids[-1]).metrics == {"loss": 1.0}


def test_a_copy_moved_over_the_file_gets_what_it_lacks_and_what_comes_after(tmp_path: Path) -> None:
    with datastates.open(tmp_path, config=MEMORY) as repo:
        training = Training(repo)
        training.capture(5)
        backup = copy(tmp_path)
        training.capture(30)
        put_back(backup)
        training.capture(10)
    check(tmp_path, training)
    with closing(sqlite3.connect(tmp_path / "lineage.db")) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


def test_a_copy_moved_over_the_file_of_a_training_that_captures_no_more_gets_what_it_lacks(
    tmp_path: Path,
) -> None:
    with datastates.open(tmp_path, config=MEMORY) as repo:
        training = Training(repo)
        training.capture(5)
        backup = copy(tmp_path)
        training.capture(10)
        put_back(backup)
    check(tmp_path, training)


def test_a_transaction_that_is_committed_to_a_replaced_file_is_unavailable(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path / 'lineage.db'}")
    backup = copy(tmp_path)
    with pytest.raises(Unavailable, match="was replaced during a transaction"), database.write():
        os.replace(backup, tmp_path / "lineage.db")
    with database.write():
        pass
    database.close()


def test_a_file_that_is_gone_or_another_lineages_is_waited_for(tmp_path: Path) -> None:
    path, aside = tmp_path / "runs/lineage.db", tmp_path / "aside.db"
    Database(f"sqlite:///{tmp_path / 'other.db'}").close()
    with datastates.open(path.parent, config=MEMORY) as repo:
        training = Training(repo)
        training.capture(5)
        os.replace(path, aside)
        training.capture_unheard(2)
        with pytest.raises(Unavailable, match=r"lineage.db is gone"), repo.core.database.read():
            pass
        assert not path.exists()
        for content, problem in [
            (b"", "no such table"),
            (b"x" * 5000, "not a datastates"),
            ((tmp_path / "other.db").read_bytes(), "not"),
        ]:
            (tmp_path / "new.db").write_bytes(content)
            os.replace(tmp_path / "new.db", path)
            with (
                pytest.raises(
                    Unavailable, match=f"replaced by a file that cannot be used.*{problem}"
                ),
                repo.core.database.read(),
            ):
                pass
        os.replace(aside, path)
        training.capture(2)
    check(path.parent, training)


def test_several_databases_of_a_process_follow_the_file(tmp_path: Path) -> None:
    with datastates.open(tmp_path, config=MEMORY) as repo, datastates.open(tmp_path) as reader:
        training = Training(repo)
        training.capture(3)
        backup = copy(tmp_path)
        training.capture(6)
        put_back(backup)
        assert len(recorded(reader)) >= 3
        training.capture(3)
        assert recorded(reader) == set(training.uids)
    check(tmp_path, training)


def test_ancestors_of_an_earlier_process_are_recorded_again_from_their_manifests(
    tmp_path: Path,
) -> None:
    with datastates.open(tmp_path) as repo:
        first = Training(repo)
        first.capture(3)
    backup = copy(tmp_path)
    with datastates.open(tmp_path) as repo:
        second = Training(repo)
        for _ in range(4):
            second.weight += 1
            second.uids.append(
                second.run.capture(metrics={"loss": 2.0}, message="kept").wait("durable").uid
            )
    with datastates.open(tmp_path) as repo:
        third = Training(repo)
        put_back(backup)
        third.capture(3)
    third.uids[:0] = first.uids + second.uids
    check(tmp_path, third)
    with datastates.open(tmp_path) as repo:
        state = repo.state(second.uids[0])
        assert (state.metrics, state.message, state.status, state.parents) == (
            {"loss": 2.0},
            "kept",
            "durable",
            (first.uids[-1],),
        )
        assert state.run is not None
        repo.load(state.uid)


def test_a_state_whose_parent_was_only_in_memory_hangs_on_to_its_branch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox, "_MOST_WAITING", 3)
    with datastates.open(tmp_path, config=MEMORY) as repo:
        training = Training(repo)
        training.capture(3)
        backup = copy(tmp_path)
        training.capture(30)
        put_back(backup)
        training.capture(3)
    durable = {uid for number, uid in enumerate(training.uids, 1) if number % 3 == 0}
    with datastates.open(tmp_path) as repo:
        assert recorded(repo) >= durable
        assert repo.state("main").uid == training.uids[-1]


def test_a_branch_that_moved_back_after_the_backup_moves_back_again(tmp_path: Path) -> None:
    with datastates.open(tmp_path, config=MEMORY) as repo:
        training = Training(repo)
        training.capture(9)
        backup = copy(tmp_path)
        training.run.restore(training.uids[5])
        training.capture(5)
        put_back(backup)
        training.capture(4)
    with datastates.open(tmp_path) as repo:
        assert [state.uid for state in repo.log("main", limit=9)] == training.uids[:-10:-1]


def _server(postgresql: Postgresql, program: str, *arguments: str) -> None:
    postgresql._run(program, "-h", str(postgresql.host()), "-U", "postgres", *arguments)


@contextmanager
def dumped(
    postgresql: Postgresql, tmp_path: Path
) -> Iterator[tuple[str, str, Callable[..., None]]]:
    """A database, its name, and what dumps it (at first), or restores it under a name."""
    url = postgresql.migrated()
    name, file = str(make_url(url).database), postgresql.folder / f"{os.urandom(4).hex()}.dump"

    def restore(into: str, section: str = "") -> None:
        if not file.exists():
            _server(postgresql, "pg_dump", "-Fc", "-f", str(file), name)
            return
        if section in ("", "pre-data"):
            _server(postgresql, "createdb", into)
        _server(
            postgresql,
            "pg_restore",
            "-d",
            into,
            *([f"--section={section}"] if section else []),
            str(file),
        )

    yield url, name, restore


def test_a_server_s_database_that_is_dropped_and_restored_gets_what_it_lacks(
    postgresql: Postgresql, tmp_path: Path
) -> None:
    with dumped(postgresql, tmp_path) as (url, name, restore):
        with datastates.open(url, packs=tmp_path, config=MEMORY) as repo:
            training = Training(repo)
            training.capture(5)
            restore(name)
            training.capture(20)
            _server(postgresql, "dropdb", "-f", name)
            training.capture_unheard(2)
            with (
                pytest.raises(Unavailable, match="is not there for now"),
                repo.core.database.read(),
            ):
                pass
            _server(postgresql, "createdb", name)
            with (
                pytest.raises(Unavailable, match="is not there for now"),
                repo.core.database.read(),
            ):
                pass
            _server(postgresql, "dropdb", "-f", name)
            restore(name)
            training.capture(5)
        check(url, training, tmp_path)


def test_a_server_s_database_that_is_renamed_away_for_a_copy_gets_what_it_lacks(
    postgresql: Postgresql, tmp_path: Path
) -> None:
    with dumped(postgresql, tmp_path) as (url, name, restore):
        with datastates.open(url, packs=tmp_path, config=MEMORY) as repo:
            training = Training(repo)
            training.capture(5)
            restore(name)
            training.capture(20)
            restore(f"{name}_restored")
            document = (Path(__file__).parents[2] / "docs/deployment.md").read_text()
            shown = re.search(
                r"^```sql\n(ALTER DATABASE.*?)^```$", document, re.MULTILINE | re.DOTALL
            )
            assert shown is not None
            with postgresql._connect("postgres") as connection:
                for statement in shown[1].replace("lineage", name).splitlines():
                    connection.execute(statement)
                    training.capture_unheard(1)
            training.capture(5)
        check(url, training, tmp_path)


def test_a_database_that_is_still_being_restored_is_waited_for(
    postgresql: Postgresql, tmp_path: Path
) -> None:
    with dumped(postgresql, tmp_path) as (url, name, restore):
        restore(name)
        database = Database(url)
        _server(postgresql, "dropdb", "-f", name)
        for section, problem in [
            ("pre-data", "does not hold lineage"),
            ("data", "finish restoring"),
            ("post-data", None),
        ]:
            restore(name, section)
            if problem is not None:
                with pytest.raises(Unavailable, match=problem), database.read():
                    pass
        with database.read():
            pass
        database.close()
