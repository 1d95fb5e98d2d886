"""The user's function that ``MODULE:FUNCTION`` names."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

from datastates.errors import InvalidInput

__all__ = ["function_of"]


def function_of(said: str, purpose: str) -> Callable[..., Any]:
    """The function; modules of the current folder are found too. ``purpose`` says what it must do: ``gives a picture``.

    :raises InvalidInput: there is no such function.
    """
    module, _, name = said.partition(":")
    if not (module and name):
        raise InvalidInput(f"{said!r} names no function: write MODULE:FUNCTION, such as shop.data:check")
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = getattr(importlib.import_module(module), name, None)
    except ImportError as exc:
        raise InvalidInput(f"{said!r} cannot be imported from here ({exc}): run the command in the folder of that module") from exc
    if not callable(found):
        raise InvalidInput(f"{module} has no function {name!r}: name one that {purpose}")
    function: Callable[..., Any] = found
    return function
