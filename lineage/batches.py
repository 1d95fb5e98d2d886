"""Splits many values into batches, since a database accepts only so many in one statement."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

__all__ = ["batches"]

T = TypeVar("T")


def batches(values: Sequence[T], most: int) -> Iterator[list[T]]:
    """The values in their order, at most ``most`` at a time; no batch if there are none."""
    for start in range(0, len(values), most):
        yield list(values[start : start + most])
