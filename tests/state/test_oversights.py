"""What a script most likely does not mean is refused, or said once."""

from __future__ import annotations

import copy
import gc
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import datastates
from datastates import Config, Repository, Tracker
from datastates.errors import InvalidInput
from datastates.training.script_checks import ScriptChecks
from tests.state.test_sharing import Wrapping

CONFIG = Config(memory_bytes=64 << 20, durable_interval_s=None)


@pytest.fixture
def repo(tmp_path: Path) -> Iterator[Repository]:
    """A repository that writes only what it is asked to."""
    with datastates.open(tmp_path / "runs", config=CONFIG) as opened:
        yield opened


@pytest.mark.parametrize(
    "name", ["durable_evry", "durable_interval", "back_presure", "strikt", "onyl", "branches"]
)
def test_a_misspelt_option_is_refused(repo: Repository, name: str) -> None:
    with pytest.raises(
        InvalidInput, match=f"^{name} is no option and would be taken for an object: did you mean "
    ):
        # that is the point
        repo.track(weight=torch.zeros(1), **{name: 5})  # type: ignore[arg-type]
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


def test_metrics_and_others_that_say_nothing_are_named(
    repo: Repository, caplog: pytest.LogCaptureFixture
) -> None:
    repo.track(
        metrics={"accuracy": Metric()},
        counter=Empty(),
        criterion=nn.CrossEntropyLoss(),
        scaler=torch.amp.GradScaler("cpu", enabled=False),
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


def test_an_optimizer_that_was_replaced_is_named_once(
    repo: Repository, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with repo.track(model=model, optimizer=optimizer) as run:
        steps(run, model, optimizer, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        steps(run, model, optimizer, 2)
        assert not caplog.records
        steps(run, model, optimizer, 6)
    assert caplog.text.count("optimizer takes no step although its parameters change") == 1


def test_optimizers_that_take_turns_are_no_oversight(
    repo: Repository, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Linear(2, 2)
    first, second = (
        torch.optim.SGD(model.parameters(), lr=0.1),
        torch.optim.Adam(model.parameters()),
    )
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
    with pytest.raises(
        InvalidInput,
        match=r"only=\['model', 'rng'\] restores what both have, and leaves extra as it is",
    ):
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
        assert (
            caplog.text.count(
                "optimizer trains 2 parameters that nothing tracked has, of shape (1, 2), (1,): no"
                " state has them"
            )
            == 1
        )
        optimizer.add_param_group({"params": [late.weight]})
        for _ in range(3):
            run.capture()
        assert caplog.text.count("optimizer trains 3 parameters") == 1


def test_parameters_that_replace_as_many_others_are_told(
    repo: Repository, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with repo.track(model=model, optimizer=optimizer) as run:
        run.capture()
        assert "nothing tracked has" not in caplog.text
        optimizer.param_groups[0]["params"][:] = nn.Linear(3, 3).parameters()
        run.capture()
    assert (
        "optimizer trains 2 parameters that nothing tracked has, of shape (3, 3), (3,): no state"
        " has them" in caplog.text
    )


def test_a_parameter_that_wraps_others_is_not_taken_for_another_that_does(
    caplog: pytest.LogCaptureFixture,
) -> None:
    had, lost = (Wrapping(torch.ones(3), requires_grad=True) for _ in range(2))
    optimizer = torch.optim.SGD([had, lost], 0.1)
    ScriptChecks({"optimizer": optimizer}, {"weights": {"it": had}}, lambda _: True).look()
    assert "optimizer trains a parameter that nothing tracked has, of shape (3,)" in caplog.text


class Agent:
    """Has networks of its own, and a state."""

    def __init__(self) -> None:
        self.net = nn.Linear(2, 2)

    def state_dict(self) -> dict[str, Any]:
        return {"net": self.net.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.net.load_state_dict(state["net"])


@pytest.mark.parametrize(
    "kind", ["module", "wrapped", "tensors", "state_dict", "agent", "lazy", "in a list"]
)
def test_parameters_that_something_tracked_has_are_not_told(
    repo: Repository, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
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


def accumulate(
    repo: Repository,
    every: int,
    *,
    zeroes_first: bool,
    captures_twice: bool = False,
    **objects: Any,
) -> None:
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
def test_captures_within_an_accumulation_are_told_once(
    repo: Repository, caplog: pytest.LogCaptureFixture, *, zeroes_first: bool
) -> None:
    accumulate(repo, 4, zeroes_first=zeroes_first)
    assert (
        caplog.text.count(
            "captured while optimizer accumulates gradients, which this state does not have"
        )
        == 1
    )


def train(
    run: Tracker,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    captured: Collection[int],
    every: int = 4,
    zeroes: str = "before",
    set_to_none: bool = True,
    scaler: torch.amp.GradScaler | None = None,
    clips: bool = False,
) -> None:
    """Sixteen batches, a step every so many of them, and captures after some of them.

    No loop of ``run.steps``."""
    for number in range(16):
        if zeroes == "before" and number % every == 0:
            optimizer.zero_grad(set_to_none)
        loss = model(torch.randn(4, 2)).square().mean()
        (loss if scaler is None else scaler.scale(loss)).backward()
        if number % every == every - 1:
            if clips:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()
            if zeroes == "after":
                optimizer.zero_grad(set_to_none)
        if number in captured:
            run.capture()
            with torch.no_grad():
                model.eval()(torch.randn(4, 2))
            model.train()


ACCUMULATES = "accumulates gradients, which this state does not have"


@pytest.mark.parametrize("captured", [[0], [9], [5, 9, 13], range(2, 16, 3)])
@pytest.mark.parametrize("zeroes", ["before", "after"])
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("kind", ["plain", "fused", "scaled", "clipped", "untracked"])
def test_a_capture_in_the_middle_of_an_accumulation_is_told_once(
    repo: Repository,
    caplog: pytest.LogCaptureFixture,
    *,
    captured: Collection[int],
    zeroes: str,
    set_to_none: bool,
    kind: str,
) -> None:
    model, scaler = (
        nn.Linear(2, 1),
        (torch.amp.GradScaler("cpu", init_scale=2.0) if kind == "scaled" else None),
    )
    optimizer = torch.optim.Adam(model.parameters(), fused=kind == "fused")
    more: dict[str, Any] = (
        {}
        if kind == "untracked"
        else {"optimizer": optimizer, **({"scaler": scaler} if scaler else {})}
    )
    with repo.track(model=model, **more) as run:
        train(
            run, model, optimizer, captured=captured, zeroes=zeroes, set_to_none=set_to_none, scaler=scaler, clips=kind == "clipped"
        )  # fmt: skip
    name = "model" if kind == "untracked" else "optimizer"
    assert [record.getMessage().count(f"{name} {ACCUMULATES}") for record in caplog.records] == [1]


@pytest.mark.parametrize("every", [1, 4])
@pytest.mark.parametrize("zeroes", ["before", "after", "never"])
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("kind", ["plain", "fused", "scaled", "clipped", "untracked"])
def test_captures_of_whole_steps_are_not_told(
    repo: Repository,
    caplog: pytest.LogCaptureFixture,
    *,
    every: int,
    zeroes: str,
    set_to_none: bool,
    kind: str,
) -> None:
    model, scaler = (
        nn.Linear(2, 1),
        (torch.amp.GradScaler("cpu", init_scale=2.0) if kind == "scaled" else None),
    )
    optimizer = torch.optim.Adam(model.parameters(), fused=kind == "fused")
    more: dict[str, Any] = (
        {}
        if kind == "untracked"
        else {"optimizer": optimizer, **({"scaler": scaler} if scaler else {})}
    )
    with repo.track(model=model, **more) as run:
        train(
            run, model, optimizer, captured=range(every - 1, 16, every), every=every, zeroes="after" if kind == "untracked" else zeroes,
            set_to_none=set_to_none, scaler=scaler, clips=kind == "clipped",
        )  # fmt: skip
    assert not caplog.records


def test_an_optimizer_that_accumulates_beside_one_that_does_not_is_told(
    repo: Repository, caplog: pytest.LogCaptureFixture
) -> None:
    often, seldom = nn.Linear(2, 1), nn.Linear(2, 1)
    first, second = (
        torch.optim.SGD(often.parameters(), 0.1),
        torch.optim.SGD(seldom.parameters(), 0.1),
    )
    with repo.track(often=often, seldom=seldom, first=first, second=second) as run:
        for number in range(8):
            steps_of(often, first)
            seldom(torch.ones(2)).sum().backward()
            if number % 4 == 3:
                second.step()
                second.zero_grad()
            if number == 5:
                run.capture()
    assert [record.getMessage().split(".")[0] for record in caplog.records] == [
        f"captured while second {ACCUMULATES}"
    ]


def steps_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(2)).sum().backward()
    optimizer.step()


def test_backward_passes_whose_gradients_are_dropped_are_not_told(
    repo: Repository, caplog: pytest.LogCaptureFixture
) -> None:
    generator, critic = nn.Linear(2, 2), nn.Linear(2, 1)
    first, second = torch.optim.Adam(generator.parameters()), torch.optim.Adam(critic.parameters())
    with repo.track(generator=generator, critic=critic, first=first, second=second) as run:
        for _ in range(5):
            second.zero_grad()
            critic(generator(torch.ones(2)).detach()).sum().backward()
            critic(torch.ones(2)).sum().neg().backward()
            second.step()
            first.zero_grad()
            critic(generator(torch.ones(2))).sum().backward()  # reaches the critic as well
            first.step()
            run.capture()
            first.zero_grad()
            critic(
                generator(torch.ones(2))
            ).sum().backward()  # again, before the critic's gradients are set to zero
            first.step()
            run.capture()
            critic(torch.ones(2, requires_grad=True)).sum().backward()  # an attack, to evaluate
    assert not caplog.records


def test_closures_of_a_step_are_no_accumulation(
    repo: Repository, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)

    def closure() -> float:
        optimizer.zero_grad()
        loss: torch.Tensor = model(torch.ones(2)).square().sum()
        loss.backward()
        return loss.item()

    with repo.track(model=model, optimizer=optimizer) as run:
        for _ in range(4):
            optimizer.step(closure)
            run.capture()
    assert not caplog.records


@pytest.mark.parametrize("is_closed", [True, False])
def test_no_hook_stays_on_parameters_when_a_training_ends(
    repo: Repository, *, is_closed: bool
) -> None:
    model = nn.Linear(2, 1)
    run = repo.track(model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1))
    run.capture()
    assert all(parameter._post_accumulate_grad_hooks for parameter in model.parameters())
    if is_closed:
        run.close()
    del run
    gc.collect()
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())


@pytest.mark.parametrize("zeroes_first", [True, False])
@pytest.mark.parametrize("captures_twice", [True, False])
def test_captures_after_steps_are_not_told(
    repo: Repository, caplog: pytest.LogCaptureFixture, *, zeroes_first: bool, captures_twice: bool
) -> None:
    accumulate(repo, 1, zeroes_first=zeroes_first, captures_twice=captures_twice)
    assert "accumulates" not in caplog.text


def test_gradients_that_states_have_are_not_told(
    repo: Repository, caplog: pytest.LogCaptureFixture
) -> None:
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


def test_an_embedding_that_clips_its_weights_is_no_step_of_another_optimizer(
    repo: Repository, caplog: pytest.LogCaptureFixture
) -> None:
    for model in (
        nn.Sequential(nn.Embedding(4, 2, max_norm=0.1), nn.Linear(2, 1)),
        nn.Embedding(4, 2, max_norm=0.1),
    ):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with repo.track(
            model=model,
            optimizer=optimizer,
            gradients=True,
            branch=f"of-{len(list(model.parameters()))}",
        ) as run:
            for _ in range(6):
                with torch.no_grad():
                    next(model.parameters()).mul_(2)
                model(torch.arange(4)).sum().backward()
                run.capture()
    assert not caplog.records


def test_an_optimizer_that_was_replaced_is_named_although_a_layer_is_frozen(
    repo: Repository, caplog: pytest.LogCaptureFixture
) -> None:
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
        return {
            "weight": (
                copied
                if self.kind == "tensor"
                else copied.numpy()
                if self.kind == "array"
                else copied.tolist()
            )
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        with torch.no_grad():
            self.weight.copy_(torch.as_tensor(state["weight"]))


@pytest.mark.parametrize("kind", ["tensor", "array", "list"])
def test_parameters_of_which_an_object_may_have_a_copy_are_not_told(
    repo: Repository, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    prompt = Prompt(kind)
    with repo.track(prompt=prompt, optimizer=torch.optim.SGD([prompt.weight], 0.1)) as run:
        run.capture()
    assert "nothing tracked has" not in caplog.text


def test_parameters_of_which_no_object_can_have_a_copy_are_told(
    repo: Repository, caplog: pytest.LogCaptureFixture
) -> None:
    prompt, other = Prompt("tensor"), nn.Linear(5, 5)
    optimizer = torch.optim.SGD([prompt.weight, *other.parameters()], 0.1)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    with repo.track(prompt=prompt, optimizer=optimizer, schedule=schedule) as run:
        run.capture()
    assert (
        "optimizer trains 2 parameters that nothing tracked has, of shape (5, 5), (5,)"
        in caplog.text
    )


class Statistics:
    """Binds its members anew, as running statistics of environments do."""

    def __init__(self) -> None:
        self.mean = np.zeros(3)
        self.hidden = torch.zeros(2)
        self.teacher = nn.Linear(2, 2)

    def update(self) -> None:
        self.mean = self.mean + 1
        self.hidden = self.hidden + 1
        self.teacher = copy.deepcopy(self.teacher)


def named(caplog: pytest.LogCaptureFixture) -> set[str]:
    """What the warnings name, each of them once."""
    names = [record.getMessage().split(":")[0] for record in caplog.records]
    assert len(names) == len(set(names))
    assert all(
        "nothing but the tracker refers to what was tracked" in record.getMessage()
        for record in caplog.records
    )
    return set(names)


@pytest.mark.parametrize("is_entered", [True, False])
def test_a_name_that_is_bound_to_another_object_is_reported_once(
    repo: Repository, caplog: pytest.LogCaptureFixture, *, is_entered: bool
) -> None:
    found = Statistics()
    large, weight, plain = (
        np.zeros((100, 1000)),
        nn.Parameter(torch.zeros(100_000)),
        np.zeros((2, 3)).reshape(3, 2),
    )
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    stats = {"mean": np.zeros(2), "more": [torch.zeros(2)]}
    run = repo.track(
        model=model, optimizer=optimizer, mean=found.mean, hidden=found.hidden, teacher=found.teacher, large=large, weight=weight,
        plain=plain, stats=stats, nested={"mean": found.mean},
    )  # fmt: skip
    if is_entered:
        run.__enter__()
    for _ in range(9):
        steps(run, model, optimizer, 1)
        run.fence()
        found.update()
        large, plain, stats = large + 1, plain + 1, copy.deepcopy(stats)
        weight = nn.Parameter(weight.detach() + 1)
    run.close()
    bound = {"mean", "hidden", "teacher", "large", "weight", "plain"}
    assert named(caplog) == bound | {"stats/mean", "stats/more/0", "nested/mean"}
    assert "Or track what holds it, as in track(hidden=vars(holder))" in caplog.text
    assert (
        "tensor.copy_(new), array[...] = new or module.load_state_dict(new.state_dict())"
        in caplog.text
    )


def test_what_a_script_refers_to_or_only_passes_is_no_oversight(
    repo: Repository, caplog: pytest.LogCaptureFixture
) -> None:
    found, memory, several = Statistics(), np.zeros(4), torch.zeros(4, 4)
    encoder, head = nn.Linear(2, 2), nn.Linear(2, 2)
    whole = nn.ModuleDict({"encoder": encoder})
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    stats = {"mean": np.zeros(2), "large": torch.zeros(100_000)}
    with repo.track(
        model=model, optimizer=optimizer, both=nn.ModuleList([encoder, head]), whole=whole, mean=found.mean, hidden=found.hidden,
        teacher=found.teacher, stats=stats, row=several[0], view=torch.from_numpy(memory), part=memory[1:],
        passed=torch.zeros(100_000), made=nn.Linear(1, 1), held={"mean": np.zeros(2)},
    ) as run:  # fmt: skip
        del model, whole
        for _ in range(9):
            optimizer.step()
            run.capture()
    assert not caplog.records
    assert memory is not None
    assert head is not None


def test_what_an_object_holds_is_captured_as_it_is_now(
    repo: Repository, caplog: pytest.LogCaptureFixture
) -> None:
    found = Statistics()
    holder = {"later": [torch.zeros(1)], "found": vars(found)}
    with repo.track(rms=vars(found), holder=holder) as run:
        for number in range(9):
            found.update()
            holder["later"] = [torch.full((1,), float(number))]
            run.capture()
    tree = repo.load("main")
    for rms in (tree["rms"], tree["holder"]["found"]):
        assert (rms["mean"] == 9).all()
        assert (rms["hidden"] == 9).all()
        assert torch.equal(rms["teacher"]["weight"], found.teacher.weight)
    assert tree["holder"]["later"][0] == 8
    assert not caplog.records
    fresh = Statistics()
    with repo.track(rms=vars(fresh), holder={"later": [torch.zeros(1)], "found": vars(fresh)}):
        assert (fresh.mean == 9).all()
        assert torch.equal(fresh.teacher.weight, found.teacher.weight)
