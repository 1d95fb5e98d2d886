"""Executors that train the variants of a study.

The file has our pool of processes, the calling process, and Ray. Any other
``concurrent.futures.Executor`` works too. ``Pool`` submits tasks to an executor and replaces it
when it breaks.
"""

from __future__ import annotations

import os
import pickle
import signal
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from functools import partial
from typing import Any, ParamSpec, TypeVar

from datastates import values
from datastates.errors import Closed, InvalidInput

from . import worker
from .limits import end_children, signal_children
from .processes import Slot, close_repositories, hold_broken
from .records import Outcome
from .worker import Stop, Task, Train

P = ParamSpec("P")
T = TypeVar("T")


class SerialExecutor(Executor):
    """Runs each call at once in the thread that submits it: for tests, and for a debugger in the
    train function."""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run the call, and return its result as a finished future."""
        future: Future[T] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as exc:  # as executors do: the future raises it
            future.set_exception(exc)
        return future


class Processes(Executor):
    """Worker processes that are independent: one that dies fails its call with
    ``BrokenProcessPool``, and is replaced.

    The process that became free last gets the next call, so that a child finds its parent's state
    in memory. ``SIGTERM`` ends the task of a process; processes end with the process that made
    them.
    """

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._lock = threading.Condition()
        self._waiting: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._free: list[Slot] = []
        self._at_work: set[Slot] = set()
        self._is_closed = False

    @property
    def pids(self) -> list[int]:
        """The pids of the processes that are at work."""
        with self._lock:
            slots = list(self._at_work)
        return [slot.pid.result() for slot in slots]

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run the call in the process that is free first."""
        future: Future[T] = Future()
        with self._lock:
            if self._is_closed:
                raise Closed("these processes were shut down: make others")
            self._waiting.append((future, partial(fn, *args, **kwargs)))
        self._next()
        return future

    def terminate(self, number: int = signal.SIGTERM) -> None:
        """Ask every process to stop its task, in an orderly way unless the signal is SIGKILL;
        calls that are waiting are cancelled."""
        with self._lock:
            slots = [*self._at_work, *self._free]
            waiting, self._waiting = self._waiting, deque()
        for future, _ in waiting:
            future.cancel()
        for slot in slots:
            slot.terminate(number)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more calls.

        Wait for the calls under way, and for waiting calls unless they are cancelled."""
        with self._lock:
            self._is_closed = True
            waiting, self._waiting = (
                (self._waiting, deque()) if cancel_futures else (deque(), self._waiting)
            )
        for future, _ in waiting:
            future.cancel()
        with self._lock:
            while wait and (self._waiting or self._at_work):
                self._lock.wait()
            slots = [*self._at_work, *self._free]
        for slot in slots:
            slot.pool.shutdown(wait=wait)

    def _next(self) -> None:
        """Give a waiting task to a free worker, or to a new one."""
        try:
            given = self._given()
        except Exception as exc:
            # no process can be started: too many of them, or too many open files
            self._fail_waiting(exc)
            return
        if given is None:
            return
        slot, future, call = given
        if not future.set_running_or_notify_cancel():
            self._put_back(slot)
            return
        try:
            inner = slot.pool.submit(call)
        except RuntimeError as exc:  # the worker died while it was free, or was shut down
            inner = Future()
            inner.set_exception(exc)
        inner.add_done_callback(partial(self._done, slot, future))

    def _given(self) -> tuple[Slot, Future[Any], Callable[[], Any]] | None:
        """A worker, and the task that it gets; None if no task waits, or every worker is at
        work."""
        with self._lock:
            if not self._waiting or (not self._free and len(self._at_work) >= self._workers):
                return None
            slot = self._free.pop() if self._free else Slot()
            self._at_work.add(slot)
            return slot, *self._waiting.popleft()

    def _fail_waiting(self, error: Exception) -> None:
        """Fail the tasks that wait, unless a worker is left that takes them."""
        with self._lock:
            waiting, self._waiting = (
                (deque(), self._waiting) if self._at_work else (self._waiting, deque())
            )
            self._lock.notify_all()
        for future, _ in waiting:
            if future.set_running_or_notify_cancel():
                future.set_exception(error)

    def _done(self, slot: Slot, future: Future[Any], inner: Future[Any]) -> None:
        error = inner.exception()
        self._put_back(slot, is_broken=isinstance(error, BrokenProcessPool))
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(inner.result())

    def _put_back(self, slot: Slot, *, is_broken: bool = False) -> None:
        if is_broken:
            hold_broken(slot.pool)
        with self._lock:
            self._at_work.discard(slot)
            if not is_broken:
                self._free.append(slot)
            self._lock.notify_all()
        self._next()


class RayExecutor(Executor):
    """Runs calls as tasks of Ray, which has no executor itself. The caller calls ``ray.init``.
    ``options`` are passed to ``ray.remote``."""

    def __init__(self, **options: Any) -> None:
        import ray

        self._remote: Any = ray.remote(**{"num_cpus": 1, "max_retries": 0, **options})(_call)

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run the call as a task; a task that has begun cannot be cancelled."""
        future: Future[T] = self._remote.remote(partial(fn, *args, **kwargs)).future()
        return future


