"""Work beside requests: named threads, at most one for each task, that leave the processor to requests."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from datastates.errors import Closed, Unavailable
from datastates.system.bell import Latch

__all__ = ["SHARE", "Background"]

SHARE = 0.05
"""The share of the time that work in the background may take."""

_SLICE_S = 0.002  # the longest that a request waits for the interpreter
_logger = logging.getLogger(__name__)


class Background:
    """Runs a task on a thread of its own when asked, unless it is already running. Any thread may use it. ``close`` ends it early."""

    def __init__(self, name: str) -> None:
        self._name = f"datastates-{name}"
        self._closing = Latch()
        self._lock = threading.Lock()
        self._threads: dict[object, threading.Thread] = {}

    def start(self, task: object, work: Callable[[], None]) -> bool:
        """Begin ``work`` unless this ``task`` is under way; returns whether it was begun."""
        with self._lock:
            if task in self._threads or self._closing.is_set():
                return False
            thread = threading.Thread(target=self._run, args=(task, work), name=self._name, daemon=True)
            self._threads[task] = thread
            thread.start()
        return True

    def is_running(self, task: object) -> bool:
        """Whether the task is under way."""
        return task in self._threads

    def pacer(self) -> Callable[[], None]:
        """A function that work in Python calls often: it sleeps so that the work takes ``SHARE`` of the time.

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
        """Wait until the work under way has ended."""
        for thread in list(self._threads.values()):
            thread.join()

    def close(self) -> None:
        """Stop; work under way ends at its next pause. Idempotent."""
        self._closing.set()
        self.join()

    def _run(self, task: object, work: Callable[[], None]) -> None:
        try:
            work()
        except Closed:
            pass
        except Unavailable as error:  # the database does not answer: the next caller tries again
            _logger.warning("%s failed: %s", self._name, error)
        except Exception:  # the work may raise anything: nobody waits for it, and the next caller tries again
            _logger.exception("%s failed", self._name)
        finally:
            with self._lock:
                del self._threads[task]
