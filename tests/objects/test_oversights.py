"""What a script most likely does not mean is refused, or said once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import datastates
from datastates import Config, InvalidInput, Repository, Tracker
from datastates.objects.oversights import Oversights
from tests.objects.test_sharing import Wrapping

CONFIG = Config(memory_bytes=64 << 20, durable_interval_s=None)


@pytest.fixture
def repo(tmp_path: Path) -> Iterator[Repository]:
    """A repository that writes only what it is asked to."""
    with datastates.open(tmp_path / "runs", config=CONFIG) as opened:
        yield opened


@pytest.mark.parametrize("name", ["durable_evry", "durable_interval", "back_presure", "strikt", "onyl", "branches"])
def test_a_misspelt_option_is_refused(repo: Repository, name: str) -> None:
    with pytest.raises(InvalidInput, match=f"^{name} is no option and would be tracked as a value: did you mean "):
        repo.track(weight=torch.zeros(1), **{name: 5})  # type: ignore[arg-type]  # that is the point
    assert repo.refs() == []


def test_values_of_other_names_are_tracked(repo: Repository) -> None:
    names = ("epoch", "state", "seed", "steps", "name", "lr", "batch", "fold", "restarts")
    assert set(repo.track(weight=torch.zeros(1), **dict.fromkeys(names, 1)).values) == set(names)  # type: ignore[arg-type]


class Counting(nn.Module):
    """Has a buffer that changes and one that does not, neither of which its state_dict has."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("seen", torch.zeros(1), persistent=False)
        self.register_buffer("mask", torch.ones(2), persistent=False)


@pytest.mark.parametrize("is_replaced", [True, False])
def test_a_buffer_that_is_left_out_and_changes_is_named_once(
    repo: Repository, caplog: pytest.LogCaptureFixture, *, is_replaced: bool
) -> None:
    model = nn.Sequential(nn.Linear(2, 2), Counting())
    seen: Any = model[1]
    seen.seen += 1  # by a first forward pass
    with repo.track(model=model) as run:
        for number in range(5):
            run.capture()
            assert ("model/1.seen: registered with persistent=False" in caplog.text) == (number > 1)
            if number:
                seen.seen = seen.seen + 1 if is_replaced else seen.seen.add_(1)
    assert len(caplog.records) == 1
    assert "mask" not in caplog.text


class Metric(nn.Module):
    """Keeps what it counts as torchmetrics' metrics do."""

    def __init__(self) -> None:
        super().__init__()
        self._defaults = {"total": torch.zeros(1)}
        self._persistent = {"total": False}
        self.total = torch.zeros(1)


class Empty:
    """Counts, and says nothing of it."""

    def __init__(self) -> None:
        self.count = 3

    def state_dict(self) -> dict[str, object]:
        return {}

    def load_state_dict(self, state: dict[str, object]) -> None:
        pass


def test_metrics_and_others_that_say_nothing_are_named(repo: Repository, caplog: pytest.LogCaptureFixture) -> None:
    repo.track(
        metrics={"accuracy": Metric()}, counter=Empty(), criterion=nn.CrossEntropyLoss(), scaler=torch.amp.GradScaler("cpu", enabled=False)
    )
    assert "metrics/accuracy: what it has counted is not in its state_dict" in caplog.text
    assert "counter: its state_dict is empty" in caplog.text
    assert "criterion" not in caplog.text
    assert "scaler" not in caplog.text


