"""Trees that have no names by which to track them: they are put under one name, which the state remembers and which is left out again
later.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TypeGuard

import torch

__all__ = ["WRAPPED", "is_flat", "unwrapped", "wrapped"]

WRAPPED = "import.wrapped"
"""The attribute of a state with the name under which all of it stands."""

_LONGEST = 255


def is_flat(tree: object) -> TypeGuard[dict[str, torch.Tensor]]:
    """Whether a tree is only tensors by name."""
    return isinstance(tree, dict) and bool(tree) and all(type(key) is str and isinstance(leaf, torch.Tensor) for key, leaf in tree.items())


def wrapped(found: object, taken: Collection[str] = ()) -> tuple[dict[str, object], str | None]:
    """What to capture, and the name under which it stands if it has none of its own, or one of ``taken``.

    Tensors by name become a ``model``, anything else becomes a ``checkpoint``.
    """
    if is_flat(found):
        return {"model": found}, "model"
    has_names = isinstance(found, dict) and bool(found) and all(type(key) is str and 0 < len(key) <= _LONGEST for key in found)
    if not isinstance(found, dict) or not has_names or any(name in found for name in taken):
        return {"checkpoint": found}, "checkpoint"
    return dict(found), None


def unwrapped(tree: object, attributes: Mapping[str, object]) -> object:
    """The object that ``wrapped`` was given, from a state's tree and its attributes."""
    name = attributes.get(WRAPPED)
    return tree[name] if isinstance(tree, dict) and isinstance(name, str) and list(tree) == [name] else tree
