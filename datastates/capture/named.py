"""Reads, for the engine, which states refs name: again whenever the reflog has grown, no matter which process moved a ref.

A line of the reflog may be committed later than one with a higher number (PostgreSQL, see ``lineage/show/events``). Each look reads
refs until one look has begun after all older lines were committed. A look reads only the refs that have a line of the reflog since then, so
its cost does not depend on the number of names.

In a job the first rank reads whenever it is asked to, and has the others write what a ref names. The others read as well, all of them
together at most ``PER_S`` times a second, so that they ask the database little however many ranks there are.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from datastates.errors import Unavailable
from datastates.lineage.change import refs as lineage_refs
from datastates.lineage.database import Database
from datastates.lineage.show import events
from datastates.lineage.states import RefKind
from datastates.modules.journal import Journal
from datastates.system.interrupts import Mutex

from .events import RefsChanged

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

__all__ = ["Named"]

PER_S = 100.0
"""The number of reads per second of all ranks but the first, together."""

MOST_S = 60.0
"""The longest time from one read of a rank to its next, in seconds."""

_NOTHING = -1  # before the first line of the reflog


class Named:
    """Safe from any thread."""

    def __init__(self, database: Database, journal: Journal) -> None:
        self._database, self._journal = database, journal
        self._seen = events.Horizon(_NOTHING, frozenset())
        self._is_sure = True
        self._tags, self._heads = dict[str, str](), dict[str, str]()
        self._tagged, self._told = frozenset[str](), _NOTHING
        self._turn = Mutex()
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
            with self._turn:
                with self._database.read() as session:
                    seen, newest = self._seen, lineage_refs.last_event(session)
                    has_grown = newest != seen.id
                    is_sure = seen.is_settled and not has_grown  # then it was, before this transaction began
                    is_read = is_forced or not (is_sure and self._is_sure)
                    if is_read:
                        self._read(session, self._told if self._told <= newest else _NOTHING)
                        self._told = seen.id if seen.is_settled else self._told
                    seen = events.newest(session) if has_grown and seen.is_settled else events.settle(session, seen)
                    is_known = self._journal.check(session)
                self._seen, self._is_sure = seen, is_sure
                changed = RefsChanged(self._tagged, dict(self._heads)) if is_read else None
            if not is_known:
                self._journal.recall()
        except Unavailable as error:
            self._journal.note_away(error)
            return None
        return changed

    def _read(self, session: Session, after: int) -> None:
        """Read the refs that have a line of the reflog after this one."""
        moved = lineage_refs.moved(session, after)
        if after == _NOTHING:
            self._tags, self._heads = {}, {}
        is_tag_moved = any(name in self._tags or (ref is not None and ref.kind is RefKind.TAG) for name, ref in moved.items())
        for name, ref in moved.items():
            for kept in (self._tags, self._heads):
                kept.pop(name, None)
            if ref is not None:
                (self._tags if ref.kind is RefKind.TAG else self._heads)[name] = ref.state
        if is_tag_moved or after == _NOTHING:
            self._tagged = frozenset(self._tags.values())
