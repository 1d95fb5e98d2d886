"""Training of one variant, in a process of the executor.

``run`` executes a ``Task``: it resumes the variant and tags its result. ``Job`` is what the train
function gets. ``reconfigure`` applies options that the variant changes in a restored optimizer.
"""

from __future__ import annotations

import hashlib
import logging
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, SupportsFloat

import msgspec
import numpy as np
import torch

from datastates.collective import Group, SoloGroup
from datastates.config import Config
from datastates.engine.handle import Capture
from datastates.errors import (
    Cancelled,
    Conflict,
    DatastatesError,
    InvalidInput,
    Unavailable,
)
from datastates.lineage.states import State
from datastates.lineage.write import attachments
from datastates.maintenance.core import recover
from datastates.maintenance.environment import interface_addresses, network_id, node_id
from datastates.maintenance.lease import LEASES
from datastates.maintenance.location import Location
from datastates.repository import Repository
from datastates.storage.tiers import CAPTURED
from datastates.training.collective import Ranks, find, using
from datastates.training.configuration import configuration
from datastates.training.tracker import Tracker
from datastates.values import Value

from . import records, sharing
from .limits import NO_LIMITS, Limits, limited, noting_progress
from .plan import Variant
from .processes import busy, end_with_parent, launch, repository_at
from .records import Claim, Outcome, failed, holder
from .sharing import NO_SHARE, Share

if TYPE_CHECKING:
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

_logger = logging.getLogger(__name__)

Stop = Callable[[Sequence[State]], bool]
"""A study's stop rule. It takes the states that a variant has reported so far, first epoch first,
and returns whether the variant ends here."""

_PATIENCE_S = 60.0
_LOOK_S = 0.5


@dataclass(frozen=True, slots=True)
class Assignment:
    """One variant of a study, as its worker needs it; ``origin`` is the uid of the state from which
    it forks.

    ``samples_all`` is the number of samples in the plan's whole data. ``is_continued``: the variant
    continues its parent's training instead of forking from it.
    """

    study: str
    variant: Variant
    digest: str
    config: Mapping[str, Value]
    train: tuple[int, ...]
    validation: tuple[int, ...]
    origin: str
    samples_all: int = 0
    is_continued: bool = False


class _Place(msgspec.Struct, frozen=True):
    """The progress of a variant: the uid of the state from which it resumes, and the uids of its
    reports."""

    at: str
    reported: list[str]


