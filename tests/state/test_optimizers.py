"""Optimizers of other classes, wrappers that never called ``Optimizer.__init__``, and whose
state fits whose."""

from __future__ import annotations

import copy
import pickle
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR

import datastates
from datastates import Config, Repository
from datastates.errors import InvalidInput
from datastates.state.adapters import Adapted
from datastates.state.optimizer import class_of
from datastates.state.restore import restore_into
from tests.engine.build import Gate, held_back

QUIET = Config(memory_bytes=64 << 20, durable_interval_s=None)


@pytest.fixture
def repo(tmp_path: Path) -> Iterator[Repository]:
    with datastates.open(tmp_path / "runs", config=QUIET) as opened:
        yield opened


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    with held_back(monkeypatch) as gate:
        yield gate


class HandingThrough(Optimizer):
    """As launchers wrap an optimizer: everything is the inner one's."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def state(self) -> Any:  # type: ignore[override]  # as such wrappers do
        return self.optimizer.state

    @property
    def param_groups(self) -> Any:  # type: ignore[override]  # as such wrappers do
        return self.optimizer.param_groups

    def state_dict(self) -> Any:
        return self.optimizer.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.optimizer.load_state_dict(state)

    def __getstate__(self) -> dict[str, Any]:
        return dict(vars(self))

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)


class SlowWeights(Optimizer):
    """As look-ahead does: a state of its own beside the inner one's, and a state_dict of both."""

    def __init__(self, inner: Optimizer) -> None:
        self.inner = inner
        self.param_groups = inner.param_groups
        self.state = defaultdict(dict)
        self.count = 0

    def state_dict(self) -> Any:
        state = self.inner.state_dict()
        numbers = {
            id(p): n
            for n, p in enumerate(p for group in self.param_groups for p in group["params"])
        }
        return {
            **state,
            "slow": {numbers[id(p)]: entry["slow"] for p, entry in self.state.items()},
            "count": self.count,
        }

    def load_state_dict(self, state: Any) -> None:
        parameters = [p for group in self.param_groups for p in group["params"]]
        self.inner.load_state_dict({"state": state["state"], "param_groups": state["param_groups"]})
        for number, slow in state["slow"].items():
            self.state[parameters[number]]["slow"] = slow.clone()
        self.count = state["count"]

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for (
            group
        ) in self.param_groups:  # before the inner step: that one's hooks come too late for this
            for parameter in group["params"]:
                slow = self.state[parameter].setdefault("slow", parameter.clone())
                parameter.lerp_(slow, 0.1)
        self.inner.step()
        self.count += 1


class Averaging(SGD):
    """As schedule-free ones do: to evaluate, the weights are exchanged for their average, in
    place."""

    @torch.no_grad()
    def eval(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.mul_(2)

    @torch.no_grad()
    def train(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.mul_(0.5)


WRAPPERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "handing through": lambda model: HandingThrough(AdamW(model.parameters())),
    "handing through twice": lambda model: HandingThrough(
        HandingThrough(AdamW(model.parameters()))
    ),
    "slow weights": lambda model: SlowWeights(AdamW(model.parameters())),
    "averaging": lambda model: Averaging(model.parameters(), lr=0.1, momentum=0.9),
}


def test_a_wrapper_is_asked_what_it_wraps_once_and_not_at_each_capture() -> None:
    model = nn.Linear(2, 2)
    wrapper = HandingThrough(AdamW(model.parameters()))
    adapted = Adapted({"model": model, "optimizer": wrapper})
    with patch.object(
        HandingThrough, "state_dict", autospec=True, side_effect=HandingThrough.state_dict
    ) as asked:
        for _ in range(3):
            adapted.tree()
    assert asked.call_count == 1


def make(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, 200))


def first_weight(model: nn.Module) -> torch.Tensor:
    return next(model.parameters())


def update(model: nn.Module, optimizer: Optimizer) -> float:
    optimizer.zero_grad()
    loss = model(torch.linspace(-1, 1, 800).view(4, 200)).square().mean()
    loss.backward()
    optimizer.step()
    return float(loss.detach())


