"""Optimizers and gradient scalers: their state as a plain tree, and restoring it.

Torch numbers parameters by their order. Here they have names, which survive another order, an
unfrozen layer, or another wrapper.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from itertools import chain
from typing import Any

import torch
from torch.optim import ASGD, LBFGS, Optimizer

from datastates.errors import InvalidInput, Unsupported
from datastates.system.devices import devices

from .encoding import encoder_of
from .geometry import are_alike, is_spread, kinds
from .model import Members
from .per_rank import cut_for, on_all
from .report import Findings, Mismatch, describe, leaf_paths, own, write_tensor
from .tree import Number, join, positional_name

CLASS = "optimizer_class"
"""The name under which an optimizer's tree records the class that made it."""

INNER = "inner"
"""The name under which an optimizer's tree has the states of inner optimizers that its own state
leaves out, by attribute."""

Names = list[list[str]]
Tree = Mapping[str, Any]
HOW = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""Options that change how this process computes a step, but not its result.

A restore leaves them, so a state of a GPU fits a CPU.
"""

_SHAPED = frozenset(
    {
        "exp_avg",
        "exp_avg_sq",
        "max_exp_avg_sq",
        "exp_inf",
        "momentum_buffer",
        "square_avg",
        "grad_avg",
    }
    | {"acc_delta", "sum", "ax", "prev", "step_size", "variance"}
)
"""The keys of torch's own optimizers whose tensors have the shape of their parameter."""


def has_hooks(optimizer: Optimizer) -> bool:
    """Whether torch's hooks can be put on it: not on a wrapper that never called
    ``Optimizer.__init__``."""
    return "_optimizer_step_pre_hooks" in vars(
        optimizer
    ) and "_optimizer_load_state_dict_pre_hooks" in vars(optimizer)


def with_inner(optimizer: Optimizer) -> Iterator[Optimizer]:
    """The optimizer, and the optimizers among its attributes."""
    found = [optimizer]
    for each in found:
        yield each
        found += [
            inner
            for inner in vars(each).values()
            if isinstance(inner, Optimizer) and not any(inner is other for other in found)
        ]


def left_out(optimizer: Optimizer) -> dict[str, Optimizer]:
    """The optimizers among the attributes of a ``bare`` one whose state is not in its
    ``state_dict``, as SAM leaves out its base optimizer.

    Optimizers with torch's own ``state_dict`` are the only ones that are known to leave them out.
    """
    members = vars(optimizer)
    hooks = (members.get(f"_optimizer_state_dict_{when}_hooks") for when in ("pre", "post"))
    if (
        type(optimizer).state_dict is not Optimizer.state_dict
        or "state_dict" in members
        or any(hooks)
    ):
        return {}
    inner = {name: found for name, found in members.items() if isinstance(found, Optimizer)}
    return {
        name: found
        for name, found in inner.items()
        if getattr(found, "state", optimizer.state) is not optimizer.state
    }


def bare(optimizer: Optimizer) -> Optimizer:
    """The optimizer that owns the state. A wrapper that only passes on another optimizer's state
    (Accelerate's, for example) is replaced by that optimizer."""
    if not has_hooks(optimizer):
        for inner in with_inner(optimizer):
            if inner is not optimizer and _is_of(inner, optimizer):
                return bare(inner)
    return optimizer


def class_of(optimizer: Optimizer) -> str:
    """The class of the state: torch's class if the optimizer derives from one, else its own
    name, with the class that it wraps."""
    optimizer = bare(optimizer)
    kind = type(optimizer)
    base = next(
        (
            each
            for each in kind.__mro__
            if each.__module__.startswith("torch.optim.") and each is not Optimizer
        ),
        None,
    )
    if base is not None:
        return f"torch.optim.{base.__name__}"
    inner = next((each for each in with_inner(optimizer) if each is not optimizer), None)
    return kind.__name__ if inner is None else f"{kind.__name__} of {class_of(inner)}"


