"""Curves with fewer points."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from datastates.api.curves import pool, thin

_numbers = st.floats(allow_nan=True, allow_infinity=True)


@given(st.lists(_numbers, max_size=400), st.integers(10, 100))
def test_ends_extremes_and_gaps_are_kept_and_no_more_points_than_asked_for(
    values: list[float], points: int
) -> None:
    places = thin(values, points).tolist()

    assert places == sorted(set(places))
    assert len(places) == len(values) if len(values) <= points else len(places) <= points
    kept = [values[place] for place in places]
    finite, kept_finite = (
        [value for value in some if math.isfinite(value)] for some in (values, kept)
    )
    if values:
        assert {0, len(values) - 1} <= set(places)
    if finite:
        assert (min(finite), max(finite)) == (min(kept_finite), max(kept_finite))
    assert any(map(math.isfinite, kept)) == any(map(math.isfinite, values))
    assert all(map(math.isfinite, kept)) == all(map(math.isfinite, values)), "a gap stays one"


def test_a_gap_near_the_end_of_a_curve_is_kept_where_the_last_stretch_is_short() -> None:
    values = [0.0] * 57
    values[-2] = math.nan
    assert 55 in thin(values, 10)


def test_a_short_spike_is_seen_in_its_place() -> None:
    values = np.sin(np.arange(100_000) / 5000)
    values[77_777] = 5.0
    places = thin(values, 500)
    assert 77_777 in places
    assert len(places) >= 250
    kept = values[places]
    assert np.abs(np.interp(np.arange(100_000), places, kept) - values)[
        :77_000
    ].max() == pytest.approx(0, abs=0.02)


def test_pooled_sums_are_means_of_what_was_counted() -> None:
    ends, means = pool([1.0, 2.0, 6.0, 0.0, 0.0], [1, 1, 2, 0, 0], 3)
    assert ends.tolist() == [1, 3, 4]
    assert means[:2].tolist() == [1.5, 3.0]
    assert math.isnan(means[2]), "of nothing there is no mean"
    assert pool([], [], 10)[0].tolist() == []
