"""A bell rings whatever other threads and the collector of garbage do meanwhile."""

from __future__ import annotations

import gc
import threading

from datastates.system.threads import Notifier


def test_a_waiter_may_come_while_the_bell_rings_and_garbage_is_collected() -> None:
    bell = Notifier()

    def come(phase: str, _: object) -> None:
        if phase == "start":
            bell._waiters.add(taken())

    thresholds = gc.get_threshold()
    gc.freeze()  # a collection looks at what is made here, not at all that the process has imported
    for number in range(100):
        for _ in range(25):
            # Python keeps no tuples of this length for later, so that a new one may collect garbage
            bell._waiters.add(taken())
        gc.callbacks.append(come)
        gc.collect()
        gc.set_threshold(1 + number % 5)
        try:
            bell.notify_all()
        finally:
            gc.set_threshold(*thresholds)
            gc.callbacks.remove(come)
    gc.unfreeze()


def taken() -> threading.Lock:
    lock = threading.Lock()
    lock.acquire()
    return lock
