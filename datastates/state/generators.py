"""Random number generators: the global ones, and those that a script made itself.

``RngState`` has the global ones. Generators of torch, Python and NumPy are stored as plain values.
"""

from __future__ import annotations

import logging
import random
import struct
import sys
from array import array
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from datastates import values
from datastates.errors import InvalidInput
from datastates.system.devices import devices

_WORDS = 624  # of a Mersenne Twister
# seed, words left, whether it was seeded, the next word, the words; then a few numbers held back
_TORCH = struct.Struct(f"<Qiiq{_WORDS}Q")
_TORCH_BYTES = 5056
_logger = logging.getLogger(__name__)
_KINDS = ("cuda", "xpu")
"""The accelerators whose generators a state may have, by torch's names; ROCm's are ``cuda``."""


def check_torch(data: object) -> None:
    """Raise unless ``data`` is the bytes of a state of torch's generator for CPUs.

    :raises InvalidInput: it is not. All functions here raise it.
    """
    if not isinstance(data, bytes | bytearray) or len(data) != _TORCH_BYTES:
        raise InvalidInput(
            f"the state of torch's generator is {_TORCH_BYTES} bytes, not {values.shown(data)}"
        )
    _, left, _, following, *words = _TORCH.unpack_from(data)
    if not (1 <= left <= _WORDS and 0 <= following <= _WORDS + 1 - left):
        raise InvalidInput(
            f"the state of torch's generator continues at word {following} with {left} left, and"
            f" has {_WORDS}"
        )
    _check_words(np.array(words, np.uint64).astype(np.uint32))


def check_python(state: object) -> None:
    """Raise unless ``state`` is a state of Python's generator, as ``generators.python_state``
    returns it."""
    match state:
        case {"version": 3, "words": bytes(words), "gauss": None | float()} if len(words) == 4 * (
            _WORDS + 1
        ):
            found = np.frombuffer(words, np.uint32)
            _check_position(int(found[-1]))
            _check_words(found[:-1])
        case _:
            raise InvalidInput(f"{values.shown(state)} is no state of Python's generator")


def check_numpy(state: object, like: Mapping[str, Any]) -> None:
    """Raise unless ``state`` is a state for the generator whose state is ``like``: the same
    fields, each within its bounds."""
    if not _is_alike(state, like):
        raise InvalidInput(
            f"{values.shown(state)} is no state of NumPy's {like.get('bit_generator')}"
        )
    assert isinstance(state, Mapping), "it is like one"
    inner: Any = state["state"]
    if state["bit_generator"] == "MT19937":
        _check_position(inner["pos"])
        _check_words(inner["key"])
    if not 0 <= state.get("buffer_pos", 0) <= len(state.get("buffer", ())):
        raise InvalidInput(
            f"the state of NumPy's {state['bit_generator']} continues at {state['buffer_pos']},"
            " beyond its buffer"
        )
    for name in ("has_uint32", "has_gauss"):
        if state.get(name, 0) not in (0, 1):
            raise InvalidInput(
                f"{name} of a state of NumPy's {state['bit_generator']} is"
                f" {values.shown(state[name])}, neither 0 nor 1"
            )


def _check_position(position: int) -> None:
    if not 0 <= position <= _WORDS:
        raise InvalidInput(
            f"the state of a Mersenne Twister continues at word {position} of {_WORDS}"
        )


def _check_words(words: Any) -> None:
    if not (int(words[0]) & 0x80000000 or words[1:].any()):
        raise InvalidInput(
            "the state of a Mersenne Twister has no bit set: it would draw zeros for ever"
        )


def _is_alike(found: object, like: object) -> bool:
    """Whether both have the same fields, with values of the same types and shapes; texts must be
    equal."""
    if isinstance(like, Mapping):
        return (
            isinstance(found, Mapping)
            and found.keys() == like.keys()
            and all(_is_alike(found[key], like[key]) for key in like)
        )
    if isinstance(like, np.ndarray):
        return isinstance(found, np.ndarray) and (found.dtype, found.shape) == (
            like.dtype,
            like.shape,
        )
    if isinstance(like, str):
        return found == like
    if isinstance(like, bool | np.bool_ | int | np.integer):
        return isinstance(found, int | np.integer)
    return type(found) is type(like)


# --- Generators that a script made itself, as plain values and back ---


def is_generator(found: object) -> bool:
    """Whether ``found`` is a generator whose draws can be repeated. The operating system's
    generator cannot."""
    if isinstance(found, torch.Generator):
        return True
    if isinstance(found, random.Random):
        return type(found).getstate is random.Random.getstate
    return _is_numpy(found)


def kind_of(generator: object) -> str:
    """The kind of generators that its state fits: the same library and algorithm, and for torch the
    same type of device."""
    if isinstance(generator, torch.Generator):
        return f"torch.Generator on {generator.device.type}"
    if isinstance(generator, random.Random):
        return "random.Random"
    return f"numpy.random.{type(generator).__name__} of {_numpy_state(generator)['bit_generator']}"


