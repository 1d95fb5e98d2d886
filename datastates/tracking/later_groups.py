"""The parameter groups that optimizers got after a state, which has to be restored into them."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer

from datastates.lineage.states import State
from datastates.objects.adapters import parts
from datastates.objects.optimizer_state import is_plain
from datastates.objects.optimizers import bare

from .trained import groups_in
from .training import Training

__all__ = ["without_later_groups"]


@contextmanager
def without_later_groups(training: Training, state: State, *, without: Collection[str], are_kept: bool) -> Iterator[bool]:
    """Take the groups that optimizers got after the state away for the block, which restores it; yields whether there were any.

    If they ``are_kept``, they come back as ``add_param_group`` had made them: the optimizer has no state for their parameters. If the block
    raises, everything is as it was. Objects that are restored ``without`` are left alone.
    """
    later = [(each, count) for each, count in _known(training, state, without) if count < len(each.param_groups)]
    taken = [(each, each.param_groups[count:], _taken(each, count)) for each, count in later]
    try:
        yield bool(taken)
    except BaseException:
        for optimizer, groups, entries in taken:
            optimizer.param_groups += groups
            optimizer.state.update(entries)
        raise
    for optimizer, groups, _ in taken if are_kept else ():
        optimizer.param_groups += groups


def _known(training: Training, state: State, without: Collection[str]) -> Iterator[tuple[Optimizer, int]]:
    """The optimizers whose first groups are those of the state, and how many these are."""
    adapted = training.adapted
    for path, found in parts(adapted.objects):
        if isinstance(found, Optimizer) and is_plain(optimizer := bare(found)) and path.partition("/")[0] not in without:
            stored = groups_in(training.core, state, path)
            rows = [set(group["params"]) for group in stored] if isinstance(stored, list) else []
            if rows and rows == [set(row) for row in adapted.names_of(found)[: len(rows)]]:
                yield optimizer, len(rows)


def _taken(optimizer: Optimizer, count: int) -> dict[Any, Any]:
    """The state of the parameters that are not in the first groups, which is taken from the optimizer together with their groups."""
    parameters = [parameter for group in optimizer.param_groups[count:] for parameter in group["params"]]
    del optimizer.param_groups[count:]
    return {parameter: optimizer.state.pop(parameter) for parameter in parameters if parameter in optimizer.state}
