"""The only place where a state becomes part of memory and lineage. Captures, merges and clones all
go through it.

    enter      its slots become the memory tier's
    record     the lineage records it, in one transaction; a round of captures in one
    announce   the engine is informed

After any error or interrupt, either all three have the state or none has.

Rules:

- The lineage decides. A state that it has is announced, and then the error is raised (for a
  capture, by the next call that uses its line). Any other state leaves memory again, and a
  capture's handle gets the reason.
- If a transaction did not return, the lineage is queried whether it was committed. If the lineage
  does not respond, a capture waits in the outbox, which queries it later. Any other state leaves
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

import msgspec

from datastates.errors import Closed, Conflict, DatastatesError, Torn
from datastates.lineage.database import Database
from datastates.lineage.states import NewState, State, StateFacts, Why
from datastates.state.digest import chunk_digest
from datastates.state.manifest import Chunk, Content, Manifest
from datastates.storage.arena import Arena
from datastates.storage.copying import on_threads
from datastates.storage.memory import MemoryTier
from datastates.storage.tier import Placed
from datastates.system.interrupts import Mutex
from datastates.system.telemetry import Recorder

from .copy import CopyJob
from .handle import StagedCapture, Work, manifest_of
from .in_flight import InFlight, LineageContext
from .rank_reports import Skip
from .scheduler import Action, Event, Recorded

if TYPE_CHECKING:
    from datastates.lineage.session import Session


_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class IncomingState:
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


def digest(work: Work, arena: Arena) -> None:
    """Make a capture's manifest: xxh3_128 of each chunk that its device did not digest, and BLAKE3
    of the content and the parents' digests."""
    found = dict(work.known)

    def digest_chunk(index: int) -> None:
        found[index] = chunk_digest(arena.memory(work.slots[index], work.lengths[index]))

    left = [index for index in range(len(work.lengths)) if index not in found]
    if work.is_from_device:  # a state crosses faster than one core reads it
        on_threads(left, digest_chunk)
    else:  # the other cores belong to the training
        for index in left:
            digest_chunk(index)
    chunks = tuple(Chunk(found[index], length) for index, length in enumerate(work.lengths))
    content = msgspec.structs.replace(work.content, chunks=chunks)
    work.manifest = manifest_of(work.facts, content, work.parent_digests, rank=work.rank or 0)


