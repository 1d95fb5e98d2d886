"""Pruning a repository: what goes, what stays, and that whatever stays restores as it was."""

from __future__ import annotations

import errno
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import datastates
from datastates import Config, Repository, State
from datastates.errors import Conflict, InvalidInput, Unavailable
from datastates.lineage.states import Status
from datastates.lineage.write import replicas
from datastates.maintenance import retention_pass
from datastates.maintenance.retention_pass import evict, usage
from datastates.system.files import FileLock, hold
from datastates.testing import fail_at

EACH = Config(
    memory_bytes=64 << 20,
    durable_every=1,
    durable_interval_s=None,
    retention=datastates.Retention.all(),
)


class Counting:
    """A training whose weights say at which step it is."""

    def __init__(self, folder: Path, config: Config = EACH, **options: object) -> None:
        self.repo = datastates.open(folder, config=config)
        self.model = nn.Linear(4, 4)
        torch.nn.init.zeros_(self.model.weight)
        # they are passed on
        self.run = self.repo.track(model=self.model, **options)  # type: ignore[arg-type]

    def go(self, count: int) -> list[State]:
        """So many steps, each of them durable."""
        taken = []
        for _ in range(count):
            with torch.no_grad():
                self.model.weight.add_(1)
            step = self.run.step + 1
            taken.append(
                self.run.capture(metrics={"loss": abs(step - 20), "accuracy": min(step, 10)}).wait(
                    "durable", timeout_s=60
                )
            )
        return taken


@pytest.fixture
def training(tmp_path: Path) -> Iterator[Counting]:
    """Its repository is closed in the end."""
    made = Counting(tmp_path / "runs")
    yield made
    made.repo.close()


def steps(repo: Repository, status: Status = Status.DURABLE, rev: str = "main") -> list[int]:
    """The steps of a branch that have a status, oldest first."""
    return sorted(state.step for state in repo.log(rev) if state.status is status)


def assert_whole(repo: Repository, rev: str = "main") -> None:
    """Each state of a branch that is on disk restores as it was."""
    for state in repo.log(rev):
        if state.status is Status.DURABLE:
            repo.verify(state)
            assert torch.equal(
                repo.load(state)["model"]["weight"], torch.full((4, 4), float(state.step))
            )


def test_what_no_rule_keeps_is_evicted_and_all_else_restores(training: Counting) -> None:
    made, repo = training.go(30), training.repo
    repo.tag("warm", made[4])
    repo.branch("side", made[6])
    planned = repo.prune("latest:2 best:2:loss every:10", dry_run=True)
    assert len(steps(repo)) == 30, "a dry run drops nothing"
    done = repo.prune("latest:2 best:2:loss every:10")
    assert planned.dropped == done.dropped
    assert (planned.bytes_freed, planned.is_dry_run, done.is_dry_run) == (
        done.bytes_freed,
        True,
        False,
    )
    assert steps(repo) == [1, 5, 7, 10, 20, 21, 29, 30]
    assert_whole(repo)
    assert {each.reason for each in done.dropped} == {
        "no rule of 'latest:2 best:2:loss every:10' keeps it"
    }
    assert done.kept["what tag 'warm' names"] == done.kept["the head of branch 'side'"] == 1
    gone = repo.state(made[7].uid)
    assert (gone.metrics, gone.status in (Status.CAPTURED, Status.EVICTED)) == (
        made[7].metrics,
        True,
    )
    assert repo.prune("latest:2 best:2:loss every:10").dropped == ()


def test_progress_is_told_of_what_was_read_and_dropped(training: Counting) -> None:
    training.go(12)
    told = list[tuple[int, int]]()
    usage(training.repo.core, on_progress=lambda done, total: told.append((done, total)))
    assert told == [(12, 12)]
    training.repo.prune(
        "latest:2", dry_run=True, on_progress=lambda done, total: told.append((done, total))
    )
    assert told == [(12, 12)] * 2
    training.repo.prune("latest:2", on_progress=lambda done, total: told.append((done, total)))
    assert told == [*[(12, 12)] * 3, (10, 10)]


def test_files_on_disk_are_those_of_what_stays(training: Counting, tmp_path: Path) -> None:
    training.go(12)
    report = training.repo.prune("latest:3")
    packs = tmp_path / "runs" / "packs"
    files = [*packs.glob("*.safetensors"), *packs.glob("*.manifest")]
    assert sum(path.stat().st_size for path in files) == report.bytes_after
    assert len(list(packs.glob("*.manifest"))) == 3
    assert not (packs / ".prune").exists()


