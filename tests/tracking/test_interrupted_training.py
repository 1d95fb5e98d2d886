"""A short run of the driver that ``python -m tests.drivers.interrupts`` runs at length."""

from __future__ import annotations

from pathlib import Path

from tests.drivers.interrupts import ANOMALIES, drive
from tests.support.effort import effort


def test_interrupts_at_random_moments_neither_hang_a_training_nor_lose_what_was_durable(tmp_path: Path) -> None:
    count = effort(1000, 100)
    counts = drive(tmp_path, count)
    assert counts["interrupts"] >= count
    assert not {name: number for name, number in counts.items() if name in ANOMALIES}
    assert counts["durable, read again"]
