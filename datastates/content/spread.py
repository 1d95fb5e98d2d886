"""Tensors that do not lie whole in one process's memory: DTensors, and tensors that only some ranks were given.

Nothing is imported for them: if nobody has imported DTensor, nobody has made one.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

__all__ = ["give", "is_spread", "kinds", "local_of", "owners_of", "stand_in"]

_HOME = "torch.distributed.tensor"
_PLAIN: frozenset[type[Any]] = frozenset({torch.Tensor, torch.nn.Parameter})

_owners = WeakIdKeyDictionary()


def kinds() -> frozenset[type[Any]]:
    """The exact types of the tensors that a state takes as they are."""
    found = _dtensor()
    return _PLAIN if found is None else _PLAIN | {found}


def is_spread(tensor: object) -> bool:
    """Whether it is a DTensor: one tensor over the ranks of a mesh."""
    found = _dtensor()
    return found is not None and type(tensor) is found


def local_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """This rank's memory of a tensor: all of a plain one, the local tensor of a DTensor (which may be empty), None for a stand-in."""
    if is_spread(tensor):
        local: torch.Tensor = tensor._local_tensor  # type: ignore[attr-defined]  # `to_local` is autograd's, and 100 times slower
        return local
    return None if tensor.is_meta else tensor


def give(tensor: torch.Tensor, owners: Sequence[int]) -> torch.Tensor:
    """Note that only the ranks ``owners`` hold this tensor, and return it. The other ranks have a ``stand_in`` for it."""
    _owners[tensor] = tuple(sorted(owners))
    return tensor


def owners_of(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """The ranks to which a plain tensor was given, ascending; None: nothing was noted, and every rank has it."""
    found: tuple[int, ...] | None = _owners.get(tensor)
    return found


def stand_in(like: torch.Tensor, owners: Sequence[int]) -> torch.Tensor:
    """A tensor without bytes, of the geometry of ``like``, that stands for one that other ranks hold."""
    return give(torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="meta"), owners)


def _dtensor() -> type[Any] | None:
    return getattr(sys.modules.get(_HOME), "DTensor", None)
