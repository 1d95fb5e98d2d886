"""Peers with a token that send what they like: the small form of ``python -m
tests.drivers.peers``."""

from __future__ import annotations

import pytest

from tests.drivers.peers import (
    KINDS,
    LIMIT_BYTES,
    LISTED_BYTES,
    MOST_DELAY_S,
    logs,
    mutate,
    offer_bodies,
    push_for,
    training,
)
from tests.support.effort import IS_THOROUGH, effort, part, seeds

SPARE_BYTES = 256 << 20
NAMES = list(offer_bodies(1 << 10))
BUSY_S = 2.0
"""How long a step may wait in the gate, whose machine does other things.

A decoder that stops a training does so for longer."""


@pytest.mark.parametrize("seed", seeds(1, more=1))
def test_changed_messages_are_answered_or_refused_while_a_training_goes_on(seed: int) -> None:
    with training() as trained:
        phase = mutate(trained, effort(1000, 60), seed)
    assert phase.outcomes["hung"] == 0
    assert phase.outcomes["closed"] > 0
    assert phase.outcomes["answered"] > 0
    assert phase.grown_bytes < LIMIT_BYTES
    assert phase.longest_s < BUSY_S


def test_offers_without_end_take_no_more_memory_than_is_documented() -> None:
    with training() as trained:
        for name in NAMES if IS_THOROUGH else part(NAMES):
            phase = push_for(trained, name, seconds=effort(4, 1))
            assert phase.steps > 0
            assert phase.grown_bytes < LIMIT_BYTES, (name, str(phase))
            assert phase.longest_s < BUSY_S, (name, str(phase), MOST_DELAY_S)


@pytest.mark.parametrize("kind", part(KINDS))
def test_log_without_end_takes_no_more_memory_than_is_documented(kind: str) -> None:
    outcome, grown, _ = logs(kind)
    assert outcome.startswith("PeerFault")
    assert grown < LISTED_BYTES + SPARE_BYTES
