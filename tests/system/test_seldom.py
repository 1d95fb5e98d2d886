"""What others cause is logged seldom and briefly."""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING

from datastates.system.logs import RateLimitFilter

if TYPE_CHECKING:
    import pytest


def test_a_message_comes_once_a_minute_and_says_how_many_did_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = 0.0
    logger = logging.getLogger("tests.seldom.often")
    logger.addFilter(RateLimitFilter(lambda: now))
    for number in range(1000):
        logger.warning("turned away: %s", number)
    logger.warning("another thing: %s", 1)
    now = 61.0
    logger.warning("turned away: %s", "again")
    logger.warning("turned away: %s", "and again")

    assert caplog.messages == [
        "turned away: 0",
        "another thing: 1",
        "turned away: again (and 999 more like it, which were not logged)",
    ]


def test_what_a_peer_says_is_cut_and_cannot_steer_a_terminal(
    caplog: pytest.LogCaptureFixture,
) -> None:
    logger = logging.getLogger("tests.seldom.long")
    logger.addFilter(RateLimitFilter())
    logger.error("it said %s", "\x1b[2J\n" + "x" * 100_000, exc_info=ValueError("y" * 100_000))

    assert caplog.messages[0].startswith("it said ?[2J?xxx")
    assert len(caplog.text) < 10_000


def test_strangers_do_not_fill_the_log() -> None:
    names = ("server", "requests", "sending", "fetch", "chain", "tcp", "connections")
    for name in ("system.failures", *(f"transport.{name}" for name in names)):
        module = importlib.import_module(f"datastates.{name}")
        assert any(
            isinstance(each, RateLimitFilter) for each in logging.getLogger(module.__name__).filters
        ), name
