"""``Runner``: the threads behind captures. They carry out what ``scheduler`` decides.

    crossing thread   copy.py           queues copies from devices, if there are any
    stage thread      copy.py           copies; passes each capture on, in order
    engine thread     commit.py         each round of captures into memory and into the lineage;
                                        then frees memory ahead
    writer thread     writer.py         to disk; marked as durable
    arena thread      memory_budget.py  touches memory ahead of need
    processor thread  processors.py     the user's processors, if there are any
    copies thread     copies.py         onto the user's tiers, if there are any

One ``Runner`` belongs to a repository that tracks. Its lock guards the ``Engine`` and the
``InFlight``. No I/O happens under it.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from datastates.config import Config
from datastates.errors import Closed, Conflict, Torn, Unavailable
from datastates.lineage.states import StateFacts, Status, Why
from datastates.policy.contract import Cadence, Policy
from datastates.policy.retention import Best
from datastates.state.manifest import Manifest
from datastates.storage.arena import Arena
from datastates.storage.local import LocalTier
from datastates.storage.memory import MemoryTier
from datastates.storage.tier import Tier
from datastates.system.interrupts import Mutex, undisturbed
from datastates.system.telemetry import Recorder
from datastates.system.threads import Notifier

from .commit import Commits
from .copies import CLOSING_S, Copies, CopyContext
from .copy import CopyJob, Stager
from .device_copies import Snapshots
from .handle import Line, Progress, StagedCapture
from .in_flight import InFlight, LineageContext, LockedEngine
from .memory_budget import Prefaulter, SlotAllocator
from .periodic import CadenceReports, Heartbeat, PartPolling, RefWatcher, Rounds
from .processors import Processors, ProcessorSwitch
from .rank_reports import Skip
from .scheduler import (
    AT_A_TIME,
    Action,
    Adopted,
    BestKnown,
    CadenceChanged,
    Closing,
    Engine,
    Event,
    Evict,
    GiveUp,
    GiveWay,
    Inherited,
    LineOpened,
    PassOn,
    RoomNeeded,
    Tick,
    Wanted,
    Withdrawn,
    Write,
)
from .writer import StallDetector, Trouble, Writer

if TYPE_CHECKING:
    import torch

_logger = logging.getLogger(__name__)

_SAY_AGAIN_S = 0.2
"""The seconds between two reports of how many writes are left, to a caller that waits for them."""

CHECK_EVERY_S = 1.0
"""The time between two checks, in seconds: for so long a ref that another process made may be
unknown here."""

_FAILING_S = 3.0
"""How long a close after an error waits for parts of other ranks, in seconds."""


class Runner:
    """Owns the stage, engine and writer threads of one repository.

    ``close`` is idempotent."""

    def __init__(
        self,
        context: LineageContext,
        config: Config,
        *,
        arena: Arena,
        memory: MemoryTier,
        local: LocalTier,
        further: Sequence[Tier] = (),
        processors: Sequence[ProcessorSwitch] = (),
        beat: Callable[[], None] = lambda: None,
    ) -> None:
        self._config = config
        self._heartbeat = Heartbeat(beat)
        self._trouble = Trouble()
        self.recorder = Recorder(config.trace)
        self._lock, self._changed = Mutex(), Notifier()
        self._engine = Engine(config.memory_latest)
        self._paces = CadenceReports(context.database)
        self._processors = Processors(processors, memory, self._changed.notify_all)
        self.copies = Copies(
            CopyContext(
                local,
                context.database,
                self._changed.notify_all,
                config.group_patience_s,
                context.folder,
                config.copy_bytes_per_s,
                self.recorder,
                memory,
            ),
            further,
        )
        locked = LockedEngine(self._engine, self._lock, self._changed, self._post)
        self.in_flight = InFlight(
            context,
            locked,
            memory=memory,
            local=local,
            processors=self._processors,
            copies=self.copies,
            on_marked=self._on_marked,
            recorder=self.recorder,
        )
        self.outbox = self.in_flight.outbox
        self.commits = Commits(
            context,
            self.in_flight,
            arena=arena,
            memory=memory,
            adopt=self._adopt,
            post=self._post,
            recorder=self.recorder,
        )
        self.snapshots = Snapshots(config.device_bytes)
        self.stager = Stager(arena, memory.hold, self.snapshots)
        self.rounds = Rounds()
        self._polling = PartPolling(self.outbox, self.rounds, config.group_patience_s)
        self._engine_thread = threading.Thread(
            target=self._run_engine, name="datastates-engine", daemon=True
        )
        self.writer = Writer(
            self.in_flight,
            locked,
            self._trouble,
            self.copies,
            memory=memory,
            local=local,
            recorder=self.recorder,
        )
        self._threads = [self._engine_thread, self.writer.thread]
        self._watch = StallDetector(
            self._trouble,
            self.in_flight,
            locked,
            recording=self._engine_thread,
            writing=self.writer.thread,
        )
        self._prefaulter = Prefaulter(
            arena, is_given=config.memory_bytes is not None, latest=config.memory_latest
        )
        self.slots = SlotAllocator(
            arena,
            memory,
            prefaulter=self._prefaulter,
            rounds=self.rounds,
            in_flight=self.in_flight,
            locked=locked,
            watch=self._watch,
            check_open=self._raise_if_closed,
        )
        self._memory = memory
        memory.on_released = self._changed.notify_all
        self._asked = weakref.WeakValueDictionary[str, Progress]()
        self.on_wanted: Callable[[str], None] = lambda uid: None
        """Called with each state for whose durability a caller waits, on any thread."""
        self.on_durable: Callable[[int], None] = lambda added: None
        """Called with the bytes added whenever a state became durable, on any thread."""
        self._named = RefWatcher(context.database, self.outbox)
        self._checked_at = 0.0
        self._check_error: str | None = None
        self._is_closed = self._is_closing = False
        self._is_abandoned = self._has_lost = False
        for thread in self._threads:
            thread.start()

    # --- the training thread ----------------------------------------------------------------------

    def open_line(self, line: Line, cadence: Policy, tensors: Sequence[torch.Tensor]) -> None:
        """Begin a tracker; captures of about these tensors are prepared meanwhile."""
        size_bytes = sum(tensor.nbytes for tensor in tensors)
        self.slots.expect(line, size_bytes)
        self.stager.prepare(tensors, size_bytes)
        self._paces.begin(line)
        if line.part is not None:
            self._named.join(line.part.rank, line.part.size)
            self._polling.join(line.part.size)
            if line.part.rank:
                # rank 0 decides which states become durable, except where each rank can decide by
                # itself
                cadence = cadence.counted() or Cadence(every=None, interval_s=None)
        self._post(LineOpened(line.name, cadence, line.branch, size_bytes, line.keeps_bests))

    def know_best(self, line: Line, bests: Mapping[Best, tuple[float, str] | None]) -> None:
        """Set the best states by these rules up to where the line stands: from now on its best
        so far becomes durable, sooner or later.
        """
        self.flush()
        self._post(BestKnown(line.name, bests))

    def close_line(self, line: Line, *, is_failing: bool = False) -> None:
        """End a tracker: its head becomes durable (``drain`` waits for that)."""
        self._polling.patience_s = (
            min(self._config.group_patience_s, _FAILING_S)
            if is_failing
            else self._config.group_patience_s
        )
        try:
            self.settle(line)
        finally:
            self._polling.patience_s = self._config.group_patience_s
        self._post(Closing(line.name))
        self._paces.end(line)
        self._prefaulter.forget(line.name)
        self.snapshots.release()

    def submit(self, staged: StagedCapture, *, is_deferring: bool) -> CopyJob:
        """Begin the copy of a capture. The engine continues from there."""
        job = staged.job
        assert job is not None
        job.on_done = lambda done: self._copied(staged, done)
        with undisturbed():
            try:
                with self._lock:
                    self._raise_if_closed(is_closing=self._is_closing)
                    self._is_abandoned = False
                    self.rounds.begin()
                    self.in_flight.begin(staged)
                self.stager.begin(job, is_deferring=is_deferring)
            except BaseException as exc:
                # A capture that was begun must finish, or the exit would wait for it for ever.
                if self.in_flight.has_begun(staged.progress.uid):
                    self.stager.abandon(job, exc)
                else:
                    job.is_copied.set()
                    self.slots.release(job.slots)
                raise
        return job

    def _copied(self, staged: StagedCapture, job: CopyJob) -> None:
        """Runs on the stage thread."""
        try:
            staged.settle()
            if isinstance(job.error, Torn):
                staged.line.edits.note(staged.facts.step, job.error, is_taught=job.plan.is_taught)
            if job.began is not None:
                self.recorder.span(
                    "copy", job.began, time.monotonic(), staged.progress.uid, staged.facts.step
                )
        except BaseException as exc:  # the handle raises it, whatever it is, and the thread goes on
            job.error = job.error or exc
        self.rounds.put(staged)

    def want(self, uid: str) -> None:
        """Make a state durable."""
        self._is_abandoned = False
        progress = self.in_flight.progress_of(uid)
        if progress is not None:
            self._asked[uid] = progress
        self.on_wanted(uid)
        self._post(Wanted(uid))

    def asked(self) -> Collection[str]:
        """The states that a caller wants to become durable, and whose handle it still has."""
        return frozenset(uid for uid, progress in self._asked.items() if progress.is_asked)

    def withdrawn(self, uids: Iterable[str]) -> None:
        """Note that these states are no longer on this node's disk."""
        for uid in (uids := [*uids]):
            self.copies.drop(uid)
        self._post(*(Withdrawn(uid) for uid in uids))

    def _adopt(self, uid: str, base: Manifest | None = None) -> None:
        """Pass a state that no line captured to the engine. It is in the memory tier and in the
        lineage. ``base`` is the manifest of a related state on disk.

        The state stays in memory until it is durable. It becomes durable when memory runs short, or
        when a ref names it.
        """
        with self._lock:
            self._raise_if_closed()
            self.in_flight.adopt(uid, base)
        self._post(Adopted(uid))

    def inherit(self, states: Mapping[str, Status]) -> None:
        """Pass states of a dead process, which are in the memory tier and now belong to this
        process in the lineage, to the engine."""
        self._check_refs(is_forced=True)  # first, so that no head may leave
        for uid, status in states.items():
            with self._lock:
                self._raise_if_closed()
                self.in_flight.adopt(uid, None)
            self._post(Inherited(uid, status is not Status.CAPTURED))

    def check_withdrawal(self, uid: str, *, is_forced: bool = False) -> None:
        """Raise unless a state may be dropped. ``is_forced``: also before it is copied to a further
        tier.

        :raises Conflict: it is the tip of a training, or on its way into the lineage, to disk or
            to a further tier.
        """
        with self._lock:
            reason = self._engine.hold_of(uid, is_captured=self.in_flight.has_begun(uid))
        tier = None if is_forced else self.copies.awaited_by(uid)
        if reason is None and tier is not None:
            reason = f"it is still to be copied to the {tier} tier"
        if reason is not None:
            raise Conflict(f"state {uid} cannot be dropped: {reason}")

    def withdraw(self, uid: str) -> int:
        """Drop a state from memory on which the lineage no longer relies; returns the bytes freed.

        It stays like any other state in memory if something has come to rely on it since
        ``check_withdrawal``.
        """
        with self._lock:
            if self._engine.hold_of(uid, is_captured=self.in_flight.has_begun(uid)) is not None:
                return 0
            freed = self.in_flight.leave(uid, f"state {uid} was dropped before it became durable")
        self._changed.notify_all()
        return freed

    def flush(self) -> None:
        """Wait until every capture so far is recorded or has failed, or waits in memory because the
        database is away.

        :raises Unavailable: the database does not answer at all, not even with an error.
        """
        so_far = self.rounds.begun
        self.rounds.hurry()
        while not self._changed.wait_for(lambda: self.rounds.has_ended(so_far), _SAY_AGAIN_S * 5):
            self._watch.raise_if_stuck()
        self.outbox.settle()
        if self.outbox.is_waiting_for_parts:
            self.outbox.ask()

    def settle(self, line: Line) -> None:
        """Wait until every capture of a line is recorded, was given up or has failed, or waits in
        memory because the database is away.

        :raises Unavailable: the database has been away for a minute.
        """
        self.flush()
        if line.part is not None:
            self._settle_parts()

    def _settle_parts(self) -> None:
        """Wait until the outcome of every part so far is known; this process's patience ends the
        wait."""
        while self.in_flight.awaited or self.outbox.is_waiting_for_parts:
            overdue = self.outbox.overdue()
            if overdue is not None:
                raise overdue
            self.rounds.hurry()
            self._changed.wait_for(
                lambda: not self.in_flight.awaited and not self.outbox.is_waiting_for_parts,
                _SAY_AGAIN_S,
            )

    def skip(self, line: Line, facts: StateFacts, why: Why, reason: str) -> None:
        """Record for the other ranks that this rank has no part of a state. Does nothing for a line
        that captures no parts."""
        if line.part is not None:
            self.outbox.skip(Skip(facts, line.part.rank, why, reason))
            self.rounds.wake()

    def refs_changed(self) -> None:
        """Protect and write what refs name, after some were made, moved or deleted."""
        self._is_abandoned = False
        self._check_refs(is_forced=True)

    def unwritten_clones(self) -> list[str]:
        """Clones that are in memory and not durable, the oldest first."""
        with self._lock:
            return self._engine.unwritten_clones()

    @property
    def pending_writes(self) -> int:
        """The number at the moment of captures not yet recorded, and of states not yet written,
        copied or seen by processors."""
        with self._lock:
            unwritten = self.rounds.in_flight + self._engine.pending_writes + self.outbox.pending
            return unwritten + self.copies.pending + self._processors.backlog

    def drain(
        self, on_wait: Callable[[int], None] | None = None, *, copies_s: float | None = None
    ) -> None:
        """Wait until all captures are recorded and every wanted state is durable (or has failed),
        and is on the further tiers. With ``copies_s``, no copy begins after that many seconds.

        Ctrl-C during the wait gives up what is not durable yet. No later call waits for it, until
        another state is captured or named.

        :raises Unavailable: the database has been away for a minute, or the disk for some seconds.
            The text lists what is not durable.
        """
        failures = self._trouble.failures
        copies_end_at: float | None = None
        try:
            while (pending := self.pending_writes) and not self._is_abandoned:
                if copies_s is not None and pending == self.copies.pending:
                    if copies_end_at is None:
                        copies_end_at = time.monotonic() + copies_s
                        self.copies.end_by(copies_end_at)
                    if not self.copies.is_moving:
                        return
                overdue = self.outbox.overdue() or self._watch.hopeless(failures)
                if overdue is not None:
                    raise overdue
                if on_wait is not None:
                    on_wait(pending)
                self.rounds.hurry()
                self._changed.wait_for(lambda: not self.pending_writes, _SAY_AGAIN_S)
        except KeyboardInterrupt:
            self._is_abandoned = True
            raise
        finally:
            if copies_end_at is not None:
                self.copies.end_by(None)

    @property
    def has_given_up(self) -> bool:
        """Whether the last wait for states to become durable was ended by Ctrl-C, or because the
        disk did not take them in time."""
        return self._is_abandoned or self._has_lost

    def close(self) -> None:
        """Make the heads durable, wait, and end the threads. It is idempotent, and a call after an
        interrupt resumes. These threads must not call it.

        :raises Unavailable: the database has been away for a minute, or the disk for some seconds.
            The text lists what is lost.
        """
        try:
            if not self._is_closed:
                with self._lock:
                    self._is_closing = True  # nothing that is begun from now on would be copied
                self.stager.close()
                self.flush()
                self._settle_parts()
                self._check_refs(is_forced=True)
                self._post(Closing(None))
                self.drain(copies_s=CLOSING_S)
                with undisturbed():
                    self._end()
        except Unavailable:
            with undisturbed():
                # do not wait for a thread that may never come back
                self._is_abandoned = self._is_abandoned or self.is_held_up
                self._has_lost = self._trouble.why is not None and not self.is_held_up
                self._end()
            raise
        finally:
            if self._is_closed and not self._is_abandoned:
                # else daemon threads may still be in a write that is not waited for
                for thread in self._threads:
                    thread.join()
                self._processors.join()
                self.copies.join()

    def _end(self) -> None:
        # they end with this process; durable states stay durable
        self.outbox.evict(self._memory.uids())
        if not self.is_held_up:
            with suppress(Unavailable):  # the next process that opens the repository finds out
                self.outbox.record_evictions()
        with self._lock:
            self._is_closed = True
        self.snapshots.release()
        self.writer.close()
        self.in_flight.give_up_all(
            "state {uid} was in memory only when its repository was closed: wait for it before"
            " that, or tag it"
        )
        self.rounds.close()
        self._processors.close(is_giving_up=self._is_abandoned)
        self.copies.close(0.0)
        self._prefaulter.close()
        self._heartbeat.close()

    # --- nothing can be written, or recorded ------------------------------------------------------

    @property
    def trouble(self) -> str | None:
        """Why states cannot be written or copied to a further tier, since when, and the costs so
        far. None while all work."""
        self._watch.look()
        with self._lock:
            of_disk = self._trouble.describe(self._engine.pending_writes)
        return of_disk or self.copies.trouble

    @property
    def is_held_up(self) -> bool:
        """Whether a thread is in the middle of a system call that may never return."""
        return self._watch.is_held_up

    # --- the engine thread ------------------------------------------------------------------------

    def _run_engine(self) -> None:
        while (captures := self.rounds.take(self._tick_delay())) is not None:
            try:
                if captures:
                    self._finish(captures)
                else:
                    self._tick()
                self._polling.look(has_told=bool(captures))
            except BaseException as exc:
                # the log shows any error and the lines raise it, and the thread continues
                _logger.exception("the engine failed; it goes on")
                for staged in captures:
                    self.in_flight.abort(staged, exc)
            finally:
                for staged in captures:
                    staged.job = staged.work = None  # they keep the copied tensors alive
                self.rounds.end(len(captures))
                self._changed.notify_all()
                self.recorder.add_up()

    def _finish(self, captures: list[StagedCapture]) -> None:
        """Do the second half of these captures, step by step."""
        began, newest = time.monotonic(), captures[-1]
        try:
            self.commits.commit_round(captures)
        except BaseException as exc:  # the handles raise it, whatever it is
            self.commits.settle(captures, exc)
        self.recorder.span("round", began, time.monotonic(), newest.progress.uid, newest.facts.step)
        self._check()
        self.slots.make_ahead(self._config.back_pressure)

    def _tick_delay(self) -> float:
        with self._lock:
            due = self._engine.next_tick()
        delay = min(CHECK_EVERY_S, self._polling.delay())
        return delay if due is None else min(delay, max(0.01, due - time.monotonic()))

    def _tick(self) -> None:
        self._post(Tick(time.monotonic()))
        self._check()

    def _check(self) -> None:
        """Once a second: report that this process works, and check writes, memory and lineage."""
        if time.monotonic() - self._checked_at < CHECK_EVERY_S:
            return
        self._heartbeat.beat()
        self._watch.look()
        self._prefaulter.look()
        self._trouble.remind(self._engine.pending_writes)
        try:
            self.outbox.settle()
            self._check_refs()
            self._paces.note()
        except Exception as error:  # captures continue whatever the database raises
            if self._check_error != repr(error):
                _logger.exception("checking the lineage failed; it is tried again")
            self._check_error = repr(error)
        else:
            self._check_error = None
        self._checked_at = time.monotonic()
        self.in_flight.hold_up()

    def _check_refs(self, *, is_forced: bool = False) -> None:
        """Any thread."""
        changed = self._named.look(is_forced=is_forced)
        if changed is not None:
            self._post(changed)

    # --- carrying out decisions, any thread -------------------------------------------------------

    def _on_marked(self, added: int) -> None:
        self.on_durable(added)
        if self._config.on_step is not None:
            self._config.on_step("marked-durable")

    def _post(self, *events: Event) -> list[Action]:
        done = []
        with self._lock:
            for event in (left := [*events]):
                actions = self._engine.handle(event)
                for action in actions:
                    self._act(action)
                done += actions
                full = next(
                    (
                        action
                        for action in actions
                        if isinstance(action, Evict | GiveWay) and len(action.uids) == AT_A_TIME
                    ),
                    None,
                )
                if (
                    full is not None
                    and isinstance(event, RoomNeeded)
                    and not self.slots.has(event.lengths)
                ):
                    # more states may leave than were named
                    left.append(replace(event, is_blocked=isinstance(full, GiveWay)))
        self._paces.say()
        self._changed.notify_all()
        return done

    def _act(self, action: Action) -> None:
        match action:
            case Write(uids, near):
                for uid in uids:
                    self.outbox.want(uid, is_near=uid in near)
                self._notify_ranks()
                self.writer.put(uids)
            case Evict(uids, until):
                self._evict(uids, until)
            case CadenceChanged():
                self._paces.take(action)
            case PassOn(uids):
                self.in_flight.pass_on(uids)
                self._notify_ranks()
            case GiveUp(uids):
                self.in_flight.give_up(
                    uids,
                    "state {uid} gave way to newer ones before it was written"
                    " (back_pressure='drop-oldest')",
                )

            case GiveWay(uids, until):
                self._give_way(uids, until)

    def _notify_ranks(self) -> None:
        if self.outbox.has_news:
            self.rounds.wake()

    def _give_way(self, uids: tuple[str, ...], until: tuple[int, ...]) -> None:
        for uid in uids:
            if self.slots.has(until):
                return
            self._trouble.note_left(1)
            self.recorder.count("evicted")
            self.in_flight.leave(
                uid,
                f"state {uid} left memory, which was full, before it could be written:"
                f" {self._trouble.why}",
            )

    def _evict(self, uids: tuple[str, ...], until: tuple[int, ...] | None) -> None:
        for uid in uids:
            if until is not None and self.slots.has(until):
                return
            why = (
                f"state {uid} left memory before it became durable: make more states durable, or"
                " give more memory_bytes"
            )
            self.in_flight.leave(uid, why)
            self.recorder.count("evicted")

    def _raise_if_closed(self, *, is_closing: bool = False) -> None:
        if self._is_closed or is_closing:
            raise Closed("the repository is closed: open it again to capture")
