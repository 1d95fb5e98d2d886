"""A clean end, at exit, on Ctrl-C, SIGTERM and SIGHUP, and of what was dropped without a close: what was to become durable becomes durable.

Worker threads are daemons, so the interpreter runs exit handlers while they still work. SIGTERM and SIGHUP (the terminal is closed, the
connection lost) are turned into ``SystemExit`` in the main thread, so that ``with`` blocks and exit handlers run, but only where nobody
else handles them: what ``nohup`` ignores stays ignored.

An object is collected on any thread, in the middle of anything. So what its end takes is only handed over there, and done by a thread.
"""

from __future__ import annotations

import atexit
import logging
import os
import queue
import signal
import sys
import threading
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Protocol

from datastates.system.bell import Latch

__all__ = ["close_at_exit", "end_later", "settle"]

_logger = logging.getLogger(__name__)

_SIGNALS = [signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])]


class Closable(Protocol):
    """An object that is closed at exit."""

    def close(self, error: BaseException | None = None) -> None:
        """Make durable what is to be, and let go. ``error`` ended the process, if any did."""


class _Ender:
    """The thread that ends what was dropped, in order."""

    def __init__(self) -> None:
        self._ends: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="datastates-end", daemon=True).start()

    def put(self, end: Callable[[], None]) -> None:
        """One call, which takes no lock of Python's: it may run while any is held, and an interrupt comes before it or after it."""
        self._ends.put(end)

    def settle(self) -> None:
        reached = Latch()
        self._ends.put(reached.set)
        reached.wait()

    def _run(self) -> None:
        while True:
            end = self._ends.get()
            try:
                end()
                closed(end)
            except BaseException:  # nobody is left who could be told, and the next one must be ended too
                _logger.exception("ending what was dropped without a close failed")
            del end


_open: weakref.WeakSet[Closable] = weakref.WeakSet()
_ends: set[Callable[[], None]] = set()
_owner: int | None = None
_ender: _Ender | None = None
_exit_code = 0  # that of a signal which ends the process


def close_at_exit(closable: Closable, end: Callable[[], None]) -> None:
    """Close it when the process ends. Once it is gone without a close a thread calls ``end``. A forked child does neither for its parent.

    Not its ``close``, which would keep it. ``closed`` when it was closed. What a finalizer could not hand over is left for the exit.
    """
    global _owner, _ender
    if _owner != os.getpid():
        _owner, _ender = os.getpid(), _Ender()
        _open.clear()
        _ends.clear()
        atexit.register(_close_all)
    _take_signals()
    _open.add(closable)
    _ends.add(end)
    weakref.finalize(closable, end_later, end, os.getpid()).atexit = False


def closed(end: Callable[[], None]) -> None:
    """Forget what would have been closed at exit: it is closed."""
    _ends.discard(end)


def end_later(end: Callable[[], None], pid: int) -> None:
    """End later what was made in process ``pid``, for finalizers: a thread does it, and the exit waits for it. Any thread, any time."""
    if pid == os.getpid() and _ender is not None:
        _ender.put(end)


def settle() -> None:
    """Wait until all that was dropped so far has ended; nothing where nothing was."""
    if _owner == os.getpid() and _ender is not None:
        _ender.settle()


def _close_all() -> None:
    if _owner != os.getpid():
        return
    if threading.current_thread() is threading.main_thread():
        for number in _SIGNALS:
            if signal.getsignal(number) is _on_signal:
                signal.signal(number, signal.SIG_IGN)  # the end is under way: whoever asks twice must not break it off
    for closable in list(_open):
        try:
            closable.close(_uncaught())
        except Exception:  # the others are to be closed too; an interrupt ends it
            _logger.exception("closing a repository at exit failed")
    settle()
    for end in list(_ends):
        try:
            end()
        except Exception:  # likewise
            _logger.exception("ending a repository at exit failed")


def _uncaught() -> BaseException | None:
    """What ends the process, where nobody caught it. Where a person types, an error ends nothing but a line."""
    if _exit_code:
        return SystemExit(_exit_code)
    return None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)


def _take_signals() -> None:
    if threading.current_thread() is threading.main_thread():
        for number in _SIGNALS:
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, _on_signal)


def _on_signal(number: int, frame: FrameType | None) -> None:
    global _exit_code
    _exit_code = 128 + number
    raise SystemExit(_exit_code)
