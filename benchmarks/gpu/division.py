"""The division of the time among parts, by weight. Later parts get the time that earlier parts did
not use."""

from __future__ import annotations

from collections.abc import Sequence

KEPT_S = 3.0
"""Time for the report and for ending processes."""


def limit_s(left_s: float, weights: Sequence[float]) -> float:
    """The time of the next part, in seconds. The weights are those of the remaining parts."""
    return max(0.0, left_s - KEPT_S) * weights[0] / sum(weights)
