"""The helper threads and timers of the engine: the writer, the rounds and checks of the engine
thread, the lease's heartbeat, and the watch over stuck threads.

Also the times at which the lineage is queried for parts of other ranks (``Polling``), and reports
of what policies chose (``Paces``).
"""

from __future__ import annotations

import errno
import logging
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from datastates.errors import Unavailable
from datastates.lineage.database import Database
from datastates.lineage.views.text import plural
from datastates.lineage.write import runs
from datastates.policy.auto import KEPT
from datastates.policy.contract import noted
from datastates.system.interrupts import Mutex, undisturbed
from datastates.system.logs import event
from datastates.system.telemetry import Recorder
from datastates.system.threads import Notifier, ThreadWork, thread_work, work_of, yield_disk
from datastates.values import Value

from .commit import Pipeline
from .handle import Line, Staged
from .in_flight import Locked, Register
from .outbox import Journal
from .scheduler import Paced, Retry, Stalled, WriteFailed, Written
from .steps import Copies

_logger = logging.getLogger(__name__)

CLOSING_S = 5.0
"""How long closing a training or a repository waits for a disk in trouble: many schedulers give
ten seconds for the whole end."""

_SAY_AGAIN_S = 600.0


def is_full(error: BaseException) -> bool:
    """Whether a write failed because the disk is full."""
    cause = error.__cause__
    return isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT)


@dataclass(slots=True)
class Trouble:
    """The trouble of one runner, used under its lock.

    ``failures`` counts all so far; ``why`` is None while there is no trouble."""

    clock: Callable[[], float] = time.monotonic
    failures: int = 0
    why: str | None = None
    since: float = 0.0
    closing_since: float | None = None
    """When a caller that closes began to wait for the end of the trouble."""
    _given_way: int = 0
    _skipped: int = 0
    _said_at: float = field(default=0.0, repr=False)

    def begin(self, why: str) -> None:
        """Note that writing failed, or has stalled."""
        is_new, self.why = self.why is None, why
        if is_new:
            self.since = self._said_at = self.clock()
            _logger.warning(
                "states cannot be written for now; the training goes on, and they wait in"
                " memory: %s",
                why,
                extra=event("writes.paused", reason=why),
            )

    def note_left(self, count: int) -> None:
        """Note that states have left memory unwritten."""
        self._given_way += count

    def note_skipped(self) -> None:
        """Note that a capture was not taken."""
        self._skipped += 1

    def remind(self, waiting: int) -> None:
        """Log that the trouble lasts, if that was not logged for a while."""
        if self.why is not None and self.clock() - self._said_at >= _SAY_AGAIN_S:
            self._said_at = self.clock()
            lasting = event(
                "writes.still_paused",
                seconds=self._said_at - self.since,
                waiting=waiting,
                reason=self.why,
            )
            _logger.warning("still %s", self.describe(waiting), extra=lasting)

    def end(self, waiting: int) -> None:
        """Note that a state was written, which ends the trouble; ``waiting`` states are still to
        be written."""
        if self.why is None:
            return
        after = self.clock() - self.since
        over = event(
            "writes.resumed",
            seconds=after,
            waiting=waiting,
            left=self._given_way,
            skipped=self._skipped,
        )
        _logger.warning(
            "states are written again, after %.0f s; %d more to write%s",
            after,
            waiting,
            self._cost(),
            extra=over,
        )
        self.why = self.closing_since = None
        self._given_way = self._skipped = 0

    def describe(self, waiting: int) -> str | None:
        """A text about the trouble. None while there is none."""
        if self.why is None:
            return None
        states = "1 state waits" if waiting == 1 else f"{waiting} states wait"
        return (
            f"nothing can be written since {self.clock() - self.since:.0f} s, and {states} in"
            f" memory{self._cost()}: {self.why}"
        )

    def describe_lost(self, names: Sequence[str]) -> str:
        """What is lost with this process, and why: names of at least one state."""
        said = f"{names[0]} is in memory only, and is lost with this process"
        if len(names) > 1:
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            said = (
                f"{len(names)} states are in memory only, and are lost with this process:"
                f" {', '.join(names[:5])}{more}"
            )
        return f"{said}; {self.why}"

    def _cost(self) -> str:
        left = f", {self._given_way} left it unwritten as it was full" if self._given_way else ""
        return left + (f", {plural(self._skipped, 'capture')} skipped" if self._skipped else "")


