"""When a process asks what became of the states that wait for parts of other ranks.

It hears that with each round that it tells; where no round comes it asks, and the more seldom the longer it waits, so that however many
ranks wait the database is asked little. While somebody here waits for a state it asks sooner.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from datastates.modules.journal import Journal

from .rounds import Rounds

__all__ = ["Polling", "Polls"]

FIRST_S, MOST_S = 0.25, 4.0
"""From a round to the first question, and between two questions at most: twice as long after each of them."""

HURRIED_S, MOST_HURRIED_S = 0.02, 0.5
"""While somebody waits."""

_LASTS_S = 2.0
"""So long somebody who said so is taken to wait; whoever waits longer says it again."""


@dataclass(slots=True)
class Polls:
    """One for each engine thread; ``hurry`` is called from any."""

    _at: float = math.inf
    _pause_s: float = FIRST_S
    _hurried_until: float = -math.inf

    def hurry(self, now: float) -> None:
        """Somebody waits."""
        if now >= self._hurried_until:
            self._pause_s = HURRIED_S
            self._at = min(self._at, now)
        self._hurried_until = now + _LASTS_S

    def begin(self, now: float) -> None:
        """A round was told, and something waits."""
        self._pause_s = HURRIED_S if now < self._hurried_until else FIRST_S
        self._at = now + self._pause_s

    def end(self) -> None:
        """Nothing waits."""
        self._at = math.inf

    @property
    def is_off(self) -> bool:
        """Whether no question is to be put."""
        return self._at == math.inf

    def asked(self, now: float) -> None:
        """The question was put, and something waits still."""
        most = MOST_HURRIED_S if now < self._hurried_until else MOST_S
        self._pause_s = min(2 * self._pause_s, most)
        self._at = now + self._pause_s

    def delay(self, now: float) -> float:
        """How long it is to the next question; infinite where there is none to be put."""
        return max(0.0, self._at - now)


class Polling:
    """Asks the lineage, when it is time. ``look`` and ``delay`` belong to the engine thread."""

    def __init__(self, journal: Journal, rounds: Rounds, patience_s: float) -> None:
        self._journal, self._rounds, self._patience_s = journal, rounds, patience_s
        self._polls = Polls()
        rounds.on_hurry = self._hurry

    def delay(self) -> float:
        """How long it is to the next question; infinite where there is none to be put."""
        return self._polls.delay(time.monotonic())

    def look(self, *, has_told: bool) -> None:
        """Hear what became of the parts that wait for those of other ranks, if it is time; ``has_told``: a round was told just now."""
        now, journal = time.monotonic(), self._journal
        if not self._is_wanted:
            self._polls.end()
        elif journal.has_news or (not has_told and not self._polls.delay(now)):
            journal.ask(self._patience_s)
            self._polls.asked(now)
        elif has_told or self._polls.is_off:
            self._polls.begin(now)

    def _hurry(self) -> None:
        if self._is_wanted:
            self._polls.hurry(time.monotonic())
            self._rounds.wake()

    @property
    def _is_wanted(self) -> bool:
        return self._journal.is_waiting_for_others or self._journal.may_be_wanted
