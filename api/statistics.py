"""Numbers about a whole repository."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import fields
from typing import TYPE_CHECKING

from datastates.lineage.show import stats

from .kept import Kept
from .models import Stats

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

__all__ = ["Statistics"]

_COUNTED = tuple(field.name for field in fields(stats.Counts))


class Statistics:
    """The numbers of one repository, which are counted as ``Kept`` says. Safe from any thread."""

    def __init__(self, reading: Callable[[], AbstractContextManager[Session]], bytes_stored: Callable[[], int]) -> None:
        self._kept = Kept("statistics", reading, lambda session: (stats.count(session), bytes_stored()))

    def of(self, session: Session) -> Stats:
        """The counts as last known; the newest state is always current."""
        counts, stored = self._kept.of(session)
        known = {name: getattr(counts, name) for name in _COUNTED}
        return Stats(**known, bytes_stored=stored, newest=stats.newest(session))

    def warm(self) -> None:
        """Begin to count, so that the first request waits less."""
        self._kept.warm()

    def close(self) -> None:
        """End the counting; idempotent."""
        self._kept.close()
