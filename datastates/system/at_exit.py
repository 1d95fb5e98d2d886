"""Clean ends: at exit, on SIGTERM and SIGHUP, and after an object was dropped without a close.

States that must become durable are still written. Ctrl-C ends a script with a line for each
training that it interrupted, instead of a traceback.
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
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Protocol

from datastates.system.threads import Latch

_logger = logging.getLogger(__name__)

_SIGNALS = [signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])]


class Closable(Protocol):
    """An object that is closed at exit."""

    def close(self, error: BaseException | None = None) -> None:
        """Make durable what must be, and release everything.

        ``error`` is the one that ended the process, if any."""


class _Ender:
    """The thread that ends dropped objects, in order."""

    def __init__(self) -> None:
        self._ends: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="datastates-end", daemon=True).start()

    def put(self, end: Callable[[], None]) -> None:
        """Queue one call, without taking a Python lock: this may run while any lock is held, and
        an interrupt comes before or after it."""
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
            except BaseException:
                # no caller is left for the error, and the next object must be ended too
                _logger.exception("ending what was dropped without a close failed")
            del end


_open: weakref.WeakSet[Closable] = weakref.WeakSet()
_ends: set[Callable[[], None]] = set()
_owner: int | None = None
_ender: _Ender | None = None
_exit_code = 0  # the exit code of a signal that ends the process
_interrupted: list[str] = []


def close_at_exit(closable: Closable, end: Callable[[], None]) -> None:
    """Close an object when the process ends. If it is collected without a close, a thread calls
    ``end``. A forked child does neither for its parent.

    ``end`` must not be the object's own ``close``, which would keep it alive. Call ``closed`` once
    it was closed. Objects that a finalizer could not pass to the thread are ended at exit.
    """
    global _owner, _ender
    if _owner != os.getpid():
        _owner, _ender = os.getpid(), _Ender()
        _open.clear()
        _ends.clear()
        atexit.register(_close_all)
    take_signals()
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _report_uncaught
    _open.add(closable)
    _ends.add(end)
    weakref.finalize(closable, end_later, end, os.getpid()).atexit = False


def note_interrupted(text: str) -> None:
    """Print this line if Ctrl-C ends the script."""
    _interrupted.append(text)


def _report_uncaught(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Report an uncaught error, as Python does. Ctrl-C is one line for each training."""
    if not issubclass(kind, KeyboardInterrupt) or os.environ.get("DATASTATES_TRACEBACK"):
        sys.__excepthook__(kind, error, trace)
        return
    sys.stderr.write("".join(f"{line}\n" for line in _interrupted or ["interrupted"]))


def closed(end: Callable[[], None]) -> None:
    """Do not call ``end`` at exit: the object is closed."""
    _ends.discard(end)


def end_later(end: Callable[[], None], pid: int) -> None:
    """Have a thread call ``end`` later, if this is the process ``pid``; the exit waits for it.
    For finalizers: callable on any thread at any time."""
    if pid == os.getpid() and _ender is not None:
        _ender.put(end)


def settle() -> None:
    """Wait until everything dropped so far has ended."""
    if _owner == os.getpid() and _ender is not None:
        _ender.settle()


def _close_all() -> None:
    if _owner != os.getpid():
        return
    if threading.current_thread() is threading.main_thread():
        for number in _SIGNALS:
            if signal.getsignal(number) is _on_signal:
                # the end is under way: a second signal must not break it off
                signal.signal(number, signal.SIG_IGN)
    for closable in list(_open):
        try:
            closable.close(_uncaught())
        except Exception:  # other repositories must be closed too; an interrupt ends this
            _logger.exception("closing a repository at exit failed")
    settle()
    for end in list(_ends):
        try:
            end()
        except Exception:  # likewise
            _logger.exception("ending a repository at exit failed")


def _uncaught() -> BaseException | None:
    """The uncaught error that ends the process, if any.

    In an interactive session an error ends only the current line, so there is none."""
    if _exit_code:
        return SystemExit(_exit_code)
    return None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)


def take_signals() -> None:
    """Turn SIGTERM and SIGHUP into ``SystemExit`` from now on, if this is the main thread and they
    have no other handler."""
    if threading.current_thread() is threading.main_thread():
        for number in _SIGNALS:
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, _on_signal)


def _on_signal(number: int, frame: FrameType | None) -> None:
    global _exit_code
    _exit_code = 128 + number
    if threading.main_thread().is_alive():
        raise SystemExit(_exit_code)
    _close_all()  # the interpreter is ending, and nothing would catch the exception
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):
            stream.flush()
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
