"""The values of ``TrainingArguments``, as a configuration to record, and where they differ from those of a state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from datastates.errors import InvalidInput
from datastates.tracking.configuration import configuration

__all__ = ["changes", "configuration_of"]

_WATCHED = (
    *("weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon"),
    *("learning_rate", "lr_scheduler_type", "warmup_steps", "max_steps", "num_train_epochs"),
    *("seed", "data_seed"),
)


def configuration_of(args: Any, more: object) -> dict[str, object]:
    """The arguments of a training by their own names, and what the user adds."""
    found = {name: _recordable(name, value) for name, value in args.to_dict().items() if value is not None}
    return {**found, **configuration(more)}


def changes(args: Any, before: Mapping[str, Any]) -> dict[str, tuple[object, object]]:
    """The arguments that differ from those with which the state was captured: both values, by name."""
    now = configuration(configuration_of(args, None))
    return {name: (before[name], now[name]) for name in _WATCHED if name in before and name in now and before[name] != now[name]}


def _recordable(name: str, value: object) -> object:
    try:
        configuration({name: value})
    except InvalidInput:
        return str(value)[:200]
    return value
