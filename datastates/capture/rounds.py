"""When the engine thread works: at once if somebody waits, otherwise on several captures in one go.

Each time that it wakes it takes the interpreter from the training, which must wait to get it back; and a transaction costs about as much
for ten states as for one. So captures that follow each other quickly are finished in rounds. What the lineage says may then be late by
``ROUND_S``, as long as nobody asks.

Rules:
- A round begins at once when the last one began ``ROUND_S`` ago: captures that come slowly are finished one by one, as they come.
- It begins sooner when somebody waits for a capture, when one has failed, and before the training would have to wait: when there is room
  for no more than a head and two captures beside what is ready, or when ``MOST_READY`` captures are.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable

from datastates.system.bell import Bell

from .line import Staged

__all__ = ["MOST_READY", "ROUND_S", "Rounds"]

ROUND_S = 0.1
"""From the beginning of one round to that of the next."""

MOST_READY = 32
"""Captures that take no memory worth speaking of do not wait in greater number."""


class Rounds:
    """Captures on their way to the engine thread, in order. ``take`` and ``end`` belong to that thread, ``put`` to the stage thread."""

    def __init__(self) -> None:
        self._ready: deque[Staged] = deque()
        self._begun = self._ended = self._hurried = 0
        self._put_bytes = self._taken_bytes = 0  # each is written by one thread
        self._last = -math.inf
        self._is_closed = self._is_woken = False
        self._bell = Bell()
        self.on_hurry: Callable[[], None] = lambda: None
        """Called when somebody waits, whatever for."""
        self.room_bytes = 0
        """How much memory all states may take, as it stands."""

    @property
    def begun(self) -> int:
        """How many captures have begun so far."""
        return self._begun

    @property
    def in_flight(self) -> int:
        """Captures that have begun, and whose round has not ended."""
        return self._begun - self._ended

    def has_ended(self, count: int) -> bool:
        """Whether the rounds of the first ``count`` captures have ended."""
        return self._ended >= count

    def begin(self) -> None:
        """Count a capture that begins and that ``put`` will bring. One thread at a time: under the caller's lock."""
        self._begun += 1

    def put(self, staged: Staged) -> None:
        """A capture was copied, or has failed."""
        self._put_bytes += staged.held_bytes
        self._ready.append(staged)
        if staged.job is not None and staged.job.error is not None:
            self._hurried = self._begun
        if self._is_due():
            self._bell.ring()

    def hurry(self) -> None:
        """Somebody waits for what has begun. Any thread; two at once may make one of them wait for the next round."""
        if self._hurried < self._begun:
            self._hurried = self._begun
            self._bell.ring()
        self.on_hurry()

    def wake(self) -> None:
        """Let ``take`` return, if only to look around. Any thread."""
        self._is_woken = True
        self._bell.ring()

    def take(self, timeout_s: float) -> list[Staged] | None:
        """The captures of a round, which begins; none when there is none for so long, or after ``wake``. None at the end."""
        deadline = time.monotonic() + timeout_s
        while not self._is_due() and not self._is_closed:
            if self._is_woken:
                self._is_woken = False
                return []
            now = time.monotonic()
            if now >= deadline:
                return []
            pause = self._last + ROUND_S - now
            self._bell.wait_for(
                lambda: self._is_due() or self._is_closed or self._is_woken, min(deadline - now, pause if pause > 0 else math.inf)
            )
        if not self._ready:
            return None
        self._last = time.monotonic()
        taken = [self._ready.popleft() for _ in range(len(self._ready))]
        self._taken_bytes += sum(staged.held_bytes for staged in taken)
        return taken

    def end(self, count: int) -> None:
        """The round of so many captures is over."""
        self._ended += count

    def close(self) -> None:
        """Let the engine thread end, once it has taken what is ready."""
        self._is_closed = True
        self._bell.ring()

    def _is_due(self) -> bool:
        if not self._ready:
            return False
        if self._hurried > self._ended or len(self._ready) >= MOST_READY or time.monotonic() - self._last >= ROUND_S:
            return True
        return self._put_bytes - self._taken_bytes + 3 * self._ready[-1].held_bytes > self.room_bytes
