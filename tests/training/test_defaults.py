"""What a training keeps on disk if nobody says anything: each of its states, and in any case its
bests."""

from __future__ import annotations

import logging
import os
import signal
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import datastates
from datastates import CadenceChoice, Config, Status
from datastates.engine.handle import Line
from datastates.engine.periodic import CadenceReports
from datastates.engine.scheduler import CadenceChanged
from datastates.lineage import Database
from datastates.maintenance import retention_pass
from datastates.policy.contract import Costs
from datastates.repository import Repository
from tests.support import warm


def train(run: datastates.Tracker, model: nn.Linear, *values: float, key: str = "val_loss") -> None:
    for value in values:
        with torch.no_grad():
            model.weight.add_(1)
        run.capture(metrics={key: value})


def durable(repo: Repository, branch: str = "main") -> list[int]:
    return sorted(state.step for state in repo.log(branch) if state.status is Status.DURABLE)


def test_every_state_of_a_short_training_is_restorable_after_its_process_ended(
    tmp_path: Path,
) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters())
    with datastates.open(tmp_path) as repo, repo.track(model=model, optimizer=optimizer) as run:
        for _ in range(60):
            optimizer.zero_grad()
            loss = model(torch.randn(4, 8)).square().mean()
            loss.backward()
            optimizer.step()
            run.capture(metrics={"loss": loss.item()})
    with datastates.open(tmp_path) as repo:
        assert durable(repo) == list(range(1, 61))
        repo.restore("main~37", model=model, optimizer=optimizer)


def test_one_line_says_what_is_kept_and_what_is_thinned(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="datastates")
    model = nn.Linear(8, 8)
    with datastates.open(tmp_path) as repo, repo.track(model=model) as run:
        assert run.cadence.cadence == "auto"
        while run.cadence.costs is None:
            run.capture().wait("durable")
        assert repo.core.engaged is not None
        assert run.training.line.bound
        kept = f"branch main: {run.cadence.why}{run.training.line.bound}"
    lines = [
        record.getMessage() for record in caplog.records if "kept on disk" in record.getMessage()
    ]
    assert lines == [kept]
    assert "each of your steps is kept on disk; " in kept
    assert "MB/s; the oldest are thinned beyond " in kept


@pytest.mark.parametrize(
    "said",
    [{"durable_every": 4}, {"cadence": "every:4"}, {"durable_interval_s": 1e9, "durable_every": 4}],
)
def test_bests_are_written_beside_what_an_explicit_setting_says(
    tmp_path: Path, said: dict[str, object]
) -> None:
    model = nn.Linear(2, 2)
    # of its fields
    with datastates.open(tmp_path, config=Config(**said)) as repo:  # type: ignore[arg-type]
        with repo.track(model=model) as run:
            train(run, model, 5, 1, 7, 8, 9, 10, 11)
        expected = {2, 4, 7} | ({1} if "durable_interval_s" in said else set())
        assert set(durable(repo)) == expected, "the best, the fourth, and the head"


