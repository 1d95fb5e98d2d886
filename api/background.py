"""Work beside requests: a named thread, of which there is at most one a task, and which leaves the processor to requests."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from datastates.errors import Closed, Unavailable
from datastates.system.bell import Latch

__all__ = ["SHARE", "Background"]

SHARE = 0.05
"""How much of the time work in the background may take."""

_SLICE_S = 0.002  # requests wait so long for the interpreter at most
_logger = logging.getLogger(__name__)


class Background:
    """Runs a task on a thread of its own, when asked and not running already. Threads: any. ``close`` ends it early."""

    def __init__(self, name: str) -> None:
        self._name = f"datastates-{name}"
        self._closing = Latch()
        self._lock = threading.Lock()
        self._threads: dict[object, threading.Thread] = {}

    def start(self, task: object, work: Callable[[], None]) -> bool:
        """Begin unless this ``task`` is under way; whether it was begun."""
        with self._lock:
            if task in self._threads or self._closing.is_set():
                return False
            thread = threading.Thread(target=self._run, args=(task, work), name=self._name, daemon=True)
            self._threads[task] = thread
            thread.start()
        return True

    def is_running(self, task: object) -> bool:
        """Whether the work is under way."""
        return task in self._threads

    def pacer(self) -> Callable[[], None]:
        """A function to be called often by work in Python: it rests, so that the work takes ``SHARE`` of the time.

        :raises Closed: ``close`` was called.
        """
        began = time.perf_counter()

        def pause() -> None:
            nonlocal began
            spent = time.perf_counter() - began
            if spent < _SLICE_S:
                return
            if self._closing.wait(spent * (1 / SHARE - 1)):
                raise Closed("the server is closing")
            began = time.perf_counter()

        return pause

    def join(self) -> None:
        """Wait for what is under way."""
        for thread in list(self._threads.values()):
            thread.join()

    def close(self) -> None:
        """Idempotent; what is under way ends at its next pause."""
        self._closing.set()
        self.join()

    def _run(self, task: object, work: Callable[[], None]) -> None:
        try:
            work()
        except Closed:
            pass
        except Unavailable as error:  # the database is away: whoever asks again tries again
            _logger.warning("%s failed: %s", self._name, error)
        except Exception:  # the work may be any: nobody waits for it, and whoever asks again tries again
            _logger.exception("%s failed", self._name)
        finally:
            with self._lock:
                del self._threads[task]
