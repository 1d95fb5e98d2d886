"""Faults that are planted: a line is taken out of a method, to see that somebody notices."""

from __future__ import annotations

import inspect
import sys
import textwrap
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest


def without(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, line: str, instead: str = "pass"
) -> None:
    """Take one line out of a method, or put another one there."""
    function = getattr(owner, name)
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(line) == 1, f"{owner.__name__}.{name}: {line!r} has moved"
    module = vars(sys.modules[function.__module__])
    made: dict[str, Callable[..., object]] = {}
    exec(
        compile(
            "from __future__ import annotations\n" + source.replace(line, instead),
            "planted",
            "exec",
        ),
        module,
        made,
    )
    monkeypatch.setattr(owner, name, made[name])
