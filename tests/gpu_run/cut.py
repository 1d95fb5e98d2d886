"""A part that is not done when its time is."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from gpu.case import Case, Found

if TYPE_CHECKING:
    from gpu.place import Place


def cases(place: Place) -> Sequence[Case]:
    """The second takes longer than there is time."""
    return [
        Case("works", _works),
        Case("takes long", _takes_long, limit_s=1000),
        Case("comes too late", _works),
    ]


def _works(place: Place) -> Found:
    return {}


def _takes_long(place: Place) -> Found:
    time.sleep(1000)
    return {}
