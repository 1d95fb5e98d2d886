"""What runs in the executor's process: one variant, from where it stands to its result.

A process keeps the repositories that it opened, so that a variant whose parent was trained here finds that state in memory.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import wait as wait_for
from multiprocessing.util import Finalize

import torch

from datastates.config import Config
from datastates.content.manifest import CHUNK_BYTES
from datastates.errors import Cancelled, Closed, Conflict, DatastatesError, InvalidInput, Unavailable
from datastates.lineage.change import studies
from datastates.lineage.states import State
from datastates.opening.location import Location
from datastates.opening.recovery import recover
from datastates.opening.whereabouts import node_id
from datastates.repository import Repository
from datastates.store.tiers import CAPTURED
from datastates.system.memory import available_memory_bytes
from datastates.tracking.belonging import using
from datastates.transport.clone.groups import SoloGroup

from . import record
from .claim import Claim, holder
from .job import Assignment, Job, Stop, seed_everything

__all__ = ["Explorer", "Outcome", "Share", "Task", "Train", "close_repositories", "end_with_parent", "run"]

_logger = logging.getLogger(__name__)

Train = Callable[[Job], None]
"""What trains one variant; given to ``explore``."""

_PATIENCE_S = 60.0
_LOOK_S = 0.5
_GRACE_S = 10.0
_FREE_SHARE = 4

_busy = threading.Lock()
_watching: int | None = None
_repositories: dict[tuple[int, Location], Repository] = {}


@dataclass(frozen=True, slots=True)
class Explorer:
    """The explorer that gave a task: the claim that it holds for as long as it lives, and its node."""

    claim: str
    note: str
    node: str


@dataclass(frozen=True, slots=True)
class Share:
    """The address at which the explorer serves its repository, and the token for it."""

    url: str
    token: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class Task:
    """A task for a worker: pickled by the executor, never shown, because a database's url may hold a password."""

    location: Location = field(repr=False)
    config: Config
    assignment: Assignment
    train: Train
    stop: Stop | None
    explorer: Explorer
    share: Share | None
    threads: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a task: the uid of the result, or an error with its traceback. ``source`` is where the starting state came from."""

    variant: str
    uid: str | None
    error: str | None = None
    traceback: str = ""
    source: str | None = None


def run(task: Task) -> Outcome:
    """Train one variant, and tag its result; an error of the variant is an outcome.

    :raises InvalidInput: this process is training another variant already: they would draw from the same random number generators.
    """
    if not _busy.acquire(blocking=False):
        raise InvalidInput(
            "two variants at once in one process would draw from the same random number generators: give the executor processes of"
            " one thread each, such as dask's LocalCluster(threads_per_worker=1)"
        )
    end_with_parent()
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(task.threads)
        with using(SoloGroup()):  # the processes of an executor may be ranks to MPI, but each trains a variant of its own
            return _run(task)
    except Exception as exc:  # the user's function may raise anything: the variant failed, and the report says how
        return Outcome(task.assignment.variant.name, None, f"{type(exc).__name__}: {exc}", traceback.format_exc())
    finally:
        torch.set_num_threads(before)
        _busy.release()


def _run(task: Task) -> Outcome:
    assignment = task.assignment
    repository = _repository(task)
    study, name = assignment.study, assignment.variant.name
    with _watched(repository, task.explorer) as check, _claimed(repository, assignment, check):
        if (state := record.finished(repository, study, name, assignment.digest)) is not None:
            return Outcome(name, state.uid)
        recover(repository.core.database, repository.core.tiers.durable, repository.core.home)  # who held the claim before may have died
        seed_everything(int(assignment.digest[:8], 16))
        near = _Near(repository, task.share)
        with _noted(repository, study, name):
            job = Job(repository, assignment, stop=task.stop, check=check, fetch=near.fetch)
            try:
                if not job.is_over:
                    task.train(job)
            finally:
                job.close()
            return Outcome(name, job.finish().uid, source=near.source)


@contextmanager
def _noted(repository: Repository, study: str, variant: str) -> Iterator[None]:
    """Note in the lineage that the variant is being trained, and what that took, however it ends."""
    began = time.monotonic()
    with repository.core.database.write() as session:
        studies.begin(session, study, variant)
    try:
        yield
    finally:
        with suppress(Unavailable), repository.core.database.write() as session:  # the database may be away; the variant's own end counts
            studies.end(session, study, variant, time.monotonic() - began)


class _Near:
    """Brings the starting state into this process's memory when a peer has it, and remembers where it came from."""

    def __init__(self, repository: Repository, share: Share | None) -> None:
        self._repository, self._share = repository, share
        self.source: str | None = None

    def fetch(self, state: State) -> None:
        """Take the state from our own memory, or a peer's, or the disk: that one is read by the restore itself."""
        if record.is_in_memory(self._repository, state.uid):
            self.source = CAPTURED
            return
        self.source = "disk"
        if self._share is not None:
            from datastates.clone.peer import connect  # the transport takes a while to import, and few share

            try:
                with connect(self._share.url, token=self._share.token) as peer:
                    peer.clone(state.uid, repo=self._repository)
            except DatastatesError as exc:
                _logger.warning("state %s did not come from %s, it is read from disk: %s", state.uid[:10], self._share.url, exc)
            else:
                self.source = "peer"