# --- Writer: writes states to disk, a group after the other, as the engine chooses them ---


class Writer:
    """Writes states to disk; any thread may call ``put``.

    It reports each outcome to the register or to ``trouble``, and to the engine."""

    def __init__(
        self,
        pipeline: Pipeline,
        register: Register,
        locked: Locked,
        trouble: Trouble,
        copies: Copies,
        recorder: Recorder,
    ) -> None:
        self._pipeline, self._register, self._engine, self._post = (
            pipeline,
            register,
            locked.engine,
            locked.post,
        )
        self._trouble, self._copies, self._recorder = trouble, copies, recorder
        self.on_full: Callable[[], None] = lambda: None
        """Called when the disk is full."""
        self._groups: queue.SimpleQueue[tuple[str, ...] | None] = queue.SimpleQueue()
        self._is_closed = False
        self.thread = threading.Thread(target=self._run, name="datastates-writer", daemon=True)

    def put(self, uids: tuple[str, ...]) -> None:
        """Queue states, which are written together once those before them are."""
        self._groups.put(uids)

    def close(self) -> None:
        """Let the thread end.

        Failures from now on are not reported: no caller waited for the writes, and the tier may
        be closed by now."""
        self._is_closed = True
        self._groups.put(None)

    def _run(self) -> None:
        yield_disk()  # the training may be reading its data
        while (uids := self._groups.get()) is not None:
            self._write(uids)

    def _write(self, uids: tuple[str, ...]) -> None:
        began, used = time.monotonic(), time.thread_time()
        try:
            with thread_work(
                f"writing state {uids[0]}" + (f" and {len(uids) - 1} more" if len(uids) > 1 else "")
            ):
                size = self._pipeline.write(uids)
        except BaseException as exc:  # the handle raises it, whatever it is, and the thread goes on
            _logger.debug("writing %s failed", uids, exc_info=exc)
            if len(uids) > 1 and not isinstance(exc, Unavailable):
                for uid in uids:  # one of them cannot be written, and the others can
                    self._write((uid,))
            elif not self._is_closed:
                self._on_failed(uids, exc)
        else:
            self._post(
                Written(
                    uids,
                    began,
                    time.monotonic(),
                    self._copies.took_s,
                    size,
                    time.thread_time() - used,
                )
            )
            self._trouble.end(self._engine.pending_writes)

    def _on_failed(self, uids: tuple[str, ...], error: BaseException) -> None:
        patient = [
            uid for uid in uids if isinstance(error, Unavailable) and self._register.is_patient(uid)
        ]
        if patient:
            self._trouble.failures += 1
            self._recorder.count("retries")
            self._trouble.begin(str(error))
            if is_full(error):
                self.on_full()
        others = tuple(uid for uid in uids if uid not in patient)
        for uid in others:
            self._register.fail_write(uid, error)
        now = time.monotonic()
        self._post(
            *(
                WriteFailed(each, now, is_passing)
                for each, is_passing in ((others, False), (tuple(patient), True))
                if each
            )
        )


# --- Rounds: when the engine thread works ---
# It works at once if a caller waits, and otherwise on several captures in one go.


ROUND_S = 0.1
"""The seconds from the beginning of one round to the beginning of the next."""

MOST_READY = 32
"""The most captures that wait for a round, even if they take hardly any memory."""