@pytest.mark.parametrize("kind", WRAPPERS)
def test_a_wrapped_optimizer_is_captured_and_goes_on_bit_for_bit(
    kind: str, repo: Repository, gate: Gate
) -> None:
    model = make()
    optimizer = WRAPPERS[kind](model)
    with repo.track(model=model, optimizer=optimizer) as run:
        for _ in range(4):
            update(model, optimizer)
            gate.hold()
            capture = run.capture()
            before = [parameter.detach().clone() for parameter in model.parameters()]
            update(model, optimizer)  # waits for the copy, or the capture would tear
            tree = repo.load(capture.wait().uid)
            assert all(map(torch.equal, before, tree["model"].values()))
        expected = [update(model, optimizer) for _ in range(4)]
    other = make(1)
    its_optimizer = WRAPPERS[kind](other)
    again = repo.track(model=other, optimizer=its_optimizer)
    assert [update(other, its_optimizer) for _ in range(5)][1:] == expected
    again.close()


def test_a_wrapper_that_hands_through_is_the_optimizer_that_it_wraps(repo: Repository) -> None:
    model = make()
    optimizer = HandingThrough(AdamW(model.parameters()))
    update(model, optimizer)
    with repo.track(model=model, optimizer=optimizer) as run:
        run.capture()
    expected = update(model, optimizer), update(model, optimizer)
    plain = make(1)
    its_optimizer = AdamW(plain.parameters())
    repo.track(model=plain, optimizer=its_optimizer).close()
    assert (update(plain, its_optimizer), update(plain, its_optimizer)) == expected
    assert repo.load("main")["optimizer"]["state"]["0.weight"]["exp_avg"].shape == (200, 200)


def test_a_wrapper_without_groups_is_refused_by_name(repo: Repository) -> None:
    class Opaque(Optimizer):
        def __init__(self, inner: Optimizer) -> None:
            self.inner = inner

    with pytest.raises(
        InvalidInput,
        match=(
            r"optimizer is a Opaque, an optimizer without param_groups and state: track its \.inner"
            r" instead"
        ),
    ):
        repo.track(optimizer=Opaque(SGD(make().parameters(), lr=0.1)))


@pytest.mark.parametrize("kind", WRAPPERS)
def test_after_the_training_an_optimizer_has_its_own_methods_again(
    kind: str, repo: Repository
) -> None:
    model = make()
    optimizer = WRAPPERS[kind](model)
    before = {name: value for name, value in vars(optimizer).items() if callable(value)}
    with repo.track(model=model, optimizer=optimizer) as run:
        update(model, optimizer)
        run.capture()
    assert {name: value for name, value in vars(optimizer).items() if callable(value)} == before


def test_a_scheduler_made_before_or_after_steps_through_the_fence_of_a_wrapper(
    repo: Repository, gate: Gate
) -> None:
    for is_before in (True, False):
        model = make()
        optimizer = HandingThrough(SGD(model.parameters(), lr=0.1))
        scheduler = StepLR(optimizer, 1) if is_before else None
        run = repo.track(model=model, optimizer=optimizer, branch=f"b{is_before}")
        scheduler = scheduler or StepLR(optimizer, 1)
        gate.hold()
        capture = run.capture()
        update(model, optimizer)
        scheduler.step()
        capture.wait()
        run.close()
        update(model, optimizer)


def test_a_tracked_wrapper_can_be_copied_and_pickled(repo: Repository) -> None:
    model = make()
    optimizer = HandingThrough(SGD(model.parameters(), lr=0.1))
    with repo.track(model=model, optimizer=optimizer):
        twin, its_optimizer = copy.deepcopy((model, optimizer))
        loaded, its_other = pickle.loads(pickle.dumps((model, optimizer)))
    weights = first_weight(model).detach().clone()
    for each, of_it in ((twin, its_optimizer), (loaded, its_other)):
        update(each, of_it)
        assert not torch.equal(first_weight(each), weights)
    assert torch.equal(first_weight(model), weights)


# --- whose state fits whose -----------------------------------------------------------------------


