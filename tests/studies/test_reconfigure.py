"""``reconfigure`` sets what a variant changes in an optimizer that was restored from its parent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import datastates
from datastates.studies import Job, Plan, SerialExecutor, Variant, explore, reconfigure
from tests.studies.studies import CONFIG


def reconfigured(
    folder: Path, *, is_used: bool, config: dict[str, Any], scheduled: bool = False
) -> dict[str, Any]:
    """The options of an optimizer in a variant of a parent that was trained with 0.01."""
    seen: dict[str, Any] = {}

    def with_optimizer(job: Job) -> None:
        model = nn.Linear(2, 2)
        groups: list[dict[str, Any]] = [
            {"params": [model.weight]},
            {"params": [model.bias], "lr": 1e-3, "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5) if scheduled else None
        job.track(
            model=model, optimizer=optimizer, **({"scheduler": scheduler} if scheduler else {})
        )
        seen["set"] = reconfigure(job, optimizer, scheduler) if is_used else None
        for _ in job.epochs():
            seen["groups"] = [dict(group) for group in optimizer.param_groups]
            model(torch.ones(2)).sum().backward()
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
            seen["after"] = [group["lr"] for group in optimizer.param_groups]
            job.report(loss=1.0)

    plan = Plan((Variant("parent"), Variant("child", "parent", 1, config)))
    with datastates.open(folder, config=CONFIG) as repo:
        with repo.track(nothing=0) as run:
            run.capture()
        assert explore(
            repo,
            "main",
            plan,
            _loosely(with_optimizer),
            SerialExecutor(),
            study="s",
            progress=False,
        )
    return seen


def _loosely(train: Any) -> Any:
    """The first variant forks from a state that has nothing of it."""

    def loose(job: Job) -> None:
        track = job.track
        # for this job alone
        job.track = lambda **objects: track(strict=False, **objects)  # type: ignore[method-assign]
        train(job)

    return loose


def test_a_restored_optimizer_keeps_the_rate_of_the_parent(tmp_path: Path) -> None:
    seen = reconfigured(tmp_path, is_used=False, config={"lr": 0.05})
    assert [group["lr"] for group in seen["groups"]] == [1e-2, 1e-3]


def test_reconfigure_sets_what_the_variant_changes_and_scales_all_rates(tmp_path: Path) -> None:
    seen = reconfigured(
        tmp_path, is_used=True, config={"lr": 0.05, "weight_decay": 0.3, "depth": 3}
    )
    assert seen["set"] == {"lr": 0.05, "weight_decay": 0.3}
    assert [group["lr"] for group in seen["groups"]] == pytest.approx([0.05, 0.005])
    assert seen["groups"][0]["lr"] == 0.05
    assert [group["weight_decay"] for group in seen["groups"]] == [0.3, 0.0], "biases stay without"


def test_reconfigure_goes_on_along_the_same_schedule(tmp_path: Path) -> None:
    seen = reconfigured(tmp_path, is_used=True, config={"lr": 0.05}, scheduled=True)
    assert [group["lr"] for group in seen["groups"]] == pytest.approx([0.025, 0.0025]), (
        "after one halving"
    )
    assert seen["after"] == pytest.approx([0.0125, 0.00125])


class New:
    """All that ``reconfigure`` asks of a job."""

    is_new = True
    variant = Variant("child", "parent", 1, {"lr": 0.05})


def test_reconfigure_sets_the_rates_from_which_a_plateau_goes_on() -> None:
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    # all that it asks of a job
    assert reconfigure(New(), optimizer, scheduler) == {"lr": 0.05}  # type: ignore[arg-type]
    for _ in range(3):
        scheduler.step(1.0)
    assert scheduler.get_last_lr() == [optimizer.param_groups[0]["lr"]] == [0.0125]


def test_reconfigure_reaches_the_schedulers_that_a_scheduler_is_made_of() -> None:
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    # of no type
    parts = [
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch, share=share: share)  # type: ignore[misc]
        for share in (1.0, 0.25)
    ]
    scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [*parts], milestones=[1])
    reconfigure(New(), optimizer, scheduler)  # type: ignore[arg-type]
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.0125


def test_reconfigure_begins_the_schedule_of_an_optimizer_whose_parent_had_none() -> None:
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1.0)
    optimizer.load_state_dict(torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1).state_dict())
    reconfigure(New(), optimizer, scheduler)  # type: ignore[arg-type]
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.05


def test_reconfigure_leaves_alone_what_was_resumed() -> None:
    class Resumed:
        is_new = False

    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    # all that it asks of a job
    assert reconfigure(Resumed(), optimizer) == {}  # type: ignore[arg-type]
