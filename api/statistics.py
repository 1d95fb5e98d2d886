"""Numbers about a whole repository: counts that are costly are kept, and renewed in the background."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import fields
from typing import TYPE_CHECKING

from datastates.lineage.show import stats

from .background import SHARE, Background
from .models import Stats

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

__all__ = ["Statistics"]

_COUNTED = tuple(field.name for field in fields(stats.Counts))
_AT_ONCE_S = 0.05  # how long a request waits for counting


class Statistics:
    """The numbers of one repository. Safe from any thread.

    Slow counts take at most ``SHARE`` of the time: a million states are counted every quarter of a minute.
    """

    def __init__(self, reading: Callable[[], AbstractContextManager[Session]], bytes_stored: Callable[[], int]) -> None:
        self._reading, self._stored = reading, bytes_stored
        self._background = Background("statistics")
        self._lock = threading.Lock()
        self._counts: stats.Counts | None = None
        self._counted_at = self._took_s = 0.0
        self._bytes_stored = 0

    def of(self, session: Session) -> Stats:
        """The counts as last known; the newest state is always current."""
        counts = self._counts
        if counts is None or self._took_s <= _AT_ONCE_S:
            with self._lock:  # callers that arrive meanwhile need not count again
                if self._counts is counts:
                    self._count(session)
                counts = self._counts
        elif time.monotonic() - self._counted_at > self._took_s / SHARE:
            self.warm()
        assert counts is not None
        known = {name: getattr(counts, name) for name in _COUNTED}
        return Stats(**known, bytes_stored=self._bytes_stored, newest=stats.newest(session))

    def warm(self) -> None:
        """Begin to count, so that the first request waits less."""
        self._background.start("count", self._recount)

    def close(self) -> None:
        """End the counting; idempotent."""
        self._background.close()

    def _count(self, session: Session) -> None:
        began = time.monotonic()
        self._counts, self._bytes_stored = stats.count(session), self._stored()
        self._counted_at = time.monotonic()
        self._took_s = self._counted_at - began

    def _recount(self) -> None:
        """Count again, on a thread of its own."""
        with self._lock, self._reading() as session:
            self._count(session)
