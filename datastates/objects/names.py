"""Canonical names of a module's contents: by structure, so that one state fits the compiled, the wrapped and the plain model.

A part of a path is left out only if the module from which it starts really is a wrapper: a user's own submodule that
happens to be called ``module`` keeps its name. ``AveragedModel`` is a model of its own and counts as no wrapper here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Owner", "canonical_name", "join", "parameter_names", "positional_name", "split_wrappers"]

# Looked up among what is already imported: importing them takes seconds, and an object of a class that nobody imported cannot exist.
_WRAPPERS = (
    ("torch.nn.parallel.distributed", "DistributedDataParallel", "module"),
    ("torch.nn.parallel.data_parallel", "DataParallel", "module"),
    ("torch._dynamo.eval_frame", "OptimizedModule", "_orig_mod"),
    ("torch.distributed.algorithms._checkpoint.checkpoint_wrapper", "ActivationWrapper", "_checkpoint_wrapped_module"),
    ("peft.peft_model", "PeftModel", "base_model"),
    ("peft.mixed_model", "PeftMixedModel", "base_model"),
    ("peft.tuners.tuners_utils", "BaseTuner", "model"),
    ("peft.tuners.tuners_utils", "BaseTunerLayer", "base_layer"),
    ("peft.utils.other", "AuxiliaryTrainingWrapper", "original_module"),
)

Owner = tuple[str, Mapping[int, str]]
"""A tracked module: its path, and the canonical name of each of its parameters by ``id``."""


def join(path: str, key: object) -> str:
    """The path of the entry under ``key``, as ``tree.flatten`` writes it."""
    part = (key if isinstance(key, str) else repr(key)).replace("%", "%25").replace("/", "%2F") or "%"
    return f"{path}/{part}" if path else part


def canonical_name(module: nn.Module, name: str) -> str:
    """``name``, dotted, as ``module.state_dict()`` or ``named_modules()`` has it, without the parts of wrappers."""
    here: nn.Module | None = module
    kept: list[str] = []
    for part in name.split(".") if name else ():
        # A checkpoint wrapper takes its own part out of the keys of its state_dict: follow it without one.
        while here is not None and part not in here._modules and (inner := _inner_of(here)) is not None:
            here = here._modules[inner]
        is_wrapper_part = here is not None and part == _inner_of(here)
        if not is_wrapper_part:
            kept.append(part)
        here = here._modules[part] if here is not None and part in here._modules else None  # a ScriptModule has no `get`
    return ".".join(kept)


def split_wrappers(module: nn.Module) -> Iterator[nn.Module]:
    """The module and, while it is a wrapper, what it wraps."""
    here: nn.Module | None = module
    while here is not None:
        yield here
        inner = _inner_of(here)
        here = None if inner is None else here._modules[inner]


def parameter_names(
    owners: Sequence[Owner], loose: Callable[[], Mapping[int, str]], groups: Sequence[Mapping[str, Any]]
) -> list[list[str]]:
    """A name for each parameter of each group of an optimizer.

    A single tracked module that has all parameters gives its names as they are. If several modules are needed, each name begins with its
    module's path. ``loose`` returns the tensors that are tracked by themselves, by ``id``. A parameter that nothing tracked has takes its
    name from the group's own ``param_names``, or is named by position.
    """
    keys = [list(map(id, group["params"])) for group in groups]
    for _, names in owners:
        found = [[names.get(key, "") for key in row] for row in keys]
        if all(map(all, found)):
            return found
    return _mixed_names(owners, loose(), groups, keys)


def _mixed_names(
    owners: Sequence[Owner], loose: Mapping[int, str], groups: Sequence[Mapping[str, Any]], keys: list[list[int]]
) -> list[list[str]]:
    used = [(path, names) for path, names in owners if any(key in names for row in keys for key in row)]
    known = dict(loose)
    for path, names in reversed(used):
        prefix = "" if len(used) == 1 else path.replace("/", ".") + "."
        known.update((key, prefix + name) for key, name in names.items())

    def name(group: int, position: int, key: int) -> str:
        given = groups[group].get("param_names") or ()
        return known.get(key) or (given[position] if position < len(given) else positional_name(group, position))

    return [[name(group, position, key) for position, key in enumerate(row)] for group, row in enumerate(keys)]


def positional_name(group: int, position: int) -> str:
    """The name of a parameter that no tracked object knows."""
    return f"group{group}.param{position}"


def _inner_of(module: nn.Module) -> str | None:
    """The name under which a wrapper holds what it wraps; None for a module that is not a wrapper."""
    inners = _inners(type(module))  # type: ignore[arg-type]  # a class can be hashed, whatever its instances' __hash__ takes
    return next((inner for inner in inners if module._modules.get(inner) is not None), None)


@lru_cache(maxsize=1024)
def _inners(kind: type) -> tuple[str, ...]:
    """The names under which modules of a class would hold what they wrap; the class was made after the wrappers from which it derives."""
    wrappers = ((getattr(sys.modules.get(home), name, None), inner) for home, name, inner in _WRAPPERS)
    return tuple(inner for wrapper, inner in wrappers if wrapper is not None and issubclass(kind, wrapper))
