"""Curves with fewer points: thinned by M4 so that they look the same, or averaged over stretches.

Of each stretch of a curve the first, the last, the least and the greatest point are kept, after Jugel, Jerzak, Hackenbroich and Markl,
"M4: A Visualization-Oriented Time Series Data Aggregation", VLDB 2014. Stretches here have equal numbers of points, not of steps, so
that one step far away does not use up all of them. A value that is not finite is a gap in a curve; the first gap of each stretch is kept.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["pool", "thin"]

_KEPT = 5  # of each stretch


def thin(values: npt.ArrayLike, points: int) -> npt.NDArray[np.intp]:
    """The indices of at most ``points`` values that show what all of them do, rising."""
    given = np.asarray(values, dtype=np.float64)
    if len(given) <= points:
        return np.arange(len(given))
    is_gap = ~np.isfinite(given)
    size = -(-len(given) // max(1, points // (_KEPT if is_gap.any() else _KEPT - 1)))
    stretches = -(-len(given) // size)
    padding = stretches * size - len(given)

    def rows(array: npt.NDArray[np.float64], last: float) -> npt.NDArray[np.float64]:
        return np.pad(array, (0, padding), constant_values=last).reshape(stretches, size)

    starts = np.arange(stretches) * size
    low, high = rows(np.where(is_gap, np.inf, given), np.inf), rows(np.where(is_gap, -np.inf, given), -np.inf)
    kept = [starts, np.minimum(starts + size, len(given)) - 1, starts + low.argmin(axis=1), starts + high.argmax(axis=1)]
    if is_gap.any():
        kept.append(starts + rows(is_gap.astype(np.float64), 0.0).argmax(axis=1))
    return np.unique(np.concatenate(kept))


def pool(sums: npt.ArrayLike, counts: npt.ArrayLike, points: int) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.float64]]:
    """The means over at most ``points`` stretches, from sums and counts of values: the index where each stretch ends, and its mean.

    The mean of no values is NaN.
    """
    total, number = np.asarray(sums, dtype=np.float64), np.asarray(counts, dtype=np.float64)
    if not len(total):
        return np.arange(0), total
    starts = np.arange(0, len(total), -(-len(total) // points))
    with np.errstate(invalid="ignore"):
        means = np.add.reduceat(total, starts) / np.add.reduceat(number, starts)
    return np.append(starts[1:], len(total)) - 1, means
