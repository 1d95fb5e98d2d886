"""Checks whether values are a state of a random number generator, before a generator takes them.

Libraries take what they are given. A position beyond the words of a Mersenne Twister, or beyond the buffer of Philox, makes torch and
NumPy read memory that is not theirs at the next draw. A twister without a bit set gives zeros for ever, from which no normal number comes.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

import numpy as np

from datastates import values
from datastates.errors import InvalidInput

__all__ = ["check_numpy", "check_python", "check_torch"]

_WORDS = 624  # of a Mersenne Twister
_TORCH = struct.Struct(f"<Qiiq{_WORDS}Q")  # seed, words left, whether it was seeded, the next word, the words; then a few numbers held back
_TORCH_BYTES = 5056


def check_torch(data: object) -> None:
    """Raise unless ``data`` is the bytes of a state of torch's generator for CPUs.

    :raises InvalidInput: it is not. The other functions here raise the same.
    """
    if not isinstance(data, bytes | bytearray) or len(data) != _TORCH_BYTES:
        raise InvalidInput(f"the state of torch's generator is {_TORCH_BYTES} bytes, not {values.shown(data)}")
    _, left, _, following, *words = _TORCH.unpack_from(data)
    if not (1 <= left <= _WORDS and 0 <= following <= _WORDS + 1 - left):
        raise InvalidInput(f"the state of torch's generator goes on at word {following} with {left} left, and has {_WORDS}")
    _check_words(np.array(words, np.uint64).astype(np.uint32))


def check_python(state: object) -> None:
    """Raise unless ``state`` is a state of Python's generator, as ``generators.python_state`` returns it."""
    match state:
        case {"version": 3, "words": bytes(words), "gauss": None | float()} if len(words) == 4 * (_WORDS + 1):
            found = np.frombuffer(words, np.uint32)
            _check_position(int(found[-1]))
            _check_words(found[:-1])
        case _:
            raise InvalidInput(f"{values.shown(state)} is no state of Python's generator")


def check_numpy(state: object, like: Mapping[str, Any]) -> None:
    """Raise unless ``state`` is a state for the generator whose state is ``like``: the same fields, each within its bounds."""
    if not _is_alike(state, like):
        raise InvalidInput(f"{values.shown(state)} is no state of NumPy's {like.get('bit_generator')}")
    assert isinstance(state, Mapping), "it is like one"
    inner: Any = state["state"]
    if state["bit_generator"] == "MT19937":
        _check_position(inner["pos"])
        _check_words(inner["key"])
    if not 0 <= state.get("buffer_pos", 0) <= len(state.get("buffer", ())):
        raise InvalidInput(f"the state of NumPy's {state['bit_generator']} goes on at {state['buffer_pos']}, beyond its buffer")
    for name in ("has_uint32", "has_gauss"):
        if state.get(name, 0) not in (0, 1):
            raise InvalidInput(f"{name} of a state of NumPy's {state['bit_generator']} is {values.shown(state[name])}, neither 0 nor 1")


def _check_position(position: int) -> None:
    if not 0 <= position <= _WORDS:
        raise InvalidInput(f"the state of a Mersenne Twister goes on at word {position} of {_WORDS}")


def _check_words(words: Any) -> None:
    if not (int(words[0]) & 0x80000000 or words[1:].any()):
        raise InvalidInput("the state of a Mersenne Twister has no bit set: it would draw zeros for ever")


def _is_alike(found: object, like: object) -> bool:
    """Whether both have the same fields, with values of the same types and shapes; texts must be equal."""
    if isinstance(like, Mapping):
        return isinstance(found, Mapping) and found.keys() == like.keys() and all(_is_alike(found[key], like[key]) for key in like)
    if isinstance(like, np.ndarray):
        return isinstance(found, np.ndarray) and (found.dtype, found.shape) == (like.dtype, like.shape)
    if isinstance(like, str):
        return found == like
    if isinstance(like, bool | np.bool_ | int | np.integer):
        return isinstance(found, int | np.integer)
    return type(found) is type(like)