def test_packs_that_kept_states_share_stay(tmp_path: Path) -> None:
    head = nn.Linear(8, 8)
    model = nn.Sequential(nn.Linear(1024, 1200), head)
    with datastates.open(tmp_path / "runs", config=EACH) as repo, repo.track(model=model) as run:
        frozen = model.get_parameter("0.weight").detach().clone()
        for number in range(8):
            with torch.no_grad():
                head.weight.fill_(number)
            run.capture().wait("durable", timeout_s=60)
        first = repo.log("main")[-1]
        report = repo.prune("latest:1")
        assert report.bytes_freed < 1 << 20 < report.bytes_after, (
            "what the first state wrote is needed by the last"
        )
        assert not repo.core.tiers.durable.has(first.uid)
    with datastates.open(tmp_path / "runs") as repo:
        repo.verify("main")
        assert torch.equal(repo.load("main")["model"]["0.weight"], frozen)


def test_newest_durable_state_of_a_branch_stays_though_newer_ones_are_in_memory(
    tmp_path: Path,
) -> None:
    training = Counting(tmp_path / "runs", Config(memory_bytes=64 << 20, durable_interval_s=None))
    with training.repo as repo:
        durable = training.go(3)[-1]
        for _ in range(3):
            training.run.capture()
        repo.flush()
        report = repo.prune("tagged")
        assert report.kept == {"the newest durable state of branch 'main'": 1}
        assert repo.core.tiers.durable.has(durable.uid)


def test_where_a_branch_forked_stays(training: Counting) -> None:
    made, repo = training.go(5), training.repo
    model = nn.Linear(4, 4)
    with repo.track(branch="fork", start=made[2].uid, model=model) as fork:
        fork.capture().wait("durable", timeout_s=60)
    assert repo.prune("tagged").kept["branch 'fork' forks here"] == 1
    assert steps(repo) == [3, 5]


def test_state_whose_handle_somebody_kept_after_waiting_for_it_stays_and_no_longer(
    training: Counting,
) -> None:
    handle = training.run.capture()
    handle.wait("durable", timeout_s=60)
    training.go(5)
    assert (
        training.repo.prune("tagged").kept[
            "this process waited for it to become durable, and has its handle"
        ]
        == 1
    )
    del handle
    assert len(training.repo.prune("tagged").dropped) == 1


def test_dropped_state_in_memory_is_captured_again_and_a_tag_makes_it_durable_again(
    training: Counting,
) -> None:
    made, repo = training.go(4), training.repo
    repo.prune("tagged")
    assert repo.state(made[1].uid).status is Status.CAPTURED
    repo.tag("late", made[1].uid)
    repo.core.drain()
    assert repo.state("late").status is Status.DURABLE
    assert repo.core.tiers.durable.has(made[1].uid)
    assert_whole(repo)


def test_state_in_the_memory_of_another_process_stays(training: Counting, tmp_path: Path) -> None:
    training.go(6)
    with datastates.open(tmp_path / "runs") as other:
        assert other.prune("tagged", dry_run=True).kept["another process has it in memory"] == 5
        assert other.prune("tagged").dropped == ()


