"""A lineage rebuilt from its folder alone: what was, as far as the folder was told of it; and
said what it was not told."""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch

import datastates
from datastates import Config, Conflict, NotFound, Repository, State
from datastates.lineage.states import RefKind, Status
from datastates.lineage.write.clones import Move
from datastates.maintenance.backup import BACKUP
from datastates.maintenance.location import DATABASE
from datastates.maintenance.reindex import added_by
from datastates.maintenance.retention_pass import evict
from tests.conftest import Postgresql
from tests.support import warm

QUIET = Config(memory_bytes=64 << 20, durable_interval_s=None)
ROOT = Path(__file__).parents[2]


def train(repo: Repository, branch: str, count: int, start: str | None = None) -> list[str]:
    """States of which every second one is durable."""
    weight = torch.zeros(30)
    with repo.track(
        branch=branch, weight=weight, rng=False, config={"lr": 0.5}, durable_every=2, start=start
    ) as run:
        uids = []
        for number in range(count):
            weight += 1
            loss = float("nan") if number == 1 else 1 / (number + 1)
            uids.append(
                run.capture(
                    metrics={"loss": loss}, attributes={"n": number}, message=f"{branch} {number}"
                )
                .wait()
                .uid
            )
        return uids


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """A copy of it, for each test."""
    return Path(shutil.copytree(made, tmp_path / "runs"))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``fill``, done once."""
    folder = tmp_path_factory.mktemp("made") / "runs"
    fill(folder)
    return folder


def fill(folder: Path | str, packs: Path | None = None) -> None:
    """A lineage with two branches, tags, moves, a deleted name, a merge, notes, and states whose
    bytes are gone."""
    with datastates.open(folder, packs=packs, config=QUIET) as repo:
        uids = train(repo, "main", 6)
        repo.tag("warm", uids[3], message="the shared prefix")
        train(repo, "fork", 4, start="warm")
        repo.tag("gone", "main~1")
        repo.delete_ref("gone")
        repo.branch("back", "main")
        repo.move("back", "main~2", expected="main")
        repo.merge(["main", "fork"], only="weight", into="soup")
        repo.notes.write("Diverges.", state="main")
        repo.notes.write("Branch of branches.", branch="fork")
        repo.notes.edit(repo.notes.write("x", state="warm").uid, "edited")
    with datastates.open(folder, packs=packs, config=QUIET) as repo:
        evict(repo.core, uids[1])


def bare(state: State) -> State:
    """What of a state is promised: all of it, but that what is gone is said to be lost or
    evicted, and which bytes were new."""
    status = state.status if state.status.is_restorable else Status.EVICTED
    return replace(state, status=status, bytes_new=0)


def told(folder: Path | str, packs: Path | None = None) -> dict[str, object]:
    """All that is to be the same."""
    with datastates.open(folder, packs=packs, config=QUIET) as repo:
        states = repo.find("step >= 0 order by created")
        names = [*(ref.name for ref in repo.refs()), "gone"]
        return {
            "states": [bare(state) for state in states],
            "refs": repo.refs(),
            "reflogs": {name: repo.reflog(name) for name in names},
            "notes": sorted(repo.notes, key=lambda note: note.uid),
            "graph": sorted(repo.graph().edges),
            "bytes": {
                state.uid: repo.load(state)["weight"].tolist()
                for state in states
                if state.status.is_restorable
            },
            "best": repo.state("main@best:loss").uid,
            "runs": sorted(
                (run.uid, run.config.get("lr"), run.argv, run.branch) for run in repo.runs()
            ),
            "branches": [
                (each.name, each.states, each.best)
                for each in repo.overview("", metric="loss", sort="name")
            ],
        }


def lose(folder: Path) -> None:
    for path in folder.glob(f"{DATABASE}*"):
        path.unlink()


def test_everything_that_was_told_comes_back(folder: Path) -> None:
    before = told(folder)
    lose(folder)
    with pytest.raises(NotFound, match="datastates repair --lineage"):
        datastates.open(folder)
    progress: list[tuple[int, int]] = []
    report = datastates.reindex(folder, on_progress=lambda *each: progress.append(each))
    assert report.lacking == ()
    assert (report.branches, report.tags, report.notes) == (4, 1, 3)
    assert progress[-1] == (report.states, report.states)
    after = told(folder)
    for key in before:
        assert after[key] == before[key], key
    assert before["bytes"]


def test_a_training_goes_on_with_a_lineage_that_was_rebuilt(folder: Path) -> None:
    lose(folder)
    datastates.reindex(folder)
    with datastates.open(folder, config=QUIET) as repo:
        head = repo.state("main")
        weight = torch.zeros(30)
        with repo.track(branch="main", weight=weight, rng=False) as run:
            assert (run.step, float(weight[0])) == (head.step, 6)
            state = run.capture().wait("durable")
        assert state.parents == (head.uid,)
        (branch,) = [each for each in repo.overview() if each.name == "main"]
        assert branch.states == 7
        assert not repo.verify().damage


def test_a_folder_that_was_moved_to_another_place_keeps_all(folder: Path, tmp_path: Path) -> None:
    before = told(folder)
    moved = tmp_path / "elsewhere" / "deep"
    moved.parent.mkdir()
    shutil.move(folder, moved)
    assert told(moved) == before
    lose(moved)
    datastates.reindex(moved)
    assert told(moved) == before


def test_packs_alone_become_a_repository_elsewhere(folder: Path, tmp_path: Path) -> None:
    before = told(folder)
    shutil.copytree(folder / "packs", tmp_path / "new" / "packs")
    datastates.reindex(tmp_path / "new")
    assert told(tmp_path / "new") == before


def test_states_on_a_server_come_back_in_an_empty_database(
    postgresql: Postgresql, tmp_path: Path
) -> None:
    first, second = postgresql.migrated(), postgresql.migrated()
    packs = tmp_path / "packs"
    fill(first, packs)
    before = told(first, packs)
    with pytest.raises(Conflict, match="holds a lineage already"):
        datastates.reindex(first, packs=packs)
    assert datastates.reindex(first, packs=packs, replace=True).lacking == ()
    assert told(first, packs) == before
    with datastates.open(first, packs=packs, config=QUIET) as repo:
        durable = [each.uid for each in repo.find("step >= 0") if each.status.is_restorable]
        heads = [repo.state(name).uid for name in ("main", "fork")]
    assert "no backup" in datastates.reindex(second, packs=packs).lacking[0]
    with datastates.open(second, packs=packs, config=QUIET) as repo:
        assert [state.uid for state in repo.find("step >= 0")] == durable
        assert [repo.state(name).uid for name in ("main", "fork")] == heads
        evict(repo.core, one := repo.state("main~1").uid)
        assert repo.gc().left == ()
        assert repo.state(one).status is Status.EVICTED
        assert not repo.verify().damage
    for url in (first, second):
        postgresql.give_back(url)


def test_a_lineage_that_is_there_is_kept_unless_it_is_to_be_replaced(folder: Path) -> None:
    before = told(folder)
    with pytest.raises(Conflict, match="replace"):
        datastates.reindex(folder)
    report = datastates.reindex(folder, replace=True)
    assert report.replaced is not None
    assert Path(report.replaced).is_file()
    assert told(folder) == before
    assert {path.name for path in folder.iterdir()} >= {DATABASE, "packs", f"{DATABASE}.replaced-1"}


def test_a_lineage_older_than_its_folder_gets_what_it_lacks(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    copy = folder.parent / "copy.db"
    shutil.copy(folder / DATABASE, copy)
    with datastates.open(folder, config=QUIET) as repo:
        train(repo, "late", 4)
        repo.tag("newer", "late")
    before = told(folder)
    lose(folder)
    shutil.copy(copy, folder / DATABASE)
    with datastates.open(folder, config=QUIET) as repo:
        repo.gc()
        with repo.track(branch="other", weight=torch.zeros(3), rng=False):
            pass
    assert "lacks what its backup has" in caplog.text
    with datastates.open(folder, config=QUIET) as repo:
        assert any("does not know" in text for text in repo.gc().left)
    datastates.reindex(folder, replace=True)
    after = told(folder)
    assert after["refs"] == before["refs"]
    assert after["states"] == before["states"]


def test_a_folder_without_a_backup_tells_what_its_manifests_have(folder: Path) -> None:
    with datastates.open(folder, config=QUIET) as repo:
        durable = {
            state.uid: bare(state) for state in repo.find("step >= 0") if state.status.is_restorable
        }
        head = repo.state("main").uid
    lose(folder)
    (folder / "packs" / BACKUP).unlink()
    report = datastates.reindex(folder)
    assert "no backup" in report.lacking[0]
    assert "name a parent that is not known" in report.lacking[1]
    with datastates.open(folder, config=QUIET) as repo:
        found = {state.uid: state for state in repo.find("step >= 0")}
        assert found.keys() == durable.keys()
        for uid, state in durable.items():
            for name in ("digest", "step", "attributes", "message", "created_at", "run"):
                assert getattr(found[uid], name) == getattr(state, name)
            assert repr(found[uid].metrics) == repr(state.metrics)
        assert repo.state("main").uid == head
        steps = sorted(
            (
                state.step
                for state in durable.values()
                if state.message and state.message.startswith("main")
            ),
            reverse=True,
        )
        assert [state.step for state in repo.log("main")] == steps
        assert 2 not in steps, (
            "what was evicted is not known, and its child hangs on to the one before"
        )
        assert repo.load("main")["weight"][0] == 6
        weight = torch.zeros(30)
        with repo.track(branch="main", weight=weight, rng=False):
            assert weight[0] == 6


def test_a_clock_that_jumped_back_changes_neither_ancestry_nor_heads(tmp_path: Path) -> None:
    """Of the last states only manifests tell, and they say that they are older than what came
    before them."""
    folder = tmp_path / "runs"
    weight = torch.zeros(3)
    with datastates.open(folder, config=QUIET) as repo, repo.track(weight=weight, rng=False) as run:
        uids = [run.capture().wait("durable").uid for _ in range(4)]
        manifests = {(uid, 0): repo.core.tiers.durable.manifest(uid) for uid in uids}
    for number, uid in enumerate(uids):
        manifest = manifests[uid, 0]
        origin = msgspec.structs.replace(manifest.origin, created_at_us=1_000_000 - number)
        manifests[uid, 0] = msgspec.structs.replace(manifest, origin=origin)
    alone = added_by(manifests, set(), {})
    assert [new.uid for new in alone.states] == uids
    assert alone.moves[-1].new == uids[-1]
    first = Move("main", RefKind.BRANCH, None, uids[0], 2_000_000)
    together = added_by(manifests, {uids[0]}, {"main": first})
    assert [move.new for move in together.moves] == uids[1:]
    assert [new.facts.parent for new in together.states] == uids[:-1]


def test_a_folder_that_lost_its_identity_gets_one_under_which_its_states_are_known(
    folder: Path,
) -> None:
    """As when it was brought here by a program that leaves out hidden files."""
    packs = folder / "packs"
    (packs / ".identity").unlink()
    lose(folder)
    datastates.reindex(folder)
    with datastates.open(folder, config=QUIET) as repo:
        durable = [state.uid for state in repo.find("step >= 0") if state.status is Status.DURABLE]
        (packs / f"{durable[0]}.0.manifest").unlink()
        assert repo.verify().hurt == (durable[0],)
        assert repo.prune("latest:1", dry_run=True).dropped


def test_nothing_is_rebuilt_under_a_training_that_goes_on(folder: Path) -> None:
    with datastates.open(folder, config=QUIET) as repo:
        repo.track(branch="main", weight=torch.zeros(30), rng=False)
        with pytest.raises(Conflict, match="a training or a server uses"):
            datastates.reindex(folder, replace=True)


def test_a_folder_that_is_none_is_refused_and_nothing_is_made(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no folder of packs"):
        datastates.reindex(tmp_path / "nothing")
    assert not (tmp_path / "nothing").exists()


_KILLED = """
import os, sys
import datastates
from datastates.maintenance import reindex as module
kind = sys.argv[2]
if kind == "midway":
    datastates.reindex(sys.argv[1], replace=True, on_progress=lambda done, total: os._exit(9))
