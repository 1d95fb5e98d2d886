"""Processors that run on the memory of a training in another process."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest
import torch

import datastates
from datastates import Config, Processor
from datastates.config import AgentMode
from datastates.engine.processors import ProcessorOutcome
from datastates.errors import InvalidInput
from tests.agent.processing import NOTES, Given, Noting
from tests.agent.test_agent import folder  # noqa: F401  # each test has an agent of its own


def train(path: Path, notes: Path, mode: AgentMode, steps: int) -> None:
    config = Config(agent=mode, processors=[Noting()], memory_bytes=64 << 20)
    with datastates.open(path, config=config) as repo:
        weight = torch.zeros(1000)
        run = repo.track(weight=weight, rng=False)
        for _ in range(steps):
            weight += 1
            run.capture()
        repo.core.drain()
        switch = repo.processors["noting"]
        assert switch.last is not None
        assert (switch.last.outcome, switch.last.step) == (ProcessorOutcome.DONE, steps)
        assert switch.counts[ProcessorOutcome.FAILED] == (steps >= 2) + (steps >= 4)


@pytest.mark.parametrize("steps", [3, 5])
def test_a_processor_in_another_process_sees_each_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, steps: int
) -> None:
    """It is called again after it failed, and another process is started after its own ended."""
    notes = tmp_path / "notes"
    monkeypatch.setenv(NOTES, str(notes))
    with caplog.at_level(logging.WARNING):
        train(tmp_path / "run", notes, AgentMode.PROCESS, steps)
    lines = [line.split(maxsplit=1) for line in notes.read_text().splitlines()]
    seen = [step for step in range(1, steps + 1) if step not in {2, 4}]
    assert [line for _, line in lines] == [
        *(f"{step} main {1000.0 * step}" for step in seen),
        "closed",
    ]
    assert str(os.getpid()) not in {pid for pid, _ in lines}
    assert len({pid for pid, _ in lines}) == 1 + (steps > 4)
    assert "step 2 is refused" in caplog.text


def test_without_an_agent_it_runs_in_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    notes = tmp_path / "notes"
    monkeypatch.setenv(NOTES, str(notes))
    with caplog.at_level(logging.WARNING):
        train(tmp_path / "run", notes, AgentMode.INLINE, 1)
    pid = os.getpid()
    assert notes.read_text().splitlines() == [f"{pid} 1 main 1000.0", f"{pid} closed"]
    assert "processor 'noting' runs here: there is no agent" in caplog.text


def test_what_another_process_cannot_make_is_refused() -> None:
    class Local(Noting):
        """Of this function only."""

    with pytest.raises(InvalidInput, match="move it to a module"):
        Config(processors=[Local()])
    with pytest.raises(InvalidInput, match="give each a default"):
        Config(processors=[Given("file")])
    wrong = Noting()
    wrong.where = "elsewhere"  # type: ignore[assignment]
    with pytest.raises(InvalidInput, match="set 'training' or 'agent'"):
        Config(processors=[wrong])


def test_processors_are_switched_off_and_on_while_a_training_runs(tmp_path: Path) -> None:
    steps: list[int] = []

    class Steps(Processor):
        name = "steps"

        def process(self, captured: datastates.CapturedState, /) -> None:
            steps.append(captured.state.step)

    with datastates.open(tmp_path, config=Config(processors=[Steps()])) as repo:
        switch = repo.processors["steps"]
        assert switch.last is None
        run = repo.track(weight=torch.zeros(3), rng=False)
        for is_on in (True, False, True):
            switch.is_on = is_on
            run.capture()
            repo.core.drain()
        assert steps == [1, 3]
        assert switch.counts == {"done": 2, "failed": 0, "passed": 1}
        assert switch.last is not None
        assert switch.last.step == 3
        with pytest.raises(TypeError):
            repo.processors["other"] = switch
