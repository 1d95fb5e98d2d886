"""The states that refs name, as the engine is told of them: read when the reflog has grown, whoever moved a ref.

Of a job the first rank looks whenever it is asked to, and has the others write what somebody names. They look by themselves as well, all of
them together at most ``PER_S`` times a second: however many ranks there are, the database is asked little.
"""

from __future__ import annotations

import time

from datastates.errors import Unavailable
from datastates.lineage.change import refs as lineage_refs
from datastates.lineage.database import Database
from datastates.lineage.states import RefKind
from datastates.modules.journal import Journal

from .events import RefsChanged

__all__ = ["Named"]

PER_S = 100.0
"""So often a second do all ranks but the first look, together."""

MOST_S = 60.0
"""From one look of a rank to its next at most."""


class Named:
    """Safe from any thread."""

    def __init__(self, database: Database, journal: Journal) -> None:
        self._database, self._journal = database, journal
        self._event_seen = -1
        self._every_s = self._looks_at = 0.0

    def join(self, rank: int, size: int) -> None:
        """This process is a rank of a job."""
        self._every_s = min(size / PER_S, MOST_S) if rank else 0.0

    def look(self, *, is_forced: bool = False) -> RefsChanged | None:
        """What refs name now; None when nothing changed, while the database is away, or until it is time. ``is_forced`` reads them in any
        case."""
        if time.monotonic() < self._looks_at and not is_forced:
            return None
        self._looks_at = time.monotonic() + self._every_s
        try:
            with self._database.read() as session:
                newest = lineage_refs.last_event(session)
                named = lineage_refs.refs(session) if newest != self._event_seen or is_forced else None
                is_known = self._journal.check(session)
            if not is_known:
                self._journal.recall()
        except Unavailable as error:
            self._journal.note_away(error)
            return None
        self._event_seen = newest
        if named is None:
            return None
        tagged = frozenset(ref.state for ref in named if ref.kind is RefKind.TAG)
        return RefsChanged(tagged, {ref.name: ref.state for ref in named if ref.kind is RefKind.BRANCH})
