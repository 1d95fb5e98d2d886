"""The summary of a series of values of one metric: how many, their extremes, ends and sum, and the states of those."""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass, fields

__all__ = ["PLACES", "STATES", "WHOLE", "Tally", "place_of"]

STATES = 64
"""How many generations one stretch of a curve covers."""

_SHIFT = 6

WHOLE = -1
"""The place of the stretch that covers all states of a segment."""


def place_of(generation: int) -> int:
    """The place of the stretch that contains a state of this generation."""
    return generation >> _SHIFT


@dataclass(slots=True)
class Tally:
    """``count`` values, of which ``gaps`` are not finite; of the others the sum and the extremes, the earliest of equal ones.

    States are row ids. ``first`` and ``last`` are None where they are NaN; ``gap_id`` is the first state whose value is a gap.
    """

    count: int = 0
    gaps: int = 0
    total: float = 0.0
    least: float | None = None
    least_id: int | None = None
    most: float | None = None
    most_id: int | None = None
    first: float | None = None
    first_id: int | None = None
    last: float | None = None
    last_id: int | None = None
    gap_id: int | None = None

    def add(self, id_: int, value: float | None) -> None:
        """Add a later state's value; None and NaN are the same."""
        value = None if value is None or math.isnan(value) else value
        self.count += 1
        self.last, self.last_id = value, id_
        if self.first_id is None:
            self.first, self.first_id = value, id_
        if value is None or math.isinf(value):
            self.gaps += 1
            self.gap_id = self.gap_id or id_
            return
        self.total += value
        if self.least is None or value < self.least:
            self.least, self.least_id = value, id_
        if self.most is None or value > self.most:
            self.most, self.most_id = value, id_

    def extend(self, later: Tally) -> None:
        """Add everything of another tally, which comes after this one."""
        if not later.count:
            return
        self.count += later.count
        self.gaps += later.gaps
        self.total += later.total
        self.last, self.last_id = later.last, later.last_id
        self.gap_id = self.gap_id or later.gap_id
        if self.first_id is None:
            self.first, self.first_id = later.first, later.first_id
        if later.least is not None and (self.least is None or later.least < self.least):
            self.least, self.least_id = later.least, later.least_id
        if later.most is not None and (self.most is None or later.most > self.most):
            self.most, self.most_id = later.most, later.most_id

    def row(self) -> dict[str, float | None]:
        """Its fields by name, as in the table of stretches."""
        return dict(zip(PLACES, astuple(self), strict=True))


PLACES = tuple(field.name for field in fields(Tally))
"""The columns of a tally, in order."""