class Rounds:
    """Captures on their way to the engine thread, in order.

    ``take`` and ``end`` belong to that thread, ``put`` to the stage thread."""

    def __init__(self) -> None:
        self._ready: deque[Staged] = deque()
        self._begun = self._ended = self._hurried = 0
        self._put_bytes = self._taken_bytes = 0
        self._turn = Mutex()
        self._last = -math.inf
        self._is_closed = self._is_woken = False
        self._notifier = Notifier()
        self.on_hurry: Callable[[], None] = lambda: None
        """Called when a caller waits for anything."""
        self.room_bytes = 0
        """How much memory all states may take at the moment."""

    @property
    def begun(self) -> int:
        """How many captures have begun so far."""
        return self._begun

    @property
    def in_flight(self) -> int:
        """The number of captures that have begun, and whose round has not ended."""
        return self._begun - self._ended

    def has_ended(self, count: int) -> bool:
        """Whether the rounds of the first ``count`` captures have ended."""
        return self._ended >= count

    def begin(self) -> None:
        """Count a capture that begins and that ``put`` will bring.

        One thread at a time: under the caller's lock."""
        self._begun += 1

    def put(self, staged: Staged) -> None:
        """Add a capture that was copied, or has failed."""
        with self._turn:
            self._put_bytes += staged.held_bytes
            self._ready.append(staged)
        if staged.job is not None and staged.job.error is not None:
            self._hurried = self._begun
        if self._is_due():
            self._notifier.notify_all()

    def hurry(self) -> None:
        """Start a round soon, because a caller waits for what has begun. Callable from any
        thread. If two call at once, one of them may wait for the next round."""
        if self._hurried < self._begun:
            self._hurried = self._begun
            self._notifier.notify_all()
        self.on_hurry()

    def wake(self) -> None:
        """Let ``take`` return, even without captures, so that the engine thread can run its checks.

        Callable from any thread."""
        self._is_woken = True
        self._notifier.notify_all()

    def take(self, timeout_s: float) -> list[Staged] | None:
        """The captures of a round, which begins now; an empty list if none is due within
        ``timeout_s``, or after ``wake``. None at the end."""
        deadline = time.monotonic() + timeout_s
        while not self._is_due() and not self._is_closed:
            if self._is_woken:
                self._is_woken = False
                return []
            now = time.monotonic()
            if now >= deadline:
                return []
            pause = self._last + ROUND_S - now
            self._notifier.wait_for(
                lambda: self._is_due() or self._is_closed or self._is_woken,
                min(deadline - now, pause if pause > 0 else math.inf),
            )
        if not self._ready:
            return None
        self._last = time.monotonic()
        taken = [self._ready.popleft() for _ in range(len(self._ready))]
        self._taken_bytes += sum(staged.held_bytes for staged in taken)
        return taken

    def end(self, count: int) -> None:
        """End the round of ``count`` captures."""
        self._ended += count

    def close(self) -> None:
        """Let the engine thread end, once it has taken what is ready."""
        self._is_closed = True
        self._notifier.notify_all()

    def _is_due(self) -> bool:
        if not self._ready:
            return False
        if (
            self._hurried > self._ended
            or len(self._ready) >= MOST_READY
            or time.monotonic() - self._last >= ROUND_S
        ):
            return True
        return (
            self._put_bytes - self._taken_bytes + 3 * self._ready[-1].held_bytes > self.room_bytes
        )


# --- Checks about once a second: writes, memory, the lineage, and refs of other processes ---


EVERY_S = 1.0
"""The time between two checks, in seconds: for so long a ref that another process made may be
unknown here."""


class Lookout:
    """Runs the checks on the engine thread.

    Those in ``asking`` may fail, as they ask the lineage; those in ``seeing`` never do."""

    def __init__(
        self, seeing: Sequence[Callable[[], None]], asking: Sequence[Callable[[], None]]
    ) -> None:
        self._seeing, self._asking = seeing, asking
        self._looked_at = 0.0
        self._failed: str | None = None

    def look(self) -> bool:
        """Run the checks if it is time; returns whether it was."""
        if time.monotonic() - self._looked_at < EVERY_S:
            return False
        for see in self._seeing:
            see()
        try:
            for ask in self._asking:
                ask()
        except Exception as error:  # captures go on whatever the database raises; it is logged once
            if self._failed != repr(error):
                _logger.exception("looking for refs that others made failed; it is tried again")
            self._failed = repr(error)
        else:
            self._failed = None
        self._looked_at = time.monotonic()
        return True


