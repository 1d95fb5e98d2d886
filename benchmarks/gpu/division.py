"""How the time is divided among parts: by weight, and what one leaves over the later ones have."""

from __future__ import annotations

from collections.abc import Sequence

KEPT_S = 3.0
"""Kept for the report and for ending what runs."""


def limit_s(left_s: float, weights: Sequence[float]) -> float:
    """The time of the first of the parts that are left, whose weights these are, in seconds."""
    return max(0.0, left_s - KEPT_S) * weights[0] / sum(weights)