def state_of(generator: Any) -> dict[str, object]:
    """Plain values that share no memory with the generator and determine its next number."""
    if isinstance(generator, torch.Generator):
        state: object = generator.get_state().numpy().tobytes()
    elif isinstance(generator, random.Random):
        state = python_state(generator)
    else:
        state = _numpy_state(generator)
    return {"generator": kind_of(generator), "state": state}


def load_generator(generator: Any, stored: Mapping[str, Any]) -> None:
    """Go to where ``stored`` was taken. ``stored`` must be of the same kind.

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
    """The state that ``getstate`` of ``random`` or of a ``random.Random`` returns, in few
    values: 625 words as bytes."""
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
    # a generator of a library that was never imported cannot exist
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is None:
        return False
    return isinstance(
        found, numpy_random.Generator | numpy_random.RandomState | numpy_random.BitGenerator
    )


def _numpy_state(generator: Any) -> dict[str, Any]:
    if hasattr(generator, "get_state"):
        state: dict[str, Any] = generator.get_state(legacy=False)
        return state
    return dict(getattr(generator, "bit_generator", generator).state)


# --- Global generators ---


class RngState:
    """The global generators of torch (CPU and each accelerator that this process uses), Python and
    NumPy, as one object to track.

    A device counts once work was done on it, NumPy once ``numpy.random`` is imported.
    ``load_state_dict`` leaves a generator unchanged if the state does not have it. A state of more
    devices than this process has restores those that exist. ``note`` and the log then report it,
    because draws on the missing devices cannot be repeated.
    """

    def __init__(self) -> None:
        self.note: str | None = None

    def state_dict(self) -> dict[str, object]:
        """Plain values, about 10 kB in all, that share no memory with the generators."""
        state: dict[str, object] = {
            "torch": _bytes_of(torch.get_rng_state()),
            "python": python_state(random),
        }
        if generators := devices().generators():
            states = {index: _bytes_of(state) for index, state in generators.items()}
            state[devices().kind] = [states.get(index) for index in range(max(states) + 1)]
        numpy_random = sys.modules.get("numpy.random")
        if numpy_random is not None:
            state["numpy"] = numpy_state(numpy_random)
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set each generator that the state has.

        :raises InvalidInput: it is not such a state.
        """
        if not isinstance(state, Mapping):
            raise InvalidInput(
                f"the state of random number generators is a dict, not {values.shown(state)}"
            )
        try:
            self._load(state)
        except (
            LookupError,
            TypeError,
            ValueError,
            OverflowError,
            AttributeError,
            RuntimeError,
        ) as exc:
            raise InvalidInput(
                f"not a state of random number generators ({type(exc).__name__}: {exc})"
            ) from exc

    def _load(self, state: Mapping[str, Any]) -> None:
        """Load all generators; everything is checked before the first one is set."""
        self.note = None
        legacy = _legacy(state["numpy"]) if "numpy" in state else None
        if "torch" in state:
            check_torch(state["torch"])
        if "python" in state:
            set_python_state(random, state["python"])
        if "torch" in state:
            torch.set_rng_state(tensor_of(state["torch"]))
        if legacy is not None:
            sys.modules["numpy.random"].set_state(legacy)
        self._load_devices(state)

    def _load_devices(self, state: Mapping[str, Any]) -> None:
        for kind in _KINDS:
            states = {
                index: tensor_of(data)
                for index, data in enumerate(state.get(kind, []))
                if data is not None
            }
            here = devices().set_generators(states) if kind == devices().kind else 0
            if states and max(states) >= here:
                stored = f"{max(states) + 1} {kind.upper()} devices"
                self.note = (
                    f"the state has the generators of {stored} and {here} are here: the others were"
                    " left out"
                )
                _logger.warning("%s", self.note)


def numpy_state(numpy_random: Any) -> dict[str, object]:
    """The state of ``numpy.random``, or of a ``RandomState``, as plain values."""
    state: dict[str, Any] = numpy_random.get_state(legacy=False)
    if state["bit_generator"] != "MT19937":
        return state
    inner = state["state"]
    return {
        "bit_generator": "MT19937",
        "state": inner["key"].tobytes(),
        "position": int(inner["pos"]),
        "has_gauss": int(state["has_gauss"]),
        "gauss": float(state["gauss"]),
    }


def _legacy(stored: Mapping[str, Any]) -> dict[str, Any]:
    """The argument for ``numpy.random.set_state``, from the values that ``numpy_state``
    returned."""
    import numpy.random

    legacy = dict(stored)
    if isinstance(legacy["state"], bytes):
        legacy["state"] = {
            "key": numpy.frombuffer(legacy["state"], dtype=numpy.uint32),
            "pos": legacy.pop("position"),
        }
    check_numpy(legacy, numpy.random.get_state(legacy=False))
    return legacy


def _bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.numpy().tobytes()
