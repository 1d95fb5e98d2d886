"""What variants set of restored optimizers: a grid over a rate trains differently, and as by hand."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler

import datastates
from datastates import InvalidInput, Repository
from datastates.objects.schedules import Schedule
from datastates.workflows import Exploration, Job, Plan, SerialExecutor, Variant, explore, grid
from datastates.workflows.running.job import seed_everything
from datastates.workflows.running.settings import Built
from tests.workflows.studies import CONFIG, digits

STEPS = 6
Parts = tuple[nn.Module, torch.optim.Optimizer, Any]


def build(config: Any) -> Parts:
    """As README has it: all that the configuration says is said where it is built."""
    model = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.get("lr", 1e-2), weight_decay=config.get("wd", 0.1))
    return model, optimizer, lr_scheduler.CosineAnnealingLR(optimizer, 40, eta_min=1e-4)


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any, count: int = STEPS) -> float:
    x, y = digits()
    loss = torch.zeros(())
    for at in range(count):
        rows = slice(at * 20, at * 20 + 20)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x[rows]), y[rows])
        loss.backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return float(loss.detach())


def tracked(parts: Parts, *, is_scheduled: bool) -> dict[str, Any]:
    model, optimizer, scheduler = parts
    return {"model": model, "optimizer": optimizer, **({"scheduler": scheduler} if is_scheduled else {})}


def plain(job: Job) -> None:
    model, optimizer, _ = build(job.config)
    job.track(model=model, optimizer=optimizer)
    for _ in job.epochs():
        job.report(loss=steps(model, optimizer, None))


def scheduled(job: Job) -> None:
    parts = build(job.config)
    job.track(**tracked(parts, is_scheduled=True))
    for _ in job.epochs():
        job.report(loss=steps(*parts))


@pytest.fixture
def repo(tmp_path: Path) -> Iterator[Repository]:
    """Prefixes on ``plain`` and ``scheduled``."""
    torch.set_num_threads(1)
    with datastates.open(tmp_path / "runs", config=CONFIG) as opened:
        for branch in ("plain", "scheduled"):
            seed_everything(3)
            parts = build({})
            with opened.track(branch=branch, **tracked(parts, is_scheduled=branch == "scheduled")) as run:
                run.capture(metrics={"loss": steps(*parts[:2], parts[2] if branch == "scheduled" else None)})
        yield opened


def go(repo: Repository, start: str, plan: Plan, train: Callable[[Job], None], **options: Any) -> Exploration:
    with SerialExecutor() as executor:
        return explore(repo, start, plan, train, executor, study="s", progress=False, **options)


def weights(repo: Repository, rev: str) -> torch.Tensor:
    return torch.cat([each.flatten() for each in repo.load(rev, only="model")["model"].values()])


def by_hand(repo: Repository, config: dict[str, float]) -> torch.Tensor:
    """Restored from the parent, given the rate by hand, and trained."""
    model, optimizer, _ = build({})
    repo.restore("plain", into={"model": model, "optimizer": optimizer})
    optimizer.param_groups[0].update(lr=config["lr"], weight_decay=config["wd"])
    steps(model, optimizer, None)
    return torch.cat([each.flatten() for each in model.state_dict().values()])


def test_a_grid_over_rates_trains_each_variant_as_by_hand(repo: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = grid({"lr": [0.1, 0.01, 0.001], "wd": [0.0, 0.3]}, epochs=1)
    report = go(repo, "plain", plan, plain, config={"width": 16})
    assert report
    found = {variant.name: weights(repo, f"s/{variant.name}") for variant in plan.variants}
    for variant in plan.variants:
        config = {key: float(value or 0) for key, value in variant.config.items()}
        assert torch.equal(found[variant.name], by_hand(repo, config)), variant.name
        assert repo.state(f"s/{variant.name}").config == {"width": 16, **config}
    assert len({tuple(each.tolist()) for each in found.values()}) == 6
    assert report["lr=0.1,wd=0.0"].set == "lr 0.01 -> 0.1, weight_decay 0.1 -> 0"
    assert report["lr=0.01,wd=0.3"].set == "weight_decay 0.1 -> 0.3"
    monkeypatch.setenv("COLUMNS", "200")  # a narrow terminal wraps what was set
    assert "lr 0.01 -> 0.1" in str(report.table())
    assert report.alike == []
    assert [state.config["lr"] for state in repo.find("config.lr > 0.005 and config.wd = 0 order by config.lr")] == [0.01, 0.1]


def test_a_scheduler_goes_on_where_it_stood_with_the_rate_of_the_variant(repo: Repository) -> None:
    report = go(repo, "scheduled", grid({"lr": [0.1, 0.01]}, epochs=1), scheduled)
    for lr in (0.1, 0.01):
        model, optimizer, scheduler = build({"lr": lr})
        for _ in range(STEPS):
            optimizer.step()
            scheduler.step()
        there = optimizer.param_groups[0]["lr"]
        repo.restore("scheduled", into={"model": model, "optimizer": optimizer})
        optimizer.param_groups[0].update(lr=there, initial_lr=lr)
        steps(model, optimizer, scheduler)
        expected = torch.cat([each.flatten() for each in model.state_dict().values()])
        torch.testing.assert_close(weights(repo, f"s/lr={lr}"), expected)
        state = repo.load(f"s/lr={lr}", only=["scheduler", "optimizer"])
        assert state["scheduler"]["base_lrs"] == [lr]
        assert state["scheduler"]["last_epoch"] == 2 * STEPS
        assert state["optimizer"]["param_groups"][0]["initial_lr"] == lr
    assert report["lr=0.01"].set == "", "as in the parent"
    assert torch.equal(weights(repo, "s/lr=0.01"), gone_on(repo))


def gone_on(repo: Repository) -> torch.Tensor:
    """The parent itself, trained on."""
    parts = build({})
    repo.restore("scheduled", into=tracked(parts, is_scheduled=True))
    steps(*parts)
    return torch.cat([each.flatten() for each in parts[0].state_dict().values()])


def once(job: Job) -> None:
    """Trains one epoch and is stopped before the second."""
    parts = build(job.config)
    job.track(**tracked(parts, is_scheduled=True))
    for epoch in job.epochs():
        if epoch and parts[1].param_groups[0]["lr"] and not stopped:
            stopped.append(epoch)
            raise KeyboardInterrupt
        job.report(loss=steps(*parts))


stopped: list[int] = []


def test_a_variant_that_was_stopped_goes_on_with_its_own_rate(repo: Repository) -> None:
    stopped.clear()
    plan = grid({"lr": [0.1]}, epochs=2)
    with pytest.raises(KeyboardInterrupt):
        go(repo, "scheduled", plan, once)
    report = go(repo, "scheduled", plan, once)
    assert report["lr=0.1"].set == report["lr=0.1"].set != ""
    with SerialExecutor() as executor:
        explore(repo, "scheduled", plan, scheduled, executor, study="whole", progress=False)
    assert torch.equal(weights(repo, "s/lr=0.1"), weights(repo, "whole/lr=0.1"))


def test_a_child_keeps_what_its_parent_has_become_unless_it_says_otherwise(repo: Repository) -> None:
    plan = Plan((Variant("a", None, 1, {"lr": 0.1}), Variant("b", "a", 1, {"wd": 0.0}), Variant("c", "a", 1, {"lr": 0.01})))
    report = go(repo, "scheduled", plan, scheduled)
    rates = {name: repo.load(f"s/{name}", only="scheduler")["scheduler"]["base_lrs"] for name in "abc"}
    assert rates == {"a": [0.1], "b": [0.1], "c": [0.01]}
    assert report["b"].set == "weight_decay 0.1 -> 0"
    assert {name: repo.state(f"s/{name}").config for name in "abc"} == {"a": {"lr": 0.1}, "b": {"lr": 0.1, "wd": 0.0}, "c": {"lr": 0.01}}


def test_variants_that_end_alike_are_said_to(repo: Repository, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "datastates"):
        report = go(repo, "plain", grid({"dropuot": [0.1, 0.2]}, epochs=1), plain)
    assert report.alike == [("dropuot=0.1", "dropuot=0.2")]
    assert "dropuot=0.1, dropuot=0.2 ended with the same bytes" in caplog.text
    assert "ended with the same bytes" in str(report.table())
    assert "variant dropuot=0.1 of study s sets nothing of an optimizer; no optimizer was built with its dropuot" in caplog.text


def of(rate: float, make: Callable[[torch.optim.Optimizer], Any], count: int = 0) -> tuple[torch.optim.Optimizer, Any]:
    """An optimizer and a scheduler after so many steps."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=rate)
    scheduler = make(optimizer)
    for _ in range(count):
        optimizer.step()
        scheduler.step()
    return optimizer, scheduler