class Job:
    """One variant in the process that trains it. A train function calls ``track`` once, then loops
    over ``epochs``.

    If a group trains the variant, each of its ranks has a job, and all ranks call the same methods
    in the same order. All methods but ``report`` are collective. Every method belongs to the
    training thread. ``check`` is called once an epoch and raises if the variant must stop.
    ``fetch`` brings a state near before it is restored.
    """

    def __init__(
        self,
        repository: Repository,
        assignment: Assignment,
        *,
        stop: Stop | None = None,
        check: Callable[[], None] = lambda: None,
        fetch: Callable[[State], None] = lambda state: None,
        group: Group | None = None,
    ) -> None:
        self._repository, self._assignment, self._stop = repository, assignment, stop
        self._check, self._fetch = check, fetch
        self._ranks = Ranks(group or SoloGroup())
        self._branch = records.branch_of(assignment.study, assignment.variant.name)
        self._origin = repository.state(assignment.origin)
        place = self._ranks.first("find where the variant stands", self._stand, _Place)
        self._from = repository.state(place.at)
        self._history = [repository.state(uid) for uid in place.reported]
        self._done = len(self._history)
        self._captures: list[Capture] = []
        self._tracker: Tracker | None = None
        self._step = 0
        self._set = str(self._history[-1].attributes.get(records.SET, "")) if self._history else ""

    @property
    def variant(self) -> Variant:
        """The variant, as the plan has it."""
        return self._assignment.variant

    @property
    def group(self) -> Group:
        """The ranks that train the variant together: a group of one, unless ``explore`` was
        given ``ranks`` or a ``group``."""
        return self._ranks.group

    @property
    def config(self) -> Mapping[str, Value]:
        """The study's configuration with the changes of the variant and of its ancestors."""
        return self._assignment.config

    @property
    def train(self) -> tuple[int, ...]:
        """The indices to train on, ascending; empty if the plan leaves that to the train
        function."""
        return self._assignment.train

    @property
    def validation(self) -> tuple[int, ...]:
        """The indices that neither this variant nor an ancestor of it trains on, ascending."""
        return self._assignment.validation

    @property
    def is_new(self) -> bool:
        """Whether the variant has not trained yet, in an earlier rung of halving neither. Apply
        then what its configuration changes in restored objects, other than options of
        optimizers."""
        return self._from.uid == self._origin.uid and not self._assignment.is_continued

    @property
    def is_over(self) -> bool:
        """Whether no epoch is left: all are done, or the study's stop rule ended the variant."""
        if self._done >= self.variant.epochs or self._stop is None or not self._done:
            return self._done >= self.variant.epochs
        return self._ranks.first("ask the stop rule", partial(self._is_stopped, self._stop), bool)

    def track(self, **objects: Any) -> Tracker:
        """A tracker on the variant's branch, restored from its newest state or from the state where
        it forks.

        A variant uses the options with which ``train`` built optimizers and schedulers, as
        ``hyperparameters="script"`` does, unless that argument is given. The variant's
        configuration is recorded. It has precedence over a ``config`` that is given here.

        ``objects`` and options are as in ``Repository.track``, without branch, start, resume and
        group. ``only`` and ``strict`` apply to the fork alone. A state that the variant captured is
        restored whole. A variant with its own ``seed`` is seeded at the fork. Each rank of a group
        gets another number that follows from the seed.

        :raises InvalidInput: it was called before, or an object does not fit.
        :raises Conflict: another process moved the branch.
        """
        if self._tracker is not None:
            raise InvalidInput(
                f"track was called twice for variant {self.variant.name!r}: track everything in one"
                " call"
            )
        if taken := sorted({"branch", "start", "resume", "group"} & objects.keys()):
            raise InvalidInput(
                f"{', '.join(taken)}: the plan decides that. Rename what you track, or leave it out"
            )
        if not self.is_new:
            objects = {
                name: value for name, value in objects.items() if name not in ("only", "strict")
            }
        config = configuration(objects.pop("config", None)) | configuration(self.config)
        seed = self.variant.config.get("seed")
        if self.is_new and isinstance(seed, int):
            seed_everything(_seed_of(seed, self._ranks.rank))
            objects = {"rng": "script", **objects}
        if self._assignment.is_continued:
            objects = {"hyperparameters": "state", **objects}  # as a resumed variant
        self._fetch(self._from)
        objects = {"takeover": True, **objects}  # the claim on the variant decides who trains it
        self._tracker = self._repository.track(
            branch=self._branch, start=self._origin.uid, config=config, group=self.group, **objects
        )
        self._tracker.training.loops.note_other_counter(
            is_between=self.is_new or records.EPOCH in self._from.attributes
        )
        self._step = self._tracker.step
        if self.is_new:
            self._set = ", ".join(map(str, self._tracker.training.script_options.differences))
        return self._tracker

    def epochs(self) -> Iterator[int]:
        """The epochs that are left, counted from 0 in the variant. Ends early if the study's
        ``stop`` returned True.

        :raises InvalidInput: an epoch ended without a report.
        """
        while not self.is_over:
            with self._ranks.synchronized("go on to the next epoch"):
                self._check()
            epoch = self._done
            if self._tracker is not None:
                self._tracker.training.settle()
            yield epoch
            if self._done == epoch:
                raise InvalidInput(
                    f"epoch {epoch} of variant {self.variant.name!r} was not reported: end each"
                    " with job.report(...)"
                )

    def report(self, **metrics: SupportsFloat) -> Capture:
        """Report the end of an epoch: capture the state with its metrics. The last report is the
        variant's result.

        :raises InvalidInput: nothing is tracked yet, or more epochs are reported than the plan has.
        """
        name = self.variant.name
        if self._tracker is None:
            raise InvalidInput(
                f"variant {name!r} reported before it tracked anything: call job.track(model=model,"
                " …) first"
            )
        if self._done >= self.variant.epochs:
            raise InvalidInput(
                f"variant {name!r} has {self.variant.epochs} epochs and reported one more: loop"
                " over job.epochs()"
            )
        self._check()
        # run.steps has counted
        step = None if self._tracker.step == self._step else self._tracker.step
        capture = self._tracker.capture(
            metrics=metrics, step=step, attributes=self._attributes(self._done + 1)
        )
        # once an epoch: weights may be edited right after, for an evaluation for example
        self._tracker.fence()
        self._step = self._tracker.step
        self._captures.append(capture)
        self._done += 1
        return capture

    def _progress(self) -> tuple[int, ...]:
        """The epochs, steps and micro-steps so far; safe from any thread."""
        tracker = self._tracker
        return (self._done, *(() if tracker is None else (tracker.step, tracker.micro_step)))

    def close(self) -> None:
        """End the tracker: the last capture becomes durable. Idempotent."""
        tracker = self._tracker
        if tracker is not None:
            tracker.close()

    def finish(self) -> State:
        """Make the last report durable, and tag it as the variant's result.

        :raises InvalidInput: there is no report.
        """
        if self._captures:
            state = self._captures[-1].wait("durable")
        elif self._history:
            state = records.make_durable(self._repository.core, self._history[-1].uid)
        else:
            raise InvalidInput(
                f"variant {self.variant.name!r} ended without a result: call job.report(...) at the"
                " end of each epoch"
            )
        return self._repository.state(
            self._ranks.first("tag the result", lambda: self._tag(state), str)
        )

    def _tag(self, state: State) -> str:
        assignment = self._assignment
        return records.tag_done(
            self._repository, assignment.study, assignment.variant.name, assignment.digest, state
        ).uid

    def _stand(self) -> _Place:
        """The progress of the variant.

        One rank finds it, because the branch may have to be moved back.
        """
        assignment = self._assignment
        at = records.back_to_what_is_here(self._repository, self._branch, self._origin)
        history = records.reports(
            self._repository, assignment.study, assignment.variant.name, self._origin
        )
        if history:
            records.check_digest(
                history[-1], assignment.study, assignment.variant.name, assignment.digest
            )
        return _Place(at.uid, [state.uid for state in history])

    def _is_stopped(self, stop: Stop) -> bool:
        return bool(stop(self._reported()))

    def _reported(self) -> Sequence[State]:
        """Every report so far, once the last of them is recorded."""
        return (*self._history, *(capture.wait() for capture in self._captures))

    def _attributes(self, epoch: int) -> dict[str, Value]:
        assignment = self._assignment
        attributes: dict[str, Value] = {
            records.STUDY: assignment.study,
            records.VARIANT: assignment.variant.name,
            records.DIGEST: assignment.digest,
            records.EPOCH: epoch,
        }
        if self._set:
            attributes[records.SET] = self._set
        if assignment.variant.train is not None:
            attributes |= {
                records.SAMPLES: len(assignment.train),
                records.SAMPLES_ALL: assignment.samples_all,
            }
        return attributes


