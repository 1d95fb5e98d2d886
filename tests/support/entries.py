"""What users call: the members of public classes."""

from __future__ import annotations

from typing import Any


def own_members(kind: type) -> dict[str, Any]:
    """The members that a class has of its own, and those of the parts that it is put together
    from."""
    parts = [
        each for each in kind.__mro__ if each is kind or each.__module__ == "datastates.facade"
    ]
    return {name: member for part in reversed(parts) for name, member in vars(part).items()}