elif kind == "written":
    module.sync_folder = lambda path: None
    module._put_aside = lambda path: os._exit(9)
    datastates.reindex(sys.argv[1], replace=True)
elif kind == "aside":
    os.rename = lambda *paths, rename=os.rename: os._exit(9) if str(paths[1]).endswith("lineage.db") else rename(*paths)
    datastates.reindex(sys.argv[1], replace=True)
"""


@pytest.mark.parametrize("kind", ["midway", "written", "aside"])
def test_a_rebuilding_that_is_killed_can_be_done_again(folder: Path, kind: str) -> None:
    before = told(folder)
    done = warm.run(
        [sys.executable, "-c", _KILLED, str(folder), kind],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 9, done.stderr
    if kind != "aside":
        assert told(folder) == before, "the lineage that was there is untouched"
    datastates.reindex(folder, replace=True)
    assert told(folder) == before
    assert not list(folder.glob(".reindex*"))


def test_an_argument_of_the_command_line_that_is_no_text_keeps_nothing_from_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # a file's name in another encoding, as a shell hands it over
    name = os.fsdecode(b"caf\xe9.txt")
    monkeypatch.setattr(sys, "argv", ["train.py", name])
    with datastates.open(tmp_path / "runs", config=QUIET) as repo:
        train(repo, "main", 2)
    (tmp_path / "runs" / DATABASE).unlink()
    datastates.reindex(tmp_path / "runs")
    with datastates.open(tmp_path / "runs", config=QUIET) as repo:
        assert repo.state("main").step == 2
        assert {run.argv for run in repo.runs()} == {("train.py", "caf\\udce9.txt")}


def test_metrics_that_were_added_later_come_back(folder: Path) -> None:
    with datastates.open(folder, config=QUIET) as repo:
        uid = repo.annotate("main~1", metrics={"test": 0.25}, attributes={"seen": True}).uid
        repo.annotate("main~1", metrics={"loss": 0.75}, replace=True, author="ann")
        before, log = repo.state(uid), [event.reason for event in repo.reflog(uid)]
    datastates.reindex(folder, replace=True)
    with datastates.open(folder, config=QUIET) as repo:
        after = repo.state(uid)
        assert (after.metrics, after.attributes) == (before.metrics, before.attributes)
        assert after.metrics["test"] == 0.25
        assert [event.reason for event in repo.reflog(uid)] == log
        assert repo.state("main@best:test").uid == uid
        assert uid not in [ref.name for ref in repo.refs()]
