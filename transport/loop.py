"""The one event loop of a process on which all transport runs: a daemon thread named
``datastates-transport``.

Callers are ordinary threads: ``run`` waits for a coroutine there, ``submit`` returns a future. The
loop starts on first use, and again after ``stop``. A forked child inherits none of it, and gets its
own loop on first use.
"""

from __future__ import annotations

import asyncio

# before our own hook at the end of the process, which needs its worker threads
import concurrent.futures.thread  # noqa: F401
import logging
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from datastates.errors import Closed, InvalidInput
from datastates.system.interrupts import undisturbed
from datastates.system.threads import Latch

T = TypeVar("T")

_NAME = "datastates-transport"
_STOP_S = 5.0
_logger = logging.getLogger(__name__)


def submit(work: Coroutine[Any, Any, T]) -> Future[T]:
    """Start a coroutine on the loop.

    The future is done when the coroutine has *ended*. After ``cancel``, a caller that waits for
    the future waits until the coroutine has ended.

    :raises Closed: the process is ending.
    """
    call = _Call(work)
    _begin(call)
    return call


def run(work: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
    """Run a coroutine on the loop, and return its result.

    Ctrl-C or the end of ``timeout_s`` cancels it. This then returns only once the coroutine has
    really ended, so that nothing of it still writes into the caller's memory.

    :raises TimeoutError: it took longer.
    :raises InvalidInput: called on the loop's own thread, which would wait for itself.
    """
    if _is_own_thread():
        work.close()
        raise InvalidInput("the transport's loop cannot wait for itself: await this instead")
    name = getattr(work, "__qualname__", str(work))
    call = _Call(work)
    try:
        _begin(call)
        call.ended.wait(timeout_s)
    finally:
        is_late = call.cancel()
        call.ended.wait()
    if is_late and call.cancelled():
        raise TimeoutError(f"{name} took longer than {timeout_s:g} s, and was cancelled")
    return call.result()


def at_stop(close: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run ``close`` on the loop when the loop is stopped; the last one registered runs first.

    Belongs to the loop's thread."""
    if _current is None or not _is_own_thread():
        raise InvalidInput(
            "what is to be closed with the transport's loop must be registered on its thread"
        )
    _current.closers.append(close)


def stop() -> None:
    """Cancel everything that runs, close what was registered, and end the loop.

    The process runs it when it ends; idempotent."""
    global _current
    if _is_own_thread():
        raise InvalidInput(
            "the transport's loop cannot wait for its own end: call stop() on another thread"
        )
    with _lock:
        loop, _current = _current, None
    if loop is not None:
        loop.stop()


class _Call(Future[T]):
    """A coroutine on the loop, seen from outside.

    Threads that may be interrupted wait for ``ended``: the future's own wait takes a lock that the
    loop needs.
    """

    def __init__(self, work: Coroutine[Any, Any, T]) -> None:
        super().__init__()
        self.work = work
        self.loop: _Loop | None = None
        self._task: asyncio.Task[T] | None = None
        self.ended = Latch()

    def begin(self) -> None:
        """Begin on the loop."""
        if not self.done():
            self._task = asyncio.get_running_loop().create_task(self.work)
            self._task.add_done_callback(self._end)

    def cancel(self) -> bool:
        """Ask the coroutine to end. False: it had already ended."""
        with undisturbed():
            if self.done():
                return False
            if self.loop is None or not self.loop.post(self._cancel):
                self._cancel()  # it was never begun
            return True

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()
        elif not self.done():
            self.work.close()
            self._give_up()

    def _end(self, task: asyncio.Task[T]) -> None:
        if task.cancelled():
            self._give_up()
        elif (error := task.exception()) is not None:
            self.set_exception(error)
        else:
            self.set_result(task.result())
        self.ended.set()

    def _give_up(self) -> None:
        super().cancel()
        self.set_running_or_notify_cancel()
        self.ended.set()


class _Loop:
    """An event loop and its thread."""

    def __init__(self) -> None:
        self.raw = asyncio.new_event_loop()
        self.closers: list[Callable[[], Coroutine[Any, Any, None]]] = []
        self.thread = threading.Thread(target=self._serve, name=_NAME, daemon=True)
        self.thread.start()

    def post(self, callback: Callable[[], object]) -> bool:
        """Run a callback on the loop. False: the loop has ended."""
        try:
            self.raw.call_soon_threadsafe(callback)
        except RuntimeError:
            return False
        return True

    def stop(self) -> None:
        self.post(self.raw.stop)
        self.thread.join(_STOP_S)
        if self.thread.is_alive():
            _logger.warning("the thread %s does not end: something blocks it", _NAME)

    def _serve(self) -> None:
        asyncio.set_event_loop(self.raw)
        self.raw.run_forever()
        self.raw.run_until_complete(self._wind_up())
        self.raw.close()  # its worker threads end when they are idle

    async def _wind_up(self) -> None:
        await _end_tasks()
        for close in reversed(self.closers):
            try:
                async with asyncio.timeout(_STOP_S / 2):
                    await close()
            except Exception:  # the loop ends, whatever a transport does or waits for
                _logger.exception("the transport did not close properly")
        await _end_tasks()
        await self.raw.shutdown_asyncgens()


_lock = threading.Lock()
_current: _Loop | None = None
_is_over = False


def _begin(call: _Call[Any]) -> None:
    global _current
    with (
        undisturbed(),
        _lock,
    ):
        # ``stop`` detaches the loop under this lock, so what is begun here ends there
        if _is_over:
            call.work.close()
            raise Closed("the process is ending: nothing can be begun on the transport any more")
        if _current is None:
            _current = _Loop()
        call.loop = _current
        _current.post(call.begin)


def _is_own_thread() -> bool:
    return _current is not None and threading.current_thread() is _current.thread


async def _end_tasks() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        if not task.cancelling():
            # else it is already ending, and its cleanup must not be cut short
            task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=_STOP_S / 4)


def _at_exit() -> None:
    global _is_over
    _is_over = True
    stop()


def _after_fork() -> None:
    global _lock, _current
    _lock, _current = threading.Lock(), None


os.register_at_fork(after_in_child=_after_fork)
# ``atexit`` callbacks run after all worker threads have ended, too late to close anything that
# needs those threads.
# private; concurrent.futures itself uses it to end its threads
threading._register_atexit(_at_exit)  # type: ignore[attr-defined]
