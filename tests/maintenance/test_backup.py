"""The backup of an SQLite lineage in its folder of packs, and what is rebuilt from it."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
import torch

import datastates
from datastates import Config, Repository
from datastates.maintenance import backup
from datastates.maintenance.backup import BACKUP, back_up, damage_of
from datastates.maintenance.location import DATABASE
from tests.support import warm

QUIET = Config(memory_bytes=64 << 20, durable_interval_s=None)
ROOT = Path(__file__).parents[2]


def train(repo: Repository, count: int = 2, branch: str = "main") -> list[str]:
    weight = torch.zeros(30)
    with repo.track(branch=branch, weight=weight, rng=False) as run:
        found = []
        for _ in range(count):
            weight += 1
            found.append(run.capture(metrics={"loss": 1.0}).wait("durable").uid)
        return found


def states_in(path: Path) -> set[str]:
    with closing(sqlite3.connect(path)) as found:
        return {uid for (uid,) in found.execute("SELECT uid FROM state")}


def lose(folder: Path) -> None:
    for path in folder.glob(f"{DATABASE}*"):
        path.unlink()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "runs"


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backup, "_EVERY_S", 0.01)
    monkeypatch.setattr(backup, "_PAUSE_FACTOR", 0)


def test_a_closed_repository_leaves_one_sound_backup_of_all_of_it(folder: Path) -> None:
    with datastates.open(folder, config=QUIET) as repo:
        uids = train(repo)
        assert not (folder / "packs" / BACKUP).exists()
    assert damage_of(folder / "packs" / BACKUP) is None
    assert states_in(folder / "packs" / BACKUP) == set(uids)
    with datastates.open(folder, config=QUIET) as repo:
        repo.tag("kept", "main")
    with closing(sqlite3.connect(folder / "packs" / BACKUP)) as found:
        assert ("kept",) in found.execute("SELECT name FROM ref").fetchall()
    assert [path.name for path in (folder / "packs").iterdir() if "backup" in path.name] == [BACKUP]


@pytest.mark.usefixtures("often")
def test_a_backup_is_made_while_a_training_goes_on(folder: Path) -> None:
    with datastates.open(folder, config=QUIET) as repo:
        uids = train(repo)
        until = 500
        while until and not (
            (folder / "packs" / BACKUP).exists()
            and set(uids) <= states_in(folder / "packs" / BACKUP)
        ):
            until -= 1
            train(repo, 1, "other")
        assert until


def test_nothing_is_written_if_nothing_was_recorded(folder: Path) -> None:
    with datastates.open(folder, config=QUIET) as repo:
        train(repo)
        back_up(repo.core.database, repo.location)
        before = (folder / "packs" / BACKUP).stat().st_ino
        back_up(repo.core.database, repo.location)
        assert (folder / "packs" / BACKUP).stat().st_ino == before
        repo.tag("new", "main")
        back_up(repo.core.database, repo.location)
        assert (folder / "packs" / BACKUP).stat().st_ino != before


@pytest.mark.usefixtures("often")
def test_a_folder_without_room_for_a_backup_is_said_once_and_training_goes_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    with datastates.open(folder, config=QUIET) as repo:
        train(repo)
    before = (folder / "packs" / BACKUP).read_bytes()
    monkeypatch.setattr(backup, "_copy", refuse)
    with datastates.open(folder, config=QUIET) as repo:
        for _ in range(10):
            train(repo, 2)
    said = [text for text in caplog.messages if "not backed up" in text]
    assert len(said) == 1
    assert "disk is full" in said[0]
    assert (folder / "packs" / BACKUP).read_bytes() == before


_KILLED = """
import os, sys
import torch
import datastates
from datastates.maintenance import backup
kind = sys.argv[2]
end = lambda *_, **__: os._exit(9)
if kind == "written":
    backup.os.fsync = end
elif kind == "renamed":
    rename = os.rename
    backup.os.rename = lambda *paths: (rename(*paths), end())
elif kind == "half":
    real = backup._copy
    def copy(source, packs, at):
        (packs / ".lineage.backup").write_bytes(b"SQLite format 3\\0 and no more")
        end()
    backup._copy = copy
with datastates.open(sys.argv[1]) as repo:
    repo.tag("late", "main")
