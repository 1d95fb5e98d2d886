"""Captures of a training whose device does everything late: what comes back is what a plain training had, byte for byte, or it is not."""

from __future__ import annotations

import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import datastates
from datastates.capture.stage import Stager
from datastates.config import Config
from datastates.content.manifest import CHUNK_BYTES
from datastates.errors import Torn
from datastates.repository import Repository
from tests.support.late import Hazard, LateDevices, Lateness

STEPS = 4
CONFIG = Config(memory_bytes=64 * CHUNK_BYTES, durable_interval_s=None)


class Net(nn.Module):
    """Weights of 256 KiB, which are copied behind the fence; biases and what batch norm counts are copied at once."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(256, 256), nn.BatchNorm1d(256), nn.Linear(256, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.b(torch.relu(self.norm(self.a(x))))
        return found


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Net()
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int, put: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    optimizer.zero_grad()
    batch = torch.randn(16, 256, generator=torch.Generator().manual_seed(number))
    loss: torch.Tensor = (model(put(batch)) ** 2).mean()
    loss.backward()
    optimizer.step()
    return loss


def live(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    found = {f"model/{name}": value.clone() for name, value in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        found |= {f"optimizer/state/{name}/{key}": value.clone() for key, value in optimizer.state[parameter].items()}
    return found


def loaded(repo: Repository, uid: str) -> dict[str, torch.Tensor]:
    tree = repo.load(uid)
    found = {f"model/{name}": value for name, value in tree["model"].items()}
    for name, state in tree["optimizer"]["state"].items():
        found |= {f"optimizer/state/{name}/{key}": value for key, value in state.items()}
    return found


@pytest.fixture(scope="module", autouse=True)
def one_processor() -> Iterator[None]:
    """Sums come out the same on whichever thread an operator runs."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def expected(one_processor: None) -> list[dict[str, torch.Tensor]]:
    """What a plain training has after each step."""
    model, optimizer = build()
    found = []
    for number in range(STEPS):
        step(model, optimizer, number, lambda batch: batch)
        found.append(live(model, optimizer))
    return found


@pytest.fixture
def repo(tmp_path: Path) -> Iterator[Repository]:
    with datastates.open(tmp_path / "runs", config=CONFIG) as opened:
        yield opened


def check_captures(repo: Repository, late: LateDevices, expected: list[dict[str, torch.Tensor]]) -> None:
    """A training on a late device, captured after each step: each state holds what it is to hold."""
    model, optimizer = build()
    late.put(model)
    with late.running(), repo.track(model=model, optimizer=optimizer) as run:
        captures = []
        for number in range(STEPS):
            step(model, optimizer, number, lambda batch: late.put(batch.clone()))
            waits = late.schedule.waits_of_this_thread()
            captures.append(run.capture())
            assert late.schedule.waits_of_this_thread() == waits, "capture waited for the device"
        late.schedule.catch_up()
        for number, capture in enumerate(captures):
            capture.wait(timeout_s=30)
            found = loaded(repo, capture.uid)
            wrong = [path for path, value in expected[number].items() if not torch.equal(value, found[path])]
            assert not wrong, f"state {number}: {len(wrong)} of {len(found)} tensors are wrong, {wrong[0]} among them"


@pytest.mark.parametrize("lateness", Lateness, ids=lambda each: each.value)
def test_what_is_captured_is_what_the_training_had(lateness: Lateness, repo: Repository, expected: list[dict[str, torch.Tensor]]) -> None:
    check_captures(repo, LateDevices(lateness), expected)


def without(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, line: str) -> None:
    """Take one line out of a method."""
    function = getattr(owner, name)
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(line) == 1, f"{owner.__name__}.{name}: {line!r} has moved"
    module = vars(sys.modules[function.__module__])
    made: dict[str, Callable[..., object]] = {}
    exec(compile("from __future__ import annotations\n" + source.replace(line, "pass"), "planted", "exec"), module, made)
    monkeypatch.setattr(owner, name, made[name])


PLANTED = {
    "the copies do not wait for the training": (Lateness.COMPUTE, Stager, "_copy_from", "side.wait_stream(current)"),
    "the training does not wait for what is copied at once": (Lateness.COPIES, Stager, "_copy_from", "current.wait_stream(side)"),
    "the update does not wait for the copies": (Lateness.COPIES, Stager, "fence", "devices().current(device).wait_event(event)"),
    "the host does not wait for the copies": (Lateness.COPIES, Stager, "_copy_all", "event.synchronize()"),
    "memory is not kept for the copies": (Lateness.COPIES, Stager, "_copy_from", "devices().keep(source, side)"),
}


@pytest.mark.parametrize("planted", PLANTED.values(), ids=PLANTED.keys())
def test_a_wait_that_is_taken_out_is_noticed(
    planted: tuple[Lateness, type, str, str], repo: Repository, expected: list[dict[str, torch.Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    lateness, owner, name, line = planted
    without(monkeypatch, owner, name, line)
    with pytest.raises((AssertionError, Torn, Hazard)):
        check_captures(repo, LateDevices(lateness), expected)
