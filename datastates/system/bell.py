"""Waiting for other threads without a lock that both sides need: a thread that is interrupted while waiting leaves nothing locked.

``threading.Condition`` and ``Event`` are written in Python: Ctrl-C in the middle of their ``wait`` can leave their lock taken, and whoever
was to wake the waiter then waits for it. Here each waiter has a lock of its own, which it alone takes.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable

from datastates.errors import Closed

__all__ = ["Bell", "Latch"]

_LOOK_S = 0.5
"""A wait is in pieces of this length: a signal that another thread was given wakes nobody."""


class Bell:
    """Tells waiting threads that something changed: make the change, then ``ring``. Any thread, and never held by one."""

    def __init__(self) -> None:
        self._waiters: set[threading.Lock] = set()  # one call adds to it, or takes from it
        self._pid = os.getpid()

    def ring(self) -> None:
        """Wake every thread that waits now."""
        for waiter in tuple(self._waiters):
            try:
                self._waiters.remove(waiter)
            except KeyError:
                continue  # woken by another ring, or gone
            waiter.release()

    def wait_for(self, is_so: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Wait until ``is_so()``, which is asked after each ring; False when ``timeout_s`` went by before.

        :raises Closed: this is a forked child: whoever would ring is a thread of the parent.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not is_so():
            if self._pid != os.getpid():
                raise Closed("this belongs to the parent process, whose threads are not here: open the repository and track again")
            waiter = threading.Lock()
            waiter.acquire()
            self._waiters.add(waiter)  # before it is asked again: what changes from here on rings for us
            try:
                if is_so():
                    return True
                left = math.inf if deadline is None else deadline - time.monotonic()
                if left <= 0:
                    return False
                waiter.acquire(timeout=min(left, _LOOK_S))
            finally:
                self._waiters.discard(waiter)
        return True


class Latch:
    """Set once, by one thread, and never again unset."""

    __slots__ = ("_bell", "_is_set")

    def __init__(self) -> None:
        self._bell, self._is_set = Bell(), False

    def is_set(self) -> bool:
        """Whether it has been set."""
        return self._is_set

    def set(self) -> None:
        """Let the waiting threads go on."""
        self._is_set = True
        self._bell.ring()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it is set; False when ``timeout_s`` went by before."""
        return self._bell.wait_for(self.is_set, timeout_s)
