"""What this process has told of states of several parts: those of which it waits to hear, and those of which it has no part."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from datastates.lineage.change.parts import Telling, give_up, record_parts, skip_part, want_parts, wanted_parts
from datastates.lineage.search.outcomes import Outcome, outcomes, statuses_of
from datastates.lineage.states import StateFacts, Status, Why

from .entry import Entry

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

__all__ = ["Heard", "Parts", "Skip"]

_MOST_ASKED = 100
"""Of so many of the newest states it is asked whether others make them durable."""


@dataclass(frozen=True, slots=True)
class Skip:
    """A state of which this rank has no part, and why."""

    facts: StateFacts
    rank: int
    why: Why
    reason: str


@dataclass(frozen=True, slots=True)
class Heard:
    """What a transaction said: what became of states, which of those that are whole other ranks make durable, and which skipped parts,
    and wishes, it was told of; and what those are by now of which this rank has written its part. Heeded once it is committed.
    """

    outcomes: dict[str, Outcome]
    skips: tuple[str, ...] = ()
    wanted: tuple[str, ...] = ()
    wishes: tuple[str, ...] = ()
    statuses: dict[str, Status] = field(default_factory=dict)


class Parts:
    """Owned by the journal, which calls this in its turn; but for ``skip``, which never waits."""

    def __init__(self) -> None:
        self._waiting: dict[str, tuple[Entry, float]] = {}
        self._skips: dict[str, Skip] = {}
        self._unwritten: dict[str, int] = {}
        self._wishes: dict[str, int] = {}
        self._half: dict[str, int] = {}
        """The states of which this rank's part is on disk, and not yet those of others; with the bytes that it added."""

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to be told, and nothing waits."""
        return not self._waiting and not self.is_to_tell

    @property
    def is_to_tell(self) -> bool:
        """Whether something is to be told."""
        return bool(self._skips or self._wishes)

    @property
    def may_be_wanted(self) -> bool:
        """Whether another rank may yet make durable what this one has in memory only, or has on disk alone."""
        return bool(self._unwritten or self._half)

    def is_half(self, uid: str) -> bool:
        """Whether this rank's part of a state is on disk, and that of another is not, as far as is known."""
        return uid in self._half

    def await_durable(self, uid: str, added: int) -> None:
        """This rank's part is on disk, the state is not durable."""
        self._half[uid] = added

    def __len__(self) -> int:
        """How many states wait for parts of others, or to be told of."""
        return len(self._waiting) + len(self._skips)

    def __contains__(self, uid: str) -> bool:
        """Whether a part was told, and is waited for."""
        return uid in self._waiting

    def skip(self, skip: Skip) -> None:
        """This rank has no part of a state; told with the next transaction."""
        self._skips[skip.facts.uid] = skip

    def want(self, uid: str) -> None:
        """This rank makes its part of a state durable: so are the others to do, which are told with the next transaction."""
        rank = self._unwritten.pop(uid, None)
        if rank is not None:  # else it was another one that began
            self._wishes[uid] = rank

    def leave(self, uids: Iterable[str]) -> None:
        """These states are not in memory only any more."""
        for uid in uids:
            self._unwritten.pop(uid, None)

    def entry(self, uid: str) -> Entry:
        """What was told of a part that is waited for."""
        return self._waiting[uid][0]

    # --- in a transaction ---------------------------------------------------------------------------------------------------

    def tell(self, session: Session, entries: Sequence[Entry] = ()) -> Heard:
        """Tell these parts, and of all that was skipped; what became of them, and of those told earlier."""
        if entries:
            record_parts(session, [_telling(entry) for entry in entries])
        skips = list(self._skips.values())
        for skip in skips:
            skip_part(session, skip.facts, rank=skip.rank, why=skip.why, reason=skip.reason)
        told = {entry.new.uid: entry for entry, _ in self._waiting.values()} | {entry.new.uid: entry for entry in entries}
        found, forgotten = outcomes(session, {uid: _rank(entry) for uid, entry in told.items()})
        if forgotten:
            record_parts(session, [_telling(told[uid]) for uid in forgotten])
            found, _ = outcomes(session, {uid: _rank(entry) for uid, entry in told.items()})
        wishes = dict(self._wishes)
        for rank in set(wishes.values()):
            want_parts(session, [uid for uid, of in wishes.items() if of == rank], rank=rank)
        wanted, statuses = tuple(wanted_parts(session, self._newest())), self._statuses(session)
        return Heard(found, tuple(skip.facts.uid for skip in skips), wanted, tuple(wishes), statuses)

    def ask(self, session: Session) -> tuple[Heard, bool]:
        """What became of the parts that wait, without telling anything; and whether some are unknown there, and must be told again."""
        found, forgotten = outcomes(session, {uid: _rank(entry) for uid, (entry, _) in self._waiting.items()})
        wanted, statuses = tuple(wanted_parts(session, self._newest())), self._statuses(session)
        return Heard(found, wanted=wanted, statuses=statuses), bool(forgotten)

    def give_up_late(self, session: Session, patience_s: float) -> list[str]:
        """Give up what has waited for longer; which."""
        late = self.late(patience_s)
        if late:
            give_up(session, late, why=Why.LATE, reason=f"it told no part within {patience_s:g} s")
        return late

    def late(self, patience_s: float) -> list[str]:
        """The states that have waited for longer."""
        before = time.monotonic() - patience_s
        return [uid for uid, (_, since) in self._waiting.items() if since <= before]

    # --- once it is committed -----------------------------------------------------------------------------------------------

    def begin(self, entries: Iterable[Entry]) -> None:
        """These parts were told: they are waited for."""
        now = time.monotonic()
        for entry in entries:
            self._waiting.setdefault(entry.new.uid, (entry, now))

    def become_whole(self, uid: str) -> None:
        """A state is whole: from now on some rank may make it durable."""
        self._unwritten.setdefault(uid, _rank(self._waiting[uid][0]))

    def end(self, uid: str) -> None:
        """A state waits no longer."""
        self._waiting.pop(uid, None)

    def heed(self, heard: Heard) -> list[str]:
        """Of this it was told. The states that others make durable, and this one does not yet."""
        for uid in heard.skips:
            self._skips.pop(uid, None)
        for uid in heard.wishes:
            self._wishes.pop(uid, None)
        return [uid for uid in heard.wanted if self._unwritten.pop(uid, None) is not None]

    def settled(self, heard: Heard) -> list[tuple[str, int, bool]]:
        """The states that wait no longer for the disks of others: with the bytes that this rank added, and whether they are durable."""
        found = []
        for uid, status in heard.statuses.items():
            if status is not Status.CAPTURED and uid in self._half:
                found.append((uid, self._half.pop(uid), status.is_restorable))
        return found

    def _statuses(self, session: Session) -> dict[str, Status]:
        return statuses_of(session, list(self._half)[-_MOST_ASKED:])

    def _newest(self) -> list[str]:
        return list(self._unwritten)[-_MOST_ASKED:]


def _telling(entry: Entry) -> Telling:
    return Telling(entry.new, _rank(entry), entry.reduce)


def _rank(entry: Entry) -> int:
    assert entry.rank is not None, "it is a part"
    return entry.rank
