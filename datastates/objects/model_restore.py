"""Restoring a stored state into a live module through its own ``load_state_dict``, in place: its parameters stay the same objects."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from datastates.content.layouts import are_alike, is_wrapping, plain_tensors
from datastates.errors import Corrupt, InvalidInput

from .locals import cut_for, lies_as
from .model_state import ModelState, metadata_for
from .names import join
from .own_loading import OwnLoading
from .placements import is_spread, local_of
from .report import Findings, Mismatch, describe, own, write_tensor

__all__ = ["check_gradients", "check_module"]

_EXTRA = "_extra_state"


def check_module(path: str, model: ModelState, stored: object, findings: Findings, frozen: object = None) -> None:
    """Find out what of ``stored`` fits, and note the write that puts it into the module.

    Hooks, extra state and versions work as in ``load_state_dict``. A tied tensor of the module is satisfied by any of its names. Entries
    that a part loads in a way of its own fit if that part takes them. ``frozen`` are the names that the state leaves out, each on a line:
    none of them is missing.
    """
    if not isinstance(stored, dict):
        findings.mismatched.append(Mismatch(path, describe(stored), type(model.module).__name__))
        return
    live = model.tree()
    raw_names = model.raw_names()
    chosen: dict[str, object] = {}
    ties = _ties(live)
    metadata = getattr(stored, "_metadata", None)
    if metadata is not None and not (isinstance(metadata, dict) and all(isinstance(each, dict) for each in metadata.values())):
        raise Corrupt(f"{path} has versions of modules in a form that no module wrote: restore another state")
    own_loading = OwnLoading(model.module)
    left = {*frozen.split("\n")} if isinstance(frozen, str) else set()
    taken = _taken(own_loading, live, stored, findings)
    for name, target in live.items():
        here = join(path, name)
        if name in stored:
            if findings.wants(here) and (_is_extra(name) or name in taken or findings.fits(here, stored[name], target)):
                chosen[name] = stored[name]
        elif name not in left and not any(other in stored for other in ties.get(name, ())) and findings.selection.wants(here):
            findings.missing.append(here)
    findings.unexpected += [here for name in stored if name not in live and findings.selection.wants(here := join(path, name))]
    _check_ties(path, chosen, ties, findings)
    findings.restored += [join(path, name) for name in chosen]
    if chosen:
        raw = {raw_names[name]: value for name, value in chosen.items()}
        targets = {raw_names[name]: live[name] for name in chosen}
        kept = {raw_names[name] for name in chosen if own_loading.part_of(name) is not None}
        for name, value in chosen.items():
            if name not in taken:
                findings.overwrites(join(path, name), value, live[name], is_as_stored=not own_loading)
        findings.writes.append(partial(_load, path, model.module, raw, targets, metadata, kept))


def check_gradients(path: str, model: ModelState, stored: object, findings: Findings) -> None:
    """Note the writes that set every parameter's gradient; a parameter without one in the state gets ``None``."""
    if not isinstance(stored, dict):
        findings.mismatched.append(Mismatch(path, describe(stored), "gradients by parameter"))
        return
    for name, parameter in model.tree().items():
        if not isinstance(parameter, nn.Parameter):
            continue
        here, gradient = join(path, name), stored.get(name)
        if name not in stored:
            if findings.selection.wants(here):
                findings.writes.append(partial(setattr, parameter, "grad", None))
        elif findings.wants(here) and findings.fits(here, gradient, parameter):
            findings.restored.append(here)
            if parameter.grad is not None:
                findings.overwrites(here, gradient, parameter.grad)
            elif is_spread(parameter):
                findings.made_like(gradient, parameter)
            findings.writes.append(partial(_set_gradient, parameter, gradient, findings))


