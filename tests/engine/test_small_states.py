"""Small states are copied before ``capture`` returns, in the order in which they were captured."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

import datastates
from datastates.engine import copy
from datastates.engine.copy import CopyJob
from datastates.engine.handle import StagedCapture
from datastates.engine.runner import Runner

SMALL, LARGE = 1_000, 1_000_000


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy, "SMALL_BYTES", 4 * SMALL)


def test_an_edit_after_a_capture_does_not_tear_a_small_state(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.zeros(SMALL))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    with (
        datastates.open(tmp_path) as repo,
        repo.track(weight=weight, optimizer=optimizer) as run,
    ):
        captures = []
        for step in range(20):
            captures.append(run.capture(metrics={"step": step}))
            weight.data += 1.0  # no fence covers this
        for step, capture in enumerate(captures):
            capture.wait("captured")
            found = repo.load(capture.uid)["weight"]
            assert torch.equal(found, torch.full((SMALL,), float(step)))


def test_a_small_state_comes_after_a_large_one_that_is_still_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_report, report, uids = threading.Event(), Runner._copied, list[str]()

    def held(runner: Runner, staged: StagedCapture, job: CopyJob) -> None:
        if not uids:
            uids.append(job.uid)
            assert may_report.wait(60)  # the tensors are copied, and the engine was not told
        report(runner, staged, job)

    monkeypatch.setattr(Runner, "_copied", held)
    tensors = {"a": torch.zeros(LARGE)}
    with datastates.open(tmp_path) as repo, repo.track(tensors=tensors) as run:
        large = run.capture()
        tensors["a"] = torch.ones(10)
        small = run.capture()
        may_report.set()
        large.wait("captured")
        small.wait("captured")
        assert [state.uid for state in repo.log("main")] == [small.uid, large.uid]
