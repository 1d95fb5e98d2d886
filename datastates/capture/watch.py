"""Whether the threads of a runner go on, as far as the calls to the system say that they are in; and for how long callers wait for them."""

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
"""A write that has made no progress for so long is stalled."""

STUCK_S = 90.0
"""The lineage is given so long to answer whoever must wait for it: longer than it waits for another process's lock."""

_RETRY_S = 1.0
"""How often what cannot be written is tried while somebody waits for it to close."""


class Watch:
    """Looks from any thread at the one that records and the one that writes. What has stalled begins a trouble."""

    def __init__(
        self, trouble: Trouble, register: Register, locked: Locked, *, recording: threading.Thread, writing: threading.Thread
    ) -> None:
        self._trouble, self._recording, self._writing = trouble, recording, writing
        self._register, self._engine, self._lock, self._post = register, locked.engine, locked.lock, locked.post
        self._retried_at = 0.0

    @property
    def is_held_up(self) -> bool:
        """Whether one of them is in the middle of a call that may never return."""
        return any(_stalled(thread, STALL_S) is not None for thread in (self._recording, self._writing))

    def look(self) -> None:
        """See whether the write that is under way goes on."""
        is_stalled = self._begins_trouble(_stalled(self._writing, STALL_S))
        if is_stalled != self._engine.is_stalled:
            self._post(Stalled(is_stalled))

    def is_stuck(self) -> bool:
        """Whether the lineage has not answered for too long; looks at the write as well."""
        self.look()
        return self._begins_trouble(_stalled(self._recording, STUCK_S))

    def raise_if_stuck(self) -> None:
        """End the waiting for the lineage.

        :raises Unavailable: it has not answered for too long.
        """
        if self.is_stuck():
            raise Unavailable(f"captures are not recorded: {self._trouble.why}", trouble="lineage")

    def hopeless(self, failures: int) -> Unavailable | None:
        """The error for callers that wait for what is to be durable, once the disk has been in trouble for too long.

        Each of them sees it tried at least once more: ``failures`` were all when it began to wait.
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
