"""What a training uses, records and logs where its script and the restored state have different
hyperparameters.

``python -m tests.training.test_hyperparameters`` writes the table of docs/guide/hyperparameters.md
again.
"""

from __future__ import annotations

import itertools
import logging
import re
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

import datastates
from datastates import Repository, State
from datastates.errors import InvalidInput

TABLE = Path(__file__).parents[2] / "docs" / "guide" / "hyperparameters.md"
BEGIN, END = "<!-- table -->", "<!-- end of table -->"
DONE, FURTHER = 5, 6
"""The steps before the state, and those after it that are compared."""

Make = Callable[[torch.optim.Optimizer, int], Any]


@pytest.fixture
def repo(tmp_path: Path) -> Iterator[Repository]:
    """An empty repository."""
    torch.set_num_threads(1)
    with datastates.open(tmp_path / "runs") as opened:
        yield opened


SCHEDULERS: dict[str, Make] = {
    "LambdaLR": lambda opt, last: lr_scheduler.LambdaLR(opt, lambda step: 1 - step / last),
    "MultiplicativeLR": lambda opt, last: lr_scheduler.MultiplicativeLR(
        opt, lambda step: 0.9 if step < last else 1.0
    ),
    "StepLR": lambda opt, last: lr_scheduler.StepLR(opt, last // 4, 0.5),
    "MultiStepLR": lambda opt, last: lr_scheduler.MultiStepLR(opt, [last // 6, last // 2], 0.1),
    "ConstantLR": lambda opt, last: lr_scheduler.ConstantLR(opt, 0.3, total_iters=last // 3),
    "LinearLR": lambda opt, last: lr_scheduler.LinearLR(opt, 1.0, 0.01, total_iters=last),
    "ExponentialLR": lambda opt, last: lr_scheduler.ExponentialLR(opt, 0.01 ** (1 / last)),
    "PolynomialLR": lambda opt, last: lr_scheduler.PolynomialLR(opt, last, 2.0),
    "CosineAnnealingLR": lambda opt, last: lr_scheduler.CosineAnnealingLR(opt, last, eta_min=1e-4),
    "CosineAnnealingWarmRestarts": lambda opt, last: lr_scheduler.CosineAnnealingWarmRestarts(
        opt, last // 4, 2
    ),
    "CyclicLR": lambda opt, last: lr_scheduler.CyclicLR(
        opt, opt.param_groups[0]["lr"], 1.0, last // 4, mode="triangular2"
    ),
    "OneCycleLR": lambda opt, last: lr_scheduler.OneCycleLR(
        opt, opt.param_groups[0]["lr"], total_steps=last + 1
    ),
    "SequentialLR": lambda opt, last: lr_scheduler.SequentialLR(
        opt,
        [lr_scheduler.LinearLR(opt, 0.1, 1.0, 3), lr_scheduler.CosineAnnealingLR(opt, last - 3)],
        [3],
    ),
    "ChainedScheduler": lambda opt, last: lr_scheduler.ChainedScheduler(
        [
            lr_scheduler.ConstantLR(opt, 0.5, total_iters=3),
            lr_scheduler.ExponentialLR(opt, 0.01 ** (1 / last)),
        ]
    ),
}

CONSTANT = {
    "LambdaLR": "lr_lambdas",
    "MultiplicativeLR": "lr_lambdas",
    "StepLR": "step_size",
    "MultiStepLR": "milestones.0",
    "ConstantLR": "total_iters",
    "LinearLR": "total_iters",
    "ExponentialLR": "gamma",
    "PolynomialLR": "total_iters",
    "CosineAnnealingLR": "T_max",
    "CosineAnnealingWarmRestarts": "T_0",
    "CyclicLR": "total_size",
    "OneCycleLR": "total_steps",
    "SequentialLR": "1.T_max",
    "ChainedScheduler": "1.gamma",
}


@dataclass(frozen=True)
class Script:
    """The hyperparameters of a script."""

    lr: float = 0.1
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.99)
    kind: str | None = None
    last: int = 12
    seed: int = 0

    def build(self) -> tuple[torch.nn.Module, torch.optim.Optimizer, Any]:
        """What the script makes before it tracks."""
        torch.manual_seed(self.seed)
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=self.lr, weight_decay=self.weight_decay, betas=self.betas
        )
        return (
            model,
            optimizer,
            None if self.kind is None else SCHEDULERS[self.kind](optimizer, self.last),
        )


@dataclass
class Used:
    """What a training used: its rates and options at each further step, its random numbers, and
    its newest state."""

    rates: list[float]
    options: list[tuple[float, tuple[float, float]]]
    numbers: list[float]
    state: State


def train(
    repo: Repository, branch: str, script: Script, steps: int, config: Any = None, **options: Any
) -> Used:
    """Train so many further steps."""
    model, optimizer, scheduler = script.build()
    tracked = {
        "model": model,
        "optimizer": optimizer,
        **({} if scheduler is None else {"scheduler": scheduler}),
    }
    used = Used([], [], [], None)  # type: ignore[arg-type]  # the state comes last
    with repo.track(branch=branch, config=config, objects=tracked, **options) as run:
        group = optimizer.param_groups[0]
        for _ in range(steps):
            used.rates.append(float(group["lr"]))
            used.options.append((group["weight_decay"], tuple(group["betas"])))
            used.numbers.append(torch.rand(()).item())
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
            run.capture()
        head = run.head
        assert head is not None
        used.state = head
    return used


def reference(script: Script, begin: int, count: int) -> list[float]:
    """The rates of these steps of a training that had the script's schedule from the start."""
    _, optimizer, scheduler = script.build()
    rates = []
    for _ in range(begin + count):
        rates.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return rates[begin:]


def lines_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The warnings without the names of states."""
    return [
        re.sub(r"state [0-9a-f]{10}", "state S", record.getMessage())
        for record in caplog.records
        if record.levelno == logging.WARNING
    ]


def situations() -> Iterator[tuple[str, str, Script, Script]]:
    """The situation, what differs, the script of the state, and the script that restores it."""
    base = Script()
    changes = {
        "lr": Script(lr=0.02),
        "weight_decay": Script(weight_decay=0.5),
        "betas": Script(betas=(0.8, 0.95)),
        "seed": Script(seed=1),
    }
    for situation in ("fork", "resume"):
        for what, script in changes.items():
            yield situation, what, base, script
        for kind in SCHEDULERS:
            yield situation, f"lr of {kind}", Script(kind=kind), Script(kind=kind, lr=0.02)
    for kind in SCHEDULERS:
        yield "longer", kind, Script(kind=kind), Script(kind=kind, last=24)


CASES = list(itertools.product(situations(), ("script", "state")))


def key_of(what: str, situation: str) -> str:
    """The name under which the value is recorded."""
    if situation == "longer":
        return f"scheduler.{CONSTANT[what]}"
    return (
        "seed"
        if what == "seed"
        else f"optimizer.{'betas.0' if what == 'betas' else what.split(' ')[0]}"
    )


def row(repo: Repository, case: tuple[tuple[str, str, Script, Script], str]) -> tuple[str, ...]:
    """Train as the case says, check what is used, and return its row of the table, without the
    line."""
    (situation, what, before, script), mode = case
    parent = train(repo, "main", before, DONE)
    where: dict[str, Any] = (
        {"branch": "fork", "start": "main"} if situation == "fork" else {"branch": "main"}
    )
    if what == "seed":
        where["rng"] = mode
    used = train(repo, script=script, steps=FURTHER, hyperparameters=mode, **where)
    chosen = script if mode == "script" else before
    key = key_of(what, situation)
    if what == "seed":
        fresh = torch.Generator().manual_seed(script.seed)
        torch.manual_seed(script.seed)
        torch.nn.Linear(2, 1)
        is_scripts = used.numbers == [torch.rand(()).item() for _ in range(FURTHER)]
        assert is_scripts == (mode == "script"), fresh
        return situation, what, mode, f"{chosen.seed}", f"{used.state.config['seed']}"
    if situation == "longer" and mode == "state" and what == "LambdaLR":
        # a function is always the script's
        expected = [
            reference(before, DONE, 1)[0],
            *reference(script, DONE + 1, FURTHER - 1),
        ]
    elif situation == "longer" and mode == "state" and what == "MultiplicativeLR":
        expected = reference(before, DONE, FURTHER)
    else:
        expected = reference(chosen, DONE, FURTHER)
    assert used.rates == expected, (parent.rates, used.rates, expected)
    if what in ("weight_decay", "betas"):
        assert used.options == [(chosen.weight_decay, chosen.betas)] * FURTHER
    recorded = used.state.config[key]
    value = {
        "lr": f"{used.rates[0]:.6g}",
        "weight_decay": f"{used.options[0][0]:g}",
        "betas": f"{used.options[0][1][0]:g}",
    }
    return situation, what, mode, value.get(what, f"lr {used.rates[0]:.6g}"), f"{recorded:.6g}"


@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step:UserWarning")
@pytest.mark.parametrize(
    "case", CASES, ids=lambda case: f"{case[0][0]}-{case[0][1]}-{case[1]}".replace(" ", "-")
)
def test_what_is_used_is_recorded_and_every_difference_is_logged(
    repo: Repository,
    case: tuple[tuple[str, str, Script, Script], str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    (situation, what, _, _), mode = case
    found = row(repo, case)
    key = key_of(what, situation)
    lines = lines_of(caplog)
    named = (
        "seed"
        if what == "seed"
        else (
            key.removesuffix(".0")
            if situation == "longer"
            else "lr"
            if what.startswith("lr")
            else key
        )
    )
    if what == "seed" and mode == "script":
        assert any("pass rng=" in line for line in lines)
    elif situation == "longer" and what == "MultiplicativeLR":
        assert lines == [], "both functions agree so far, and the script's is used"
    else:
        assert any(named in line for line in lines), lines
    assert "| " + " | ".join(found) in TABLE.read_text(encoding="utf-8"), (
        "write the table again: python -m tests.training.test_hyperparameters"
    )


@pytest.mark.parametrize("kind", [None, *SCHEDULERS])
@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step:UserWarning")
def test_an_unchanged_script_is_resumed_and_forked_without_a_line(
    repo: Repository, kind: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    script = Script(kind=kind, last=24)
    train(repo, "main", script, DONE, config={"lr": 0.1})
    resumed = train(repo, "main", script, FURTHER, config={"lr": 0.1})
    forked = train(repo, "fork", script, FURTHER, start=f"main~{FURTHER}", config={"lr": 0.1})
    assert resumed.rates == forked.rates == reference(script, DONE, FURTHER)
    assert lines_of(caplog) == []
    assert resumed.state.config == forked.state.config


def optimizer_of(**options: Any) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model and its optimizer."""
    model = torch.nn.Linear(2, 1)
    return model, torch.optim.SGD(model.parameters(), **{"lr": 0.1, **options})


def test_a_rate_that_the_script_decays_by_hand_is_no_difference(
    repo: Repository, caplog: pytest.LogCaptureFixture
) -> None:
    for branch, start, expected in (
        ("main", None, 0.1),
        ("main", None, 0.01),
        ("fork", "main", 0.001),
    ):
        model, optimizer = optimizer_of()
        with repo.track(branch=branch, start=start, model=model, optimizer=optimizer) as run:
            assert optimizer.param_groups[0]["lr"] == pytest.approx(expected)
            optimizer.param_groups[0]["lr"] *= 0.1
            run.capture()
            assert run.config["optimizer.lr"] == 0.1
    assert lines_of(caplog) == []


def test_each_group_is_compared_and_recorded(
    repo: Repository, caplog: pytest.LogCaptureFixture
) -> None:
    def groups(first: float, second: float) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = torch.nn.Linear(2, 1)
        return model, torch.optim.SGD(
            [{"params": [model.weight], "lr": first}, {"params": [model.bias], "lr": second}],
            lr=1.0,
        )

    model, optimizer = groups(0.1, 0.2)
    with repo.track(model=model, optimizer=optimizer) as run:
        run.capture()
        assert (run.config["optimizer.lr"], run.config["optimizer.1.lr"]) == (0.1, 0.2)
    model, optimizer = groups(0.1, 0.3)
    with repo.track(branch="fork", start="main", model=model, optimizer=optimizer) as run:
        assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.3]
        assert run.config["optimizer.1.lr"] == 0.3
    assert len(lines_of(caplog)) == 1
    assert "optimizer.1.lr is 0.3" in lines_of(caplog)[0]


def test_a_counter_that_an_optimizer_keeps_in_its_groups_comes_from_the_state(
    repo: Repository, caplog: pytest.LogCaptureFixture
) -> None:
    class Counting(torch.optim.SGD):
        def __init__(self, params: Any, lr: float) -> None:
            super().__init__(params, lr=lr)
            for group in self.param_groups:
                group["k"] = 0

        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                group["k"] += 1
            return super().step(closure)

    for lr, start in ((0.1, None), (0.2, "main")):
        model = torch.nn.Linear(2, 1)
        optimizer = Counting(model.parameters(), lr=lr)
        with repo.track(
            branch="fork" if start else "main", start=start, model=model, optimizer=optimizer
        ) as run:
            assert (optimizer.param_groups[0]["k"], optimizer.param_groups[0]["lr"]) == (
                1 if start else 0,
                lr,
            )
            optimizer.step()
            run.capture()
    assert len(lines_of(caplog)) == 1


@pytest.mark.parametrize(("lr", "patience", "expected"), [(0.1, 5, 0.05), (0.02, 1, 0.01)])
def test_a_plateau_keeps_its_reductions_and_takes_the_scripts_constants(
    repo: Repository, lr: float, patience: int, expected: float
) -> None:
    def build(lr: float, patience: int) -> tuple[torch.nn.Module, torch.optim.Optimizer, Any]:
        model, optimizer = optimizer_of(lr=lr)
        return (
            model,
            optimizer,
            lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=patience),
        )

    model, optimizer, scheduler = build(0.1, 1)
    with repo.track(model=model, optimizer=optimizer, scheduler=scheduler) as run:
        for loss in (1.0, 1.0, 1.0, 1.0):
            scheduler.step(loss)
        assert optimizer.param_groups[0]["lr"] == 0.05
        run.capture()
    model, optimizer, scheduler = build(lr, patience)
    with repo.track(
        branch="fork", start="main", model=model, optimizer=optimizer, scheduler=scheduler
    ) as run:
        assert (optimizer.param_groups[0]["lr"], scheduler.patience, scheduler.best) == (
            pytest.approx(expected),
            patience,
            1.0,
        )
        assert (scheduler.num_bad_epochs, run.config["scheduler.patience"]) == (1, patience)