"""


@pytest.mark.parametrize("kind", ["half", "written", "renamed"])
def test_a_backup_that_is_killed_leaves_a_usable_one(folder: Path, kind: str) -> None:
    with datastates.open(folder, config=QUIET) as repo:
        uids = train(repo)
    done = warm.run(
        [sys.executable, "-c", _KILLED, str(folder), kind],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 9, done.stderr
    assert damage_of(folder / "packs" / BACKUP) is None
    assert states_in(folder / "packs" / BACKUP) == set(uids)
    with datastates.open(folder, config=QUIET) as repo:
        train(repo, 1)
        repo.tag("later", "main")
    lose(folder)
    assert datastates.reindex(folder).tags == 2
    assert [path.name for path in (folder / "packs").iterdir() if "back" in path.name] == [BACKUP]


def test_a_kill_at_any_moment_of_a_backup_leaves_a_usable_one_or_none(folder: Path) -> None:
    program = (
        "import sys, datastates\n"
        "from datastates.maintenance.backup import back_up\n"
        "repo = datastates.open(sys.argv[1])\n"
        "print('ready', flush=True)\n"
        "number = 0\n"
        "while True:\n"
        "    number += 1\n"
        "    repo.tag(f't{number}-{sys.argv[2]}', 'main')\n"
        "    back_up(repo.core.database, repo.location)\n"
    )
    with datastates.open(folder, config=QUIET) as repo:
        train(repo)
    (folder / "packs" / BACKUP).unlink()
    for turn in range(3):
        child = subprocess.Popen(
            [sys.executable, "-c", program, str(folder), str(turn)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert child.stdout is not None
        with child.stdout as said:
            assert said.readline() == "ready\n"
            try:
                child.wait(0.02 + 0.031 * turn)
            except subprocess.TimeoutExpired:
                child.kill()
        child.wait()
        if (folder / "packs" / BACKUP).exists():
            assert damage_of(folder / "packs" / BACKUP) is None
    with datastates.open(folder, config=QUIET) as repo:
        train(repo, 1)
    assert damage_of(folder / "packs" / BACKUP) is None


def test_two_processes_share_one_backup(folder: Path) -> None:
    with datastates.open(folder, config=QUIET) as first, datastates.open(folder) as second:
        uids = train(first, 2, "one") + train(second, 2, "two")
        back_up(first.core.database, first.location)
        before = (folder / "packs" / BACKUP).stat().st_ino
        back_up(second.core.database, second.location)
        assert (folder / "packs" / BACKUP).stat().st_ino == before
    assert states_in(folder / "packs" / BACKUP) == set(uids)


def test_the_backup_of_a_lineage_that_was_restored_from_an_older_copy_is_kept(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with datastates.open(folder, config=QUIET) as repo:
        train(repo)
    shutil.copy(folder / DATABASE, folder.parent / "copy.db")
    with datastates.open(folder, config=QUIET) as repo:
        train(repo, 2, "late")
        repo.tag("newer", "late")
    lose(folder)
    shutil.copy(folder.parent / "copy.db", folder / DATABASE)
    with datastates.open(folder, config=QUIET) as repo:
        other = train(repo, 2, "other")
    assert "lacks what its backup has" in caplog.text
    report = datastates.reindex(folder, replace=True)
    with datastates.open(folder, config=QUIET) as repo:
        assert repo.state("newer").uid == repo.state("late").uid
        assert repo.state("other").uid == other[-1]
        assert any("newer" in text for text in report.lacking)
    assert damage_of(folder / "packs" / BACKUP) is None
    assert set(other) <= states_in(folder / "packs" / BACKUP)


def test_states_newer_than_the_backup_come_from_their_manifests(folder: Path) -> None:
    with datastates.open(folder, config=QUIET) as repo:
        first = train(repo)
        repo.tag("kept", "main")
    shutil.copy2(folder / "packs" / BACKUP, folder.parent / "older")
    with datastates.open(folder, config=QUIET) as repo:
        second = train(repo, 3)
        repo.tag("lost", "main")
    lose(folder)
    shutil.copy2(folder.parent / "older", folder / "packs" / BACKUP)
    report = datastates.reindex(folder)
    assert report.states == report.restorable == 5
    assert "3 states are newer" in report.lacking[0]
    assert "tags, notes" in report.lacking[0]
    with datastates.open(folder, config=QUIET) as repo:
        assert [state.uid for state in repo.log("main")] == [*second[::-1], *first[::-1]]
        assert repo.state("kept").uid == first[-1]
        assert "lost" not in [ref.name for ref in repo.refs()]
        (found,) = [each for each in repo.overview() if each.name == "main"]
        assert found.states == 5
        assert not repo.verify().damage
        train(repo, 1)


def test_a_damaged_backup_is_said_and_manifests_are_used(folder: Path) -> None:
    with datastates.open(folder, config=QUIET) as repo:
        uids = train(repo)
    path = folder / "packs" / BACKUP
    data = bytearray(path.read_bytes())
    data[4096 * 3 : 4096 * 20] = os.urandom(4096 * 17)
    path.write_bytes(data)
    with datastates.open(folder, config=QUIET) as repo:
        assert any(BACKUP in text for text in repo.verify().unread)
    lose(folder)
    report = datastates.reindex(folder)
    assert "damaged" in report.lacking[0]
    assert report.states == 2
    assert (folder / "packs" / f"{BACKUP}.damaged").read_bytes() == data
    assert states_in(path) == set(uids)


def test_a_sound_database_is_rebuilt_from_itself(folder: Path) -> None:
    """What it has and its backup has not stays."""
    with datastates.open(folder, config=QUIET) as repo:
        train(repo)
    older = (folder / "packs" / BACKUP).read_bytes()
    with datastates.open(folder, config=QUIET) as repo:
        repo.notes.write("Since then.", state="main")
    (folder / "packs" / BACKUP).write_bytes(older)
    report = datastates.reindex(folder, replace=True)
    assert (report.notes, report.lacking) == (1, ())


@pytest.fixture
def killed(folder: Path) -> Path:
    """A folder whose training was killed after its backup, with a state in memory only."""
    program = (
        "import os, sys, torch, datastates\n"
        "from datastates.maintenance.backup import back_up\n"
        "repo = datastates.open(sys.argv[1], config=datastates.Config(durable_interval_s=None))\n"
        "run = repo.track(weight=torch.zeros(3), rng=False)\n"
        "run.capture().wait('durable')\n"
        "run.capture().wait()\n"
        "back_up(repo.core.database, repo.location)\n"
        "os._exit(9)\n"
    )
    done = warm.run(
        [sys.executable, "-c", program, str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 9, done.stderr
    return folder


def test_a_training_that_the_backup_does_not_see_end_is_over(killed: Path) -> None:
    lose(killed)
    report = datastates.reindex(killed)
    assert "trainings had not ended" in report.lacking[0]
    assert any("went back" in text for text in report.lacking)
    with datastates.open(killed, config=QUIET) as repo:
        assert repo.state("main").step == 1
        assert all(run.finished_at for run in repo.runs())
        assert repo.track(weight=torch.zeros(3), rng=False).step == 1
