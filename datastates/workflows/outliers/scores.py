"""How suspicious each sample is: losses under many states, combined into one score for each sample."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Flags", "Floats", "Rows", "Scores", "Spread", "Tally", "capped", "percentiles", "put_together", "standardise"]

Floats = NDArray[np.float64]
Rows = NDArray[np.int64]
Flags = NDArray[np.bool_]


class Tally:
    """The mean of the values that were added for each sample, without keeping the values."""

    def __init__(self, count: int) -> None:
        self._total = np.zeros(count)
        self._times = np.zeros(count, dtype=np.int64)

    def add(self, rows: Rows, values: Floats) -> None:
        """Add one value for each of ``rows``, which are distinct."""
        self._total[rows] += values
        self._times[rows] += 1

    def mean(self) -> Floats:
        """The means; NaN where nothing was added."""
        found = np.full(len(self._total), np.nan)
        np.divide(self._total, self._times, out=found, where=self._times > 0)
        return found


class Spread:
    """How far the sources (branches, seeds, variants) disagree about where each sample ranks."""

    def __init__(self, count: int) -> None:
        self._sum = np.zeros(count)
        self._squares = np.zeros(count)
        self.sources = np.zeros(count, dtype=np.int64)

    def add(self, values: Floats) -> None:
        """Add what one source says of each sample; NaN where it says nothing."""
        shares = percentiles(values)
        known = ~np.isnan(shares)
        self._sum[known] += shares[known]
        self._squares[known] += shares[known] ** 2
        self.sources[known] += 1

    def deviation(self) -> Floats:
        """The sample standard deviation, over the sources, of a sample's percentile (0 to 100); NaN with fewer than two."""
        times = np.maximum(self.sources, 1)
        variance = np.maximum(self._squares / times - (self._sum / times) ** 2, 0.0) * times / np.maximum(times - 1, 1)
        return np.where(self.sources >= 2, np.sqrt(variance), np.nan)


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """One array for each column, one element for each sample; NaN where a value is not known.

    ``score`` decides the ranking: the percentile (0 to 100) of the sample's loss, or the mean of two percentiles if both losses are known.
    ``strength`` says how far the sample stands out: the mean of the standardised losses. ``lineage`` is the mean loss under states that
    were, or may have been, trained on the sample. ``held_out`` is the mean loss under variants that held it out. ``spread`` is the standard
    deviation of the sample's percentile over the ``sources`` (branches, variants) that know it.
    """

    score: Floats
    strength: Floats
    lineage: Floats
    held_out: Floats
    spread: Floats
    sources: Rows

    def order(self) -> Rows:
        """Indices, the most suspicious first; samples that no source knows come last."""
        keys = [np.nan_to_num(values, nan=-np.inf) for values in (self.strength, self.score)]
        return np.lexsort([-key for key in keys]).astype(np.int64)


def put_together(lineage: Floats, held_out: Floats, spread: Spread) -> Scores:
    """Scores from the mean losses of both kinds, with equal weights.

    Ranks are averaged rather than losses. On Fashion-MNIST that was never worse (docs/benchmarks.md), and the size of a model's losses on
    samples that it was not trained on does not matter.
    """
    score = _mean_of_known(percentiles(lineage), percentiles(held_out))
    strength = _mean_of_known(standardise(lineage), standardise(held_out))
    score[np.isinf(strength)] = 100.0  # a loss of it is not finite: it comes first
    return Scores(score, strength, lineage, held_out, spread.deviation(), spread.sources.copy())


def _mean_of_known(*parts: Floats) -> Floats:
    stacked = np.stack(parts)
    times = (~np.isnan(stacked)).sum(axis=0)
    found = np.full(stacked.shape[1], np.nan)
    np.divide(np.nansum(stacked, axis=0), times, out=found, where=times > 0)
    return found


def standardise(values: Floats) -> Floats:
    """The values with mean 0 and standard deviation 1 over those that are finite, once these are ``capped``; all 0 if all are equal."""
    known = capped(values)
    if known.size == 0:
        return values.copy()
    deviation = float(known.std())
    found: Floats = (values - known.mean()) / (deviation if deviation > 0 else 1.0)
    return found


def capped(values: Floats) -> Floats:
    """The finite values, those that are much too high set to a limit, so that a few gross errors do not decide the scale.

    The limit is 10 standard deviations, of all values but the highest 5 %, above the median.
    """
    known: Floats = np.sort(values[np.isfinite(values)])
    deviation = float(known[: math.ceil(0.95 * known.size) - 1].std()) if known.size > 1 else 0.0
    return np.minimum(known, np.median(known) + 10 * deviation) if deviation > 0 else known


def percentiles(values: Floats) -> Floats:
    """The share (0 to 100) of the others that each value stands above, ties counted half; NaN stays NaN."""
    found = np.full(len(values), np.nan)
    known = np.flatnonzero(~np.isnan(values))
    if known.size == 1:
        found[known] = 50.0
    elif known.size:
        _, inverse, counts = np.unique(values[known], return_inverse=True, return_counts=True)
        below = np.cumsum(counts) - counts
        found[known] = 100.0 * (below + (counts - 1) / 2)[inverse] / (known.size - 1)
    return found