def test_a_scheduler_of_another_class_is_refused_or_replayed(repo: Repository) -> None:
    train(repo, "main", Script(kind="CosineAnnealingLR"), DONE)
    with pytest.raises(
        InvalidInput,
        match=(
            r"scheduler is a StepLR, and the state is of a scheduler with T_max, eta_min: make"
            r" that one"
        ),
    ):
        train(repo, "main", Script(kind="StepLR"), 1)
    used = train(repo, "fork", Script(kind="StepLR"), FURTHER, start="main")
    assert used.rates == reference(Script(kind="StepLR"), DONE, FURTHER)
    tree = repo.load("fork", only="scheduler")["scheduler"]
    assert "T_max" not in tree


def test_a_schedule_that_ends_before_the_state_is_refused_and_changes_nothing(
    repo: Repository,
) -> None:
    train(repo, "main", Script(kind="OneCycleLR"), DONE)
    model, optimizer, scheduler = Script(kind="OneCycleLR", last=2).build()
    before = repr((optimizer.state_dict(), scheduler.state_dict()))
    with pytest.raises(
        InvalidInput,
        match=r"scheduler ends before the state, which was taken after 5 steps of its schedule",
    ):
        repo.track(
            branch="fork", start="main", model=model, optimizer=optimizer, scheduler=scheduler
        )
    assert repr((optimizer.state_dict(), scheduler.state_dict())) == before
    assert [ref.name for ref in repo.refs()] == ["main"]


