"""What variants set of restored optimizers: a grid over a rate trains differently, and as by
hand."""

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
from datastates import Repository
from datastates.studies import Exploration, Job, Plan, SerialExecutor, Variant, explore, grid
from datastates.studies.worker import seed_everything
from tests.studies.studies import CONFIG, digits

STEPS = 6
Parts = tuple[nn.Module, torch.optim.Optimizer, Any]


def build(config: Any) -> Parts:
    """As README has it: all that the configuration says is said where it is built."""
    model = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=config.get("lr", 1e-2), weight_decay=config.get("wd", 0.1)
    )
    return model, optimizer, lr_scheduler.CosineAnnealingLR(optimizer, 40, eta_min=1e-4)


def steps(
    model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any, count: int = STEPS
) -> float:
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
    return {
        "model": model,
        "optimizer": optimizer,
        **({"scheduler": scheduler} if is_scheduled else {}),
    }


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
            with opened.track(
                branch=branch, **tracked(parts, is_scheduled=branch == "scheduled")
            ) as run:
                run.capture(
                    metrics={"loss": steps(*parts[:2], parts[2] if branch == "scheduled" else None)}
                )
        yield opened


def go(
    repo: Repository, start: str, plan: Plan, train: Callable[[Job], None], **options: Any
) -> Exploration:
    with SerialExecutor() as executor:
        return explore(repo, start, plan, train, executor, study="s", progress=False, **options)


def weights(repo: Repository, rev: str) -> torch.Tensor:
    return torch.cat([each.flatten() for each in repo.load(rev, only="model")["model"].values()])


def by_hand(repo: Repository, config: dict[str, float]) -> torch.Tensor:
    """Restored from the parent, given the rate by hand, and trained."""
    model, optimizer, _ = build({})
    repo.restore("plain", model=model, optimizer=optimizer)
    optimizer.param_groups[0].update(lr=config["lr"], weight_decay=config["wd"])
    steps(model, optimizer, None)
    return torch.cat([each.flatten() for each in model.state_dict().values()])


def test_a_grid_over_rates_trains_each_variant_as_by_hand(
    repo: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = grid({"lr": [0.1, 0.01, 0.001], "wd": [0.0, 0.3]}, epochs=1)
    report = go(repo, "plain", plan, plain, config={"width": 16})
    assert report
    found = {variant.name: weights(repo, f"s/{variant.name}") for variant in plan.variants}
    for variant in plan.variants:
        config = {key: float(value or 0) for key, value in variant.config.items()}
        assert torch.equal(found[variant.name], by_hand(repo, config)), variant.name
        used = {"optimizer.lr": config["lr"], "optimizer.weight_decay": config["wd"]}
        assert (
            repo.state(f"s/{variant.name}").config.items()
            >= {
                "width": 16,
                **config,
                **used,
            }.items()
        )
    assert len({tuple(each.tolist()) for each in found.values()}) == 6
    assert report["lr=0.1,wd=0.0"].set == "lr 0.01 -> 0.1, weight_decay 0.1 -> 0"
    assert report["lr=0.01,wd=0.3"].set == "weight_decay 0.1 -> 0.3"
    monkeypatch.setenv("COLUMNS", "200")  # a narrow terminal wraps what was set
    assert "lr 0.01 -> 0.1" in str(report.table())
    assert report.alike == []
    assert [
        state.config["lr"]
        for state in repo.find("config.lr > 0.005 and config.wd = 0 order by config.lr")
    ] == [0.01, 0.1]


def test_a_scheduler_goes_on_where_it_stood_with_the_rate_of_the_variant(repo: Repository) -> None:
    report = go(repo, "scheduled", grid({"lr": [0.1, 0.01]}, epochs=1), scheduled)
    for lr in (0.1, 0.01):
        model, optimizer, scheduler = build({"lr": lr})
        for _ in range(STEPS):
            optimizer.step()
            scheduler.step()
        there = optimizer.param_groups[0]["lr"]
        repo.restore("scheduled", model=model, optimizer=optimizer)
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
    repo.restore("scheduled", objects=tracked(parts, is_scheduled=True))
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


def test_a_child_keeps_what_its_parent_has_become_unless_it_says_otherwise(
    repo: Repository,
) -> None:
    plan = Plan(
        (
            Variant("a", None, 1, {"lr": 0.1}),
            Variant("b", "a", 1, {"wd": 0.0}),
            Variant("c", "a", 1, {"lr": 0.01}),
        )
    )
    report = go(repo, "scheduled", plan, scheduled)
    rates = {
        name: repo.load(f"s/{name}", only="scheduler")["scheduler"]["base_lrs"] for name in "abc"
    }
    assert rates == {"a": [0.1], "b": [0.1], "c": [0.01]}
    assert report["b"].set == "weight_decay 0.1 -> 0"
    configs = {name: repo.state(f"s/{name}").config for name in "abc"}
    assert [configs[name].get("lr") for name in "abc"] == [0.1, 0.1, 0.01]
    assert [configs[name].get("wd") for name in "abc"] == [None, 0.0, None]
    assert [configs[name]["optimizer.weight_decay"] for name in "abc"] == [0.1, 0.0, 0.1]


def test_variants_that_end_alike_are_said_to(
    repo: Repository, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "datastates"):
        report = go(repo, "plain", grid({"dropuot": [0.1, 0.2]}, epochs=1), plain)
    assert report.alike == [("dropuot=0.1", "dropuot=0.2")]
    assert "dropuot=0.1, dropuot=0.2 ended with the same bytes" in caplog.text
    assert "ended with the same bytes" in str(report.table())