SCHEDULES: list[Callable[[Any], Any]] = [
    lambda opt: lr_scheduler.StepLR(opt, 3, 0.5),
    lambda opt: lr_scheduler.MultiStepLR(opt, [2, 5], 0.1),
    lambda opt: lr_scheduler.ExponentialLR(opt, 0.9),
    lambda opt: lr_scheduler.LinearLR(opt, 0.1, total_iters=6),
    lambda opt: lr_scheduler.ConstantLR(opt, 0.3, total_iters=6),
    lambda opt: lr_scheduler.PolynomialLR(opt, 20, 2.0),
    lambda opt: lr_scheduler.CosineAnnealingLR(opt, 20, eta_min=1e-4),
    lambda opt: lr_scheduler.CosineAnnealingWarmRestarts(opt, 3, 2),
    lambda opt: lr_scheduler.LambdaLR(opt, lambda step: min(1.0, (step + 1) / 6)),
    lambda opt: lr_scheduler.MultiplicativeLR(opt, lambda _: 0.9),
    lambda opt: lr_scheduler.SequentialLR(
        opt, [lr_scheduler.LinearLR(opt, 0.1, total_iters=4), lr_scheduler.CosineAnnealingLR(opt, 16, eta_min=1e-4)], [4]
    ),
]


@pytest.mark.filterwarnings("ignore:The epoch parameter")
@pytest.mark.parametrize("make", SCHEDULES)
@pytest.mark.parametrize("count", [1, 4, 7])
def test_a_schedule_that_is_moved_to_another_rate_goes_on_as_if_it_had_always_had_it(make: Callable[[Any], Any], count: int) -> None:
    _, parent = of(0.2, make, count)
    optimizer, scheduler = of(0.05, make)
    built = Built({"optimizer": optimizer, "scheduler": scheduler})
    scheduler.load_state_dict(parent.state_dict())
    optimizer.load_state_dict(parent.optimizer.state_dict())
    applied = built.put_back({"train.lr": 0.05})
    other, expected = of(0.05, make, count)
    assert applied.options or optimizer.param_groups[0]["lr"] == parent.optimizer.param_groups[0]["lr"]
    for _ in range(6):
        assert optimizer.param_groups[0]["lr"] == pytest.approx(other.param_groups[0]["lr"], rel=1e-9)
        assert scheduler.get_last_lr() == pytest.approx(expected.get_last_lr(), rel=1e-9)
        for each in (optimizer, scheduler, other, expected):
            each.step()


