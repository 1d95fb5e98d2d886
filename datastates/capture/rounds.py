"""Decides when the engine thread works: at once if a caller waits, otherwise on several captures in one go.

Each time that the thread wakes, it takes the interpreter from the training, which must wait to get it back. And a transaction costs about
as much for ten states as for one. So captures that follow each other quickly are finished in rounds. The lineage may then be up to
``ROUND_S`` behind, as long as no caller asks.

Rules:
- A round begins at once if the last one began ``ROUND_S`` ago: captures that come slowly are finished one by one, as they come.
- It begins sooner when a caller waits for a capture, when a capture has failed, and before the training would have to wait: when there is
  room for no more than a head and two captures besides what is ready, or when ``MOST_READY`` captures are ready.
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
"""The time from the beginning of one round to that of the next, in seconds."""

MOST_READY = 32
"""The most captures that wait for a round, even if they take hardly any memory."""


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
        """Count a capture that begins and that ``put`` will bring. One thread at a time: under the caller's lock."""
        self._begun += 1

    def put(self, staged: Staged) -> None:
        """Add a capture that was copied, or has failed."""
        self._put_bytes += staged.held_bytes
        self._ready.append(staged)
        if staged.job is not None and staged.job.error is not None:
            self._hurried = self._begun
        if self._is_due():
            self._bell.ring()

    def hurry(self) -> None:
        """Start a round soon, because a caller waits for what has begun. Callable from any thread. If two call at once, one of them may
        wait for the next round."""
        if self._hurried < self._begun:
            self._hurried = self._begun
            self._bell.ring()
        self.on_hurry()

    def wake(self) -> None:
        """Let ``take`` return, even without captures, so that the engine thread can run its checks. Callable from any thread."""
        self._is_woken = True
        self._bell.ring()

    def take(self, timeout_s: float) -> list[Staged] | None:
        """The captures of a round, which begins now; an empty list if none is due within ``timeout_s``, or after ``wake``. None at the
        end."""
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
        """End the round of ``count`` captures."""
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
