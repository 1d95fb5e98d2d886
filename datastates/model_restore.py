"""Putting a stored state into a live module, through its own ``load_state_dict``: in place, its parameters stay themselves."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from .errors import Corrupt, InvalidInput
from .model_state import ModelState, metadata_for
from .names import join
from .report import Findings, Mismatch, describe, own, write_tensor

__all__ = ["check_gradients", "check_module", "only_waits"]

_EXTRA = "_extra_state"


def check_module(path: str, model: ModelState, stored: object, findings: Findings) -> None:
    """Find out what of ``stored`` fits, and note the write that puts it into the module.

    Hooks, extra state and versions work as in ``load_state_dict``. A tied tensor of the module is satisfied by any of its names.
    """
    if not isinstance(stored, dict):
        findings.mismatched.append(Mismatch(path, describe(stored), type(model.module).__name__))
        return
    live = model.tree()
    raw_names = model.raw_names()
    chosen: dict[str, object] = {}
    ties = _ties(live)
    for name, target in live.items():
        here = join(path, name)
        if name in stored:
            if findings.wants(here) and (_is_extra(name) or findings.fits(here, stored[name], target)):
                chosen[name] = stored[name]
        elif not any(other in stored for other in ties.get(name, ())) and findings.selection.wants(here):
            findings.missing.append(here)
    findings.unexpected += [here for name in stored if name not in live and findings.selection.wants(here := join(path, name))]
    _check_ties(path, chosen, ties, findings)
    findings.restored += [join(path, name) for name in chosen]
    if chosen:
        metadata = getattr(stored, "_metadata", None)
        if metadata is not None and not (isinstance(metadata, dict) and all(isinstance(each, dict) for each in metadata.values())):
            raise Corrupt(f"{path} has versions of modules in a form that no module wrote: restore another state")
        raw = {raw_names[name]: value for name, value in chosen.items()}
        targets = {raw_names[name]: live[name] for name in chosen}
        is_plain = _loads_plainly(model.module)
        for name, value in chosen.items():
            findings.overwrites(join(path, name), value, live[name], is_as_stored=is_plain)
        findings.writes.append(partial(_load, path, model.module, raw, targets, metadata))


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
            findings.writes.append(partial(_set_gradient, parameter, gradient, findings))


def _load(path: str, module: nn.Module, raw: Mapping[str, Any], targets: Mapping[str, Any], metadata: Mapping[str, Any] | None) -> None:
    state: OrderedDict[str, Any] = OrderedDict()
    for name, value in raw.items():
        if not isinstance(value, torch.Tensor):
            state[name] = own(value)
        elif _repeats(targets[name]):
            write_tensor(targets[name], value)
        else:
            state[name] = own(value) if _is_extra(name) else value
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
        parameter.grad = findings.own(stored.to(parameter.dtype), parameter.device)


def only_waits(hook: object) -> bool:
    """Whether a hook on loading is a fence's: it waits for copies, and leaves alone what is loaded."""
    return bool(getattr(getattr(hook, "hook", hook), "only_waits", False))


def _loads_plainly(module: nn.Module) -> bool:
    """Whether the module's ``load_state_dict`` copies what it is given, and does nothing else with tensors."""
    return all(
        type(part).load_state_dict is nn.Module.load_state_dict
        and type(part)._load_from_state_dict.__module__.startswith("torch.nn.modules.")
        and all(map(only_waits, part._load_state_dict_pre_hooks.values()))
        and "load_state_dict" not in part.__dict__
        and "_load_from_state_dict" not in part.__dict__
        for part in module.modules()
    )


def _ties(live: Mapping[str, object]) -> dict[str, list[str]]:
    """For each name of a tied tensor all names of it."""
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
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    if not has_values:
        return True
    # As bytes: a NaN is the same as itself.
    return torch.equal(one.detach().contiguous().view(-1).view(torch.uint8), other.detach().contiguous().view(-1).view(torch.uint8))


def _repeats(target: object) -> bool:
    if not isinstance(target, torch.Tensor) or target.layout is not torch.strided:
        return False
    return any(stride == 0 and size > 1 for stride, size in zip(target.stride(), target.shape, strict=True))


def _is_extra(name: str) -> bool:
    return name.rsplit(".", 1)[-1] == _EXTRA