# --- Heartbeat, on a separate thread, because a folder may block ---


class Pulse:
    """Calls ``beat`` whenever the engine reports that it works. Safe from any thread."""

    def __init__(self, beat: Callable[[], None]) -> None:
        self._beat, self._notifier = beat, Notifier()
        self._is_due = self._is_closed = False
        threading.Thread(target=self._run, name="datastates-beat", daemon=True).start()

    def beat(self) -> None:
        """Report that the engine works; never waits."""
        self._is_due = True
        self._notifier.notify_all()

    def close(self) -> None:
        """End the thread, without waiting for it, as it may be held up."""
        self._is_closed = True
        self._notifier.notify_all()

    def _run(self) -> None:
        while True:
            self._notifier.wait_for(lambda: self._is_due or self._is_closed)
            if self._is_closed:
                return
            self._is_due = False
            try:
                self._beat()
            except Exception:  # the only effect is that other processes see no sign of life
                _logger.debug("the process could not say that it is at work", exc_info=True)


# --- Watch: whether threads make progress, by their system calls, and how long callers wait ---


STALL_S = 30.0
"""A write that has made no progress for this long, in seconds, counts as stalled."""

STUCK_S = 90.0
"""How long a caller that must wait for the lineage gives it to answer, in seconds: longer than
it waits for another process's lock."""

_RETRY_S = 1.0
"""How often writing is tried again while a caller that closes waits for it, in seconds."""


class Watch:
    """Watches the thread that records and the one that writes, from any thread.

    A stalled write begins a trouble."""

    def __init__(
        self,
        trouble: Trouble,
        register: Register,
        locked: Locked,
        *,
        recording: threading.Thread,
        writing: threading.Thread,
    ) -> None:
        self._trouble, self._recording, self._writing = trouble, recording, writing
        self._register, self._engine, self._lock, self._post = (
            register,
            locked.engine,
            locked.lock,
            locked.post,
        )
        self._retried_at = 0.0

    @property
    def is_held_up(self) -> bool:
        """Whether one of the threads is in the middle of a system call that may never return."""
        return any(
            _stalled(thread, STALL_S) is not None for thread in (self._recording, self._writing)
        )

    def look(self) -> None:
        """Check whether the write that is under way makes progress."""
        is_stalled = self._begins_trouble(_stalled(self._writing, STALL_S))
        if is_stalled != self._engine.is_stalled:
            self._post(Stalled(is_stalled))

    def is_stuck(self) -> bool:
        """Whether the lineage has not answered for too long; checks the write as well."""
        self.look()
        return self._begins_trouble(_stalled(self._recording, STUCK_S))

    def raise_if_stuck(self) -> None:
        """End a wait for the lineage if it is stuck.

        :raises Unavailable: it has not answered for too long.
        """
        if self.is_stuck():
            raise Unavailable(f"captures are not recorded: {self._trouble.why}", trouble="lineage")

    def hopeless(self, failures: int) -> Unavailable | None:
        """The error for callers that wait for states to become durable, once the disk has been in
        trouble for too long.

        Each caller sees at least one more try: ``failures`` is the count when it began to wait.
        """
        self.look()
        now, trouble = time.monotonic(), self._trouble
        if trouble.why is None or not self._engine.is_in_trouble:
            return None
        if trouble.closing_since is None:
            trouble.closing_since = now
        if now - trouble.closing_since < CLOSING_S or (
            trouble.failures == failures and not self._engine.is_stalled
        ):
            if now - self._retried_at >= _RETRY_S:
                self._retried_at = now
                self._post(Retry())
            return None
        with self._lock:
            names = self._register.named(self._engine.unwritten())
        if not names:
            return None
        return Unavailable(
            trouble.describe_lost(names), trouble=f"unwritten: {self._register.folder}"
        )

    def _begins_trouble(self, stalled: ThreadWork | None) -> bool:
        if stalled is not None:
            self._trouble.begin(stalled.describe(time.monotonic()))
        return stalled is not None


