"""Reports of this process about states of several parts: its parts, the states that it waits for,
and the states of which it has no part.

``Report`` is what one transaction sends, and ``Reply`` its result. ``PendingParts`` keeps what
waits.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from datastates.lineage.database import Database, retry_conflicts
from datastates.lineage.lookup import state
from datastates.lineage.query.incomplete import Outcome, outcomes, ranks_text, statuses_of, waiting
from datastates.lineage.query.names import replicas_of
from datastates.lineage.schema import from_us
from datastates.lineage.states import Edge, EdgeKind, NewState, StateFacts, Status, Why
from datastates.lineage.write.parts import (
    PartReport,
    give_up,
    record_parts,
    skip_part,
    want_parts,
    wanted_parts,
)
from datastates.lineage.write.record import FIRST, Reduce
from datastates.lineage.write.replicas import Mark, evict, mark_all
from datastates.state.manifest import Manifest, root_digest

if TYPE_CHECKING:
    from datastates.lineage.session import Session


@dataclass(frozen=True, slots=True)
class Skip:
    """A state of which this rank has no part, and why."""

    facts: StateFacts
    rank: int
    why: Why
    reason: str


@dataclass(frozen=True, slots=True)
class Report:
    """What one process sends to the lineage and queries in one transaction.

    It sends its parts, the parts that it lacks, what waited longer than ``patience_s``, which
    states it makes durable, what a tier holds, and what left the memory of ``holder`` in ``tier``.
    Durable states are given by uid, as which rank. Those that are ``near`` stay off further tiers.

    It queries the results of states (by uid, of its part of that rank), which of them other ranks
    make ``wanted``, and how safe other ranks' parts are. ``is_durable``: it has to survive the
    database's own end.
    """

    parts: tuple[PartReport, ...] = ()
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
        """Whether it only queries, and sends nothing."""
        return not (
            self.parts or self.skips or self.late or self.wishes or self.marks or self.evicted
        )


@dataclass(frozen=True, slots=True)
class Reply:
    """The result of a transaction for one process, used once it is committed.

    It has the results of states, which of its parts the lineage does not have, how safe states are,
    and those that were marked. It also has which states other ranks make durable, and whether they
    keep them off further tiers.
    """

    outcomes: dict[str, Outcome] = field(default_factory=dict)
    forgotten: tuple[str, ...] = ()
    wanted: dict[str, bool] = field(default_factory=dict)
    statuses: dict[str, Status] = field(default_factory=dict)
    marked: dict[str, Status] = field(default_factory=dict)


def tell(session: Session, said: Report) -> Reply:
    """Record what this process sends, and return the results, in this transaction."""
    if said.parts:
        record_parts(session, said.parts)
    for skip in said.skips:
        skip_part(session, skip.facts, rank=skip.rank, why=skip.why, reason=skip.reason)
    if said.late:
        give_up(
            session, said.late, why=Why.LATE, reason=f"it told no part within {said.patience_s:g} s"
        )
    wishes = [(rank, uid in said.near, uid) for uid, rank in said.wishes.items()]
    for rank, is_near in sorted({(rank, is_near) for rank, is_near, _ in wishes}):
        want_parts(
            session,
            [uid for of, near, uid in wishes if (of, near) == (rank, is_near)],
            rank=rank,
            is_near=is_near,
        )
    marked = mark_all(session, said.marks)
    if said.evicted:
        evict(session, said.evicted, tier=said.tier, node=said.holder)
    found, forgotten = outcomes(session, said.asked)
    wanted = wanted_parts(session, said.wanted)
    return Reply(
        found,
        tuple(forgotten),
        {uid: wanted[uid] for uid in said.wanted if uid in wanted},
        statuses_of(session, said.halves),
        {one.uid: marked[one.uid, one.rank] for one in said.marks},
    )


@retry_conflicts
def report(database: Database, said: Report) -> Reply:
    """Record this now, in a separate transaction, and return the results.

    :raises Unavailable: the database is away, or other transactions are in the way again and again.
    :raises DatastatesError: (another) the lineage refuses it, and nothing was recorded.
    """
    if said.is_question:
        with database.read() as session:
            return tell(session, said)
    with database.write(durable=said.is_durable) as session:
        return tell(session, said)


# --- PendingRecord: a state to be recorded ---


_UID = re.compile("[0-9a-f]{24}")


@dataclass(frozen=True, slots=True)
class PendingRecord:
    """A state to be recorded, and the tip of its line before it: its uid and digest.

    ``rank`` is the part of several that it is, ``reduce`` how the metrics of all parts are
    combined, ``form`` what all parts have in common. If ``rank`` is None, it is the whole state.
    """

    new: NewState
    before: tuple[str, str] | None
    rank: int | None = None
    reduce: Reduce = FIRST
    form: str = ""


def states_of(manifests: Mapping[tuple[str, int], Manifest]) -> Iterable[NewState]:
    """Every state of which all parts are here; the code that finds its bytes marks it later."""
    for (uid, rank), first in manifests.items():
        size = first.origin.world_size
        parts = (
            [manifests[uid, each] for each in range(size) if (uid, each) in manifests]
            if rank == 0
            else []
        )
        if len(parts) != size or not _UID.fullmatch(uid):
            continue
        origin = first.origin
        total = sum(chunk.length for part in parts for chunk in part.content.chunks)
        try:
            created_at = from_us(origin.created_at_us)
        except OverflowError:  # no version of ours wrote that
            continue
        facts = StateFacts(
            uid=uid,
            parent=origin.parents[0] if origin.parents else None,
            branch=origin.branch,
            run=origin.run,
            step=origin.step,
            micro_step=origin.micro_step,
            metrics=origin.metrics,
            attributes=origin.attributes,
            message=origin.message,
            created_at=created_at,
            edges=tuple(Edge(parent, EdgeKind.MERGE, 1.0) for parent in origin.parents[1:]),
            world_size=size,
        )
        digest = root_digest([part.digest for part in parts], origin.parent_digests)
        yield NewState(facts, digest, Status.EVICTED, bytes_total=total)


# --- PendingParts that wait ---


_MOST_ASKED = 100
"""The number of newest states that are queried for whether other ranks make them durable."""


class PendingParts:
    """The parts of an outbox, which calls this in its turn; only ``skip`` may be called at any
    time, and never waits."""

    def __init__(self) -> None:
        self._waiting: dict[str, tuple[PendingRecord, float]] = {}
        self._skips: dict[str, Skip] = {}
        self._unwritten: dict[str, int] = {}
        self._wishes: dict[str, int] = {}
        self._near: dict[str, int] = {}
        """The states that stay off further tiers, here and on all other ranks, until a rank passes
        them on."""
        self._half: dict[str, int] = {}
        """The states of which this rank's part is on disk, and other ranks' parts are not yet, with
        the bytes that this part added."""

    @property
    def is_idle(self) -> bool:
        """Whether nothing has to be recorded, and nothing waits."""
        return not self._waiting and not self.has_reports

    @property
    def has_reports(self) -> bool:
        """Whether something has to be recorded."""
        return bool(self._skips or self._wishes)

    @property
    def is_awaiting(self) -> bool:
        """Whether a part waits for other ranks' parts to be recorded, or to be on their disks."""
        return bool(self._waiting or self._half)

    @property
    def may_be_wanted(self) -> bool:
        """Whether another rank may yet make durable a state that this rank has in memory only,
        has alone on disk, or keeps near."""
        return bool(self._unwritten or self._half or self._near)

    def is_half(self, uid: str) -> bool:
        """Whether this rank's part of a state is on disk, and another rank's part is not, as far as
        is known."""
        return uid in self._half

    def await_durable(self, uid: str, added: int) -> None:
        """Note that this rank's part is on disk, and the state is not durable yet."""
        self._half[uid] = added

    def __len__(self) -> int:
        """How many states wait for parts of others, or to be recorded."""
        return len(self._waiting) + len(self._skips)

    def __contains__(self, uid: str) -> bool:
        """Whether a part was recorded, and waits."""
        return uid in self._waiting

    def skip(self, skip: Skip) -> None:
        """Note that this rank has no part of a state. It is recorded with the next transaction."""
        self._skips[skip.facts.uid] = skip

    def want(self, uid: str, *, is_near: bool = False) -> None:
        """Note that this rank makes its part of a state durable. The next transaction requests the
        same from all other ranks.

        ``is_near``: it also keeps the part off further tiers.
        """
        rank = self._unwritten.pop(uid, None)
        if rank is not None:  # else another rank began
            self._wishes[uid] = rank
            if is_near:
                self._near[uid] = rank

    def pass_on(self, uid: str) -> None:
        """Note that a state that was kept near is put onto further tiers, with the parts of all
        other ranks."""
        rank = self._near.pop(uid, None)
        if rank is not None:
            self._wishes[uid] = rank

    def leave(self, uids: Iterable[str]) -> None:
        """Note that these states are no longer in memory only."""
        for uid in uids:
            self._unwritten.pop(uid, None)

    def entry(self, uid: str) -> PendingRecord:
        """The recorded entry of a part that waits."""
        return self._waiting[uid][0]

    def missing(self, session: Session, uid: str, tier: str) -> str | None:
        """What a state still waits for from other ranks, in words: their parts, or that these
        reach the ``tier``, the ranks' disks."""
        if uid in self._waiting:
            return next((str(each) for each in waiting(session, [uid])), None)
        if uid not in self._half:
            return None
        size, there = (
            state(session, uid).world_size,
            {one.rank for one in replicas_of(session, uid) if one.tier == tier},
        )
        late = ranks_text(sorted(set(range(size)) - there))
        return (
            f"the parts of rank {late} of {size} are not on the disks of their ranks, whose logs"
            " may say why"
            if late
            else None
        )

    # --- what is sent ---

    def said(
        self,
        entries: Sequence[PendingRecord] = (),
        *,
        late: Sequence[str] = (),
        patience_s: float | None = None,
    ) -> Report:
        """The records to send in addition to these parts, and the queries."""
        told = {entry.new.uid: entry for entry, _ in self._waiting.values()} | {
            entry.new.uid: entry for entry in entries
        }
        return Report(
            parts=tuple(
                PartReport(entry.new, _rank(entry), entry.reduce, entry.form) for entry in entries
            ),
            skips=tuple(self._skips.values()),
            late=tuple(late),
            patience_s=patience_s or 0.0,
            wishes=dict(self._wishes),
            near=frozenset(uid for uid in self._wishes if uid in self._near),
            asked={uid: _rank(entry) for uid, entry in told.items()},
            wanted=(*list(self._unwritten)[-_MOST_ASKED:], *list(self._near)[-_MOST_ASKED:]),
            halves=tuple(list(self._half)[-_MOST_ASKED:]),
        )

    def late(self, patience_s: float) -> list[str]:
        """The states that have waited for longer than ``patience_s``."""
        before = time.monotonic() - patience_s
        return [uid for uid, (_, since) in self._waiting.items() if since <= before]

    # --- once it is committed ---------------------------------------------------------------------

    def begin(self, entries: Iterable[PendingRecord]) -> None:
        """Note that these parts were recorded: they wait now."""
        now = time.monotonic()
        for entry in entries:
            self._waiting.setdefault(entry.new.uid, (entry, now))

    def become_whole(self, uid: str) -> None:
        """Note that a state is whole: from now on any rank may make it durable."""
        self._unwritten.setdefault(uid, _rank(self._waiting[uid][0]))

    def end(self, uid: str) -> None:
        """Note that a state waits no longer."""
        self._waiting.pop(uid, None)

    def apply_reply(self, said: Report, heard: Reply) -> dict[str, bool]:
        """Process the results of a transaction. Returns the states that others make durable, or put
        onto further tiers, and this rank does not yet, and whether they must stay near."""
        for skip in said.skips:
            self._skips.pop(skip.facts.uid, None)
        for uid in said.wishes:
            if (uid in said.near) == (uid in self._near):
                # else it was passed on meanwhile, which has to be recorded
                self._wishes.pop(uid, None)
        wanted: dict[str, bool] = {}
        for uid, is_near in heard.wanted.items():
            rank = self._unwritten.pop(uid, None)
            if rank is not None and is_near:
                self._near[uid] = rank
            if rank is not None or (not is_near and self._near.pop(uid, None) is not None):
                wanted[uid] = is_near
        return wanted

    def settled(self, heard: Reply) -> list[tuple[str, int, bool]]:
        """The states that no longer wait for the disks of others, with the bytes that this rank
        added, and whether they are durable."""
        found = []
        for uid, status in heard.statuses.items():
            if status is not Status.CAPTURED and uid in self._half:
                found.append((uid, self._half.pop(uid), status.is_restorable))
        return found


def _rank(entry: PendingRecord) -> int:
    assert entry.rank is not None, "it is a part"
    return entry.rank
