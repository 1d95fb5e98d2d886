"""Captures of a training whose device does everything late: what comes back is what a plain
training had, byte for byte, or it is not."""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import datastates
from datastates.config import Config
from datastates.engine import copy
from datastates.engine.copy import DeviceCopies
from datastates.engine.device_copies import CopySource, aside_of
from datastates.engine.handle import Capture
from datastates.errors import Corrupt, Torn
from datastates.repository import Repository
from datastates.state.manifest import CHUNK_BYTES
from datastates.training import guard
from tests.support.late import Hazard, LateDevices, Lateness
from tests.support.planting import without
from tests.support.ranks import Rank, ranks_of

STEPS = 4
BUILDING = threading.Lock()
CONFIG = Config(memory_bytes=64 * CHUNK_BYTES, durable_interval_s=None)


class Net(nn.Module):
    """Weights of 256 KiB, which are copied behind the fence; biases, what batch norm counts and
    2 MiB of a sum are copied at once."""

    def __init__(self, *, is_large: bool) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(256, 256), nn.BatchNorm1d(256), nn.Linear(256, 256)
        self.sum: torch.Tensor
        self.register_buffer("sum", torch.zeros(2048 if is_large else 1, 256))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.b(torch.relu(self.norm(self.a(x))))
        self.sum += found.detach().mean(0)
        return found


def build(*, is_large: bool = False) -> tuple[nn.Module, torch.optim.Optimizer]:
    with BUILDING:
        torch.manual_seed(0)
        model = Net(is_large=is_large)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    number: int,
    put: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    optimizer.zero_grad()
    batch = torch.randn(16, 256, generator=torch.Generator().manual_seed(number))
    loss: torch.Tensor = (model(put(batch)) ** 2).mean()
    loss.backward()
    optimizer.step()
    return loss


