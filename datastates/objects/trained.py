"""The parameters that a training trains: where a state and live objects differ, and making them alike.

A script that unfreezes layers on its way, or gives an optimizer another group, does so in one epoch. Started again later, it does not
come by there.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import nn

from .adapters import Adapted
from .names import join, split_wrappers
from .optimizer_state import options_of
from .report import RestoreReport, own

if TYPE_CHECKING:
    from torch.optim import Optimizer

__all__ = ["add_groups", "put_back", "with_trained"]


def with_trained(report: RestoreReport, adapted: Adapted, stored: Mapping[str, bool]) -> RestoreReport:
    """The report with ``frozen`` and ``unfrozen``. ``stored`` says of each tensor of the state, by path, whether it required a gradient.

    A state in which nothing did was not captured from a training: it comes from a file, and says nothing about this.
    """
    restored = set(report.restored)
    here = {path: parameter for path, parameter, _ in _parameters(adapted) if path in restored and path in stored}
    if not any(stored[path] for path in here):
        return report
    frozen = tuple(path for path, parameter in here.items() if parameter.requires_grad and not stored[path])
    unfrozen = tuple(path for path, parameter in here.items() if not parameter.requires_grad and stored[path])
    return replace(report, frozen=frozen, unfrozen=unfrozen)


def put_back(report: RestoreReport, adapted: Adapted) -> list[str]:
    """Freeze and unfreeze live parameters as the state had them; returns those that have to stay as they are.

    ``DistributedDataParallel`` chose the parameters whose gradients it exchanges when it was made.
    """
    frozen, unfrozen = set(report.frozen), set(report.unfrozen)
    left = []
    for path, parameter, is_exchanged in _parameters(adapted):
        if path in frozen or path in unfrozen:
            if is_exchanged:
                left.append(path)
            else:
                parameter.requires_grad_(path in unfrozen)
    return left


def add_groups(optimizer: Optimizer, stored: object, adapted: Adapted) -> int:
    """Give an optimizer the last of the ``stored`` parameter groups, as many as it lacks, of live parameters; returns how many.

    None is added unless each of their parameters is in a tracked module, and in no group yet. Whether they are right, the restore finds.
    """
    groups = optimizer.param_groups
    if not isinstance(stored, list) or len(stored) <= len(groups):
        return 0
    named: dict[object, nn.Parameter] = {}
    for path, model in adapted.models():
        for name, tensor in () if model.is_flattened else model.known().items():
            if isinstance(tensor, nn.Parameter):
                named.setdefault(name, tensor)
                named[f"{path.replace('/', '.')}.{name}"] = tensor
    taken = {id(parameter) for group in groups for parameter in group["params"]}
    rows = [[named.get(name) for name in group["params"]] for group in stored[len(groups) :]]
    if any(parameter is None or id(parameter) in taken for row in rows for parameter in row):
        return 0
    for group, row in zip(stored[len(groups) :], rows, strict=True):
        optimizer.add_param_group({**own(options_of(group)), "params": row})
    return len(rows)


def _parameters(adapted: Adapted) -> Iterator[tuple[str, nn.Parameter, bool]]:
    """The parameters of every tracked module by path, and whether their gradients are exchanged among replicas."""
    for path, model in adapted.models():
        if model.is_flattened:  # one flat parameter stands for many
            continue
        is_exchanged = _exchanges(model.module)
        for name, tensor in model.known().items():
            if isinstance(tensor, nn.Parameter) and tensor.is_leaf:
                yield join(path, name), tensor, is_exchanged


def _exchanges(module: nn.Module) -> bool:
    kind = getattr(sys.modules.get("torch.nn.parallel.distributed"), "DistributedDataParallel", None)
    return kind is not None and any(isinstance(part, kind) for part in split_wrappers(module))
