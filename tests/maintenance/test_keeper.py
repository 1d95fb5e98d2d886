"""Retention beside a training: it happens by itself, and never to the training's harm."""

from __future__ import annotations

import errno
import logging
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch import nn

import datastates
from datastates import Config, Repository, Retention
from datastates.errors import InvalidInput
from datastates.lineage.states import Status
from datastates.maintenance import keeper, retention_pass
from datastates.maintenance.keeper import Keeper, beside
from datastates.policy.retention import All, Best, Every, Latest, asked_for
from datastates.testing import FaultyDisk


@pytest.fixture
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    """One pass right after the other."""
    monkeypatch.setattr(keeper, "LEAST_S", 0.0)
    monkeypatch.setattr(keeper, "_SHARE", 0)


def config(every: int = 1, **options: object) -> Config:
    # passed on
    return Config(memory_bytes=64 << 20, durable_every=every, durable_interval_s=None, **options)  # type: ignore[arg-type]


def train(
    run: datastates.Tracker, model: nn.Linear, count: int, *, is_waiting: bool = False
) -> None:
    """So many steps; the weights say which, the loss is least and the accuracy greatest at step
    7."""
    for _ in range(count):
        step = run.step + 1
        with torch.no_grad():
            model.weight.fill_(step)
        capture = run.capture(metrics={"loss": abs(step - 7), "accuracy": -abs(step - 7)})
        if is_waiting:
            capture.wait("durable", timeout_s=60)


def on_disk(folder: Path) -> int:
    """The bytes of manifests and packs; some may be removed meanwhile."""
    packs, found = folder / "packs", 0
    for path in (*packs.glob("*.manifest"), *packs.glob("*.safetensors")):
        with suppress(FileNotFoundError):
            found += path.stat().st_size
    return found


def durable_steps(repo: Repository, rev: str = "main") -> list[int]:
    """The steps of the durable states of a branch, oldest first; each of them restores as it
    was."""
    found = sorted(
        (state for state in repo.log(rev) if state.status is Status.DURABLE),
        key=lambda state: state.step,
    )
    for state in found:
        repo.verify(state)
        assert torch.equal(
            repo.load(state)["model"]["weight"], torch.full((4, 4), float(state.step))
        )
    return [state.step for state in found]


@pytest.mark.usefixtures("_often")
def test_a_long_training_stays_under_its_bound_and_all_that_is_kept_restores(
    tmp_path: Path,
) -> None:
    bound = 400 << 10
    model = nn.Linear(4, 4)
    with datastates.open(
        tmp_path / "runs", config=config(every=8, retention=f"all at-most:{bound}")
    ) as repo:
        run = repo.track(model=model, keep_best="loss")
        for _ in range(10):
            train(run, model, 200)
            repo.flush()
            assert on_disk(tmp_path / "runs") < 2 * bound
    assert on_disk(tmp_path / "runs") <= bound
    with datastates.open(tmp_path / "runs") as repo:
        steps = durable_steps(repo)
        assert {7, 2000} <= set(steps)
        assert repo.state("main@best:loss").step == 7
        assert sum(step > 1500 for step in steps) > sum(step <= 500 for step in steps), (
            "older ones are thinner"
        )
        assert len(repo.log("main")) == 2000, "the lineage and its metrics stay"


def test_a_pass_that_closing_broke_off_is_made_up_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Keeper, "_begin", lambda self: None)
    model = nn.Linear(4, 4)
    with datastates.open(tmp_path / "runs", config=config(retention="latest:2")) as repo:
        train(repo.track(model=model), model, 6, is_waiting=True)
        held = repo.core.engage().keeper
        assert isinstance(held, Keeper)
        held._pass(lambda: True)
        assert len(durable_steps(repo)) == 6
    with datastates.open(tmp_path / "runs") as repo:
        assert durable_steps(repo) == [5, 6]


