"""What peers may cost a server, in numbers; and the budgets that they share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = ["ANSWER_TIMEOUTS", "LISTED_STATES", "LISTING_TIMEOUTS", "SILENT_TIMEOUTS", "Budget", "Limits", "Share"]

SILENT_TIMEOUTS: Final = 6
"""For so many timeouts nothing may be heard of an answer. What counts as heard is a whole part of it, not a byte."""

ANSWER_TIMEOUTS: Final = 20
"""After so many timeouts an answer must be there as a whole."""

LISTING_TIMEOUTS: Final = 20
"""After so many timeouts all pages of a log, or of what was found, must be there."""

LISTED_STATES: Final = 10_000_000
"""So many states are taken in at most from a peer that lists them."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of one server for all of its peers together.

    ``sessions`` are those that have proved the token; ``offer_bytes`` is for what they say of states that they push (manifests and
    ancestry), of which one of them has at most half.
    """

    sessions: int = 64
    offer_bytes: int = 256 << 20


class Budget:
    """A budget that all users share, and of which each gets at most half. Belongs to one thread."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.taken = 0

    def share(self) -> Share:
        """A new share for one user."""
        return Share(self)


class Share:
    """One user's share of a budget, until ``close``."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._is_closed = False
        self.limit = budget.limit // 2
        self.taken = 0

    def take(self, amount: int) -> bool:
        """Have so much more, if it is there."""
        if self._is_closed or self.taken + amount > self.limit or self._budget.taken + amount > self._budget.limit:
            return False
        self.taken += amount
        self._budget.taken += amount
        return True

    def give(self, amount: int) -> None:
        """Have so much less; nothing once this is closed."""
        amount = min(amount, self.taken)
        self.taken -= amount
        self._budget.taken -= amount

    def close(self) -> None:
        """Give all of it back; idempotent."""
        self.give(self.taken)
        self._is_closed = True
