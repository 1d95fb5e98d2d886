"""Room in the arena for the next state: found, made by dropping what may leave, waited for, or refused."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial

from datastates.config import BackPressure
from datastates.content.manifest import CHUNK_BYTES
from datastates.errors import OverBudget
from datastates.policy.keeping import UNCOUNTED_BYTES
from datastates.store.arena import Arena, taken_by
from datastates.store.roles import CaptureTier
from datastates.system.interrupts import checkpoint

from .events import Action, Refuse, RoomNeeded
from .line import Line
from .register import Locked, Register
from .rounds import Rounds
from .warming import Warmer
from .watch import Watch

__all__ = ["Questions", "Room"]

_logger = logging.getLogger(__name__)

_ASK_AGAIN_S = 0.1
"""How often a caller that waits for room asks for it again, in seconds."""

_RECALL_S = 5.0
"""For how long, in seconds, a caller that waits for room counts on readers that were told to release theirs."""

_MOST_IN_FLIGHT = 64
"""The most captures whose second half is not done: captures without tensors take no slots, so nothing else would limit them."""


@dataclass(frozen=True, slots=True)
class Questions:
    """What the runner answers when room is needed. ``post`` asks the engine. ``check_open`` raises when nothing more is captured.
    ``backlog`` counts recorded states that users' modules have not seen; they keep their memory as captures in flight do. ``watch``
    knows whether the lineage and the disk make progress. ``skipped`` is called for each capture that was not taken because they do not.
    """

    post: Callable[[RoomNeeded], list[Action]]
    check_open: Callable[[], None]
    backlog: Callable[[], int]
    watch: Watch
    skipped: Callable[[], None]


class Room:
    """Gives out the slots of an arena."""

    def __init__(
        self,
        arena: Arena,
        memory: CaptureTier,
        *,
        warmer: Warmer,
        rounds: Rounds,
        register: Register,
        locked: Locked,
        questions: Questions,
    ) -> None:
        self._arena, self._memory, self._warmer, self._rounds = arena, memory, warmer, rounds
        self._register, self._lock, self._changed = register, locked.lock, locked.changed
        self._post, self._check_open, self._backlog = questions.post, questions.check_open, questions.backlog
        self._watch, self._skipped = questions.watch, questions.skipped
        self._next: tuple[int, ...] = ()

    @property
    def needed_bytes(self) -> int:
        """The memory that captures need to go on: for a state that is kept, one that is written and one that is captured."""
        return min(3 * _size(self._next), self._arena.capacity)

    def expect(self, line: Line, size_bytes: int) -> None:
        """Expect captures of about this size; memory for them is made warm in the background."""
        self._warmer.expect(line.name, _rounded(size_bytes))

    def acquire(
        self, lengths: tuple[int, ...], back_pressure: BackPressure, *, line: Line | None = None, within_s: float | None = None
    ) -> list[int] | None:
        """Slots for the chunks of a state; see ``Host.acquire``."""
        size = _size(lengths)
        if size > self._arena.capacity:
            raise self._excess(size)
        if line is not None:
            self._expect_captures(line, lengths)
        since = time.monotonic()
        while True:
            in_flight, backlog, refused, slots = self._rounds.in_flight, self._backlog(), None, None
            is_coming = False
            if in_flight + backlog < _MOST_IN_FLIGHT and not self._is_overfull(self._arena.capacity):
                slots = self._use_again(lengths, back_pressure) if line is not None else None
                if slots is None and (line is None or not in_flight or self._warmer.is_given):
                    slots = self._arena.acquire(lengths, within=self._warmer.within)
            if slots is None and in_flight + backlog < _MOST_IN_FLIGHT and (line is None or not in_flight or self._warmer.is_given):
                refused = self._make(lengths, back_pressure, line, since)
                slots = None if self._is_overfull(self._arena.capacity) else self._arena.acquire(lengths, within=self._warmer.within)
                is_coming = slots is None and self._memory.recall(size) and time.monotonic() - since < _RECALL_S
            if slots is not None or back_pressure is BackPressure.SKIP or (within_s is not None and time.monotonic() - since > within_s):
                return slots
            is_hopeless = refused is not None and not is_coming
            if line is not None and line.is_patient and (is_hopeless or self._watch.is_stuck()):
                self._skipped()
                return None
            if refused is not None and not is_coming:
                raise self._refusal(size, refused, line)
            if self._arena.available == self._arena.capacity and not self._arena.fits(lengths, within=self._arena.capacity):
                raise self._excess(size)
            if line is None or not line.is_patient:
                self._watch.raise_if_stuck()
            self._check_open()
            self._rounds.hurry()
            self._changed.wait_for(partial(self._may_have, lengths, in_flight + backlog), _ASK_AGAIN_S)
            checkpoint()

    def release(self, slots: list[int]) -> None:
        """Give back slots of a capture that did not come about."""
        self._arena.release(slots)
        self._changed.ring()

    def has(self, lengths: tuple[int, ...]) -> bool:
        """Whether chunks of these lengths find room now, within the memory that is meant for states."""
        allowed = self._warmer.allowed(_size(lengths))
        limit = self._arena.capacity if self._warmer.is_given else allowed
        return not self._is_overfull(limit) and self._arena.fits(lengths, within=allowed)

    def make_ahead(self, back_pressure: BackPressure) -> None:
        """Make room for the next capture, of the size of the last, before the training waits for it."""
        if not self.has(self._next):
            self._post(RoomNeeded(self._next, is_blocked=False, back_pressure=back_pressure))
            if not self.has(self._next):
                self._memory.recall(_size(self._next))

    def _may_have(self, lengths: tuple[int, ...], in_flight: int) -> bool:
        return in_flight > self._rounds.in_flight + self._backlog() or self.has(lengths)

    def _is_overfull(self, limit: int) -> bool:
        """Whether states take more than ``limit`` bytes, counting what they take besides their slots beyond the first 4 MiB."""
        beside = self._memory.bytes_beside - UNCOUNTED_BYTES
        return beside > 0 and self._arena.capacity - self._arena.available + beside > limit

    def _expect_captures(self, line: Line, lengths: tuple[int, ...]) -> None:
        size = _size(lengths)
        if size > _size(self._next) and 2 * size > self._arena.capacity:
            _logger.warning(
                "memory holds one state of %d MiB and no second one: the newest leaves it whenever the next is captured; "
                "give memory_bytes of %s",
                size >> 20,
                _budget(size),
            )
        self._next = lengths
        self._warmer.expect(line.name, _rounded(size))
        self._warmer.say(size)
        self._rounds.room_bytes = self._warmer.allowed(size)

    def _use_again(self, lengths: tuple[int, ...], back_pressure: BackPressure) -> list[int] | None:
        """Slots that are warm, or that may become warm next; else those of states that leave memory because they may."""
        slots = self._arena.acquire(lengths, within=self._warmer.allowed(_size(lengths)))
        if slots is None:
            self._post(RoomNeeded(lengths, is_blocked=False, back_pressure=back_pressure))
            slots = self._arena.acquire(lengths, within=self._warmer.allowed(_size(lengths)))
        return slots

    def _make(self, lengths: tuple[int, ...], back_pressure: BackPressure, line: Line | None, since: float) -> Refuse | None:
        name = None if line is None else line.name
        with self._lock:  # no capture may begin between the count and the question
            in_flight = self._rounds.in_flight + self._backlog()
            is_patient = line is not None and line.is_patient
            event = RoomNeeded(lengths, True, back_pressure, name, in_flight, since, time.monotonic(), is_patient)
            return next((action for action in self._post(event) if isinstance(action, Refuse)), None)

    def _excess(self, size: int) -> OverBudget:
        return OverBudget(
            f"a state takes {size} bytes of memory, the memory budget has {self._arena.capacity}: open the repository with memory_bytes "
            f"of at least {_budget(size)}"
        )

    def _refusal(self, size: int, refused: Refuse, line: Line | None) -> OverBudget:
        """The error for a caller that waits for room that cannot be made, because writing failed."""
        why = self._register.take_write_error(line) or "the disk is in trouble"
        error = OverBudget(
            f"there is no room for a state of {size >> 20} MiB: memory is full with {len(refused.uids)} states that are "
            f"not to be lost and could not be written, {refused.uids[0]} for one ({why}); this capture was not taken, those after it "
            f"will be when writing works again; or give more memory_bytes ({_budget(size)}), or delete tags that are not needed"
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
    return f"{3 * -(-size // CHUNK_BYTES) * CHUNK_BYTES} (three states: one that is kept, one that is written, one that is captured)"
