"""Ordered outbox for lineage writes: it buffers while the database is down, and records again what
the database lost.

Captures do not wait for the disk of a PostgreSQL server. A server that is killed therefore loses
the commits of its last moments. A server that is restarted, or cut off, does not respond for a
while. Neither affects the training: states are in memory, and so are their records.

Rules:

- States are recorded in the order in which they were captured, a parent before its child. Records
  about a state's disk, and of its leaving memory, come after the state itself.
- While the database is away, records wait. The database is tried once a second. A line of the log
  reports this, and another one when the database is back.
- Committed records are kept as long as the state is in memory, and until a later commit survives
  the server. The last 10,000 states are kept longer, because the database may be replaced by an
  older copy.
- If the database lacks something, all kept records that it lacks are recorded again, in order.
  Ancestors that this process does not keep are recorded from their manifests.
- A state whose branch another process moved meanwhile is recorded without its branch. It exists
  under its uid.
- Parts of states are recorded in the same way. The result of the whole state comes back with the
  next transaction, or with a query (``rank_reports``). Until then the part waits.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from datastates.errors import Conflict, DatastatesError, NotFound, Unavailable
from datastates.lineage import lookup
from datastates.lineage.database import Database, retry_conflicts
from datastates.lineage.query.incomplete import Outcome, outcomes
from datastates.lineage.query.names import reflog, refs
from datastates.lineage.schema import to_us
from datastates.lineage.states import GivenUp, Run, State, Status, Why
from datastates.lineage.views.text import plural
from datastates.lineage.write import clones, parts, replicas, runs
from datastates.lineage.write import record as lineage_record
from datastates.lineage.write import refs as lineage_refs
from datastates.lineage.write.replicas import Mark, held
from datastates.storage.local import LocalTier
from datastates.storage.tier import Placed
from datastates.storage.tiers import CAPTURED
from datastates.system.interrupts import Mutex
from datastates.system.logs import event

from .rank_reports import PendingParts, PendingRecord, Reply, Report, Skip, report, states_of, tell

if TYPE_CHECKING:
    from datastates.lineage.session import Session

_MOST_GONE = 1000
"""The most states that left memory and are kept only because no later commit was durable; then
the next commit is made durable."""


class Evictions:
    """The uids of states that left memory.

    ``add`` and ``in`` are safe from any thread and never wait. The other methods need the outbox's
    turn.
    """

    def __init__(self) -> None:
        self._unrecorded: list[str] = []
        self._gone: list[str] = []
        self._changing = Mutex()

    def __contains__(self, uid: str) -> bool:
        """Whether a state left memory, and that was not recorded yet."""
        return uid in self._unrecorded

    def add(self, uids: Iterable[str]) -> None:
        """Note that these states left memory."""
        with self._changing:
            self._unrecorded += uids

    def unrecorded(self, is_due: Callable[[str], bool] = lambda uid: True) -> list[str]:
        """The states that left memory and are not recorded as such, in order."""
        with self._changing:
            return [uid for uid in self._unrecorded if is_due(uid)]

    def note(self, told: Collection[str]) -> None:
        """Note that these were recorded. A server that is killed may lose it."""
        if told:
            done = frozenset(told)
            self.keep(lambda uid: uid not in done)
            self._gone += told

    def keep(self, is_kept: Callable[[str], bool]) -> bool:
        """Keep only these of the states that have to be recorded. Returns whether others were
        dropped."""
        with self._changing:
            kept = [uid for uid in self._unrecorded if is_kept(uid)]
            is_less, self._unrecorded = len(kept) < len(self._unrecorded), kept
        return is_less

    @property
    def gone(self) -> list[str]:
        """The states that were recorded, and may still be lost."""
        return list(self._gone)

    @property
    def is_crowded(self) -> bool:
        """Whether so many may still be forgotten that the next commit has to survive the server."""
        return len(self._gone) >= _MOST_GONE

    def settle(self) -> list[str]:
        """Note that a commit survives the server, and with it all earlier records. Returns the uids
        that need not be kept any more."""
        gone, self._gone = self._gone, []
        return gone


# --- Outbox ---


_logger = logging.getLogger(__name__)
_T = TypeVar("_T")

PATIENCE_S = 60.0
"""How long, in seconds, the database may be away before waiting callers get an error."""

_MOST_WAITING = 10_000
"""The most states that wait to be recorded, and that are kept after they were recorded and left
memory."""


@dataclass(frozen=True, slots=True)
class Listener:
    """The callbacks of an outbox. They run on the thread that wrote to the lineage, which may be
    any.

    They are called when the lineage has a state (with the reason why its branch did not move, if it
    was recorded late), when it has its replica on disk (with the bytes added there), and when it
    refuses either.

    For a part, they are called when its state is whole or given up, and when another rank makes the
    state durable (and whether that rank keeps it off further tiers), or has lost its part before.
    """

    recorded: Callable[[PendingRecord, State, Conflict | None], None]
    durable: Callable[[str, int], None]
    failed: Callable[[str, Exception, PendingRecord | None], None]
    whole: Callable[[PendingRecord, Outcome], None]
    given_up: Callable[[PendingRecord, GivenUp], None]
    wanted: Callable[[str, bool], None]
    lost: Callable[[str], None]


class Outbox:
    """Records states in the lineage. There is one for each process and repository.

    Every method is safe from any thread, and ``evict`` never waits.
    """

    def __init__(
        self,
        *,
        database: Database,
        local: LocalTier,
        run: Run,
        folder: str,
        holder: str,
        listener: Listener,
    ) -> None:
        self._database, self._local, self._runs, self._folder, self._holder = (
            database,
            local,
            [run],
            folder,
            holder,
        )
        self._listener = listener
        self._turn = Mutex()
        """Held during a transaction, so that records stay in order. Never taken under another
        lock."""
        self._waiting: dict[str, PendingRecord] = {}
        self._marks: dict[str, Sequence[Placed]] = {}
        self._recorded: dict[str, PendingRecord] = {}
        self._past: deque[PendingRecord] = deque(maxlen=_MOST_WAITING)
        self._parts = PendingParts()
        self._evicted = Evictions()
        self._near: set[str] = set()
        self._away_since: float | None = None
        self._why = ""
        self.report: Callable[[Report], Reply] = partial(report, database)
        """Records a report; the reports of all ranks of a node may go together."""
        self.on_half: Callable[[], None] = lambda: None
        """Called when a part of this process is on its disk, and other ranks' parts are not on
        their disks yet. It runs on any thread."""

    @property
    def pending(self) -> int:
        """States and replicas that wait to be recorded, and states that wait for parts of other
        ranks."""
        return len(self._waiting) + len(self._marks) + len(self._parts)

    def is_pending(self, uid: str) -> bool:
        """Whether a record of this state waits to be written, or the state waits for parts of other
        ranks."""
        return (
            uid in self._waiting
            or uid in self._marks
            or uid in self._parts
            or self._parts.is_half(uid)
        )

    def overdue(self) -> Unavailable | None:
        """The error for waiting callers, once the database has been away for too long."""
        since = self._away_since
        if since is None or time.monotonic() - since < PATIENCE_S:
            return None
        waiting = [entry.new.facts for entry in list(self._waiting.values())]
        steps = ", ".join(
            f"{facts.branch} step {facts.step} ({facts.uid[:10]})" for facts in waiting[-5:]
        )
        what = (
            f"{plural(len(waiting), 'state')} wait{'s' * (len(waiting) == 1)} to be recorded, the"
            f" last of them {steps}"
            if waiting
            else "nothing waits to be recorded"
        )
        return Unavailable(
            f"the lineage does not answer since {time.monotonic() - since:.0f} s ({self._why});"
            f" {what}",
            trouble="lineage",
        )

    # --- recording ---

    def record(self, entries: Sequence[PendingRecord]) -> dict[str, Exception]:
        """Record states in one go, now or when the database is back. Returns, by uid, why some of
        them were refused.

        States that depend on a refused one are refused with it. An absent database is no reason to
        refuse, unless it has been away for so long that no more states can wait.
        """
        with self._turn:
            told, refused = self._record(entries)
        for entry in entries:
            if (state := told.get(entry.new.uid)) is not None:
                self._listener.recorded(entry, state, None)
        return refused

    def find(self, uid: str) -> State | None:
        """A state in this process's memory, as the lineage has it.

        :raises Unavailable: the database is away.
        """
        with self._database.read() as session:
            is_held = uid in held(session, [uid], tier=CAPTURED, node=self._holder)
            return lookup.state(session, uid) if is_held else None

    def conclude(self, entry: PendingRecord) -> bool:
        """After an error while a state was recorded: whether the lineage has the state (the
        listener is then called), or it waits.

        :raises DatastatesError: the lineage gives no result, for another reason than that the
            database is away.
        """
        uid = entry.new.uid
        if entry.rank is not None:
            return self._conclude_part(entry, entry.rank)
        with self._turn:
            state = None
            try:
                if self._away_since is None and uid not in self._waiting:
                    state = self.find(uid)
                    if state is None:
                        return False
                    self._recorded[uid] = entry
            except Unavailable as error:
                self._note_away(error)
            if state is None:
                self._wait(entry)
                return True
        self._listener.recorded(entry, state, None)
        return True

    def _conclude_part(self, entry: PendingRecord, rank: int) -> bool:
        """``conclude`` for a part: whether it was recorded."""
        uid = entry.new.uid
        with self._turn:
            if uid in self._parts or uid in self._recorded or uid in self._waiting:
                return True
            try:
                if self._away_since is None:
                    with self._database.read() as session:
                        _, unknown = outcomes(session, {uid: rank})
                    if not unknown:
                        self._parts.begin([entry])
                    return not unknown
            except Unavailable as error:
                self._note_away(error)
            self._wait(entry)
            return True

    def mark(self, placed: Mapping[str, Sequence[Placed]], near: Collection[str] = ()) -> None:
        """Note that states are on this node's disk, with the parts that this process had. They are
        recorded in one transaction. A policy keeps those that are ``near`` off further tiers.

        :raises NotFound: neither the lineage nor this process has one of the states. Any other
            error of the lineage is raised too, except that the database is away.
        """
        with self._turn:
            self._marks.update(placed)
            self._near.update(near)
            if self._away_since is not None:
                return
            try:
                self._with_recall(partial(self._send_marks, placed))
            except Unavailable as error:
                self._note_away(error)
                return
            except BaseException:
                for uid in placed:
                    self._marks.pop(uid, None)
                raise
        for uid, each in placed.items():
            self._report_durable(uid, each)

    # --- states of several parts ------------------------------------------------------------------

    def skip(self, skip: Skip) -> None:
        """Note that this rank has no part of a state. It is recorded with the next transaction, or
        by ``ask``. This call does not wait."""
        self._parts.skip(skip)

    @property
    def is_waiting_for_parts(self) -> bool:
        """Whether a recorded part waits for other ranks' parts, or a missing part of this rank is
        still to be recorded."""
        return not self._parts.is_idle

    @property
    def is_awaiting(self) -> bool:
        """Whether a part waits for other ranks' parts to be recorded, or to be on their disks."""
        return self._parts.is_awaiting

    @property
    def has_news(self) -> bool:
        """Whether other ranks have to be informed of states of which this rank has no part, or of
        which it writes its part."""
        return self._parts.has_reports

    def missing(self, uid: str) -> str | None:
        """The parts of other ranks for which a state still waits, in words. None if it does not
        wait, or nothing is known."""
        if self._away_since is not None or not (uid in self._parts or self._parts.is_half(uid)):
            return None
        try:
            with self._database.read() as session:
                return self._parts.missing(session, uid, self._local.name)
        except DatastatesError:
            return None

    @property
    def may_be_wanted(self) -> bool:
        """Whether other ranks may make durable a state that this rank has in memory only."""
        return self._parts.may_be_wanted

    def want(self, uid: str, *, is_near: bool = False) -> None:
        """Make a state durable. If it has several parts, the other ranks get a request to write
        theirs. This call does not wait.

        ``is_near``: keep it off further tiers, on the other ranks too.
        """
        self._parts.want(uid, is_near=is_near)

    def pass_on(self, uid: str) -> None:
        """Let a state that was kept off further tiers go there. If it has several parts, the other
        ranks get the request too. This call does not wait."""
        self._parts.pass_on(uid)

    def ask(self, patience_s: float | None = None) -> None:
        """Query the results of parts that wait, and record the parts that this rank lacks.
        PendingParts that have waited longer than ``patience_s`` are given up."""
        if (self._parts.is_idle and not self._parts.may_be_wanted) or self._away_since is not None:
            return
        with self._turn:
            try:
                late = [] if patience_s is None else self._parts.late(patience_s)
                said = self._parts.said(late=late, patience_s=patience_s)
                heard = self.report(said)
            except Unavailable as error:
                self._note_away(error)
                return
            self._apply_reply(said, heard)

    def begin(self, run: Run) -> None:
        """Note that a training of this process begins; the database may forget it as it may
        forget states."""
        self._runs.append(run)

    def evict(self, uids: Iterable[str]) -> None:
        """Note that states left this process's memory. It is recorded with the next state, or by
        ``record_evictions``."""
        left = list(uids)
        self._evicted.add(left)
        self._parts.leave(left)

    def is_leaving(self, uid: str) -> bool:
        """Whether a state left this process's memory, and that was not recorded yet."""
        return uid in self._evicted

    @retry_conflicts
    def record_evictions(self) -> None:
        """Record now which states left memory.

        :raises Unavailable: the database is away.
        """
        with self._turn:
            self._evicted.note(self._with_recall(self._record_evictions))
            self._forget_gone()

    # --- the database is away, or has forgotten ---------------------------------------------------

    def settle(self) -> None:
        """Write the waiting records, if the database is back. Does nothing if it was not away."""
        if self._away_since is None:
            return
        with self._turn:
            if self._away_since is None:
                return
            try:
                self._recall(self._waiting.values())
                for entry in list(self._waiting.values()):
                    if entry.rank is None:
                        self._send_late(entry)
                    else:
                        self._send_part_late(entry, entry.rank)
                for uid, placed in list(self._marks.items()):
                    self._mark_late(uid, placed)
            except Unavailable as error:
                self._note_away(error)
            else:
                after = time.monotonic() - self._away_since
                _logger.warning(
                    "the lineage answers again after %.0f s",
                    after,
                    extra=event("lineage.back", seconds=after),
                )
                self._away_since = None

    def note_away(self, error: Unavailable) -> None:
        """Note that other code found the database away."""
        with self._turn:
            self._note_away(error)

    def check(self, session: Session) -> bool:
        """Whether the newest recorded state of each branch is in the database. Lost commits include
        it."""
        newest = {entry.new.facts.branch: uid for uid, entry in list(self._recorded.items())}
        return len(clones.known(session, newest.values())) == len(newest)

    def recall(self) -> None:
        """Record again what the database has lost."""
        with self._turn:
            self._recall()

    # All below runs in turn

    def _record(
        self, entries: Sequence[PendingRecord]
    ) -> tuple[dict[str, State | None], dict[str, Exception]]:
        told: dict[str, State | None] = {}
        refused: dict[str, Exception] = {}
        try:
            if self._away_since is None:
                self._send_each(entries, told, refused)
        except Unavailable as error:
            self._note_away(error)
        for entry in entries:
            if entry.new.uid not in told and entry.new.uid not in refused:
                try:
                    self._wait(entry)
                except Unavailable as error:
                    refused[entry.new.uid] = error
        return told, refused

    def _send_each(
        self,
        entries: Sequence[PendingRecord],
        told: dict[str, State | None],
        refused: dict[str, Exception],
    ) -> None:
        """Record all entries in one transaction; if that fails, record them one by one, to find
        those that cannot be recorded."""
        if len(entries) > 1:
            try:
                told.update(self._with_recall(partial(self._send, entries), entries))
            except Unavailable:
                raise
            except Exception as error:  # whatever refuses one of them
                _logger.debug("%d states are recorded one by one: %r", len(entries), error)
            else:
                return
        for entry in entries:
            if entry.rank is None and entry.new.facts.parent in refused:
                refused[entry.new.uid] = refused[entry.new.facts.parent]
                continue
            try:
                told.update(self._with_recall(partial(self._send, [entry]), [entry]))
            except Unavailable:
                raise
            except Exception as error:
                # any error that refuses this state: its handle raises it, and other states are
                # recorded
                refused[entry.new.uid] = error

    def _wait(self, entry: PendingRecord) -> None:
        if len(self._waiting) >= _MOST_WAITING:
            raise Unavailable(
                f"{_MOST_WAITING} states wait to be recorded, and the lineage does not answer"
                f" ({self._why}): bring it back"
            )
        self._waiting[entry.new.uid] = entry

    def _note_away(self, error: Unavailable) -> None:
        self._why = " ".join(str(error).split())  # drivers write several lines
        if self._away_since is None:
            self._away_since = time.monotonic()
            _logger.warning(
                "the lineage does not answer: captures go on in memory, and are recorded when it"
                " does (%s)",
                self._why,
                extra=event("lineage.away", reason=self._why),
            )

    def _with_recall(self, do: Callable[[], _T], coming: Sequence[PendingRecord] = ()) -> _T:
        """The result of ``do``, which is done again if the lineage had forgotten what it needs."""
        try:
            return do()
        except (NotFound, Conflict):
            if not self._recall(coming):
                raise
            return do()

    def _send(self, entries: Sequence[PendingRecord]) -> dict[str, State | None]:
        """The recorded states. None for a part, whose state may or may not be whole now."""
        whole, told = (
            [entry for entry in entries if entry.rank is None],
            [entry for entry in entries if entry.rank is not None],
        )
        is_durable, evicted = self._evicted.is_crowded, self._leaving()
        said = replace(
            self._parts.said(told),
            evicted=tuple(evicted),
            tier=CAPTURED,
            holder=self._holder,
            is_durable=is_durable,
        )
        states: list[State] = []
        if whole:
            states, heard = self._send_whole(whole, said)
        else:
            heard = self.report(said)
        self._recorded.update((entry.new.uid, entry) for entry in whole)
        self._evicted.note(evicted)
        if is_durable:
            self._forget_gone()
        self._parts.begin(told)
        self._apply_reply(said, heard)
        return {
            **{state.uid: state for state in states},
            **dict.fromkeys((entry.new.uid for entry in told), None),
        }

    @retry_conflicts
    def _send_whole(
        self, entries: Sequence[PendingRecord], said: Report
    ) -> tuple[list[State], Reply]:
        with self._database.write(durable=said.is_durable) as session:
            states = lineage_record.record_all(session, [entry.new for entry in entries])
            heard = tell(session, said)
        return states, heard

    def _apply_reply(self, said: Report, heard: Reply) -> None:
        """Process the results about parts. Each part waits until its listener has returned.

        PendingParts that the lineage lacks are recorded again.
        """
        if heard.forgotten:
            again = replace(
                said,
                parts=self._parts.said([self._parts.entry(uid) for uid in heard.forgotten]).parts,
            )
            with suppress(Unavailable):  # the next question finds out
                heard = self.report(again)
        wanted = self._parts.apply_reply(said, heard)
        for uid, outcome in heard.outcomes.items():
            entry = self._parts.entry(uid)
            if outcome.given_up is not None:
                self._listener.given_up(entry, outcome.given_up)
            else:
                self._recorded[uid] = entry
                self._parts.become_whole(uid)
                self._listener.whole(entry, outcome)
            self._parts.end(uid)
        for uid, is_near in wanted.items():
            self._listener.wanted(uid, is_near)
        for uid, added, is_durable in self._parts.settled(heard):
            if is_durable:
                self._listener.durable(uid, added)
            else:
                self._listener.lost(uid)

    def _send_late(self, entry: PendingRecord) -> None:
        new, moved, kept = entry.new, None, entry
        try:
            with self._database.read() as session:
                # the commit got through, its answer did not
                is_known = bool(clones.known(session, [new.uid]))
                state = lookup.state(session, new.uid) if is_known else None
            if state is None:
                try:
                    state = self._send([entry])[new.uid]
                except Conflict as error:
                    moved, kept = error, replace(entry, new=new.without_branch())
                    state = self._send([kept])[new.uid]
        except Unavailable:
            raise
        except DatastatesError as error:
            del self._waiting[new.uid]
            self._listener.failed(new.uid, error, entry)
            return
        assert state is not None, "it is no part"
        del self._waiting[new.uid]
        self._recorded[new.uid] = kept
        self._listener.recorded(entry, state, moved)

    def _send_part_late(self, entry: PendingRecord, rank: int) -> None:
        try:
            self._send([entry])
        except Unavailable:
            raise
        except DatastatesError as error:
            self._parts.skip(Skip(entry.new.facts, rank, Why.FAILED, str(error)))
            self._listener.failed(entry.new.uid, error, entry)
        del self._waiting[entry.new.uid]

    def _send_marks(self, placed: Mapping[str, Sequence[Placed]]) -> None:
        marks = tuple(self._mark_of(uid, part) for uid, each in placed.items() for part in each)
        marked = self.report(Report(marks=marks, is_durable=True)).marked
        for uid, each in placed.items():
            if marked[uid] is Status.CAPTURED:
                # it has parts that are not on the disks of their ranks
                self._parts.await_durable(uid, _added(each))
            del self._marks[uid]
            self._near.discard(uid)
        self._forget_gone()

    def _mark_of(self, uid: str, placed: Placed) -> Mark:
        tier = self._local
        return Mark(
            uid,
            tier.gives,
            tier.name,
            self._folder,
            placed.manifest.origin.rank,
            placed.manifest.bytes_new,
            is_near=uid in self._near,
        )

    def _mark_late(self, uid: str, placed: Sequence[Placed]) -> None:
        try:
            self._with_recall(partial(self._send_marks, {uid: placed}))
        except Unavailable:
            raise
        except DatastatesError as error:
            del self._marks[uid]
            self._listener.failed(uid, error, None)
        else:
            self._report_durable(uid, placed)

    def _report_durable(self, uid: str, placed: Sequence[Placed]) -> None:
        if self._parts.is_half(uid):
            self.on_half()
        else:
            self._listener.durable(uid, _added(placed))

    def _record_evictions(self) -> list[str]:
        with self._database.write(durable=True) as session:
            evicted = self._leaving()
            replicas.evict(session, evicted, tier=CAPTURED, node=self._holder)
        return evicted

    def _leaving(self) -> list[str]:
        """The states that left memory and have to be recorded. None is recorded before the state
        itself."""
        return self._evicted.unrecorded(
            lambda uid: uid not in self._waiting and uid not in self._parts
        )

    def _forget_gone(self) -> None:
        """Note that a commit was durable, and with it all earlier ones."""
        self._past += [
            self._recorded.pop(uid) for uid in self._evicted.settle() if uid in self._recorded
        ]

    @retry_conflicts
    def _recall(self, coming: Iterable[PendingRecord] = ()) -> bool:
        """Record again what the database has lost, runs and ancestors included. Returns whether
        there was anything. ``coming`` is recorded next."""
        told = {**{entry.new.uid: entry for entry in self._past}, **self._recorded}
        with self._database.read() as session:
            unknown = [run for run in list(self._runs) if not _has_run(session, run.uid)]
            known = clones.known(session, {**told, **dict.fromkeys(self._evicted.unrecorded())})
            ahead = {*self._waiting, *(entry.new.uid for entry in coming)}
            lost = self._lost(
                session,
                told,
                ahead,
                [parent for entry in coming for parent in entry.new.facts.parents],
            )
        # evicted states that the database does not have would block all later records
        was_in_the_way = self._evicted.keep(
            lambda uid: uid in known or uid in told or uid in self._waiting or uid in self._parts
        )
        if not unknown and not lost:
            return was_in_the_way
        wanted = [
            (entry, range(entry.new.facts.world_size) if entry.rank is None else [entry.rank])
            for entry in lost
        ]
        whole = self._local.whole_parts(
            (entry.new.uid, rank) for entry, ranks in wanted for rank in ranks
        )
        with self._database.write(durable=True) as session:
            for run in unknown:
                runs.start(session, run)
            for entry in lost:
                self._record_again(session, entry)
            tell(
                session,
                Report(
                    marks=tuple(self._mark_of(uid, placed) for (uid, _), placed in whole.items())
                ),
            )
            gone = clones.known(
                session,
                {
                    *self._evicted.gone,
                    *(entry.new.uid for entry in lost if entry.new.uid not in self._recorded),
                },
            )
            replicas.evict(session, gone, tier=CAPTURED, node=self._holder)
        # other ranks record theirs again, too
        self._parts.begin(
            entry for entry in lost if entry.rank is not None and entry.new.uid in self._recorded
        )
        # parts whose memory is gone are recorded once: their states may never be whole
        self._past = deque(
            (entry for entry in self._past if entry.rank is None), maxlen=_MOST_WAITING
        )
        self._forget_gone()
        _logger.warning(
            "the lineage had forgotten the run of this process, %s and their ancestors: they are"
            " recorded again",
            plural(len(lost), "state"),
            extra=event("lineage.forgot", states=len(lost)),
        )
        return True

    def _lost(
        self,
        session: Session,
        told: dict[str, PendingRecord],
        ahead: set[str],
        further: Iterable[str],
    ) -> list[PendingRecord]:
        """The entries that the database lacks: these states, ``further`` ones and their ancestors,
        parents first. ``ahead`` ones are recorded later."""
        lost: dict[str, PendingRecord] = {}
        found: dict[str, PendingRecord | None] = dict.fromkeys(
            [*clones.known(session, told), *ahead]
        )
        stack = [*further, *reversed(told)]
        while stack:
            uid = stack[-1]
            if uid not in found:
                # other ranks have the other parts, unless all are in the folder
                own = told.get(uid)
                found[uid] = (
                    own
                    if own is not None and own.rank is None
                    else self._in_folder(session, uid) or own
                )
            entry = found[uid]
            above = (
                []
                if entry is None
                else [parent for parent in entry.new.facts.parents if parent not in found]
            )
            stack += above
            if not above:
                stack.pop()
                if entry is not None:
                    lost[uid] = entry
        beyond = {
            parent for entry in lost.values() for parent in entry.new.facts.parents
        } - lost.keys()
        of_runs = (
            self._of_runs(session, lost, ahead)
            if beyond - clones.known(session, beyond).keys()
            else {}
        )
        if not of_runs:
            return list(lost.values())
        told = dict(
            sorted(
                {**told, **of_runs}.items(), key=lambda item: to_us(item[1].new.facts.created_at)
            )
        )
        return self._lost(session, told, ahead, further)

    def _of_runs(
        self, session: Session, lost: Mapping[str, PendingRecord], ahead: set[str]
    ) -> dict[str, PendingRecord]:
        """Further forgotten states of the runs of ``lost`` ones.

        They are no known ancestors, as states between them were never on disk."""
        runs_ = {entry.new.facts.run for entry in lost.values()}
        here = {uid for uid, _ in self._local.parts()} - lost.keys() - ahead
        found = filter(
            None,
            (self._in_folder(session, uid) for uid in here - clones.known(session, here).keys()),
        )
        return {entry.new.uid: entry for entry in found if entry.new.facts.run in runs_}

    def _in_folder(self, session: Session, uid: str) -> PendingRecord | None:
        """A state that the database lacks, from its manifests; None if it is known, or not all
        of them are here."""
        manifests = {}
        with suppress(DatastatesError):
            size = (
                0
                if clones.known(session, [uid])
                else self._local.sound(uid, 0).manifest.origin.world_size
            )
            manifests = {(uid, rank): self._local.sound(uid, rank).manifest for rank in range(size)}
        return next((PendingRecord(new, None) for new in states_of(manifests)), None)

    def _record_again(self, session: Session, entry: PendingRecord) -> None:
        new, facts = entry.new, entry.new.facts
        if clones.known(session, [new.uid]):  # another rank told it meanwhile
            return
        if entry.rank is not None:
            parts.record_parts(
                session, [parts.PartReport(new, entry.rank, entry.reduce, entry.form)]
            )
            return
        if facts.run is not None and not _has_run(session, facts.run):
            # of a process that has ended, about which nothing else is known
            clones.put_runs(session, [new])
        here = clones.known(session, facts.parents)
        if len(here) < len(facts.parents):
            # a parent that was only in memory: the state follows the newest one of its branch
            head = next((ref.state for ref in refs(session) if ref.name == facts.branch), None)
            edges = tuple(edge for edge in facts.edges if edge.parent in here)
            new = replace(
                new,
                facts=replace(
                    facts, parent=facts.parent if facts.parent in here else head, edges=edges
                ),
            )
        try:
            with session.begin_nested():
                lineage_record.record(session, new)
        except Conflict as error:
            moved = [ref for ref in refs(session) if ref.name == facts.branch and new.facts.parent]
            is_older = bool(moved) and to_us(
                reflog(session, moved[0].name, limit=1)[0].created_at
            ) < to_us(facts.created_at)
            if not is_older:
                _logger.warning(
                    "state %s is recorded again, without its branch: %s", new.uid, error
                )
            with session.begin_nested():
                if is_older:  # the copy is from before the branch moved back, as by a guard
                    lineage_refs.move(
                        session,
                        moved[0].name,
                        str(new.facts.parent),
                        expected=moved[0].state,
                        reason="recorded again",
                    )
                lineage_record.record(session, new if is_older else new.without_branch())


def _has_run(session: Session, uid: str) -> bool:
    try:
        runs.get(session, uid)
    except NotFound:
        return False
    return True


def _added(placed: Sequence[Placed]) -> int:
    """The bytes that parts added to the disk."""
    return sum(part.manifest.bytes_new for part in placed)
