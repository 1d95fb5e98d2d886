"""Applying what a variant's configuration changes in an optimizer that was restored: the state has the old values, and would keep them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

    from datastates.lineage.states import Value

    from .job import Job

__all__ = ["reconfigure"]


def reconfigure(job: Job, optimizer: Optimizer, scheduler: LRScheduler | None = None) -> dict[str, Value]:
    """Set the options of ``optimizer`` that the variant itself changes (``lr``, ``weight_decay``, ``momentum``); returns those that were
    set.

    Call it after ``job.track``, because the restored state holds the options of the parent. It does nothing if the variant is resumed: the
    variant's own state has them.

    A group whose value differed from that of the first group keeps its own, so that biases stay without weight decay; the learning rates of
    all groups are scaled alike. Where a scheduler has begun, ``lr`` is the rate that it started from: the rate that it has reached is
    scaled, and goes on along the same curve. Pass the scheduler, so that it is updated too.
    """
    if not job.is_new:
        return {}
    changed = {key: value for key, value in job.variant.config.items() if key in optimizer.defaults}
    for key, value in changed.items():
        if key == "lr" and isinstance(value, int | float):
            _scale_rates(optimizer.param_groups, float(value))
        else:
            first = optimizer.param_groups[0][key]
            for group in [group for group in optimizer.param_groups if group[key] == first]:
                group[key] = value
    if scheduler is not None and "lr" in changed:
        _follow(scheduler, optimizer.param_groups)
    return changed


def _follow(scheduler: LRScheduler, groups: Sequence[dict[str, Any]]) -> None:
    """Let a scheduler, and those that it is made of, start from the rates of the groups; ``ReduceLROnPlateau`` starts from none."""
    for part in getattr(scheduler, "_schedulers", ()):
        _follow(part, groups)
    if hasattr(scheduler, "base_lrs"):
        scheduler.base_lrs = [float(group.get("initial_lr", group["lr"])) for group in groups]
    scheduler._last_lr = [group["lr"] for group in groups]


def _scale_rates(groups: Sequence[dict[str, Any]], rate: float) -> None:
    before = float(groups[0].get("initial_lr", groups[0]["lr"]))
    for group in groups:
        for key in ("initial_lr", "lr"):
            if key in group:
                old = float(group[key])
                _set(group, key, rate if old == before or before == 0 else old * rate / before)


def _set(group: dict[str, Any], key: str, value: float) -> None:
    if isinstance(group[key], torch.Tensor):
        group[key].fill_(value)  # a captured graph reads it
    else:
        group[key] = value
