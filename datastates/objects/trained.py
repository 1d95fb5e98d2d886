"""The parameters that a training trains: where a state and live objects differ, and making them alike.

A script that unfreezes layers on its way, or gives an optimizer another group, does so in one epoch. Started again later, it does not
come by there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import nn

from .adapters import Adapted
from .names import join, split_wrappers
from .optimizer_state import options_of
from .report import RestoreReport, own

if TYPE_CHECKING:
    from torch.optim import Optimizer

__all__ = ["add_groups", "divided", "put_back", "with_trained"]


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


def divided(report: RestoreReport, adapted: Adapted, is_first: Callable[[nn.Parameter], bool]) -> tuple[RestoreReport, RestoreReport]:
    """The report with only those of its frozen and unfrozen parameters for which ``is_first`` says so, and with only the others."""
    differing = {*report.frozen, *report.unfrozen}
    first = {path for path, parameter, _ in _parameters(adapted) if path in differing and is_first(parameter)}

    def only(is_chosen: Callable[[str], bool]) -> RestoreReport:
        return replace(report, frozen=tuple(filter(is_chosen, report.frozen)), unfrozen=tuple(filter(is_chosen, report.unfrozen)))

    return only(first.__contains__), only(lambda path: path not in first)


def add_groups(optimizer: Optimizer, stored: object, adapted: Adapted) -> int:
    """Give an optimizer the last of the ``stored`` parameter groups, as many as it lacks, of live parameters; returns how many.

    None is added unless each of their parameters is in a tracked module, and in no group yet. Whether they are right, the restore finds.
    """
    groups = optimizer.param_groups
    if not isinstance(stored, list) or len(stored) <= len(groups):
        return 0
    count = len(groups)
    taken = {id(parameter) for group in groups for parameter in group["params"]}
    for named in _namings(adapted):
        present, new = ([[named.get(name) for name in group["params"]] for group in some] for some in (stored[:count], stored[count:]))
        if any(parameter is not None and id(parameter) not in taken for row in present for parameter in row):
            continue  # another model's, that has parameters of the same names
        if all(parameter is not None and id(parameter) not in taken for row in new for parameter in row):
            break
    else:
        return 0
    for group, row in zip(stored[count:], new, strict=True):
        optimizer.add_param_group({**own(options_of(group)), "params": row})
    return len(new)


def _namings(adapted: Adapted) -> Iterator[dict[object, nn.Parameter]]:
    """The ways in which an optimizer's tree may name parameters: as one model does, or with the paths of several before their names."""
    models: list[tuple[str, dict[object, nn.Parameter]]] = [
        (path, {name: tensor for name, tensor in model.known().items() if isinstance(tensor, nn.Parameter)})
        for path, model in adapted.models()
        if not model.is_flattened
    ]
    yield from (named for _, named in models)
    yield {f"{path.replace('/', '.')}.{name}": tensor for path, named in models for name, tensor in named.items()}


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
