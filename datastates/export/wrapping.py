"""Trees that have no names of their own to be tracked by: they stand under one, which the state remembers and which is left away again."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TypeGuard

import torch

__all__ = ["WRAPPED", "is_flat", "unwrapped", "wrapped"]

WRAPPED = "import.wrapped"
"""The attribute of a state that says under which name all of it stands."""

_LONGEST = 255


def is_flat(tree: object) -> TypeGuard[dict[str, torch.Tensor]]:
    """Whether a tree is tensors by name, and nothing else."""
    return isinstance(tree, dict) and bool(tree) and all(type(key) is str and isinstance(leaf, torch.Tensor) for key, leaf in tree.items())


def wrapped(found: object, taken: Collection[str] = ()) -> tuple[dict[str, object], str | None]:
    """What is to be captured, and the name that it stands under if it has none of its own, or one of ``taken``.

    Tensors by name are a ``model``, anything else is a ``checkpoint``.
    """
    if is_flat(found):
        return {"model": found}, "model"
    has_names = isinstance(found, dict) and bool(found) and all(type(key) is str and 0 < len(key) <= _LONGEST for key in found)
    if not isinstance(found, dict) or not has_names or any(name in found for name in taken):
        return {"checkpoint": found}, "checkpoint"
    return dict(found), None


def unwrapped(tree: object, attributes: Mapping[str, object]) -> object:
    """What ``wrapped`` was given, of a state's tree and its attributes."""
    name = attributes.get(WRAPPED)
    return tree[name] if isinstance(tree, dict) and isinstance(name, str) and list(tree) == [name] else tree
