"""Checks whether the threads of a runner make progress, by the system calls that they are in, and limits how long callers wait for them."""

from __future__ import annotations

import threading
import time

from datastates.errors import Unavailable
from datastates.system.deeds import Deed, deed_of

from .events import Retry, Stalled
from .register import Locked, Register
from .trouble import CLOSING_S, Trouble

__all__ = ["STALL_S", "STUCK_S", "Watch"]

STALL_S = 30.0
"""A write that has made no progress for this long, in seconds, counts as stalled."""

STUCK_S = 90.0
"""How long a caller that must wait for the lineage gives it to answer, in seconds: longer than it waits for another process's lock."""

_RETRY_S = 1.0
"""How often writing is tried again while a caller that closes waits for it, in seconds."""


class Watch:
    """Watches the thread that records and the one that writes, from any thread. A stalled write begins a trouble."""

    def __init__(
        self, trouble: Trouble, register: Register, locked: Locked, *, recording: threading.Thread, writing: threading.Thread
    ) -> None:
        self._trouble, self._recording, self._writing = trouble, recording, writing
        self._register, self._engine, self._lock, self._post = register, locked.engine, locked.lock, locked.post
        self._retried_at = 0.0

    @property
    def is_held_up(self) -> bool:
        """Whether one of the threads is in the middle of a system call that may never return."""
        return any(_stalled(thread, STALL_S) is not None for thread in (self._recording, self._writing))

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
        """The error for callers that wait for states to become durable, once the disk has been in trouble for too long.

        Each caller sees at least one more try: ``failures`` is the count when it began to wait.
        """
        self.look()
        now, trouble = time.monotonic(), self._trouble
        if trouble.why is None or not self._engine.is_in_trouble:
            return None
        if trouble.closing_since is None:
            trouble.closing_since = now
        if now - trouble.closing_since < CLOSING_S or (trouble.failures == failures and not self._engine.is_stalled):
            if now - self._retried_at >= _RETRY_S:
                self._retried_at = now
                self._post(Retry())
            return None
        with self._lock:
            names = self._register.named(self._engine.unwritten())
        if not names:
            return None
        return Unavailable(trouble.describe_lost(names), trouble=f"unwritten: {self._register.folder}")

    def _begins_trouble(self, stalled: Deed | None) -> bool:
        if stalled is not None:
            self._trouble.begin(stalled.describe(time.monotonic()))
        return stalled is not None


def _stalled(thread: threading.Thread, limit_s: float) -> Deed | None:
    one = deed_of(thread)
    return one if one is not None and one.is_stalled(time.monotonic(), limit_s) else None
