"""Restores into the objects of a training, of which only the first looks at each tensor."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest
import torch
from torch import nn

import datastates
from datastates import Config, Repository
from datastates.maintenance import loading
from datastates.maintenance.loading import RestorePlan
from tests.support.late import LateDevices, Lateness
from tests.support.late.dispatch import Operators

CONFIG = Config(memory_bytes=1 << 30, durable_interval_s=None)
LAYERS = 74  # with two parameters each, and three tensors of the optimizer for each: 592 tensors


def made(
    put: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor,
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model of 74 layers, and its optimizer after a step."""
    torch.manual_seed(0)
    layers = [nn.Linear(100, 100) for _ in range(LAYERS)]
    for layer in layers:
        layer.weight = nn.Parameter(put(layer.weight.detach()))
        layer.bias = nn.Parameter(put(layer.bias.detach()))
    model = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False, capturable=True)
    for parameter in model.parameters():
        optimizer.state[parameter] = {
            "step": put(torch.tensor(3.0)),
            "exp_avg": put(torch.rand(parameter.shape)),
            "exp_avg_sq": put(torch.rand(parameter.shape)),
        }
    return model, optimizer


def tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """All tensors of both."""
    entries = [optimizer.state[parameter] for parameter in model.parameters()]
    return [*model.parameters(), *(each for entry in entries for each in entry.values())]


@contextmanager
def counted(calls: list[str]) -> Iterator[None]:
    """Note the calls of Python functions on this thread, without those of the simulated device and
    of torch's dispatch to it."""

    def note(frame: FrameType, event: str, _: object) -> None:
        if event != "call" or "/torch/" in frame.f_code.co_filename:
            return
        here: FrameType | None = frame
        while here is not None:
            if "tests/support/late" in here.f_code.co_filename:
                return
            here = here.f_back
        calls.append(f"{frame.f_code.co_filename}:{frame.f_code.co_qualname}")

    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)


