"""The fence waits before every change of what it guards, travels with copies of the model, and
comes off again."""

from __future__ import annotations

import copy
import gc
import io
import os
import pickle
import signal
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import datastates
from datastates.engine.fence import Fence
from datastates.errors import Closed

from .build import held_back
from .optimizers import FORMS, Form, Net, train_step


class Waits:
    """Counts how often a fence was waited on, and by which thread."""

    def __init__(self) -> None:
        self.threads: list[str] = []

    def __call__(self) -> None:
        self.threads.append(threading.current_thread().name)

    def during(self, change: Callable[[], object]) -> int:
        before = len(self.threads)
        change()
        return len(self.threads) - before


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.id)
def test_a_step_waits_once_in_every_form_and_before_it_changes_anything(form: Form) -> None:
    model, optimizer = form.build()
    seen: list[list[torch.Tensor]] = []
    fence = Fence(
        lambda: seen.append([parameter.detach().clone() for parameter in model.parameters()])
    )
    fence.install([optimizer], [model])
    before = [parameter.detach().clone() for parameter in model.parameters()]
    train_step(model, optimizer)
    assert len(seen) == 1
    assert all(map(torch.equal, before, seen[0]))
    assert not all(map(torch.equal, before, model.parameters()))


def test_loading_into_a_module_and_into_an_optimizer_waits_first() -> None:
    model, waits = Net(), Waits()
    optimizer = torch.optim.AdamW(model.parameters())
    fence = Fence(waits)
    fence.install([optimizer], [model])
    train_step(model, optimizer)
    states = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    assert waits.during(lambda: model.load_state_dict(states[0])) == len([*model.modules()])
    assert waits.during(lambda: optimizer.load_state_dict(states[1])) == 1


def test_installing_again_hooks_only_what_is_new() -> None:
    model, waits = Net(), Waits()
    first, second = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
    fence = Fence(waits)
    for optimizers in ([first], [first], [first, second]):
        fence.install(optimizers, [model])
    assert waits.during(lambda: (first.step(), second.step())) == 2
    assert waits.during(lambda: model.load_state_dict(model.state_dict())) == len(
        [*model.modules()]
    )


def test_a_scheduler_and_a_scaler_step_through_the_fence() -> None:
    model, waits = Net(), Waits()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    Fence(waits).install([optimizer], [model])
    scaler.scale(model(torch.randn(4, 128)).sum()).backward()
    assert waits.during(lambda: scaler.step(optimizer)) == 1
    scaler.update()
    assert waits.during(optimizer.step) == 1
    assert waits.during(scheduler.step) == 0


def test_the_wait_is_on_the_thread_that_makes_the_change() -> None:
    model, waits = Net(), Waits()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    Fence(waits).install([optimizer], [model])
    other = threading.Thread(target=optimizer.step, name="stepper")
    other.start()
    other.join()
    assert waits.threads == ["stepper"]


def test_after_remove_nothing_waits_and_no_hook_is_left() -> None:
    model, waits = Net(), Waits()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fence = Fence(waits)
    fence.install([optimizer], [model])
    fence.remove()
    fence.remove()
    assert waits.during(lambda: (optimizer.step(), model.load_state_dict(model.state_dict()))) == 0
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_load_state_dict_pre_hooks
    assert not model._load_state_dict_pre_hooks


def test_loading_into_any_part_of_a_model_waits_first() -> None:
    model, waits = nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 2)), Waits()
    fence = Fence(waits)
    fence.install([], [model])
    for part in (model[0], model[0][0], model[1]):  # type: ignore[index]  # a Sequential
        # bound now
        assert waits.during(lambda part=part: part.load_state_dict(part.state_dict())) >= 1  # type: ignore[misc]
    model.append(late := nn.Linear(2, 2))
    assert waits.during(lambda: late.load_state_dict(late.state_dict())) == 0
    fence.install([], [model])
    assert waits.during(lambda: late.load_state_dict(late.state_dict())) == 1
    fence.remove()
    assert not any(part._load_state_dict_pre_hooks for part in model.modules())


def test_a_part_that_has_the_place_in_memory_of_one_that_is_gone_is_hooked() -> None:
    waits = Waits()
    fence = Fence(waits)
    for _ in range(20):
        model = nn.Linear(2, 2)
        fence.install([], [model])
        # bound now
        assert waits.during(lambda model=model: model.load_state_dict(model.state_dict())) == 1  # type: ignore[misc]
        del model


@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.parametrize(
    "make",
    [torch.jit.script, lambda model: torch.jit.trace(model, torch.zeros(1, 2))],
    ids=["script", "trace"],
)
def test_loading_into_a_compiled_script_waits_first(make: Callable[[nn.Module], nn.Module]) -> None:
    waits, model = Waits(), make(nn.Sequential(nn.Linear(2, 2)))
    fence = Fence(waits)
    fence.install([], [model])
    assert waits.during(lambda: model.load_state_dict(model.state_dict())) == 1
    fence.remove()
    assert waits.during(lambda: model.load_state_dict(model.state_dict())) == 0


def test_an_optimizer_that_exchanges_weights_to_evaluate_them_waits_first() -> None:
    class Averaging(torch.optim.SGD):
        def eval(self) -> int:
            return len(waits.threads)

        def train(self, *, mode: bool = True) -> int:
            return len(waits.threads) * mode

    waits = Waits()
    optimizer = Averaging(Net().parameters(), lr=0.1)
    fence = Fence(waits)
    fence.install([optimizer], [])
    assert (optimizer.eval(), optimizer.train(), optimizer.train(mode=False)) == (1, 2, 0)
    fence.remove()
    assert (optimizer.eval(), len(waits.threads)) == (3, 3)


