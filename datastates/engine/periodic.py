"""What the engine does from time to time: rounds of captures, the lease's heartbeat, and queries of
the lineage.

It queries for parts of other ranks (``PartPolling``) and for refs that were moved
(``RefWatcher``), and reports what policies chose (``CadenceReports``).
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from datastates.errors import Unavailable
from datastates.lineage.database import Database
from datastates.lineage.query import names
from datastates.lineage.states import RefKind
from datastates.lineage.views import detail
from datastates.lineage.write import runs
from datastates.policy.auto import KEPT
from datastates.policy.contract import noted
from datastates.system.interrupts import Mutex, undisturbed
from datastates.system.logs import event
from datastates.system.threads import Notifier
from datastates.values import Value

from .handle import Line, StagedCapture
from .outbox import Outbox
from .scheduler import CadenceChanged, RefsChanged

if TYPE_CHECKING:
    from datastates.lineage.session import Session

_logger = logging.getLogger(__name__)

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
        self._ready: deque[StagedCapture] = deque()
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

    def put(self, staged: StagedCapture) -> None:
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

    def take(self, timeout_s: float) -> list[StagedCapture] | None:
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
        try:
            newest = self._ready[-1]
        except IndexError:  # the engine thread may have taken it since ``put`` added it
            return False
        if (
            self._hurried > self._ended
            or len(self._ready) >= MOST_READY
            or time.monotonic() - self._last >= ROUND_S
        ):
            return True
        return self._put_bytes - self._taken_bytes + 3 * newest.held_bytes > self.room_bytes


# --- Heartbeat, on a separate thread, because a folder may block ---


class Heartbeat:
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
class PollSchedule:
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


class PartPolling:
    """Queries the lineage when it is time. ``look`` and ``delay`` belong to the engine thread.
    Parts that wait longer than ``patience_s`` for other ranks' parts are given up. It may be set at
    any time."""

    def __init__(self, outbox: Outbox, rounds: Rounds, patience_s: float) -> None:
        self._outbox, self._rounds, self.patience_s = outbox, rounds, patience_s
        self._polls = PollSchedule()
        self._has_half = False
        rounds.on_hurry = self._hurry
        outbox.on_half = self._restart_polling

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
        now, outbox = time.monotonic(), self._outbox
        if not self._is_wanted:
            self._polls.end()
        elif outbox.has_news or (not has_told and not self._polls.delay(now)):
            outbox.ask(self.patience_s)
            self._polls.asked(time.monotonic(), is_awaiting=outbox.is_awaiting)
        elif has_told or self._polls.is_off:
            self._polls.begin(now, is_awaiting=outbox.is_awaiting)

    def _hurry(self) -> None:
        self._polls.hurry(time.monotonic())
        if self._is_wanted:
            self._rounds.wake()

    def _restart_polling(self) -> None:
        self._has_half = True
        self._rounds.wake()

    @property
    def _is_wanted(self) -> bool:
        return self._outbox.is_waiting_for_parts or self._outbox.may_be_wanted


# --- Choices of policies, reported to the training, the log and the lineage ---


_LASTING_S = 30.0  # a choice that is not the first is logged once it has lasted so long


class CadenceReports:
    """``take`` runs under the runner's lock, ``say`` and ``note`` without it. ``begin`` and ``end``
    belong to the training thread."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._lines: dict[str, Line] = {}
        self._unlogged: dict[str, tuple[Line, str, float]] = {}
        self._said: dict[str, str] = {}
        self._unrecorded_lines: dict[str, Line] = {}

    def begin(self, line: Line) -> None:
        """InFlight a training that begins."""
        self._lines[line.name] = line

    def end(self, line: Line) -> None:
        """Remove a training that ends; the code that finishes its run notes its last costs."""
        for known in (self._lines, self._unlogged, self._said):
            known.pop(line.name, None)

    def take(self, paced: CadenceChanged) -> None:
        """Take the new costs of a line's writes, or its policy's new choice."""
        line = self._lines.get(paced.line)
        if line is None:
            return
        is_first = line.costs is None
        line.costs, line.choice = paced.costs, paced.choice or line.choice
        if paced.has_changed and paced.choice is not None:
            since = time.monotonic() if line.name in self._said else -math.inf
            self._unlogged[line.name] = (line, paced.choice.why, since)
        if is_first or paced.has_changed:
            self._unrecorded_lines[line.name] = line

    def say(self) -> None:
        """Log each choice that has lasted, in one line."""
        for name, (line, why, since) in list(self._unlogged.items()) if self._unlogged else ():
            if (
                time.monotonic() - since < _LASTING_S
                or self._unlogged.pop(name, None) is None
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
        while self._unrecorded_lines:
            name, line = next(iter(self._unrecorded_lines.items()))
            if line.run is not None:
                with self._database.write() as session:
                    runs.note(session, line.run.uid, facts_of(line))
            self._unrecorded_lines.pop(name, None)


def facts_of(line: Line) -> Mapping[str, Value]:
    """The facts about a line's costs and choice that are recorded with its run."""
    return {} if line.costs is None else noted(line.costs, line.choice)


# --- States that refs name, read again whenever the reflog has grown ---


READS_PER_S = 100.0
"""The number of reads per second of all ranks but the first, together."""

MOST_BETWEEN_READS_S = 60.0
"""The longest time from one read of a rank to its next, in seconds."""

_NOTHING = -1  # before the first line of the reflog


class RefWatcher:
    """Safe from any thread."""

    def __init__(self, database: Database, outbox: Outbox) -> None:
        self._database, self._outbox = database, outbox
        self._seen = detail.Horizon(_NOTHING, frozenset())
        self._is_sure = True
        self._tags, self._heads = dict[str, str](), dict[str, str]()
        self._tagged, self._recorded = frozenset[str](), _NOTHING
        self._turn = Mutex()
        self._every_s = self._looks_at = 0.0

    def join(self, rank: int, size: int) -> None:
        """Note that this process is a rank of a job."""
        self._every_s = min(size / READS_PER_S, MOST_BETWEEN_READS_S) if rank else 0.0

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
                        self._read(
                            session, self._recorded if self._recorded <= newest else _NOTHING
                        )
                        self._recorded = seen.id if seen.is_settled else self._recorded
                    seen = (
                        detail.newest_events(session)
                        if has_grown and seen.is_settled
                        else detail.settle(session, seen)
                    )
                    is_known = self._outbox.check(session)
                self._seen, self._is_sure = seen, is_sure
                changed = RefsChanged(self._tagged, dict(self._heads)) if is_read else None
            if not is_known:
                self._outbox.recall()
        except Unavailable as error:
            self._outbox.note_away(error)
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
