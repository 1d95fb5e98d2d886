"""The other lineages of a folder of packs: their states lie there too, so whoever deletes files asks here first."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from datastates.errors import Unavailable
from datastates.lineage.change.clones import repository_uid
from datastates.system.interrupts import Mutex

from .chronicle import CHRONICLES, lineages, read_chronicle

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

__all__ = ["Neighbours"]

_Stamp = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class _Seen:
    """A chronicle as it was read: the states that it names, where its last frame ends, and why it may name more; None if it cannot."""

    stamp: _Stamp
    uids: frozenset[str]
    end: int
    doubt: str | None


_NOTHING = _Seen((0, 0, 0), frozenset(), 0, None)


class Neighbours:
    """What the chronicles of other lineages say of the states in a folder. Only what is new in a chronicle is read. Safe from any thread.

    A state that another lineage has taken in is known here once that one has told its chronicle: within ten seconds while it captures, else
    when it is closed.
    """

    def __init__(self, packs: Path) -> None:
        self._packs = packs
        self._seen: dict[str, _Seen] = {}
        self._turn = Mutex()

    def naming(self, session: Session, uids: Iterable[str]) -> dict[str, str]:
        """Those of these states whose files must stay because another lineage than that of the session names them, or may: each with why,
        in words."""
        others, wanted, found = lineages(self._packs), list(uids), dict[str, str]()
        if not others or not wanted:
            return found
        own = repository_uid(session)
        with self._turn:
            for lineage in others:
                if lineage != own:
                    seen = self._look(lineage)
                    found |= {uid: f"lineage {lineage} of this folder names it too" for uid in wanted if uid in seen.uids}
                    found |= {} if seen.doubt is None else dict.fromkeys(wanted, seen.doubt)
        return found

    def _look(self, lineage: str) -> _Seen:
        stamp, known = _stamp(self._packs / CHRONICLES / lineage), self._seen.get(lineage)
        if known is not None and known.stamp == stamp:
            return known
        if known is None or known.doubt is not None or known.stamp[0] != stamp[0] or stamp[1] < known.end:
            known = _NOTHING
        seen = _read_on(self._packs, lineage, stamp, known)
        if seen.doubt is not None and known.end:  # it may have been written anew
            seen = _read_on(self._packs, lineage, stamp, _NOTHING)
        self._seen[lineage] = seen
        return seen


def _stamp(path: Path) -> _Stamp:
    try:
        status = os.stat(path, follow_symlinks=False)
    except OSError:  # the reader says what is wrong
        return _NOTHING.stamp
    return status.st_ino, status.st_size, status.st_mtime_ns


def _read_on(packs: Path, lineage: str, stamp: _Stamp, known: _Seen) -> _Seen:
    uids = set(known.uids)
    try:
        more = read_chronicle(packs, lineage, known.end, take=lambda entry: uids.update(state.uid for state in entry.states))
    except Unavailable as exc:
        return replace(_NOTHING, doubt=f"another lineage may name it: {exc}")
    doubt = f"lineage {lineage} of this folder may name it: its chronicle is damaged; `datastates repair` there writes it anew"
    return _Seen(stamp, frozenset(uids), more.end, doubt if more.rotten_bytes else None)
