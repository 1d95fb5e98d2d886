"""Collections beside four trainings and two readers: the short form of ``python -m
tests.drivers.collecting``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.drivers.collecting import READERS, TRAININGS, drive
from tests.support.effort import effort


@pytest.mark.long
def test_collections_beside_four_trainings_and_two_readers_take_nothing_that_is_needed(
    tmp_path: Path,
) -> None:
    captures = effort(60, 16)

    counts = drive(tmp_path, captures)

    assert counts["captures"] == TRAININGS * captures
    assert counts["evictions"] > TRAININGS
    assert counts["reads"] > 0
    assert counts["collections"] > 1
    assert counts["beginnings"] == READERS + 1
