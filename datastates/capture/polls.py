"""When a process asks what became of the states that wait for parts of other ranks.

It hears that with each round that it tells; where no round comes it asks. It asks soon after something that the others answer, as a rule,
by doing the same: after it told a part, and after that was on its disk. Then it asks the more seldom the longer it waits; and the later,
the more processes ask, so that the database is asked little however many there are. While somebody here waits it asks sooner.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from datastates.modules.journal import Journal

from .rounds import Rounds

__all__ = ["Polling", "Polls"]

SOON_S, HURRIED_S, SELDOM_S = 0.025, 0.005, 0.25
"""To the first question: after something that the others answer, while somebody waits for it, and where others may only want something."""

MOST_HURRIED_S, MOST_S, LAST_S = 0.5, 1.0, 4.0
"""Between two questions at most, each pause being twice as long as that before it: while somebody waits; else, of few processes, and of
however many."""

PER_S, SELDOM_PER_S = 500, 100
"""All processes together put so many questions a second at most: first questions, and those that come at the longest pauses."""

_LASTS_S = 2.0
"""So long somebody who said so is taken to wait; whoever waits longer says it again."""


@dataclass(slots=True)
class Polls:
    """One for each engine thread; ``hurry`` is called from any. ``askers`` says how many processes ask the database: one for each desk.

    ``is_awaiting`` says whether something is to come from the others: a part, or that it is on their disk.
    """

    askers: float = 1.0
    _at: float = math.inf
    _pause_s: float = 0.0
    _hurried_until: float = -math.inf

    def hurry(self, now: float) -> None:
        """Somebody waits."""
        was_hurried, self._hurried_until = now < self._hurried_until, now + _LASTS_S
        if not was_hurried and not self.is_off:
            self._pause_s, self._at = 0.0, now

    def begin(self, now: float, *, is_awaiting: bool) -> None:
        """Something was told, and something is to be heard."""
        self._pause_s = self._pause(now, is_awaiting=is_awaiting)
        self._at = now + self._pause_s

    def end(self) -> None:
        """Nothing waits."""
        self._at = math.inf

    @property
    def is_off(self) -> bool:
        """Whether no question is to be put."""
        return self._at == math.inf

    def asked(self, now: float, *, is_awaiting: bool) -> None:
        """The question was put, and something waits still."""
        self._pause_s = self._pause(now, 2 * self._pause_s, is_awaiting=is_awaiting)
        self._at = now + self._pause_s

    def delay(self, now: float) -> float:
        """How long it is to the next question; infinite where there is none to be put."""
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
    """Asks the lineage, when it is time. ``look`` and ``delay`` belong to the engine thread."""

    def __init__(self, journal: Journal, rounds: Rounds, patience_s: float) -> None:
        self._journal, self._rounds, self._patience_s = journal, rounds, patience_s
        self._polls = Polls()
        self._ranks = self._seats = 1
        self._has_half = False
        rounds.on_hurry = self._hurry
        journal.on_half = self._begin_anew

    def join(self, ranks: int) -> None:
        """This process is one of so many of a job."""
        self._ranks = ranks
        self._polls.askers = self._ranks / self._seats

    def share(self, seats: int) -> None:
        """So many of them ask together, at their desk."""
        self._seats = seats
        self._polls.askers = self._ranks / self._seats

    def delay(self) -> float:
        """How long it is to the next question; infinite where there is none to be put."""
        return self._polls.delay(time.monotonic())

    def look(self, *, has_told: bool) -> None:
        """Hear what became of the parts that wait for those of other ranks, if it is time; ``has_told``: a round was told just now."""
        has_told, self._has_half = has_told or self._has_half, False
        now, journal = time.monotonic(), self._journal
        if not self._is_wanted:
            self._polls.end()
        elif journal.has_news or (not has_told and not self._polls.delay(now)):
            journal.ask(self._patience_s)
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