def test_two_that_prune_at_once_take_turns_and_drop_everything_once(
    training: Counting, tmp_path: Path
) -> None:
    training.go(40)
    training.run.close()
    training.repo.close()
    reports: list[retention_pass.Pruned] = []

    def prune() -> None:
        with datastates.open(tmp_path / "runs") as repo:
            reports.append(repo.prune("latest:4"))

    threads = [threading.Thread(target=prune) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(len(report.dropped) for report in reports) == [0, 0, 36]
    with datastates.open(tmp_path / "runs") as repo:
        assert steps(repo) == [37, 38, 39, 40]
        assert_whole(repo)


def test_who_waits_too_long_for_another_is_told(
    training: Counting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training.go(2)
    monkeypatch.setattr(retention_pass, "_PATIENCE_S", 0.0)
    held = hold(tmp_path / "runs" / "packs" / ".prune")
    assert held is not None
    with pytest.raises(Unavailable, match="another process has been pruning"):
        training.repo.prune("latest:1")
    assert len(training.repo.prune("latest:1", dry_run=True).dropped) == 1, "to look needs no turn"
    held.close()


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_broken_off_after_a_batch_was_withdrawn_the_next_finishes_it(
    tmp_path: Path, error: type[BaseException]
) -> None:
    training = Counting(tmp_path / "runs")
    training.go(9)
    training.repo.close()
    config = Config(
        on_step=fail_at("manifest-removed", error()), retention=datastates.Retention.all()
    )
    with datastates.open(tmp_path / "runs", config=config) as repo:
        with pytest.raises(error):
            repo.prune("latest:2")
        assert steps(repo) == [8, 9]
        assert_whole(repo)
    with datastates.open(tmp_path / "runs") as repo:
        assert repo.prune("latest:2").dropped == ()
        assert repo.core.tiers.durable.sweep() is not None
        assert len(list((tmp_path / "runs" / "packs").glob("*.safetensors"))) == 2


_KILLED = """
import sys
import datastates
from datastates.testing import crash_at
from datastates.maintenance import retention_pass as retention

def crash(*args: object) -> None:
    import os, signal
    os.kill(os.getpid(), signal.SIGKILL)

folder, where = sys.argv[1:]
retention._BATCH = 3
if where == "withdrawn":
    type(datastates.open(folder).core.tiers.durable).forget = crash
config = datastates.Config(on_step=crash_at("manifest-removed", after=2) if where == "manifest-removed" else None)
datastates.open(folder, config=config).prune("latest:2")
"""


@pytest.mark.parametrize("where", ["withdrawn", "manifest-removed"])
def test_killed_in_the_middle_nothing_kept_is_lost_and_the_next_leaves_no_file_behind(
    tmp_path: Path, where: str
) -> None:
    training = Counting(tmp_path / "runs")
    training.go(14)
    training.repo.close()
    done = subprocess.run(
        [sys.executable, "-c", _KILLED, str(tmp_path / "runs"), where], check=False, timeout=100
    )
    assert done.returncode in (-signal.SIGKILL, 128 + signal.SIGKILL)
    with datastates.open(
        tmp_path / "runs", config=Config(retention=datastates.Retention.all())
    ) as repo:
        assert {13, 14} <= set(steps(repo))
        assert_whole(repo)
        repo.prune("latest:2")
        repo.core.tiers.durable.sweep()
        assert steps(repo) == [13, 14]
        assert_whole(repo)
    packs = tmp_path / "runs" / "packs"
    assert len(list(packs.glob("*.manifest"))) == len(list(packs.glob("*.safetensors"))) == 2


def test_state_that_somebody_brings_again_while_it_is_dropped_keeps_its_files(
    training: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, repo = training.go(5), training.repo
    training.run.close()
    remove = retention_pass._remove

    def bring_first(grounds: retention_pass.PruneContext, uids: list[str], packs: set[str]) -> None:
        with repo.core.database.write() as session:
            replicas.mark(
                session,
                made[1].uid,
                Status.DURABLE,
                tier="local",
                node=repo.core.home.check_writable(),
                bytes=80,
            )
        remove(grounds, uids, packs)

    monkeypatch.setattr(retention_pass, "_remove", bring_first)
    repo.prune("latest:1")
    assert steps(repo) == [2, 5]
    assert sorted(repo.core.tiers.durable.uids()) == sorted([made[1].uid, made[4].uid])
    assert_whole(repo)


def test_a_disk_that_takes_no_note_of_what_goes_is_pruned_all_the_same(
    training: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    training.go(4)

    def full(held: FileLock, note: str) -> None:
        if note:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(FileLock, "write", full)
    assert len(training.repo.prune("latest:1").dropped) == 3
    assert steps(training.repo) == [4]


def test_what_cannot_be_pruned_says_so(training: Counting, tmp_path: Path) -> None:
    training.go(1)
    for wrong in (3, b"latest:1", ["latest:1"], "", "latest:0", "newest:3", object()):
        with pytest.raises(InvalidInput):
            training.repo.prune(wrong)  # type: ignore[arg-type]  # that is what is tried
    with pytest.raises(InvalidInput, match="dry_run"):
        training.repo.prune("all", dry_run="yes")  # type: ignore[arg-type]  # that is what is tried
    assert steps(training.repo) == [1]


def test_deleting_a_branch_frees_the_bytes_that_only_it_holds(training: Counting) -> None:
    made, repo = training.go(6), training.repo
    repo.branch("side", made[1])
    with pytest.raises(Conflict, match="has a training"):
        repo.delete_ref("main", bytes=True)
    training.run.close()
    repo.tag("warm", made[0])
    planned = repo.delete_ref("main", bytes=True, dry_run=True)
    assert planned is not None
    assert [each.uid for each in planned.dropped] == [state.uid for state in made[2:]]
    assert [ref.name for ref in repo.refs()] == ["main", "side", "warm"]
    done = repo.delete_ref("main", bytes=True)
    assert done is not None
    assert (done.dropped, done.bytes_freed > 0) == (planned.dropped, True)
    assert [ref.name for ref in repo.refs()] == ["side", "warm"]
    assert [repo.state(state.uid).status is Status.DURABLE for state in made] == [True] * 2 + [
        False
    ] * 4
    assert_whole(repo, "side")
    (side,) = repo.overview()
    assert (side.name, side.states) == ("side", 2)


def test_branch_of_a_training_is_not_renamed(training: Counting) -> None:
    training.go(2)
    with pytest.raises(Conflict, match="end it, then try again"):
        training.repo.rename("main", "exp")
    training.run.close()
    assert training.repo.rename("main", "exp").name == "exp"
    assert {use.branch: use.states for use in usage(training.repo.core).branches} == {"exp": 2}


def test_tag_of_an_evicted_state_is_made_with_a_warning(
    training: Counting, caplog: pytest.LogCaptureFixture
) -> None:
    made, repo = training.go(3), training.repo
    evict(repo.core, made[1].uid)
    repo.tag("fine", made[0])
    assert not caplog.records
    repo.tag("gone", made[1])
    (record,) = caplog.records
    assert record.name.startswith("datastates")
    assert f"the nearest state that has its bytes is {made[0].uid[:10]}" in record.getMessage()
    assert repo.state("gone").uid == made[1].uid
