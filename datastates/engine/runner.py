"""``Runner``: the threads behind captures. They carry out what ``scheduler`` decides.

    crossing thread   copy.py           queues copies from devices, if there are any
    stage thread      copy.py           copies; passes each capture on, in order
    engine thread     commit.py         each round of captures into memory and into the lineage;
                                        then frees memory ahead
    writer thread     threads.py        to disk; marked as durable
    arena thread      memory_budget.py  touches memory ahead of need
    processor thread  processors.py     the user's processors, if there are any
    copies thread     steps.py          onto the user's tiers, if there are any

One ``Runner`` belongs to a repository that tracks. Its lock guards the ``Engine`` and the
``Register``. No I/O happens under it.
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

from datastates.config import BackPressure, Config
from datastates.errors import Closed, Conflict, Torn, Unavailable
from datastates.lineage.states import NewState, Run, State, StateFacts, Status, Why
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

from . import threads
from .commit import Coming, Commits, Named, Pipeline
from .copy import CopyJob, Stager
from .device_copies import Snapshots
from .handle import Line, Progress, Staged
from .in_flight import Books, Locked, Register
from .memory_budget import Questions, Room, Warmer
from .processors import Processors
from .rank_reports import Skip
from .scheduler import (
    AT_A_TIME,
    Action,
    Adopted,
    BestKnown,
    Closing,
    Engine,
    Event,
    Evict,
    GiveUp,
    GiveWay,
    LineOpened,
    Paced,
    PassOn,
    RoomNeeded,
    Tick,
    Wanted,
    Withdrawn,
    Write,
)
from .steps import Copies
from .threads import Lookout, Paces, Polling, Pulse, Rounds, Trouble, Watch, Writer

if TYPE_CHECKING:
    from datastates.lineage.session import Session

_logger = logging.getLogger(__name__)

_SAY_AGAIN_S = 0.2
"""The seconds between two reports of how many writes are left, to a caller that waits for them."""

_FAILING_S = 3.0
"""How long a close after an error waits for parts of other ranks, in seconds."""


class Runner:
    """Owns the stage, engine and writer threads of one repository.

    ``close`` is idempotent."""

    def __init__(
        self,
        books: Books,
        config: Config,
        *,
        arena: Arena,
        memory: MemoryTier,
        local: LocalTier,
        further: Sequence[Tier] = (),
        beat: Callable[[], None] = lambda: None,
    ) -> None:
        self._config = config
        self._pulse = Pulse(beat)
        self._trouble = Trouble()
        self.recorder = Recorder(config.trace)
        self._lock, self._changed = Mutex(), Notifier()
        self._engine = Engine(config.memory_latest)
        self._paces = Paces(books.database)
        self._processors = Processors(config.processors, memory, self._changed.notify_all)
        self._copies = Copies(
            local, further, books.database, self._changed.notify_all, config.group_patience_s
        )
        locked = Locked(self._engine, self._lock, self._changed, self._post)
        self._register = Register(
            books,
            locked,
            memory=memory,
            local=local,
            processors=self._processors,
            copies=self._copies,
            on_marked=self._on_marked,
            recorder=self.recorder,
        )
        self._pipeline = Pipeline(
            books, self._register, arena=arena, memory=memory, local=local, recorder=self.recorder
        )
        self._commits = Commits(
            books,
            self._register,
            self._pipeline,
            memory,
            adopt=self._adopt,
            post=self._post,
            recorder=self.recorder,
        )
        self.snapshots = Snapshots(config.device_bytes)
        self.stager = Stager(arena, memory.hold, self.snapshots)
        self._rounds = Rounds()
        self._polling = Polling(self._register.journal, self._rounds, config.group_patience_s)
        self._engine_thread = threading.Thread(
            target=self._run_engine, name="datastates-engine", daemon=True
        )
        self._writer = Writer(
            self._pipeline, self._register, locked, self._trouble, self._copies, self.recorder
        )
        self._threads = [self._engine_thread, self._writer.thread]
        self._watch = Watch(
            self._trouble,
            self._register,
            locked,
            recording=self._engine_thread,
            writing=self._writer.thread,
        )
        self._warmer = Warmer(
            arena, is_given=config.memory_bytes is not None, latest=config.memory_latest
        )
        self._room = Room(
            arena,
            memory,
            warmer=self._warmer,
            rounds=self._rounds,
            register=self._register,
            locked=locked,
            questions=Questions(
                self._post,
                self._raise_if_closed,
                self._backlog,
                self._watch,
                self._trouble.note_skipped,
            ),
        )
        self._memory = memory
        memory.on_let_go = self._changed.notify_all
        self._asked = weakref.WeakValueDictionary[str, Progress]()
        self._on_durable: Callable[[int], None] = lambda added: None
        self._named = Named(books.database, self._register.journal)
        self._lookout = Lookout(
            (
                self._pulse.beat,
                self._watch.look,
                self._warmer.look,
                lambda: self._trouble.remind(self._engine.pending_writes),
            ),
            (self._register.journal.settle, self._look_at_refs, self._paces.note),
        )
        self._is_closed = self._is_closing = False
        self._is_abandoned = self._has_lost = False
        for thread in self._threads:
            thread.start()

    # --- the training thread ----------------------------------------------------------------------

    def open_line(self, line: Line, cadence: Policy, size_bytes: int) -> None:
        """Begin a tracker; memory for captures of about this size is made warm meanwhile."""
        self._room.expect(line, size_bytes)
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

    def begin_run(self, run: Run) -> None:
        """Note that a training was recorded as a run, which captures name from now on."""
        self._register.journal.begin(run)

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
        self._warmer.forget(line.name)
        self.snapshots.let_go()

    def acquire(
        self,
        lengths: Sequence[int],
        back_pressure: BackPressure,
        *,
        line: Line | None = None,
        within_s: float | None = None,
    ) -> list[int] | None:
        """Slots for the chunks of a state. None if there is no memory and the back-pressure is
        ``skip``.

        Blocks under ``wait`` and ``drop-oldest`` until memory is freed, but not longer than
        ``within_s``: then the result is None. After a capture, which names its ``line``, memory for
        the next one of its size is freed ahead.

        :raises OverBudget: the state could never fit, or nothing that is in its way can be written.
        """
        return self._room.acquire(tuple(lengths), back_pressure, line=line, within_s=within_s)

    def release(self, slots: list[int]) -> None:
        """Give back slots of a capture that did not come about."""
        self._room.release(slots)

    def submit(self, staged: Staged, *, is_deferring: bool) -> CopyJob:
        """Begin the copy of a capture. The engine continues from there."""
        job = staged.job
        assert job is not None
        job.on_done = lambda done: self._copied(staged, done)
        with undisturbed():
            try:
                with self._lock:
                    self._raise_if_closed(is_closing=self._is_closing)
                    self._is_abandoned = False
                    self._rounds.begin()
                    self._register.begin(staged)
                self.stager.begin(job, is_deferring=is_deferring)
            except BaseException as exc:
                # A capture that was begun must finish, or the exit would wait for it for ever.
                if self._register.has_begun(staged.progress.uid):
                    self.stager.abandon(job, exc)
                else:
                    job.is_copied.set()
                    self.release(job.slots)
                raise
        return job

    def _copied(self, staged: Staged, job: CopyJob) -> None:
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
        self._rounds.put(staged)

    def fence(self, job: CopyJob) -> None:
        """Wait until a copy reads nothing any more: the host for host memory, the current stream
        for device memory."""
        self.stager.fence(job)

    def hurry(self) -> None:
        """Finish the captures so far sooner, because a caller waits for them."""
        self._rounds.hurry()

    def want(self, uid: str) -> None:
        """Make a state durable."""
        self._is_abandoned = False
        progress = self._register.progress_of(uid)
        if progress is not None:
            self._asked[uid] = progress
        self._post(Wanted(uid))

    def check_goal(self, goal: Status) -> None:
        """Check that states of this repository can reach a status.

        :raises InvalidInput: none of its tiers gives it, or a later one.
        """
        self._copies.check_goal(goal)

    def asked(self) -> Collection[str]:
        """The states that a caller wants to become durable, and whose handle it still has."""
        return frozenset(uid for uid, progress in self._asked.items() if progress.is_asked)

    def withdrawn(self, uids: Iterable[str]) -> None:
        """Note that these states are no longer on this node's disk."""
        self._post(*(Withdrawn(uid) for uid in uids))

    def when_durable(self, listener: Callable[[int], None]) -> None:
        """Call ``listener`` whenever a state became durable."""
        self._on_durable = listener

    def when_full(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` whenever a state could not be written because the disk is full, on any
        thread. It must return at once and raise nothing.

        It replaces the listener that was given before.
        """
        self._writer.on_full = listener

    def _adopt(self, uid: str, base: Manifest | None = None) -> None:
        """Pass a state that no line captured to the engine. It is in the memory tier and in the
        lineage. ``base`` is the manifest of a related state on disk.

        The state stays in memory until it is durable. It becomes durable when memory runs short, or
        when a ref names it.
        """
        with self._lock:
            self._raise_if_closed()
            self._register.adopt(uid, base)
        self._post(Adopted(uid))

    def take_in(self, coming: Coming, record: Callable[[Session, NewState], State]) -> State:
        """Take in a merge or a clone; see ``Commits.take_in``."""
        return self._commits.take_in(coming, record)

    def hand_on(self, state: State, branch: str | None) -> None:
        """Show the user's processors a state that was made here and adopted: a merge.

        Captures are handed on without this."""
        self._register.hand_on(state, branch)

    def check_withdrawal(self, uid: str) -> None:
        """Raise unless a state in memory may be dropped.

        :raises Conflict: it is the tip of a training, or on its way into the lineage or to disk.
        """
        with self._lock:
            reason = self._engine.hold_of(uid, is_captured=self._register.has_begun(uid))
        if reason is not None:
            raise Conflict(f"state {uid} cannot be dropped: {reason}")

    def withdraw(self, uid: str) -> int:
        """Drop a state from memory on which the lineage no longer relies; returns the bytes freed.

        It stays like any other state in memory if something has come to rely on it since
        ``check_withdrawal``.
        """
        with self._lock:
            if self._engine.hold_of(uid, is_captured=self._register.has_begun(uid)) is not None:
                return 0
            freed = self._register.leave(uid, f"state {uid} was dropped before it became durable")
        self._changed.notify_all()
        return freed

    def line_of(self, uid: str) -> Line | None:
        """The line of a state in memory."""
        return self._register.line_of(uid)

    def flush(self) -> None:
        """Wait until every capture so far is recorded or has failed, or waits in memory because the
        database is away.

        :raises Unavailable: the database does not answer at all, not even with an error.
        """
        so_far = self._rounds.begun
        self._rounds.hurry()
        while not self._changed.wait_for(lambda: self._rounds.has_ended(so_far), _SAY_AGAIN_S * 5):
            self._watch.raise_if_stuck()
        self._register.journal.settle()
        if self._register.journal.is_waiting_for_others:
            self._register.journal.ask()

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
        while self._register.awaited or self._register.journal.is_waiting_for_others:
            overdue = self._register.journal.overdue()
            if overdue is not None:
                raise overdue
            self._rounds.hurry()
            self._changed.wait_for(
                lambda: (
                    not self._register.awaited and not self._register.journal.is_waiting_for_others
                ),
                _SAY_AGAIN_S,
            )

    def skip(self, line: Line, facts: StateFacts, why: Why, reason: str) -> None:
        """Record for the other ranks that this rank has no part of a state. Does nothing for a line
        that captures no parts."""
        if line.part is not None:
            self._register.journal.skip(Skip(facts, line.part.rank, why, reason))
            self._rounds.wake()

    def missing(self, uid: str) -> str | None:
        """The ranks for which a state waits, as a text for people. None if it waits for none."""
        return self._register.journal.missing(uid)

    def refs_changed(self) -> None:
        """Protect and write what refs name, after some were made, moved or deleted."""
        self._is_abandoned = False
        self._look_at_refs(is_forced=True)

    @property
    def needed_bytes(self) -> int:
        """The memory that captures need to continue: for a state that is kept, one that is written
        and one that is captured."""
        return self._room.needed_bytes

    def unwritten_clones(self) -> list[str]:
        """Clones that are in memory and not durable, the oldest first."""
        with self._lock:
            return self._engine.unwritten_clones()

    @property
    def pending_writes(self) -> int:
        """The number at the moment of captures not yet recorded, and of states not yet written,
        copied or seen by processors."""
        with self._lock:
            unwritten = (
                self._rounds.in_flight
                + self._engine.pending_writes
                + self._register.journal.pending
            )
            return unwritten + self._copies.pending + self._processors.backlog

    def drain(self, on_wait: Callable[[int], None] | None = None) -> None:
        """Wait until all captures are recorded and every wanted state is durable (or has failed).

        Ctrl-C during the wait gives up what is not durable yet. No later call waits for it, until
        another state is captured or named.

        :raises Unavailable: the database has been away for a minute, or the disk for some seconds.
            The text lists what is not durable.
        """
        failures = self._trouble.failures
        try:
            while (pending := self.pending_writes) and not self._is_abandoned:
                overdue = self._register.journal.overdue() or self._watch.hopeless(failures)
                if overdue is not None:
                    raise overdue
                if on_wait is not None:
                    on_wait(pending)
                self._rounds.hurry()
                self._changed.wait_for(lambda: not self.pending_writes, _SAY_AGAIN_S)
        except KeyboardInterrupt:
            self._is_abandoned = True
            raise

    @property
    def has_given_up(self) -> bool:
        """Whether the last wait for states to become durable was ended by Ctrl-C, or because the
        disk did not take them in time."""
        return self._is_abandoned or self._has_lost

    def errors(self) -> list[Exception]:
        """The errors on lines of trackers that no tracker has raised.

        Failures of clones were logged, because no caller waits for them.
        """
        return self._register.errors()

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
                self._look_at_refs(is_forced=True)
                self._post(Closing(None))
                self.drain()
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
                self._copies.join()

    def _end(self) -> None:
        # they end with this process; durable states stay durable
        self._register.journal.evict(self._memory.uids())
        if not self.is_held_up:
            with suppress(Unavailable):  # the next process that opens the repository finds out
                self._register.journal.tell_evictions()
        with self._lock:
            self._is_closed = True
        self.snapshots.let_go()
        self._writer.close()
        self._register.give_up_all(
            "state {uid} was in memory only when its repository was closed: wait for it before"
            " that, or tag it"
        )
        self._rounds.close()
        self._processors.close(is_giving_up=self._is_abandoned)
        self._copies.close()
        self._warmer.close()
        self._pulse.close()

    # --- nothing can be written, or recorded ------------------------------------------------------

    @property
    def trouble(self) -> str | None:
        """Why states cannot be written, since when, and the costs so far. None while writing
        works."""
        self._watch.look()
        with self._lock:
            return self._trouble.describe(self._engine.pending_writes)

    @property
    def is_held_up(self) -> bool:
        """Whether a thread is in the middle of a system call that may never return."""
        return self._watch.is_held_up

    # --- the engine thread ------------------------------------------------------------------------

    def _run_engine(self) -> None:
        while (captures := self._rounds.take(self._tick_delay())) is not None:
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
                    self._register.break_off(staged, exc)
            finally:
                for staged in captures:
                    staged.job = staged.work = None  # they keep the copied tensors alive
                self._rounds.end(len(captures))
                self._changed.notify_all()
                self.recorder.add_up()

    def _finish(self, captures: list[Staged]) -> None:
        """Do the second half of these captures, step by step."""
        began, newest = time.monotonic(), captures[-1]
        try:
            self._commits.take_round(captures)
        except BaseException as exc:  # the handles raise it, whatever it is
            self._commits.settle(captures, exc)
        self.recorder.span("round", began, time.monotonic(), newest.progress.uid, newest.facts.step)
        self._look_around()
        self._room.make_ahead(self._config.back_pressure)

    def _tick_delay(self) -> float:
        with self._lock:
            due = self._engine.next_tick()
        delay = min(threads.EVERY_S, self._polling.delay())
        return delay if due is None else min(delay, max(0.01, due - time.monotonic()))

    def _backlog(self) -> int:
        """The number of states that keep their memory whatever the engine decides: processors have
        not seen them, or they wait for parts of other ranks."""
        return self._processors.backlog + self._register.awaited

    def _tick(self) -> None:
        self._post(Tick(time.monotonic()))
        self._look_around()

    def _look_around(self) -> None:
        if self._lookout.look():
            self._register.hold_up()

    def _look_at_refs(self, *, is_forced: bool = False) -> None:
        """Any thread."""
        changed = self._named.look(is_forced=is_forced)
        if changed is not None:
            self._post(changed)

    # --- carrying out decisions, any thread -------------------------------------------------------

    def _on_marked(self, added: int) -> None:
        self._on_durable(added)
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
                    and not self._room.has(event.lengths)
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
                    self._register.journal.want(uid, is_near=uid in near)
                self._tell_others()
                self._writer.put(uids)
            case Evict(uids, until):
                self._evict(uids, until)
            case Paced():
                self._paces.take(action)
            case PassOn(uids):
                self._register.pass_on(uids)
                self._tell_others()
            case GiveUp(uids):
                self._register.give_up(
                    uids,
                    "state {uid} gave way to newer ones before it was written"
                    " (back_pressure='drop-oldest')",
                )

            case GiveWay(uids, until):
                self._give_way(uids, until)

    def _tell_others(self) -> None:
        if self._register.journal.has_news:
            self._rounds.wake()

    def _give_way(self, uids: tuple[str, ...], until: tuple[int, ...]) -> None:
        for uid in uids:
            if self._room.has(until):
                return
            self._trouble.note_left(1)
            self.recorder.count("evicted")
            self._register.leave(
                uid,
                f"state {uid} left memory, which was full, before it could be written:"
                f" {self._trouble.why}",
            )

    def _evict(self, uids: tuple[str, ...], until: tuple[int, ...] | None) -> None:
        for uid in uids:
            if until is not None and self._room.has(until):
                return
            why = (
                f"state {uid} left memory before it became durable: make more states durable, or"
                " give more memory_bytes"
            )
            self._register.leave(uid, why)
            self.recorder.count("evicted")

    def _raise_if_closed(self, *, is_closing: bool = False) -> None:
        if self._is_closed or is_closing:
            raise Closed("the repository is closed: open it again to capture")
