"""Reads, for the engine, which states refs name: again whenever the reflog has grown, no matter which process moved a ref.

A line of the reflog may be committed later than one with a higher number (PostgreSQL, see ``lineage/show/events``). So refs are read at
every look until a look has begun after all older lines were there.

In a job the first rank reads whenever it is asked to, and has the others write what a ref names. The others read as well, all of them
together at most ``PER_S`` times a second, so that they ask the database little however many ranks there are.
"""

from __future__ import annotations

import time

from datastates.errors import Unavailable
from datastates.lineage.change import refs as lineage_refs
from datastates.lineage.database import Database
from datastates.lineage.show import events
from datastates.lineage.states import RefKind
from datastates.modules.journal import Journal

from .events import RefsChanged

__all__ = ["Named"]

PER_S = 100.0
"""The number of reads per second of all ranks but the first, together."""

MOST_S = 60.0
"""The longest time from one read of a rank to its next, in seconds."""


class Named:
    """Safe from any thread."""

    def __init__(self, database: Database, journal: Journal) -> None:
        self._database, self._journal = database, journal
        self._seen = events.Horizon(-1, frozenset())
        self._is_sure = True
        self._every_s = self._looks_at = 0.0

    def join(self, rank: int, size: int) -> None:
        """Note that this process is a rank of a job."""
        self._every_s = min(size / PER_S, MOST_S) if rank else 0.0

    def look(self, *, is_forced: bool = False) -> RefsChanged | None:
        """What refs name now; None if nothing changed, if the database is away, or if it is not yet time. ``is_forced`` reads them in any
        case."""
        if time.monotonic() < self._looks_at and not is_forced:
            return None
        self._looks_at = time.monotonic() + self._every_s
        try:
            with self._database.read() as session:
                seen, newest = self._seen, lineage_refs.last_event(session)
                has_grown = newest != seen.id
                is_sure = seen.is_settled and not has_grown  # then it was, before this transaction began
                named = lineage_refs.refs(session) if is_forced or not (is_sure and self._is_sure) else None
                seen = events.newest(session) if has_grown else events.settle(session, seen)
                is_known = self._journal.check(session)
            if not is_known:
                self._journal.recall()
        except Unavailable as error:
            self._journal.note_away(error)
            return None
        self._seen, self._is_sure = seen, is_sure
        if named is None:
            return None
        tagged = frozenset(ref.state for ref in named if ref.kind is RefKind.TAG)
        return RefsChanged(tagged, {ref.name: ref.state for ref in named if ref.kind is RefKind.BRANCH})
