"""Whether the threads of a runner go on, as far as the calls to the system say that they are in."""

from __future__ import annotations

import threading
import time

from datastates.system.deeds import Deed, deed_of

from .trouble import Trouble

__all__ = ["STALL_S", "STUCK_S", "Watch"]

STALL_S = 30.0
"""A write that has made no progress for so long is stalled."""

STUCK_S = 90.0
"""The lineage is given so long to answer whoever must wait for it: longer than it waits for another process's lock."""


class Watch:
    """Looks from any thread at the one that records and the one that writes. What has stalled begins a trouble."""

    def __init__(self, trouble: Trouble, *, recording: threading.Thread, writing: threading.Thread) -> None:
        self._trouble, self._recording, self._writing = trouble, recording, writing

    @property
    def is_held_up(self) -> bool:
        """Whether one of them is in the middle of a call that may never return."""
        return any(_stalled(thread, STALL_S) is not None for thread in (self._recording, self._writing))

    def is_writing_stalled(self) -> bool:
        """Whether the write that is under way does not go on."""
        return self._begins_trouble(_stalled(self._writing, STALL_S))

    def is_stuck(self) -> bool:
        """Whether the lineage has not answered for too long."""
        return self._begins_trouble(_stalled(self._recording, STUCK_S))

    def _begins_trouble(self, stalled: Deed | None) -> bool:
        if stalled is not None:
            self._trouble.begin(stalled.describe(time.monotonic()))
        return stalled is not None


def _stalled(thread: threading.Thread, limit_s: float) -> Deed | None:
    one = deed_of(thread)
    return one if one is not None and one.is_stalled(time.monotonic(), limit_s) else None
