"""Which samples are suspects, and how many of these are expected to be false.

Three estimates of the share of wrong samples: ``by_another_class`` for classes, ``by_mixture`` for
losses, ``by_distance`` for features.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from datastates import values
from datastates.errors import InvalidInput, Unsupported

from .outlier_data import Floats, Rows

Flags = NDArray[np.bool_]
FALSE_DISCOVERIES = 0.01
"""The share of false suspects among distances, if the logarithms of the others are normal. They
are only roughly normal, so the number of false suspects is not known."""


@dataclass(frozen=True, slots=True, eq=False)
class Selection:
    """The suspects: ``suspects`` is True for the ``noise_rate`` highest scores.
    ``is_estimated``: the rate was estimated, not given. ``false_suspects`` of them are expected to
    be false; None if that is not known.
    """

    noise_rate: float
    is_estimated: bool
    suspects: Flags
    false_suspects: float | None = None


def check_rate(value: object, what: str = "noise_rate") -> float:
    """A noise rate, taken as an argument.

    :raises InvalidInput: it is not from 0 to 1.
    """
    rate = values.number(value, what)
    if not 0 <= rate <= 1:
        raise InvalidInput(
            f"{what} is {rate:g}: it is a share of the samples, from 0 to 1, or None to estimate it"
        )
    return rate


def ranked(strength: Floats) -> Rows:
    """Indices, the highest strength first; unknown ones (NaN) come last."""
    return np.argsort(-np.nan_to_num(strength, nan=-np.inf), kind="stable").astype(np.int64)


def select(order: Rows, known: int, rate: float) -> Flags:
    """The first ``rate`` of the ``known`` samples in this order."""
    chosen = np.zeros(len(order), dtype=np.bool_)
    chosen[order[: min(round(rate * known), known)]] = True
    return chosen


def by_mixture(strength: Floats, noise_rate: float | None, order: Rows) -> Selection:
    """Suspects at a given rate, or at the weight of the higher of two groups of ``strength``.

    On clean data the mixture still finds two groups, which makes 2 to 10 % suspects. Therefore the
    number of false ones is not known.

    :raises Unsupported: the rate has to be estimated, and scikit-learn is not installed.
    """
    known = strength[~np.isnan(strength)]
    rate = estimate(known) if noise_rate is None else noise_rate
    return Selection(rate, noise_rate is None, select(order, known.size, rate))


def by_another_class(
    given: Floats, another: Floats, noise_rate: float | None, order: Rows
) -> Selection:
    """Suspects at a given rate, or at the share of samples that look as if their class was changed.

    ``given`` has a score of each sample, from states that have not memorised it. ``another`` has
    the same score if the sample had another class. Wrong samples are distributed like ``another``,
    so the share above its lower quartile is the share of wrong samples, divided by three quarters.
    Hard samples are lower, so the share falls if it is measured at a higher quantile. That fall,
    and the wrong samples below the limit, give the number of false suspects.
    """
    known = ~np.isnan(given)
    mine, other = given[known], another[known & np.isfinite(another)]
    estimated = min(0.5, _share(mine, other, 0.25))
    rate = estimated if noise_rate is None else noise_rate
    suspects = select(order, mine.size, rate)
    chosen = int(suspects.sum())
    false = 0.0
    if chosen and other.size:
        steady = min(1.0, _share(mine, other, 0.4) / estimated) if estimated else 0.0
        limit = -np.partition(-mine, chosen - 1)[chosen - 1]
        above = float((other >= limit).mean())
        false = chosen - min(chosen * steady, mine.size * estimated * above)
    return Selection(rate, noise_rate is None, suspects, false)


def _share(mine: Floats, other: Floats, quantile: float) -> float:
    """The share of ``mine`` above a quantile of ``other``, relative to the share of ``other``."""
    if not other.size:
        return 0.0
    limit = np.quantile(other, quantile)
    above = float((other > limit).mean())
    return float((mine > limit).mean()) / above if above else 0.0


def by_distance(strength: Floats) -> Selection:
    """Suspects that are too far from the others (Benjamini-Hochberg), under a normal distribution
    with the median and the median absolute deviation of all."""
    known = np.flatnonzero(~np.isnan(strength))
    suspects = np.zeros(len(strength), dtype=np.bool_)
    chances = torch.erfc(torch.from_numpy(strength[known]) / math.sqrt(2)).numpy() / 2
    places = np.arange(1, known.size + 1)
    passed = np.flatnonzero(np.sort(chances) <= FALSE_DISCOVERIES * places / max(1, known.size))
    if passed.size:
        suspects[known[np.argsort(chances, kind="stable")[: passed[-1] + 1]]] = True
    return Selection(float(suspects.sum()) / max(1, known.size), True, suspects)


def estimate(strength: Floats) -> float:
    """The share of samples that a mixture of two normal distributions assigns to the higher one,
    and of those that are not finite.

    The values are ``capped`` first: otherwise one gross error would be the higher group alone.

    Both distributions have one variance. With separate variances the higher one also takes samples
    that are merely hard (Fashion-MNIST with 10 % of labels flipped: 30 % instead of 10 %). The
    mixture finds two groups even where there is one: clean data gives a few per cent. The estimate
    is never more than half, because what most samples are is not an outlier.
    """
    finite = capped(strength)
    wrong = strength.size - finite.size
    if finite.size < 10 or math.isclose(float(np.ptp(finite)), 0.0):
        return min(0.5, wrong / max(1, strength.size))
    try:
        # takes a second to import, and is only needed here
        from sklearn.mixture import (
            GaussianMixture,
        )
    except ImportError as exc:
        raise Unsupported(
            "the noise rate is estimated with scikit-learn: pip install 'datastates[workflows]', or"
            " pass noise_rate="
        ) from exc
    column = finite.reshape(-1, 1)
    mixture = GaussianMixture(2, covariance_type="tied", n_init=2, random_state=0).fit(column)
    high = int(mixture.means_[:, 0].argmax())
    return min(0.5, (wrong + float(mixture.predict_proba(column)[:, high].sum())) / strength.size)


# --- Scales ---


def robust(given: Floats) -> Floats:
    """The values with median 0 and median absolute deviation that of a normal distribution; what is
    not finite becomes infinite."""
    finite = given[np.isfinite(given)]
    if not finite.size:
        return np.full(len(given), np.inf)
    middle = np.median(finite)
    scale = 1.4826 * float(np.median(np.abs(finite - middle)))
    found = (given - middle) / (scale if scale > 0 else 1.0)
    return np.where(np.isfinite(given), found, np.inf)


def standardise(values: Floats) -> Floats:
    """The values with mean 0 and standard deviation 1 over those that are finite, once these are
    ``capped``; all 0 if all are equal."""
    known = capped(values)
    if known.size == 0:
        return values.copy()
    deviation = float(known.std())
    found: Floats = (values - known.mean()) / (deviation if deviation > 0 else 1.0)
    return found


def capped(values: Floats) -> Floats:
    """The finite values, those that are much too high set to a limit, so that a few gross errors do
    not decide the scale.

    The limit is 10 standard deviations, of all values but the highest 5 %, above the median.
    """
    known: Floats = np.sort(values[np.isfinite(values)])
    deviation = float(known[: math.ceil(0.95 * known.size) - 1].std()) if known.size > 1 else 0.0
    return np.minimum(known, np.median(known) + 10 * deviation) if deviation > 0 else known


def percentiles(values: Floats) -> Floats:
    """The share (0 to 100) of the other values that each value exceeds. Ties count half. NaN stays
    NaN."""
    found = np.full(len(values), np.nan)
    known = np.flatnonzero(~np.isnan(values))
    if known.size == 1:
        found[known] = 50.0
    elif known.size:
        _, inverse, counts = np.unique(values[known], return_inverse=True, return_counts=True)
        below = np.cumsum(counts) - counts
        found[known] = 100.0 * (below + (counts - 1) / 2)[inverse] / (known.size - 1)
    return found
