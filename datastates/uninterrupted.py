"""Work that Ctrl-C does not cut in two: it is done to its end, or not begun."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

__all__ = ["to_the_end"]

T = TypeVar("T")


def to_the_end(work: Callable[[], T], *, instead: Callable[[], None] = lambda: None) -> T:
    """What ``work`` returns or raises. Interrupts are raised in the main thread only, so from there it is done on a thread of its own.

    An interrupt that comes meanwhile is raised once the work has ended; a second one at once, and the work goes on all the same. When
    one comes before the work began, ``instead`` is called and the work is never done.
    """
    if threading.current_thread() is not threading.main_thread():
        return work()
    begun, outcome = threading.Lock(), Future[T]()

    def run() -> None:
        if begun.acquire(blocking=False):
            try:
                outcome.set_result(work())
            except BaseException as exc:
                outcome.set_exception(exc)

    try:
        threading.Thread(target=run, name="datastates-commit", daemon=True).start()
        return outcome.result()
    except BaseException:
        if begun.acquire(blocking=False):
            instead()
        elif not outcome.done():
            outcome.exception()  # waits
        raise
