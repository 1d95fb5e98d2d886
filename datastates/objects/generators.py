"""Random number generators that a script made for itself, as plain values and back: torch's, Python's and NumPy's."""

from __future__ import annotations

import random
import sys
from array import array
from collections.abc import Mapping
from typing import Any

import torch

from .generator_states import check_numpy, check_python, check_torch

__all__ = ["is_generator", "kind_of", "load_generator", "python_state", "set_python_state", "state_of", "tensor_of"]


def is_generator(found: object) -> bool:
    """Whether ``found`` is a generator whose draws can be repeated; those of the operating system's generator cannot."""
    if isinstance(found, torch.Generator):
        return True
    if isinstance(found, random.Random):
        return type(found).getstate is random.Random.getstate
    return _is_numpy(found)


def kind_of(generator: object) -> str:
    """The kind of generators that its state fits: those of the same library and algorithm, and torch's on a device of the same type."""
    if isinstance(generator, torch.Generator):
        return f"torch.Generator on {generator.device.type}"
    if isinstance(generator, random.Random):
        return "random.Random"
    return f"numpy.random.{type(generator).__name__} of {_numpy_state(generator)['bit_generator']}"


def state_of(generator: Any) -> dict[str, object]:
    """Plain values that share no memory with the generator and say where its next number comes from."""
    if isinstance(generator, torch.Generator):
        state: object = generator.get_state().numpy().tobytes()
    elif isinstance(generator, random.Random):
        state = python_state(generator)
    else:
        state = _numpy_state(generator)
    return {"generator": kind_of(generator), "state": state}


def load_generator(generator: Any, stored: Mapping[str, Any]) -> None:
    """Go to where ``stored`` was taken; ``stored`` must be of the same kind.

    :raises InvalidInput: it is not a state of such a generator.
    """
    state = stored["state"]
    if isinstance(generator, torch.Generator):
        if generator.device.type == "cpu":
            check_torch(state)
        generator.set_state(tensor_of(state))
    elif isinstance(generator, random.Random):
        set_python_state(generator, state)
    else:
        check_numpy(state, _numpy_state(generator))
        if hasattr(generator, "set_state"):
            generator.set_state(state)
        else:
            getattr(generator, "bit_generator", generator).state = state


def python_state(generator: Any) -> dict[str, object]:
    """The state that ``getstate`` of ``random`` or of a ``random.Random`` returns, in few values: 625 words as bytes."""
    version, words, gauss = generator.getstate()
    return {"version": version, "words": array("I", words).tobytes(), "gauss": gauss}


def set_python_state(generator: Any, state: Mapping[str, Any]) -> None:
    """Set the state that ``python_state`` returned.

    :raises InvalidInput: it is not such a state.
    """
    check_python(state)
    words = array("I")
    words.frombytes(state["words"])
    generator.setstate((state["version"], tuple(words), state["gauss"]))


def tensor_of(data: bytes) -> torch.Tensor:
    """The state of one of torch's generators in the form that torch takes."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _is_numpy(found: object) -> bool:
    numpy_random = sys.modules.get("numpy.random")  # a generator of a library that nobody imported cannot exist
    if numpy_random is None:
        return False
    return isinstance(found, numpy_random.Generator | numpy_random.RandomState | numpy_random.BitGenerator)


def _numpy_state(generator: Any) -> dict[str, Any]:
    if hasattr(generator, "get_state"):
        state: dict[str, Any] = generator.get_state(legacy=False)
        return state
    return dict(getattr(generator, "bit_generator", generator).state)
