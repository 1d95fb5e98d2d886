"""Weights that a training edits by hand cost it one state, which is said once, and never the
training."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import datastates
from datastates import Config, NotFound, Repository, Tracker
from datastates.engine.handle import Capture
from datastates.engine.tear_check import TornTensors
from datastates.errors import Torn

from .build import Gate, held_back

QUIET = Config(memory_bytes=64 << 20, durable_interval_s=None)


@pytest.fixture
def repo(tmp_path: Path) -> Iterator[Repository]:
    with datastates.open(tmp_path / "runs", config=QUIET) as opened:
        yield opened


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    with held_back(monkeypatch) as gate:
        yield gate


class Training:
    """A model of a few large tensors.

    An edit is made before the copy can begin; each capture's weights are kept."""

    def __init__(self, repo: Repository, gate: Gate, branch: str = "main") -> None:
        self.repo, self.gate = repo, gate
        self.model = nn.Sequential(*(nn.Linear(200, 200, bias=False) for _ in range(4)))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.run: Tracker = repo.track(model=self.model, optimizer=self.optimizer, branch=branch)
        self.expected: dict[str, list[torch.Tensor]] = {}

    def step(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()

    def capture(self, edit: Callable[[], object] | None = None) -> Capture:
        self.step()
        weights = [parameter.detach().clone() for parameter in self.model.parameters()]
        self.gate.hold()
        capture = self.run.capture()
        self.expected[capture.uid] = weights
        if edit is not None:
            edit()
        self.gate.open()
        return capture

    def scale(self, *layers: int) -> None:
        with torch.no_grad():
            for layer in layers:
                self.model.get_parameter(f"{layer}.weight").mul_(0.9)

    def check(self) -> list[int]:
        """The steps that have a state; each is what was live."""
        states = self.repo.log(self.run.branch)
        for state in states:
            tree = self.repo.load(state.uid, only="model")["model"]
            assert all(map(torch.equal, tree.values(), self.expected[state.uid]))
        return sorted(state.step for state in states)


def warnings_in(log: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in log.records if record.levelno == logging.WARNING]


def test_a_training_that_edits_its_weights_after_each_capture_loses_one_state(
    repo: Repository, gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    training = Training(repo, gate)
    for _ in range(6):
        training.capture(lambda: training.scale(0, 1, 2, 3))
    training.run.close()
    assert training.check() == [2, 3, 4, 5, 6]
    (said,) = warnings_in(caplog)
    assert (
        "branch main has no state of step 1: model/0.weight, model/1.weight, model/2.weight and 1"
        " more changed between" in said
    )
    assert "From now on these tensors are copied before capture() returns" in said


def test_a_second_edit_of_others_is_the_last_that_costs_a_state(
    repo: Repository, gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    training = Training(repo, gate)
    for layers in ((0,), (0,), (1,), (2,), (3,), (0, 1, 2, 3)):
        # bound now
        training.capture(lambda layers=layers: training.scale(*layers))  # type: ignore[misc]
        training.repo.flush()
    assert training.run.head is not None
    assert training.check() == [2, 4, 5, 6]
    said = warnings_in(caplog)
    assert ["model/0.weight changed" in said[0], "model/1.weight changed" in said[1]] == [
        True,
        True,
    ]
    assert "From now on everything is copied before capture() returns" in said[1]
    assert len(said) == 2


def test_captures_that_had_begun_before_the_first_tear_was_known_are_said_too(
    repo: Repository, gate: Gate, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training(repo, gate)
    gate.hold()
    handles = []
    for _ in range(3):  # by hand: no optimizer's step waits for the copies
        handles.append(training.run.capture())
        training.scale(0)
    gate.open()
    training.repo.flush()
    assert [type(handle.error) for handle in handles] == [Torn] * 3
    assert training.capture(lambda: training.scale(0)).wait().parents == ()
    (said,) = warnings_in(caplog)
    assert "no state of steps 1, 2, 3: model/0.weight changed" in said


def test_only_a_wait_for_the_torn_state_raises(repo: Repository, gate: Gate) -> None:
    training = Training(repo, gate)
    good = training.capture().wait()
    torn = training.capture(lambda: training.scale(0))
    with pytest.raises(
        Torn, match=r"model/0\.weight changed between capture\(\) and the end of its copy"
    ):
        torn.wait()
    with pytest.raises(Torn):
        torn.wait("durable", timeout_s=60)
    with pytest.raises(NotFound):
        repo.state(torn.uid)
    assert training.run.head == good
    assert training.capture().wait().parents == (good.uid,)


def test_the_last_capture_of_a_training_that_tore_is_said_and_ends_nothing(
    repo: Repository, gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    training = Training(repo, gate)
    good = training.capture()
    training.capture(lambda: training.scale(0))
    training.run.close()
    assert repo.state("main").uid == good.uid
    assert "branch main has no state of step 2: model/0.weight changed" in caplog.text
    repo.close()


def test_the_head_of_a_branch_whose_only_capture_tore_is_none(repo: Repository, gate: Gate) -> None:
    training = Training(repo, gate)
    training.capture(lambda: training.scale(0))
    assert training.run.head is None


def test_weights_swapped_in_for_an_evaluation_and_back_are_no_end(
    repo: Repository, gate: Gate
) -> None:
    training = Training(repo, gate)
    average = [parameter.detach().clone() for parameter in training.model.parameters()]

    def evaluate() -> None:
        mine = [parameter.detach().clone() for parameter in training.model.parameters()]
        for parameter, other in zip(training.model.parameters(), average, strict=True):
            parameter.data.copy_(other)
        training.gate.open()
        training.repo.flush()
        for parameter, weight in zip(training.model.parameters(), mine, strict=True):
            parameter.data.copy_(weight)

    for epoch in range(4):
        training.capture(evaluate if epoch % 2 else None)
    training.run.close()
    assert training.check() == [1, 3, 4]


def test_a_tear_that_was_under_way_while_the_first_was_told_is_told_in_short(
    caplog: pytest.LogCaptureFixture,
) -> None:
    edits = TornTensors()
    assert not edits.learn("main")
    edits.note(1, Torn("x", paths=("a", "b")), is_taught=False)
    assert edits.learn("main")
    edits.note(2, Torn("x", paths=("a",)), is_taught=False)
    assert not edits.learn("main")
    edits.note(3, Torn("x", paths=("a", "c")), is_taught=False)
    assert edits.learn("main")
    assert (edits.paths, edits.are_anywhere) == ({"a", "b", "c"}, False)
    assert "branch main has no state of step 2 either" in warnings_in(caplog)[1]