def check_optimizer_form(path: str, optimizer: Optimizer) -> None:
    """Raise unless it can be read like an optimizer, and its state can be stored once it has one.

    Optimizers of widely used libraries are known in advance.

    :raises InvalidInput: it has no parameter groups or no state. The text names what to track
        instead.
    :raises Unsupported: its state will hold objects that cannot be stored, or this rank has only a
        part of its state.
    """
    zero: Any = getattr(
        sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer"),
        "ZeroRedundancyOptimizer",
        None,
    )
    if zero is not None and any(isinstance(each, zero) for each in with_inner(optimizer)):
        raise Unsupported(
            f"{path} is a ZeroRedundancyOptimizer, which is not supported: shard the model with"
            " torch.distributed.fsdp.fully_shard, or use a plain optimizer, such as"
            " torch.optim.AdamW"
        )
    groups, name, made_in = (
        getattr(optimizer, "param_groups", None),
        type(optimizer).__name__,
        type(optimizer).__module__,
    )
    if not isinstance(groups, list) or not isinstance(getattr(optimizer, "state", None), Mapping):
        others = [name for name, found in vars(optimizer).items() if isinstance(found, Optimizer)]
        hint = f"track its .{others[0]}" if others else "track the optimizer that it wraps"
        raise InvalidInput(
            f"{path} is a {name}, an optimizer without param_groups and state: {hint} instead"
        )
    projector: Any = getattr(
        sys.modules.get("galore_torch.galore_projector"), "GaLoreProjector", None
    )
    if (
        made_in.startswith("galore_torch.")
        and any("rank" in group for group in groups)
        and encoder_of(projector) is None
    ):
        raise Unsupported(
            f"{path} is a {name}, and its state will hold a GaLoreProjector for each parameter,"
            " which has no safe encoding: call datastates.register_encoder(GaLoreProjector, name,"
            " encode, decode) first"
        )
    if made_in.startswith("torchao.") and any(
        is_spread(each) for group in groups for each in group["params"]
    ):
        raise Unsupported(
            f"{path} is a {name} of DTensors, and its state will hold DTensors of quantized"
            " tensors, which are not stored: use an optimizer of torch.optim with FSDP"
        )


def _is_of(inner: Optimizer, outer: Optimizer) -> bool:
    if outer.state is not inner.state or outer.param_groups is not inner.param_groups:
        return False
    stored: Any = outer.state_dict()
    return isinstance(stored, dict) and stored.keys() == {"state", "param_groups"}


# --- State as a tree, by names of parameters ---


class OptimizerState:
    """One tracked optimizer.

    ``tree`` returns the very same ``state`` and names as long as its parameters and the tensors of
    its state are the same objects, and names are found in the same places. The options of its
    groups are read every time.
    """

    __slots__ = ("_class", "_labels", "_names", "_seen", "_state", "_trees", "optimizer")

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = bare(optimizer)
        self._seen: Members | None = None
        self._trees: Members | None = None
        self._labels: object = None
        self._names: Names = []
        self._state: object = None
        self._class = ""

    def tree(self, names: Callable[[], Names], trees: Members, labels: object) -> dict[str, object]:
        """The result of ``optimizer_tree``; do not change ``state`` and ``params`` in it.

        ``names()`` is called when the parameters change, or when the sources of names (``trees``
        and ``labels``) change.
        """
        seen = _look(self.optimizer)
        if (
            seen is not None
            and self._seen is not None
            and self._trees is not None
            and labels == self._labels
            and self._trees.is_same_as(trees)
            and self._seen.is_same_as(seen)
        ):
            return {
                "state": self._state,
                "param_groups": _groups(self.optimizer, self._names),
                CLASS: self._class,
            }
        if seen is not None and not _says_all(self.optimizer):
            seen = None
        self._names, self._trees, self._labels, self._seen = names(), trees, labels, seen
        self._class = class_of(self.optimizer)
        tree = optimizer_tree(self.optimizer, self._names)
        self._state = tree["state"] if seen is not None else None
        return tree

    @property
    def lasting(self) -> list[object]:
        """The parts of ``tree`` that the next one has too, unless something changes: ``state``
        and the names of the groups."""
        return [] if self._state is None else [self._state, *self._names]


def _look(optimizer: Optimizer) -> Members | None:
    """Every parameter and every entry of the state by name and object; None if its state has
    another form."""
    state, groups = optimizer.state, optimizer.param_groups
    entries = list(state.values())
    if not is_plain(optimizer) or not _DICT.issuperset(map(type, entries)):
        return None
    rows = [group["params"] for group in groups]
    objects = [
        *state,
        *chain.from_iterable(entries),
        *chain.from_iterable(map(dict.values, entries)),
        *groups,
        *chain.from_iterable(rows),
    ]
    return Members(objects, [*map(len, entries), *map(len, rows)])