def live(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    found = {f"model/{name}": value.clone() for name, value in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        state = optimizer.state[parameter]
        found |= {
            f"optimizer/state/{name}/{key}": value.clone()
            for key, value in state.items()
            if isinstance(value, torch.Tensor)
        }
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


@functools.cache
def plain(*, is_large: bool) -> list[dict[str, torch.Tensor]]:
    """What a plain training has after each step."""
    model, optimizer = build(is_large=is_large)
    found = []
    for number in range(STEPS):
        step(model, optimizer, number, lambda batch: batch)
        found.append(live(model, optimizer))
    return found


@pytest.fixture
def repo(tmp_path: Path) -> Iterator[Repository]:
    with datastates.open(tmp_path / "runs", config=CONFIG) as opened:
        yield opened


def check_captures(
    repo: Repository,
    late: LateDevices,
    *,
    index: int = 0,
    may_wait: bool = False,
    is_here: bool = False,
    is_eager: bool = False,
    is_large: bool = False,
) -> None:
    """A training on a late device, captured after each step: each state holds what it is to hold,
    and no capture waited for the device.

    ``is_eager``: the first state is asked for before the device has caught up.
    """
    (model, optimizer), expected = build(is_large=is_large), plain(is_large=is_large)
    late.put(model, index)
    with (
        nullcontext() if is_here else late.running(),
        repo.track(model=model, optimizer=optimizer) as run,
    ):
        captures = []
        for number in range(STEPS):
            step(model, optimizer, number, lambda batch: late.put(batch.clone(), index))
            waits = late.schedule.waits_of_this_thread()
            captures.append(run.capture())
            assert may_wait or late.schedule.waits_of_this_thread() == waits, (
                "capture waited for the device"
            )
        if is_eager:
            captures[0].wait(timeout_s=30)
        late.schedule.catch_up()
        for number, capture in enumerate(captures):
            capture.wait(timeout_s=30)
            found = loaded(repo, capture.uid)
            wrong = [
                path
                for path, value in expected[number].items()
                if not torch.equal(value, found[path])
            ]
            assert not wrong, (
                f"state {number}: {len(wrong)} of {len(found)} tensors are wrong, {wrong[0]} among"
                " them"
            )


@pytest.mark.parametrize("lateness", Lateness, ids=lambda each: each.value)
def test_what_is_captured_is_what_the_training_had(lateness: Lateness, repo: Repository) -> None:
    check_captures(
        repo, LateDevices(lateness), is_large=lateness in (Lateness.COPIES, Lateness.BOTH)
    )


PLANTED: dict[str, tuple[Lateness, str, str, str]] = {
    "the copies do not wait for the training": (
        Lateness.COMPUTE,
        "_cross",
        "devices().wait(crossing.side, crossing.begun)",
        "pass",
    ),
    "what is large does not wait for the training": (
        Lateness.COMPUTE,
        "_begin_on",
        "devices().wait(side, devices().mark(current))",
        "pass",
    ),
    "the training does not wait for what is large": (
        Lateness.COPIES,
        "_begin_on",
        "devices().wait(current, devices().mark(side))",
        "pass",
    ),
    "what is small is not put aside": (
        Lateness.COPIES,
        "_begin_on",
        "aside_of(small, () if skipped else route.runs)",
        "[(source.start, source.flat) for source in small]",
    ),
    "the update does not wait for the copies": (
        *(
            Lateness.COPIES,
            "fence",
            "devices().wait(devices().current(crossing.device), behind)",
            "pass",
        ),
    ),
    "the host does not wait for the copies": (
        Lateness.COPIES,
        "finish",
        "crossing.arrived.synchronize()",
        "pass",
    ),
    "what is copied is not held": (Lateness.COPIES, "_cross", "crossing.held += pairs[1]", "pass"),
    "samples are not held": (Lateness.COPIES, "_cross", "crossing.held += _bring", "_bring"),
}


@pytest.mark.parametrize("planted", PLANTED.values(), ids=PLANTED.keys())
def test_a_wait_that_is_taken_out_is_noticed(
    planted: tuple[Lateness, str, str, str], repo: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    lateness, name, line, instead = planted
    without(monkeypatch, DeviceCopies, name, line, instead)
    late = LateDevices(lateness)
    late.schedule.patience_s = 5
    with pytest.raises((AssertionError, Torn, Corrupt, Hazard)):
        check_captures(repo, late, is_eager=name == "finish", is_large=name == "_begin_on")


@pytest.mark.parametrize(
    "lateness", [Lateness.COPIES, Lateness.COMPUTE], ids=lambda each: each.value
)
def test_states_of_a_training_with_sparse_gradients_are_right(
    lateness: Lateness, repo: Repository
) -> None:
    def trained(
        put: Callable[[Any], Any], capture: Callable[[nn.Module, torch.optim.Optimizer], None]
    ) -> None:
        table = nn.Embedding(
            256, 128, sparse=True, _weight=torch.arange(256.0 * 128).reshape(256, 128) / 4096
        )
        optimizer = torch.optim.SparseAdam(put(table).parameters(), lr=0.1)
        for number in range(STEPS):
            optimizer.zero_grad()
            table(put(torch.tensor([number, 2 * number, 7]))).square().sum().backward()
            optimizer.step()
            capture(table, optimizer)

    expected, captures = list[dict[str, torch.Tensor]](), list[Capture]()
    trained(lambda found: found, lambda table, optimizer: expected.append(live(table, optimizer)))
    late = LateDevices(lateness)
    with late.running(), ExitStack() as stack:

        def take(table: nn.Module, optimizer: torch.optim.Optimizer) -> None:
            if not captures:
                runs.append(stack.enter_context(repo.track(model=table, optimizer=optimizer)))
            captures.append(runs[0].capture())

        runs = list[datastates.Tracker]()
        trained(late.put, take)
        late.schedule.catch_up()
        for capture, state in zip(captures, expected, strict=True):
            found = loaded(repo, capture.wait(timeout_s=30).uid)
            assert [
                path for path, value in state.items() if not torch.equal(value, found[path])
            ] == []


@pytest.mark.parametrize(
    "lateness", [Lateness.COPIES, Lateness.COMPUTE], ids=lambda each: each.value
)
def test_averages_of_weights_are_what_they_were_when_each_state_was_captured(
    lateness: Lateness, repo: Repository
) -> None:
    """No fence comes before the update of an average: none of it may be copied later."""

    def averaged(
        put: Callable[[Any], Any],
    ) -> Iterator[tuple[nn.Module, torch.optim.Optimizer, AveragedModel]]:
        model, optimizer = build()
        average = AveragedModel(put(model), multi_avg_fn=get_ema_multi_avg_fn(0.5))
        for number in range(STEPS):
            average.update_parameters(model)
            step(model, optimizer, number, lambda batch: put(batch.clone()))
            yield model, optimizer, average

    expected = [
        {name: value.clone() for name, value in average.state_dict().items()}
        for _, _, average in averaged(lambda found: found)
    ]
    late, captures = LateDevices(lateness), list[Capture]()
    late.schedule.patience_s = 5
    with late.running(), ExitStack() as stack:
        for model, optimizer, average in averaged(late.put):
            if not captures:
                run = stack.enter_context(
                    repo.track(model=model, optimizer=optimizer, average=average)
                )
            captures.append(run.capture())
        late.schedule.catch_up()
        for capture, state in zip(captures, expected, strict=True):
            found = repo.load(capture.wait(timeout_s=30).uid)["average"]
            assert [
                name for name, value in state.items() if not torch.equal(value, found[name])
            ] == []


def test_a_fence_waits_on_the_host_for_host_memory_only(repo: Repository) -> None:
    late = LateDevices(Lateness.COPIES)
    late.schedule.patience_s = 60
    model = nn.ModuleList([nn.Linear(256, 256), nn.Linear(256, 256)])
    late.put(model[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with late.running(), repo.track(model=model, optimizer=optimizer) as run:
        expected = {name: value.clone() for name, value in model.state_dict().items()}
        capture = run.capture()
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        assert not any(stream.is_side and not stream.ops for stream in late.schedule.streams), (
            "the copies were waited for"
        )
        late.schedule.catch_up()
        capture.wait(timeout_s=30)
        found = repo.load(capture.uid)["model"]
        assert all(torch.equal(value, found[name]) for name, value in expected.items())


def test_an_update_after_two_captures_tears_neither(repo: Repository) -> None:
    late = LateDevices(Lateness.COPIES)
    late.schedule.patience_s = 5
    weight = nn.Parameter(torch.zeros(300, 300))
    late.put(weight)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    with late.running(), repo.track(weight=weight, optimizer=optimizer) as run:
        captures = [run.capture() for _ in range(2)]  # as where a scaler leaves a step out
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        late.schedule.catch_up()
        for capture in captures:
            assert not repo.load(capture.wait(timeout_s=30).uid)["weight"].any()


def test_numbers_on_a_device_arrive_with_the_state(repo: Repository) -> None:
    late = LateDevices(Lateness.BOTH)
    late.schedule.patience_s = 60
    weight, loss, scale = (late.put(torch.ones(size)) for size in ((300, 300), (), ()))
    tracker = late.put(torch.zeros((), dtype=torch.int32))
    scaler = torch.amp.GradScaler("cpu")
    scaler._scale, scaler._growth_tracker = scale, tracker
    with late.running(), repo.track(weight=weight, scaler=scaler) as run:
        captures, waits = [], late.schedule.waits_of_this_thread()
        for _ in range(3):
            loss.add_(0.5)
            scale.add_(2)
            tracker.add_(1)
            captures.append(run.capture(metrics={"lr": 0.1, "loss": loss, "steps": 3}))
        assert late.schedule.waits_of_this_thread() == waits
        late.schedule.catch_up()
        for number, capture in enumerate(captures, 1):
            capture.wait(timeout_s=30)
            assert repo.state(capture.uid).metrics == {
                "lr": 0.1,
                "loss": 1 + number / 2,
                "steps": 3.0,
            }
            found = repo.load(capture.uid)["scaler"]
            assert found == {
                **torch.amp.GradScaler("cpu").state_dict(),
                "scale": 1 + number * 2.0,
                "_growth_tracker": number,
            }


def test_a_device_that_is_not_used_is_not_reached(repo: Repository) -> None:
    late = LateDevices(Lateness.COPIES)
    check_captures(repo, late, index=1)
    assert late.reached == {1}
    assert len(repo.load("main")["rng"]["cuda"]) == 2
    assert repo.load("main")["rng"]["cuda"][0] is None


def test_a_training_on_the_cpu_pins_nothing_and_reaches_no_device(repo: Repository) -> None:
    late = LateDevices(Lateness.COPIES)
    with late.running(), repo.track(weight=torch.ones(300, 300)) as run:
        run.capture().wait("durable")
        assert "cuda" not in repo.load("main")["rng"]
    assert not late.reached
    assert not late.registered


def test_memory_that_cannot_be_pinned_slows_captures_and_fails_none(
    repo: Repository, caplog: pytest.LogCaptureFixture
) -> None:
    late = LateDevices(Lateness.COPIES)
    late.most_registered = 0
    check_captures(repo, late, may_wait=True)
    assert sum("pageable" in message for message in caplog.messages) == 1


@pytest.mark.parametrize(
    "lateness", [Lateness.COPIES, Lateness.COMPUTE], ids=lambda each: each.value
)
def test_a_device_without_room_for_what_is_put_aside_slows_captures_and_fails_none(
    lateness: Lateness, repo: Repository
) -> None:
    late = LateDevices(lateness)
    late.most_bytes, tried = 1 << 30, list[int]()
    with pytest.MonkeyPatch.context() as patched:

        def full(small: Sequence[CopySource], runs: object) -> list[tuple[int, torch.Tensor]]:
            tried.append(len(small))
            late.most_bytes = 0
            try:
                return aside_of(small)
            finally:
                late.most_bytes = 1 << 30

        patched.setattr(copy, "aside_of", full)
        check_captures(repo, late)
    assert len(tried) == STEPS


def launches_of_a_capture(repo: Repository, layers: int) -> int:
    """What the training thread queues for a capture of as many weights, with biases, statistics
    and the state of their optimizer."""
    late = LateDevices(Lateness.COPIES)
    model = late.put(
        nn.Sequential(
            *(nn.Sequential(nn.Linear(128, 128), nn.BatchNorm1d(128)) for _ in range(layers))
        )
    )
    optimizer = torch.optim.AdamW(model.parameters())
    with late.running(), repo.track(branch=f"of-{layers}", model=model, optimizer=optimizer) as run:
        model(late.put(torch.ones(4, 128))).sum().backward()
        optimizer.step()
        before = late.schedule.launches_of_this_thread()
        run.capture()
        found = late.schedule.launches_of_this_thread() - before
        late.schedule.catch_up()
    return found


def test_a_capture_launches_no_more_for_many_tensors_than_for_few(repo: Repository) -> None:
    few, many = (launches_of_a_capture(repo, layers) for layers in (1, 12))
    assert few == many
    assert many < 10


def test_two_trainings_on_two_devices_do_not_disturb_each_other(tmp_path: Path) -> None:
    late = LateDevices(Lateness.RANDOM, seed=3)

    def train(index: int) -> None:
        with datastates.open(tmp_path / str(index), config=CONFIG) as repo, late.active():
            check_captures(repo, late, index=index, is_here=True)

    with late.running(), ThreadPoolExecutor(2) as pool:
        assert [*pool.map(train, range(2))] == [None, None]
    assert late.reached == {0, 1}


@pytest.mark.parametrize("used", [{1}, {0, 1}], ids=["a rank on device 1", "a rank on each"])
def test_a_job_reaches_the_devices_that_its_ranks_use_and_no_other(
    used: set[int], tmp_path: Path
) -> None:
    late = LateDevices(Lateness.BOTH)

    def train(rank: Rank) -> list[Capture]:
        with late.active():
            return [rank.capture() for _ in range(STEPS)]

    with late.running(), ranks_of(tmp_path, None, 2) as ranks, ThreadPoolExecutor(2) as pool:
        for index in used:
            late.put(ranks[index].rows, index)
        captures = [*pool.map(train, ranks)]
        late.schedule.catch_up()
        for number, pair in enumerate(zip(*captures, strict=True), 1):
            assert len({capture.wait("durable", timeout_s=60).uid for capture in pair}) == 1
            assert torch.equal(
                ranks[0].repo.load(pair[0].uid)["rows"],
                torch.arange(27.0).reshape(9, 3) + 10 * number,
            )
    assert late.reached == used


@pytest.mark.parametrize(
    "lateness", [Lateness.COPIES, Lateness.COMPUTE], ids=lambda each: each.value
)
def test_a_restore_is_in_order_with_what_the_training_queues(
    lateness: Lateness, repo: Repository
) -> None:
    late = LateDevices(lateness)
    model, optimizer = build()
    late.put(model)
    with late.running(), repo.track(model=model, optimizer=optimizer) as run:
        for number in range(2):
            step(model, optimizer, number, lambda batch: late.put(batch.clone()))
            run.capture()
        run.restore("main~1")
        for number in range(1, STEPS):
            step(model, optimizer, number, lambda batch: late.put(batch.clone()))
            run.capture()
        late.schedule.catch_up()
    found = loaded(repo, "main")
    assert all(torch.equal(value, found[path]) for path, value in plain(is_large=False)[-1].items())


def test_pinned_memory_is_poison_until_something_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    late, empty = LateDevices(Lateness.BOTH), torch.empty

    def used_before(*size: Any, dtype: torch.dtype) -> torch.Tensor:
        return empty(*size, dtype=dtype).fill_(math.nan if dtype.is_floating_point else 0)

    monkeypatch.setattr(torch, "empty", used_before)
    assert math.isfinite(late.pinned((), torch.float32).item()), (
        "a guard that does not wait for a loss would go back, and wait"
    )


@pytest.mark.parametrize(
    "is_planted", [False, True], ids=["as it is", "the loss is not waited for"]
)
def test_a_guard_reads_a_late_loss_and_goes_back(
    is_planted: bool, repo: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = LateDevices(Lateness.COMPUTE)
    weight, loss = late.put(torch.zeros(300, 300)), late.put(torch.zeros(()))
    if is_planted:
        without(monkeypatch, guard._Loss, "value", "self.is_copied.synchronize()")
    with late.running(), repo.track(weight=weight) as run:
        watched = run.guard()
        late.schedule.patience_s = 5 if is_planted else 0.1
        for number in range(1, 10):
            weight.add_(1)
            loss.fill_(math.nan if number == 6 else 1.0)
            if watched.rewound(loss):
                continue
            waits = late.schedule.waits_of_this_thread()
            run.capture()
            assert late.schedule.waits_of_this_thread() == waits
        late.schedule.catch_up()
        found = [(rewind.step, rewind.good.step) for rewind in watched.rewinds]
    assert found == ([] if is_planted else [(6, 4)])
