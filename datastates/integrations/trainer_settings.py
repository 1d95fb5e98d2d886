"""The values of ``TrainingArguments``: as a configuration to record, and applied to restored objects where they differ."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from datastates.errors import InvalidInput
from datastates.tracking.configuration import configuration

__all__ = ["Settings", "changes", "configuration_of"]

_OPTIONS = {"weight_decay": "weight_decay", "adam_beta1": "betas", "adam_beta2": "betas", "adam_epsilon": "eps"}
_CURVE = ("learning_rate", "lr_scheduler_type", "warmup_steps", "max_steps", "num_train_epochs")
_WATCHED = (*_OPTIONS, *_CURVE, "seed", "data_seed")


def configuration_of(args: Any, more: object) -> dict[str, object]:
    """The arguments of a training by their own names, and what the user adds."""
    found = {name: _recordable(name, value) for name, value in args.to_dict().items() if value is not None}
    return {**found, **configuration(more)}


def changes(args: Any, before: Mapping[str, Any]) -> dict[str, tuple[object, object]]:
    """The arguments that differ from those with which the state was captured: both values, by name."""
    now = configuration(configuration_of(args, None))
    return {name: (before[name], now[name]) for name in _WATCHED if name in before and name in now and before[name] != now[name]}


class Settings:
    """The options of an optimizer and the base of its schedule, as the Trainer made them from its arguments."""

    def __init__(self, optimizer: Any, scheduler: Any) -> None:
        self._optimizer, self._scheduler = optimizer, scheduler
        self._groups = [{key: _number(value) for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
        self._rates = [_number(rate) for rate in getattr(scheduler, "base_lrs", ())]

    def put_back(self, changed: Mapping[str, object]) -> None:
        """Set what ``changed`` names again: a state was restored meanwhile, which brought its own values."""
        for group, made in zip(self._optimizer.param_groups, self._groups, strict=True):
            for option in {_OPTIONS[name] for name in changed if name in _OPTIONS} & made.keys():
                group[option] = made[option]
        if self._rates and any(name in changed for name in _CURVE):
            self._put_rates()

    def _put_rates(self) -> None:
        """Set the rate of the new curve at the point that the schedule has reached; a schedule without a curve begins anew from the new
        rate.
        """
        scheduler = self._scheduler
        scheduler.base_lrs = list(self._rates)
        curves = getattr(scheduler, "lr_lambdas", None)
        for index, group in enumerate(self._optimizer.param_groups):
            group["initial_lr"] = self._rates[index]
            _set_rate(group, self._rates[index] * (curves[index](scheduler.last_epoch) if curves else 1.0))
        scheduler._last_lr = [_number(group["lr"]) for group in self._optimizer.param_groups]


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value


def _set_rate(group: dict[str, Any], rate: float) -> None:
    if isinstance(group["lr"], torch.Tensor):
        group["lr"].fill_(rate)  # a captured graph reads it
    else:
        group["lr"] = rate


def _recordable(name: str, value: object) -> object:
    try:
        configuration({name: value})
    except InvalidInput:
        return str(value)[:200]
    return value