def _says_all(optimizer: Optimizer) -> bool:
    """Whether the objects that ``_look`` finds are the whole state. This holds if all are tensors,
    because a list may change in place."""
    return kinds().issuperset(
        map(type, chain.from_iterable(map(dict.values, optimizer.state.values())))
    )


_DICT = frozenset({dict})


def optimizer_tree(optimizer: Optimizer, names: Names) -> dict[str, object]:
    """The optimizer's state with the live tensors, as ``{"state": {name: {...}}, "param_groups":
    [{..., "params": [name, ...]}], CLASS: "torch.optim.Adam"}``.

    The state of a parameter that is in no group any more is left out. If an optimizer has its own
    ``state_dict``, that is called. Its numbers are replaced by names if it has torch's form.
    """
    if not is_plain(optimizer):
        return {**_named(optimizer.state_dict(), names), CLASS: class_of(optimizer)}
    rows = zip(optimizer.param_groups, names, strict=True)
    name_of = {
        id(parameter): name
        for group, row in rows
        for parameter, name in zip(group["params"], row, strict=True)
    }
    entries: Mapping[Any, Any] = optimizer.state
    state: dict[object, object] = {}
    for key, entry in entries.items():
        name = name_of.get(id(key)) if isinstance(key, torch.Tensor) else key
        if name is not None:
            state[name] = dict(entry) if isinstance(entry, dict) else entry
    return {"state": state, "param_groups": _groups(optimizer, names), CLASS: class_of(optimizer)}


def _groups(optimizer: Optimizer, names: Names) -> list[dict[str, object]]:
    return [
        {**options_of(group), "params": row}
        for group, row in zip(optimizer.param_groups, names, strict=True)
    ]


def options_of(group: Tree) -> dict[str, Any]:
    """The options of a parameter group: everything but its parameters."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def is_plain(optimizer: Optimizer) -> bool:
    """Whether the optimizer keeps its state as torch's base class does, so that it can be read
    and written directly."""
    kind = type(optimizer)
    hooks = [
        getattr(optimizer, f"_optimizer_state_dict_{when}_hooks", None) for when in ("pre", "post")
    ]
    return (
        kind.state_dict is Optimizer.state_dict
        and kind.load_state_dict is Optimizer.load_state_dict
        and not any(hooks)
    )


def numbered(optimizer: Optimizer, names: Names, stored: Tree) -> dict[str, Any]:
    """A stored tree in the form that the optimizer's own ``load_state_dict`` takes; shares no
    memory with ``stored``."""
    tree: dict[str, Any] = own({key: value for key, value in stored.items() if key != CLASS})
    number_of = _numbers_by_name(optimizer.state_dict(), names)
    if number_of is None:
        return tree
    tree["state"] = {number_of.get(key, key): entry for key, entry in tree["state"].items()}
    by_names = {frozenset(group["params"]): group for group in tree["param_groups"]}
    tree["param_groups"] = [
        {**by_names[frozenset(row)], "params": [number_of[name] for name in row]} for row in names
    ]
    return tree


def _named(state: dict[str, Any], names: Names) -> dict[str, object]:
    number_of = _numbers_by_name(state, names)
    if number_of is None:
        return state
    name_of = {number: name for name, number in reversed(number_of.items())}
    entries = {name_of.get(key, key): entry for key, entry in state["state"].items()}
    groups = [
        {**group, "params": list(row)}
        for group, row in zip(state["param_groups"], names, strict=True)
    ]
    return {**state, "state": entries, "param_groups": groups}


def _numbers_by_name(state: Tree, names: Names) -> dict[str, Any] | None:
    """The number of each parameter in a ``state_dict``; None if it does not have torch's form."""
    groups = state.get("param_groups")
    if (
        not isinstance(groups, list)
        or not isinstance(state.get("state"), dict)
        or len(groups) != len(names)
    ):
        return None
    rows = [group.get("params") for group in groups]
    if any(
        not isinstance(row, list) or len(row) != len(name)
        for row, name in zip(rows, names, strict=True)
    ):
        return None
    return {
        name: number
        for row, group in zip(names, rows, strict=True)
        for name, number in zip(row, group, strict=True)
    }


