"""What each rank measured of a state, which is recorded as ``loss@3``: shown as one value, with the range from least to greatest."""

from __future__ import annotations

import math
import re
from collections.abc import Container, Iterable, Mapping

__all__ = ["by_rank", "ranks_of", "spread_text"]

_OF_RANK = re.compile(r"(.+)@(0|[1-9][0-9]*)", re.DOTALL)


def by_rank(metrics: Mapping[str, float], world_size: int) -> tuple[dict[str, float], dict[str, dict[int, float]]]:
    """The metrics of a state, and separately those that each of its ranks has.

    A metric that a user calls ``acc@5``, where there is no ``acc@0``, is not a rank's.
    """
    whole: dict[str, float] = {}
    ranks: dict[str, dict[int, float]] = {}
    for key, value in metrics.items():
        found = _split(key, metrics) if world_size > 1 else None
        if found is None or found[1] >= world_size:
            whole[key] = value
        else:
            ranks.setdefault(found[0], {})[found[1]] = value
    return whole, {name: dict(sorted(values.items())) for name, values in ranks.items()}


def ranks_of(keys: Iterable[str]) -> dict[str, list[int]]:
    """For the metrics of many states, by name: which ranks had a value of their own. Metrics that only one rank had are left out."""
    known = set(keys)
    ranks: dict[str, list[int]] = {}
    for name, rank in filter(None, (_split(key, known) for key in known)):
        ranks.setdefault(name, []).append(rank)
    return {name: sorted(found) for name, found in ranks.items() if len(found) > 1}


def _split(key: str, known: Container[str]) -> tuple[str, int] | None:
    """The name and the rank in the key of one rank's metric, if the metric of all ranks and that of rank 0 exist beside it."""
    found = _OF_RANK.fullmatch(key)
    return None if found is None or found[1] not in known or f"{found[1]}@0" not in known else (found[1], int(found[2]))


def spread_text(values: Mapping[int, float], digits: int) -> str:
    """``0.7 to 1.3, mean 1``; values that are not numbers are ignored."""
    numbers = [value for value in values.values() if math.isfinite(value)]
    if not numbers:
        return "no numbers"
    return f"{min(numbers):.{digits}g} to {max(numbers):.{digits}g}, mean {math.fsum(numbers) / len(numbers):.{digits}g}"