def steps(run: Tracker, model: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> None:
    for _ in range(count):
        model(torch.ones(2)).sum().backward()
        optimizer.step()
        run.capture()


def test_an_optimizer_that_was_replaced_is_named_once(repo: Repository, caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with repo.track(model=model, optimizer=optimizer) as run:
        steps(run, model, optimizer, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        steps(run, model, optimizer, 2)
        assert not caplog.records
        steps(run, model, optimizer, 6)
    assert caplog.text.count("optimizer takes no step although its parameters change") == 1


def test_optimizers_that_take_turns_are_no_oversight(repo: Repository, caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(2, 2)
    first, second = torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.Adam(model.parameters())
    with repo.track(model=model, first=first, second=second) as run:
        steps(run, model, first, 5)
        steps(run, model, second, 5)
        for _ in range(5):
            run.capture()  # nothing changes
    assert not caplog.records


def test_an_object_under_another_name_is_recognised(repo: Repository) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    with repo.track(model=model, optimizer=optimizer, epoch=1) as run:
        steps(run, model, optimizer, 1)
    with pytest.raises(InvalidInput) as refused:
        repo.track(net=model, optim=optimizer, epcoh=1)
    said = str(refused.value)
    assert "the state has model, optimizer, rng, epoch" in said
    assert "its model looks like your net: call it model as well" in said
    assert "its optimizer looks like your optim" in said
    assert "its epoch looks like your epcoh" in said
    assert "strict=False" not in said


def test_an_object_that_is_new_is_left_as_it_is_where_that_is_asked_for(repo: Repository) -> None:
    model = nn.Linear(2, 2)
    with repo.track(model=model) as run:
        run.capture()
    with pytest.raises(InvalidInput, match=r"only=\['model', 'rng'\] restores what both have, and leaves extra as it is"):
        repo.track(model=model, extra=torch.ones(3))
    with repo.track(model=model, extra=(extra := torch.ones(3)), only=["model", "rng"]):
        assert extra.tolist() == [1, 1, 1]


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_a_lazy_module_is_captured_once_it_has_a_shape(repo: Repository) -> None:
    model = nn.Sequential(nn.LazyLinear(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with repo.track(model=model, optimizer=optimizer) as run:
        with pytest.raises(InvalidInput, match="of a lazy module has no shape yet"):
            run.capture()
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        assert run.capture().wait().step == 2


def test_parameters_that_an_optimizer_trains_and_nothing_tracked_has_are_told_once(
    repo: Repository, caplog: pytest.LogCaptureFixture
) -> None:
    model, loss, late = nn.Linear(2, 2), nn.Linear(2, 1), nn.Linear(3, 3)
    optimizer = torch.optim.SGD([*model.parameters(), *loss.parameters()], 0.1)
    with repo.track(model=model, optimizer=optimizer) as run:
        for _ in range(3):
            run.capture()
        assert caplog.text.count("optimizer trains 2 parameters that nothing tracked has, of shape (1, 2), (1,): no state has them") == 1
        optimizer.add_param_group({"params": [late.weight]})
        for _ in range(3):
            run.capture()
        assert caplog.text.count("optimizer trains 3 parameters") == 1


def test_parameters_that_replace_as_many_others_are_told(repo: Repository, caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with repo.track(model=model, optimizer=optimizer) as run:
        run.capture()
        assert "nothing tracked has" not in caplog.text
        optimizer.param_groups[0]["params"][:] = nn.Linear(3, 3).parameters()
        run.capture()
    assert "optimizer trains 2 parameters that nothing tracked has, of shape (3, 3), (3,): no state has them" in caplog.text


def test_a_parameter_that_wraps_others_is_not_taken_for_another_that_does(caplog: pytest.LogCaptureFixture) -> None:
    had, lost = (Wrapping(torch.ones(3), requires_grad=True) for _ in range(2))
    optimizer = torch.optim.SGD([had, lost], 0.1)
    Oversights({"optimizer": optimizer}, {"weights": {"it": had}}, lambda _: True).look()
    assert "optimizer trains a parameter that nothing tracked has, of shape (3,)" in caplog.text


class Agent:
    """Has networks of its own, and a state."""

    def __init__(self) -> None:
        self.net = nn.Linear(2, 2)

    def state_dict(self) -> dict[str, Any]:
        return {"net": self.net.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.net.load_state_dict(state["net"])


@pytest.mark.parametrize("kind", ["module", "wrapped", "tensors", "state_dict", "agent", "lazy", "in a list"])
def test_parameters_that_something_tracked_has_are_not_told(repo: Repository, caplog: pytest.LogCaptureFixture, kind: str) -> None:
    agent = Agent()
    model = nn.LazyLinear(2) if kind == "lazy" else agent.net
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    tracked: dict[str, dict[str, Any]] = {
        "module": {"model": model},
        "wrapped": {"model": nn.DataParallel(model)},
        "tensors": {"weights": dict(model.named_parameters())},
        "state_dict": {"weights": model.state_dict()},
        "agent": {"agent": agent},
        "lazy": {"model": model},
        "in a list": {"models": [nn.Linear(1, 1), model]},
    }
    with repo.track(optimizer=optimizer, **tracked[kind]) as run:
        model(torch.ones(1, 2))
        run.capture()
        run.capture()
    assert "nothing tracked has" not in caplog.text


def accumulate(repo: Repository, every: int, *, zeroes_first: bool, captures_twice: bool = False, **objects: Any) -> None:
    """Eight batches, a step every so many of them."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with repo.track(model=model, optimizer=optimizer, **objects) as run:
        for number in range(8):
            if zeroes_first and number % every == 0:
                optimizer.zero_grad(set_to_none=number % 3 == 0)
            model(torch.randn(4, 2)).sum().backward()
            if number % every == every - 1:
                optimizer.step()
                if not zeroes_first:
                    optimizer.zero_grad()
            run.capture()
            if captures_twice:
                run.capture(metrics={"validation": 1.0})


@pytest.mark.parametrize("zeroes_first", [True, False])
def test_captures_within_an_accumulation_are_told_once(repo: Repository, caplog: pytest.LogCaptureFixture, *, zeroes_first: bool) -> None:
    accumulate(repo, 4, zeroes_first=zeroes_first)
    assert caplog.text.count("captured while optimizer accumulates gradients, which this state does not have") == 1


@pytest.mark.parametrize("zeroes_first", [True, False])
@pytest.mark.parametrize("captures_twice", [True, False])
def test_captures_after_steps_are_not_told(
    repo: Repository, caplog: pytest.LogCaptureFixture, *, zeroes_first: bool, captures_twice: bool
) -> None:
    accumulate(repo, 1, zeroes_first=zeroes_first, captures_twice=captures_twice)
    assert "accumulates" not in caplog.text


def test_gradients_that_states_have_are_not_told(repo: Repository, caplog: pytest.LogCaptureFixture) -> None:
    accumulate(repo, 4, zeroes_first=True, gradients=True)
    assert "accumulates" not in caplog.text


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_step_that_the_script_leaves_out_is_no_accumulation(
    repo: Repository, caplog: pytest.LogCaptureFixture, *, set_to_none: bool
) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with repo.track(model=model, optimizer=optimizer) as run:
        for number in range(8):
            optimizer.zero_grad(set_to_none=set_to_none)
            model(torch.randn(4, 2)).sum().backward()
            if number not in (3, 4):
                optimizer.step()
            run.capture()
    assert not caplog.records


def test_an_embedding_that_clips_its_weights_is_no_step_of_another_optimizer(repo: Repository, caplog: pytest.LogCaptureFixture) -> None:
    for model in (nn.Sequential(nn.Embedding(4, 2, max_norm=0.1), nn.Linear(2, 1)), nn.Embedding(4, 2, max_norm=0.1)):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with repo.track(model=model, optimizer=optimizer, gradients=True, branch=f"of-{len(list(model.parameters()))}") as run:
            for _ in range(6):
                with torch.no_grad():
                    next(model.parameters()).mul_(2)
                model(torch.arange(4)).sum().backward()
                run.capture()
    assert not caplog.records


def test_an_optimizer_that_was_replaced_is_named_although_a_layer_is_frozen(repo: Repository, caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with repo.track(model=model, optimizer=optimizer) as run:
        steps(run, model, torch.optim.SGD(model.parameters(), lr=0.01), 6)
    assert caplog.text.count("optimizer takes no step although its parameters change") == 1


class Prompt:
    """Its state is a copy of what is trained: as tensors, as arrays or as lists."""

    def __init__(self, kind: str) -> None:
        self.weight = torch.ones(3, requires_grad=True)
        self.kind = kind

    def state_dict(self) -> dict[str, Any]:
        copied = self.weight.detach().clone()
        return {"weight": copied if self.kind == "tensor" else copied.numpy() if self.kind == "array" else copied.tolist()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        with torch.no_grad():
            self.weight.copy_(torch.as_tensor(state["weight"]))


@pytest.mark.parametrize("kind", ["tensor", "array", "list"])
def test_parameters_of_which_an_object_may_have_a_copy_are_not_told(repo: Repository, caplog: pytest.LogCaptureFixture, kind: str) -> None:
    prompt = Prompt(kind)
    with repo.track(prompt=prompt, optimizer=torch.optim.SGD([prompt.weight], 0.1)) as run:
        run.capture()
    assert "nothing tracked has" not in caplog.text


def test_parameters_of_which_no_object_can_have_a_copy_are_told(repo: Repository, caplog: pytest.LogCaptureFixture) -> None:
    prompt, other = Prompt("tensor"), nn.Linear(5, 5)
    optimizer = torch.optim.SGD([prompt.weight, *other.parameters()], 0.1)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    with repo.track(prompt=prompt, optimizer=optimizer, schedule=schedule) as run:
        run.capture()
    assert "optimizer trains 2 parameters that nothing tracked has, of shape (5, 5), (5,)" in caplog.text
