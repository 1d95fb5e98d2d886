"""What a rank tells the lineage of its parts, and what it hears: alone, or through one process that tells for all processes of its node.

Each capture of N ranks is told N times, and all news of one branch takes turns in the database. So the processes of a node hand their news
to one of them (``transport/session/desk``), which tells all of it in one transaction.

Rules:
- Telling is idempotent: a process that does not hear that its news was told tells it again, alone.
- News that nobody waits for any more is not told here: by then its rank tells it alone, and what that rank tells later comes after it.
- Errors in news that is told together are not examined here: each rank then tells alone, and hears its own error.
- News that has to survive the database's own end has a separate transaction, whose commit waits for the disk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from datastates.errors import DatastatesError, Disconnected
from datastates.lineage.change.parts import Telling, give_up, record_parts, skip_part, want_parts, wanted_parts
from datastates.lineage.change.replicas import Mark, evict, mark_all
from datastates.lineage.database import Database, undeterred
from datastates.lineage.search.outcomes import Outcome, outcomes_of, statuses_of
from datastates.lineage.states import StateFacts, Status, Why
from datastates.system.deeds import deed
from datastates.transport.session.desk import MOST_BYTES, Asked, Caller, Desk, Place

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

__all__ = ["Heard", "Mark", "Said", "Skip", "Teller", "tell"]


@dataclass(frozen=True, slots=True)
class Skip:
    """A state of which this rank has no part, and why."""

    facts: StateFacts
    rank: int
    why: Why
    reason: str


@dataclass(frozen=True, slots=True)
class Said:
    """What one process has to tell and to ask.

    It tells its parts, the parts that it lacks, what waited longer than ``patience_s``, which states it makes durable (by uid, as which
    rank; those that are ``near`` stay off further tiers), what a tier holds, and what left the memory of ``holder`` in ``tier``. It asks
    for the fate of states (by uid, of its part of that rank), which of them others make ``wanted``, and how safe others are.
    ``is_durable``: it has to survive the database's own end.
    """

    parts: tuple[Telling, ...] = ()
    skips: tuple[Skip, ...] = ()
    late: tuple[str, ...] = ()
    patience_s: float = 0.0
    wishes: dict[str, int] = field(default_factory=dict)
    near: frozenset[str] = frozenset()
    marks: tuple[Mark, ...] = ()
    evicted: tuple[str, ...] = ()
    tier: str = ""
    holder: str = ""
    asked: dict[str, int] = field(default_factory=dict)
    wanted: tuple[str, ...] = ()
    halves: tuple[str, ...] = ()
    is_durable: bool = False

    @property
    def is_question(self) -> bool:
        """Whether it only asks, and tells nothing."""
        return not (self.parts or self.skips or self.late or self.wishes or self.marks or self.evicted)


@dataclass(frozen=True, slots=True)
class Heard:
    """What a transaction said to one process: the fate of states, which of its parts the lineage does not know, which states others
    make durable (``near``: and keep off further tiers), how safe states are, and those that were marked. Acted on once it is committed.
    """

    outcomes: dict[str, Outcome] = field(default_factory=dict)
    forgotten: tuple[str, ...] = ()
    wanted: tuple[str, ...] = ()
    near: frozenset[str] = frozenset()
    statuses: dict[str, Status] = field(default_factory=dict)
    marked: dict[str, Status] = field(default_factory=dict)


def tell(session: Session, told: Sequence[Said]) -> list[Heard]:
    """Tell what several processes have to tell, and answer each, in this transaction."""
    parts = [part for each in told for part in each.parts]
    if parts:
        record_parts(session, parts)
    for skip in (skip for each in told for skip in each.skips):
        skip_part(session, skip.facts, rank=skip.rank, why=skip.why, reason=skip.reason)
    for patience_s in sorted({each.patience_s for each in told if each.late}):
        late = {uid for each in told if each.patience_s == patience_s for uid in each.late}
        give_up(session, late, why=Why.LATE, reason=f"it told no part within {patience_s:g} s")
    wishes = [(rank, uid in each.near, uid) for each in told for uid, rank in each.wishes.items()]
    for rank, is_near in sorted({(rank, is_near) for rank, is_near, _ in wishes}):
        want_parts(session, [uid for of, near, uid in wishes if (of, near) == (rank, is_near)], rank=rank, is_near=is_near)
    marked = mark_all(session, [one for each in told for one in each.marks])
    for tier, holder in sorted({(each.tier, each.holder) for each in told if each.evicted}):
        left = [uid for each in told if (each.tier, each.holder) == (tier, holder) for uid in each.evicted]
        evict(session, left, tier=tier, node=holder)
    found, unknown = outcomes_of(session, [pair for each in told for pair in each.asked.items()])
    forgotten = set(unknown)
    wanted = wanted_parts(session, {uid for each in told for uid in each.wanted})
    statuses = statuses_of(session, list({uid: None for each in told for uid in each.halves}))
    return [
        Heard(
            {uid: found[uid] for uid in each.asked if uid in found},
            tuple(uid for uid, rank in each.asked.items() if (uid, rank) in forgotten),
            tuple(uid for uid in each.wanted if uid in wanted),
            frozenset(uid for uid in each.wanted if wanted.get(uid)),
            {uid: statuses[uid] for uid in each.halves if uid in statuses},
            {one.uid: marked[one.uid, one.rank] for one in each.marks},
        )
        for each in told
    ]


class Teller:
    """Tells the lineage what this process has to tell and, if it is the first of its node, what the other processes there have to tell.

    One thread at a time calls it; a thread of the desk tells what others hand in.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._desk: Desk | None = None
        self._caller: Caller | None = None

    def join(self, place: Place, *, seats: int, is_first: bool) -> None:
        """Tell through the desk at ``place`` from now on. This process keeps the desk if it ``is_first`` of the ``seats`` of its node."""
        self.leave()
        if is_first:
            self._desk = Desk(place, self._tell_all, seats=seats)
            self._desk.open()
        self._caller = Caller(place)

    def leave(self) -> None:
        """Tell alone from now on, and for no other process; idempotent."""
        caller, self._caller = self._caller, None
        if caller is not None:
            caller.close()
        desk, self._desk = self._desk, None
        if desk is not None:
            desk.close()

    @undeterred
    def tell(self, said: Said) -> Heard:
        """Tell this now, and hear what is known then.

        :raises Unavailable: the database is away, or other transactions are in the way again and again.
        :raises DatastatesError: (another) the lineage refuses it; nothing was told.
        """
        heard = None if self._caller is None else self._hand_in(self._caller, said)
        if heard is None:
            (heard,) = self._transact([said])
        return heard

    def _hand_in(self, caller: Caller, said: Said) -> Heard | None:
        """The answer of the desk; None if this process has to tell the news alone."""
        try:
            handed = msgspec.msgpack.encode(said)
        except (OverflowError, UnicodeEncodeError):  # the lineage itself decides what it takes or refuses
            return None
        if len(handed) > MOST_BYTES:
            return None
        try:
            with deed("handing in what is to be told to another process of this node"):
                answer = caller.ask(handed)
        except Disconnected:
            return None
        return msgspec.msgpack.decode(answer, type=Heard) if answer else None

    def _tell_all(self, asked: Sequence[Asked]) -> list[bytes]:
        """Answer on the desk's thread: answers to those that could be told together, and empty ones to the others."""
        answers: dict[Asked, bytes] = {}
        said = {each: msgspec.msgpack.decode(each.said, type=Said) for each in asked}
        for is_durable in (False, True):
            batch = [each for each in asked if said[each].is_durable is is_durable and each.is_awaited]
            try:
                heard = self._transact([said[each] for each in batch], batch) if batch else []
            except (DatastatesError, _Unwanted):
                continue
            answers |= {each: msgspec.msgpack.encode(one) for each, one in zip(batch, heard, strict=True)}
        return [answers.get(each, b"") for each in asked]

    def _transact(self, said: Sequence[Said], asked: Sequence[Asked] = ()) -> list[Heard]:
        if all(each.is_question for each in said):
            with self._database.read() as session:
                return tell(session, said)
        with self._database.write(durable=any(each.is_durable for each in said)) as session:
            heard = tell(session, said)
            if not all(each.is_awaited for each in asked):  # what changes here is locked: news that a rank tells alone comes after it
                raise _Unwanted
            return heard


class _Unwanted(Exception):  # it is no error, and seen here only
    """Raised when a process that handed news in was turned away."""