@pytest.mark.parametrize("key", ["lr", "learning_rate", "optim.lr", "train.lr", "optimizer.lr"])
def test_a_configuration_that_is_not_in_use_is_recorded_as_given(
    repo: Repository, key: str, caplog: pytest.LogCaptureFixture
) -> None:
    train(repo, "main", Script(), 1, config={key: 0.1})
    assert lines_of(caplog) == []
    used = train(repo, "main", Script(lr=0.02), 1, config={key: 0.02, "momentum": 0.9, "name": "x"})
    assert (used.state.config[key], used.state.config[f"given.{key}"]) == (0.1, 0.02)
    assert (used.state.config["momentum"], used.state.config["name"]) == (
        0.9,
        "x",
    ), "no option of this training"
    assert any(f"config {key}=0.02 is not in use: 0.1 is" in line for line in lines_of(caplog))
    again = train(repo, "fork", Script(lr=0.02), 1, start="main", config={key: 0.02})
    assert again.state.config[key] == 0.02
    assert f"given.{key}" not in again.state.config


def test_a_configuration_that_differs_from_a_new_training_is_reported(
    repo: Repository, caplog: pytest.LogCaptureFixture
) -> None:
    used = train(
        repo,
        "main",
        Script(seed=3),
        1,
        config={"lr": 0.5, "wd": 0.01, "betas": (0.9, 0.5), "seed": 4, "gamma": 0.99},
    )
    assert {key: used.state.config[key] for key in ("lr", "wd", "betas.1", "seed", "gamma")} == {
        "lr": 0.1,
        "wd": 0.01,
        "betas.1": 0.99,
        "seed": 3,
        "gamma": 0.99,
    }
    assert {key for key in used.state.config if key.startswith("given.")} == {
        "given.lr",
        "given.betas.1",
        "given.seed",
    }
    assert len(lines_of(caplog)) == 3