class Commits:
    """Commits states. ``adopt`` passes a merge or a clone to the engine, or raises Closed. ``post``
    passes captures.

    Either may be called any number of times for one state.
    """

    def __init__(
        self,
        context: LineageContext,
        in_flight: InFlight,
        *,
        arena: Arena,
        memory: MemoryTier,
        adopt: Callable[[str, Manifest | None], None],
        post: Callable[[*tuple[Event, ...]], list[Action]],
        recorder: Recorder,
    ) -> None:
        self._recorder = recorder
        self._database: Database = context.database
        self.holder = context.holder
        self._run, self._arena, self._memory = context.run, arena, memory
        self._in_flight, self._outbox = in_flight, in_flight.outbox
        self._adopt, self._post = adopt, post
        self._turn = Mutex()
        """Takes in one state at a time: of two clones of one state, one could take back what the
        other relies on."""

    # --- merges and clones: any thread ------------------------------------------------------------

    def adopt_incoming(
        self, coming: IncomingState, record: Callable[[Session, NewState], State]
    ) -> State:
        """Commit a merge or a clone. ``record`` writes it to the lineage, and its result is
        returned. An interrupt is raised at the end.

        :raises Conflict: another state of this uid is here, or the branch was moved.
        """
        uid = coming.facts.uid
        with self._turn:
            was_here = self._memory.has(uid)
            try:
                placed = coming.enter()
                if self._outbox.is_leaving(uid):
                    # it left and comes back: the lineage must be updated in this order
                    self._outbox.record_evictions()
                with self._database.write(durable=True) as session:
                    # durable, because it would not be recorded again
                    state = record(session, coming.told(placed, self._memory, self.holder))
                self._adopt(uid, coming.base)
            except BaseException:
                if not was_here and self._is_kept(uid, lambda: self._outbox.find(uid) is not None):
                    self._adopt_or_leave(coming)
                raise
        return state

    def _adopt_or_leave(self, coming: IncomingState) -> None:
        uid = coming.facts.uid
        try:
            self._adopt(uid, coming.base)
        except Closed:
            self._memory.remove(uid)
            self._outbox.evict([uid])

    # --- captures: the engine thread --------------------------------------------------------------

    def enter(self, staged: StagedCapture) -> None:
        """Digest a capture and adopt its slots into memory. Its line continues from it. If this
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
        began = time.monotonic()
        digest(work, self._arena)
        digested_at = time.monotonic()
        self._recorder.span("digest", began, digested_at, uid, work.facts.step)
        work.bytes_new = self._memory.adopt(work.digested(), work.slots).bytes_new
        self._recorder.span("dedup", digested_at, time.monotonic(), uid, work.facts.step)
        for snapshot in job.snapshots:
            snapshot.digest = work.digested().digest
        self._recorder.count("snapshots", bool(job.snapshots))
        self._release(job)
        self._recorder.count(
            "bytes_copied", sum(work.lengths) - sum(map(work.lengths.__getitem__, job.here))
        )
        self._recorder.count("bytes_new", work.bytes_new)
        self._in_flight.place(uid, staged.line)
        if staged.line.part is None:
            staged.line.tip = (uid, work.digested().digest)

    def leave(self, staged: StagedCapture) -> None:
        """Undo ``enter``, as far as it got. The capture leaves memory, and its line continues from
        the state before it."""
        line, work, uid = staged.line, staged.work, staged.progress.uid
        if work is not None:
            self._memory.remove(uid)
        if staged.job is not None:
            self._release(staged.job)
            self._arena.take_back(staged.job.slots)  # those that memory did not take
        if work is not None and line.tip is not None and line.tip[0] == uid:
            line.tip = work.before

    def _release(self, job: CopyJob) -> None:
        """Release what was held for a state in flight, now that the memory tier has it or never
        will."""
        job.snapshots.clear()
        if job.held:
            held, job.held = job.held, []
            self._memory.release(held)

    def _begun(self, staged: StagedCapture, job: CopyJob) -> Work:
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

    def commit_round(self, captures: Sequence[StagedCapture]) -> None:
        """Take in captures that were copied.

        If one fails, its handle gets the error; an error that this raises is for ``settle``."""
        entered: list[StagedCapture] = []
        for staged in captures:
            try:
                self.enter(staged)
                self._in_flight.await_parts(staged)
                entered.append(staged)
            except BaseException as exc:  # the handle raises it, whatever it is
                self._refuse(staged, exc)
        began = time.monotonic()
        works = [staged.work for staged in entered if staged.work is not None]
        entries = [work.make_record(self._memory, self.holder) for work in works]
        errors = self._outbox.record(entries) if entries else {}
        if entered:
            newest = entered[-1]
            self._recorder.span(
                "record", began, time.monotonic(), newest.progress.uid, newest.facts.step
            )
        self._announce(self._concluded(entered, errors))

    def settle(self, captures: Sequence[StagedCapture], error: BaseException) -> None:
        """Settle a round that ``error`` broke off at any point: memory, lineage and engine all
        have each of its captures, or none has."""
        self._announce(
            self._concluded(captures, {staged.progress.uid: error for staged in captures})
        )

    def _concluded(
        self, captures: Sequence[StagedCapture], errors: Mapping[str, BaseException]
    ) -> list[StagedCapture]:
        """The captures that are in memory and in the lineage, or will be.

        All other captures are in neither from now on, and their handles get the reason.
        """
        wrong = [staged for staged in captures if staged.progress.uid in errors]
        # parents first, as the outbox records them
        has_come = {staged.progress.uid: self._is_committed(staged) for staged in wrong}
        for staged in reversed(wrong):  # the newest first: each restores its line's tip before it
            error = errors[staged.progress.uid]
            if has_come[staged.progress.uid]:
                self._in_flight.note(staged.line, error)
            else:
                self._refuse(staged, error)
        return [staged for staged in captures if has_come.get(staged.progress.uid, True)]

    def _is_committed(self, staged: StagedCapture) -> bool:
        entry = None if staged.work is None else staged.work.entry
        return entry is not None and self._is_kept(
            entry.new.uid, partial(self._outbox.conclude, entry)
        )

    def _refuse(self, staged: StagedCapture, error: BaseException) -> None:
        self.leave(staged)
        self._in_flight.refuse(staged, error)
        if staged.line.part is not None:
            why = Why.TORN if isinstance(error, Torn) else Why.FAILED
            self._outbox.skip(
                Skip(staged.facts, staged.line.part.rank, why, str(error) or repr(error))
            )

    def _announce(self, captures: Sequence[StagedCapture]) -> None:
        # ``InFlight`` announces parts, once their state is whole
        whole = [staged for staged in captures if staged.line.part is None]
        now = time.monotonic()
        self._post(
            *(
                Recorded(each.progress.uid, each.line.name, now, each.taken(), each is whole[-1])
                for each in whole
            )
        )

    # --- something was raised ---------------------------------------------------------------------

    def _is_kept(self, uid: str, is_told: Callable[[], bool]) -> bool:
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
            self._outbox.evict([uid])
        self._memory.remove(uid)
        return False
