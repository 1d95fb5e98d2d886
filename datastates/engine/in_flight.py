"""``InFlight``: the states of this process that are in flight or in memory, their lines, and the
handles that report on them."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from datastates.errors import Conflict, NotFound, ProcessorFailed, Torn, Unavailable
from datastates.lineage.database import Database
from datastates.lineage.query.incomplete import Outcome
from datastates.lineage.states import GivenUp, Run, State, Status, Why
from datastates.state.manifest import Manifest
from datastates.storage.local import LocalTier
from datastates.storage.memory import MemoryTier
from datastates.system.interrupts import Mutex
from datastates.system.logs import event
from datastates.system.telemetry import Recorder
from datastates.system.threads import Notifier

from .cadence_stats import CaptureFacts
from .copies import Copies
from .handle import Line, Progress, StagedCapture, finished
from .outbox import Listener, Outbox
from .processors import Processors
from .rank_reports import PendingRecord
from .scheduler import Action, Engine, Event, Recorded, Wanted

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LineageContext:
    """What it takes to report to the lineage: the database, this process's run and folder, and
    ``holder``, the name of its memory."""

    database: Database
    run: Run
    folder: str
    holder: str


@dataclass(frozen=True, slots=True)
class LockedEngine:
    """The engine, and the lock that guards it and ``InFlight``. No I/O happens under the lock.
    ``changed`` is signalled after a change.

    ``post`` passes an event to the engine, under the lock.
    """

    engine: Engine
    lock: Mutex
    changed: Notifier
    post: Callable[[*tuple[Event, ...]], list[Action]]


class InFlight:
    """Keeps, for each state, its line and the progress that its handle shows, and updates them as
    the lineage and the tiers report.

    ``on_marked`` is called after a state was marked as durable, with the bytes that it added.
    """

    def __init__(
        self,
        context: LineageContext,
        locked: LockedEngine,
        *,
        memory: MemoryTier,
        local: LocalTier,
        processors: Processors,
        copies: Copies,
        on_marked: Callable[[int], None],
        recorder: Recorder,
    ) -> None:
        self._recorder = recorder
        self._engine, self._lock, self._changed = locked.engine, locked.lock, locked.changed
        self.folder = context.folder
        self._memory, self._processors = memory, processors
        self._copies, self._on_marked = copies, on_marked
        self._post = locked.post
        self._taken: dict[str, CaptureFacts] = {}
        """For each part whose state is not whole yet, the facts for its training's policy."""
        self._progress: dict[str, Progress] = {}
        self._lines: dict[str, Line] = {}
        self._failed: dict[str, Line] = {}
        self._left: dict[str, str] = {}
        self._near: dict[str, tuple[Sequence[int], weakref.ref[Progress] | None]] = {}
        """For each durable state that stays off the further tiers, the ranks whose parts this
        process has."""
        self._write_error: BaseException | None = None
        listener = Listener(
            self._on_recorded,
            self._on_durable,
            self._on_refused,
            self._on_whole,
            self._on_given_up,
            self._on_wanted,
            self._on_lost,
        )
        self.outbox = Outbox(
            database=context.database,
            local=local,
            run=context.run,
            folder=context.folder,
            holder=context.holder,
            listener=listener,
        )

    @property
    def awaited(self) -> int:
        """How many states of this process wait for parts of other ranks, or to be recorded."""
        return len(self._taken)

    @property
    def backlog(self) -> int:
        """The number of states that keep their memory whatever the engine decides: processors have
        not seen them, or they wait for parts of other ranks."""
        return self._processors.backlog + self.awaited

    # --- entering ---------------------------------------------------------------------------------

    def begin(self, staged: StagedCapture) -> None:
        """InFlight a capture that is on its way."""
        with self._lock:
            self._progress[staged.progress.uid] = staged.progress

    def has_begun(self, uid: str) -> bool:
        """Whether a capture of this process made the state, and it is on its way or in memory."""
        return uid in self._progress

    def place(self, uid: str, line: Line) -> None:
        """Note that a capture is in memory, on its line."""
        with self._lock:
            self._lines[uid] = line

    def await_parts(self, staged: StagedCapture) -> None:
        """Note that a part is in memory. Its state is whole once other ranks have recorded their
        parts.

        Does nothing for a whole state.
        """
        if staged.line.part is not None:
            with self._lock:
                self._taken[staged.progress.uid] = staged.taken()

    def adopt(self, uid: str, base: Manifest | None) -> None:
        """Note that a state which no line captured is in memory."""
        ranks = self._memory.ranks(uid)
        with self._lock:
            self._lines.setdefault(uid, Line(f"clone of {uid}", "", None, base, arrived=ranks))

    def progress_of(self, uid: str) -> Progress | None:
        """The progress of a capture that is on its way or in memory."""
        with self._lock:
            return self._progress.get(uid)

    def line_of(self, uid: str) -> Line | None:
        """The line of a state in memory."""
        with self._lock:
            return self._lines.get(uid)

    # --- failing ----------------------------------------------------------------------------------

    def refuse(self, staged: StagedCapture, error: BaseException) -> None:
        """Note that a capture failed, and is nowhere. A second call changes nothing."""
        _logger.debug("capture of step %s failed", staged.facts.step, exc_info=error)
        uid = staged.progress.uid
        if staged.progress.error is None:
            self._recorder.count("failed")
        with self._lock:
            if staged.work is not None:
                self._lines.pop(uid, None)
            self._taken.pop(uid, None)
            self._progress.pop(uid, None)
        self.note(staged.line, error)
        staged.progress.fail(staged.progress.error or error)

    def note(self, line: Line, error: BaseException) -> None:
        """Keep an error of the background for the next caller that uses the line."""
        # An interrupt was raised where it occurred. A torn capture is an error of its handle alone,
        # and the next one should not tear.
        if isinstance(error, Exception) and not isinstance(error, Torn):
            with self._lock:
                self._note(line, error)

    def abort(self, staged: StagedCapture, error: BaseException) -> None:
        """Note that the engine failed after it took a capture.

        The handle gets the error here, unless the capture is recorded or waits for that.
        """
        self.note(staged.line, error)
        if staged.progress.state is None and not self.outbox.is_pending(staged.progress.uid):
            staged.progress.fail(staged.progress.error or error)

    def fail_write(self, uid: str, error: BaseException) -> None:
        """Note that writing a state failed."""
        with self._lock:
            self._write_error = error
            line, progress = self._lines.get(uid), self._progress.get(uid)
            if line is not None:
                self._note(line, error)
        if progress is not None:
            progress.fail(error)
        elif line is not None and not line.branch:  # a clone: no caller will ask for its errors
            _logger.warning(
                "the cloned state %s was not written and is in memory only: %s", uid, error
            )

    def is_patient(self, uid: str) -> bool:
        """Whether the training of a state continues when it cannot be written for now."""
        with self._lock:
            line = self._lines.get(uid)
            return line is None or line.is_patient

    def named(self, uids: Iterable[str]) -> list[str]:
        """Texts for people that name states of this process."""
        with self._lock:
            found = [(uid, self._lines.get(uid), self._progress.get(uid)) for uid in uids]
        return [
            (
                f"{line.branch} step {progress.state.step} ({uid[:10]})"
                if line and progress and progress.state
                else uid[:10]
            )
            for uid, line, progress in found
        ]

    def take_write_error(self, line: Line | None) -> BaseException | None:
        """The last error of writing, which the caller reports; the line will not report it
        again."""
        with self._lock:
            why = self._write_error
            if line is not None and line.error is why:
                line.error = None
            return why

    def errors(self) -> list[Exception]:
        """The errors on lines of trackers that no tracker has raised.

        Failures of clones were logged, because no caller waits for them.
        """
        with self._lock:
            return [
                line.error
                for line in self._failed.values()
                if line.branch and isinstance(line.error, Exception)
            ]

    def hold_up(self) -> None:
        """Give an error to callers that wait for a state which cannot be recorded, once that has
        taken too long."""
        overdue = self.outbox.overdue()
        if overdue is not None:
            with self._lock:
                for uid, progress in self._progress.items():
                    if self.outbox.is_pending(uid):
                        progress.hold_up(overdue)

    # --- leaving ----------------------------------------------------------------------------------

    def leave(self, uid: str, why: str) -> int:
        """Drop a state from memory and have the lineage record that. Returns the bytes freed.

        Runs under the lock.
        """
        freed = self._memory.remove(uid)
        self.outbox.evict([uid])
        self._forget(uid, why)
        return freed

    def give_up(self, uids: Iterable[str], why: str) -> None:
        """Note that these states will not become durable; ``why`` is a text with a place for the
        uid."""
        with self._lock:
            progresses = [
                progress for uid in uids if (progress := self._progress.get(uid)) is not None
            ]
        for progress in progresses:
            progress.give_up(why.format(uid=progress.uid))

    def give_up_all(self, why: str) -> None:
        """``give_up`` for every state."""
        with self._lock:
            uids = [uid for uid in self._progress if self._copies.awaited_by(uid) is None]
        self.give_up(uids, why)

    # --- callbacks of the outbox, on any thread ---

    def put_to_processors(
        self, state: State, branch: str | None, progress: Progress | None = None
    ) -> None:
        """Show the user's processors a state that was made here."""
        current, on_failed = (
            (partial(_current, progress), progress.note)
            if progress is not None
            else (lambda: state, _log_failure)
        )
        with self._lock:
            self._processors.put(current, branch, on_failed)

    def _on_recorded(self, entry: PendingRecord, state: State, moved: Conflict | None) -> None:
        """Note that the lineage has a state."""
        with self._lock:
            progress, line = self._progress.get(state.uid), self._lines.get(state.uid)
            if line is not None and moved is not None:
                self._note(line, moved)
        if progress is not None:
            if progress.state is not None:
                return  # this was reported before
            self._recorder.count("recorded")
            progress.advance(state)
        self.put_to_processors(state, entry.new.facts.branch, progress)
        for listener in () if line is None else line.listeners:
            listener(state)
        if state.uid in self._left:
            self._forget_evicted(state.uid)

    def _on_whole(self, entry: PendingRecord, outcome: Outcome) -> None:
        """Note that a state with a part of this process is whole. From now on it is in memory like
        any other."""
        uid, state = entry.new.uid, outcome.state
        assert state is not None, "it is whole"
        with self._lock:
            line, taken = self._lines.get(uid), self._taken.get(uid)
        if line is not None and taken is not None:
            with suppress(NotFound), self._memory.open(uid, verify=False) as reader:
                self._memory.finish(finished(reader.manifest, state, outcome.parent_digests))
            line.tip = (uid, state.digest)
            self._post(
                Recorded(uid, line.name, time.monotonic(), replace(taken, metrics=state.metrics))
            )
        is_here = state.status.is_restorable  # else another rank has dropped its part already
        self._on_recorded(entry, state if is_here else replace(state, status=Status.CAPTURED), None)
        if not is_here:
            self._on_lost(uid)
        with self._lock:
            self._taken.pop(uid, None)

    def _on_lost(self, uid: str) -> None:
        """Note that another rank dropped its part of a state before that was on its disk: the
        state will never be durable."""
        progress = self.progress_of(uid)
        if progress is not None:
            progress.give_up(
                f"state {uid} left the memory of another rank before it became durable there: make"
                " more states durable"
            )
        self._forget_evicted(uid)

    def _on_wanted(self, uid: str, is_near: bool) -> None:
        """Do as another rank does: write this rank's part of a state that becomes durable there,
        or pass it on to the further tiers."""
        self._post(Wanted(uid, is_near))

    def _on_given_up(self, entry: PendingRecord, given_up: GivenUp) -> None:
        """Drop this process's part of a state that will never be whole. Its line continues from the
        state before it."""
        uid, facts = entry.new.uid, entry.new.facts
        said = (
            f"state {uid} (branch {facts.branch}, step {facts.step}) was given up because of"
            f" {given_up}"
        )
        with self._lock:
            line, progress = self._lines.pop(uid, None), self._progress.pop(uid, None)
            self._taken.pop(uid, None)
            self._memory.remove(uid)
            self._engine.forget(uid)
            if line is not None and given_up.why is Why.REFUSED:
                self._note(line, Conflict(said))
            elif line is not None and given_up.why in (Why.LATE, Why.GONE) and not line.is_patient:
                self._note(line, Unavailable(said))
        if progress is not None:
            self._recorder.count("skipped")
            level = logging.DEBUG if given_up.why is Why.SKIPPED else logging.WARNING
            _logger.log(
                level,
                "%s",
                said,
                extra=event(
                    "state.given_up",
                    state=uid,
                    step=facts.step,
                    rank=given_up.rank,
                    why=given_up.why,
                ),
            )
            progress.skip(f"it was given up because of {given_up}")
        self._changed.notify_all()

    def _on_durable(self, uid: str, added: int) -> None:
        """Note that the lineage records a state as being on this node's disk."""
        self._on_marked(added)
        with self._lock:
            progress = self._progress.get(uid)
        if progress is not None and progress.state is not None:
            is_part = progress.state.world_size > 1
            progress.advance(
                replace(
                    progress.state,
                    status=Status.DURABLE,
                    bytes_new=progress.state.bytes_new if is_part else added,
                )
            )
        with self._lock:
            line = self._lines.get(uid)
            ranks = (0,) if line is None else line.ranks
            is_near = self._engine.keeps_near(uid)
            if is_near:
                self._near[uid] = ranks, None if progress is None else weakref.ref(progress)
        if not is_near:
            self.outbox.pass_on(uid)  # the other ranks may have been told otherwise
            self._copies.put(uid, ranks, progress)
        self._forget_evicted(uid)

    def pass_on(self, uids: Iterable[str]) -> None:
        """Send durable states that were kept near on to the further tiers. Runs under the lock."""
        for uid in uids:
            self.outbox.pass_on(uid)
            ranks, progress = self._near.pop(uid, ((0,), None))
            self._copies.put(
                uid, ranks, self._progress.get(uid) if progress is None else progress()
            )

    def _on_refused(self, uid: str, error: Exception, entry: PendingRecord | None) -> None:
        """Note that the lineage refused a state late, or its replica on disk. A refused state
        leaves memory, and its line continues from the one before."""
        with self._lock:
            line, progress = self._lines.get(uid), self._progress.get(uid)
            if line is not None:
                self._note(line, error)
                if entry is not None and line.tip is not None and line.tip[0] == uid:
                    line.tip = entry.before
            if progress is not None:
                progress.fail(error)
            if entry is not None:
                self._memory.remove(uid)
                self._forget(uid, str(error))

    # All below runs under the lock, except ``_forget_evicted``

    def _note(self, line: Line, error: BaseException) -> None:
        """Keep an error for the next caller that uses the line."""
        self._failed[line.name] = line
        line.error = error

    def _forget(self, uid: str, why: str) -> None:
        self._engine.forget(uid)
        if self.outbox.is_pending(uid):
            self._left[uid] = why  # its handle is told after the lineage
            return
        self._lines.pop(uid, None)
        progress = self._progress.pop(uid, None)
        if progress is not None and uid not in self._near and self._copies.awaited_by(uid) is None:
            progress.give_up(why)

    def _forget_evicted(self, uid: str) -> None:
        with self._lock:
            if uid in self._left and not self.outbox.is_pending(uid):
                self._forget(uid, self._left.pop(uid))
        self._changed.notify_all()


def _current(progress: Progress) -> State:
    assert progress.state is not None, "it was recorded"
    return progress.state


def _log_failure(error: ProcessorFailed) -> None:
    """Log the error of a merge, which has no handle."""
