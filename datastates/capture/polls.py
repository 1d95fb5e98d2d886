"""Decides when a process asks what became of the states that wait for parts of other ranks.

A process hears that with each round that it tells; without a round it asks. It asks soon after it has done something that the others
usually do at the same time: told a part, or put one on its disk. After that it asks less often the longer it waits, and less often the more
processes ask, so that the database is asked little however many there are. While a caller here waits, it asks sooner.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from datastates.modules.journal import Journal

from .rounds import Rounds

__all__ = ["Polling", "Polls"]

SOON_S, HURRIED_S, SELDOM_S = 0.025, 0.005, 0.25
"""The time to the first question: after something that the others do too; while a caller waits for it; and if others may only want
something."""

MOST_HURRIED_S, MOST_S, LAST_S = 0.5, 1.0, 4.0
"""The longest pause between two questions; each is twice as long as the one before. The first while a caller waits; the second, for few
processes, if others may only want something; the last in all other cases."""

PER_S, SELDOM_PER_S = 500, 100
"""The most questions per second of all processes together: of first questions, and of those that come at the longest pauses."""

_LASTS_S = 2.0
"""For how long a caller that said so counts as waiting, in seconds; one that waits longer says it again."""


@dataclass(slots=True)
class Polls:
    """The times of the questions of one engine thread; any thread may call ``hurry``. ``askers`` is the number of processes that ask the
    database.

    ``is_awaiting`` says whether the others have something to deliver: a part, or the news that it is on their disk.
    """

    askers: int = 1
    _at: float = math.inf
    _pause_s: float = 0.0
    _hurried_until: float = -math.inf

    def hurry(self, now: float) -> None:
        """Note that a caller waits."""
        was_hurried, self._hurried_until = now < self._hurried_until, now + _LASTS_S
        if not was_hurried and not self.is_off:
            self._pause_s, self._at = 0.0, now

    def begin(self, now: float, *, is_awaiting: bool) -> None:
        """Start asking: something was told, and an answer is expected."""
        self._pause_s = self._pause(now, is_awaiting=is_awaiting)
        self._at = now + self._pause_s

    def end(self) -> None:
        """Stop asking: nothing waits."""
        self._at = math.inf

    @property
    def is_off(self) -> bool:
        """Whether no question is planned."""
        return self._at == math.inf

    def asked(self, now: float, *, is_awaiting: bool) -> None:
        """Note that the question was asked, and something still waits."""
        self._pause_s = self._pause(now, 2 * self._pause_s, is_awaiting=is_awaiting)
        self._at = now + self._pause_s

    def delay(self, now: float) -> float:
        """The time to the next question, in seconds; infinite if none is planned."""
        return max(0.0, self._at - now)

    def _pause(self, now: float, least_s: float = 0.0, *, is_awaiting: bool) -> float:
        crowd_s = self.askers / PER_S
        if not is_awaiting:
            first_s, most_s = SELDOM_S, min(max(MOST_S, self.askers / SELDOM_PER_S), LAST_S)
        elif now < self._hurried_until:
            first_s, most_s = HURRIED_S, MOST_HURRIED_S
        else:
            first_s, most_s = SOON_S, LAST_S
        return max(crowd_s, min(max(first_s, least_s), most_s))


class Polling:
    """Asks the lineage when it is time. ``look`` and ``delay`` belong to the engine thread. Parts that wait for those of other ranks for
    longer than ``patience_s`` are given up; it may be set at any time.
    """

    def __init__(self, journal: Journal, rounds: Rounds, patience_s: float) -> None:
        self._journal, self._rounds, self.patience_s = journal, rounds, patience_s
        self._polls = Polls()
        self._has_half = False
        rounds.on_hurry = self._hurry
        journal.on_half = self._begin_anew

    def join(self, ranks: int) -> None:
        """Note that this process is one of ``ranks`` in a job."""
        self._polls.askers = ranks

    def delay(self) -> float:
        """The time to the next question, in seconds; infinite if none is planned."""
        return self._polls.delay(time.monotonic())

    def look(self, *, has_told: bool) -> None:
        """Ask, if it is time, what became of the parts that wait for those of other ranks; ``has_told``: a round was told just now."""
        has_told, self._has_half = has_told or self._has_half, False
        now, journal = time.monotonic(), self._journal
        if not self._is_wanted:
            self._polls.end()
        elif journal.has_news or (not has_told and not self._polls.delay(now)):
            journal.ask(self.patience_s)
            self._polls.asked(time.monotonic(), is_awaiting=journal.is_awaiting)
        elif has_told or self._polls.is_off:
            self._polls.begin(now, is_awaiting=journal.is_awaiting)

    def _hurry(self) -> None:
        self._polls.hurry(time.monotonic())
        if self._is_wanted:
            self._rounds.wake()

    def _begin_anew(self) -> None:
        self._has_half = True
        self._rounds.wake()

    @property
    def _is_wanted(self) -> bool:
        return self._journal.is_waiting_for_others or self._journal.may_be_wanted
