"""Torch's learning-rate schedules: where they stand, and how to stand there with other base rates."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.optim import lr_scheduler

from datastates.errors import Unsupported

__all__ = ["Schedule"]

Rates = list[Any]

_BY_BASE = (lr_scheduler.LambdaLR, lr_scheduler.CosineAnnealingWarmRestarts)
"""Schedules whose ``get_lr`` depends only on their base rates and their place."""

_FREE = (lr_scheduler.ReduceLROnPlateau,)
"""Schedules without base rates: they go on from whatever rate there is."""


class Schedule:
    """A scheduler as it was built: with the base rates of its optimizer's configuration, at its beginning."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler, self.optimizer = scheduler, scheduler.optimizer
        self._bases = [list(map(_own, each.base_lrs)) for each in _parts(scheduler) if hasattr(each, "base_lrs")]
        self._was = repr(scheduler.state_dict())

    @property
    def is_restored(self) -> bool:
        """Whether it stands elsewhere, or has other rates, than when it was built."""
        return repr(self.scheduler.state_dict()) != self._was

    def rates(self, built: Rates, restored: Rates) -> tuple[Rates, Callable[[], None]]:
        """The rates that the groups would have at its place with the base rates with which it was built; and a function that sets those.

        ``built`` are the rates of the groups when they were built, ``restored`` are their present rates.

        :raises Unsupported: this cannot be computed for such a scheduler.
        """
        parts = [each for each in _parts(self.scheduler) if hasattr(each, "base_lrs")]
        now = [list(each.base_lrs) for each in parts]
        self._give(parts, self._bases)
        try:
            found = self._rates(_active(self.scheduler), built, restored, now)
        finally:
            self._give(parts, now)
        return found, lambda: self._settle(parts, found)

    def _rates(self, active: Any, built: Rates, restored: Rates, before: Sequence[Rates]) -> Rates:
        kind = type(active)
        if isinstance(active, _FREE):
            return list(built)
        if kind.__module__ == lr_scheduler.__name__:
            if hasattr(active, "_get_closed_form_lr"):
                return list(active._get_closed_form_lr())
            if kind in _BY_BASE:
                active._get_lr_called_within_step = True  # else torch warns
                try:
                    return list(active.get_lr())
                finally:
                    active._get_lr_called_within_step = False
            if kind is lr_scheduler.MultiplicativeLR and len(before) == 1 and all(before[0]):
                return [rate * new / old for rate, new, old in zip(restored, self._bases[0], before[0], strict=True)]
        raise Unsupported(f"a {kind.__name__} cannot be given another rate in the middle of its schedule")

    def _settle(self, parts: Sequence[Any], rates: Rates) -> None:
        self._give(parts, self._bases)
        for each in (self.scheduler, _active(self.scheduler)):
            if hasattr(each, "_last_lr"):
                each._last_lr = [float(rate) for rate in rates]

    @staticmethod
    def _give(parts: Sequence[Any], bases: Sequence[Rates]) -> None:
        for each, rates in zip(parts, bases, strict=True):
            each.base_lrs = list(rates)


def _parts(scheduler: Any) -> Iterator[Any]:
    """The scheduler, and those of which it is made."""
    yield scheduler
    for each in getattr(scheduler, "_schedulers", ()):
        yield from _parts(each)


def _active(scheduler: Any) -> Any:
    """Of several schedulers, the one that sets the rate now."""
    while type(scheduler) is lr_scheduler.SequentialLR:
        scheduler = scheduler._schedulers[bisect_right(scheduler._milestones, scheduler.last_epoch)]
    return scheduler


def _own(rate: Any) -> Any:
    return rate.detach().clone() if isinstance(rate, torch.Tensor) else rate