def _taken(own_loading: OwnLoading, live: Mapping[str, object], stored: Mapping[str, object], findings: Findings) -> set[str]:
    """The names of entries that do not look like those of the module, but that the parts which load them accept."""
    unlike: dict[str, list[str]] = {}
    for name, target in live.items() if own_loading else ():
        part = own_loading.part_of(name)
        if part is not None and name in stored and not _is_extra(name) and not are_alike(target, stored[name]):
            unlike.setdefault(part, []).append(name)
    # Before the bytes are there nobody can be asked: the check with the values does it.
    return {name for part, names in unlike.items() if not findings.has_values or own_loading.takes(part, stored) for name in names}


def _load(
    path: str,
    module: nn.Module,
    raw: Mapping[str, Any],
    targets: Mapping[str, Any],
    metadata: Mapping[str, Any] | None,
    kept: Collection[str],
) -> None:
    """Load the state into the module; ``kept`` are names of entries that a part may keep as they are."""
    state: OrderedDict[str, Any] = OrderedDict()
    for name, value in raw.items():
        if not isinstance(value, torch.Tensor):
            state[name] = own(value)
        elif _repeats(targets[name]) or is_wrapping(targets[name]):
            write_tensor(targets[name], value)
        elif is_spread(targets[name]):
            state[name] = value if lies_as(value, targets[name]) else cut_for(targets[name], value)
        else:
            state[name] = own(value) if name in kept or _is_extra(name) else value
    if metadata is not None:
        state._metadata = metadata_for(module, metadata)  # type: ignore[attr-defined]  # as nn.Module.state_dict sets it
    try:
        module.load_state_dict(state, strict=False)
    except Exception as exc:
        raise InvalidInput(f"{path} ({type(module).__name__}) did not take its state and may be half changed: {exc}") from exc


def _set_gradient(parameter: nn.Parameter, stored: Any, findings: Findings) -> None:
    if parameter.grad is not None and parameter.grad.dtype == stored.dtype:
        write_tensor(parameter.grad, stored)
    else:
        found = cut_for(parameter, stored) if is_spread(parameter) and not is_spread(stored) else stored
        parameter.grad = findings.own(found.to(parameter.dtype), parameter.device)


def _ties(live: Mapping[str, object]) -> dict[str, list[str]]:
    """All names of each tied tensor, by each of its names."""
    by_id: dict[int, list[str]] = {}
    for name, leaf in live.items():
        if isinstance(leaf, torch.Tensor):
            by_id.setdefault(id(leaf), []).append(name)
    return {name: names for names in by_id.values() if len(names) > 1 for name in names}


def _check_ties(path: str, chosen: Mapping[str, object], ties: Mapping[str, list[str]], findings: Findings) -> None:
    for name, names in ties.items():
        first = next((other for other in names if other in chosen), name)
        if name in chosen and name != first and not _is_same(chosen[first], chosen[name], has_values=findings.has_values):
            tied = f"one tensor for {join(path, first)} and {join(path, name)}"
            findings.mismatched.append(Mismatch(join(path, name), f"another value than {join(path, first)}", tied))


def _is_same(one: object, other: object, *, has_values: bool) -> bool:
    if one is other or not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return True
    if not are_alike(one, other):
        return False
    if not has_values:
        return True
    if is_spread(one) or is_spread(other):  # ranks see what they hold themselves, and ask nobody
        return not lies_as(one, other) or _is_same(local_of(one), local_of(other), has_values=True)
    # As bytes: a NaN equals itself.
    return all(
        torch.equal(mine.detach().contiguous().view(-1).view(torch.uint8), theirs.detach().contiguous().view(-1).view(torch.uint8))
        for mine, theirs in zip(plain_tensors(one), plain_tensors(other), strict=True)
    )


def _repeats(target: object) -> bool:
    if not isinstance(target, torch.Tensor) or target.layout is not torch.strided:
        return False
    return any(stride == 0 and size > 1 for stride, size in zip(target.stride(), target.shape, strict=True))


def _is_extra(name: str) -> bool:
    return name.rsplit(".", 1)[-1] == _EXTRA
