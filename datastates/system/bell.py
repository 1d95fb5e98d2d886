"""Waiting for other threads without a lock that both sides need: a thread that is interrupted while waiting leaves nothing locked.

``threading.Condition`` and ``Event`` are written in Python: Ctrl-C in the middle of their ``wait`` can leave their lock taken, and a thread
that wants to wake the waiter then waits for that lock. Here each waiter has a lock of its own, which it alone takes.
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
"""The length of one piece of a wait, in seconds: a signal that was delivered to another thread wakes no waiter."""


class Bell:
    """Tells waiting threads that something changed: make the change, then ``ring``. Any thread may ring; no thread ever holds it."""

    def __init__(self) -> None:
        self._waiters: set[threading.Lock] = set()  # one call adds to it, or takes from it
        self._pid = os.getpid()

    def ring(self) -> None:
        """Wake every thread that waits now."""
        for waiter in self._waiters.copy():  # making a tuple of it may collect garbage, and let another thread change it meanwhile
            try:
                self._waiters.remove(waiter)
            except KeyError:
                continue  # woken by another ring, or gone
            waiter.release()

    def wait_for(self, is_so: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Wait until ``is_so()``, which is called after each ring; False if ``timeout_s`` passes first.

        :raises Closed: this is a forked child, and the thread that would ring is the parent's.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not is_so():
            if self._pid != os.getpid():
                raise Closed("this belongs to the parent process, whose threads are not here: open the repository and track again")
            waiter = threading.Lock()
            waiter.acquire()
            self._waiters.add(waiter)  # before the condition is checked again: changes from here on ring for this waiter
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
    """A flag that one thread sets once, and that is never unset."""

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
        """Wait until it is set; False if ``timeout_s`` passes first."""
        return self._bell.wait_for(self.is_set, timeout_s)
