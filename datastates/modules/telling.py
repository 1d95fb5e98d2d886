"""What this process reports to the lineage of its parts of states, and what it hears: one value each way, in one transaction.

Rules:
- Reporting is idempotent: a process that does not hear that its report was committed reports again.
- A report that has to survive the database's own end has a separate transaction, whose commit waits for the disk.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from datastates.lineage.change.parts import Telling, give_up, record_parts, skip_part, want_parts, wanted_parts
from datastates.lineage.change.replicas import Mark, evict, mark_all
from datastates.lineage.database import Database, undeterred
from datastates.lineage.search.outcomes import Outcome, outcomes, statuses_of
from datastates.lineage.states import StateFacts, Status, Why

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

__all__ = ["Heard", "Mark", "Said", "Skip", "report", "tell"]


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
    make durable (and whether they keep them off further tiers), how safe states are, and those that were marked. Acted on once it is
    committed.
    """

    outcomes: dict[str, Outcome] = field(default_factory=dict)
    forgotten: tuple[str, ...] = ()
    wanted: dict[str, bool] = field(default_factory=dict)
    statuses: dict[str, Status] = field(default_factory=dict)
    marked: dict[str, Status] = field(default_factory=dict)


def tell(session: Session, said: Said) -> Heard:
    """Tell what this process has to tell, and answer it, in this transaction."""
    if said.parts:
        record_parts(session, said.parts)
    for skip in said.skips:
        skip_part(session, skip.facts, rank=skip.rank, why=skip.why, reason=skip.reason)
    if said.late:
        give_up(session, said.late, why=Why.LATE, reason=f"it told no part within {said.patience_s:g} s")
    wishes = [(rank, uid in said.near, uid) for uid, rank in said.wishes.items()]
    for rank, is_near in sorted({(rank, is_near) for rank, is_near, _ in wishes}):
        want_parts(session, [uid for of, near, uid in wishes if (of, near) == (rank, is_near)], rank=rank, is_near=is_near)
    marked = mark_all(session, said.marks)
    if said.evicted:
        evict(session, said.evicted, tier=said.tier, node=said.holder)
    found, forgotten = outcomes(session, said.asked)
    wanted = wanted_parts(session, said.wanted)
    return Heard(
        found,
        tuple(forgotten),
        {uid: wanted[uid] for uid in said.wanted if uid in wanted},
        statuses_of(session, said.halves),
        {one.uid: marked[one.uid, one.rank] for one in said.marks},
    )


@undeterred
def report(database: Database, said: Said) -> Heard:
    """Tell this now, in a transaction of its own, and hear what is known then.

    :raises Unavailable: the database is away, or other transactions are in the way again and again.
    :raises DatastatesError: (another) the lineage refuses it; nothing was told.
    """
    if said.is_question:
        with database.read() as session:
            return tell(session, said)
    with database.write(durable=said.is_durable) as session:
        return tell(session, said)