def test_the_batch_size_of_the_loader_and_what_the_script_sets_before_its_first_batch_are_recorded(
    repo: Repository, caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer = optimizer_of()
    with repo.track(model=model, optimizer=optimizer, config={"batch_size": 6}) as run:
        optimizer.param_groups[0]["lr"] = 0.7
        for _ in run.steps(DataLoader(TensorDataset(torch.arange(8)), batch_size=4)):
            optimizer.param_groups[0]["lr"] *= 0.5
            run.capture()
    config = repo.state("main").config
    assert (config["loader.batch_size"], config["batch_size"], config["given.batch_size"]) == (
        4,
        4,
        6,
    )
    assert (config["optimizer.lr"], config["world_size"]) == (0.7, 1)
    assert any("config batch_size=6 is not in use: 4 is" in line for line in lines_of(caplog))


@pytest.mark.parametrize(
    "config",
    [
        {
            "model": {"bn": {"momentum": 0.5}},
            "val": {"batch_size": 3},
            "data": {"seed": 42},
            "finetune": {"lr": 0.5},
            "ema.momentum": 0.99,
        },
        {"lr": None, "seed": None, "batch_size": 8, "head": {"lr": 0.5}},
    ],
)
def test_names_that_mean_something_else_are_left_alone(
    repo: Repository, config: Any, caplog: pytest.LogCaptureFixture
) -> None:
    used = train(repo, "main", Script(), 2, config=config)
    assert not [key for key in used.state.config if key.startswith("given.")]
    assert lines_of(caplog) == []
    assert (used.state.config["optimizer.lr"], used.state.config["seed"]) == (0.1, 0)


def test_options_that_the_script_sets_after_track_are_recorded(repo: Repository) -> None:
    def run_by_hand(lr: float, *, is_scheduled: bool) -> State:
        model, optimizer = optimizer_of(lr=0.1 if not is_scheduled else lr, momentum=0.9)
        with repo.track(model=model, optimizer=optimizer, config={"lr": lr}) as run:
            optimizer.param_groups[0].update(lr=lr, weight_decay=0.5)
            for step in range(3):
                optimizer.param_groups[0]["lr"] = lr * (0.5**step if is_scheduled else 1)
                run.capture()
            head = run.head
            assert head is not None
            return head

    once = run_by_hand(0.01, is_scheduled=False).config
    assert (once["optimizer.lr"], once["optimizer.weight_decay"], once["lr"]) == (0.01, 0.5, 0.01)
    scheduled = run_by_hand(0.2, is_scheduled=True).config
    assert (scheduled["optimizer.lr"], scheduled["lr"]) == (0.2, 0.2)
    assert "given.lr" not in scheduled


def test_other_schedulers_and_numbers_are_compared(
    repo: Repository, caplog: pytest.LogCaptureFixture
) -> None:
    class Noam:
        def __init__(self, optimizer: torch.optim.Optimizer, warm: int) -> None:
            self.optimizer, self.warm, self.n = optimizer, warm, 0

        def step(self) -> None:
            self.n += 1
            self.optimizer.param_groups[0]["lr"] = min(self.n**-0.5, self.n * self.warm**-1.5)

        def state_dict(self) -> dict[str, Any]:
            return {"warm": self.warm, "n": self.n}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            vars(self).update(state)

    class Power:
        def __init__(self, base: float) -> None:
            self.base = base

        def __call__(self, step: int) -> float:
            return self.base**step

    makes: dict[str, Callable[[Any, float], Any]] = {
        "noam": lambda opt, value: Noam(opt, int(value * 10)),
        "swa": lambda opt, value: torch.optim.swa_utils.SWALR(opt, swa_lr=value),
        "power": lambda opt, value: lr_scheduler.LambdaLR(opt, Power(value)),
    }
    for name, make in makes.items():
        for value, mode in ((0.4, None), (0.8, "state"), (0.8, "script")):
            caplog.clear()
            model, optimizer = optimizer_of(lr=np.float32(0.1) if value == 0.4 else 0.1)
            scheduler = make(optimizer, value)
            with repo.track(
                branch=name,
                model=model,
                optimizer=optimizer,
                scheduler=scheduler,
                hyperparameters=mode,  # type: ignore[arg-type]
            ) as run:
                optimizer.step()
                scheduler.step()
                run.capture()
            lines = [line for line in lines_of(caplog) if "as in" in line]
            assert len(lines) == (0 if mode is None else 1), (name, mode, lines)


def test_a_fork_with_the_scripts_random_numbers_is_resumed_with_its_own(
    repo: Repository, caplog: pytest.LogCaptureFixture
) -> None:
    train(repo, "main", Script(), 3)
    whole = train(repo, "whole", Script(seed=1), 6, start="main", rng="script")
    first = train(repo, "fork", Script(seed=1), 3, start="main", rng="script")
    caplog.clear()
    second = train(repo, "fork", Script(seed=1), 3, rng="script")
    assert first.numbers + second.numbers == whole.numbers
    assert lines_of(caplog) == []


def test_a_fork_that_goes_back_to_its_parents_state_keeps_its_own_options(repo: Repository) -> None:
    train(repo, "main", Script(kind="CosineAnnealingLR"), DONE)
    script = Script(kind="CosineAnnealingLR", lr=0.02, weight_decay=0.5)
    model, optimizer, scheduler = script.build()
    with repo.track(
        branch="fork", start="main", model=model, optimizer=optimizer, scheduler=scheduler
    ) as run:
        for _ in range(3):
            optimizer.step()
            scheduler.step()
            run.capture()
        run.restore("main")
        group = optimizer.param_groups[0]
        assert (group["lr"], group["weight_decay"]) == (reference(script, DONE, 1)[0], 0.5)
        run.restore("main~2")
        assert group["lr"] == reference(script, DONE - 2, 1)[0]


def test_a_training_that_goes_back_to_other_options_is_recorded_with_them_from_there_on(
    repo: Repository,
) -> None:
    train(repo, "main", Script(), 2)
    train(repo, "other", Script(lr=0.02), 2, start="main")
    model, optimizer, _ = Script(lr=0.02).build()
    with repo.track(branch="other", model=model, optimizer=optimizer) as run:
        before = run.capture().wait()
        run.restore("main")
        after = run.capture().wait()
        assert optimizer.param_groups[0]["lr"] == 0.1
    assert (before.config["optimizer.lr"], repo.state(before).config["optimizer.lr"]) == (
        0.02,
        0.02,
    )
    assert (after.config["optimizer.lr"], repo.state("other").config["optimizer.lr"]) == (0.1, 0.1)
    assert all(each.finished_at is not None for each in repo.runs() if each.branch == "other")


def test_what_a_fork_does_not_take_from_the_state_is_the_scripts(
    repo: Repository, caplog: pytest.LogCaptureFixture
) -> None:
    train(repo, "main", Script(kind="StepLR"), DONE)
    used = train(
        repo,
        "fork",
        Script(kind="StepLR", lr=0.02),
        2,
        start="main",
        only="model",
        hyperparameters="state",
    )
    assert used.rates == reference(Script(kind="StepLR", lr=0.02), 0, 2)
    assert used.state.config["optimizer.lr"] == 0.02
    assert lines_of(caplog) == []


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.AdamW, {"amsgrad": True}),
        (torch.optim.RMSprop, {"centered": True}),
        (torch.optim.RMSprop, {"momentum": 0.9}),
        (torch.optim.SGD, {"momentum": 0.9}),
    ],
)
def test_a_fork_may_switch_on_what_needs_further_state(
    repo: Repository, kind: Any, options: dict[str, Any]
) -> None:
    for branch, start, more in (
        ("main", None, {}),
        ("fork", "main", options),
        ("fork", None, options),
    ):
        model = torch.nn.Linear(2, 1)
        optimizer = kind(model.parameters(), lr=0.1, **more)
        with repo.track(branch=branch, start=start, model=model, optimizer=optimizer) as run:
            for _ in range(2):
                optimizer.zero_grad()
                model(torch.ones(1, 2)).sum().backward()
                optimizer.step()
                run.capture()
    assert repo.state("fork").step == 6


