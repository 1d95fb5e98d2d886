"""A real training whose cadence is computed: what it chooses is said, logged and recorded; and
what failures of processes teach."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import datastates
from datastates import Cadence, CheckFreq, Config, Daly, OnImprovement, Tracker
from datastates.errors import InvalidInput
from datastates.lineage.views.detail import failures
from datastates.lineage.write import runs
from datastates.policy.contract import read_choice, read_costs
from tests.support import warm

MOST = 20_000


def train(
    run: Tracker, model: nn.Module, optimizer: torch.optim.Optimizer, *, at_most: int = MOST
) -> list[float]:
    """Train until a cadence was chosen; the losses."""
    losses: list[float] = []
    batch = torch.linspace(-1, 1, 64 * 32).reshape(64, 32)
    while run.cadence.costs is None and len(losses) < at_most:
        optimizer.zero_grad()
        loss = (model(batch) - batch.sin()).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        run.capture(metrics={"loss": losses[-1]})
    return losses


def built() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(32, 256), nn.Tanh(), nn.Linear(256, 32))
    return model, torch.optim.SGD(model.parameters(), lr=0.05)


def test_a_training_learns_how_often_to_write_says_why_and_records_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="datastates")
    model, optimizer = built()
    with (
        datastates.open(tmp_path, memory_bytes="64M") as repo,
        repo.track(model=model, optimizer=optimizer, cadence="checkfreq:50%") as run,
    ):
        assert run.cadence.cadence == "checkfreq:50%"
        assert run.cadence.every is None
        assert "looks for the shortest interval that costs at most 50%" in run.cadence.why
        losses = train(run, model, optimizer)
        chosen = run.cadence
        training = run.training.run.uid
    assert chosen.costs is not None, f"nothing was chosen in {len(losses)} captures"
    assert chosen.every is not None
    assert chosen.every >= chosen.costs.write_s / chosen.costs.interval_s
    assert chosen.why in caplog.text
    with datastates.open(tmp_path) as repo, repo.core.database.read() as session:
        config = runs.get(session, training).config
    recorded = read_choice(config)
    assert recorded is not None
    assert (recorded.cadence, recorded.every) == ("checkfreq:50%", chosen.every)
    assert read_costs(config) is not None

    model, optimizer = built()
    with (
        datastates.open(tmp_path / "never") as repo,
        repo.track(model=model, optimizer=optimizer, cadence=Cadence(None, None)) as run,
    ):
        assert train(run, model, optimizer, at_most=len(losses)) == losses, (
            "writing changes no loss"
        )


def test_improvements_become_durable(tmp_path: Path) -> None:
    weight = torch.zeros(3)
    with (
        datastates.open(tmp_path, config=Config(cadence=OnImprovement("acc"))) as repo,
        repo.track(weight=weight, rng=False) as run,
    ):
        states = [run.capture(metrics={"acc": value}).wait() for value in (0.1, 0.5, 0.4, 0.6, 0.6)]
        repo.core.runner().drain()
        found = [str(repo.state(state).status) for state in states]
        assert run.cadence.why == "each state with a larger acc than all before"
    assert found == ["durable", "durable", "captured", "durable", "captured"]


def test_the_environment_says_a_cadence() -> None:
    assert Config.from_environment(
        {"DATASTATES_CADENCE": "checkfreq:5%|best:loss"}
    ).cadence == CheckFreq(0.05) | OnImprovement("loss")
    with pytest.raises(
        InvalidInput,
        match="DATASTATES_CADENCE='hourly' does not parse: the cadence 'hourly' means nothing",
    ):
        Config.from_environment({"DATASTATES_CADENCE": "hourly"})


def test_a_part_of_a_cadence_is_joined_with_what_is_configured() -> None:
    configured = Config(cadence="checkfreq")
    assert configured.cadence_with() == CheckFreq()
    assert configured.cadence_with(durable_every=5) == CheckFreq() | Cadence(5, None)
    assert Config(cadence=Cadence(steps=9)).cadence_with(durable_every=5) == Cadence(5, 30.0, 9)


DIES = """
import os, torch, datastates
repo = datastates.open({folder!r})
run = repo.track(weight=torch.zeros(3), rng=False)
run.capture().wait("durable")
os._exit(9)
"""


def test_processes_that_died_are_counted_and_a_cadence_by_failures_is_told(tmp_path: Path) -> None:
    assert (
        warm.run(
            [sys.executable, "-c", DIES.format(folder=os.fspath(tmp_path))],
            check=False,
            timeout=120,
        ).returncode
        == 9
    )
    with (
        datastates.open(tmp_path) as repo,
        repo.track(branch="later", weight=torch.zeros(3), rng=False, cadence=Daly()) as run,
    ):
        with repo.core.database.read() as session:
            found = failures(session)
        assert (found.processes, found.died) == (2, 1)
        assert "a failure every 12 h as observed here" in run.cadence.why
        run.capture()
    with datastates.open(tmp_path) as repo, repo.core.database.read() as session:
        assert failures(session).died == 1, "who closes did not die"
