"""Trees that have no names by which to track them: they are put under one name, which the state remembers and which is left out again
later.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TypeGuard

import torch

from datastates.objects.loops import LOOPS
from datastates.objects.model_state import MODES

__all__ = ["TAKEN", "WRAPPED", "is_flat", "unwrapped", "wrapped"]

WRAPPED = "import.wrapped"
"""The attribute of a state with the name under which all of it stands."""

TAKEN = ("rng", LOOPS, MODES)
"""The names under which a training's own parts stand, which are therefore none to track anything else by."""

_MODEL, _CHECKPOINT = "model", "checkpoint"
_LONGEST = 255
_NOT_READ = torch.empty(0, device="meta")


def is_flat(tree: object) -> TypeGuard[dict[str, torch.Tensor]]:
    """Whether a tree is only tensors by name."""
    return isinstance(tree, dict) and bool(tree) and all(type(key) is str and isinstance(leaf, torch.Tensor) for key, leaf in tree.items())


def wrapped(found: object, taken: Collection[str] = ()) -> tuple[dict[str, object], str | None]:
    """What to capture, and the name under which it stands if it has none of its own, or one of ``taken``.

    Tensors by name become a ``model``, anything else becomes a ``checkpoint``.
    """
    if is_flat(found):
        return {_MODEL: found}, _MODEL
    if not _has_names(found) or any(name in found for name in taken):
        return {_CHECKPOINT: found}, _CHECKPOINT
    return dict(found), None


def unwrapped(tree: object, attributes: Mapping[str, object]) -> object:
    """The object that ``wrapped`` was given, from a state's tree and its attributes; tensors that were not read are None in it.

    The attribute alone is not believed, because there are imported states whose attribute names a part of a tree that has names.
    """
    name = attributes.get(WRAPPED)
    if not isinstance(tree, dict) or list(tree) != [name]:
        return tree
    found = tree[name]
    if name == _MODEL:
        is_wrapped = isinstance(found, dict) and is_flat({key: _NOT_READ if leaf is None else leaf for key, leaf in found.items()})
    else:
        is_wrapped = name == _CHECKPOINT and (not _has_names(found) or any(each in found for each in TAKEN))
    return found if is_wrapped else tree


def _has_names(found: object) -> TypeGuard[dict[str, object]]:
    """Whether a tree has names by which its parts can be tracked."""
    return isinstance(found, dict) and bool(found) and all(type(key) is str and 0 < len(key) <= _LONGEST for key in found)
