"""The state of every random number generator from which training draws."""

from __future__ import annotations

import logging
import random
import sys
from collections.abc import Mapping
from typing import Any

import torch

from datastates import values
from datastates.errors import InvalidInput
from datastates.system.devices import devices

from .generator_states import check_numpy, check_torch
from .generators import python_state, set_python_state, tensor_of

__all__ = ["RngState", "numpy_state"]

_logger = logging.getLogger(__name__)

_KINDS = ("cuda", "xpu")
"""The accelerators whose generators a state may have, by torch's names; ROCm's are ``cuda``."""


class RngState:
    """The global generators of torch (CPU and each accelerator that this process uses), Python and NumPy, as one object to track.

    A device counts once work was done on it, NumPy once ``numpy.random`` is imported. ``load_state_dict`` leaves a generator as it is if
    the state does not have it. A state of more devices than this process has restores those that exist; ``note`` and the log then say so,
    because draws on the others cannot be repeated.
    """

    def __init__(self) -> None:
        self.note: str | None = None

    def state_dict(self) -> dict[str, object]:
        """Plain values, about 10 kB in all, that share no memory with the generators."""
        state: dict[str, object] = {"torch": _bytes_of(torch.get_rng_state()), "python": python_state(random)}
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
            raise InvalidInput(f"the state of random number generators is a dict, not {values.shown(state)}")
        try:
            self._load(state)
        except (LookupError, TypeError, ValueError, OverflowError, AttributeError, RuntimeError) as exc:
            raise InvalidInput(f"not a state of random number generators ({type(exc).__name__}: {exc})") from exc

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
            states = {index: tensor_of(data) for index, data in enumerate(state.get(kind, [])) if data is not None}
            here = devices().set_generators(states) if kind == devices().kind else 0
            if states and max(states) >= here:
                stored = f"{max(states) + 1} {kind.upper()} devices"
                self.note = f"the state has the generators of {stored} and {here} are here: the others were left out"
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
    """The argument for ``numpy.random.set_state``, from the values that ``numpy_state`` returned."""
    import numpy.random

    legacy = dict(stored)
    if isinstance(legacy["state"], bytes):
        legacy["state"] = {"key": numpy.frombuffer(legacy["state"], dtype=numpy.uint32), "pos": legacy.pop("position")}
    check_numpy(legacy, numpy.random.get_state(legacy=False))
    return legacy


def _bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.numpy().tobytes()
