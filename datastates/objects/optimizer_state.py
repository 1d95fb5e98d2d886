"""An optimizer's state by the names of its parameters, as a plain tree.

Torch numbers parameters by their order; names survive another order, an unfrozen layer, or another wrapper.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

import torch
from torch.optim import Optimizer

from datastates.content.spread import kinds

from .model_state import Seen
from .optimizers import CLASS, bare, class_of
from .report import own

__all__ = ["OptimizerState", "is_plain", "numbered", "optimizer_tree", "options_of"]

Names = list[list[str]]
Tree = Mapping[str, Any]


class OptimizerState:
    """One tracked optimizer. As long as its parameters and the tensors of its state are the same objects, and names are found
    in the same places, ``tree`` returns the very same ``state`` and names; the options of its groups are read every time.
    """

    __slots__ = ("_class", "_labels", "_names", "_seen", "_state", "_trees", "optimizer")

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = bare(optimizer)
        self._seen: Seen | None = None
        self._trees: Seen | None = None
        self._labels: object = None
        self._names: Names = []
        self._state: object = None
        self._class = ""

    def tree(self, names: Callable[[], Names], trees: Seen, labels: object) -> dict[str, object]:
        """The result of ``optimizer_tree``; do not change ``state`` and ``params`` in it.

        ``names()`` is called when the parameters change, or when the sources of names (``trees`` and ``labels``) change.
        """
        seen = _look(self.optimizer)
        if seen is not None and self._is_as_it_was(seen, trees, labels):
            return {"state": self._state, "param_groups": _groups(self.optimizer, self._names), CLASS: self._class}
        if seen is not None and not _says_all(self.optimizer):
            seen = None
        self._names, self._trees, self._labels, self._seen = names(), trees, labels, seen
        self._class = class_of(self.optimizer)
        tree = optimizer_tree(self.optimizer, self._names)
        self._state = tree["state"] if seen is not None else None
        return tree

    def _is_as_it_was(self, seen: Seen, trees: Seen, labels: object) -> bool:
        if self._seen is None or self._trees is None:
            return False
        return labels == self._labels and self._trees.is_still(trees) and self._seen.is_still(seen)

    @property
    def lasting(self) -> list[object]:
        """The parts of ``tree`` that the next one has too, unless something changes: ``state`` and the names of the groups."""
        return [] if self._state is None else [self._state, *self._names]


def _look(optimizer: Optimizer) -> Seen | None:
    """Every parameter and every entry of the state by name and object; None if its state has another form."""
    state, groups = optimizer.state, optimizer.param_groups
    entries = list(state.values())
    if not is_plain(optimizer) or not _DICT.issuperset(map(type, entries)):
        return None
    rows = [group["params"] for group in groups]
    objects = [*state, *chain.from_iterable(entries), *chain.from_iterable(map(dict.values, entries)), *groups, *chain.from_iterable(rows)]
    return Seen(objects, [*map(len, entries), *map(len, rows)])


def _says_all(optimizer: Optimizer) -> bool:
    """Whether the objects that ``_look`` finds say all of the state, which they do if all are tensors: a list may change in place."""
    return kinds().issuperset(map(type, chain.from_iterable(map(dict.values, optimizer.state.values()))))


_DICT = frozenset({dict})


def optimizer_tree(optimizer: Optimizer, names: Names) -> dict[str, object]:
    """``{"state": {name: {...}}, "param_groups": [{..., "params": [name, ...]}], CLASS: "torch.optim.Adam"}`` with the live tensors.

    The state of a parameter that is in no group any more is left out. An optimizer with a ``state_dict`` of its own is asked for
    it, and the numbers in it are replaced by names if it has torch's form.
    """
    if not is_plain(optimizer):
        return {**_named(optimizer.state_dict(), names), CLASS: class_of(optimizer)}
    rows = zip(optimizer.param_groups, names, strict=True)
    name_of = {id(parameter): name for group, row in rows for parameter, name in zip(group["params"], row, strict=True)}
    entries: Mapping[Any, Any] = optimizer.state
    state: dict[object, object] = {}
    for key, entry in entries.items():
        name = name_of.get(id(key)) if isinstance(key, torch.Tensor) else key
        if name is not None:
            state[name] = dict(entry) if isinstance(entry, dict) else entry
    return {"state": state, "param_groups": _groups(optimizer, names), CLASS: class_of(optimizer)}


def _groups(optimizer: Optimizer, names: Names) -> list[dict[str, object]]:
    return [{**options_of(group), "params": row} for group, row in zip(optimizer.param_groups, names, strict=True)]


def options_of(group: Tree) -> dict[str, Any]:
    """The options of a parameter group: everything but its parameters."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def is_plain(optimizer: Optimizer) -> bool:
    """Whether the optimizer keeps its state as torch's base class does, so that it can be read and written directly."""
    kind = type(optimizer)
    hooks = [getattr(optimizer, f"_optimizer_state_dict_{when}_hooks", None) for when in ("pre", "post")]
    return kind.state_dict is Optimizer.state_dict and kind.load_state_dict is Optimizer.load_state_dict and not any(hooks)


def numbered(optimizer: Optimizer, names: Names, stored: Tree) -> dict[str, Any]:
    """A stored tree in the form that the optimizer's own ``load_state_dict`` takes; shares no memory with ``stored``."""
    tree: dict[str, Any] = own({key: value for key, value in stored.items() if key != CLASS})
    number_of = _numbers_by_name(optimizer.state_dict(), names)
    if number_of is None:
        return tree
    tree["state"] = {number_of.get(key, key): entry for key, entry in tree["state"].items()}
    by_names = {frozenset(group["params"]): group for group in tree["param_groups"]}
    tree["param_groups"] = [{**by_names[frozenset(row)], "params": [number_of[name] for name in row]} for row in names]
    return tree


def _named(state: dict[str, Any], names: Names) -> dict[str, object]:
    number_of = _numbers_by_name(state, names)
    if number_of is None:
        return state
    name_of = {number: name for name, number in reversed(number_of.items())}
    entries = {name_of.get(key, key): entry for key, entry in state["state"].items()}
    groups = [{**group, "params": list(row)} for group, row in zip(state["param_groups"], names, strict=True)]
    return {**state, "state": entries, "param_groups": groups}


def _numbers_by_name(state: Tree, names: Names) -> dict[str, Any] | None:
    """The number of each parameter in a ``state_dict``; None if it does not have torch's form."""
    groups = state.get("param_groups")
    if not isinstance(groups, list) or not isinstance(state.get("state"), dict) or len(groups) != len(names):
        return None
    rows = [group.get("params") for group in groups]
    if any(not isinstance(row, list) or len(row) != len(name) for row, name in zip(rows, names, strict=True)):
        return None
    return {name: number for row, group in zip(names, rows, strict=True) for name, number in zip(row, group, strict=True)}
