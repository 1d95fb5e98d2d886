"""Making room beside whatever goes on: what the lineage counts on stays, and what nobody needs
goes."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import datastates
from datastates import Config, Conflict, Repository, Unavailable
from datastates.files.bundle import export_bundle, import_bundle
from datastates.lineage.states import Status
from datastates.maintenance.retention_pass import evict
from datastates.storage.local import LocalTier
from datastates.testing import fail_at
from datastates.testing.states import small
from tests.support import warm

QUIET = Config(memory_bytes=64 << 20, durable_interval_s=None)
ROOT = Path(__file__).parents[2]


def trained(folder: Path, count: int = 4) -> list[str]:
    """The uids of some durable states of one branch that share a tensor."""
    frozen, weight = torch.arange(40_000.0), torch.zeros(30_000)
    with (
        datastates.open(folder, config=QUIET) as repo,
        repo.track(objects={"frozen": frozen}, weight=weight) as run,
    ):
        uids = []
        for _ in range(count):
            weight += 1
            uids.append(run.capture(metrics={"loss": 0.5}).wait("durable").uid)
        return uids


@pytest.fixture
def repo(tmp_path: Path) -> Iterator[Repository]:
    trained(tmp_path / "runs")
    with datastates.open(tmp_path / "runs", config=QUIET) as opened:
        yield opened


def files(repo: Repository) -> int:
    return sum(path.stat().st_size for path in repo.location.packs.glob("*.safetensors"))


def check(repo: Repository, count: int) -> None:
    """The newest states restore, each with its own values."""
    for state in repo.log("main", limit=count):
        tree = repo.load(state)
        assert tree["weight"][0] == state.step
        assert torch.equal(tree["frozen"], torch.arange(40_000.0))


def test_what_an_eviction_that_was_killed_left_is_deleted(repo: Repository, tmp_path: Path) -> None:
    uids = [state.uid for state in repo.log("main")]
    with pytest.MonkeyPatch.context() as patch:
        # killed after the lineage was told
        patch.setattr(type(repo.core.tiers.durable), "remove", lambda tier, uid: 0)
        for uid in uids[2:]:
            evict(repo.core, uid)
    before = files(repo)
    planned = repo.gc(dry_run=True)
    assert files(repo) == before
    done = repo.gc()
    assert sorted(done.states) == sorted(planned.states) == sorted(uids[2:])
    assert not done.left
    assert before - files(repo) == done.bytes_packs + done.bytes_rewritten > 0
    check(repo, 2)
    assert repo.state(uids[3]).status is Status.EVICTED
    assert repo.state(uids[3]).metrics == {"loss": 0.5}
    assert repo.gc().bytes_freed == 0


def test_states_that_the_lineage_does_not_know_stay_and_are_said(
    repo: Repository,
) -> None:
    LocalTier(repo.location.packs).put(small("f" * 24, 1))
    done = repo.gc()
    assert done.bytes_freed == 0
    assert "f" * 24 in done.left[0]


def test_states_that_nobody_knows_are_deleted_when_that_is_asked_for(
    tmp_path: Path,
) -> None:
    """What the backup knows stays: the database may have been restored from an older copy."""
    folder = tmp_path / "runs"
    trained(folder)
    shutil.copy(folder / "lineage.db", tmp_path / "older.db")
    with (
        datastates.open(folder, config=QUIET) as repo,
        repo.track(branch="late", weight=torch.zeros(5)) as run,
    ):
        late = run.capture().wait("durable").uid
    shutil.copy(tmp_path / "older.db", folder / "lineage.db")
    LocalTier(folder / "packs").put(small("f" * 24, 1))
    with datastates.open(folder, config=QUIET) as repo:
        with datastates.open(folder, config=QUIET) as other:
            other.track(weight=torch.zeros(5), branch="busy")
            with pytest.raises(Conflict, match="1 processes are at work"):
                repo.gc(unknown=True)
        planned, done = repo.gc(dry_run=True, unknown=True), repo.gc(unknown=True)
        assert planned.states == done.states == ("f" * 24,)
        assert late in done.left[0]
        assert not list((folder / "packs").glob("f" * 24 + "*"))


def test_an_import_of_evicted_states_loses_no_file_to_a_collection(
    repo: Repository, tmp_path: Path
) -> None:
    """Their files are there before the lineage is told, which still calls them evicted."""
    uid = repo.log("main")[-1].uid
    export_bundle(repo, [uid], tmp_path / "bundle")
    evict(repo.core, uid)
    asked: list[threading.Thread] = []

    def collect() -> None:
        with datastates.open(tmp_path / "runs", config=QUIET) as second:
            second.gc()

    def on_step(step: str) -> None:
        if step == "manifest-renamed":
            asked.append(thread := threading.Thread(target=collect))
            thread.start()
            thread.join(0.5)  # as long as it is to try

    tier = repo.core.tiers.durable
    assert isinstance(tier, LocalTier)
    tier._on_step = on_step
    import_bundle(repo, tmp_path / "bundle")
    asked[0].join()
    assert repo.state(uid).status is Status.DURABLE
    assert repo.load(uid)["weight"][0] == 1


def test_a_repository_that_can_only_be_read_is_looked_at_and_not_collected(
    repo: Repository,
) -> None:
    (repo.location.packs / "stray.0.safetensors").write_bytes(bytes(100))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(repo.core, "home", replace(repo.core.home, read_only="as asked for"))
        with pytest.raises(Unavailable, match="can only be read: as asked for"):
            repo.gc()
        assert repo.gc(dry_run=True).bytes_freed == 100
    assert repo.gc().bytes_freed == 100


_CAPTURING = """
import sys
import torch, datastates
from datastates import Config
folder, branch, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
weight = torch.zeros(30_000)
with datastates.open(folder, config=Config(memory_bytes=32 << 20, durable_interval_s=None)) as repo:
    with repo.track(branch=branch, weight=weight) as run:
        for _ in range(count):
            weight += 1
            run.capture().wait("durable")
            print(run.step, flush=True)
