"""The choice of suspects: the samples with the highest scores, as many as the noise rate says."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from datastates import values
from datastates.errors import InvalidInput, Unsupported

from .scores import Flags, Floats, Scores, capped

__all__ = ["Selection", "check_rate", "estimate", "select"]


@dataclass(frozen=True, slots=True, eq=False)
class Selection:
    """The suspects: ``suspects`` is True for the ``noise_rate`` highest scores. ``is_estimated``: the rate was estimated, not given."""

    noise_rate: float
    is_estimated: bool
    suspects: Flags


def check_rate(value: object, what: str = "noise_rate") -> float:
    """A noise rate, taken as an argument.

    :raises InvalidInput: it is not from 0 to 1.
    """
    rate = values.number(value, what)
    if not 0 <= rate <= 1:
        raise InvalidInput(f"{what} is {rate:g}: it is a share of the samples, from 0 to 1, or None to estimate it")
    return rate


def select(scores: Scores, noise_rate: float | None = None) -> Selection:
    """The suspects at a noise rate, by default at the estimated one.

    :raises InvalidInput: the rate is not from 0 to 1.
    :raises Unsupported: the rate has to be estimated, and scikit-learn is not installed.
    """
    if noise_rate is not None:
        check_rate(noise_rate)
    known = ~np.isnan(scores.score)
    rate = estimate(scores.strength[known]) if noise_rate is None else noise_rate
    chosen = np.zeros(len(known), dtype=np.bool_)
    chosen[scores.order()[: min(round(rate * int(known.sum())), int(known.sum()))]] = True
    return Selection(rate, noise_rate is None, chosen)


def estimate(strength: Floats) -> float:
    """The share of samples that a mixture of two normal distributions assigns to the higher one, and of those that are not finite.

    The values are ``capped`` first: otherwise one gross error would be the higher group alone.

    Both distributions have one variance. With separate variances the higher one also takes samples that are merely hard (Fashion-MNIST with
    10 % of labels flipped: 30 % instead of 10 %). The mixture finds two groups even where there is one: clean data gives a few per cent.
    The estimate is never more than half, because what most samples are is not an outlier.
    """
    finite = capped(strength)
    wrong = strength.size - finite.size
    if finite.size < 10 or math.isclose(float(np.ptp(finite)), 0.0):
        return min(0.5, wrong / max(1, strength.size))
    try:
        from sklearn.mixture import GaussianMixture  # takes a second to import, and is only needed here
    except ImportError as exc:
        raise Unsupported(
            "the noise rate is estimated with scikit-learn: pip install 'datastates[workflows]', or pass noise_rate="
        ) from exc
    column = finite.reshape(-1, 1)
    mixture = GaussianMixture(2, covariance_type="tied", n_init=2, random_state=0).fit(column)
    high = int(mixture.means_[:, 0].argmax())
    return min(0.5, (wrong + float(mixture.predict_proba(column)[:, high].sum())) / strength.size)
