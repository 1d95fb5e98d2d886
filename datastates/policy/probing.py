"""When states are written to learn what writing costs, and when what was learnt since is reason enough to choose anew."""

from __future__ import annotations

from .cadence import INTERVAL_S
from .contract import Costs, Moment

__all__ = ["APART", "is_probe_due", "stays"]

APART = 8
"""So many captures without a write are between two of these writes, to be compared with."""

_AFTER = 8
"""So many writes are waited for after a choice, unless what would be chosen now is more than ``_SUDDEN`` times as long."""

_SUDDEN = 2.0

_LONGER, _SHORTER = 1.15, 0.7
"""A chosen interval stays while what would be chosen now lies between these many of it. The share of the time that writing
takes is then 15 % above what was asked for, at most."""


def is_probe_due(moment: Moment) -> bool:
    """The first state, then one at a time; none is put off for longer than a training without a computed cadence would."""
    if moment.is_writing or not moment.is_newest:
        return False
    if moment.last_write is None:
        return moment.index is not None
    return moment.idle > APART or moment.now - moment.last_write >= INTERVAL_S


def stays(current: float, best: float, before: Costs | None, now: Costs) -> bool:
    """Whether an interval that was chosen by some costs stays, though another would be best by now: noise is not to move it to and fro."""
    if before is not None and now.writes - before.writes < _AFTER and best <= _SUDDEN * current:
        return True
    return _SHORTER * current < best <= _LONGER * current
