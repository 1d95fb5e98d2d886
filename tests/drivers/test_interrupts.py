"""Signals whose handlers raise, sent at the moments where they would do harm."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from types import FrameType

import pytest

from datastates.system import interrupts
from datastates.system.interrupts import Mutex, checkpoint, undisturbed


class Stop(BaseException):
    """What the handlers of these tests raise."""


def _raise(number: int, frame: FrameType | None) -> None:
    raise Stop(number)


def _section_with(*signals: int, error: Exception | None = None) -> None:
    with undisturbed():
        for number in signals:
            signal.raise_signal(number)
        if error is not None:
            raise error


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    before = {
        number: signal.signal(number, _raise)
        for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGTERM)
    }
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_signal_waits_for_the_end_of_the_outermost_section() -> None:
    done: list[str] = []

    def nested() -> None:
        with undisturbed():
            with undisturbed():
                signal.raise_signal(signal.SIGINT)
                done.append("inner")
            done.append("outer")

    with pytest.raises(Stop):
        nested()
    assert done == ["inner", "outer"]
    assert signal.getsignal(signal.SIGINT) is _raise


def test_every_signal_that_came_is_handed_on_whatever_the_others_raise() -> None:
    heard: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, frame: heard.append(number))
    with pytest.raises(Stop) as stop:
        _section_with(signal.SIGUSR1, signal.SIGINT, signal.SIGINT, signal.SIGTERM)
    assert heard == [signal.SIGUSR1]
    assert {
        stop.value.args[0],
        stop.value.__context__.args[0] if stop.value.__context__ else 0,
    } == {signal.SIGINT, signal.SIGTERM}


def test_an_error_of_the_section_is_the_context_of_what_a_handler_raises() -> None:
    with pytest.raises(Stop) as stop:
        _section_with(signal.SIGINT, error=ValueError())
    assert isinstance(stop.value.__context__, ValueError)


def test_a_section_that_waits_lets_handlers_run_where_it_says() -> None:
    with undisturbed():
        checkpoint()
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(Stop):
            checkpoint()
        checkpoint()


def test_whoever_asks_twice_breaks_off_what_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    with undisturbed():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        now[0] = interrupts.PATIENCE_S
        with pytest.raises(Stop):
            signal.raise_signal(signal.SIGINT)


def test_a_handler_that_the_section_changed_stays() -> None:
    other = signal.default_int_handler
    with undisturbed():
        signal.signal(signal.SIGINT, other)
    assert signal.getsignal(signal.SIGINT) is other


def test_what_is_ignored_or_default_stays_so_in_a_section() -> None:
    for plain in (signal.SIG_IGN, signal.SIG_DFL):
        signal.signal(signal.SIGUSR1, plain)
        with undisturbed():
            assert signal.getsignal(signal.SIGUSR1) is plain


def test_a_handler_may_use_sections_and_locks_itself() -> None:
    lock, seen = Mutex(), []

    def handle(number: int, frame: FrameType | None) -> None:
        with lock:
            seen.append(number)

    signal.signal(signal.SIGUSR1, handle)
    with lock:
        signal.raise_signal(signal.SIGUSR1)
        assert not seen
    assert seen == [signal.SIGUSR1]


def test_other_threads_are_not_concerned() -> None:
    with undisturbed():
        worker = threading.Thread(target=_in_a_section)
        worker.start()
        worker.join()
        signal.raise_signal(signal.SIGUSR1)
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        interrupts._section._waiting.clear()


def _in_a_section() -> None:
    with undisturbed(), Mutex():
        checkpoint()


def test_interrupts_at_any_instruction_leave_a_mutex_free_and_the_handlers_in_place() -> None:
    lock, entered, left = Mutex(), 0, 0
    signal.signal(signal.SIGALRM, _raise)
    try:
        for count in range(2000):
            with suppress(Stop):
                signal.setitimer(signal.ITIMER_REAL, 1e-5 + 1e-7 * (count % 300))
                while True:
                    with lock:
                        entered += 1
                        left += 1
            assert entered == left
            assert not lock._lock._is_owned()  # type: ignore[attr-defined]  # the one way to ask
    finally:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
    with undisturbed():
        pass
    assert signal.getsignal(signal.SIGINT) is _raise


def test_a_child_that_was_forked_in_a_section_or_while_a_lock_was_held_is_free() -> None:
    lock, held, go_on = Mutex(), threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            go_on.wait(60)

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait(60)
    with undisturbed():
        child = os.fork()
        if not child:
            os._exit(_child(lock))
    go_on.set()
    holder.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def _child(lock: Mutex) -> int:
    signal.alarm(20)
    try:
        with lock:
            signal.raise_signal(signal.SIGINT)
    except Stop:
        return 7
    return 1