# --- with a tracker -------------------------------------------------------------------------------


def test_a_tracked_model_can_be_copied_pickled_and_saved(tmp_path: Path) -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    with (
        datastates.open(tmp_path / "runs", memory_bytes=8 << 22) as repo,
        repo.track(model=model, optimizer=optimizer) as run,
    ):
        train_step(model, optimizer)
        run.capture()
        saved = io.BytesIO()
        torch.save({"model": model, "optimizer": optimizer}, saved)
        saved.seek(0)
        loaded = torch.load(saved, weights_only=False)
        copies = [
            copy.deepcopy(model),
            AveragedModel(model).module,
            pickle.loads(pickle.dumps(model)),
            loaded["model"],
        ]
        for made in copies:
            assert all(
                torch.equal(made.state_dict()[key], value)
                for key, value in model.state_dict().items()
            )
            made.load_state_dict(model.state_dict())
        twin, twin_optimizer = copy.deepcopy((model, optimizer))
        for one, other in ((twin, twin_optimizer), (loaded["model"], loaded["optimizer"])):
            train_step(one, other)
            one.load_state_dict(model.state_dict())


def test_closing_a_tracker_takes_its_hooks_off(tmp_path: Path) -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    with datastates.open(tmp_path / "runs", memory_bytes=8 << 22) as repo:
        with repo.track(model=model, optimizer=optimizer) as run:
            assert optimizer._optimizer_step_pre_hooks
            run.capture()
        assert not optimizer._optimizer_step_pre_hooks
        assert not optimizer._optimizer_load_state_dict_pre_hooks
        assert not model._load_state_dict_pre_hooks


def test_a_copy_of_the_model_keeps_no_closed_repository_alive(tmp_path: Path) -> None:
    model = Net()
    with (
        datastates.open(tmp_path / "runs", memory_bytes=8 << 22) as repo,
        repo.track(model=model) as run,
    ):
        loaded: nn.Module = pickle.loads(pickle.dumps(model))
        tracker = weakref.ref(run)
    del run, repo
    gc.collect()
    assert tracker() is None
    assert len(loaded._load_state_dict_pre_hooks) == 1


def test_a_child_forked_while_a_copy_is_under_way_waits_for_none_of_its_parents_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    with (
        datastates.open(tmp_path / "runs", memory_bytes=8 << 22) as repo,
        repo.track(model=model, optimizer=optimizer) as run,
    ):
        train_step(model, optimizer)
        with held_back(monkeypatch):
            capture = run.capture()
            child = os.fork()
            if not child:
                os._exit(_in_a_child(run, capture, model, optimizer))
            status = os.waitpid(child, 0)[1]
        assert os.waitstatus_to_exitcode(status) == 3
        assert capture.wait(timeout_s=60).step == 1


def _in_a_child(
    run: datastates.Tracker,
    capture: datastates.Capture,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
) -> int:
    """How often a use of the parent's threads was refused; nothing of it hangs."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(30)
    torch.set_num_threads(1)  # OpenMP's threads are the parent's too, and it does not know
    model.load_state_dict(model.state_dict())
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.step()
    run.fence()
    refused = 0
    uses: list[Callable[[], object]] = [
        capture.wait,
        lambda: capture.wait("durable"),
        lambda: run.head,
    ]
    for use in uses:
        try:
            use()
        except Closed:
            refused += 1
    run.close()
    return refused


class Hasty(torch.optim.SGD):
    """It changes something before it calls its closure, for all that anybody knows."""


@pytest.mark.parametrize(
    "name",
    [
        "SGD",
        "Adam",
        "AdamW",
        "RMSprop",
        "Adagrad",
        "NAdam",
        "RAdam",
        "Rprop",
        "ASGD",
        "Adamax",
        "LBFGS",
    ],
)
@pytest.mark.parametrize("way", ["positional", "keyword"])
def test_a_copy_overlaps_the_closure_of_a_step(name: str, way: str) -> None:
    said: list[str] = []
    weight = nn.Parameter(torch.ones(4))
    optimizer = getattr(torch.optim, name)([weight], lr=0.1)
    before = weight.detach().clone()

    def wait() -> None:
        said.append("changed" if not torch.equal(weight, before) else "waited")

    def closure() -> torch.Tensor:
        said.append("closure")
        optimizer.zero_grad()
        loss = weight.square().sum()
        loss.backward()
        return loss

    fence = Fence(wait)
    fence.install([optimizer], [])
    loss = optimizer.step(closure) if way == "positional" else optimizer.step(closure=closure)
    fence.remove()
    assert said[:2] == ["closure", "waited"]
    assert loss is not None
    assert torch.as_tensor(loss).item() == 4.0
    assert not torch.equal(weight, before)


def test_an_optimizer_of_the_users_own_waits_before_its_closure() -> None:
    said: list[str] = []
    optimizer = Hasty([nn.Parameter(torch.ones(1))], lr=0.1)
    fence = Fence(lambda: said.append("waited"))
    fence.install([optimizer], [])

    def closure() -> float:
        said.append("closure")
        return 0.0

    optimizer.step(closure)
    fence.remove()
    assert said == ["waited", "closure"]


def test_a_closure_that_raises_is_waited_for() -> None:
    said: list[str] = []
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    fence = Fence(lambda: said.append("waited"))
    fence.install([optimizer], [])

    def closure() -> float:
        raise ValueError("the training's own")

    with pytest.raises(ValueError, match="the training's own"):
        optimizer.step(closure)
    fence.remove()
    assert said == ["waited"]