@pytest.mark.parametrize(
    "make",
    [
        lambda opt: lr_scheduler.OneCycleLR(opt, 0.3, total_steps=40),
        lambda opt: lr_scheduler.CyclicLR(opt, 0.01, 0.3),
        lambda opt: lr_scheduler.ChainedScheduler([lr_scheduler.ExponentialLR(opt, 0.9), lr_scheduler.ConstantLR(opt, 0.5)]),
    ],
)
def test_a_schedule_that_cannot_be_moved_is_refused_with_the_next_step(make: Callable[[Any], Any]) -> None:
    _, parent = of(0.2, make, 3)
    optimizer, scheduler = of(0.05, make)
    for group in optimizer.param_groups:
        group["initial_lr"] = 0.05
    built = Built({"optimizer": optimizer, "scheduler": scheduler})
    scheduler.load_state_dict(parent.state_dict())
    optimizer.load_state_dict(parent.optimizer.state_dict())
    before = repr(optimizer.param_groups)
    with pytest.raises(InvalidInput, match=r"cannot be given another rate in the middle of its schedule: leave the scheduler out"):
        built.put_back({"lr": 0.05})
    assert repr(optimizer.param_groups) == before


def test_a_scheduler_that_was_not_restored_needs_no_move() -> None:
    optimizer, scheduler = of(0.05, lambda opt: lr_scheduler.CyclicLR(opt, 0.01, 0.3))
    assert not Schedule(scheduler).is_restored
    built = Built({"optimizer": optimizer, "scheduler": scheduler})
    optimizer.param_groups[0]["lr"] = 0.9
    assert built.put_back({"lr": 0.01}).options == ("lr 0.9 -> 0.01",)


@pytest.mark.parametrize(
    ("settings", "options", "others"),
    [
        ({"optimizer.lr": 0.5}, {"lr": 0.5}, ()),
        ({"learning_rate": 0.5}, {"lr": 0.5}, ()),
        ({"peak": 0.5}, {"lr": 0.5}, ()),
        ({"wd": 0.25, "dropout": 0.9}, {"weight_decay": 0.25}, ("dropout",)),
        ({"beta1": 0.5}, {"betas": (0.5, 0.75)}, ()),
        ({"amsgrad": True, "seed": 3}, {"amsgrad": True}, ()),
        ({"eps": 0.1}, {}, ("eps",)),
        ({"flag": True, "one": 1, "name": "adam"}, {}, ("flag", "one", "name")),
    ],
)
def test_a_setting_means_the_option_of_its_name_or_value(
    settings: dict[str, Any], options: dict[str, Any], others: tuple[str, ...]
) -> None:
    def made(**named: Any) -> torch.optim.Optimizer:
        groups: list[dict[str, Any]] = [{"params": [nn.Parameter(torch.ones(1))]}, {"params": [nn.Parameter(torch.ones(1))], "eps": 1e-3}]
        return torch.optim.AdamW(groups, **named)

    optimizer, parent = made(lr=0.5, weight_decay=0.25, betas=(0.5, 0.75), amsgrad=True), made(lr=0.1)
    built = Built({"nested": [optimizer], "else": torch.ones(1)})
    optimizer.load_state_dict(parent.state_dict())
    applied = built.put_back(settings)
    for live, old in zip(optimizer.param_groups, parent.param_groups, strict=True):
        changed = {name: value for name, value in live.items() if name != "params" and value != old[name]}
        assert changed == options
    assert applied.others == others


def test_a_rate_that_is_a_tensor_stays_that_tensor() -> None:
    rate = torch.tensor(0.5)
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(1))], lr=rate, foreach=False)
    built = Built({"optimizer": optimizer})
    rate.fill_(0.1)
    assert built.put_back({"lr": 0.5}).options == ("lr 0.1 -> 0.5",)
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate == 0.5