def _stalled(thread: threading.Thread, limit_s: float) -> ThreadWork | None:
    one = work_of(thread)
    return one if one is not None and one.is_stalled(time.monotonic(), limit_s) else None


# --- Times to query states that wait for parts of other ranks ---


SOON_S = 0.025
HURRIED_S = 0.005
SELDOM_S = 0.25
"""The time to the first query: after something that all ranks do, while a caller waits for it, and
if other ranks may only have a request."""

MOST_HURRIED_S = 0.5
MOST_S = 1.0
LAST_S = 4.0
"""The longest pause between two queries. Each is twice as long as the one before. The first applies
while a caller waits. The second applies to few processes, if others may only have a request. The
last applies in all other cases."""

PER_S = 500
SELDOM_PER_S = 100
"""The most questions per second of all processes together: of first questions, and of those that
come at the longest pauses."""

_LASTS_S = 2.0
"""The seconds for which a caller counts as waiting after its call. One that waits longer calls
again."""


@dataclass(slots=True)
class Polls:
    """The times of one engine thread's queries. Any thread may call ``hurry``. ``askers`` is the
    number of processes that query the database.

    ``is_awaiting`` is whether other ranks still have to deliver a part, or to write it to their
    disk.
    """

    askers: int = 1
    _at: float = math.inf
    _pause_s: float = 0.0
    _hurried_until: float = -math.inf

    def hurry(self, now: float) -> None:
        """Note that a caller waits."""
        was_hurried, self._hurried_until = now < self._hurried_until, now + _LASTS_S
        if not was_hurried and not self.is_off:
            self._pause_s, self._at = 0.0, now

    def begin(self, now: float, *, is_awaiting: bool) -> None:
        """Start querying: something was recorded, and a result is expected."""
        self._pause_s = self._pause(now, is_awaiting=is_awaiting)
        self._at = now + self._pause_s

    def end(self) -> None:
        """Stop asking: nothing waits."""
        self._at = math.inf

    @property
    def is_off(self) -> bool:
        """Whether no question is planned."""
        return self._at == math.inf

    def asked(self, now: float, *, is_awaiting: bool) -> None:
        """Note that a query was made, and something still waits."""
        self._pause_s = self._pause(now, 2 * self._pause_s, is_awaiting=is_awaiting)
        self._at = now + self._pause_s

    def delay(self, now: float) -> float:
        """The time to the next question, in seconds; infinite if none is planned."""
        return max(0.0, self._at - now)

    def _pause(self, now: float, least_s: float = 0.0, *, is_awaiting: bool) -> float:
        crowd_s = self.askers / PER_S
        if not is_awaiting:
            first_s, most_s = SELDOM_S, min(max(MOST_S, self.askers / SELDOM_PER_S), LAST_S)
        elif now < self._hurried_until:
            first_s, most_s = HURRIED_S, MOST_HURRIED_S
        else:
            first_s, most_s = SOON_S, LAST_S
        return max(crowd_s, min(max(first_s, least_s), most_s))


