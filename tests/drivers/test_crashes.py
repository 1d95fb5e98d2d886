"""Processes that are killed at any moment: the short form of ``python -m
tests.drivers.crashes``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.drivers.crashes import drive
from tests.support.effort import effort, seeds


@pytest.mark.long
@pytest.mark.parametrize("seed", seeds(5, more=1))
def test_every_promise_holds_after_a_kill_at_any_moment_of_anything(
    tmp_path: Path, seed: int
) -> None:
    rounds = effort(20, 5)

    counts = drive(tmp_path, rounds, seed=seed)

    assert counts["rounds"] == rounds
    assert counts["promises kept"] > rounds
    assert counts["states restored"] > rounds
