"""The one loop thread: who waits for it, who is cancelled, and how it ends."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator

import pytest

from datastates.errors import InvalidInput
from datastates.transport import loop

NAME = "datastates-transport"


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    loop.stop()
    yield
    loop.stop()
    assert NAME not in threads()


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate()]


async def where() -> str:
    return threading.current_thread().name


class Slow:
    """A coroutine that takes a while to end once it is cancelled."""

    def __init__(self) -> None:
        self.began, self.has_ended = threading.Event(), False

    async def work(self) -> None:
        try:
            self.began.set()
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.1)
            self.has_ended = True


def test_it_starts_on_first_use_and_again_after_a_stop() -> None:
    assert NAME not in threads()
    for _ in range(3):
        assert loop.run(where()) == NAME
        assert loop.submit(where()).result(5) == NAME
        assert threads().count(NAME) == 1
        loop.stop()
        loop.stop()
        assert NAME not in threads()


def test_an_error_comes_up_as_itself() -> None:
    async def work() -> None:
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        loop.run(work())


def test_a_timeout_of_the_work_is_not_taken_for_one_of_the_wait() -> None:
    async def work() -> None:
        raise TimeoutError("the work's own")

    with pytest.raises(TimeoutError, match="the work's own"):
        loop.run(work(), timeout_s=60)


def test_what_takes_too_long_has_ended_when_the_caller_hears_of_it() -> None:
    slow = Slow()
    with pytest.raises(TimeoutError, match=r"work took longer than 0\.05 s"):
        loop.run(slow.work(), timeout_s=0.05)
    assert slow.has_ended


def test_work_that_ends_well_although_it_was_cancelled_gives_its_result() -> None:
    async def work() -> str:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            return "done"
        return "never"

    assert loop.run(work(), timeout_s=0.05) == "done"


def test_ctrl_c_ends_the_work_before_the_caller_goes_on() -> None:
    slow = Slow()

    def interrupt() -> None:
        slow.began.wait()
        os.kill(os.getpid(), signal.SIGINT)

    interrupting = threading.Thread(target=interrupt)
    interrupting.start()
    with pytest.raises(KeyboardInterrupt):
        loop.run(slow.work())
    interrupting.join()
    assert slow.has_ended


def test_a_cancelled_future_is_done_when_the_work_has_ended() -> None:
    slow = Slow()
    future = loop.submit(slow.work())
    slow.began.wait()
    assert future.cancel()
    with pytest.raises(concurrent.futures.CancelledError):
        future.result(5)
    assert slow.has_ended
    assert not future.cancel()


def test_work_that_is_cancelled_before_it_began_never_begins() -> None:
    began = []

    async def work() -> None:
        began.append(1)

    is_blocked, is_free = threading.Event(), threading.Event()
    loop.submit(block(is_blocked, is_free))
    is_blocked.wait(60)
    futures = [loop.submit(work()) for _ in range(10)]
    for future in futures:
        assert future.cancel()
    is_free.set()
    for future in futures:
        with pytest.raises(concurrent.futures.CancelledError):
            future.result(5)
    assert not began


def test_work_that_was_kept_from_beginning_can_be_cancelled_all_the_same() -> None:
    call = loop._Call(where())  # Ctrl-C may come before it is begun
    assert call.cancel()
    with pytest.raises(concurrent.futures.CancelledError):
        call.result(0)


async def block(is_blocked: threading.Event, is_free: threading.Event) -> None:
    is_blocked.set()
    is_free.wait(60)


def test_a_future_can_be_awaited_on_another_loop() -> None:
    slow = Slow()

    async def main() -> None:
        assert await asyncio.wrap_future(loop.submit(where())) == NAME
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.wrap_future(loop.submit(slow.work())), 0.05)

    asyncio.run(main())
    loop.stop()
    assert slow.has_ended


def test_the_loop_does_not_wait_for_itself() -> None:
    async def work() -> None:
        for wrong in (lambda: loop.run(where()), loop.stop):
            with pytest.raises(InvalidInput):
                wrong()

    loop.run(work())


def test_stopping_ends_what_runs_and_closes_the_latest_first() -> None:
    slow, order = Slow(), []

    async def register() -> None:
        for name in ("first", "second", "third"):
            # mypy sees no type in a default of lambda
            loop.at_stop(lambda name=name: close(name))  # type: ignore[misc]

    async def close(name: str) -> None:
        order.append((name, slow.has_ended))
        if name == "second":
            raise ValueError("the others are closed all the same")

    loop.run(register())
    future = loop.submit(slow.work())
    slow.began.wait()
    loop.stop()
    assert future.cancelled()
    assert order == [("third", True), ("second", True), ("first", True)]
    with pytest.raises(InvalidInput):
        loop.at_stop(lambda: close("from another thread"))


def test_what_never_closes_keeps_nothing_else_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "_STOP_S", 0.2)
    closed, thread = list[str](), list[threading.Thread]()

    async def close() -> None:
        closed.append("first")

    async def hang() -> None:
        await asyncio.get_running_loop().create_future()

    async def register() -> None:
        loop.at_stop(close)
        loop.at_stop(hang)
        thread.append(threading.current_thread())

    loop.run(register())
    loop.stop()
    thread[0].join(10)
    assert (closed, thread[0].is_alive()) == (["first"], False)


def test_whatever_is_submitted_while_it_stops_ends() -> None:
    futures: list[concurrent.futures.Future[str]] = []
    is_over = threading.Event()

    def submit() -> None:
        while not is_over.is_set():
            futures.append(loop.submit(where()))
            time.sleep(0)

    submitting = [threading.Thread(target=submit) for _ in range(3)]
    for thread in submitting:
        thread.start()
    for _ in range(20):
        loop.stop()
    is_over.set()
    for thread in submitting:
        thread.join()
    done, left = concurrent.futures.wait(futures, timeout=60)
    assert not left
    assert any(not future.cancelled() for future in done)


@pytest.mark.filterwarnings("ignore:This process.*fork:DeprecationWarning")
def test_a_forked_child_has_a_loop_of_its_own() -> None:
    loop.run(where())
    child = os.fork()
    if child == 0:
        try:
            os._exit(0 if NAME not in threads() and loop.run(where(), timeout_s=60) == NAME else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert loop.run(where()) == NAME


def test_a_process_ends_at_once_and_closes_first_what_needs_worker_threads() -> None:
    script = """
        import asyncio, atexit, time
        from datastates.transport import loop

        async def close():
            print("closed", await asyncio.to_thread(lambda: "in a thread"), flush=True)

        async def work():
            loop.at_stop(close)
            asyncio.create_task(asyncio.sleep(60))

        loop.run(work())
        loop.submit(asyncio.sleep(60))
        print(time.time(), flush=True)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    ended = time.time()
    last, closed = done.stdout.splitlines()
    assert closed == "closed in a thread"
    assert not done.stderr
    assert ended - float(last) < 3
