"""When states are written to learn what writing costs, before a computed cadence has chosen anything."""

from __future__ import annotations

from .cadence import INTERVAL_S
from .contract import Moment

__all__ = ["APART", "is_probe_due"]

APART = 8
"""So many captures without a write are between two of these writes, to be compared with."""


def is_probe_due(moment: Moment) -> bool:
    """The first state, then one at a time; none is put off for longer than a training without a computed cadence would."""
    if moment.is_writing or not moment.is_newest:
        return False
    if moment.last_write is None:
        return moment.index is not None
    return moment.idle > APART or moment.now - moment.last_write >= INTERVAL_S
