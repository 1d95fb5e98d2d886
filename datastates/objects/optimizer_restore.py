"""Restoring a stored state into a live optimizer, fresh or used: matched by names, in place, and never cast."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.optim import ASGD, LBFGS, Optimizer

from datastates.content.layouts import are_alike
from datastates.errors import InvalidInput

from .locals import cut_for, on_all
from .names import join, positional_name
from .optimizer_state import is_plain, numbered, options_of
from .optimizers import CLASS, bare, class_of
from .placements import is_spread
from .report import Findings, Mismatch, describe, leaf_paths, own, write_tensor

__all__ = ["HOW", "check_optimizer", "set_option"]

Names = list[list[str]]
Tree = Mapping[str, Any]

HOW = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""Options that say how this process computes a step, not what it computes. A restore leaves them, so a state of a GPU fits a CPU."""

_SHAPED = frozenset(
    {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg", "grad_avg"}
    | {"acc_delta", "sum", "ax", "prev", "step_size", "variance"}
)
"""The keys of torch's own optimizers whose tensors have the shape of their parameter."""


def check_optimizer(
    path: str,
    optimizer: Optimizer,
    names: Names,
    stored: object,
    findings: Findings,
    lost: Collection[int] = (),
) -> None:
    """Find out what of ``stored`` fits, and note the writes that put it into ``optimizer``.

    Existing tensors that fit are overwritten; others are made with the dtype that the state has, and never cast as torch's
    ``load_state_dict`` does. Parameters are matched by name, or by order if nothing tracked names them. The state of another class of
    optimizer never fits.

    The state of a parameter is restored completely or not at all. ``lost`` are the ids of parameters that are not restored themselves:
    their state is left out.
    """
    if not (isinstance(stored, dict) and isinstance(stored.get("state"), dict) and isinstance(stored.get("param_groups"), list)):
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
        check.state()
    else:
        check.as_a_whole()


class _Check:
    """The check of one optimizer against one stored tree."""

    def __init__(self, path: str, optimizer: Optimizer, names: Names, stored: Tree, findings: Findings, lost: Collection[int]) -> None:
        self.path, self.optimizer, self.names, self.findings, self.lost = path, optimizer, names, findings, lost
        self.stored = stored
        self.stored_groups: list[dict[str, Any]] = stored["param_groups"]
        self.stored_state: dict[Any, Any] = stored["state"]
        self.stored_names: Names = [list(group["params"]) for group in self.stored_groups]

    def align_by_position(self) -> bool:
        """If either side names parameters only by position, use the state's names in order; returns whether that works."""
        if not (_is_positional(self.names) or _is_positional(self.stored_names)) or self.names == self.stored_names:
            return True
        if list(map(len, self.names)) != list(map(len, self.stored_names)):
            here, there = ([len(row) for row in rows] for rows in (self.names, self.stored_names))
            note = Mismatch(
                self.path, f"groups of {there} parameters", f"groups of {here}, without names: restore it together with its module"
            )
            self.findings.mismatched.append(note)
            return False
        self.names = self.stored_names
        return True

    def as_a_whole(self) -> None:
        """Leave the writing to the optimizer's own ``load_state_dict``, which takes the whole stored tree."""
        leaves = leaf_paths(self.stored, self.path)
        known, there = _all(self.names), _all(self.stored_names)
        self.findings.missing += [self._state_path(name) for name in known if name not in there]
        self.findings.unexpected += [self._state_path(name) for name in there if name not in known]
        if known.keys() == there.keys() and {frozenset(row) for row in self.names} != {frozenset(row) for row in self.stored_names}:
            self._note_partition(0)
        elif self.findings.is_wanted_whole(self.path, leaves):
            if known.keys() != there.keys() or self._loses_some():
                self._note_lost(self.path)
            else:
                self.findings.restored += leaves
                self.findings.loads.append((self.path, self._load))

    def _load(self) -> None:
        self.optimizer.load_state_dict(numbered(self.optimizer, self.names, self.stored))

    # --- parameter groups --------------------------------------------------------------------------------------------------

    def groups(self) -> None:
        """Match the groups by their parameters, and note the writes of their options."""
        known, stored = _all(self.names), _all(self.stored_names)
        self.findings.missing += [p for name in known if name not in stored and self._asks(p := self._state_path(name))]
        others = [p for name in stored if name not in known and self._asks(p := self._state_path(name))]
        self.findings.unexpected += others
        if others and len(self.stored_names) > len(self.names):
            groups = f"{self.path} has {len(self.names)} of the state's {len(self.stored_names)} parameter groups"
            self.findings.hints.append(f"{groups}: call add_param_group for the rest before restoring, or pass strict=False to go without")
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
            groups = f"{len(self.names)} groups that divide the parameters in another way: call add_param_group before restoring"
            self.findings.mismatched.append(Mismatch(path, f"a group of {len(self.stored_names[index])} parameters", groups))

    def _options(self, index: int, live: dict[str, Any]) -> None:
        path = join(join(self.path, "param_groups"), index)
        for key, value in options_of(self.stored_groups[index]).items():
            if key in HOW and key in live:
                continue
            if self.findings.wants(join(path, key)):
                self.findings.restored.append(join(path, key))
                self.findings.writes.append(partial(set_option, live, key, value))

    # --- state of the parameters -------------------------------------------------------------------------------------------

    def state(self) -> None:
        """Note the writes of the state. A parameter for which the stored optimizer had no state loses its own."""
        parameters = {name: (parameter, group) for name, parameter, group in self._parameters()}
        stored_names = _all(self.stored_names)
        if isinstance(self.optimizer, LBFGS) and (list(parameters) != list(stored_names) or self._loses_some()):
            if self._asks(join(self.path, "state")):
                self.findings.mismatched.append(
                    Mismatch(self.path, "other parameters, or another order of them", "an LBFGS, whose state depends on all of them")
                )
            return
        for name, entry in self.stored_state.items():
            if name in parameters:
                self._entry(name, *parameters[name], entry)
            elif name not in stored_names and self.findings.wants(path := self._state_path(name)):
                self.findings.restored.append(path)
                self.findings.writes.append(partial(self._write_other, name, entry))
        for name, (parameter, _) in parameters.items():
            is_gone = name in stored_names and name not in self.stored_state and id(parameter) not in self.lost
            if is_gone and self.findings.wants(self._state_path(name)):
                self.findings.writes.append(partial(self.optimizer.state.pop, parameter, None))

    def _entry(self, name: str, parameter: torch.Tensor, group: Tree, entry: object) -> None:
        path = self._state_path(name)
        if not isinstance(entry, dict):
            self.findings.mismatched.append(Mismatch(path, describe(entry), "a dict"))
            return
        live = self.optimizer.state.get(parameter, {})
        chosen = {key: value for key, value in entry.items() if self.findings.wants(join(path, key))}
        is_whole = len(chosen) == len(entry) and self.findings.selection.wants(path)
        if id(parameter) in self.lost and chosen:
            self._note_lost(path)
            return
        if not all(self._fits(join(path, key), key, value, parameter) for key, value in chosen.items()):
            return
        if chosen and not entry.keys() <= {*chosen, *live}:
            raise InvalidInput(
                f"only={self.findings.selection.patterns!r} asks for a part of {path}, and the rest is not there: ask for {path!r}"
            )
        for key, value in chosen.items():
            self.findings.restored += leaf_paths(value, join(path, key))
        apart = {key for key in chosen if self.findings.is_apart(join(path, key), live.get(key))}
        for key, value in chosen.items():
            if key not in apart and are_alike(live.get(key), value):
                self.findings.overwrites(join(path, key), value, live[key], is_replaceable=True)
            elif _lies_with(key, value, parameter):
                self.findings.made_like(value, parameter)
        if chosen or is_whole:
            self.findings.writes.append(partial(self._write_entry, parameter, group, live, chosen, apart, is_whole=is_whole))

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
        self.findings.mismatched.append(Mismatch(path, describe(value), f"a parameter of shape {tuple(parameter.shape)}"))
        return False

    def _write_entry(
        self, parameter: torch.Tensor, group: Tree, live: dict[Any, Any], chosen: Tree, apart: Collection[object], *, is_whole: bool
    ) -> None:
        fresh = {key: self._written(parameter, group, key, live.get(key), value, is_apart=key in apart) for key, value in chosen.items()}
        if is_whole:
            live.clear()
        live.update(fresh)
        self.optimizer.state[parameter] = live

    def _written(self, parameter: torch.Tensor, group: Tree, key: object, live: object, stored: object, *, is_apart: bool) -> object:
        if not isinstance(stored, torch.Tensor):
            return self.findings.own(stored, parameter.device)
        if isinstance(live, torch.Tensor) and not is_apart and are_alike(live, stored):
            write_tensor(live, stored)
            return live
        if not is_spread(stored) and is_spread(parameter) and stored.dim():
            made = cut_for(parameter, stored) if _lies_with(key, stored, parameter) else on_all(parameter, stored)
            return self.findings.own(made, parameter.device)
        if id(parameter) in self.findings.converted_ids and stored.dim() and stored.is_floating_point():
            stored = stored.to(parameter.dtype)  # torch's optimizers compute in the dtype of the parameter
        if isinstance(live, torch.Tensor):
            return self.findings.own(stored, live.device)
        return self.findings.own(stored, _home(self.optimizer, group, key, parameter))

    def _write_other(self, key: Any, entry: object) -> None:
        self.optimizer.state[key] = self.findings.own(entry)

    # --- helpers -----------------------------------------------------------------------------------------------------------

    def _loses_some(self) -> bool:
        return any(id(each) in self.lost for group in self.optimizer.param_groups for each in group["params"])

    def _note_lost(self, path: str) -> None:
        self.findings.mismatched.append(Mismatch(path, "what belongs to other parameters", "parameters that are not restored"))

    def _parameters(self) -> Iterator[tuple[str, torch.Tensor, Tree]]:
        for group, row in zip(self.optimizer.param_groups, self.names, strict=True):
            for parameter, name in zip(group["params"], row, strict=True):
                yield name, parameter, group

    def _state_path(self, name: object) -> str:
        return join(join(self.path, "state"), name)

    def _asks(self, *paths: str) -> bool:
        return any(map(self.findings.selection.wants, paths))


def _lies_with(key: object, stored: object, parameter: torch.Tensor) -> bool:
    """Whether the optimizer lays this out over the ranks as its parameter, so that each rank has a part. All ranks have a counter whole."""
    if not is_spread(parameter) or not isinstance(stored, torch.Tensor):
        return False
    return stored.shape == parameter.shape and (key in _SHAPED or stored.dim() > 0)


def _home(optimizer: Optimizer, group: Tree, key: object, parameter: torch.Tensor) -> torch.device:
    """Where torch's optimizers keep a state tensor: counters on the CPU, unless the whole step runs on the device."""
    if key == "step" and not isinstance(optimizer, ASGD) and not (group.get("capturable") or group.get("fused")):
        return torch.device("cpu")
    if key == "mu_product" and not group.get("capturable"):
        return torch.device("cpu")
    return parameter.device


def set_option(group: dict[str, Any], key: str, stored: Any) -> None:
    """Set an option in the form that the group has: a learning rate that is a tensor stays that tensor."""
    live = group.get(key)
    if isinstance(live, torch.Tensor) and isinstance(stored, torch.Tensor | int | float):
        with torch.no_grad():
            live.copy_(torch.as_tensor(stored, device=live.device))
    elif isinstance(stored, torch.Tensor) and isinstance(live, int | float):
        group[key] = stored.item()
    else:
        group[key] = own(stored)


def _all(rows: Names) -> dict[str, None]:
    """Every name once, in order."""
    return dict.fromkeys(name for row in rows for name in row)


def _is_positional(rows: Names) -> bool:
    return all(name == positional_name(i, j) for i, row in enumerate(rows) for j, name in enumerate(row))