@pytest.mark.parametrize(
    "options",
    [{"hyperparameters": "both"}, {"hyperparameters": True}, {"rng": "seed"}, {"rng": True}],
)
def test_other_sources_are_refused(repo: Repository, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match=r"'script'"):
        repo.track(value=1, **options)


def write_table() -> None:
    """Write the table of docs/guide/hyperparameters.md again."""
    rows: list[tuple[str, ...]] = [
        ("situation", "what differs", "`hyperparameters=`", "value used", "value recorded", "line"),
        ("---",) * 6,
    ]
    for case in CASES:
        records: list[str] = []
        handler = logging.Handler(logging.WARNING)
        handler.emit = lambda record: records.append(  # type: ignore[method-assign]  # noqa: B023
            re.sub(r"state [0-9a-f]{10}", "state S", record.getMessage())
        )
        logging.getLogger("datastates").addHandler(handler)
        with (
            tempfile.TemporaryDirectory() as folder,
            datastates.open(folder) as repo,
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            found = row(repo, case)
        logging.getLogger("datastates").removeHandler(handler)
        rows.append((*found, "<br>".join(line.partition(": ")[2] for line in records)))
    head, _, rest = TABLE.read_text(encoding="utf-8").partition(BEGIN)
    text = "\n".join(f"| {' | '.join(each)} |" for each in rows)
    TABLE.write_text(f"{head}{BEGIN}\n\n{text}\n\n{END}{rest.partition(END)[2]}", encoding="utf-8")


if __name__ == "__main__":
    write_table()
