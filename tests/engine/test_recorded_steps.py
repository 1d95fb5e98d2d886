"""Steps that are recorded as a graph and replayed, and compiled ones: what is captured between
them is what the training had."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import datastates
from datastates.config import Config
from datastates.errors import InvalidInput, Torn
from datastates.repository import Repository
from datastates.state.manifest import CHUNK_BYTES
from tests.support.late import Hazard, LateDevices, Lateness

from .build import held_back

WARM_UP, STEPS = 2, 4


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Linear(256, 256))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def update(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
    optimizer.zero_grad()
    (model(batch) ** 2).mean().backward()
    optimizer.step()


def batch_of(number: int) -> torch.Tensor:
    return torch.randn(16, 256, generator=torch.Generator().manual_seed(number))


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


@functools.cache
def plain() -> list[dict[str, torch.Tensor]]:
    """What a plain training has after each step behind its warm-up."""
    model, optimizer = build()
    found = []
    for number in range(WARM_UP + STEPS):
        update(model, optimizer, batch_of(number))
        found.append(weights(model))
    return found[WARM_UP:]


def is_right(found: dict[str, torch.Tensor], number: int) -> bool:
    return all(torch.equal(value, found[name]) for name, value in plain()[number].items())


@pytest.fixture(autouse=True)
def one_processor() -> Iterator[None]:
    """Sums come out the same on whichever thread an operator runs."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def repo(tmp_path: Path) -> Iterator[Repository]:
    config = Config(memory_bytes=64 * CHUNK_BYTES, durable_interval_s=None)
    with datastates.open(tmp_path / "runs", config=config) as opened:
        yield opened


def replayed(repo: Repository, late: LateDevices, *, is_fenced: bool) -> list[bool | None]:
    """A training that records its third step and replays it: whether each state is right, None
    where it is said to be torn."""
    model, optimizer = build()
    late.put(model)
    batch = late.put(torch.zeros(16, 256))
    with late.running(), repo.track(model=model, optimizer=optimizer) as run:
        for number in range(WARM_UP):
            batch.copy_(batch_of(number))
            update(model, optimizer, batch)
        with late.recorded() as graph:
            update(model, optimizer, batch)
        captures = []
        for number in range(WARM_UP, WARM_UP + STEPS):
            batch.copy_(batch_of(number))
            if is_fenced:
                run.fence()
            graph.replay()
            captures.append(run.capture())
        late.schedule.catch_up()
        found = list[bool | None]()
        for number, capture in enumerate(captures):
            try:
                capture.wait(timeout_s=30)
            except Torn:
                found.append(None)
            else:
                found.append(is_right(repo.load(capture.uid)["model"], number))
    return found


@pytest.mark.parametrize("lateness", Lateness, ids=lambda each: each.value)
def test_a_step_that_is_replayed_behind_a_fence_is_captured_as_it_was(
    lateness: Lateness, repo: Repository
) -> None:
    assert replayed(repo, LateDevices(lateness), is_fenced=True) == [True] * STEPS


def test_a_replay_without_a_fence_tears_what_is_copied_then_and_is_found(repo: Repository) -> None:
    late = LateDevices(Lateness.COPIES)
    late.schedule.patience_s = 60
    assert replayed(repo, late, is_fenced=False) == [None] * (STEPS - 1) + [True]


def test_a_fence_adds_nothing_to_a_graph_that_is_recorded_and_a_capture_is_refused_there(
    repo: Repository,
) -> None:
    late = LateDevices(Lateness.COPIES)
    late.schedule.patience_s = 60
    model, optimizer = build()
    late.put(model)
    with late.running(), repo.track(model=model, optimizer=optimizer) as run:
        run.capture()
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        with late.recorded() as graph:
            run.fence()
            assert not graph.ops
            with pytest.raises(InvalidInput, match="a graph is being recorded"):
                run.capture()
            optimizer.step()
            assert graph.ops
        run.fence()
        graph.replay()
        late.schedule.catch_up()


def test_a_recording_takes_no_wait_of_the_host_and_none_of_a_stream() -> None:
    late = LateDevices(Lateness.COMPUTE)
    value = late.put(torch.ones(()))
    stream = late.current(late.of(value))
    for wait in (value.item, lambda: late.mark(stream), lambda: value.copy_(torch.zeros(()))):
        with late.running(), late.recorded(), pytest.raises(Hazard, match="recorded"):
            wait()
    with late.running(), late.recorded() as graph:
        value.add_(1)
    late.schedule.catch_up()
    assert value.item() == 1
    with late.running():
        graph.replay()
        graph.replay()
    late.schedule.catch_up()
    assert value.item() == 3


def whole(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[torch.Tensor], None]:
    return torch.compile(functools.partial(update, model, optimizer), backend="eager")


def parts(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[torch.Tensor], None]:
    forward, step = (
        torch.compile(model, backend="eager"),
        torch.compile(optimizer.step, backend="eager"),
    )

    def update_in_parts(batch: torch.Tensor) -> None:
        optimizer.zero_grad()
        (forward(batch) ** 2).mean().backward()
        step()

    return update_in_parts


@pytest.mark.filterwarnings(
    "ignore:`torch.jit:DeprecationWarning"
)  # of what torch imports to compile an optimizer
@pytest.mark.parametrize("compiled", [whole, parts])
def test_a_compiled_step_waits_for_the_copy(
    compiled: Callable[[nn.Module, torch.optim.Optimizer], Callable[[torch.Tensor], None]],
    repo: Repository,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, optimizer = build()
    step = compiled(model, optimizer)
    with held_back(monkeypatch) as gate, repo.track(model=model, optimizer=optimizer) as run:
        gate.open()
        for number in range(WARM_UP):
            step(batch_of(number))
            run.capture()
        captures = []
        for number in range(WARM_UP, WARM_UP + STEPS):
            step(batch_of(number))
            gate.hold()  # until a fence is waited for
            captures.append(run.capture())
        gate.open()
        for number, capture in enumerate(captures):
            capture.wait(timeout_s=60)
            assert is_right(repo.load(capture.uid)["model"], number)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_a_step_that_is_to_be_one_graph_is_told_why_it_cannot(repo: Repository) -> None:
    model, optimizer = build()
    step = torch.compile(lambda: optimizer.step(), backend="eager", fullgraph=True)
    with (
        repo.track(model=model, optimizer=optimizer),
        pytest.raises(Exception, match=r"compile optimizer.step\(\) without fullgraph=True"),
    ):
        step()