# --- Restoring: matched by names, in place, and never cast ---


def check_optimizer(
    path: str,
    optimizer: Optimizer,
    names: Names,
    stored: object,
    findings: Findings,
    lost: Collection[int] = (),
) -> None:
    """Find out what of ``stored`` fits, and note the writes that put it into ``optimizer``.

    Existing tensors that fit are overwritten; others are made with the dtype that the state has,
    and never cast as torch's ``load_state_dict`` does. Parameters are matched by name, or by order
    if nothing tracked names them. The state of another class of optimizer never fits.

    The state of a parameter is restored completely or not at all. ``lost`` are the ids of
    parameters that are not restored themselves: their state is left out.
    """
    if not (
        isinstance(stored, dict)
        and isinstance(stored.get("state"), dict)
        and isinstance(stored.get("param_groups"), list)
    ):
        findings.mismatched.append(Mismatch(path, describe(stored), type(optimizer).__name__))
        return
    optimizer = bare(optimizer)
    made_by, made_of = stored.get(CLASS), class_of(optimizer)
    if isinstance(made_by, str) and made_by != made_of:
        if findings.selection.wants_some(path, leaf_paths(stored, path)):
            here = f"{made_of}: make the former, or pass strict=False, and yours begins anew"
            findings.mismatched.append(Mismatch(path, f"what {made_by} keeps", here))
        else:
            findings.skipped.append(path)
        return
    check = _Check(path, optimizer, names, stored, findings, lost)
    if not check.align_by_position():
        return
    if is_plain(optimizer):
        check.groups()
        if not check.holds():
            check.state()
    else:
        check.as_a_whole()