@pytest.mark.usefixtures("_often")
def test_rules_of_a_training_are_applied_to_its_branch_alone(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    with (
        datastates.open(tmp_path / "runs", config=config()) as repo,
        repo.track(model=model, branch="other") as run,
    ):
        train(run, model, 6)
    with (
        datastates.open(tmp_path / "runs", config=config()) as repo,
        repo.track(model=model, retention="latest:2") as run,
    ):
        train(run, model, 30)
    with datastates.open(tmp_path / "runs") as repo:
        assert durable_steps(repo) == [29, 30]
        assert durable_steps(repo, "other") == [1, 2, 3, 4, 5, 6]
        assert repo.prune(dry_run=True).dropped == (), (
            "what the training asked for is known to whoever prunes later"
        )


def test_best_so_far_can_be_restored_after_it_would_have_left_memory(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    settings = Config(memory_bytes=24 << 20, durable_interval_s=None, retention="latest:1")
    with (
        datastates.open(tmp_path / "runs", config=settings) as repo,
        repo.track(model=model, keep_best=["loss", "accuracy:max"]) as run,
    ):
        train(run, model, 200)
        repo.flush()
        for best in ("main@best:loss", "main@best:accuracy:max"):
            assert (repo.load(best)["model"]["weight"] == 7).all()
    with datastates.open(tmp_path / "runs", config=settings) as repo:
        assert durable_steps(repo) == [7, 200]
        assert repo.prune("latest:1").dropped == ()


_KILLED = """
import os, signal, sys
import torch
from torch import nn
import datastates
model = nn.Linear(4, 4)
repo = datastates.open(sys.argv[1], config=datastates.Config(memory_bytes=64 << 20, durable_every=50, durable_interval_s=None))
run = repo.track(model=model, keep_best="loss")
for step in range(1, 102):
    with torch.no_grad():
        model.weight.fill_(step)
    capture = run.capture(metrics={"loss": abs(step - 17)})
capture.wait("durable")
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_best_is_on_disk_wherever_a_crash_puts_the_branch_back_to(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _KILLED, str(tmp_path / "runs")], check=False, timeout=100
    )
    assert done.returncode in (-signal.SIGKILL, 128 + signal.SIGKILL)
    with datastates.open(tmp_path / "runs") as repo:
        assert (repo.load("main@best:loss")["model"]["weight"] == 17).all()


def test_a_fork_keeps_the_best_of_the_branch_that_it_came_from(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    with datastates.open(tmp_path / "runs", config=config(retention="all")) as repo:
        with repo.track(model=model) as run:
            train(run, model, 12, is_waiting=True)
        with repo.track(model=model, branch="fork", start="main~2", keep_best="loss") as run:
            train(run, model, 3, is_waiting=True)
        repo.delete_ref("main")
        reasons = repo.prune("tagged", dry_run=True).kept
        assert reasons["the best loss on the way to branch fork"] == 1


@pytest.mark.usefixtures("_often")
def test_no_error_of_a_pass_reaches_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*args: object, **more: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(keeper, "survey", fail)
    monkeypatch.setattr(keeper._logger, "filters", [])  # another test may have had the same line
    model = nn.Linear(4, 4)
    with (
        caplog.at_level(logging.WARNING),
        datastates.open(tmp_path / "runs", config=config(retention="latest:1")) as repo,
    ):
        with repo.track(model=model) as run:
            train(run, model, 5, is_waiting=True)
        assert repo.core.engaged is not None
        applied = repo.core.engaged.keeper
    assert isinstance(applied, Keeper)
    assert isinstance(applied.error, ZeroDivisionError)
    assert "retention does not keep stay on disk for now" in caplog.text
    with datastates.open(tmp_path / "runs") as repo:
        assert durable_steps(repo) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("half", "state", "bound"),
    [
        (5 << 30, 0, "5G"),
        (1 << 40, 0, "20G"),
        (1 << 40, 4 << 30, "32G"),
        (30 << 30, 4 << 30, "30G"),
    ],
)
def test_by_default_states_take_20_gib_or_eight_states_and_at_most_half_of_the_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, half: int, state: int, bound: str
) -> None:
    monkeypatch.setattr(keeper, "half_of_room", lambda folder, taken: half)
    model = nn.Linear(4, 4)
    with datastates.open(tmp_path / "runs", config=config()) as repo:
        with repo.track(model=model) as run:
            train(run, model, 3)
        assert repo.core.engaged is not None
        applied = repo.core.engaged.keeper
        assert isinstance(applied, Keeper)
        applied.follow("main", None, state)
        assert (applied.retention.text, applied.report) == (f"all best:1:* at-most:{bound}", None)
        assert applied.said == f"; the oldest are thinned beyond {bound[:-1]} GiB"


def test_half_of_the_room_counts_what_is_free_and_what_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Disk:
        free = 600

    monkeypatch.setattr(
        "datastates.maintenance.retention_pass.shutil.disk_usage", lambda folder: Disk
    )
    assert retention_pass.half_of_room(tmp_path, 200) == 400


def test_a_process_applies_rules_to_its_own_branches_and_the_bound_to_all() -> None:
    told = {"a": Retention.latest(2), "b": Retention.parse("best:1:loss at-most:1K")}
    found = beside(
        told, Retention.parse("every:9 at-most:1M"), {"a": Retention.latest(3), "c": None}
    )
    assert found.of("a") == Retention.latest(3)
    assert found.of("b") == Retention((All(), Best("loss")))
    assert found.of("c") == Retention((Every(9),))
    assert found.of("d") == Retention((All(), Every(9)), 1 << 20)


def test_what_a_training_asks_for_is_understood_or_refused() -> None:
    configured = Retention.parse("latest:3 at-most:1G")
    assert asked_for(configured, None, None) is None
    assert asked_for(configured, "every:5", None) == Retention((Every(5),))
    assert asked_for(configured, None, "loss") == Retention((Latest(3), Best("loss")))
    assert asked_for(Retention.at_most("1G"), None, ["r:max", "x:y"]) == Retention(
        (All(), Best("r", 1, "max"), Best("x:y"))
    )
    for wrong in (3, [3], b"loss", "", "k" * 300, object()):
        with pytest.raises(InvalidInput):
            asked_for(configured, None, wrong)


def test_a_full_disk_makes_room_at_once_by_what_is_not_to_be_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper, "LEAST_S", 3600.0)
    with (
        FaultyDisk(tmp_path / "packs") as disk,
        datastates.open(tmp_path, config=config(retention="latest:2")) as repo,
    ):
        model = nn.Linear(8, 8)
        run = repo.track(model=model)
        train(run, model, 6, is_waiting=True)
        assert len(list((tmp_path / "packs").glob("*.manifest"))) > 2, (
            "the pass after the first state is long over, and the next far away"
        )
        kept = repo.core.engage().keeper
        assert isinstance(kept, Keeper)
        disk.fail(errno.ENOSPC)
        train(run, model, 1)
        while len(list((tmp_path / "packs").glob("*.manifest"))) > 2:
            kept._over.wait(0.01)
        disk.mend()
        assert repo.state("main").step == 7
        run.close()
        assert repo.state("main").status is Status.DURABLE


@pytest.mark.usefixtures("_often")
def test_a_pass_that_stalls_is_not_waited_for_when_the_repository_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    goes_on, has_come = threading.Event(), threading.Event()

    def stall(*args: object, **more: object) -> None:
        has_come.set()
        goes_on.wait()
        raise ZeroDivisionError

    monkeypatch.setattr(keeper, "survey", stall)
    monkeypatch.setattr(keeper, "_PATIENCE_S", 0.01)
    model = nn.Linear(4, 4)
    with (
        caplog.at_level(logging.WARNING),
        datastates.open(tmp_path / "runs", config=config(retention="latest:1")) as repo,
        repo.track(model=model) as run,
    ):
        train(run, model, 3, is_waiting=True)
        assert has_come.wait(60)
    goes_on.set()
    assert "is not waited for" in caplog.text
    with datastates.open(tmp_path / "runs") as repo:
        assert durable_steps(repo) == [1, 2, 3]


@pytest.mark.usefixtures("_often")
def test_no_thread_to_be_had_for_a_pass_keeps_no_state_from_becoming_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Linear(4, 4)
    with datastates.open(tmp_path / "runs", config=config(retention="latest:1")) as repo:
        run = repo.track(model=model)

        def refuse(thread: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        monkeypatch.setattr(threading.Thread, "start", refuse)
        train(run, model, 3, is_waiting=True)
        monkeypatch.undo()
    with datastates.open(tmp_path / "runs") as repo:
        assert durable_steps(repo) == [3], "the last pass had one"


class Clock:
    """The wall clock and the clock since boot, which tests may set; both run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ahead_s, self.later_s = 0.0, 0.0
        wall, boot = time.time, keeper._since_boot_s
        monkeypatch.setattr(time, "time", lambda: wall() + self.ahead_s + self.later_s)
        monkeypatch.setattr(keeper, "_since_boot_s", lambda: boot() + self.later_s)


def passes(repo: Repository, run: datastates.Tracker, model: nn.Linear, count: int = 1) -> None:
    """So many passes, each after a state that became durable."""
    for _ in range(count):
        train(run, model, 1, is_waiting=True)
        made = repo.core.engage().keeper
        assert isinstance(made, Keeper)
        made._pass(lambda: False)


YEAR_S, DAY_S = 365 * 86_400, 86_400


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Passes run only when a test runs them, and the log has no limit a minute."""
    monkeypatch.setattr(keeper._logger, "filters", [])
    monkeypatch.setattr(Keeper, "_begin", lambda self: None)
    monkeypatch.setattr(Keeper, "finish", lambda self: None)
    return Clock(monkeypatch)


def test_a_clock_that_jumps_ahead_deletes_nothing_and_is_told_once(
    tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Linear(4, 4)
    with (
        datastates.open(tmp_path / "runs", config=config(retention="within:7d")) as repo,
        repo.track(model=model) as run,
    ):
        train(run, model, 21, is_waiting=True)
        clock.ahead_s = YEAR_S
        passes(repo, run, model, 3)
        clock.ahead_s = 0
        passes(repo, run, model, 3)
        assert len(durable_steps(repo)) == 27
    (said,) = [
        record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING
    ]
    assert "retention keeps 21 states" in said
    assert "the clock moved by +365.0 days" in said


def test_a_process_that_starts_with_a_wrong_clock_deletes_nothing(
    tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Linear(4, 4)
    with (
        datastates.open(tmp_path / "runs", config=config(retention="within:7d")) as repo,
        repo.track(model=model) as run,
    ):
        train(run, model, 21, is_waiting=True)
    clock.ahead_s = YEAR_S
    with (
        datastates.open(tmp_path / "runs", config=config(retention="within:7d")) as repo,
        repo.track(model=model) as run,
    ):
        passes(repo, run, model, 3)
        assert len(durable_steps(repo)) == 24
        assert "the clock moved by +365.0 days" in caplog.text


def test_a_clock_that_runs_steadily_counts_and_states_go_a_few_a_pass(
    tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Linear(4, 4)
    with (
        datastates.open(tmp_path / "runs", config=config(retention="within:7d")) as repo,
        repo.track(model=model) as run,
    ):
        train(run, model, 39, is_waiting=True)
        clock.later_s = 8 * DAY_S
        passes(repo, run, model)
        assert len(durable_steps(repo)) == 36, "a tenth of 40"
        passes(repo, run, model)
        assert durable_steps(repo)[0] == 8
        passes(repo, run, model, 60)
        assert durable_steps(repo)[0] > 39, "all of them in the end"
        clock.ahead_s = YEAR_S
        passes(repo, run, model)
        clock.later_s += 2 * 3600
        left = len(durable_steps(repo))
        passes(repo, run, model)
        assert len(durable_steps(repo)) < left + 1, "an hour later the clock counts"
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) == 1


def test_a_bound_holds_while_the_clock_is_in_doubt(tmp_path: Path, clock: Clock) -> None:
    model = nn.Linear(4, 4)
    with (
        datastates.open(
            tmp_path / "runs", config=config(retention="within:7d at-most:40000")
        ) as repo,
        repo.track(model=model) as run,
    ):
        train(run, model, 21, is_waiting=True)
        clock.ahead_s = YEAR_S
        passes(repo, run, model, 2)
        assert on_disk(tmp_path / "runs") <= 40_000
        assert 1 < len(durable_steps(repo)) < 23
