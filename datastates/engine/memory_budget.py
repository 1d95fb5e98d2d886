"""Memory in the arena for the next state: found, made by evictions, waited for, or refused."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from functools import lru_cache, partial

from datastates.config import BackPressure
from datastates.errors import Closed, OverBudget
from datastates.policy.contract import (
    FEWEST,
    UNCOUNTED_BYTES,
    bytes_allowed,
    bytes_at_once,
    bytes_kept,
    is_tight,
)
from datastates.state.manifest import CHUNK_BYTES
from datastates.storage.arena import Arena, taken_by
from datastates.storage.memory import STATE_BYTES, MemoryTier
from datastates.system.interrupts import Mutex, checkpoint
from datastates.system.logs import event
from datastates.system.memory import available_memory_bytes
from datastates.system.threads import Notifier

from .handle import Line
from .in_flight import InFlight, LockedEngine
from .periodic import Rounds
from .scheduler import Refuse, RoomNeeded
from .writer import StallDetector

_logger = logging.getLogger(__name__)

_REST = 19.0
"""After it has touched a block, the thread rests for this many times as long as that took, so
that it takes a twentieth of a core."""

_MERGE_REST = 59.0
"""The same after it has made a block's pages huge. Small pages cost a training that writes every
state less than that work at a twentieth of a core would, so it takes its time: a sixtieth of a
core."""

_LOOK_S = 0.5
"""How often to check whether memory runs short, in seconds."""

_SHORT_S = 1.0
"""For how long no memory is touched once it has run short, in seconds."""

_REFUSED_S = 1.0
"""For how long to wait once the kernel refused to make pages huge, as it does while they are
written to disk, in seconds."""


class Prefaulter:
    """Warms the arena for as many states as are kept, by the bytes that one state of each line
    takes. Safe from any thread.

    ``is_given``: the user chose the size of the arena, so all of it is used. ``latest`` is how many
    states each line should keep (None: as many as fit). ``available`` returns how much memory may
    still be taken.
    """

    def __init__(
        self,
        arena: Arena,
        *,
        is_given: bool,
        latest: int | None = None,
        available: Callable[[], int] | None = None,
    ) -> None:
        self._arena, self.is_given, self._available = (
            arena,
            is_given,
            available or available_memory_bytes,
        )
        self._latest = latest
        self._is_tight, self._looked_at = False, -math.inf
        self._sizes: dict[str, int] = {}
        self._said: int | None = None
        self._is_closed = False
        self._lock, self._changed = Mutex(), Notifier()
        self._thread = threading.Thread(target=self._run, name="datastates-arena", daemon=True)
        self._thread.start()

    def allowed(self, size: int) -> int:
        """How many bytes may be warm, including a capture of ``size``, before states that may
        leave memory have to."""
        with self._lock:
            if not self._sizes:
                return 0
            at_once = bytes_at_once(
                self._sizes.values(), self._arena.capacity, is_given=self.is_given
            )
            return bytes_allowed(size, warm=self._arena.warm, at_once=at_once, kept=self._kept())

    @property
    def within(self) -> int | None:
        """How many bytes may be warm, even to hold states that may not leave memory. None means no
        limit."""
        with self._lock:
            return self._most() if self._is_tight else None

    def look(self) -> None:
        """Check whether memory has run short, or is available again. It takes a millisecond, so
        it checks only now and then; never call it on the training thread."""
        now = time.monotonic()
        if not self._sizes or now - self._looked_at < _LOOK_S:
            return
        self._looked_at = now
        # to recover takes twice as much, or it would change all the time
        available = self._available() // (2 if self._is_tight else 1)
        is_tight_now = is_tight(available, self._arena.warm)
        if is_tight_now == self._is_tight:
            return
        self._is_tight = is_tight_now
        if is_tight_now:
            _logger.info(
                "memory runs short: states take no more than the %d MiB that they have, and are"
                " written to disk where that is too little",
                self._arena.warm >> 20,
                extra=event("memory.short", bytes=self._arena.warm),
            )
        self._changed.notify_all()

    @property
    def ahead(self) -> int:
        """How many bytes will be warm in the end. Bytes of states outside their slots are not
        counted."""
        with self._lock:
            size = sum(self._sizes.values())
            return self._kept() * size // max(1, size + STATE_BYTES * len(self._sizes))

    def expect(self, line: str, size: int) -> None:
        """Note how many bytes a state of this line takes."""
        with self._lock:
            is_more = self._sizes.get(line, -1) < size
            if is_more:
                self._sizes[line] = size
        if is_more:
            self._changed.notify_all()

    def forget(self, line: str) -> None:
        """Forget a line that has ended."""
        with self._lock:
            self._sizes.pop(line, None)

    def say(self, size_bytes: int) -> None:
        """Log how many states of this size are kept: once, and again if they turn out to be
        fewer."""
        with self._lock:
            each = sum(self._sizes.values()) + len(self._sizes) * STATE_BYTES
            # in addition to the one that is being captured
            fit = max(1, (self._kept() + UNCOUNTED_BYTES) // max(1, each) - 1)
            kept = fit if self._latest is None else min(fit, self._latest)
            if self._said is not None and kept >= self._said:
                return
            self._said = kept
        asked = (
            ""
            if self._latest in (None, kept)
            else f" of the {self._latest} that memory_latest asks for"
        )
        more = (
            ""
            if kept == self._latest
            else "; memory_bytes= of datastates.open, or DATASTATES_MEMORY, keeps more"
        )
        _logger.log(
            logging.INFO if self._latest in (None, kept) else logging.WARNING,
            "the newest %d states (%.4g MiB each)%s are kept in memory%s",
            kept,
            size_bytes / (1 << 20),
            asked,
            more,
            extra=event("memory.kept", states=kept, state_bytes=size_bytes),
        )

    def close(self) -> None:
        """End the thread; idempotent."""
        self._is_closed = True
        self._changed.notify_all()
        self._thread.join()

    def _kept(self) -> int:
        kept = (
            bytes_kept(
                self._sizes.values(),
                self._arena.capacity,
                is_given=self.is_given,
                latest=self._latest,
            )
            if self._sizes
            else 0
        )
        return min(kept, self._most()) if self._is_tight else kept

    def _most(self) -> int:
        """How many bytes may be warm while memory is short: those that are, and those that
        captures cannot do without."""
        return min(self._arena.capacity, max(self._arena.warm, FEWEST * sum(self._sizes.values())))

    def _run(self) -> None:
        try:
            while self._wait_for_need():
                self.look()
                if self._is_tight:
                    self._rest(_SHORT_S)
                    continue
                began = time.perf_counter()
                if self._arena.warm < self.ahead:
                    self._arena.warm_up()
                    if self._arena.warm >= self.ahead:
                        # now, as many small registrations would divide copies
                        self._arena.register()
                    self._rest(_REST * (time.perf_counter() - began))
                elif self._arena.merge_pages():
                    self._rest(_MERGE_REST * (time.perf_counter() - began))
                else:
                    self._rest(_REFUSED_S)
        except Closed:
            return  # a runner that gave up its captures does not wait for this thread

    def _wait_for_need(self) -> bool:
        """Wait until more memory should be warm than is, or until warm memory has small pages;
        False at the end."""
        self._changed.wait_for(
            lambda: self._is_closed or self._arena.warm < self.ahead or self._arena.has_small_pages
        )
        return not self._is_closed

    def _rest(self, seconds: float) -> None:
        self._changed.wait_for(lambda: self._is_closed, seconds)


# --- Acquiring memory ---


_ASK_AGAIN_S = 0.1
"""The seconds between two attempts of a caller that waits for memory."""

_RECALL_S = 5.0
"""How many seconds a caller that waits for memory relies on readers that were requested to release
theirs."""

_MOST_IN_FLIGHT = 64
"""The most captures whose second half is not done. Captures without tensors take no slots, so this
is their only limit."""


class SlotAllocator:
    """Gives out the slots of an arena."""

    def __init__(
        self,
        arena: Arena,
        memory: MemoryTier,
        *,
        prefaulter: Prefaulter,
        rounds: Rounds,
        in_flight: InFlight,
        locked: LockedEngine,
        watch: StallDetector,
        check_open: Callable[[], None],
    ) -> None:
        self._arena, self._memory, self._prefaulter, self._rounds = (
            arena,
            memory,
            prefaulter,
            rounds,
        )
        self._in_flight, self._lock, self._changed = in_flight, locked.lock, locked.changed
        self._post, self._check_open = locked.post, check_open
        self._watch = watch
        self._next: tuple[int, ...] = ()

    @property
    def needed_bytes(self) -> int:
        """The memory that captures need to continue: for a state that is kept, one that is written
        and one that is captured."""
        return min(3 * _size(self._next), self._arena.capacity)

    def expect(self, line: Line, size_bytes: int) -> None:
        """Expect captures of about this size; memory for them is made warm in the background."""
        self._prefaulter.expect(line.name, _rounded(size_bytes))

    def acquire(
        self,
        lengths: Sequence[int],
        back_pressure: BackPressure,
        *,
        line: Line | None = None,
        within_s: float | None = None,
    ) -> list[int] | None:
        """Slots for the chunks of a state; None if there is no memory and the
        back-pressure is ``skip``.

        Blocks under ``wait`` and ``drop-oldest`` until memory is freed, but not longer than
        ``within_s``: then the result is None. After a capture, which gives its ``line``, memory for
        the next one of its size is freed ahead.

        :raises OverBudget: the state could never fit, or nothing that is in its way can be written.
        """
        lengths = tuple(lengths)
        size = _size(lengths)
        if size > self._arena.capacity:
            raise self._excess(size)
        if line is not None:
            self._expect_captures(line, lengths)
        since = time.monotonic()
        while True:
            in_flight, backlog, refused, slots = (
                self._rounds.in_flight,
                self._in_flight.backlog,
                None,
                None,
            )
            is_coming = False
            if in_flight + backlog < _MOST_IN_FLIGHT and not self._is_overfull(
                self._arena.capacity
            ):
                slots = self._use_again(lengths, back_pressure) if line is not None else None
                if slots is None and (line is None or not in_flight or self._prefaulter.is_given):
                    slots = self._arena.acquire(lengths, within=self._prefaulter.within)
            if (
                slots is None
                and in_flight + backlog < _MOST_IN_FLIGHT
                and (line is None or not in_flight or self._prefaulter.is_given)
            ):
                refused = self._make(lengths, back_pressure, line, since)
                slots = (
                    None
                    if self._is_overfull(self._arena.capacity)
                    else self._arena.acquire(lengths, within=self._prefaulter.within)
                )
                is_coming = (
                    slots is None
                    and self._memory.recall(size)
                    and time.monotonic() - since < _RECALL_S
                )
            if (
                slots is not None
                or back_pressure is BackPressure.SKIP
                or (within_s is not None and time.monotonic() - since > within_s)
            ):
                return slots
            is_hopeless = refused is not None and not is_coming
            if line is not None and line.is_patient and (is_hopeless or self._watch.is_stuck()):
                self._watch.trouble.note_skipped()
                return None
            if refused is not None and not is_coming:
                raise self._refusal(size, refused, line)
            if self._arena.available == self._arena.capacity and not self._arena.fits(
                lengths, within=self._arena.capacity
            ):
                raise self._excess(size)
            if line is None or not line.is_patient:
                self._watch.raise_if_stuck()
            self._check_open()
            self._rounds.hurry()
            self._changed.wait_for(
                partial(self._may_have, lengths, in_flight + backlog), _ASK_AGAIN_S
            )
            checkpoint()

    def release(self, slots: list[int]) -> None:
        """Give back slots of a capture that did not come about."""
        self._arena.release(slots)
        self._changed.notify_all()

    def has(self, lengths: tuple[int, ...]) -> bool:
        """Whether chunks of these lengths fit now, within the memory that is meant for states."""
        allowed = self._prefaulter.allowed(_size(lengths))
        limit = self._arena.capacity if self._prefaulter.is_given else allowed
        return not self._is_overfull(limit) and self._arena.fits(lengths, within=allowed)

    def make_ahead(self, back_pressure: BackPressure) -> None:
        """Free memory for the next capture, of the size of the last, before the training waits for
        it."""
        if not self.has(self._next):
            self._post(RoomNeeded(self._next, is_blocked=False, back_pressure=back_pressure))
            if not self.has(self._next):
                self._memory.recall(_size(self._next))

    def _may_have(self, lengths: tuple[int, ...], in_flight: int) -> bool:
        return in_flight > self._rounds.in_flight + self._in_flight.backlog or self.has(lengths)

    def _is_overfull(self, limit: int) -> bool:
        """Whether states take more than ``limit`` bytes. Their bytes outside slots are counted
        beyond the first 4 MiB."""
        beside = self._memory.bytes_beside - UNCOUNTED_BYTES
        return beside > 0 and self._arena.capacity - self._arena.available + beside > limit

    def _expect_captures(self, line: Line, lengths: tuple[int, ...]) -> None:
        size = _size(lengths)
        if size > _size(self._next) and 2 * size > self._arena.capacity:
            _logger.warning(
                "memory holds one state of %d MiB and no second one: the newest leaves it whenever"
                " the next is captured; give memory_bytes of %s",
                size >> 20,
                _budget(size),
            )
        self._next = lengths
        self._prefaulter.expect(line.name, _rounded(size))
        self._prefaulter.say(size)
        self._rounds.room_bytes = self._prefaulter.allowed(size)

    def _use_again(self, lengths: tuple[int, ...], back_pressure: BackPressure) -> list[int] | None:
        """Slots that are warm, or that may become warm next. If there are none, slots of states
        that may leave memory."""
        slots = self._arena.acquire(lengths, within=self._prefaulter.allowed(_size(lengths)))
        if slots is None:
            self._post(RoomNeeded(lengths, is_blocked=False, back_pressure=back_pressure))
            slots = self._arena.acquire(lengths, within=self._prefaulter.allowed(_size(lengths)))
        return slots

    def _make(
        self, lengths: tuple[int, ...], back_pressure: BackPressure, line: Line | None, since: float
    ) -> Refuse | None:
        name = None if line is None else line.name
        with self._lock:  # no capture may begin between the count and the question
            in_flight = self._rounds.in_flight + self._in_flight.backlog
            is_patient = line is not None and line.is_patient
            event = RoomNeeded(
                lengths, True, back_pressure, name, in_flight, since, time.monotonic(), is_patient
            )
            return next(
                (action for action in self._post(event) if isinstance(action, Refuse)), None
            )

    def _excess(self, size: int) -> OverBudget:
        return OverBudget(
            f"a state takes {size} bytes of memory, the memory budget has {self._arena.capacity}:"
            f" open the repository with memory_bytes of at least {_budget(size)}"
        )

    def _refusal(self, size: int, refused: Refuse, line: Line | None) -> OverBudget:
        """The error for a caller that waits for memory that cannot be freed, because writing
        failed."""
        why = self._in_flight.take_write_error(line) or "the disk is in trouble"
        error = OverBudget(
            f"there is no room for a state of {size >> 20} MiB: memory is full with"
            f" {len(refused.uids)} states that are not to be lost and could not be written,"
            f" {refused.uids[0]} for one ({why}); this capture was not taken, those after it will"
            f" be when writing works again; or give more memory_bytes ({_budget(size)}), or delete"
            " tags that are not needed"
        )
        error.__cause__ = why if isinstance(why, BaseException) else None
        return error


@lru_cache(16)
def _size(lengths: tuple[int, ...]) -> int:
    return sum(map(taken_by, lengths))


def _rounded(size: int) -> int:
    """Rounded up to chunks, as memory becomes warm, if a state takes more than one."""
    return size if size < CHUNK_BYTES else -(-size // CHUNK_BYTES) * CHUNK_BYTES


def _budget(size: int) -> str:
    return (
        f"{3 * -(-size // CHUNK_BYTES) * CHUNK_BYTES} (three states: one that is kept, one that is"
        " written, one that is captured)"
    )