class _Check:
    """The check of one optimizer against one stored tree."""

    def __init__(
        self,
        path: str,
        optimizer: Optimizer,
        names: Names,
        stored: Tree,
        findings: Findings,
        lost: Collection[int],
    ) -> None:
        self.path, self.optimizer, self.names, self.findings, self.lost = (
            path,
            optimizer,
            names,
            findings,
            lost,
        )
        self.stored = stored
        self.stored_groups: list[dict[str, Any]] = stored["param_groups"]
        self.stored_state: dict[Any, Any] = stored["state"]
        self.stored_names: Names = [list(group["params"]) for group in self.stored_groups]

    def align_by_position(self) -> bool:
        """If either side names parameters only by position, use the state's names in order;
        returns whether that works."""
        if (
            not (_is_positional(self.names) or _is_positional(self.stored_names))
            or self.names == self.stored_names
        ):
            return True
        if list(map(len, self.names)) != list(map(len, self.stored_names)):
            here, there = ([len(row) for row in rows] for rows in (self.names, self.stored_names))
            note = Mismatch(
                self.path,
                f"groups of {there} parameters",
                f"groups of {here}, without names: restore it together with its module",
            )
            self.findings.mismatched.append(note)
            return False
        self.names = self.stored_names
        return True

    def as_a_whole(self) -> None:
        """Leave the writing to the optimizer's own ``load_state_dict``, which takes the whole
        stored tree."""
        leaves = leaf_paths(self.stored, self.path)
        known, there = _all(self.names), _all(self.stored_names)
        self.findings.missing += [self._state_path(name) for name in known if name not in there]
        self.findings.unexpected += [self._state_path(name) for name in there if name not in known]
        if known.keys() == there.keys() and {frozenset(row) for row in self.names} != {
            frozenset(row) for row in self.stored_names
        }:
            self._note_partition(0)
        elif self.findings.is_wanted_whole(self.path, leaves):
            if known.keys() != there.keys() or self._loses_some():
                self._note_lost(self.path)
            else:
                self.findings.restored += leaves
                self.findings.loads.append((self.path, self._load))

    def _load(self) -> None:
        self.optimizer.load_state_dict(numbered(self.optimizer, self.names, self.stored))

    # --- parameter groups -------------------------------------------------------------------------

    def groups(self) -> None:
        """Match the groups by their parameters, and note the writes of their options."""
        known, stored = _all(self.names), _all(self.stored_names)
        self.findings.missing += [
            p for name in known if name not in stored and self._asks(p := self._state_path(name))
        ]
        others = [
            p for name in stored if name not in known and self._asks(p := self._state_path(name))
        ]
        self.findings.unexpected += others
        if others and len(self.stored_names) > len(self.names):
            groups = (
                f"{self.path} has {len(self.names)} of the state's {len(self.stored_names)}"
                " parameter groups"
            )
            self.findings.hints.append(
                f"{groups}: call add_param_group for the rest before restoring, or pass"
                " strict=False to go without"
            )
        free = dict(enumerate(map(set, self.stored_names)))
        for index, row in enumerate(self.names):
            match = next((j for j, names in free.items() if names == set(row)), None)
            if match is None:
                match = self._best_overlap(row, free)
            if match is not None:
                del free[match]
                self._options(match, self.optimizer.param_groups[index])
        for j, names in free.items():
            if names <= known.keys():  # others were noted as unexpected by name
                self._note_partition(j)

    def _best_overlap(self, row: Sequence[str], free: Mapping[int, set[str]]) -> int | None:
        """The stored group that shares most of the parameters; usable only without ``strict``."""
        best = max(free, key=lambda j: len(free[j] & set(row)), default=None)
        if best is None or not free[best] & set(row):
            return None
        if set(row) <= _all(self.stored_names).keys() and free[best] <= _all(self.names).keys():
            self._note_partition(best)
        return best

    def _note_partition(self, index: int) -> None:
        path = join(join(self.path, "param_groups"), index)
        if self._asks(path, join(path, "params")):
            groups = (
                f"{len(self.names)} groups that divide the parameters in another way: call"
                " add_param_group before restoring"
            )
            self.findings.mismatched.append(
                Mismatch(path, f"a group of {len(self.stored_names[index])} parameters", groups)
            )

    def _options(self, index: int, live: dict[str, Any]) -> None:
        path = join(join(self.path, "param_groups"), index)
        for key, value in options_of(self.stored_groups[index]).items():
            if key in HOW and key in live:
                continue
            if self.findings.wants(join(path, key)):
                self.findings.restored.append(join(path, key))
                self.findings.writes.append(partial(set_option, live, key, value))

    # --- state of the parameters ------------------------------------------------------------------

    def holds(self) -> bool:
        """Whether the optimizer has the very objects of the stored state, so that there is nothing
        to write; then notes them."""
        names = [*chain.from_iterable(self.names)]
        groups = self.optimizer.param_groups
        entries: list[Any] = [
            self.optimizer.state.get(parameter)
            for parameter in chain.from_iterable(group["params"] for group in groups)
        ]
        stored: list[Any] = [*map(self.stored_state.get, names)]
        if not (
            self.findings.selection.patterns is None
            and not self.lost
            and self.names == self.stored_names
            and len(self.optimizer.state) == len(self.stored_state) == len(names)
            and {dict} == {*map(type, entries), *map(type, stored)}
            and (keys := tuple(map(tuple, entries))) == tuple(map(tuple, stored))
        ):
            return False
        values = [*chain.from_iterable(map(dict.values, entries))]
        if not all(map(operator.is_, values, chain.from_iterable(map(dict.values, stored)))):
            return False
        self.findings.keeps(_entry_paths(self.path, tuple(names), keys), values)
        return True

    def state(self) -> None:
        """Note the writes of the state.

        A parameter for which the stored optimizer had no state loses its own."""
        parameters = {name: (parameter, group) for name, parameter, group in self._parameters()}
        stored_names = _all(self.stored_names)
        if isinstance(self.optimizer, LBFGS) and (
            list(parameters) != list(stored_names) or self._loses_some()
        ):
            if self._asks(join(self.path, "state")):
                self.findings.mismatched.append(
                    Mismatch(
                        self.path,
                        "other parameters, or another order of them",
                        "an LBFGS, whose state depends on all of them",
                    )
                )
            return
        for name, entry in self.stored_state.items():
            if name in parameters:
                self._entry(name, *parameters[name], entry)
            elif name not in stored_names and self.findings.wants(path := self._state_path(name)):
                self.findings.restored.append(path)
                self.findings.writes.append(partial(self._write_other, name, entry))
        for name, (parameter, _) in parameters.items():
            is_gone = (
                name in stored_names
                and name not in self.stored_state
                and id(parameter) not in self.lost
            )
            if is_gone and self.findings.wants(self._state_path(name)):
                self.findings.writes.append(partial(self.optimizer.state.pop, parameter, None))

    def _entry(self, name: str, parameter: torch.Tensor, group: Tree, entry: object) -> None:
        path = self._state_path(name)
        if not isinstance(entry, dict):
            self.findings.mismatched.append(Mismatch(path, describe(entry), "a dict"))
            return
        live = self.optimizer.state.get(parameter, {})
        chosen = {
            key: value for key, value in entry.items() if self.findings.wants(join(path, key))
        }
        is_whole = len(chosen) == len(entry) and self.findings.selection.wants(path)
        if id(parameter) in self.lost and chosen:
            self._note_lost(path)
            return
        if not all(
            self._fits(join(path, key), key, value, parameter) for key, value in chosen.items()
        ):
            return
        if chosen and not entry.keys() <= {*chosen, *live}:
            raise InvalidInput(
                f"only={self.findings.selection.patterns!r} selects a part of {path}, and the rest"
                f" is not there: ask for {path!r}"
            )
        for key, value in chosen.items():
            self.findings.restored += leaf_paths(value, join(path, key))
        apart = {key for key in chosen if self.findings.is_apart(join(path, key), live.get(key))}
        for key, value in chosen.items():
            if key not in apart and are_alike(live.get(key), value):
                self.findings.overwrites(join(path, key), value, live[key], is_replaceable=True)
            elif _is_laid_out_like(key, value, parameter):
                self.findings.made_like(value, parameter)
        if chosen or is_whole:
            self.findings.writes.append(
                partial(self._write_entry, parameter, group, live, chosen, apart, is_whole=is_whole)
            )

    def _fits(self, path: str, key: object, value: object, parameter: torch.Tensor) -> bool:
        if not isinstance(value, torch.Tensor) or isinstance(self.optimizer, LBFGS):
            return True
        expected = None
        if key in _SHAPED:
            expected = parameter.shape
        elif key == "row_var" and parameter.dim() > 1:
            expected = torch.Size((*parameter.shape[:-1], 1))
        elif key == "col_var" and parameter.dim() > 1:
            expected = torch.Size((*parameter.shape[:-2], 1, parameter.shape[-1]))
        if expected is None or value.shape == expected:
            return True
        self.findings.mismatched.append(
            Mismatch(path, describe(value), f"a parameter of shape {tuple(parameter.shape)}")
        )
        return False

    def _write_entry(
        self,
        parameter: torch.Tensor,
        group: Tree,
        live: dict[Any, Any],
        chosen: Tree,
        apart: Collection[object],
        *,
        is_whole: bool,
    ) -> None:
        fresh = {
            key: self._written(parameter, group, key, live.get(key), value, is_apart=key in apart)
            for key, value in chosen.items()
        }
        if is_whole:
            live.clear()
        live.update(fresh)
        self.optimizer.state[parameter] = live

    def _written(
        self,
        parameter: torch.Tensor,
        group: Tree,
        key: object,
        live: object,
        stored: object,
        *,
        is_apart: bool,
    ) -> object:
        if not isinstance(stored, torch.Tensor):
            return self.findings.own(stored, parameter.device)
        if isinstance(live, torch.Tensor) and not is_apart and are_alike(live, stored):
            write_tensor(live, stored)
            return live
        if not is_spread(stored) and is_spread(parameter) and stored.dim():
            made = (
                cut_for(parameter, stored)
                if _is_laid_out_like(key, stored, parameter)
                else on_all(parameter, stored)
            )
            return self.findings.own(made, parameter.device)
        if (
            id(parameter) in self.findings.converted_ids
            and stored.dim()
            and stored.is_floating_point()
        ):
            # torch's optimizers compute in the dtype of the parameter
            stored = stored.to(parameter.dtype)
        if isinstance(live, torch.Tensor):
            return self.findings.own(stored, live.device)
        return self.findings.own(stored, _state_device(self.optimizer, group, key, parameter))

    def _write_other(self, key: Any, entry: object) -> None:
        self.optimizer.state[key] = self.findings.own(entry)

    # --- helpers ----------------------------------------------------------------------------------

    def _loses_some(self) -> bool:
        return any(
            id(each) in self.lost
            for group in self.optimizer.param_groups
            for each in group["params"]
        )

    def _note_lost(self, path: str) -> None:
        self.findings.mismatched.append(
            Mismatch(path, "what belongs to other parameters", "parameters that are not restored")
        )

    def _parameters(self) -> Iterator[tuple[str, torch.Tensor, Tree]]:
        for group, row in zip(self.optimizer.param_groups, self.names, strict=True):
            for parameter, name in zip(group["params"], row, strict=True):
                yield name, parameter, group

    def _state_path(self, name: object) -> str:
        return join(join(self.path, "state"), name)

    def _asks(self, *paths: str) -> bool:
        return any(map(self.findings.selection.wants, paths))


