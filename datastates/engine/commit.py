"""The only place where a state becomes part of memory and lineage. Captures, merges and clones all
go through it.

    enter      its slots become the memory tier's
    record     the lineage records it, in one transaction; a round of captures in one
    announce   the engine is informed

After any error or interrupt, either all three have the state or none has. The file also reads which
states refs name (``Named``).

Rules:

- The lineage decides. A state that it has is announced, and then the error is raised (for a
  capture, by the next call that uses its line). Any other state leaves memory again, and a
  capture's handle gets the reason.
- If a transaction did not return, the lineage is queried whether it was committed. If the lineage
  does not respond, a capture waits in the journal, which queries it later. Any other state leaves
  memory. The lineage records that it left, as for any eviction.
- Slots that the memory tier did not take stay with the caller that acquired them: the tier removes
  those that it takes from the list.
- Each step of the rollback may be done twice: if the rollback is interrupted too, it starts again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from datastates.errors import Closed, Conflict, DatastatesError, Torn, Unavailable
from datastates.lineage.database import Database
from datastates.lineage.query import names
from datastates.lineage.states import NewState, RefKind, State, StateFacts, Why
from datastates.lineage.views import detail
from datastates.state.manifest import Content, Manifest
from datastates.storage.arena import Arena
from datastates.storage.local import LocalTier
from datastates.storage.memory import MemoryTier
from datastates.storage.tier import Placed
from datastates.system.interrupts import Mutex
from datastates.system.telemetry import Recorder

from .copy import CopyJob
from .handle import Staged, Work, Writing
from .in_flight import Books, Register
from .outbox import Journal
from .processors import Step
from .rank_reports import Skip
from .scheduler import Action, Event, Recorded, RefsChanged
from .steps import Dedup, Digest, Record, Write

if TYPE_CHECKING:
    from datastates.lineage.session import Session


class Pipeline:
    """The steps in order of priority.

    ``enter`` and ``leave`` belong to the engine thread, ``write`` to the writer thread."""

    def __init__(
        self,
        books: Books,
        register: Register,
        *,
        arena: Arena,
        memory: MemoryTier,
        local: LocalTier,
        recorder: Recorder,
    ) -> None:
        self._recorder = recorder
        self._run, self._register, self._arena, self._memory = books.run, register, arena, memory
        self._each: Sequence[Step[Work]] = (Digest(arena), Dedup(memory))
        self._write = Write(memory, local, register.journal, recorder)

    def enter(self, staged: Staged) -> None:
        """Take a capture into memory, each step in turn. Its line continues from it. If this
        raises, ``leave`` undoes it.

        :raises Torn: or any other error of the copy.
        """
        job, uid = staged.job, staged.progress.uid
        assert job is not None
        if job.error is not None:
            raise job.error
        if self._memory.has(uid):
            raise Conflict(f"there is a state {uid} already: every capture needs a uid of its own")
        work = staged.work = self._begun(staged, job)
        for step in self._each:
            began = time.monotonic()
            step.process(work)
            self._recorder.span(step.name, began, time.monotonic(), uid, work.facts.step)
        for snapshot in job.snapshots:
            snapshot.digest = work.digested().digest
        self._recorder.count("snapshots", bool(job.snapshots))
        self._let_go(job)
        self._recorder.count(
            "bytes_copied", sum(work.lengths) - sum(map(work.lengths.__getitem__, job.here))
        )
        self._recorder.count("bytes_new", work.bytes_new)
        self._register.place(uid, staged.line)
        if staged.line.part is None:
            staged.line.tip = (uid, work.digested().digest)

    def leave(self, staged: Staged) -> None:
        """Undo ``enter``, as far as it got. The capture leaves memory, and its line continues from
        the state before it."""
        line, work, uid = staged.line, staged.work, staged.progress.uid
        if work is not None:
            self._memory.remove(uid)
        if staged.job is not None:
            self._let_go(staged.job)
            self._arena.take_back(staged.job.slots)  # those that memory did not take
        if work is not None and line.tip is not None and line.tip[0] == uid:
            line.tip = work.before

    def write(self, uids: Sequence[str]) -> int:
        """Make states of the memory tier durable: all of them, or none. Returns how many bytes that
        added to the disk."""
        lines = {uid: self._register.line_of(uid) for uid in uids}
        group = [
            (
                Writing(uid, None, is_of_base=False)
                if line is None
                else Writing(uid, line.related(), line.has_placed)
            )
            for uid, line in lines.items()
        ]
        self._write.process(group)
        for writing in group:
            line = lines[writing.uid]
            if line is not None and writing.manifest is not None:
                line.placed(writing.manifest)
        return sum(writing.size for writing in group)

    def _let_go(self, job: CopyJob) -> None:
        """Release what was held for a state in flight, now that the memory tier has it or never
        will."""
        job.snapshots.clear()
        if job.held:
            held, job.held = job.held, []
            self._memory.let_go(held)

    def _begun(self, staged: Staged, job: CopyJob) -> Work:
        """The work on a capture whose bytes are in its slots."""
        tip, part = staged.line.tip, staged.line.part
        run = staged.line.run or self._run
        content, lengths = (
            Content(staged.layout.skeleton, staged.values, staged.layout.tensors, ()),
            staged.layout.chunk_lengths,
        )
        if part is not None:
            facts = replace(staged.facts, run=run.uid, config=run.chosen)
            work = Work(
                facts,
                (),
                content,
                lengths,
                job.slots,
                tip,
                rank=part.rank,
                reduce=staged.line.reduce,
                form=staged.form,
            )
        else:
            facts = replace(
                staged.facts, parent=None if tip is None else tip[0], run=run.uid, config=run.chosen
            )
            work = Work(facts, () if tip is None else (tip[1],), content, lengths, job.slots, tip)
        work.known, work.is_from_device = job.digests, bool(job.plan.devices)
        return work


# --- Commits ---


_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Coming:
    """A state that no line captured: a merge or a clone, about to be taken in. ``enter`` makes its
    bytes the memory tier's, all or none.

    ``base`` is the manifest of a related state on disk.
    """

    facts: StateFacts
    digest: str
    bytes_total: int
    enter: Callable[[], Placed]
    base: Manifest | None = None

    def told(self, placed: Placed, tier: MemoryTier, holder: str) -> NewState:
        """The record of it for the lineage."""
        total, new = self.bytes_total, placed.bytes_new
        return NewState(
            self.facts,
            self.digest,
            tier.gives,
            bytes_total=total,
            bytes_new=new,
            tier=tier.name,
            node=holder,
        )


class Commits:
    """Commits states. ``adopt`` passes a merge or a clone to the engine, or raises Closed. ``post``
    passes captures.

    Either may be called any number of times for one state.
    """

    def __init__(
        self,
        books: Books,
        register: Register,
        pipeline: Pipeline,
        memory: MemoryTier,
        *,
        adopt: Callable[[str, Manifest | None], None],
        post: Callable[[*tuple[Event, ...]], list[Action]],
        recorder: Recorder,
    ) -> None:
        self._recorder = recorder
        self._database: Database = books.database
        self.holder = books.holder
        self._register, self._pipeline, self._memory, self._journal = (
            register,
            pipeline,
            memory,
            register.journal,
        )
        self._record = Record(register.journal, memory, books.holder)
        self._adopt, self._post = adopt, post
        self._turn = Mutex()
        """Takes in one state at a time: of two clones of one state, one could take back what the
        other relies on."""

    # --- merges and clones: any thread ------------------------------------------------------------

    def take_in(self, coming: Coming, record: Callable[[Session, NewState], State]) -> State:
        """Commit a merge or a clone. ``record`` writes it to the lineage, and its result is
        returned. An interrupt is raised at the end.

        :raises Conflict: another state of this uid is here, or the branch was moved.
        """
        uid = coming.facts.uid
        with self._turn:
            was_here = self._memory.has(uid)
            try:
                placed = coming.enter()
                if self._journal.is_leaving(uid):
                    # it left and comes back: the lineage must be updated in this order
                    self._journal.tell_evictions()
                with self._database.write(durable=True) as session:
                    # durable, because it would not be recorded again
                    state = record(session, coming.told(placed, self._memory, self.holder))
                self._adopt(uid, coming.base)
            except BaseException:
                if not was_here and self._stays(uid, lambda: self._journal.find(uid) is not None):
                    self._adopt_or_leave(coming)
                raise
        return state

    def _adopt_or_leave(self, coming: Coming) -> None:
        uid = coming.facts.uid
        try:
            self._adopt(uid, coming.base)
        except Closed:
            self._memory.remove(uid)
            self._journal.evict([uid])

    # --- captures: the engine thread --------------------------------------------------------------

    def take_round(self, captures: Sequence[Staged]) -> None:
        """Take in captures that were copied.

        If one fails, its handle gets the error; an error that this raises is for ``settle``."""
        entered: list[Staged] = []
        for staged in captures:
            try:
                self._pipeline.enter(staged)
                self._register.await_others(staged)
                entered.append(staged)
            except BaseException as exc:  # the handle raises it, whatever it is
                self._refuse(staged, exc)
        began = time.monotonic()
        errors = self._record.process_all(
            [staged.work for staged in entered if staged.work is not None]
        )
        if entered:
            newest = entered[-1]
            self._recorder.span(
                "record", began, time.monotonic(), newest.progress.uid, newest.facts.step
            )
        self._announce(self._concluded(entered, errors))

    def settle(self, captures: Sequence[Staged], error: BaseException) -> None:
        """Settle a round that ``error`` broke off at any point: memory, lineage and engine all
        have each of its captures, or none has."""
        self._announce(
            self._concluded(captures, {staged.progress.uid: error for staged in captures})
        )

    def _concluded(
        self, captures: Sequence[Staged], errors: Mapping[str, BaseException]
    ) -> list[Staged]:
        """The captures that are in memory and in the lineage, or will be.

        All other captures are in neither from now on, and their handles get the reason.
        """
        wrong = [staged for staged in captures if staged.progress.uid in errors]
        # parents first, as the journal records them
        has_come = {staged.progress.uid: self._has_come(staged) for staged in wrong}
        for staged in reversed(wrong):  # the newest first: each restores its line's tip before it
            error = errors[staged.progress.uid]
            if has_come[staged.progress.uid]:
                self._register.note(staged.line, error)
            else:
                self._refuse(staged, error)
        return [staged for staged in captures if has_come.get(staged.progress.uid, True)]

    def _has_come(self, staged: Staged) -> bool:
        entry = None if staged.work is None else staged.work.entry
        return entry is not None and self._stays(
            entry.new.uid, partial(self._journal.conclude, entry)
        )

    def _refuse(self, staged: Staged, error: BaseException) -> None:
        self._pipeline.leave(staged)
        self._register.refuse(staged, error)
        if staged.line.part is not None:
            why = Why.TORN if isinstance(error, Torn) else Why.FAILED
            self._journal.skip(
                Skip(staged.facts, staged.line.part.rank, why, str(error) or repr(error))
            )

    def _announce(self, captures: Sequence[Staged]) -> None:
        # the register announces parts, once their state is whole
        whole = [staged for staged in captures if staged.line.part is None]
        now = time.monotonic()
        self._post(
            *(
                Recorded(each.progress.uid, each.line.name, now, each.taken(), each is whole[-1])
                for each in whole
            )
        )

    # --- something was raised ---------------------------------------------------------------------

    def _stays(self, uid: str, is_told: Callable[[], bool]) -> bool:
        """Whether memory and lineage have a state, or will.

        If not, the state is removed from memory."""
        if not self._memory.has(uid):
            return False  # the lineage was not told of it yet
        try:
            if is_told():
                return True
        except DatastatesError:
            _logger.warning(
                "whether state %s was recorded is not known: it leaves memory", uid, exc_info=True
            )
            self._journal.evict([uid])
        self._memory.remove(uid)
        return False


# --- States that refs name, read again whenever the reflog has grown ---


PER_S = 100.0
"""The number of reads per second of all ranks but the first, together."""

MOST_S = 60.0
"""The longest time from one read of a rank to its next, in seconds."""

_NOTHING = -1  # before the first line of the reflog


class Named:
    """Safe from any thread."""

    def __init__(self, database: Database, journal: Journal) -> None:
        self._database, self._journal = database, journal
        self._seen = detail.Horizon(_NOTHING, frozenset())
        self._is_sure = True
        self._tags, self._heads = dict[str, str](), dict[str, str]()
        self._tagged, self._told = frozenset[str](), _NOTHING
        self._turn = Mutex()
        self._every_s = self._looks_at = 0.0

    def join(self, rank: int, size: int) -> None:
        """Note that this process is a rank of a job."""
        self._every_s = min(size / PER_S, MOST_S) if rank else 0.0

    def look(self, *, is_forced: bool = False) -> RefsChanged | None:
        """The states that refs name now. None if nothing changed, if the database is away, or if it
        is not yet time. ``is_forced`` reads them in any case."""
        if time.monotonic() < self._looks_at and not is_forced:
            return None
        self._looks_at = time.monotonic() + self._every_s
        try:
            with self._turn:
                with self._database.read() as session:
                    seen, newest = self._seen, names.last_event(session)
                    has_grown = newest != seen.id
                    # then it was, before this transaction began
                    is_sure = seen.is_settled and not has_grown
                    is_read = is_forced or not (is_sure and self._is_sure)
                    if is_read:
                        self._read(session, self._told if self._told <= newest else _NOTHING)
                        self._told = seen.id if seen.is_settled else self._told
                    seen = (
                        detail.newest_events(session)
                        if has_grown and seen.is_settled
                        else detail.settle(session, seen)
                    )
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
        moved = names.moved(session, after)
        if after == _NOTHING:
            self._tags, self._heads = {}, {}
        is_tag_moved = any(
            name in self._tags or (ref is not None and ref.kind is RefKind.TAG)
            for name, ref in moved.items()
        )
        for name, ref in moved.items():
            for kept in (self._tags, self._heads):
                kept.pop(name, None)
            if ref is not None:
                (self._tags if ref.kind is RefKind.TAG else self._heads)[name] = ref.state
        if is_tag_moved or after == _NOTHING:
            self._tagged = frozenset(self._tags.values())
