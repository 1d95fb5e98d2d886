"""Parts of a model that load their state in a way of their own, as observers and quantized layers do: what they accept, and may keep."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from torch import nn

from .model_state import metadata_for
from .names import canonical_name
from .report import own

__all__ = ["OwnLoading", "loads_plainly", "only_waits"]


class OwnLoading:
    """The outermost parts of a module that load in their own way, by canonical name.

    Such a part may accept entries that do not look like its own: other shapes, values that are not tensors. To find out, the entries are
    loaded into a copy of the part. The part may also keep what it is given, instead of copying it.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._parts: dict[str, nn.Module] = {}
        for name, part in module.named_modules():
            known = canonical_name(module, name)
            if not loads_plainly(part) and self.part_of(known) is None:
                self._parts[known] = part

    def __bool__(self) -> bool:
        return bool(self._parts)

    def part_of(self, name: str) -> str | None:
        """The part that loads the entry ``name``, or the part of that name; None if torch loads it."""
        return next((part for part in self._parts if not part or name == part or name.startswith(part + ".")), None)

    def takes(self, part: str, stored: Mapping[str, Any]) -> bool:
        """Whether a part accepts its own entries in the state of the whole module. Nothing of the part is changed, and nothing is kept."""
        start = f"{part}." if part else ""
        mine = OrderedDict((name.removeprefix(start), own(value)) for name, value in stored.items() if self.part_of(name) == part)
        metadata = getattr(stored, "_metadata", None)
        if metadata is not None:
            whole = metadata_for(self._module, metadata)
            mine._metadata = OrderedDict(  # type: ignore[attr-defined]  # as nn.Module.state_dict sets it
                (name.removeprefix(start) if name != part else "", value) for name, value in whole.items() if (name + ".").startswith(start)
            )
        try:
            deepcopy(self._parts[part]).load_state_dict(mine, strict=False)
        except Exception:  # whatever it raises, it does not accept them
            return False
        return True


def loads_plainly(part: nn.Module) -> bool:
    """Whether a module copies what it is given for its own parameters and buffers, and does nothing else with tensors."""
    return (
        type(part).load_state_dict is nn.Module.load_state_dict
        and type(part)._load_from_state_dict.__module__.startswith("torch.nn.modules.")
        and all(map(only_waits, part._load_state_dict_pre_hooks.values()))
        and "load_state_dict" not in part.__dict__
        and "_load_from_state_dict" not in part.__dict__
    )


def only_waits(hook: object) -> bool:
    """Whether a hook on loading is a fence's: it waits for copies, and leaves what is loaded alone."""
    return bool(getattr(getattr(hook, "hook", hook), "only_waits", False))
