"""Waiting for other threads without a lock that both sides need: a thread that is interrupted while
waiting leaves nothing locked.

``threading.Condition`` and ``Event`` are written in Python. Ctrl-C in the middle of their ``wait``
can leave their lock taken. A thread that wants to wake the waiter then waits for that lock. Here
each waiter has a separate lock, which it alone takes.
"""

from __future__ import annotations

import ctypes
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from datastates.errors import Closed

_LOOK_S = 0.5
"""The length of one piece of a wait, in seconds: a signal that was delivered to another thread
wakes no waiter."""


class Notifier:
    """Wakes waiting threads after a change: make the change, then ``notify_all``.

    Any thread may ring; no thread ever holds it."""

    def __init__(self) -> None:
        self._waiters: set[threading.Lock] = set()  # one call adds to it, or takes from it
        self._pid = os.getpid()

    def notify_all(self) -> None:
        """Wake every thread that waits now."""
        for waiter in self._waiters.copy():
            # making a tuple of it may collect garbage, and let another thread change it meanwhile
            try:
                self._waiters.remove(waiter)
            except KeyError:
                continue  # woken by another ring, or gone
            waiter.release()

    def wait_for(self, is_so: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Wait until ``is_so()``, which is called after each ring; False if ``timeout_s`` passes
        first.

        :raises Closed: this is a forked child, and the thread that would ring is the parent's.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not is_so():
            if self._pid != os.getpid():
                raise Closed(
                    "this belongs to the parent process, whose threads are not here: open the"
                    " repository and track again"
                )
            waiter = threading.Lock()
            waiter.acquire()
            # before the condition is checked again: changes from here on ring for this waiter
            self._waiters.add(waiter)
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

    __slots__ = ("_is_set", "_notifier")

    def __init__(self) -> None:
        self._notifier, self._is_set = Notifier(), False

    def is_set(self) -> bool:
        """Whether it has been set."""
        return self._is_set

    def set(self) -> None:
        """Wake the waiting threads."""
        self._is_set = True
        self._notifier.notify_all()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it is set; False if ``timeout_s`` passes first."""
        return self._notifier.wait_for(self.is_set, timeout_s)


# The slow calls of each thread. A thread that makes no progress can be found and named, and tests
# can delay or fail its calls.


IoHook = Callable[[str, Path, int], None]
"""Called with the next call, its file, and its number of bytes: waits, raises or does nothing."""

_SLOWEST = 20e6
"""Bytes a second of a slow disk: one call may bring gigabytes from the page cache to the disk,
without a sign of progress."""

_io_hooks: list[IoHook] = []
_work: dict[int, ThreadWork] = {}


@dataclass(slots=True)
class ThreadWork:
    """One thing that a thread does.

    ``call`` and ``path`` are its current call, since ``since`` (of the monotonic clock)."""

    what: str
    call: str = ""
    path: Path | None = None
    size: int = 0
    since: float = field(default_factory=time.monotonic)

    def is_stalled(self, now: float, limit_s: float) -> bool:
        """Whether there was no progress for ``limit_s``, plus the time that a slow disk takes
        for the call's bytes."""
        return now - self.since >= limit_s + self.size / _SLOWEST

    def describe(self, now: float) -> str:
        """The current call of the thread, and its duration."""
        where = f"{self.call} of {self.path}" if self.path is not None else self.what
        return f"{where} has made no progress for {now - self.since:.0f} s"


@contextmanager
def thread_work(what: str) -> Iterator[ThreadWork]:
    """Note what this thread does until the end of the block."""
    thread = threading.get_ident()
    before = _work.get(thread)
    one = _work[thread] = ThreadWork(what)
    try:
        yield one
    finally:
        if before is None:
            _work.pop(thread, None)
        else:
            _work[thread] = before


def work_of(thread: threading.Thread) -> ThreadWork | None:
    """The work that a thread has noted, if any."""
    return None if thread.ident is None else _work.get(thread.ident)


def at(call: str, path: Path, size: int = 0) -> None:
    """Note that this thread is about to make a call that may take long, with this many bytes."""
    one = _work.get(threading.get_ident())
    if one is not None:
        one.call, one.path, one.size, one.since = call, path, size, time.monotonic()
    for hinder in tuple(_io_hooks):
        hinder(call, path, size)


@contextmanager
def io_hook(hinder: IoHook) -> Iterator[None]:
    """Hinder every such call of this process until the end of the block; for tests."""
    _io_hooks.append(hinder)
    try:
        yield
    finally:
        _io_hooks.remove(hinder)


# Threads that give way to others at the disk.


_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
"""The number of ``ioprio_set``, for which the C library has no name."""

_THREAD = 1

LOWEST = (2 << 13) | 7
"""The last priority of those that share the disk by turns. Not the class *idle*, which gets nothing
at all while others use the disk: writes that a checkpoint waits for must come to an end.
"""


def yield_disk() -> bool:
    """Let the disk serve other threads and processes before this thread, if its scheduler has
    priorities. Returns whether that was accepted.

    The processor's priority stays: a thread that holds the interpreter's lock and waits for its
    turn would hold up the training.
    """
    number = _IOPRIO_SET.get(os.uname().machine) if sys.platform == "linux" else None
    return number is not None and ctypes.CDLL(None).syscall(number, _THREAD, 0, LOWEST) == 0