@contextmanager
def _claimed(repository: Repository, assignment: Assignment, check: Callable[[], None]) -> Iterator[None]:
    """Hold the variant's claim. A worker whose explorer died is waited for: it stops at its next epoch.

    :raises Conflict: it did not.
    """
    folder, name = record.claims_folder(repository), record.claim_name(repository, assignment.study, assignment.variant.name)
    deadline = time.monotonic() + _PATIENCE_S
    while (claim := Claim.take(folder, name, f"process {os.getpid()} on {repository.node}")) is None:
        check()
        if time.monotonic() > deadline:
            who = holder(folder, name) or "another process"
            raise Conflict(
                f"variant {assignment.variant.name!r} is still being trained by {who}, and did not stop in {_PATIENCE_S:.0f} s:"
                " wait for it or end it, then explore again"
            )
        time.sleep(_LOOK_S / 5)
    with claim:
        yield


@contextmanager
def _watched(repository: Repository, explorer: Explorer) -> Iterator[Callable[[], None]]:
    """A check that raises once the explorer is gone. It is watched where its claim can be seen; compare-and-swap does elsewhere."""
    folder = record.claims_folder(repository)
    is_gone = threading.Event()

    def check() -> None:
        if is_gone.is_set():
            raise Cancelled(f"the explorer ({explorer.note}) has ended: what was captured stays; explore again to go on")

    def is_alive() -> bool:
        try:
            return holder(folder, explorer.claim) == explorer.note
        except OSError:  # a file system that stumbles is no news of the explorer
            return True

    if not is_alive():
        if explorer.node == node_id():
            is_gone.set()
        check()
        yield check
        return
    over = threading.Event()

    def watch() -> None:
        while not over.wait(_LOOK_S):
            if not is_alive():
                is_gone.set()
                return

    thread = threading.Thread(target=watch, name="datastates-explorer-watch", daemon=True)
    thread.start()
    try:
        yield check
    finally:
        over.set()
        thread.join()


def _repository(task: Task) -> Repository:
    """The process's own, kept open; the memory that is free is shared with as many workers as the machine has room for."""
    key = (os.getpid(), task.location)
    repository = _repositories.get(key)
    if repository is not None and not repository.core.is_closed:
        return repository
    config = task.config
    if config.memory_bytes is None:
        workers = max(1, len(os.sched_getaffinity(0)) // task.threads)
        config = replace(config, memory_bytes=max(2 * CHUNK_BYTES, available_memory_bytes() // (_FREE_SHARE * workers)))
    if not any(pid == os.getpid() for pid, _ in _repositories):
        Finalize(None, close_repositories, exitpriority=10)  # processes of multiprocessing may end without atexit
    repository = _repositories[key] = Repository(task.location, config)
    return repository


def close_repositories() -> None:
    """Close what this process opened for its tasks; idempotent."""
    for key in [key for key in _repositories if key[0] == os.getpid()]:
        with suppress(Closed):
            _repositories.pop(key).close()


def end_with_parent() -> None:
    """End this process of multiprocessing when the one that made it has died. Idempotent.

    A pool's own loop would wait for calls for ever: it holds both ends of its queues.
    """
    global _watching
    parent = multiprocessing.parent_process()
    if parent is not None and _watching != os.getpid():
        _watching = os.getpid()
        threading.Thread(target=_end_with, args=(parent.sentinel,), name="datastates-parent-watch", daemon=True).start()


def _end_with(sentinel: int) -> None:
    """Wait until the parent is dead; then let the task end in an orderly way, but not for long, and end the process."""
    wait_for([sentinel])
    if not _busy.acquire(blocking=False):  # and no task begins after this
        os.kill(os.getpid(), signal.SIGTERM)
        if not _busy.acquire(timeout=_GRACE_S):
            os._exit(1)
    close_repositories()
    os._exit(1)
