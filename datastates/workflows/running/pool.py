"""The executor of a study: which executors are accepted, how tasks reach them, and what happens when one breaks."""

from __future__ import annotations

import os
import pickle
import signal
from collections.abc import Callable
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from datastates import values
from datastates.errors import InvalidInput

from . import worker
from .executors import Processes
from .job import Stop
from .outcome import Outcome
from .process import close_repositories
from .worker import Task, Train

__all__ = ["Pool", "check_executor", "check_pickles"]


class Pool:
    """The executor of a study: the caller's own, one that the caller's function makes, or our own processes."""

    def __init__(self, executor: Executor | Callable[[], Executor] | None, *, workers: int) -> None:
        self._make: Callable[[], Executor] | None
        if isinstance(executor, Executor):
            self._make, self._executor = None, executor
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
        """Ask every worker process to stop; with SIGKILL, end those that are left, for which the exit of this process would wait."""
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


def check_executor(executor: object) -> Executor:
    """The executor itself, if it can train variants.

    :raises InvalidInput: it is not an executor, or its workers would share random number generators or this process's connections.
    """
    if not isinstance(executor, Executor):
        raise InvalidInput(
            f"the function that is to make an executor made {values.shown(executor)}: let it return a concurrent.futures.Executor"
        )
    if isinstance(executor, ThreadPoolExecutor):
        raise InvalidInput(
            "variants cannot be trained by threads of one process: they would draw from the same random number generators;"
            " leave the executor out for processes, or pass SerialExecutor() for one after the other in this process"
        )
    context: Any = getattr(executor, "_mp_context", None)
    if isinstance(executor, ProcessPoolExecutor) and context is not None and context.get_start_method() == "fork":
        raise InvalidInput(
            "forked workers would share this process's threads and connections:"
            " pass ProcessPoolExecutor(…, mp_context=multiprocessing.get_context('spawn')), or leave the executor out"
        )
    return executor


def check_pickles(train: Train, stop: Stop | None) -> None:
    """Raise unless the functions can be given to another process.

    :raises InvalidInput: one cannot; says why.
    """
    for what, value in (("train", train), ("stop", stop)):
        try:
            pickle.dumps(value)
        except Exception as exc:
            raise InvalidInput(f"{what} does not pickle, so no other process can call it ({exc}): define it in a module") from exc