class Polling:
    """Queries the lineage when it is time. ``look`` and ``delay`` belong to the engine thread.
    Parts that wait longer than ``patience_s`` for other ranks' parts are given up. It may be set at
    any time."""

    def __init__(self, journal: Journal, rounds: Rounds, patience_s: float) -> None:
        self._journal, self._rounds, self.patience_s = journal, rounds, patience_s
        self._polls = Polls()
        self._has_half = False
        rounds.on_hurry = self._hurry
        journal.on_half = self._begin_anew

    def join(self, ranks: int) -> None:
        """Note that this process is one of ``ranks`` in a job."""
        self._polls.askers = ranks

    def delay(self) -> float:
        """The time to the next question, in seconds; infinite if none is planned."""
        return self._polls.delay(time.monotonic())

    def look(self, *, has_told: bool) -> None:
        """If it is time, query the results of the parts that wait for other ranks' parts.
        ``has_told``: a round was recorded just now."""
        has_told, self._has_half = has_told or self._has_half, False
        now, journal = time.monotonic(), self._journal
        if not self._is_wanted:
            self._polls.end()
        elif journal.has_news or (not has_told and not self._polls.delay(now)):
            journal.ask(self.patience_s)
            self._polls.asked(time.monotonic(), is_awaiting=journal.is_awaiting)
        elif has_told or self._polls.is_off:
            self._polls.begin(now, is_awaiting=journal.is_awaiting)

    def _hurry(self) -> None:
        self._polls.hurry(time.monotonic())
        if self._is_wanted:
            self._rounds.wake()

    def _begin_anew(self) -> None:
        self._has_half = True
        self._rounds.wake()

    @property
    def _is_wanted(self) -> bool:
        return self._journal.is_waiting_for_others or self._journal.may_be_wanted


# --- Choices of policies, reported to the training, the log and the lineage ---


_LASTING_S = 30.0  # a choice that is not the first is logged once it has lasted so long


class Paces:
    """``take`` runs under the runner's lock, ``say`` and ``note`` without it. ``begin`` and ``end``
    belong to the training thread."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._lines: dict[str, Line] = {}
        self._unsaid: dict[str, tuple[Line, str, float]] = {}
        self._said: dict[str, str] = {}
        self._unnoted: dict[str, Line] = {}

    def begin(self, line: Line) -> None:
        """Register a training that begins."""
        self._lines[line.name] = line

    def end(self, line: Line) -> None:
        """Remove a training that ends; the code that finishes its run notes its last costs."""
        for known in (self._lines, self._unsaid, self._said):
            known.pop(line.name, None)

    def take(self, paced: Paced) -> None:
        """Take the new costs of a line's writes, or its policy's new choice."""
        line = self._lines.get(paced.line)
        if line is None:
            return
        is_first = line.costs is None
        line.costs, line.choice = paced.costs, paced.choice or line.choice
        if paced.has_changed and paced.choice is not None:
            since = time.monotonic() if line.name in self._said else -math.inf
            self._unsaid[line.name] = (line, paced.choice.why, since)
        if is_first or paced.has_changed:
            self._unnoted[line.name] = line

    def say(self) -> None:
        """Log each choice that has lasted, in one line."""
        for name, (line, why, since) in list(self._unsaid.items()) if self._unsaid else ():
            if (
                time.monotonic() - since < _LASTING_S
                or self._unsaid.pop(name, None) is None
                or self._said.get(name) == why
            ):
                continue
            self._said[name] = why
            with undisturbed():  # an interrupt could leave the locks of logging taken
                chosen = event("cadence.chosen", branch=line.branch, reason=str(why))
                what = f"{why}{line.bound}" if KEPT in why else f"states become durable {why}"
                _logger.info("branch %s: %s", line.branch, what, extra=chosen)

    def note(self) -> None:
        """Record in the lineage what was chosen since the last call, and at what costs. Records
        that it does not accept now are made later.

        :raises Unavailable: the database does not respond.
        """
        while self._unnoted:
            name, line = next(iter(self._unnoted.items()))
            if line.run is not None:
                with self._database.write() as session:
                    runs.note(session, line.run.uid, facts_of(line))
            self._unnoted.pop(name, None)


def facts_of(line: Line) -> Mapping[str, Value]:
    """The facts about a line's costs and choice that are recorded with its run."""
    return {} if line.costs is None else noted(line.costs, line.choice)
