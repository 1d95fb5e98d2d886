"""The one event loop of a process on which all transport runs: a daemon thread named ``datastates-transport``.

Callers are ordinary threads: ``run`` waits for a coroutine there, ``submit`` gives a future. The loop starts on first use. In a
forked child there is none of it: the child gets a loop of its own on first use.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import os
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from datastates.errors import InvalidInput

__all__ = ["at_stop", "run", "stop", "submit"]

T = TypeVar("T")

_NAME = "datastates-transport"
_STOP_S = 2.0

_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None
_thread: threading.Thread | None = None
_closers: list[Callable[[], Coroutine[Any, Any, None]]] = []


def submit(work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
    """Start a coroutine on the loop; cancelling the future cancels it."""
    return asyncio.run_coroutine_threadsafe(work, _running())


def run(work: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
    """Run a coroutine on the loop and wait for what it gives.

    Ctrl-C, or ``timeout_s`` going by, cancels it; this then returns only once it has really ended, so that nothing of it
    still writes into the caller's memory.

    :raises TimeoutError: it took longer.
    :raises InvalidInput: called on the loop's own thread, which would wait for itself.
    """
    if threading.current_thread() is _thread:
        work.close()
        raise InvalidInput("the transport's loop cannot wait for itself: await this instead")
    ended = threading.Event()
    future = submit(_tell_end(work, ended))
    try:
        return future.result(timeout_s)
    except BaseException:
        if not future.done() or future.cancelled():
            future.cancel()
            ended.wait()
        raise


def at_stop(close: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run ``close`` on the loop when it is stopped; the last that was registered comes first."""
    _closers.append(close)


def stop() -> None:
    """Close what was registered, and end the loop; it starts anew on the next use. Runs by itself at the end of the process."""
    global _loop, _thread
    with _lock:
        loop, thread, _loop, _thread = _loop, _thread, None, None
        closers, _closers[:] = list(_closers), []
    if loop is None or thread is None or not thread.is_alive():
        return
    future = asyncio.run_coroutine_threadsafe(_close(closers), loop)
    try:
        future.result(_STOP_S)
    except (TimeoutError, concurrent.futures.CancelledError):
        future.cancel()
    loop.call_soon_threadsafe(loop.stop)
    thread.join(_STOP_S)


async def _tell_end(work: Coroutine[Any, Any, T], ended: threading.Event) -> T:
    try:
        return await work
    finally:
        ended.set()


async def _close(closers: list[Callable[[], Coroutine[Any, Any, None]]]) -> None:
    for close in reversed(closers):
        await close()
    others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in others:
        task.cancel()
    if others:
        await asyncio.wait(others, timeout=_STOP_S / 2)


def _running() -> asyncio.AbstractEventLoop:
    global _loop, _thread
    with _lock:
        if _loop is None or _thread is None or not _thread.is_alive():
            loop = asyncio.new_event_loop()
            _thread = threading.Thread(target=_serve, args=(loop,), name=_NAME, daemon=True)
            _thread.start()
            _loop = loop
        return _loop


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    loop.run_forever()
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()


def _after_fork() -> None:
    global _lock, _loop, _thread
    _lock = threading.Lock()
    _loop = _thread = None
    _closers.clear()


os.register_at_fork(after_in_child=_after_fork)
atexit.register(stop)
