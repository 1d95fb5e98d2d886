"""Functions whose calls are counted while they do what they do."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest


def counted(
    monkeypatch: pytest.MonkeyPatch,
    place: str,
    note: Callable[..., int] = lambda *_: 1,
    found: list[int] | None = None,
) -> list[int]:
    """What ``note`` says of each call of a function, by its dotted name, before it; behind what
    was ``found`` already."""
    found = [] if found is None else found
    holder, name = place.rsplit(".", 1)
    owner: Any = pkgutil.resolve_name(holder)
    function = getattr(owner, name)

    def counting(*given: Any) -> Any:
        found.append(note(*given))
        return function(*given)

    monkeypatch.setattr(owner, name, counting)
    return found