"""


def test_collections_beside_two_captures_and_a_reader_lose_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    uids = trained(folder)
    commands = [
        [sys.executable, "-c", _CAPTURING, str(folder), branch, "12"] for branch in ("one", "two")
    ]
    processes = [
        warm.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for command in commands
    ]
    with datastates.open(folder, config=QUIET) as repo:
        with repo.core.open_payload(repo.state(uids[1])) as reader:
            evict(repo.core, uids[1])
            rounds = 0
            for uid in (uids[0], uids[2]):
                evict(repo.core, uid)
            while any(process.poll() is None for process in processes) or rounds < 3:
                assert not repo.gc().left
                check(repo, 1)
                rounds += 1
            reader.verify()
        assert [process.wait() for process in processes] == [0, 0]
        for process in processes:
            assert process.stdout is not None
            process.stdout.close()
        repo.gc()
        for branch in ("one", "two"):
            for state in repo.log(branch):
                assert repo.load(state)["weight"][0] == state.step
        check(repo, 1)


_KILLED = """
import sys
import datastates
from datastates import Config
from datastates.testing import crash_at
with datastates.open(sys.argv[1], config=Config(memory_bytes=32 << 20, durable_interval_s=None, on_step=crash_at(sys.argv[2]))) as repo:
    repo.gc()
"""


@pytest.mark.parametrize("step", ["manifest-removed", "pack-moved", "manifest-replaced"])
def test_a_collection_that_is_killed_loses_nothing_that_the_lineage_counts_on(
    tmp_path: Path, step: str
) -> None:
    # the weights of the first state, and what it shares: half and more goes
    frozen, weight = (
        torch.arange(1_200_000.0),
        torch.zeros(1_500_000),
    )
    with (
        datastates.open(tmp_path / "runs", config=QUIET) as repo,
        repo.track(objects={"frozen": frozen}, weight=weight, rng=False) as run,
    ):
        for _ in range(3):
            weight += 1
            run.capture().wait("durable")
    with (
        datastates.open(tmp_path / "runs", config=QUIET) as repo,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(type(repo.core.tiers.durable), "remove", lambda tier, uid: 0)
        uid = repo.log("main")[-1].uid
        evict(repo.core, uid)
    done = warm.run(
        [sys.executable, "-c", _KILLED, str(tmp_path / "runs"), step],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 137, done.stderr
    with datastates.open(tmp_path / "runs", config=QUIET) as repo:
        assert not repo.verify().damage
        repo.gc()
        assert not repo.verify().damage
        assert f"{uid}.0.safetensors" not in {path.name for path in repo.location.packs.iterdir()}
        for state in repo.log("main", limit=2):
            tree = repo.load(state)
            assert (tree["weight"] == state.step).all()
            assert torch.equal(tree["frozen"], frozen)


def test_a_disk_that_is_full_frees_what_needs_no_room(tmp_path: Path) -> None:
    uids = trained(tmp_path / "runs")
    with datastates.open(tmp_path / "runs", config=QUIET) as repo:
        evict(repo.core, uids[0])
    full = Config(memory_bytes=64 << 20, durable_interval_s=None, on_step=fail_at("pack-moved"))
    with datastates.open(tmp_path / "runs", config=full) as repo:
        first = repo.gc()
        check(repo, 2)
        second = repo.gc()
        check(repo, 2)
        assert first.rewritten == 0 or not first.left
        assert second.left == ()