def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """The thread and the operator of each launch from now on."""
    found: list[tuple[str, str]] = []
    queue = Operators._queue

    def noted(self: Operators, func: object, *args: object, **more: object) -> object:
        found.append((threading.current_thread().name, str(func)))
        return queue(self, func, *args, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(Operators, "_queue", noted)
    return found


def test_a_second_restore_of_592_tensors_makes_few_calls_and_launches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    late, launches = LateDevices(Lateness.BOTH), launched(monkeypatch)
    with late.running(), datastates.open(tmp_path, config=CONFIG) as repo:
        model, optimizer = made(late.put)
        assert len(tensors(model, optimizer)) == 592
        expected = [each.clone() for each in tensors(model, optimizer)]
        with repo.track(rng=False, model=model, optimizer=optimizer) as run:
            run.capture().wait(timeout_s=60)
            first = repo.restore("main", model=model, optimizer=optimizer)
            for each in tensors(model, optimizer):
                each.detach().zero_()
            calls: list[str] = []
            launches.clear()
            with counted(calls):
                second = repo.restore("main", model=model, optimizer=optimizer)
            assert len(launches) <= 40, launches
            assert len(calls) <= 3000, len(calls)
            late.schedule.catch_up()
            for each, was in zip(tensors(model, optimizer), expected, strict=True):
                assert torch.equal(each, was)
            assert sorted(second.restored) == sorted(first.restored)
            assert second == datastates.RestoreReport(
                **{name: getattr(first, name) for name in first.__dataclass_fields__}
                | {"restored": second.restored}
            )


def test_a_second_restore_from_disk_makes_few_calls_and_launches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    late, launches = LateDevices(Lateness.BOTH), launched(monkeypatch)
    with late.running():
        model, optimizer = made(late.put)
        expected = [each.clone() for each in tensors(model, optimizer)]
        with datastates.open(tmp_path, config=CONFIG) as repo:
            run = repo.track(rng=False, model=model, optimizer=optimizer)
            capture = run.capture()
            late.schedule.catch_up()
            capture.wait("durable", timeout_s=60)
        with (
            datastates.open(tmp_path, config=CONFIG) as repo,
            repo.track(rng=False, model=model, optimizer=optimizer),
        ):
            repo.restore("main", model=model, optimizer=optimizer)
            for each in tensors(model, optimizer):
                each.detach().zero_()
            calls: list[str] = []
            launches.clear()
            with counted(calls):
                repo.restore("main", model=model, optimizer=optimizer)
            late.schedule.catch_up()
    assert len(launches) <= 40, launches
    assert len(calls) <= 3000, len(calls)
    assert all(map(torch.equal, tensors(model, optimizer), expected))


@pytest.fixture
def repo(tmp_path: Path) -> Iterator[Repository]:
    with datastates.open(tmp_path, config=CONFIG) as repository:
        yield repository


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each restore, whether a plan was there for it."""
    found: list[bool] = []
    is_for = RestorePlan.is_for

    def noted(self: RestorePlan, *args: object) -> bool:
        found.append(is_for(self, *args))  # type: ignore[arg-type]
        return found[-1]

    monkeypatch.setattr(RestorePlan, "is_for", noted)
    return found


def _nothing(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    pass


def _new_memory(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model[0].weight.data = torch.zeros(100, 100)  # type: ignore[index]


def _new_parameter(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    old = model[0].weight  # type: ignore[index]
    model[0].weight = nn.Parameter(torch.zeros(100, 100))  # type: ignore[index]
    optimizer.param_groups[0]["params"][0] = model[0].weight  # type: ignore[index]
    optimizer.state[model[0].weight] = optimizer.state.pop(old)  # type: ignore[index]


def _no_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.state.clear()


def _other_entry(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    entry = next(iter(optimizer.state.values()))
    entry["exp_avg"] = torch.zeros_like(entry["exp_avg"])


CHANGES = {
    "nothing": (_nothing, True),
    "other memory": (_new_memory, False),
    "another parameter": (_new_parameter, True),
    "no optimizer state": (_no_state, True),
    "another entry": (_other_entry, True),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_changed_since_the_first_restore_is_found(
    repo: Repository, known: list[bool], name: str
) -> None:
    model, optimizer = made()
    expected = [each.clone() for each in tensors(model, optimizer)]
    change, is_for = CHANGES[name]
    with repo.track(rng=False, model=model, optimizer=optimizer) as run:
        run.capture().wait(timeout_s=60)
        repo.restore("main", model=model, optimizer=optimizer)
        kept = tensors(model, optimizer)
        for each in kept:
            each.detach().zero_()
        change(model, optimizer)
        known.clear()
        report = repo.restore("main", model=model, optimizer=optimizer)
        assert known[0] is is_for
        for each, was in zip(tensors(model, optimizer), expected, strict=True):
            assert torch.equal(each, was)
        now = {*map(id, tensors(model, optimizer))}
        for each in kept:
            assert id(each) in now or not each.any(), "a tensor that nobody tracks has changed"
        assert len(report.restored) >= 592


def test_hooks_options_and_modes_are_as_without_a_plan(repo: Repository, known: list[bool]) -> None:
    model, optimizer = made()
    heard: list[str] = []
    with repo.track(rng=False, model=model, optimizer=optimizer) as run:
        run.capture().wait(timeout_s=60)
        repo.restore("main", model=model, optimizer=optimizer)
        optimizer.param_groups[0]["lr"] = 7.0
        model[3].eval()  # type: ignore[index]
        model[4].weight.requires_grad_(False)  # type: ignore[index]
        version = model[5].weight._version  # type: ignore[index]
        report = repo.restore("main", model=model, optimizer=optimizer)
        assert optimizer.param_groups[0]["lr"] == 1e-3
        assert report.in_train == ("model/3",)
        assert report.frozen == ("model/4.weight",) or report.unfrozen == ("model/4.weight",)
        assert model[5].weight._version > version, "autograd must see the change"  # type: ignore[index]
        model[6].register_load_state_dict_post_hook(lambda *_: heard.append("loaded"))  # type: ignore[index]
        repo.restore("main", model=model, optimizer=optimizer)
        assert heard == ["loaded"]


def test_another_layout_gets_another_plan(repo: Repository, known: list[bool]) -> None:
    model, optimizer = made()
    with repo.track(rng=False, model=model, optimizer=optimizer) as run:
        first = run.capture().wait(timeout_s=60)
        optimizer.state.popitem()
        second = run.capture().wait(timeout_s=60)
        for uid in (first.uid, second.uid, second.uid, first.uid):
            repo.restore(uid, model=model, optimizer=optimizer)
            assert len(optimizer.state) == 2 * LAYERS - (uid == second.uid)
        assert known.count(True) >= 1


def test_a_training_that_ended_keeps_no_plan(repo: Repository) -> None:
    model, optimizer = made()
    with repo.track(rng=False, model=model, optimizer=optimizer) as run:
        run.capture().wait("durable", timeout_s=60)
        repo.restore("main", model=model, optimizer=optimizer)
        (training,) = repo.core.trainings
        assert training.restore_plans
    assert not list(repo.core.trainings)
    assert loading._NOTHING.objects == {}
