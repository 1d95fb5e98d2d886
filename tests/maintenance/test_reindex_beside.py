"""A lineage is rebuilt beside others: whoever has it open, other rebuildings, gc, repair, a
training; and whoever is killed at it."""

from __future__ import annotations

import os
import random
import shutil
import sys
import time
from pathlib import Path

import pytest
import torch

import datastates
from datastates import Config, Conflict
from datastates.lineage import sqlite_files
from datastates.lineage.database import Database
from datastates.maintenance.location import DATABASE
from tests.support import warm
from tests.support.at_once import errors_of, release

QUIET = Config(memory_bytes=16 << 20, durable_interval_s=None)
ROOT = Path(__file__).parents[2]
DEEDS = """
import sys
import torch
import datastates
from datastates import Config, Conflict, Unavailable
folder, deed = sys.argv[1:]
print("ready", flush=True)
sys.stdin.readline()
try:
    if deed == "reindex":
        datastates.reindex(folder, replace=True)
    else:
        with datastates.open(folder, config=Config(memory_bytes=16 << 20, durable_interval_s=None)) as repo:
            if deed == "train":
                with repo.track(branch="beside", weight=torch.ones(30), rng=False, durable_every=1) as run:
                    for _ in range(3):
                        run.capture().wait("durable")
            else:
                getattr(repo, deed)()
except (Conflict, Unavailable) as exc:
    print(type(exc).__name__, exc, file=sys.stderr)
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight states, a tag and a note; the older four share a pack of which little is needed."""
    folder = tmp_path_factory.mktemp("made") / "runs"
    frozen, weight = torch.randn(70_000), torch.zeros(70_000)
    with (
        datastates.open(folder, config=QUIET) as repo,
        repo.track(objects={"frozen": frozen}, weight=weight, rng=False, durable_every=1) as run,
    ):
        for number in range(8):
            weight += 1
            run.capture(metrics={"loss": 1 / (1 + number)}).wait("durable")
        repo.tag("warm", "main~2")
        repo.notes.write("x", state="warm")
    with datastates.open(folder, config=QUIET) as repo:
        repo.prune("latest:3")
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "runs"))


def told(folder: Path) -> dict[str, object]:
    with datastates.open(folder, config=QUIET) as repo:
        assert not repo.verify().damage
        return {
            "states": [
                (state.uid, state.digest, state.metrics, state.parents)
                for state in repo.log("main")
            ],
            "refs": [(ref.name, ref.state) for ref in repo.refs() if ref.name != "beside"],
            "notes": [note.text for note in repo.notes],
            "bytes": {
                state.uid: repo.load(state)["weight"].sum().item()
                for state in repo.log("main")
                if state.status.is_restorable
            },
        }


def test_nothing_is_replaced_under_a_process_that_has_the_lineage_open(folder: Path) -> None:
    before = (folder / DATABASE).stat().st_ino
    with datastates.open(folder, config=QUIET) as repo:
        with pytest.raises(Conflict, match="would go on with what is there now"):
            datastates.reindex(folder, replace=True)
        repo.tag("later", "main")
    assert (folder / DATABASE).stat().st_ino == before
    assert datastates.reindex(folder, replace=True).tags == 2


def test_whoever_opens_it_meanwhile_keeps_it_as_it_is(folder: Path) -> None:
    opened: list[datastates.Repository] = []

    def come(done: int, total: int) -> None:
        if not opened:
            opened.append(datastates.open(folder, config=QUIET))

    with pytest.raises(Conflict, match="would go on with what is there now"):
        datastates.reindex(folder, replace=True, on_progress=come)
    opened[0].tag("later", "main")
    opened[0].close()
    assert not list(folder.glob(".reindex*"))
    assert datastates.reindex(folder, replace=True).tags == 2


def test_what_somebody_wrote_meanwhile_is_not_lost(folder: Path) -> None:
    def write(done: int, total: int) -> None:
        with datastates.open(folder, config=QUIET) as repo:
            if "later" not in [ref.name for ref in repo.refs()]:
                repo.tag("later", "main")

    with pytest.raises(Conflict, match="written to meanwhile"):
        datastates.reindex(folder, replace=True, on_progress=write)
    with datastates.open(folder, config=QUIET) as repo:
        assert repo.state("later").uid == repo.state("main").uid


def has_open(pid: int, path: Path) -> bool:
    with os.scandir(f"/proc/{pid}/fd") as entries:
        return any(
            Path(os.readlink(entry.path)) == path
            for entry in entries
            if os.path.lexists(entry.path)
        )


def test_who_opens_a_lineage_while_it_is_replaced_gets_the_new_one_or_is_told(folder: Path) -> None:
    database, new = folder / DATABASE, folder / "new.db"
    Database(f"sqlite:///{new}").close()
    number = new.stat().st_ino
    code = """
import os, sys
from datastates.lineage.database import Database
base = Database(sys.argv[1])
with base.read():
    open_files = [os.readlink(entry.path) for entry in os.scandir("/proc/self/fd") if os.path.lexists(entry.path)]
assert not [name for name in open_files if "lineage.db (deleted)" in name], open_files
base.close()
"""
    with sqlite_files.exclusive(database) as is_alone:
        assert is_alone
        child = warm.Popen(
            [sys.executable, "-c", code, f"sqlite:///{database}"], stderr=-1, cwd=ROOT
        )
        while not has_open(child.pid, database):
            assert child.poll() is None
            time.sleep(0.01)
        os.rename(new, database)
    said = child.communicate(timeout=60)[1]
    assert child.returncode == 0 or "was replaced while it was opened" in said
    assert database.stat().st_ino == number


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_what_root_rebuilds_and_repairs_stays_the_owners(folder: Path) -> None:
    owner = 12345
    for path in [folder, *folder.rglob("*")]:
        os.chown(path, owner, owner)
    datastates.reindex(folder, replace=True)
    with datastates.open(folder, config=QUIET) as repo:
        repo.gc()
        repo.repair()
        repo.tag("later", "main")
        with repo.track(branch="other", weight=torch.ones(3), rng=False) as run:
            run.capture().wait("durable")
    foreign = [
        path
        for path in folder.rglob("*")
        if path.stat().st_uid != owner and path.name != ".identity"
    ]
    assert foreign == []


PAIRS = [
    *(
        ("reindex", "reindex"),
        ("reindex", "gc"),
        ("reindex", "repair"),
        ("reindex", "train"),
        ("gc", "gc"),
        ("gc", "repair"),
    ),
    *(("repair", "repair"), ("gc", "train"), ("repair", "train")),
]


@pytest.mark.parametrize("is_killed", [False, True], ids=["both end", "the first is killed"])
@pytest.mark.parametrize("deeds", PAIRS, ids=["beside ".join(pair) for pair in PAIRS])
def test_two_at_once_lose_nothing(folder: Path, deeds: tuple[str, str], is_killed: bool) -> None:
    before = told(folder)
    children = [
        warm.Popen(
            [sys.executable, "-c", DEEDS, str(folder), deed],
            stdin=-1,
            stdout=-1,
            stderr=-1,
            cwd=ROOT,
        )
        for deed in deeds
    ]
    if is_killed:
        release(children)
        time.sleep(random.Random("/".join(deeds)).uniform(0.02, 0.4))
        children[0].kill()
        assert children[1].wait(120) == 0, children[1].communicate()[1]
        for child in children:
            child.communicate(timeout=60)
    else:
        assert [status for _, status in errors_of(children)] == [0, 0]
    for deed in deeds:
        if deed == "reindex":
            datastates.reindex(folder, replace=True)
    assert told(folder) == before
    assert not list(folder.glob(".reindex*"))