def _call(call: Callable[[], Any]) -> Any:
    return call()


# --- The executor of a study ---


class Pool:
    """The executor of a study: the caller's own, one that the caller's function makes, or our
    own processes. With limits, threads watch over these."""

    def __init__(
        self,
        executor: Executor | Callable[[], Executor] | None,
        *,
        workers: int,
        is_limited: bool = False,
    ) -> None:
        self._make: Callable[[], Executor] | None
        if isinstance(executor, Executor):
            self._make, self._executor = None, executor
        elif executor is None and is_limited:
            self._make, self._executor = ThreadPoolExecutor, ThreadPoolExecutor(workers)
        else:
            self._make = executor or (lambda: Processes(workers))
            self._executor = check_executor(self._make())
        self._is_broken = False

    def submit(self, task: Task) -> Future[Outcome]:
        """Hand over a task."""
        if self._is_broken and self._make is not None:
            self._executor.shutdown(wait=False)
            self._executor, self._is_broken = check_executor(self._make()), False
        return self._executor.submit(worker.run, task)

    def mend(self) -> bool:
        """Repair the executor after a worker died; returns whether tasks can be submitted again."""
        if not isinstance(self._executor, Processes):  # those replace dead workers themselves
            self._is_broken = True
        return self._make is not None or not self._is_broken

    def stop(self, number: int = signal.SIGTERM) -> None:
        """Ask every worker process to stop; with SIGKILL, end those that are left, for which the
        exit of this process would wait."""
        signal_children(number)
        if isinstance(self._executor, Processes):
            self._executor.terminate(number)
        elif isinstance(self._executor, ProcessPoolExecutor):
            for pid in list(self._executor._processes or ()):
                with suppress(ProcessLookupError):
                    os.kill(pid, number)

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and not issubclass(kind, Exception):  # Ctrl-C or SIGTERM
            self.stop(signal.SIGKILL)
        if self._make is not None:
            self._executor.shutdown(wait=kind is None, cancel_futures=True)
        close_repositories()  # of calls that ran in this process
        end_children()


def check_executor(executor: object) -> Executor:
    """The executor itself, if it can train variants.

    :raises InvalidInput: it is not an executor, or its workers would share random number generators
        or this process's connections.
    """
    if not isinstance(executor, Executor):
        raise InvalidInput(
            f"the function that is to make an executor made {values.shown(executor)}: let it return"
            " a concurrent.futures.Executor"
        )
    if isinstance(executor, ThreadPoolExecutor):
        raise InvalidInput(
            "variants cannot be trained by threads of one process, which draw from the same"
            " random number generators: leave the executor out for processes, or pass"
            " SerialExecutor() to train one after the other"
        )
    context: Any = getattr(executor, "_mp_context", None)
    if (
        isinstance(executor, ProcessPoolExecutor)
        and context is not None
        and context.get_start_method() == "fork"
    ):
        raise InvalidInput(
            "forked workers would share this process's threads and connections: pass"
            " ProcessPoolExecutor(…, mp_context=multiprocessing.get_context('spawn')), or leave the"
            " executor out"
        )
    return executor


def check_pickles(train: Train, stop: Stop | None) -> None:
    """Raise unless the functions can be given to another process.

    :raises InvalidInput: one cannot; the text gives the reason.
    """
    for what, value in (("train", train), ("stop", stop)):
        try:
            pickle.dumps(value)
        except Exception as exc:
            raise InvalidInput(
                f"{what} does not pickle, so no other process can call it ({exc}): define it in a"
                " module"
            ) from exc
