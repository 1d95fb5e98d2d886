"""A process that trains variants: its beginning, the repositories that it keeps open, and its end with the process that made it.

It keeps the repositories that it opened, so that a variant whose parent was trained here finds the parent's state in memory.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import wait as wait_for
from multiprocessing.util import Finalize

import numpy as np

from datastates.config import Config
from datastates.content.manifest import CHUNK_BYTES
from datastates.errors import Closed
from datastates.opening.location import Location
from datastates.repository import Repository
from datastates.system.memory import available_memory_bytes

__all__ = ["PRELOADED", "begin_worker", "busy", "close_repositories", "end_with_parent", "repository_at"]

PRELOADED = ["datastates.workflows.running.worker", "torch._dynamo"]  # every optimizer imports the latter
"""The modules that a fork server imports before it forks workers."""

_GRACE_S = 10.0
_FREE_SHARE = 4


@dataclass(frozen=True, slots=True)
class _Kept:
    """An open repository and the configuration that was asked for, also as it pickled then."""

    repository: Repository
    config: Config
    pickled: bytes | None

    def is_for(self, config: Config) -> bool:
        """Whether a task with this configuration takes the repository. Each brings its own copies of the user's modules, tiers and
        policies, which may equal nothing but themselves.
        """
        return config == self.config or (self.pickled is not None and _pickled(config) == self.pickled)


busy = threading.Lock()
"""Held while a variant is trained here."""

_watching: int | None = None
_repositories: dict[tuple[int, Location], _Kept] = {}


def begin_worker(environ: dict[str, str]) -> None:
    """Set up a worker process. Ctrl-C is left to the explorer, which then asks us to stop; if the explorer dies, we stop as well.

    ``environ`` replaces the environment, and random numbers begin anew, because a fork has those of the process that it was forked from.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.clear()
    os.environ.update(environ)
    np.random.seed()
    end_with_parent()


def repository_at(location: Location, config: Config, threads: int) -> Repository:
    """The process's own repository, kept open until another configuration is asked for. The free memory is shared among as many workers as
    the machine has room for.
    """
    key = (os.getpid(), location)
    kept = _repositories.get(key)
    if kept is not None and not kept.repository.core.is_closed:
        if kept.is_for(config):
            return kept.repository
        kept.repository.close()
    asked, pickled = config, _pickled(config)
    if config.memory_bytes is None:
        workers = max(1, len(os.sched_getaffinity(0)) // threads)
        config = replace(config, memory_bytes=max(2 * CHUNK_BYTES, available_memory_bytes() // (_FREE_SHARE * workers)))
    if not any(pid == os.getpid() for pid, _ in _repositories):
        Finalize(None, close_repositories, exitpriority=10)  # processes of multiprocessing may end without atexit
    repository = Repository(location, config)
    _repositories[key] = _Kept(repository, asked, pickled)
    return repository


def _pickled(config: Config) -> bytes | None:
    """The configuration as other processes get it; None if it stays in this one."""
    try:
        return pickle.dumps(config)
    except Exception:  # objects of the user's may raise anything
        return None


def close_repositories() -> None:
    """Close the repositories that this process opened for its tasks; idempotent."""
    for key in [key for key in _repositories if key[0] == os.getpid()]:
        with suppress(Closed):
            _repositories.pop(key).repository.close()


def end_with_parent() -> None:
    """End this process of multiprocessing when the process that made it has died. Idempotent.

    A pool's own loop would wait for calls for ever, because it holds both ends of its queues.
    """
    global _watching
    parent = multiprocessing.parent_process()
    if parent is not None and _watching != os.getpid():
        _watching = os.getpid()
        threading.Thread(target=_end_with, args=(parent.sentinel,), name="datastates-parent-watch", daemon=True).start()


def _end_with(sentinel: int) -> None:
    """Wait until the parent is dead. Then give the task a short time to end in an orderly way, and end the process."""
    wait_for([sentinel])
    if not busy.acquire(blocking=False):  # and no task begins after this
        os.kill(os.getpid(), signal.SIGTERM)
        if not busy.acquire(timeout=_GRACE_S):
            os._exit(1)
    close_repositories()
    os._exit(1)
