"""The threads behind captures: they carry out what ``engine`` decides.

    stage thread    (stage.py)  copies; hands each capture on, in order
    engine thread   (rounds.py) of each capture of a round: digest -> content -> memory tier; of all: record; then make room ahead
    writer thread   local tier -> mark durable
    arena thread    (warming.py) memory made warm ahead of need

One ``Runner`` belongs to a repository that tracks. Its lock guards the ``Engine`` and the lines; no I/O happens under it.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial

from datastates.config import BackPressure, Config
from datastates.content.digest import chunk_digest
from datastates.content.manifest import CHUNK_BYTES, Chunk, Content, Manifest
from datastates.errors import Closed, Conflict, OverBudget, Torn, Unavailable
from datastates.lineage.change import refs as lineage_refs
from datastates.lineage.database import Database
from datastates.lineage.search.holders import holder
from datastates.lineage.states import NewState, RefKind, Run, State, Status
from datastates.policy.cadence import Cadence
from datastates.store.arena import Arena
from datastates.store.local import LocalTier
from datastates.store.memory import MemoryTier
from datastates.store.tier import Payload
from datastates.system.bell import Bell
from datastates.system.interrupts import Mutex, checkpoint, undisturbed

from .commit import manifest_of
from .engine import (
    MOST_HELD,
    Action,
    Adopted,
    Closing,
    Engine,
    Event,
    Evict,
    GiveUp,
    LineOpened,
    Recorded,
    RefsChanged,
    Refuse,
    RoomNeeded,
    Tick,
    Wanted,
    Write,
    WriteFailed,
    Written,
)
from .handle import Capture
from .journal import Entry, Journal, Listener
from .line import Line, Staged
from .rounds import Rounds
from .stage import CopyJob, Stager
from .warming import Warmer

__all__ = ["Runner"]

_log = logging.getLogger(__name__)

_ASK_AGAIN_S = 0.1
"""How often whoever waits for room asks for it again."""

_RECALL_S = 5.0
"""For so long whoever waits for room counts on readers that were told to let go of it."""

_SAY_AGAIN_S = 0.2
"""How often whoever waits for writes hears how many are left."""

_LEAST_HELD = 64
"""So many states that share their bytes may be held however small the budget is."""

_MOST_IN_FLIGHT = 64
"""Captures whose second half is not done: those without tensors take no slots, and would be without number."""

_REFS_POLL_S = 1.0
"""How often refs that other processes made are looked for."""


class Runner:
    """Owns the stage, engine and writer threads of one repository. ``close`` is idempotent."""

    def __init__(
        self, *, database: Database, arena: Arena, memory: MemoryTier, local: LocalTier, config: Config, run: Run, node: str, folder: str
    ) -> None:
        self._database, self._arena, self._memory, self._local = database, arena, memory, local
        self._config, self._run, self._holder = config, run.uid, holder(node, run.uid)
        listener = Listener(self._on_recorded, self._on_durable, self._on_untold)
        self._journal = Journal(database=database, local=local, run=run, folder=folder, holder=self._holder, listener=listener)
        self.stager = Stager(arena)
        self._lock, self._changed = Mutex(), Bell()
        self._engine = Engine(most_held=min(MOST_HELD, max(arena.capacity, _LEAST_HELD)))
        self._handles: dict[str, Capture] = {}
        self._lines_of: dict[str, Line] = {}
        self._failed: dict[str, Line] = {}
        self._write_error: BaseException | None = None
        self._next_slots = 0
        self._event_seen = -1
        self._looked_at = 0.0
        memory.on_let_go = self._changed.ring
        self._look_failed: str | None = None
        self._left: dict[str, str] = {}
        self._rounds = Rounds()
        self._writes: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._warmer = Warmer(arena, is_given=config.memory_bytes is not None)
        self._is_closed = False
        self._is_abandoned = False
        self._threads = [
            threading.Thread(target=target, name=f"datastates-{name}", daemon=True)
            for name, target in (("engine", self._run_engine), ("writer", self._run_writer))
        ]
        for thread in self._threads:
            thread.start()

    # --- the training thread -------------------------------------------------------------------------------------------

    def open_line(self, line: Line, cadence: Cadence) -> None:
        """A tracker begins."""
        self._post(LineOpened(line.name, cadence, line.branch))

    def drop_line(self, line: Line) -> None:
        """A tracker never began: it has captured nothing."""
        self._post(Closing(line.name))
        self._warmer.forget(line.name)

    def expect(self, line: Line, size_bytes: int) -> None:
        """Captures of about this size are to come: memory for them is made warm meanwhile."""
        self._warmer.expect(line.name, -(-size_bytes // CHUNK_BYTES))

    def close_line(self, line: Line) -> None:
        """A tracker ends: its head becomes durable (``drain`` waits for it)."""
        self.flush()
        self._post(Closing(line.name))
        self._warmer.forget(line.name)

    def acquire(
        self, count: int, back_pressure: BackPressure, *, line: Line | None = None, within_s: float | None = None
    ) -> list[int] | None:
        """Slots for a state; None when there is no room and the back-pressure is to skip.

        Blocks under ``wait`` and ``drop-oldest`` until memory is let go. After a capture, which names its ``line``, room for the next
        one of its size is made ahead. After ``within_s`` nobody waits any longer: None.

        :raises OverBudget: the state could never fit, or nothing that is in its way can be written.
        """
        if count > self._arena.capacity:
            raise OverBudget(
                f"a state takes {count} slots of {CHUNK_BYTES >> 20} MiB, the memory budget has {self._arena.capacity}: "
                f"open the repository with memory_bytes of at least {_budget(count)}"
            )
        if line is not None:
            self._expect_captures(line, count)
        since = time.monotonic()
        while True:
            in_flight, refused, slots = self._in_flight, None, None
            is_coming = False
            if in_flight < _MOST_IN_FLIGHT and not self._is_overfull(self._arena.capacity):
                slots = self._use_again(count, back_pressure) if line is not None else None
                if slots is None and (line is None or not in_flight or self._warmer.is_given):
                    slots = self._arena.acquire(count)
            if slots is None and in_flight < _MOST_IN_FLIGHT and (line is None or not in_flight or self._warmer.is_given):
                refused = self._make_room(count, back_pressure, line, since)
                slots = None if self._is_overfull(self._arena.capacity) else self._arena.acquire(count)
                is_coming = slots is None and self._memory.recall(count) and time.monotonic() - since < _RECALL_S
            if slots is not None or back_pressure is BackPressure.SKIP or (within_s is not None and time.monotonic() - since > within_s):
                return slots
            if refused is not None and not is_coming:
                raise self._no_room(count, refused, line)
            self._raise_if_closed()
            self._rounds.hurry()
            self._changed.wait_for(partial(self._may_have_room, count, in_flight), _ASK_AGAIN_S)
            checkpoint()

    @property
    def _in_flight(self) -> int:
        return self._rounds.in_flight

    def _may_have_room(self, count: int, in_flight: int) -> bool:
        return in_flight > self._in_flight or self._has_room(count)

    def _has_room(self, count: int) -> bool:
        """Whether a state of so many slots finds room, as it stands, within what is to be kept of states."""
        allowed = self._warmer.allowed(count)
        limit = self._arena.capacity if self._warmer.is_given else allowed
        return self._arena.reach(allowed) >= count and not self._is_overfull(limit)

    def _is_overfull(self, limit: int) -> bool:
        """Whether states take more memory than ``limit`` slots do, counting what they take beside their slots."""
        beside = self._memory.bytes_beside // CHUNK_BYTES
        return beside > 0 and self._arena.capacity - self._arena.available + beside > limit

    def _expect_captures(self, line: Line, count: int) -> None:
        if count > self._next_slots and 2 * count > self._arena.capacity:
            _log.warning(
                "memory holds one state of %d MiB and no second one: the newest leaves it whenever the next is captured; "
                "give memory_bytes of %s",
                count * CHUNK_BYTES >> 20,
                _budget(count),
            )
        self._next_slots = count
        self._warmer.expect(line.name, count)
        self._warmer.say(count * CHUNK_BYTES)
        self._rounds.room_bytes = self._warmer.allowed(count) * CHUNK_BYTES

    def _use_again(self, count: int, back_pressure: BackPressure) -> list[int] | None:
        """Slots that are warm, or whose turn it is to become so; else states that may leave memory do so, and theirs are used again."""
        slots = self._arena.acquire(count, within=self._warmer.allowed(count))
        if slots is None:
            self._post(RoomNeeded(count, is_blocked=False, back_pressure=back_pressure))
            slots = self._arena.acquire(count, within=self._warmer.allowed(count))
        return slots

    def _make_room(self, count: int, back_pressure: BackPressure, line: Line | None, since: float) -> Refuse | None:
        with self._lock:
            name = None if line is None else line.name
            event = RoomNeeded(count, True, back_pressure, name, self._in_flight, since, time.monotonic())
            return next((action for action in self._post(event) if isinstance(action, Refuse)), None)

    def _no_room(self, count: int, refused: Refuse, line: Line | None) -> OverBudget:
        """The error for callers that wait for room which cannot be made, because writing failed."""
        with self._lock:
            why = self._write_error
            if line is not None and line.error is why:
                line.error = None  # told with this
        error = OverBudget(
            f"there is no room for a state of {count * CHUNK_BYTES >> 20} MiB: memory is full with {len(refused.uids)} states that are "
            f"not to be lost and could not be written, {refused.uids[0]} for one ({why}); this capture was not taken, those after it "
            f"will be when writing works again; or give more memory_bytes ({_budget(count)}), or delete tags that are not needed"
        )
        error.__cause__ = why
        return error

    def release(self, slots: list[int]) -> None:
        """Give back slots of a capture that did not come about."""
        self._arena.release(slots)
        self._changed.ring()

    def submit(self, staged: Staged, *, is_deferring: bool) -> CopyJob:
        """Begin the copy of a capture; the engine goes on from there."""
        job = staged.job
        assert job is not None
        job.on_done = lambda done: self._copied(staged, done)
        with undisturbed():
            try:
                with self._lock:
                    self._raise_if_closed()
                    self._is_abandoned = False
                    self._rounds.begin()
                    self._handles[staged.handle.uid] = staged.handle
                self.stager.begin(job, is_deferring=is_deferring)
            except BaseException as exc:
                # What is in flight must land, or the exit would wait for it for ever.
                if staged.handle.uid in self._handles:
                    self.stager.abandon(job, exc)
                else:
                    job.is_copied.set()
                    self.release(job.slots)
                raise
        return job

    def _copied(self, staged: Staged, job: CopyJob) -> None:
        """Runs on the stage thread."""
        if isinstance(job.error, Torn):
            staged.line.edits.note(staged.facts.step, job.error, is_taught=job.plan.is_taught)
        self._rounds.put(staged)

    def hurry(self) -> None:
        """Somebody waits for the captures so far."""
        self._rounds.hurry()

    def want(self, uid: str) -> None:
        """A state is to become durable."""
        self._is_abandoned = False
        self._post(Wanted(uid))

    def adopt(self, uid: str, base: Manifest | None = None) -> None:
        """A state that was cloned is in the memory tier and in the lineage; ``base`` is the manifest of a relative on disk.

        It stays in memory until it is durable, and becomes so when memory runs short, or when a ref names it.
        """
        with self._lock:
            self._raise_if_closed()
            self._lines_of.setdefault(uid, Line(f"clone of {uid}", "", None, base))
        self._post(Adopted(uid))
        self.refs_changed()

    def check_withdrawal(self, uid: str) -> None:
        """Refuse to let go of a state in memory.

        :raises Conflict: a training stands there, or it is on its way into the lineage or to disk.
        """
        with self._lock:
            reason = self._engine.hold_of(uid, is_captured=uid in self._handles)
        if reason is not None:
            raise Conflict(f"state {uid} cannot be dropped: {reason}")

    def withdraw(self, uid: str) -> int:
        """Let go of a state in memory that the lineage does not count on any more; the bytes set free.

        It stays, as any other state in memory, when somebody began to count on it since ``check_withdrawal``.
        """
        with self._lock:
            if self._engine.hold_of(uid, is_captured=uid in self._handles) is not None:
                return 0
            freed = self._memory.remove(uid)
            self._journal.evict([uid])
            self._forget(uid, f"state {uid} was dropped before it became durable")
        self._changed.ring()
        return freed

    def line_of(self, uid: str) -> Line | None:
        """The line of a state in memory."""
        with self._lock:
            return self._lines_of.get(uid)

    def flush(self) -> None:
        """Wait until every capture so far is recorded or has failed; or waits in memory, as the database is away."""
        so_far = self._rounds.begun
        self._rounds.hurry()
        self._changed.wait_for(lambda: self._rounds.has_ended(so_far))
        self._journal.settle()

    def refs_changed(self) -> None:
        """Refs were made, moved or deleted: protect and write what they name."""
        self._is_abandoned = False
        self._look_at_refs(is_forced=True)

    @property
    def needed_slots(self) -> int:
        """Slots that captures need to go on: for a state that is kept, one that is written and one that is captured."""
        return min(3 * self._next_slots, self._arena.capacity)

    def unwritten_clones(self) -> list[str]:
        """Clones that are in memory and not durable, the oldest first."""
        with self._lock:
            return self._engine.unwritten_clones()

    @property
    def pending_writes(self) -> int:
        """Captures not yet recorded and states not yet written, as it stands."""
        with self._lock:
            return self._in_flight + self._engine.pending_writes + self._journal.pending

    def drain(self, on_wait: Callable[[int], None] | None = None) -> None:
        """Wait until all captures are recorded and all that is wanted is durable (or failed).

        Ctrl-C while waiting gives up what is not durable yet: no later call waits for it, until something else is captured or named.

        :raises Unavailable: the database has been away for a minute; says what could not be recorded.
        """
        try:
            while (pending := self.pending_writes) and not self._is_abandoned:
                overdue = self._journal.overdue()
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
        """Whether Ctrl-C ended the last wait for what is to be durable."""
        return self._is_abandoned

    def errors(self) -> list[Exception]:
        """What failed on lines of trackers, and none of these has raised. A clone's failure was logged: nobody asks for it."""
        with self._lock:
            return [line.error for line in self._failed.values() if line.branch and isinstance(line.error, Exception)]

    def close(self) -> None:
        """Make the heads durable, wait, and end the threads; idempotent, and goes on where it was interrupted. Not for these threads.

        :raises Unavailable: the database has been away for a minute; says what could not be recorded.
        """
        try:
            if not self._is_closed:
                self.stager.close()
                self.flush()
                self._look_at_refs(is_forced=True)
                self._post(Closing(None))
                self.drain()
                with undisturbed():
                    self._end()
        except Unavailable:
            with undisturbed():
                self._end()
            raise
        finally:
            if self._is_closed and not self._is_abandoned:  # else daemon threads in the middle of a write that nobody waits for
                for thread in self._threads:
                    thread.join()

    def _end(self) -> None:
        self._journal.evict(self._memory.uids())  # what ends with this process; those that are durable stay so
        with suppress(Unavailable):  # whoever opens the repository next finds out
            self._journal.tell_evictions()
        with self._lock:
            self._is_closed = True
            handles = list(self._handles.values())
        for each in handles:
            each._give_up(f"state {each.uid} was in memory only when its repository was closed: wait for it before that, or tag it")
        self._rounds.close()
        self._writes.put(None)
        self._warmer.close()

    # --- the engine thread ---------------------------------------------------------------------------------------------

    def _run_engine(self) -> None:
        while (captures := self._rounds.take(self._tick_delay())) is not None:
            if not captures:
                self._tick()
                continue
            try:
                self._finish(captures)
            except BaseException as exc:
                for staged in captures:
                    self._fail(staged, exc)
            finally:
                self._rounds.end(len(captures))
                self._changed.ring()

    def _finish(self, captures: list[Staged]) -> None:
        """Digest, adopt, record: the table of contents of the second half of some captures."""
        held: dict[str, tuple[Staged, Entry]] = {}
        for staged in captures:
            try:
                held[staged.handle.uid] = staged, self._hold(staged)
            except BaseException as exc:
                self._fail(staged, exc)
        self._record(held)
        self._post(*(Recorded(uid, staged.line.name, time.monotonic()) for uid, (staged, _) in held.items()))
        self._look_around()
        if not self._has_room(self._next_slots):
            self._post(RoomNeeded(self._next_slots, is_blocked=False, back_pressure=self._config.back_pressure))
            if not self._has_room(self._next_slots):
                self._memory.recall(self._next_slots)

    def _hold(self, staged: Staged) -> Entry:
        """A state in memory, on which its line goes on, and what the lineage is to be told of it."""
        job = staged.job
        assert job is not None
        staged.job = None
        if job.error is not None:
            self._arena.release(job.slots)
            raise job.error
        try:
            line = staged.line
            tip = line.tip
            facts = replace(staged.facts, parent=None if tip is None else tip[0], run=self._run)
            manifest = manifest_of(facts, self._content(staged, job.slots), () if tip is None else (tip[1],))
        except BaseException:
            self._arena.release(job.slots)
            raise
        bytes_new = self._memory.adopt(manifest, job.slots).bytes_new
        with self._lock:
            self._lines_of[facts.uid] = line
        line.tip = (facts.uid, manifest.digest)
        total, tier = staged.layout.bytes_total, self._memory
        new = NewState(facts, manifest.digest, tier.gives, bytes_total=total, bytes_new=bytes_new, tier=tier.name, node=self._holder)
        return Entry(new, tip)

    def _record(self, held: dict[str, tuple[Staged, Entry]]) -> None:
        """Into the lineage, now or when it answers again; what it refuses is let go of, and its line goes on from the state before."""
        try:
            refused = self._journal.record([entry for _, entry in held.values()]) if held else {}
        except Exception as exc:
            refused = dict.fromkeys(held, exc)
        for uid in reversed(refused):  # the newest first
            staged, entry = held.pop(uid)
            self._memory.remove(uid)
            staged.line.tip = entry.before
            with self._lock:
                self._lines_of.pop(uid, None)
            self._fail(staged, refused[uid])

    def _content(self, staged: Staged, slots: list[int]) -> Content:
        lengths = staged.layout.chunk_lengths
        chunks = tuple(Chunk(chunk_digest(self._arena.memory(slot, length)), length) for slot, length in zip(slots, lengths, strict=True))
        return Content(staged.layout.skeleton, staged.values, staged.layout.tensors, chunks)

    def _on_recorded(self, entry: Entry, state: State, moved: Conflict | None) -> None:
        """The lineage knows of a state."""
        with self._lock:
            handle, line = self._handles.get(state.uid), self._lines_of.get(state.uid)
            if line is not None and moved is not None:
                self._note(line, moved)
        if handle is not None:
            handle._advance(state)
        if state.uid in self._left:
            self._forget_left(state.uid)

    def _on_untold(self, uid: str, error: Exception, entry: Entry | None) -> None:
        """Late, the lineage refused a state (then it leaves, and its line goes on from the one before), or its replica on disk."""
        with self._lock:
            line, handle = self._lines_of.get(uid), self._handles.get(uid)
            if line is not None:
                self._note(line, error)
                if entry is not None and line.tip is not None and line.tip[0] == uid:
                    line.tip = entry.before
            if handle is not None:
                handle._fail(error)
            if entry is not None:
                self._memory.remove(uid)
                self._forget(uid, str(error))

    def _fail(self, staged: Staged, error: BaseException) -> None:
        _log.debug("capture of step %s failed", staged.facts.step, exc_info=error)
        with self._lock:
            self._handles.pop(staged.handle.uid, None)
            # An interrupt was raised where it came; a torn capture is its handle's, and the next one is not to tear.
            if isinstance(error, Exception) and not isinstance(error, Torn):
                self._note(staged.line, error)
        staged.handle._fail(error)

    def _note(self, line: Line, error: BaseException) -> None:
        """Keep an error for the next caller that uses the line; called under the lock."""
        self._failed[line.name] = line
        line.error = error

    def _tick_delay(self) -> float:
        with self._lock:
            due = self._engine.next_tick()
        return _REFS_POLL_S if due is None else min(_REFS_POLL_S, max(0.01, due - time.monotonic()))

    def _tick(self) -> None:
        self._post(Tick(time.monotonic()))
        self._look_around()

    def _look_around(self) -> None:
        """At most once a second, look for what waits for the lineage, and for refs that others made."""
        if time.monotonic() - self._looked_at < _REFS_POLL_S:
            return
        try:
            self._journal.settle()
            self._look_at_refs()
        except Exception as error:
            if self._look_failed != repr(error):
                _log.exception("looking for refs that others made failed; it is tried again")
            self._look_failed = repr(error)
        else:
            self._look_failed = None
        self._looked_at = time.monotonic()
        self._hold_up()

    def _hold_up(self) -> None:
        """Tell callers that wait for a state which cannot be recorded, once that has taken too long."""
        overdue = self._journal.overdue()
        if overdue is not None:
            with self._lock:
                for uid, handle in self._handles.items():
                    if self._journal.is_pending(uid):
                        handle._hold_up(overdue)

    def _look_at_refs(self, *, is_forced: bool = False) -> None:
        """Learn which states refs name, when the reflog has grown. Any thread. While the database is away, nothing is learnt."""
        try:
            with self._database.read() as session:
                newest = lineage_refs.last_event(session)
                named = lineage_refs.refs(session) if newest != self._event_seen or is_forced else None
                is_known = self._journal.check(session)
            if not is_known:
                self._journal.recall()
        except Unavailable as error:
            self._journal.note_away(error)
            return
        self._event_seen = newest
        if named is not None:
            tagged = frozenset(ref.state for ref in named if ref.kind is RefKind.TAG)
            self._post(RefsChanged(tagged, {ref.name: ref.state for ref in named if ref.kind is RefKind.BRANCH}))

    # --- the writer thread ---------------------------------------------------------------------------------------------

    def _run_writer(self) -> None:
        while (uid := self._writes.get()) is not None:
            try:
                self._write(uid)
            except BaseException as exc:
                _log.debug("writing %s failed", uid, exc_info=exc)
                self._on_write_failed(uid, exc)
            else:
                self._post(Written(uid))

    def _write(self, uid: str) -> None:
        with self._lock:
            line = self._lines_of.get(uid)
        # The digests were made from this very memory: reading verifies them, writing need not.
        with self._memory.open(uid, verify=False) as reader:
            chunks = [reader.chunk(index) for index in range(len(reader.manifest.content.chunks))]
            base, is_of_base = (None, False) if line is None else (line.related(), line.has_placed)
            placed = self._local.put(Payload(reader.manifest, chunks), base=base, is_of_base=is_of_base)
            del chunks
        self._journal.mark(uid, placed)
        if line is not None:
            line.placed(placed.manifest)

    def _on_durable(self, uid: str, added: int) -> None:
        """The lineage knows that a state is on this node's disk."""
        if self._config.on_step is not None:
            self._config.on_step("marked-durable")
        with self._lock:
            handle = self._handles.get(uid)
        if handle is not None and handle.state is not None:
            handle._advance(replace(handle.state, status=Status.DURABLE, bytes_new=added))
        self._forget_left(uid)

    def _on_write_failed(self, uid: str, error: BaseException) -> None:
        if self._is_closed:
            return  # nobody waited for it, its handle was told, and its tier may be closed by now
        with self._lock:
            self._write_error = error
            line, handle = self._lines_of.get(uid), self._handles.get(uid)
            if line is not None:
                self._note(line, error)
        if handle is not None:
            handle._fail(error)
        elif line is not None and not line.branch:  # a clone, which nobody asks for errors
            _log.warning("the cloned state %s was not written and is in memory only: %s", uid, error)
        self._post(WriteFailed(uid, time.monotonic()))

    # --- carrying out decisions, any thread ------------------------------------------------------------------------------

    def _post(self, *events: Event) -> list[Action]:
        done = []
        with self._lock:
            for event in events:
                actions = self._engine.handle(event)
                for action in actions:
                    self._act(action)
                done += actions
        self._changed.ring()
        return done

    def _act(self, action: Action) -> None:
        match action:
            case Write(uid):
                self._writes.put(uid)
            case Evict(uids, until):
                self._evict(uids, until)
            case GiveUp(uids):
                for uid in uids:
                    if (handle := self._handles.get(uid)) is not None:
                        handle._give_up(f"state {uid} gave way to newer ones before it was written (back_pressure='drop-oldest')")

    def _evict(self, uids: tuple[str, ...], until: int | None) -> None:
        for uid in uids:
            if until is not None and self._has_room(until):
                return
            self._memory.remove(uid)
            self._journal.evict([uid])
            self._forget(uid, f"state {uid} left memory before it became durable: make more states durable, or give more memory_bytes")

    def _forget(self, uid: str, why: str) -> None:
        """A state left memory; runs under the lock."""
        self._engine.forget(uid)
        if self._journal.is_pending(uid):
            self._left[uid] = why  # its handle is told once the lineage is
            return
        self._lines_of.pop(uid, None)
        handle = self._handles.pop(uid, None)
        if handle is not None:
            handle._give_up(why)

    def _forget_left(self, uid: str) -> None:
        with self._lock:
            if uid in self._left and not self._journal.is_pending(uid):
                self._forget(uid, self._left.pop(uid))
        self._changed.ring()

    def _raise_if_closed(self) -> None:
        if self._is_closed:
            raise Closed("the repository is closed: open it again to capture")


def _budget(count: int) -> str:
    return f"{3 * count * CHUNK_BYTES} (three states: one that is kept, one that is written, one that is captured)"