def _seed_of(seed: int, rank: int) -> int:
    """The seed of a rank: the variant's own on rank 0, others on other ranks, so that no two
    ranks draw the same numbers."""
    return int(hashlib.sha256(f"{seed}/{rank}".encode()).hexdigest()[:15], 16) if rank else seed


def seed_everything(seed: int) -> None:
    """Seed the generators of Python, NumPy and torch, on every CUDA device too."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


# --- Running a task ---


Train = Callable[[Job], None]
"""A function that trains one variant; given to ``explore``."""


@dataclass(frozen=True, slots=True)
class Explorer:
    """The explorer that gave a task: the claim that it holds as long as it lives, and its node."""

    claim: str
    note: str
    node: str


@dataclass(frozen=True, slots=True)
class Task:
    """A task for a worker.

    The executor pickles it; it is never shown, because a database's url may hold a password.
    ``sources`` are the addresses of workers that may have the starting state. A worker of a node in
    ``avoid`` leaves the variant to others."""

    location: Location = field(repr=False)
    config: Config
    assignment: Assignment
    train: Train
    stop: Stop | None
    explorer: Explorer
    share: Share
    threads: int
    ranks: int = 1
    limits: Limits = NO_LIMITS
    sources: tuple[str, ...] = ()
    avoid: frozenset[str] = frozenset()


def run(task: Task) -> Outcome:
    """Train one variant, and tag its result. An error of the variant is returned as an outcome.

    With limits, a child process trains it.

    :raises InvalidInput: this process is already training another variant, and both would draw from
        the same random number generators; or it has not as many GPUs as the limits ask for.
    """
    name, node = task.assignment.variant.name, network_id()
    if node in task.avoid:
        time.sleep(_LOOK_S)  # another worker may be free first
        return Outcome(name, None, is_declined=True, node=node)
    if task.limits.is_any:
        end_with_parent()
        unlimited = replace(task, limits=NO_LIMITS, avoid=frozenset())
        return replace(limited(run, unlimited, name, task.limits), node=node)
    if not busy.acquire(blocking=False):
        raise InvalidInput(
            "two variants at once in one process would draw from the same random number generators:"
            " give the executor processes of one thread each, such as dask's"
            " LocalCluster(threads_per_worker=1)"
        )
    end_with_parent()
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(task.threads)
        with using(SoloGroup()):
            # the processes of an executor may be ranks to MPI, but each trains its own variant
            return replace(_run(task), node=node)
    except Exception as exc:
        # the user's function may raise anything: the variant failed, and the report has the reason
        return replace(failed(name, exc), node=node)
    finally:
        torch.set_num_threads(before)
        busy.release()


def run_as_rank(task: Task) -> Outcome:
    """Train one variant as a rank of the processes that ``run`` launched for it; they have met."""
    with busy:
        torch.set_num_threads(task.threads)
        name, group = task.assignment.variant.name, find()
        repository = repository_at(task.location, task.config, task.threads)
        # rank 0 passes on what several ranks want of it
        share, source = task.share if group.rank == 0 else NO_SHARE, list[str]()
        try:
            with _claimed(repository, task.assignment, lambda: None, rank=group.rank):
                # ranks of an earlier attempt may still be ending
                done = train_variant(
                    repository,
                    task.assignment,
                    task.train,
                    stop=task.stop,
                    group=group,
                    fetch=lambda state: source.append(_near(repository, share, state)),
                )
                return Outcome(name, done.uid, source=source[-1] if source else None)
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
    """Train one variant from its newest state; returns its result, tagged. Collective among the
    ranks of the group.

    All ranks are seeded alike before ``train`` builds anything, so that objects that the start does
    not hold begin the same.
    """
    # as large as a seed that was drawn, because the script did not choose it
    seed_everything(1 << 62 | int(assignment.digest[:8], 16))
    job = Job(repository, assignment, stop=stop, check=check, fetch=fetch, group=group)
    try:
        if not job.is_over:
            with noting_progress(job._progress):
                train(job)
    finally:
        job.close()
    return job.finish()


def _run(task: Task) -> Outcome:
    if not _shares_disk(task):
        return _run_apart(task)
    repository = repository_at(task.location, task.config, task.threads)
    fetch = partial(_near, repository, task.share)
    with _watched(repository, task.explorer) as check, _claimed(repository, task.assignment, check):
        return _train_or_find(task, repository, check, fetch)


def _shares_disk(task: Task) -> bool:
    """Whether this process sees the folder in which the explorer holds its claim, or the bucket.

    Processes of several machines must not share a lineage in SQLite."""
    if task.location.root is not None and task.explorer.node != node_id():
        return False
    if task.location.bucket:
        return True
    try:
        note = (task.location.packs / LEASES / task.explorer.claim).read_text()
    except OSError:
        return False
    return note == task.explorer.note


def _run_apart(task: Task) -> Outcome:
    """Train the variant in a private repository of this machine, with states from the explorer and
    other workers."""
    assignment, began = task.assignment, time.monotonic()
    try:
        link = sharing.Link(task.share, task.explorer.claim, task.config, task.threads, assignment)
    except Unavailable as exc:
        error = Unavailable(
            f"process {os.getpid()} on {socket.gethostname()} does not see the folder"
            f" {task.location.packs} of the explorer ({task.explorer.note}), which may have ended,"
            f" and cannot connect to it: {exc}; share='tcp://HOST:PORT' names an address"
        )
        found = failed(assignment.variant.name, error)
        return replace(found, addresses=tuple(interface_addresses()))
    with closing(link), _claimed(link.repository, assignment, link.check):
        link.place(task.sources)
        if task.ranks > 1:  # its ranks are other processes, which read the disk
            link.fetch(assignment.origin, task.sources)
            records.make_durable(link.repository.core, assignment.origin)
            location, config = link.repository.location, replace(task.config, tiers=())
            task = replace(task, location=location, config=config, share=NO_SHARE)
        found = _train_or_find(
            task, link.repository, link.check, lambda state: link.fetch(state.uid, task.sources)
        )
        if found.uid is not None:
            link.deliver(link.repository.state(found.uid))
        return replace(found, url=link.url, took_s=time.monotonic() - began)


def _train_or_find(
    task: Task, repository: Repository, check: Callable[[], None], fetch: Callable[[State], str]
) -> Outcome:
    """Train the variant, whose claim this process holds, unless its result is here."""
    assignment = task.assignment
    study, name = assignment.study, assignment.variant.name
    if (state := records.finished(repository, study, name, assignment.digest)) is not None:
        return Outcome(name, state.uid)
    settle = partial(
        recover, repository.core.database, repository.core.tiers.durable, repository.core.home
    )
    settle()  # the previous holder of the claim may have died
    source: list[str] = []
    with noted(repository, study, name):
        if task.ranks > 1:
            return launch(task.ranks, run_as_rank, task, name, look=check, settle=settle)
        done = train_variant(
            repository,
            assignment,
            task.train,
            stop=task.stop,
            group=SoloGroup(),
            check=check,
            fetch=lambda state: source.append(fetch(state)),
        )
        return Outcome(name, done.uid, source=source[-1] if source else None)


@contextmanager
def noted(repository: Repository, study: str, variant: str) -> Iterator[None]:
    """Note in the lineage that the variant is being trained, and what that cost, however it
    ends."""
    began = time.monotonic()
    with repository.core.database.write() as session:
        attachments.begin(session, study, variant)
    try:
        yield
    finally:
        with (
            suppress(Unavailable),
            repository.core.database.write() as session,
        ):
            # the database may be away; the variant's own end counts
            attachments.end(session, study, variant, time.monotonic() - began)


def _near(repository: Repository, share: Share, state: State) -> str:
    """Take a state from our own memory, from the explorer, or from disk; returns which. The restore
    itself reads the disk."""
    if records.is_in_memory(repository, state.uid):
        return CAPTURED
    if not share.urls:
        return "disk"
    try:
        sharing.clone(repository, state.uid, share.urls, share.token)
    except DatastatesError as exc:
        _logger.warning(
            "state %s did not come from %s, it is read from disk: %s",
            state.uid[:10],
            ", ".join(share.urls),
            exc,
        )
        return "disk"
    return "peer"


@contextmanager
def _claimed(
    repository: Repository,
    assignment: Assignment,
    check: Callable[[], None],
    *,
    rank: int | None = None,
) -> Iterator[None]:
    """Hold the claim of the variant, or of one of its ranks.

    Waits for a worker whose explorer died. That worker stops at its next epoch.

    :raises Conflict: that worker did not stop.
    """
    folder, name = (
        records.claims_folder(repository),
        records.claim_name(repository, assignment.study, assignment.variant.name, rank),
    )
    deadline = time.monotonic() + _PATIENCE_S
    while (
        claim := Claim.take(folder, name, f"process {os.getpid()} on {repository.node}")
    ) is None:
        check()
        if time.monotonic() > deadline:
            who = holder(folder, name) or "another process"
            raise Conflict(
                f"variant {assignment.variant.name!r} is still being trained by {who}, and did not"
                f" stop in {_PATIENCE_S:.0f} s: wait for it or end it, then explore again"
            )
        time.sleep(_LOOK_S / 5)
    with claim:
        yield


@contextmanager
def _watched(repository: Repository, explorer: Explorer) -> Iterator[Callable[[], None]]:
    """A check that raises once the explorer is gone. The check watches the explorer's claim where
    it is visible; elsewhere compare-and-swap protects the branch.
    """
    folder = records.claims_folder(repository)
    is_gone = threading.Event()

    def check() -> None:
        if is_gone.is_set():
            raise Cancelled(
                f"the explorer ({explorer.note}) has ended, and what was captured stays: explore"
                " again to resume"
            )

    def is_alive() -> bool:
        try:
            return holder(folder, explorer.claim) == explorer.note
        except OSError:  # an error of the file system does not mean that the explorer is gone
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


# --- Options that a variant changes in a restored optimizer, which has the old values ---


def reconfigure(
    job: Job, optimizer: Optimizer, scheduler: LRScheduler | None = None
) -> dict[str, Value]:
    """Set the options of ``optimizer`` that the variant itself changes (``lr``, ``weight_decay``,
    ``momentum``). Returns those that were set.

    Call it after ``job.track``, because the restored state holds the options of the parent. It does
    nothing if the variant is resumed, because the variant's own state has them.

    A group whose value differed from the first group's value keeps its value. Biases, for example,
    stay without weight decay. The learning rates of all groups are scaled alike. After a scheduler
    has begun, ``lr`` is the rate that it started from. The current rate is scaled, and continues
    along the same curve. Pass the scheduler, so that it is updated too.
    """
    if not job.is_new:
        return {}
    changed = {key: value for key, value in job.variant.config.items() if key in optimizer.defaults}
    for key, value in changed.items():
        if key == "lr" and isinstance(value, int | float):
            _scale_rates(optimizer.param_groups, float(value))
        else:
            first = optimizer.param_groups[0][key]
            for group in [group for group in optimizer.param_groups if group[key] == first]:
                group[key] = value
    if scheduler is not None and "lr" in changed:
        _follow(scheduler, optimizer.param_groups)
    return changed


def _follow(scheduler: LRScheduler, groups: Sequence[dict[str, Any]]) -> None:
    """Let a scheduler, and those that it is made of, start from the rates of the groups;
    ``ReduceLROnPlateau`` starts from none."""
    for part in getattr(scheduler, "_schedulers", ()):
        _follow(part, groups)
    if hasattr(scheduler, "base_lrs"):
        scheduler.base_lrs = [float(group.get("initial_lr", group["lr"])) for group in groups]
    scheduler._last_lr = [group["lr"] for group in groups]


def _scale_rates(groups: Sequence[dict[str, Any]], rate: float) -> None:
    before = float(groups[0].get("initial_lr", groups[0]["lr"]))
    for group in groups:
        for key in ("initial_lr", "lr"):
            if key in group:
                old = float(group[key])
                _set(group, key, rate if old == before or before == 0 else old * rate / before)


def _set(group: dict[str, Any], key: str, value: float) -> None:
    if isinstance(group[key], torch.Tensor):
        group[key].fill_(value)  # a captured graph reads it
    else:
        group[key] = value
