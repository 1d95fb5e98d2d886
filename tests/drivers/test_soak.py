"""Two thousand captures with retention: the short form of ``python -m tests.drivers.soak``."""

from __future__ import annotations

from pathlib import Path

import pytest

from datastates.maintenance import keeper
from tests.drivers.soak import is_flat, run, trend, trends
from tests.support.effort import IS_THOROUGH


def test_a_slope_is_told_from_noise() -> None:
    rising = trend([100 + index for index in range(40)])
    noisy = trend([100 + 20 * (-1) ** index for index in range(40)])
    assert rising.rise == pytest.approx(39)
    assert not rising.is_flat
    assert noisy.is_flat


@pytest.mark.long
@pytest.mark.skipif(not IS_THOROUGH, reason="half a minute: part of make test-all")
def test_captures_with_retention_take_no_more_and_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper, "LEAST_S", 0.2)

    found = trends(run(tmp_path, 2000, samples=20))

    for name in (
        "descriptors",
        "threads",
        "resident_mib",
    ):
        # not time and disk: others are at work, and retention passes are few in so short a run
        assert is_flat(name, found[name]), (name, found[name])