def test_nothing_but_the_head_is_written_where_nothing_should_be(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    with datastates.open(tmp_path, config=Config(durable_interval_s=None)) as repo:
        with repo.track(model=model) as run:
            train(run, model, 5, 1, 7)
        assert durable(repo) == [3]


def test_bests_of_a_branch_count_from_its_fork_and_go_on_after_a_resume(tmp_path: Path) -> None:
    model, said = nn.Linear(2, 2), Config(durable_every=100)
    with datastates.open(tmp_path, config=said) as repo:
        with repo.track(model=model) as run:
            train(run, model, 5, 1, 7)
        with repo.track(branch="fork", start="main", model=model) as run:
            train(run, model, 9, 4, 8, key="val_loss")
            train(run, model, 0.5, key="width")
        assert set(durable(repo, "fork")) - set(durable(repo)) == {
            5,
            7,
        }, "its own best, worse than that of main, and its head"
    with datastates.open(tmp_path, config=said) as repo:
        with repo.track(branch="fork", model=model) as run:
            train(run, model, 6, 3, 7)
        assert {9, 10} <= set(durable(repo, "fork"))
        assert 8 not in durable(repo, "fork"), "worse than the best before the resume"


def test_a_training_that_goes_back_forgets_the_bests_that_it_left(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    with datastates.open(tmp_path, config=Config(durable_every=100, memory_bytes=64 << 20)) as repo:
        with repo.track(model=model) as run:
            train(run, model, 5, 4, 1)
            run.restore("main~1")
            train(run, model, 3, 6)
        assert {3, 4} <= set(durable(repo)), "the best of what is on the branch now, and its head"


DIES = """
import os, signal, sys, torch, datastates
from torch import nn
model = nn.Linear(2, 2)
repo = datastates.open({folder!r}, config=datastates.Config(durable_every=4))
run = repo.track(model=model)
for value in (5, 1, 7, 8, 0.5, 0.9):
    last = run.capture(metrics={{"val_loss": value}})
repo.state("main")
repo.core.runner().drain()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_after_a_kill_the_best_of_where_the_branch_goes_back_to_is_on_disk(tmp_path: Path) -> None:
    done = warm.run(
        [sys.executable, "-c", DIES.format(folder=os.fspath(tmp_path))], check=False, timeout=120
    )
    assert done.returncode == -signal.SIGKILL
    model = nn.Linear(2, 2)
    with datastates.open(tmp_path, config=Config(durable_every=100)) as repo:
        with repo.track(model=model) as run:
            assert run.step == 4
            assert repo.state("main@best:val_loss").step == 2
            repo.restore("main@best:val_loss", model=model)
            train(run, model, 2, 0.7, 3)
        assert set(durable(repo)) == {2, 4, 6, 7}, "the lost state with 0.5 does not count"


def test_the_default_bound_thins_states_and_keeps_the_bests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention_pass, "_BUDGET_BYTES", 40 << 10)
    model = nn.Linear(2, 2)
    with (
        datastates.open(tmp_path, config=Config(durable_every=1)) as repo,
        repo.track(model=model) as run,
    ):
        for index in range(64):
            with torch.no_grad():
                model.weight.add_(1)
            run.capture(
                metrics={
                    "val_loss": abs(index - 44),
                    "acc": -abs(index - 22),
                    "lr": -abs(index - 3),
                }
            ).wait("durable")
    with datastates.open(tmp_path) as repo:
        report = repo.prune()
        kept = set(durable(repo))
    assert {23, 45, 64} <= kept, "the best ones, and the head"
    assert len(kept) < 32
    assert {reason for reason in report.kept if "best" in reason} == {
        "the best val_loss of branch main: 0",
        "the best acc of branch main: 0",
    }


def test_a_later_choice_is_logged_once_it_has_lasted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="datastates")
    now = 100.0
    monkeypatch.setattr("datastates.engine.periodic.time.monotonic", lambda: now)
    told, line = (
        CadenceReports(Database(f"sqlite:///{tmp_path}/lineage.db")),
        Line("main#1", "main", None, None, bound="; the oldest are thinned beyond 20 GiB"),
    )
    told.begin(line)

    def choose(why: str) -> list[str]:
        caplog.clear()
        told.take(
            CadenceChanged(
                line.name,
                Costs(1.0, 0.1, 0.0, 0.0, 300, 40),
                CadenceChoice("auto", f"{why} is kept on disk"),
                True,
            )
        )
        told.say()
        return [record.getMessage() for record in caplog.records]

    assert choose("each") == [
        "branch main: each is kept on disk; the oldest are thinned beyond 20 GiB"
    ]
    assert choose("one of 2") == []
    now += 29
    assert choose("each") == [], "it is back before the other was worth a line"
    now += 31
    told.say()
    assert choose("one of 3") == []
    now += 31
    told.say()
    assert [record.getMessage() for record in caplog.records] == [
        "branch main: one of 3 is kept on disk; the oldest are thinned beyond 20 GiB"
    ]