def _is_laid_out_like(key: object, stored: object, parameter: torch.Tensor) -> bool:
    """Whether the optimizer lays this out over the ranks as its parameter, so that each rank has
    a part. All ranks have a counter whole."""
    if not is_spread(parameter) or not isinstance(stored, torch.Tensor):
        return False
    return stored.shape == parameter.shape and (key in _SHAPED or stored.dim() > 0)


def _state_device(
    optimizer: Optimizer, group: Tree, key: object, parameter: torch.Tensor
) -> torch.device:
    """The device on which torch's optimizers keep a state tensor. Counters are on the CPU, unless
    the whole step runs on the device."""
    if (
        key == "step"
        and not isinstance(optimizer, ASGD)
        and not (group.get("capturable") or group.get("fused"))
    ):
        return torch.device("cpu")
    if key == "mu_product" and not group.get("capturable"):
        return torch.device("cpu")
    return parameter.device


def set_option(group: dict[str, Any], key: str, stored: Any) -> None:
    """Set an option in the form that the group has: a learning rate that is a tensor stays that
    tensor."""
    live = group.get(key)
    if isinstance(live, torch.Tensor) and isinstance(stored, torch.Tensor | int | float):
        with torch.no_grad():
            live.copy_(torch.as_tensor(stored, device=live.device))
    elif isinstance(stored, torch.Tensor) and isinstance(live, int | float):
        group[key] = stored.item()
    else:
        group[key] = own(stored)


