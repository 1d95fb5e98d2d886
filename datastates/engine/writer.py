"""The writer thread, which writes states to this node's disk, and the check whether it makes
progress.

``Writer`` is the boundary for writing: it gets uids, and reports to the lineage which states are
durable, and to the engine what a write cost or why it failed.
"""

from __future__ import annotations

import errno
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from datastates.errors import Unavailable
from datastates.lineage.views.text import plural
from datastates.storage.local import LocalTier, Put
from datastates.storage.memory import MemoryTier
from datastates.storage.tier import Payload, Placed
from datastates.system.logs import event
from datastates.system.telemetry import Recorder
from datastates.system.threads import ThreadWork, thread_work, work_of, yield_disk

from .copies import Copies
from .handle import Line
from .in_flight import InFlight, LockedEngine
from .scheduler import Retry, Stalled, WriteFailed, Written

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
    _logged_at: float = field(default=0.0, repr=False)

    def begin(self, why: str) -> None:
        """Note that writing failed, or has stalled."""
        is_new, self.why = self.why is None, why
        if is_new:
            self.since = self._logged_at = self.clock()
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
        if self.why is not None and self.clock() - self._logged_at >= _SAY_AGAIN_S:
            self._logged_at = self.clock()
            lasting = event(
                "writes.still_paused",
                seconds=self._logged_at - self.since,
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
    """Writes states to disk on its own thread; any thread may call ``put``.

    It reports each outcome to ``InFlight`` or to ``trouble``, and to the engine. ``on_full`` is
    called on this thread when the disk is full."""

    def __init__(
        self,
        in_flight: InFlight,
        locked: LockedEngine,
        trouble: Trouble,
        copies: Copies,
        *,
        memory: MemoryTier,
        local: LocalTier,
        recorder: Recorder,
    ) -> None:
        self._in_flight, self._engine, self._post = in_flight, locked.engine, locked.post
        self._memory = memory
        self.put_all: Callable[[Sequence[Put]], list[Placed]] = local.put_all
        """Writes states to disk; it may do so in another process."""
        self._trouble, self._copies, self._recorder = trouble, copies, recorder
        self.on_full: Callable[[], None] = lambda: None
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
            self._try_write(uids)

    def _try_write(self, uids: tuple[str, ...]) -> None:
        began, used = time.monotonic(), time.thread_time()
        try:
            with thread_work(
                f"writing state {uids[0]}" + (f" and {len(uids) - 1} more" if len(uids) > 1 else "")
            ):
                size = self._write(uids)
        except BaseException as exc:  # the handle raises it, whatever it is, and the thread goes on
            _logger.debug("writing %s failed", uids, exc_info=exc)
            if len(uids) > 1 and not isinstance(exc, Unavailable):
                for uid in uids:  # one of them cannot be written, and the others can
                    self._try_write((uid,))
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

    def _write(self, uids: Sequence[str]) -> int:
        """Copy states from memory to disk, all or none, and record that. Returns the bytes that
        this added.

        Nothing is verified: the digests were made from this very memory, and reading verifies them.
        """
        began, lines = time.monotonic(), {uid: self._in_flight.line_of(uid) for uid in uids}
        with ExitStack() as stack:
            puts = [put for uid in uids for put in self._puts(uid, lines[uid], stack)]
            placed = self.put_all(puts)
        of_each: dict[str, list[Placed]] = {}
        for part in placed:
            of_each.setdefault(part.manifest.origin.uid, []).append(part)
        put_at, newest = time.monotonic(), placed[-1].manifest.origin
        self._recorder.span("put", began, put_at, newest.uid, newest.step)
        for parts in of_each.values():  # before any caller learns that it is durable
            self._count(parts)
        near = [uid for uid in uids if self._engine.is_near(uid)]
        self._in_flight.outbox.mark(of_each, near)
        ended = time.monotonic()
        self._recorder.span("mark", put_at, ended, newest.uid, newest.step)
        self._recorder.span("write", began, ended, newest.uid, newest.step)
        for uid, line in lines.items():
            if line is not None:
                line.placed(of_each[uid][0].manifest)
        for parts in of_each.values() if _logger.isEnabledFor(logging.DEBUG) else ():
            origin, took_s = parts[0].manifest.origin, ended - began
            durable = event(
                "state.durable",
                state=origin.uid,
                step=origin.step,
                bytes=sum(part.bytes_new for part in parts),
                seconds=took_s,
            )
            _logger.debug(
                "state %s, step %d, is durable after %.3f s",
                *(origin.uid, origin.step, took_s),
                extra=durable,
            )
        return sum(part.bytes_new for part in placed)

    def _puts(self, uid: str, line: Line | None, stack: ExitStack) -> Iterator[Put]:
        base, is_of_base = (None, False) if line is None else (line.related(), line.has_placed)
        for rank in self._memory.ranks(uid):
            reader = stack.enter_context(self._memory.open_part(uid, rank, verify=False))
            chunks = [reader.chunk(index) for index in range(len(reader.manifest.content.chunks))]
            yield Put(Payload(reader.manifest, chunks), base, is_of_base)

    def _count(self, parts: Sequence[Placed]) -> None:
        self._recorder.count("written")
        for placed in parts:
            self._recorder.count("bytes_written", placed.bytes_new)
            # its own pack is first
            shared = sum(ref.pack >= bool(placed.bytes_new) for ref in placed.manifest.refs)
            self._recorder.count("chunks_shared", shared)

    def _on_failed(self, uids: tuple[str, ...], error: BaseException) -> None:
        patient = [
            uid
            for uid in uids
            if isinstance(error, Unavailable) and self._in_flight.is_patient(uid)
        ]
        if patient:
            self._trouble.failures += 1
            self._recorder.count("retries")
            self._trouble.begin(str(error))
            if is_full(error):
                self.on_full()
        others = tuple(uid for uid in uids if uid not in patient)
        for uid in others:
            self._in_flight.fail_write(uid, error)
        now = time.monotonic()
        self._post(
            *(
                WriteFailed(each, now, is_passing)
                for each, is_passing in ((others, False), (tuple(patient), True))
                if each
            )
        )


# --- Whether threads make progress, by their system calls, and how long callers wait ---


STALL_S = 30.0
"""A write that has made no progress for this long, in seconds, counts as stalled."""

STUCK_S = 90.0
"""How long a caller that must wait for the lineage gives it to answer, in seconds: longer than
it waits for another process's lock."""

_RETRY_S = 1.0
"""How often writing is tried again while a caller that closes waits for it, in seconds."""


class StallDetector:
    """Watches the thread that records and the one that writes, from any thread.

    A stalled write begins a trouble."""

    def __init__(
        self,
        trouble: Trouble,
        in_flight: InFlight,
        locked: LockedEngine,
        *,
        recording: threading.Thread,
        writing: threading.Thread,
    ) -> None:
        self.trouble, self._recording, self._writing = trouble, recording, writing
        self._in_flight, self._engine, self._lock, self._post = (
            in_flight,
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
            raise Unavailable(f"captures are not recorded: {self.trouble.why}", trouble="lineage")

    def hopeless(self, failures: int) -> Unavailable | None:
        """The error for callers that wait for states to become durable, once the disk has been in
        trouble for too long.

        Each caller sees at least one more try: ``failures`` is the count when it began to wait.
        """
        self.look()
        now, trouble = time.monotonic(), self.trouble
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
            names = self._in_flight.named(self._engine.unwritten())
        if not names:
            return None
        return Unavailable(
            trouble.describe_lost(names), trouble=f"unwritten: {self._in_flight.folder}"
        )

    def _begins_trouble(self, stalled: ThreadWork | None) -> bool:
        if stalled is not None:
            self.trouble.begin(stalled.describe(time.monotonic()))
        return stalled is not None


def _stalled(thread: threading.Thread, limit_s: float) -> ThreadWork | None:
    one = work_of(thread)
    return one if one is not None and one.is_stalled(time.monotonic(), limit_s) else None
