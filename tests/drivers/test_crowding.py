"""A training and an honest client beside a crowd that only connects: the small form of ``python
-m tests.drivers.crowding``."""

from __future__ import annotations

from tests.drivers.crowding import DESCRIPTORS, measure
from tests.support.effort import effort


def test_a_crowd_that_only_connects_stops_neither_a_training_nor_an_honest_client() -> None:
    outcome = measure(connections=300, seconds=effort(3, 1), rounds=1, again_s=effort(2, 1))

    (quiet,), (crowded,) = outcome.quiet, outcome.crowded
    assert crowded.steps > 0
    assert crowded.failed == []
    assert crowded.descriptors <= quiet.descriptors + DESCRIPTORS // 4 + 8
    assert crowded.resident_mib < quiet.resident_mib + 200
    assert sum(server["refused"] for server in outcome.servers) > 0
