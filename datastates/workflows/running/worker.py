"""What runs in the executor's process: one variant, from where it stands to its result."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial

import torch

from datastates.config import Config
from datastates.errors import Cancelled, Conflict, DatastatesError, InvalidInput, Unavailable
from datastates.lineage.change import studies
from datastates.lineage.states import State
from datastates.opening.location import Location
from datastates.opening.recovery import recover
from datastates.opening.whereabouts import node_id
from datastates.repository import Repository
from datastates.store.tiers import CAPTURED
from datastates.tracking.belonging import find, using
from datastates.transport.clone.groups import Group, SoloGroup

from . import record
from .claim import Claim, holder
from .job import Assignment, Job, Stop, seed_everything
from .launch import launch
from .outcome import Outcome, failed
from .process import busy, end_with_parent, repository_at

__all__ = [
    "Explorer",
    "Share",
    "Task",
    "Train",
    "noted",
    "run",
    "run_as_rank",
    "train_variant",
]

_logger = logging.getLogger(__name__)

Train = Callable[[Job], None]
"""A function that trains one variant; given to ``explore``."""

_PATIENCE_S = 60.0
_LOOK_S = 0.5


@dataclass(frozen=True, slots=True)
class Explorer:
    """The explorer that gave a task: the claim that it holds as long as it lives, and its node."""

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
    """A task for a worker. The executor pickles it; it is never shown, because a database's url may hold a password."""

    location: Location = field(repr=False)
    config: Config
    assignment: Assignment
    train: Train
    stop: Stop | None
    explorer: Explorer
    share: Share | None
    threads: int
    ranks: int = 1


def run(task: Task) -> Outcome:
    """Train one variant, and tag its result; an error of the variant is returned as an outcome.

    :raises InvalidInput: this process is already training another variant: both would draw from the same random number generators.
    """
    if not busy.acquire(blocking=False):
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
        return failed(task.assignment.variant.name, exc)
    finally:
        torch.set_num_threads(before)
        busy.release()


def run_as_rank(task: Task) -> Outcome:
    """Train one variant as a rank of the processes that ``run`` launched for it; they have met."""
    with busy:
        torch.set_num_threads(task.threads)
        name, group = task.assignment.variant.name, find()
        repository = repository_at(task.location, task.config, task.threads)
        near = _Near(repository, task.share if group.rank == 0 else None)  # rank 0 passes on what several ranks want of it
        try:
            with _claimed(repository, task.assignment, lambda: None, rank=group.rank):  # ranks of an earlier attempt may still be ending
                done = train_variant(repository, task.assignment, task.train, stop=task.stop, group=group, fetch=near.fetch)
                return Outcome(name, done.uid, source=near.source)
        except Exception as exc:  # likewise
            return failed(name, exc)


def train_variant(
    repository: Repository,
    assignment: Assignment,
    train: Train,
    *,
    stop: Stop | None,
    group: Group,
    check: Callable[[], None] = lambda: None,
    fetch: Callable[[State], None] = lambda state: None,
) -> State:
    """Train one variant from where it stands; returns its result, tagged. Collective among the ranks of the group.

    All ranks are seeded alike before ``train`` builds anything, so that objects that the start does not hold begin the same.
    """
    seed_everything(1 << 62 | int(assignment.digest[:8], 16))  # as large as a seed that was drawn, because the script did not choose it
    job = Job(repository, assignment, stop=stop, check=check, fetch=fetch, group=group)
    try:
        if not job.is_over:
            train(job)
    finally:
        job.close()
    return job.finish()


def _run(task: Task) -> Outcome:
    assignment = task.assignment
    repository = repository_at(task.location, task.config, task.threads)
    study, name = assignment.study, assignment.variant.name
    with _watched(repository, task.explorer) as check, _claimed(repository, assignment, check):
        if (state := record.finished(repository, study, name, assignment.digest)) is not None:
            return Outcome(name, state.uid)
        settle = partial(recover, repository.core.database, repository.core.tiers.durable, repository.core.home)
        settle()  # the previous holder of the claim may have died
        with noted(repository, study, name):
            if task.ranks > 1:
                return launch(task.ranks, run_as_rank, task, name, look=check, settle=settle)
            near, group = _Near(repository, task.share), SoloGroup()
            done = train_variant(repository, assignment, task.train, stop=task.stop, group=group, check=check, fetch=near.fetch)
            return Outcome(name, done.uid, source=near.source)


@contextmanager
def noted(repository: Repository, study: str, variant: str) -> Iterator[None]:
    """Note in the lineage that the variant is being trained, and what that cost, however it ends."""
    began = time.monotonic()
    with repository.core.database.write() as session:
        studies.begin(session, study, variant)
    try:
        yield
    finally:
        with suppress(Unavailable), repository.core.database.write() as session:  # the database may be away; the variant's own end counts
            studies.end(session, study, variant, time.monotonic() - began)


class _Near:
    """Brings the starting state into this process's memory if a peer has it, and remembers where it came from."""

    def __init__(self, repository: Repository, share: Share | None) -> None:
        self._repository, self._share = repository, share
        self.source: str | None = None

    def fetch(self, state: State) -> None:
        """Take the state from our own memory, from a peer, or from disk; the restore itself reads the disk."""
        if record.is_in_memory(self._repository, state.uid):
            self.source = CAPTURED
            return
        self.source = "disk"
        if self._share is not None:
            from datastates.clone.peer import connect  # the transport takes a while to import, and few studies share

            try:
                with connect(self._share.url, token=self._share.token) as peer:
                    peer.clone(state.uid, repo=self._repository)
            except DatastatesError as exc:
                _logger.warning("state %s did not come from %s, it is read from disk: %s", state.uid[:10], self._share.url, exc)
            else:
                self.source = "peer"


@contextmanager
def _claimed(repository: Repository, assignment: Assignment, check: Callable[[], None], *, rank: int | None = None) -> Iterator[None]:
    """Hold the claim of the variant, or of one of its ranks. Waits for a worker whose explorer died: it stops at its next epoch.

    :raises Conflict: that worker did not stop.
    """
    folder, name = record.claims_folder(repository), record.claim_name(repository, assignment.study, assignment.variant.name, rank)
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
    """A check that raises once the explorer is gone. The check watches the explorer's claim where it is visible; elsewhere compare-and-swap
    protects the branch.
    """
    folder = record.claims_folder(repository)
    is_gone = threading.Event()

    def check() -> None:
        if is_gone.is_set():
            raise Cancelled(f"the explorer ({explorer.note}) has ended: what was captured stays; explore again to go on")

    def is_alive() -> bool:
        try:
            return holder(folder, explorer.claim) == explorer.note
        except OSError:  # an error of the file system says nothing about the explorer
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
