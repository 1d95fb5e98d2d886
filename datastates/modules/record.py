"""The third step: records states in the lineage."""

from __future__ import annotations

from collections.abc import Sequence

from datastates.store.tier import Tier

from .contract import Priority
from .journal import Journal
from .work import Work

__all__ = ["Record"]


class Record:
    """Records states in the lineage, now or when it answers again. A transaction costs about as much for ten states as for one."""

    name, priority = "record", int(Priority.RECORD)

    def __init__(self, journal: Journal, tier: Tier, holder: str) -> None:
        self._journal, self._tier, self._holder = journal, tier, holder

    def process(self, work: Work) -> None:
        """Record one state; raises the reason if it was refused."""
        for error in self.process_all([work]).values():
            raise error

    def process_all(self, works: Sequence[Work]) -> dict[str, Exception]:
        """Record the states of a round in one go; returns, by uid, why some of them were refused."""
        entries = [work.be_told(self._tier, self._holder) for work in works]
        return self._journal.record(entries) if entries else {}
