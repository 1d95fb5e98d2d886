"""When states are written to learn what writing costs, and when the costs learnt since are reason to choose anew."""

from __future__ import annotations

from .cadence import INTERVAL_S
from .contract import Costs, Moment

__all__ = ["APART", "LONGER", "is_probe_due", "stays"]

APART = 8
"""How many captures without a write lie between two of these writes, for comparison."""

_AFTER = 8
"""How many writes must follow a choice before it changes, unless the new interval would be more than ``_SUDDEN`` times as long."""

_SUDDEN = 2.0

LONGER, _SHORTER = 1.15, 0.7
"""A chosen interval stays while the best one lies between these multiples of it. The share of the time that writing takes is then at most
15 % above what was asked for.
"""


def is_probe_due(moment: Moment) -> bool:
    """Whether to write a state in order to measure: the first one, then one at a time; none waits longer than without a computed
    cadence.
    """
    if moment.is_writing or not moment.is_newest:
        return False
    if moment.last_write is None:
        return moment.index is not None
    return moment.idle > APART or moment.now - moment.last_write >= INTERVAL_S


def stays(current: float, best: float, before: Costs | None, now: Costs) -> bool:
    """Whether an interval chosen by some costs stays, although another would now be best: noise must not move it to and fro."""
    if before is not None and now.writes - before.writes < _AFTER and best <= _SUDDEN * current:
        return True
    return _SHORTER * current < best <= LONGER * current
