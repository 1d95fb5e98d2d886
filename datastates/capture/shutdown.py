"""A clean end at exit, on Ctrl-C and on SIGTERM: what was to become durable becomes durable.

Worker threads are daemons, so the interpreter runs exit handlers while they still work. SIGTERM is turned into
``SystemExit`` in the main thread, so that ``with`` blocks and exit handlers run, but only where nobody else handles it.
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import threading
import weakref
from types import FrameType
from typing import Protocol

__all__ = ["close_at_exit"]

_log = logging.getLogger(__name__)


class Closable(Protocol):
    """What is closed at exit."""

    def close(self) -> None:
        """Make durable what is to be, and let go."""


_open: weakref.WeakSet[Closable] = weakref.WeakSet()
_owner: int | None = None


def close_at_exit(closable: Closable) -> None:
    """Close it when the process ends, unless it is gone by then. A forked child closes nothing of its parent's."""
    global _owner
    if _owner != os.getpid():
        _owner = os.getpid()
        _open.clear()
        atexit.register(_close_all)
        _take_sigterm()
    _open.add(closable)


def _close_all() -> None:
    if _owner != os.getpid():
        return
    if signal.getsignal(signal.SIGTERM) is _on_sigterm and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the end is under way: who asks twice must not break it off
    for closable in list(_open):
        try:
            closable.close()
        except Exception:
            _log.exception("closing a repository at exit failed")


def _take_sigterm() -> None:
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _on_sigterm)


def _on_sigterm(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
