"""What each rank of a job has for itself: the state of its random numbers, and its place in the data."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Sampler

from datastates.content.tree import Owned

from .generators import is_generator
from .prepared import is_prepared
from .rng import RngState

__all__ = ["Owned", "is_own", "owned"]


def is_own(found: object) -> bool:
    """Whether a tracked object is each rank's own without being named so: a generator, a loader or a sampler."""
    if isinstance(found, nn.Module | Optimizer | dict | list | tuple | set | str | bytes):
        return False
    if isinstance(found, RngState | DataLoader | Sampler) or is_generator(found) or is_prepared(found):
        return True
    return isinstance(found, Iterable) and callable(getattr(found, "state_dict", None))  # a user's own loader


def owned(tree: dict[str, object], names: Collection[str]) -> dict[str, object]:
    """The tree of a state in which the parts with these names are this rank's own."""
    return {name: Owned(child) if name in names and type(child) is not Owned else child for name, child in tree.items()}
