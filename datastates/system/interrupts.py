"""Signals are deferred during critical sections, so that an exception (Ctrl-C, SIGTERM, a time
limit) leaves no work half done.

Python runs signal handlers in the main thread, between any two instructions. A handler that raises
between the taking of a lock and the block that releases it leaves the lock taken for ever, and
every thread that needs it waits for ever. Code that a training thread must not leave halfway runs
``with undisturbed():``. A section is short, or calls ``checkpoint`` while it waits. Python
interrupts the main thread alone, so sections of other threads have no effect.

The handlers are restored when the outermost section ends; signals that came meanwhile are then
handed to them, once for each signal.
"""

from __future__ import annotations

# has no stubs; ``signal`` wraps it in enums, which takes 50 times as long
import _signal  # type: ignore[import-not-found]
import os
import signal
import threading
import time
import weakref
from types import FrameType
from typing import Any

PATIENCE_S = 2.0
"""A signal that comes again this many seconds after it was put off goes through: a user who asks
twice can break off what hangs."""

_NAMES = (
    "HUP INT QUIT ABRT ALRM TERM USR1 USR2 CHLD CONT TSTP TTIN TTOU XCPU XFSZ VTALRM PROF WINCH"
    " IO PWR"
)
_SIGNALS = [
    int(getattr(signal, f"SIG{name}")) for name in _NAMES.split() if hasattr(signal, f"SIG{name}")
]


class _Section:
    """Whether the main thread must be left alone.

    The order of steps matters: a handler may run after any call that is made outside."""

    def __init__(self) -> None:
        self._main = threading.main_thread().ident
        self._depth = 0
        self._handlers: dict[int, Any] = {}
        self._waiting: dict[int, tuple[float, Any]] = {}
        self._put_off = self._on_signal  # one object, to recognize it

    def __enter__(self) -> None:
        if threading.get_ident() == self._main:
            if not self._depth:
                self._take()
            self._depth += 1

    def __exit__(self, *_: object) -> None:
        if self._depth and threading.get_ident() == self._main:
            # in a child that was forked inside, the depth is 0
            self._depth -= 1
            if not self._depth:  # from here on a handler may raise again
                try:
                    self._give_back()
                finally:
                    self._deliver()

    def checkpoint(self) -> None:
        """Run the handlers that wait, which may raise.

        Call it inside a section at a point where no work is half done."""
        if self._waiting and threading.get_ident() == self._main:
            self._deliver()

    def leave_to_parent(self) -> None:
        """Reset in a forked child. Its main thread may have been forked inside a section, which it
        never leaves."""
        self._main, self._depth = threading.get_ident(), 0
        self._waiting.clear()
        self._give_back()

    def _take(self) -> None:
        """Take over the handlers.

        Until the depth is raised they are called at once, so an exception in here changes
        nothing."""
        for number in _SIGNALS:
            handler = _signal.getsignal(number)
            if handler is not self._put_off and callable(handler):
                self._handlers[number] = handler
                _signal.signal(number, self._put_off)

    def _give_back(self) -> None:
        for number, handler in list(self._handlers.items()):
            if _signal.getsignal(number) is self._put_off:
                _signal.signal(number, handler)
            self._handlers.pop(number, None)

    def _deliver(self) -> None:
        while self._waiting:
            number, (_, handler) = self._waiting.popitem()
            try:
                handler(number, None)
            finally:
                self._deliver()  # the other signals too, even if this handler raises

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        handler = self._handlers[number]
        if self._depth:
            since, _ = self._waiting.setdefault(number, (time.monotonic(), handler))
            if time.monotonic() - since < PATIENCE_S:
                return
            del self._waiting[number]
        handler(number, frame)


_section = _Section()


def undisturbed() -> _Section:
    """A ``with`` block of the main thread in which no signal handler runs; such blocks nest.

    Inside a generator with ``contextmanager`` this must be the first block: the code that it yields
    to is then undisturbed too, to the end.
    """
    return _section


checkpoint = _section.checkpoint


class Mutex:
    """A lock that its holder may take again, and whose holder is undisturbed.

    A forked child finds it free."""

    __slots__ = ("__weakref__", "_lock")

    def __init__(self) -> None:
        self._lock = threading.RLock()
        _mutexes.add(self)

    def __enter__(self) -> None:
        _section.__enter__()
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
        _section.__exit__()


_mutexes: weakref.WeakSet[Mutex] = weakref.WeakSet()


def _after_fork() -> None:
    _section.leave_to_parent()
    for mutex in list(_mutexes):
        mutex._lock = threading.RLock()


os.register_at_fork(after_in_child=_after_fork)
