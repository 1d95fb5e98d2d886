"""Captures of a training whose device runs out of memory, at each allocation in turn: the training
goes on, and each state is right or was skipped."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import datastates
from datastates.config import Config
from datastates.engine import device_copies, plan
from datastates.engine.handle import Capture
from datastates.errors import Unavailable
from datastates.repository import Repository
from datastates.state.geometry import compact
from datastates.state.manifest import CHUNK_BYTES
from tests.support.late import LateDevices, Lateness
from tests.support.late.digests import digesting_at_once

WARM_UP = 3
"""Captures after which the frozen chunk is known, and states stay on the device."""

SKIPPED = 2
"""What the first allocations are for has no other place: a copy without gaps, and a metric."""


class Net(nn.Module):
    """A frozen chunk, one that is copied behind the fence, small tensors, and one with gaps."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.frozen = nn.Parameter(torch.randn(128, 128, generator=generator), requires_grad=False)
        self.trained = nn.Parameter(torch.randn(128, 128, generator=generator))
        self.bias = nn.Parameter(torch.randn(64, generator=generator))
        self.gaps: torch.Tensor
        self.register_buffer("gaps", torch.zeros(16, 16)[::2])

    def forward(self) -> torch.Tensor:
        self.gaps += 1
        found: torch.Tensor = (self.trained * self.frozen).sum() + self.bias.square().sum()
        return found


class Training:
    """A training on a late device that is captured after each step."""

    def __init__(self, repo: Repository, late: LateDevices) -> None:
        self.repo, self.late, self.model = repo, late, late.put(Net())
        self.optimizer = torch.optim.SGD([self.model.trained, self.model.bias], lr=0.1)
        self.loss = late.put(torch.zeros(()))
        self.run = repo.track(rng=False, model=self.model, optimizer=self.optimizer)

    def step(self, failing: range = range(0)) -> Capture:
        """The next step. If it has a state, the state is what the training had."""
        self.optimizer.zero_grad()
        loss = self.model()
        loss.backward()
        self.loss.copy_(loss.detach())
        lived = {name: each.detach().clone() for name, each in self.model.state_dict().items()}
        with self.late.failing(failing):
            capture = self.run.capture(metrics={"loss": self.loss})
            self.run.fence()
        self.optimizer.step()
        self.late.schedule.catch_up()
        self.late.schedule.be_late_again()
        if not capture.is_skipped:
            capture.wait(timeout_s=20)
            found = self.repo.load(capture.uid)["model"]
            assert all(torch.equal(found[name], each) for name, each in lived.items())
        return capture


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Iterator[LateDevices]:
    made = LateDevices(Lateness.COPIES)
    made.schedule.patience_s = 0.01

    def on_device(tensor: torch.Tensor) -> torch.Tensor:
        found = compact(tensor)
        made.adopt(found, made.current_for(torch.device("cuda", 0)))
        return found

    monkeypatch.setattr(plan, "compact", on_device)
    monkeypatch.setattr(device_copies, "has_kernels", lambda tensor: True)
    with digesting_at_once(), made.running():
        yield made


ALLOCATIONS = 6
"""Of a capture with states on the device, and of one without."""

CASES = [
    pytest.param(number, count, kept_bytes, id=f"{count} from {number}{name}")
    for count, kept_bytes, name in ((1, 1 << 20, ", kept on the device"), (1000, 0, ""))
    for number in range(1, ALLOCATIONS + 2)
]


@pytest.mark.parametrize(("number", "count", "kept_bytes"), CASES)
def test_a_capture_without_memory_on_the_device_is_right_or_skipped_and_the_next_is_right(
    number: int, count: int, kept_bytes: int, late: LateDevices, tmp_path: Path
) -> None:
    config = Config(memory_bytes=16 * CHUNK_BYTES, durable_interval_s=None, device_bytes=kept_bytes)
    with datastates.open(tmp_path, config=config) as repo:
        training = Training(repo, late)
        for _ in range(WARM_UP):
            training.step()
        late.allocations = 0
        capture = training.step(range(number, number + count))
        assert (late.allocations >= number) is (number <= ALLOCATIONS), "each one has to fail once"
        assert capture.is_skipped is (number <= SKIPPED)
        if capture.is_skipped:
            with pytest.raises(Unavailable, match="a device ran out of memory"):
                capture.wait(timeout_s=20)
        assert not training.step().is_skipped
        training.run.close()


def test_an_edit_after_a_capture_without_samples_does_not_tear_the_state(
    late: LateDevices, tmp_path: Path
) -> None:
    config = Config(memory_bytes=16 * CHUNK_BYTES, durable_interval_s=None)
    with datastates.open(tmp_path, config=config) as repo:
        training = Training(repo, late)
        for _ in range(WARM_UP):
            training.step()
        lived, late.allocations = training.model.trained.detach().clone(), 0
        with late.failing(range(SKIPPED + 1, SKIPPED + 2)):
            capture = training.run.capture(metrics={"loss": training.loss})
        training.model.trained.data += 1
        late.schedule.catch_up()
        found = repo.load(capture.wait(timeout_s=20).uid)["model"]["trained"]
        assert torch.equal(found, lived)
        training.run.close()
