"""What each rank measured of a state, which is recorded as ``loss@3``: told as one, from the least to the greatest."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

__all__ = ["by_rank", "spread_text"]

_OF_RANK = re.compile(r"(.+)@(0|[1-9][0-9]*)", re.DOTALL)


def by_rank(metrics: Mapping[str, float], world_size: int) -> tuple[dict[str, float], dict[str, dict[int, float]]]:
    """The metrics of a state, and apart from them those that its ranks have for themselves.

    What somebody calls ``acc@5``, beside no ``acc@0``, is no rank's.
    """
    whole: dict[str, float] = {}
    ranks: dict[str, dict[int, float]] = {}
    for key, value in metrics.items():
        found = _OF_RANK.fullmatch(key) if world_size > 1 else None
        name, rank = ("", 0) if found is None else (found[1], int(found[2]))
        if found is None or name not in metrics or f"{name}@0" not in metrics or rank >= world_size:
            whole[key] = value
        else:
            ranks.setdefault(name, {})[rank] = value
    return whole, {name: dict(sorted(values.items())) for name, values in ranks.items()}


def spread_text(values: Mapping[int, float], digits: int) -> str:
    """``0.7 to 1.3, mean 1``; what is not a number counts in none of these."""
    numbers = [value for value in values.values() if math.isfinite(value)]
    if not numbers:
        return "no numbers"
    return f"{min(numbers):.{digits}g} to {max(numbers):.{digits}g}, mean {math.fsum(numbers) / len(numbers):.{digits}g}"