class Logging(AdamW):
    """A class of a script's own that changes nothing of the state."""


class Lion(Optimizer):
    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))


FITTING: dict[str, tuple[Callable[[Any], Optimizer], Callable[[Any], Optimizer]]] = {
    "another form": (lambda p: AdamW(p, foreach=True), lambda p: AdamW(p, fused=True)),
    "a subclass": (AdamW, Logging),
    "from a subclass": (Logging, AdamW),
    "a wrapper": (AdamW, lambda p: HandingThrough(AdamW(p))),
    "a class of the script's": (Lion, Lion),
}


@pytest.mark.parametrize("kind", FITTING)
def test_a_state_fits_optimizers_of_its_class(kind: str) -> None:
    make_one, make_other = FITTING[kind]
    there, here = make(), make(1)
    one, other = make_one(there.parameters()), make_other(here.parameters())
    update(there, one)
    assert restore_into(
        {"model": here, "optimizer": other}, Adapted({"model": there, "optimizer": one}).tree()
    )
    assert other.state.keys() == set(here.parameters())


MISFITS: dict[str, tuple[Callable[[Any], Optimizer], Callable[[Any], Optimizer], str]] = {
    "AdamW": (
        AdamW,
        lambda p: SGD(p, lr=0.5),
        r"optimizer: the state has what torch\.optim\.AdamW keeps, the object torch\.optim\.SGD",
    ),
    "SGD": (
        lambda p: SGD(p, lr=0.5),
        AdamW,
        r"what torch\.optim\.SGD keeps, the object torch\.optim\.AdamW: make the former",
    ),
    "Adam": (Adam, AdamW, r"what torch\.optim\.Adam keeps, the object torch\.optim\.AdamW"),
    "own": (Lion, Logging, r"what Lion keeps, the object torch\.optim\.AdamW"),
    "wrapper": (
        lambda p: SlowWeights(SGD(p, lr=0.1)),
        lambda p: SGD(p, lr=0.1),
        r"what SlowWeights of torch\.optim\.SGD keeps, the object torch\.optim\.SGD",
    ),
    "wrapped": (
        lambda p: SlowWeights(AdamW(p)),
        lambda p: SlowWeights(SGD(p, lr=0.1)),
        (
            r"what SlowWeights of torch\.optim\.AdamW keeps, the object SlowWeights of"
            r" torch\.optim\.SGD"
        ),
    ),
}


@pytest.mark.parametrize("kind", MISFITS)
def test_the_state_of_another_class_is_refused_and_both_are_named(
    kind: str, repo: Repository
) -> None:
    make_one, make_other, message = MISFITS[kind]
    model = make()
    optimizer = make_one(model.parameters())
    with repo.track(model=model, optimizer=optimizer) as run:
        update(model, optimizer)
        run.capture()
    fresh = make(1)
    before = first_weight(fresh).detach().clone()
    other = make_other(fresh.parameters())
    options = copy.deepcopy(
        [
            {key: value for key, value in group.items() if key != "params"}
            for group in other.param_groups
        ]
    )
    with pytest.raises(InvalidInput, match=message + r"(.|\n)*strict=False"):
        repo.track(model=fresh, optimizer=other)
    assert torch.equal(first_weight(fresh), before)
    report = repo.restore("main", model=fresh, optimizer=other, strict=False)
    assert [note.path for note in report.mismatched] == ["optimizer"]
    assert torch.equal(first_weight(fresh), first_weight(model))
    assert not other.state
    assert [
        {key: value for key, value in group.items() if key != "params"}
        for group in other.param_groups
    ] == options
    repo.restore("main", model=fresh, optimizer=other, only="model")
    update(fresh, other)


def test_a_state_that_does_not_say_its_class_is_restored_as_ever() -> None:
    there, here = make(), make(1)
    one, other = AdamW(there.parameters()), AdamW(here.parameters())
    update(there, one)
    tree: Any = Adapted({"model": there, "optimizer": one}).tree()
    assert tree["optimizer"].pop("optimizer_class") == "torch.optim.AdamW"
    assert restore_into({"model": here, "optimizer": other}, tree)
    assert update(there, one) == update(here, other)


