"""The limits of what peers may cost a server, and the budgets that they share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = ["ANSWER_TIMEOUTS", "LISTED_STATES", "LISTING_TIMEOUTS", "SILENT_TIMEOUTS", "Budget", "Limits", "Share"]

SILENT_TIMEOUTS: Final = 6
"""For how many timeouts an answer may be silent. Only a complete part of it counts as a sign of life, not a byte."""

ANSWER_TIMEOUTS: Final = 20
"""After how many timeouts an answer must be complete."""

LISTING_TIMEOUTS: Final = 20
"""After how many timeouts all pages of a log, or of a search, must be there."""

LISTED_STATES: Final = 10_000_000
"""The most states that are accepted from a peer that lists them."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of one server for all of its peers together.

    ``sessions`` counts peers that have proved the token. ``offer_bytes`` is for what they say of states that they push (manifests and
    ancestry); one peer may use at most half of it.
    """

    sessions: int = 64
    offer_bytes: int = 256 << 20


class Budget:
    """A budget that all users share; each gets at most half of it. Belongs to one thread."""

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
        """Take this much more; returns whether it was available."""
        if self._is_closed or self.taken + amount > self.limit or self._budget.taken + amount > self._budget.limit:
            return False
        self.taken += amount
        self._budget.taken += amount
        return True

    def give(self, amount: int) -> None:
        """Give this much back; does nothing once this is closed."""
        amount = min(amount, self.taken)
        self.taken -= amount
        self._budget.taken -= amount

    def close(self) -> None:
        """Give everything back; idempotent."""
        self.give(self.taken)
        self._is_closed = True