@lru_cache(maxsize=8)
def _entry_paths(
    path: str, names: tuple[str, ...], keys: tuple[tuple[object, ...], ...]
) -> list[str]:
    """The path of each entry of an optimizer's state."""
    state = join(path, "state")
    return [
        join(join(state, name), key) for name, row in zip(names, keys, strict=True) for key in row
    ]


def _all(rows: Names) -> dict[str, None]:
    return dict.fromkeys(chain.from_iterable(rows))


def _is_positional(rows: Names) -> bool:
    return all(
        name == positional_name(i, j) for i, row in enumerate(rows) for j, name in enumerate(row)
    )


# --- ``GradScaler``: read without waiting for its device ---


def state_of_scaler(found: Any) -> dict[str, object] | None:
    """The state in its ``state_dict``, with numbers that arrive later. None if it is no such
    object, and is read like any other."""
    if (
        not isinstance(found, torch.amp.GradScaler)
        or type(found).state_dict is not torch.amp.GradScaler.state_dict
    ):
        return None
    if not found.is_enabled():  # it has none of the attributes below
        return None
    scale, tracker = found._scale, found._growth_tracker
    if (
        scale is None
        or tracker is None
        or not (devices().is_on(scale) and devices().is_on(tracker))
    ):
        return None
    return {
        "scale": Number(scale, float),
        "growth_factor": found.get_growth_factor(),
        "backoff_factor": found.get_backoff_factor(),
        "growth_interval": found.get_growth_interval(),
        "_growth_tracker": Number(tracker, int),
    }


def why_anew(live: object, stored: object) -> str | None:
    """Why a scaler is left as the script made it, in a restore; None if it takes the state, or is
    none of torch's.

    A scaler that is switched off has no state, and takes none.
    """
    if (
        not isinstance(live, torch.amp.GradScaler)
        or type(live).load_state_dict is not torch.amp.GradScaler.load_state_dict
    ):
        return None
    if live.is_enabled() and stored == {}:
        return "was switched off in the state, and begins anew"
    if not live.is_enabled() and stored:
        return "is switched off here, and what the state has of it is not restored"
    return None
