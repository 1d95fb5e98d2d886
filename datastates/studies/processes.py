"""Processes that train variants, on this machine.

A worker keeps the repositories that it opened. A variant whose parent was trained in the same
process then finds the parent's state in memory. ``launch`` runs several processes as the ranks of
one torch.distributed job. All processes end with the process that started them.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import wait
from multiprocessing.connection import wait as wait_for
from multiprocessing.util import Finalize
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np
from torch.multiprocessing.spawn import (
    ProcessContext,
    ProcessExitedException,
    ProcessRaisedException,
    start_processes,
)

from datastates.config import Config
from datastates.errors import Closed
from datastates.maintenance.location import Location
from datastates.repository import Repository
from datastates.state.manifest import CHUNK_BYTES
from datastates.system.memory import available_memory_bytes

from .records import Outcome

PRELOADED = ["datastates.studies.worker", "torch._dynamo"]  # every optimizer imports the latter
"""The modules that a fork server imports before it forks workers."""

_GRACE_S = 10.0
_FREE_SHARE = 4
_logger = logging.getLogger(__name__)
_LOOK_S = 0.5
A = TypeVar("A")


@dataclass(frozen=True, slots=True)
class _Kept:
    """An open repository, the requested configuration, and that configuration pickled when it was
    opened."""

    repository: Repository
    config: Config
    pickled: bytes | None

    def is_for(self, config: Config) -> bool:
        """Whether a task with this configuration takes the repository. Each brings its own copies
        of the user's processors, tiers and policies, which may equal nothing but themselves.
        """
        return config == self.config or (
            self.pickled is not None and _pickled(config) == self.pickled
        )


busy = threading.Lock()
"""Held during the training of a variant in this process."""

_watching: int | None = None
_repositories: dict[tuple[int, Location], _Kept] = {}


def begin_worker(environ: dict[str, str]) -> None:
    """Set up a worker process.

    The explorer handles Ctrl-C and then stops the workers. A worker also stops if the explorer
    dies. ``environ`` replaces the environment. Random generators get new seeds, because a fork
    copies the generators of its parent.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.clear()
    os.environ.update(environ)
    np.random.seed()
    end_with_parent()


class Slot:
    """One process of a worker, forked from the fork server of ``multiprocessing``.

    The fork server is a process that only imported torch. The process therefore starts in a tenth
    of a second instead of seconds, and shares the memory of the imported modules. It receives the
    present environment with the changes in ``environ``.
    """

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        given = {**os.environ, **(environ or {})}
        self.pool = ProcessPoolExecutor(
            1, mp_context=context, initializer=begin_worker, initargs=(given,)
        )
        self.pid = self.pool.submit(os.getpid)
        self.is_ended = False

    def terminate(self, number: int) -> None:
        """Send the process a signal."""
        if self.pid.done() and self.pid.exception() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid.result(), number)

    def end(self, grace_s: float) -> None:
        """End the process. Its task may make a state durable for ``grace_s`` seconds."""
        self.is_ended = True
        processes = list((self.pool._processes or {}).values())
        self.pool.shutdown(wait=False, cancel_futures=True)
        self.terminate(signal.SIGTERM)
        for process in processes:
            process.join(grace_s)
            if process.is_alive():
                process.kill()
        hold_broken(self.pool)


_held: set[ProcessPoolExecutor] = set()


def hold_broken(pool: ProcessPoolExecutor) -> None:
    """Hold a broken pool until its own thread has ended.

    From Python 3.12 on, a pool's thread deadlocks if it drops the last reference to the pool. The
    process then never exits, because it joins that thread.
    """

    def end() -> None:
        pool.shutdown(wait=True)
        _held.discard(pool)

    _held.add(pool)
    with suppress(RuntimeError):
        # no thread can be started as the interpreter ends: it is held until then
        threading.Thread(target=end, name="datastates-broken-pool", daemon=True).start()


