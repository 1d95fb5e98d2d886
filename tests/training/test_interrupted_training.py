"""A short run of the driver that ``python -m tests.drivers.interrupts`` runs at length."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.drivers.interrupts import ANOMALIES, drive
from tests.support.effort import seeds

INTERRUPTS = 100


@pytest.mark.parametrize("seed", seeds(5, more=5))
def test_interrupts_at_random_moments_neither_hang_a_training_nor_lose_what_was_durable(
    tmp_path: Path, seed: int
) -> None:
    counts = drive(tmp_path, INTERRUPTS, seed=seed)
    assert counts["interrupts"] >= INTERRUPTS
    assert not {name: number for name, number in counts.items() if name in ANOMALIES}
    assert counts["durable, read again"]
