"""The parameters that a training trains, and the modes of its modules: where a state and live objects differ, and making them alike.

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


def with_trained(report: RestoreReport, adapted: Adapted, stored: Mapping[str, bool], modes: str | None = None) -> RestoreReport:
    """The report with ``frozen`` and ``unfrozen``, ``in_eval`` and ``in_train``. ``stored`` says of each tensor of the state, by path,
    whether it required a gradient. ``modes`` are those of the state; a training whose modules were all in training mode has none.

    A state in which nothing required a gradient was not captured from a training: it comes from a file, and says nothing about this.
    """
    restored = set(report.restored)
    here = {path: parameter for path, parameter, _ in _parameters(adapted) if path in restored and path in stored}
    if any(stored[path] for path in here):
        frozen = tuple(path for path, parameter in here.items() if parameter.requires_grad and not stored[path])
        unfrozen = tuple(path for path, parameter in here.items() if not parameter.requires_grad and stored[path])
        report = replace(report, frozen=frozen, unfrozen=unfrozen)
    elif modes is None:
        return report
    was_eval = {*(modes or "").split("\n")}
    tops, others = ({path.rpartition("/")[0] for path in paths} for paths in (restored, report.skipped))
    now = {each: part.training for path, model in adapted.models() if path in tops - others for each, part in model.parts()}
    in_eval = tuple(path for path, is_training in now.items() if is_training and path in was_eval)
    return replace(report, in_eval=in_eval, in_train=tuple(path for path in now if not now[path] and path not in was_eval))


def put_back(report: RestoreReport, adapted: Adapted) -> list[str]:
    """Freeze and unfreeze live parameters, and set the modes of modules, as the state had them; returns the parameters that have to stay as
    they are.

    ``DistributedDataParallel`` chose the parameters whose gradients it exchanges when it was made.
    """
    was = dict.fromkeys((*report.frozen, *report.in_eval), False) | dict.fromkeys((*report.unfrozen, *report.in_train), True)
    left = []
    for path, parameter, is_exchanged in _parameters(adapted):
        if path in was and is_exchanged:
            left.append(path)
        elif path in was:
            parameter.requires_grad_(was[path])
    for _, model in adapted.models():
        for path, part in model.parts():
            if path in was:
                part.training = was[path]
    return left


def divided(
    report: RestoreReport, adapted: Adapted, is_first: Callable[[object], bool], *, is_running: bool
) -> tuple[RestoreReport, RestoreReport]:
    """The report with only those of its differing parameters and modules for which ``is_first`` says so, and with only the others.

    Models whose mode only an evaluation changed are among the first. The state was captured during one if a model that is trained was in
    eval mode. If the script ``is_running`` and a model is in eval mode now, an evaluation is going on.
    """
    found = (
        *((path, parameter) for path, parameter, _ in _parameters(adapted)),
        *(each for _, model in adapted.models() for each in model.parts()),
    )
    evaluated = [
        model
        for path, model in adapted.models()
        if (path in report.in_eval and any(parameter.requires_grad for parameter in model.module.parameters()))
        or (path in report.in_train and is_running)
    ]
    first = {path for path, each in found if is_first(each)}.union(path for model in evaluated for path, _ in model.parts())

    def only(is_chosen: Callable[[str], bool]) -> RestoreReport:
        paths = (report.frozen, report.unfrozen, report.in_eval, report.in_train)
        frozen, unfrozen, in_eval, in_train = (tuple(filter(is_chosen, each)) for each in paths)
        return replace(report, frozen=frozen, unfrozen=unfrozen, in_eval=in_eval, in_train=in_train)

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
        (path, {name: tensor for name, tensor in model.tree().items() if isinstance(tensor, nn.Parameter)})
        for path, model in adapted.models()
    ]
    yield from (named for _, named in models)
    yield {f"{path.replace('/', '.')}.{name}": tensor for path, named in models for name, tensor in named.items()}


def _parameters(adapted: Adapted) -> Iterator[tuple[str, nn.Parameter, bool]]:
    """The parameters of every tracked module by path, and whether their gradients are exchanged among replicas."""
    replicated = getattr(sys.modules.get("torch.nn.parallel.distributed"), "DistributedDataParallel", ())
    for path, model in adapted.models():
        is_exchanged = any(isinstance(part, replicated) for part in split_wrappers(model.module))
        for name, tensor in model.tree().items():
            if isinstance(tensor, nn.Parameter) and tensor.is_leaf:
                yield join(path, name), tensor, is_exchanged
