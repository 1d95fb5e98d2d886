"""Many values in several statements: a database takes so many in one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

__all__ = ["batches"]

T = TypeVar("T")


def batches(values: Sequence[T], most: int) -> Iterator[list[T]]:
    """The values in their order, at most so many at a time; nothing of none."""
    for start in range(0, len(values), most):
        yield list(values[start : start + most])
