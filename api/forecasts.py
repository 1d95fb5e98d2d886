"""What retention would drop next. It is computed from the folder and the lineage, which reads every manifest, and so kept for a while."""

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
    """The forecasts of one repository. Safe from any thread. Computing takes at most ``SHARE`` of the time, however often callers ask."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._lock = threading.Lock()
        self._found: Pruned | None = None
        self._ends_at = 0.0

    def of(self, limit: int) -> Forecast:
        """The first states that would be dropped, at most ``limit``, as last computed."""
        with self._lock:  # callers that arrive meanwhile need not compute it again
            found = self._found
            if found is None or time.monotonic() >= self._ends_at:
                began = time.monotonic()
                found = self._found = prune(self._core, dry_run=True)
                now = time.monotonic()
                self._ends_at = now + max(_FRESH_S, (now - began) / SHARE)
        going = tuple(Dropping(each.uid, each.branch, each.step, each.bytes, each.reason) for each in found.dropped[:limit])
        return Forecast(found.policy, going, len(found.dropped), found.bytes_before, found.bytes_after, found.kept)
