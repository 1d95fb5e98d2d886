"""What retention would drop next: reckoned from the folder and the lineage, and kept for a while, since that reads every manifest."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from datastates.upkeep.retention import prune

from .background import SHARE
from .models import Dropping, Forecast

if TYPE_CHECKING:
    from datastates.opening.core import Core
    from datastates.upkeep.retention import Pruned

__all__ = ["Forecasts"]

_FRESH_S = 2.0


class Forecasts:
    """Those of one repository. Safe from any thread; reckoning takes ``SHARE`` of the time at most, whoever asks how often."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._lock = threading.Lock()
        self._found: Pruned | None = None
        self._ends_at = 0.0

    def of(self, limit: int) -> Forecast:
        """The first that would go, at most ``limit``, as they were reckoned last."""
        with self._lock:  # who comes meanwhile need not reckon again
            found = self._found
            if found is None or time.monotonic() >= self._ends_at:
                began = time.monotonic()
                found = self._found = prune(self._core, dry_run=True)
                now = time.monotonic()
                self._ends_at = now + max(_FRESH_S, (now - began) / SHARE)
        going = tuple(Dropping(each.uid, each.branch, each.step, each.bytes, each.reason) for each in found.dropped[:limit])
        return Forecast(found.policy, going, len(found.dropped), found.bytes_before, found.bytes_after, found.kept)
