"""Room in the arena for the next state: found, made by dropping what may leave, waited for, or refused."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from datastates.config import BackPressure
from datastates.content.manifest import CHUNK_BYTES
from datastates.errors import OverBudget
from datastates.store.arena import Arena
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
        self._next_slots = 0

    @property
    def needed_slots(self) -> int:
        """Slots that captures need to go on: for a state that is kept, one that is written and one that is captured."""
        return min(3 * self._next_slots, self._arena.capacity)

    def expect(self, line: Line, size_bytes: int) -> None:
        """Expect captures of about this size; memory for them is made warm in the background."""
        self._warmer.expect(line.name, -(-size_bytes // CHUNK_BYTES))

    def acquire(
        self, count: int, back_pressure: BackPressure, *, line: Line | None = None, within_s: float | None = None
    ) -> list[int] | None:
        """Slots for a state; see ``Host.acquire``."""
        if count > self._arena.capacity:
            raise OverBudget(
                f"a state takes {count} slots of {CHUNK_BYTES >> 20} MiB, the memory budget has {self._arena.capacity}: "
                f"open the repository with memory_bytes of at least {_budget(count)}"
            )
        if line is not None:
            self._expect_captures(line, count)
        since = time.monotonic()
        while True:
            in_flight, backlog, refused, slots = self._rounds.in_flight, self._backlog(), None, None
            is_coming = False
            if in_flight + backlog < _MOST_IN_FLIGHT and not self._is_overfull(self._arena.capacity):
                slots = self._use_again(count, back_pressure) if line is not None else None
                if slots is None and (line is None or not in_flight or self._warmer.is_given):
                    slots = self._arena.acquire(count, within=self._warmer.within)
            if slots is None and in_flight + backlog < _MOST_IN_FLIGHT and (line is None or not in_flight or self._warmer.is_given):
                refused = self._make(count, back_pressure, line, since)
                slots = None if self._is_overfull(self._arena.capacity) else self._arena.acquire(count, within=self._warmer.within)
                is_coming = slots is None and self._memory.recall(count) and time.monotonic() - since < _RECALL_S
            if slots is not None or back_pressure is BackPressure.SKIP or (within_s is not None and time.monotonic() - since > within_s):
                return slots
            is_hopeless = refused is not None and not is_coming
            if line is not None and line.is_patient and (is_hopeless or self._watch.is_stuck()):
                self._skipped()
                return None
            if refused is not None and not is_coming:
                raise self._refusal(count, refused, line)
            if line is None or not line.is_patient:
                self._watch.raise_if_stuck()
            self._check_open()
            self._rounds.hurry()
            self._changed.wait_for(partial(self._may_have, count, in_flight + backlog), _ASK_AGAIN_S)
            checkpoint()

    def release(self, slots: list[int]) -> None:
        """Give back slots of a capture that did not come about."""
        self._arena.release(slots)
        self._changed.ring()

    def has(self, count: int) -> bool:
        """Whether a state of ``count`` slots finds room now, within the memory that is meant for states."""
        allowed = self._warmer.allowed(count)
        limit = self._arena.capacity if self._warmer.is_given else allowed
        return self._arena.reach(allowed) >= count and not self._is_overfull(limit)

    def make_ahead(self, back_pressure: BackPressure) -> None:
        """Make room for the next capture, of the size of the last, before the training waits for it."""
        count = self._next_slots
        if not self.has(count):
            self._post(RoomNeeded(count, is_blocked=False, back_pressure=back_pressure))
            if not self.has(count):
                self._memory.recall(count)

    def _may_have(self, count: int, in_flight: int) -> bool:
        return in_flight > self._rounds.in_flight + self._backlog() or self.has(count)

    def _is_overfull(self, limit: int) -> bool:
        """Whether states take more memory than ``limit`` slots, counting what they take besides their slots."""
        beside = self._memory.bytes_beside // CHUNK_BYTES
        return beside > 0 and self._arena.capacity - self._arena.available + beside > limit

    def _expect_captures(self, line: Line, count: int) -> None:
        if count > self._next_slots and 2 * count > self._arena.capacity:
            _logger.warning(
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
        """Slots that are warm, or that may become warm next; else those of states that leave memory because they may."""
        slots = self._arena.acquire(count, within=self._warmer.allowed(count))
        if slots is None:
            self._post(RoomNeeded(count, is_blocked=False, back_pressure=back_pressure))
            slots = self._arena.acquire(count, within=self._warmer.allowed(count))
        return slots

    def _make(self, count: int, back_pressure: BackPressure, line: Line | None, since: float) -> Refuse | None:
        name = None if line is None else line.name
        with self._lock:  # no capture may begin between the count and the question
            in_flight = self._rounds.in_flight + self._backlog()
            is_patient = line is not None and line.is_patient
            event = RoomNeeded(count, True, back_pressure, name, in_flight, since, time.monotonic(), is_patient)
            return next((action for action in self._post(event) if isinstance(action, Refuse)), None)

    def _refusal(self, count: int, refused: Refuse, line: Line | None) -> OverBudget:
        """The error for a caller that waits for room that cannot be made, because writing failed."""
        why = self._register.take_write_error(line) or "the disk is in trouble"
        error = OverBudget(
            f"there is no room for a state of {count * CHUNK_BYTES >> 20} MiB: memory is full with {len(refused.uids)} states that are "
            f"not to be lost and could not be written, {refused.uids[0]} for one ({why}); this capture was not taken, those after it "
            f"will be when writing works again; or give more memory_bytes ({_budget(count)}), or delete tags that are not needed"
        )
        error.__cause__ = why if isinstance(why, BaseException) else None
        return error


def _budget(count: int) -> str:
    return f"{3 * count * CHUNK_BYTES} (three states: one that is kept, one that is written, one that is captured)"