def repository_at(location: Location, config: Config, threads: int) -> Repository:
    """The process's own repository, kept open until another configuration is requested.

    The free memory is divided by the number of workers that fit on the machine.
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
        config = replace(
            config,
            memory_bytes=max(2 * CHUNK_BYTES, available_memory_bytes() // (_FREE_SHARE * workers)),
        )
    if not any(pid == os.getpid() for pid, _ in _repositories):
        # processes of multiprocessing may end without atexit
        Finalize(None, close_repositories, exitpriority=10)
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
        threading.Thread(
            target=_end_with, args=(parent.sentinel,), name="datastates-parent-watch", daemon=True
        ).start()


def _end_with(sentinel: int) -> None:
    """Wait until the parent is dead.

    Then give the task a short time to end in an orderly way, and end the process."""
    wait_for([sentinel])
    if not busy.acquire(blocking=False):  # and no task begins after this
        os.kill(os.getpid(), signal.SIGTERM)
        if not busy.acquire(timeout=_GRACE_S):
            os._exit(1)
    close_repositories()
    os._exit(1)


# --- Ranks of one job of torch.distributed on this machine ---


def launch(
    count: int,
    work: Callable[[A], Outcome],
    given: A,
    variant: str,
    *,
    look: Callable[[], None],
    settle: Callable[[], object],
) -> Outcome:
    """The outcome of ``work(given)`` in ``count`` connected processes, from rank 0 or from the
    first rank that failed.

    If a rank fails or dies, all other ranks are ended. If this function raises, all ranks are
    ended. ``work`` and ``given`` are pickled.

    :param look: called twice a second. An error that it raises ends all ranks.
    :param settle: called when a rank has failed, before the other ranks are joined. They may wait
        for something that was lost with the failed rank.
    """
    from torch import distributed

    with tempfile.TemporaryDirectory(prefix="datastates-ranks-") as name:
        # on a port that is free, which torch does not list
        store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
        environ = {
            **os.environ,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        # the host's name may resolve elsewhere
        environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
        environ |= {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
        multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOADED)
        ranks = start_processes(
            _begin,
            (environ, name, work, given),
            nprocs=count,
            join=False,
            start_method="forkserver",
        )
        try:
            while not _is_over(ranks):
                look()
            if not any(process.exitcode for process in ranks.processes):
                return _said(Path(name), 0) or _silent(variant, ranks, 0)
            settle()
            found = _failure(variant, ranks, Path(name))
            with suppress(ProcessExitedException, ProcessRaisedException):
                # ranks that wait for the failed one fail too
                ranks.join(grace_period=_GRACE_S)
            return found
        finally:
            _end(ranks)


def _begin(
    rank: int, environ: dict[str, str], folder: str, work: Callable[[A], Outcome], given: A
) -> None:
    """Run in a rank: connect to the other ranks, work, and write the outcome."""
    from torch import distributed

    begin_worker({**environ, "RANK": str(rank), "LOCAL_RANK": str(rank)})
    distributed.init_process_group()
    found = work(given)
    path = Path(folder) / str(rank)
    path.with_suffix(".part").write_bytes(msgspec.msgpack.encode(found))
    path.with_suffix(".part").replace(path)
    if found.error is not None:
        sys.exit(1)
    distributed.destroy_process_group()


def _is_over(ranks: ProcessContext) -> bool:
    """Wait a while; returns whether all ended, or one failed."""
    wait([process.sentinel for process in ranks.processes if process.is_alive()], _LOOK_S)
    codes = [process.exitcode for process in ranks.processes]
    return any(codes) or None not in codes


def _failure(variant: str, ranks: ProcessContext, folder: Path) -> Outcome:
    """The report of the rank that failed first.

    A killed rank leaves no report. It is then the cause of all other failures.
    """
    ended = [rank for rank, process in enumerate(ranks.processes) if process.exitcode]
    silent = [rank for rank in ended if not (folder / str(rank)).exists()]
    if silent:
        return _silent(variant, ranks, silent[0])
    first = min(ended, key=lambda rank: (folder / str(rank)).stat().st_mtime_ns)
    said = _said(folder, first) or _silent(variant, ranks, first)
    return replace(said, error=f"rank {first} of {len(ranks.processes)}: {said.error}")


def _silent(variant: str, ranks: ProcessContext, rank: int) -> Outcome:
    code = ranks.processes[rank].exitcode
    how = (
        f"was killed by {signal.Signals(-code).name}"
        if code < 0
        else f"ended with exit code {code} and no result"
    )
    return Outcome(variant, None, f"rank {rank} of {len(ranks.processes)} {how}", is_death=True)


def _said(folder: Path, rank: int) -> Outcome | None:
    try:
        return msgspec.msgpack.decode((folder / str(rank)).read_bytes(), type=Outcome)
    except FileNotFoundError:
        return None


def _end(ranks: ProcessContext) -> None:
    """End the ranks that are left in an orderly way, then at once."""
    for process in ranks.processes:
        if process.is_alive():
            process.terminate()
    until = time.monotonic() + _GRACE_S
    for rank, process in enumerate(ranks.processes):
        process.join(max(0.0, until - time.monotonic()))
        if process.is_alive():
            _logger.warning("rank %d (process %d) does not end, it is killed", rank, process.pid)
            process.kill()
            process.join()