def test_the_class_of_an_optimizer_is_torchs_where_it_is_made_from_one() -> None:
    parameters = list(make().parameters())
    assert (
        class_of(Logging(parameters))
        == class_of(HandingThrough(AdamW(parameters)))
        == "torch.optim.AdamW"
    )
    assert class_of(Lion(parameters)) == "Lion"


# --- an optimizer that keeps another --------------------------------------------------------------


class Sharpness(Optimizer):
    """As SAM was published: the momentum is that of an optimizer of its own, which torch's
    ``state_dict`` leaves out."""

    def __init__(self, parameters: Any, base: Callable[..., Optimizer], **options: Any) -> None:
        super().__init__(parameters, {"rho": 0.05, **options})
        self.base_optimizer = base(self.param_groups, **options)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["old_p"] = parameter.clone()
        return self.base_optimizer.step()


class Relinking(Sharpness):
    """Its groups are those of the optimizer that it keeps also after a load."""

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        self.base_optimizer.param_groups = self.param_groups


def wrapped(*args: Any, **options: Any) -> Optimizer:
    return HandingThrough(Relinking(*args, **options))


@pytest.mark.parametrize("kind", [Sharpness, Relinking, wrapped])
@pytest.mark.parametrize("only", [None, ["model", "optimizer"]])
def test_an_optimizer_goes_on_with_the_one_that_it_keeps(
    repo: Repository, kind: Callable[..., Optimizer], only: list[str] | None
) -> None:
    model = make()
    optimizer = kind(model.parameters(), SGD, lr=0.1, momentum=0.9)
    with repo.track(model=model, optimizer=optimizer) as run:
        for _ in range(3):
            optimizer.param_groups[0]["lr"] *= 0.5
            update(model, optimizer)
            run.capture()
    expected = [update(model, optimizer) for _ in range(4)]
    other = make(1)
    its = kind(other.parameters(), SGD, lr=0.1, momentum=0.9)
    with repo.track(model=other, optimizer=its, only=only) as run:
        assert run.report
        assert not run.report.anew
        assert (
            "optimizer/inner/base_optimizer/state/0.weight/momentum_buffer" in run.report.restored
        )
        assert [update(other, its) for _ in range(4)] == expected


def test_a_state_without_the_optimizer_that_one_keeps_is_restored_and_that_is_told() -> None:
    there, here = make(), make(1)
    one, other = (
        Sharpness(model.parameters(), SGD, lr=0.1, momentum=0.9) for model in (there, here)
    )
    update(there, one)
    tree: Any = Adapted({"model": there, "optimizer": one}).tree()
    assert tree["optimizer"].pop("inner").keys() == {"base_optimizer"}
    report = restore_into({"model": here, "optimizer": other}, tree)
    assert report
    assert report.anew == (
        "optimizer: the state has nothing of its base_optimizer, which begins anew",
    )
    assert not restore_into({"model": here, "optimizer": other}, tree, only="model").anew


def test_a_state_of_an_optimizer_that_is_kept_no_more_is_refused() -> None:
    model = make()
    optimizer = Sharpness(model.parameters(), SGD, lr=0.1)
    tree: Any = Adapted({"model": model, "optimizer": optimizer}).tree()
    tree["optimizer"]["inner"]["other"] = {}
    with pytest.raises(InvalidInput, match="not in the objects:\n    optimizer/inner/other"):
        restore_into({"model": model, "optimizer": optimizer}, tree)


def test_an_optimizer_that_is_tracked_itself_or_is_in_the_state_already_is_captured_once() -> None:
    model = make()
    keeping = Sharpness(model.parameters(), SGD, lr=0.1)
    tree: Any = Adapted(
        {"model": model, "optimizer": keeping, "base": keeping.base_optimizer}
    ).tree()
    assert "inner" not in tree["optimizer"]
    for wrap in WRAPPERS.values():
        wrapped: Any = Adapted({"model": model, "optimizer": wrap(model)}).tree()
        assert "inner" not in wrapped["optimizer"]
