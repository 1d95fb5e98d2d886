"""The states that refs name, as the engine is told of them: read when the reflog has grown, whoever moved a ref."""

from __future__ import annotations

from datastates.errors import Unavailable
from datastates.lineage.change import refs as lineage_refs
from datastates.lineage.database import Database
from datastates.lineage.states import RefKind
from datastates.modules.journal import Journal

from .events import RefsChanged

__all__ = ["Named"]


class Named:
    """Safe from any thread."""

    def __init__(self, database: Database, journal: Journal) -> None:
        self._database, self._journal = database, journal
        self._event_seen = -1

    def look(self, *, is_forced: bool = False) -> RefsChanged | None:
        """What refs name now; None when nothing changed, or while the database is away. ``is_forced`` reads them in any case."""
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
