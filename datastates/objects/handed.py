"""Which tracked objects are values: they cannot be restored in place, so a restore hands new ones to the caller."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from datastates.content.encoding import encoder_of
from datastates.errors import InvalidInput

from .adapters import holds_state

__all__ = ["is_handed", "is_value", "split_values"]

_VALUES = (
    *(bool, int, float, complex, str, bytes, type(None), type(Ellipsis)),
    *(frozenset, range, slice, np.generic, np.dtype, torch.Size),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.qscheme),
)


def is_value(found: object) -> bool:
    """Whether only another object can replace ``found`` in a restore.

    That is so for plain values, for tuples that hold one, and for objects of a registered encoder whose type hashes by value, which means
    that they never change.
    """
    if isinstance(found, tuple) and not isinstance(found, torch.Size):
        return not found or any(map(is_value, found))
    return isinstance(found, _VALUES) or (encoder_of(type(found)) is not None and _is_hashed_by_value(type(found)))


def is_handed(found: object) -> bool:
    """Whether a restore hands a new object to its caller, instead of changing ``found``: values, and objects that an encoder makes anew."""
    return is_value(found) or (encoder_of(type(found)) is not None and not holds_state(found))


def split_values(objects: Mapping[str, object]) -> tuple[dict[str, object], dict[str, object]]:
    """The tracked objects that are values, and the others.

    :raises InvalidInput: an object would be captured but never restored: the message says how it can be tracked.
    """
    values = {name: found for name, found in objects.items() if is_value(found)}
    for name, found in values.items():
        if holds_state(found):
            raise InvalidInput(
                f"{name} is a tuple of plain values and of objects with a state: no restore could change the values in it, "
                "track a list or a dict"
            )
    others = {name: found for name, found in objects.items() if name not in values}
    for name, found in others.items():
        if is_handed(found):
            kind = type(found).__name__
            raise InvalidInput(
                f"{name} is a {kind}, of which its encoder makes a new one: no restore could put it back into yours. "
                f"Give {kind} a state_dict and a load_state_dict, or track it in a list or a dict and read it from there"
            )
    return values, others


def _is_hashed_by_value(kind: type[object]) -> bool:
    return getattr(kind, "__hash__", None) not in (None, object.__hash__)
