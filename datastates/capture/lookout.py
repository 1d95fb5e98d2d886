"""The engine's checks about once a second: signs of life, stalled writes, memory, the lineage, and refs that other processes made."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

__all__ = ["EVERY_S", "Lookout"]

_logger = logging.getLogger(__name__)

EVERY_S = 1.0
"""The time between two checks, in seconds: for so long a ref that another process made may be unknown here."""


class Lookout:
    """Runs the checks on the engine thread. Those in ``asking`` may fail, as they ask the lineage; those in ``seeing`` never do."""

    def __init__(self, seeing: Sequence[Callable[[], None]], asking: Sequence[Callable[[], None]]) -> None:
        self._seeing, self._asking = seeing, asking
        self._looked_at = 0.0
        self._failed: str | None = None

    def look(self) -> bool:
        """Run the checks if it is time; returns whether it was."""
        if time.monotonic() - self._looked_at < EVERY_S:
            return False
        for see in self._seeing:
            see()
        try:
            for ask in self._asking:
                ask()
        except Exception as error:  # captures go on whatever the database raises; it is logged once
            if self._failed != repr(error):
                _logger.exception("looking for refs that others made failed; it is tried again")
            self._failed = repr(error)
        else:
            self._failed = None
        self._looked_at = time.monotonic()
        return True
