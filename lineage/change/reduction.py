"""Computes the metrics of a state from those that its ranks measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction

from datastates import values
from datastates.errors import InvalidInput

__all__ = ["FIRST", "Reduce", "check_metrics", "check_reduce", "reduced"]

Reduce = str | Mapping[str, str]
"""How one number is made of those of all ranks: one word for every metric, or a word by name. Metrics not named are those of rank 0."""

FIRST = "first"
EACH = "each"

_WAYS: Mapping[str, Callable[[Sequence[float]], float]] = {
    FIRST: lambda measured: measured[0],
    EACH: lambda measured: measured[0],
    "mean": lambda measured: _sum(measured, len(measured)),
    "max": lambda measured: math.nan if any(map(math.isnan, measured)) else max(measured),
    "min": lambda measured: math.nan if any(map(math.isnan, measured)) else min(measured),
    "sum": lambda measured: _sum(measured, 1),
}


def check_reduce(reduce: object) -> Reduce:
    """The user's value, if it says how metrics are reduced.

    :raises InvalidInput: it does not; the error lists the words.
    """
    ways = reduce.values() if isinstance(reduce, Mapping) else [reduce]
    for way in ways:
        if not isinstance(way, str) or way not in _WAYS:
            raise InvalidInput(f"reduce is {values.shown(way)}: say one of {', '.join(_WAYS)}, or a dict of these by the name of a metric")
    if isinstance(reduce, Mapping):
        return {values.key(name, "the name of a metric"): str(way) for name, way in reduce.items()}
    return str(reduce)


def check_metrics(metrics: Mapping[str, float], reduce: Reduce, rank: int) -> None:
    """Raise unless what one rank measured can be recorded under its names.

    :raises InvalidInput: a name with its rank appended is too long.
    """
    for key in metrics:
        if _way(reduce, key) == EACH:
            values.key(_of_rank(key, rank), "the name of a metric of one rank")


def reduced(measured: Sequence[Mapping[str, float]], reduce: Reduce) -> dict[str, float]:
    """The metrics of a state, from what its ranks measured, by rank. A metric that rank 0 did not measure counts only if it is reduced.

    NaN stays NaN, and a minimum or maximum over values with a NaN is NaN. A metric that only some ranks measured is reduced over those
    ranks.
    """
    found: dict[str, float] = {}
    for key in dict.fromkeys(key for metrics in measured for key in metrics):
        way = _way(reduce, key)
        there = [metrics[key] for metrics in measured if key in metrics]
        if way != FIRST or key in measured[0]:
            found[key] = _WAYS[way](there)
        if way == EACH:
            found |= {_of_rank(key, rank): metrics[key] for rank, metrics in enumerate(measured) if key in metrics}
    return found


def _sum(measured: Sequence[float], divisor: int) -> float:
    """The sum divided by the divisor; infinite only if that is beyond the range of floats, however large the sum is."""
    if not all(map(math.isfinite, measured)):
        return sum(measured)
    total = sum(map(Fraction, measured))
    try:
        return float(total / divisor)
    except OverflowError:
        return math.inf if total > 0 else -math.inf


def _way(reduce: Reduce, key: str) -> str:
    return reduce if isinstance(reduce, str) else reduce.get(key, FIRST)


def _of_rank(key: str, rank: int) -> str:
    return f"{key}@{rank}"
