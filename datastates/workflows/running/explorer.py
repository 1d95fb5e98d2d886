"""Running a plan: each variant is a task of an executor, and its results are states of the lineage."""

from __future__ import annotations

import logging
import os
import queue
import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import BrokenExecutor, Executor, Future
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypedDict, Unpack

from datastates import values
from datastates.capture.shutdown import take_signals
from datastates.errors import Conflict, InvalidInput
from datastates.lineage.change import studies
from datastates.lineage.states import State, Value
from datastates.opening.whereabouts import node_id
from datastates.transport.clone.groups import Group
from datastates.workflows.plans import arguments
from datastates.workflows.plans.plan import Plan, Variant, plan_of

from . import record
from .among import explore_among
from .claim import Claim, holder
from .describe import announce
from .job import Stop
from .outcome import Outcome
from .pool import Pool, check_executor, check_pickles
from .progress import Display, display_for
from .result import Exploration
from .study import Study
from .work import prefix_epochs, work
from .worker import Explorer, Share, Task, Train

if TYPE_CHECKING:
    from datastates.repository import Repository

__all__ = ["explore"]

_logger = logging.getLogger(__name__)

_LOOK_S = 0.5
_GRACE_S = 3.0


class RunOptions(TypedDict, total=False):
    """The other options of ``explore``; see there."""

    config: Mapping[str, Value] | None
    retries: int
    threads: int
    ranks: int
    share: str | None
    progress: bool


@values.takes(
    repo=arguments.repository,
    start=values.revision,
    plan=plan_of,
    study=values.string,
    config=values.optional(arguments.configuration),
    retries=values.integer,
    threads=values.integer,
    ranks=values.integer,
    stop=values.optional(values.callback),
    share=values.optional(values.string),
    progress=values.flag,
)
@values.unpacks(RunOptions, config=None, retries=1, threads=1, ranks=1, share=None, progress=True)
def explore(
    repo: Repository,
    start: str | State,
    plan: Plan,
    train: Train,
    executor: Executor | Callable[[], Executor] | None = None,
    *,
    study: str,
    stop: Stop | None = None,
    group: Group | None = None,
    **options: Unpack[RunOptions],
) -> Exploration:
    """Train every variant of a plan, each on its own branch ``<study>/<variant>``; the same call again goes on where this one stopped.

        def train(job):
            model, optimizer = build()
            job.track(model=model, optimizer=optimizer)
            for _ in job.epochs():
                job.report(val_loss=train_step(next(iter(loader))))


        report = explore(repo, "main", grid({"lr": [0.1, 0.2]}, epochs=1), train, SerialExecutor(), study="rates")
        print(report.best("val_loss").variant)

    The configuration of ``repo`` decides what a worker keeps in memory, and what becomes durable when.

    :param repo: the repository that holds the variants' branches.
    :param start: the state from which the plan's first variants fork.
    :param plan: the plan to train.
    :param train: a function that gets a ``Job`` and trains one variant.
    :param executor: any ``concurrent.futures.Executor`` whose calls run in processes, or a function that makes one and is called again
        when that one breaks; None: as many processes as there is room for, with ``threads`` each.
    :param study: the name of the study.
    :param config: the configuration that the variants' configurations change.
    :param retries: how often a variant that raises is tried again before it is reported with its error and its descendants are skipped.
    :param threads: torch's threads in each worker.
    :param ranks: how many processes train each variant together. The variant's worker starts them on its machine, as torchrun would, with
        torch.distributed initialised. If one fails or dies, the variant is tried again.
    :param group: this process is already a rank of this group, which trains variants in place: every rank of a job calls this, each with
        the group that it is in, and each group takes the next variant that no other has.
    :param stop: asked after each epoch whether a variant ends there.
    :param share: a url such as ``ucx://127.0.0.1:0`` at which ``repo`` is served meanwhile: workers then take starting states from its
        memory; with ``ranks`` the first rank does, and passes on what the others want of it too.
    :param progress: whether the plan and its progress are shown.
    :raises Conflict: the study is being explored by another process, began from another state, or a variant was trained by another plan;
        nothing was run.
    :raises InvalidInput: the executor, the train function or a name cannot be used; says why.
    :raises KeyboardInterrupt: the study was interrupted; its states stay, and the same call goes on. After 3 s, worker processes that have
        not ended are killed.
    :raises SystemExit: likewise, by SIGTERM or SIGHUP.
    """
    config, threads, share, ranks = options["config"], options["threads"], options["share"], options["ranks"]
    _check(plan, study, train, executor, stop, options, group)
    of = Study(repo, study, plan, config)
    if group is not None:
        return explore_among(of, values.revision(start), train, group, stop=stop, retries=options["retries"])
    take_signals()
    with ExitStack() as stack:
        presence = stack.enter_context(closing(_Presence(repo, study)))
        shared = None if share is None else _serve(repo, share, stack)
        most = len(os.sched_getaffinity(0)) // (threads * ranks)
        pool = stack.enter_context(Pool(executor, workers=max(1, min(len(plan), most))))
        origin, known = of.begin(values.revision(start))
        worker_config = replace(repo.config, on_step=None, trace=None)  # a trace is of one process

        def task(variant: Variant, parent: State) -> Task:
            return Task(repo.location, worker_config, of.assign(variant, parent), train, stop, presence.explorer, shared, threads, ranks)

        if options["progress"]:
            announce(study, plan, work(plan, prefix_epochs=prefix_epochs(repo, origin.uid)))
        display = stack.enter_context(display_for(study, plan, progress=options["progress"]))
        run = _Run(repo, study, plan, origin, dict(known.done), pool, task, display, options["retries"], presence.close)
        run.until_done()
        return of.report(run.errors, run.reused)


@dataclass(slots=True)
class _Run:
    """One pass over a plan: which variants may begin, are under way, or have failed. All of it runs on the explorer's thread."""

    repo: Repository
    study: str
    plan: Plan
    origin: State
    done: dict[str, State]
    pool: Pool
    task: Callable[[Variant, State], Task]
    display: Display
    retries: int
    leave: Callable[[], None]
    reused: frozenset[str] = field(init=False)
    errors: dict[str, str] = field(default_factory=dict)
    _attempts: Counter[str] = field(default_factory=Counter)
    _at_work: dict[str, _Flight] = field(default_factory=dict)
    _ended: queue.SimpleQueue[tuple[str, Future[Outcome]]] = field(default_factory=queue.SimpleQueue)

    def __post_init__(self) -> None:
        self.reused = frozenset(self.done)

    def until_done(self) -> None:
        """Submit variants that may begin and take in those that ended, until nothing is left."""
        for name in self.reused:
            self.display.ended(name, "reused")
        try:
            while self._submit_ready() or self._at_work:
                with suppress(queue.Empty):
                    self._take_in(*self._ended.get(timeout=_LOOK_S))
                self._look()
        except (KeyboardInterrupt, SystemExit):  # SIGTERM and SIGHUP raise the latter
            self._interrupt()
            raise

    def _submit_ready(self) -> bool:
        ready = [variant for variant in self.plan.variants if self._may_begin(variant)]
        for variant in ready:
            self._submit(variant)
        return bool(ready)

    def _may_begin(self, variant: Variant) -> bool:
        name = variant.name
        if name in self.done or name in self.errors or name in self._at_work:
            return False
        return variant.parent is None or variant.parent in self.done

    def _submit(self, variant: Variant) -> None:
        name = variant.name
        self._attempts[name] += 1
        parent = self.origin if variant.parent is None else self.done[variant.parent]
        flight = _Flight(parent, self._epochs_behind(name, parent))
        self.display.begun(name, self._attempts[name])
        try:
            future = self.pool.submit(self.task(variant, parent))
        except Exception as exc:  # an executor of the user's may raise anything: the variant failed
            future = Future()
            future.set_exception(exc)
        flight.future = future
        self._at_work[name] = flight
        future.add_done_callback(lambda ended: self._ended.put((name, ended)))

    def _take_in(self, name: str, future: Future[Outcome]) -> None:
        flight = self._at_work.pop(name)
        if future.cancelled():
            return self._failed(name, "it was cancelled", "")
        error = future.exception()
        if isinstance(error, InvalidInput):
            raise error  # not the variant's mistake: every other variant would end the same way
        if isinstance(error, BrokenExecutor):
            return self._broke(name, flight, error)
        if error is not None:
            return self._failed(name, f"{type(error).__name__}: {error}", "")
        outcome = future.result()
        if outcome.is_death:
            return self._died(name, flight, outcome.error or "")
        if outcome.uid is None:
            return self._failed(name, outcome.error or "it failed", outcome.traceback)
        self.done[name] = self.repo.state(outcome.uid)
        self.display.reported(name, self.done[name])
        self.display.ended(name, "done")
        _logger.debug("variant %s began from %s", name, outcome.source)
        return None

    def _failed(self, name: str, error: str, trace: str) -> None:
        attempts = self._attempts[name]
        said = f"{error}\n\n{trace}".rstrip() if trace else error
        with self.repo.core.writing() as session:
            studies.fail(session, self.study, name, said)
        if attempts <= self.retries:
            self.display.ended(name, f"tried again: {error}")
            _logger.warning("variant %s of study %s failed, it is tried again: %s", name, self.study, error)
            return
        self.errors[name] = said
        self.display.ended(name, "failed")
        _logger.error("variant %s of study %s failed after %d attempts: %s", name, self.study, attempts, error)

    def _broke(self, name: str, flight: _Flight, error: BrokenExecutor) -> None:
        """Note that a worker, or another one of the same pool, died. A variant that made progress meanwhile is not to blame."""
        what = (
            "its worker process died (a crash, the kernel's out-of-memory killer, a script without `if __name__ == '__main__'`,"
            " or a train function that no module has, as in a notebook)"
        )
        if not self.pool.mend():
            self._attempts[name] = self.retries + 1
            return self._failed(name, f"{what}; the executor is broken: pass a function that makes one: {error}", "")
        return self._died(name, flight, f"{what}: {error}")

    def _died(self, name: str, flight: _Flight, what: str) -> None:
        if self._epochs_behind(name, flight.parent) > flight.epochs:
            self._attempts[name] -= 1
        self._failed(name, what, "")

    def _epochs_behind(self, name: str, parent: State) -> int:
        return len(record.reports(self.repo, self.study, name, parent))

    def _look(self) -> None:
        """Tell the display what was reported since the last look."""
        if not self._at_work:
            return
        refs = record.refs_of(self.repo)
        for name, flight in self._at_work.items():
            ref = refs.get(record.branch_of(self.study, name))
            if ref is None or ref.state == flight.shown:
                continue
            flight.shown = ref.state
            state = self.repo.state(ref.state)
            if state.attributes.get(record.VARIANT) == name and state.attributes.get(record.STUDY) == self.study:
                self.display.reported(name, state)

    def _interrupt(self) -> None:
        """Ask every worker to stop, and wait a while for what they then make durable."""
        _logger.warning("study %s is interrupted: %d variants make their last state durable", self.study, len(self._at_work))
        self.leave()
        self.pool.stop()
        for flight in self._at_work.values():
            if flight.future is not None:
                flight.future.cancel()
        deadline = time.monotonic() + _GRACE_S
        while self._at_work and time.monotonic() < deadline:
            try:
                name, _ = self._ended.get(timeout=_LOOK_S)
            except queue.Empty:
                continue
            self._at_work.pop(name, None)
        _logger.warning("study %s: %d of %d variants are done; the same call goes on from here", self.study, len(self.done), len(self.plan))


@dataclass(slots=True)
class _Flight:
    """A variant at work: the state that it comes from, what it had reported when it was submitted, and what the display has shown."""

    parent: State
    epochs: int
    shown: str | None = None
    future: Future[Outcome] | None = None


class _Presence:
    """The claim on a study. It keeps other explorers out, and shows workers that theirs is alive."""

    def __init__(self, repo: Repository, study: str) -> None:
        folder, name = record.claims_folder(repo), record.claim_name(repo, study)
        note = f"process {os.getpid()} on {repo.node}, {secrets.token_hex(6)}"
        claim = Claim.take(folder, name, note)
        if claim is None:
            raise Conflict(f"study {study!r} is being explored by {holder(folder, name) or 'another process'}: wait for it, or end it")
        self._claim = claim
        self.explorer = Explorer(name, note, node_id())

    def close(self) -> None:
        """End the explorer: workers that are still training stop at their next epoch."""
        self._claim.close()


def _check(plan: Plan, study: str, train: Train, executor: object, stop: Stop | None, options: RunOptions, group: Group | None) -> None:
    for variant in plan.variants:
        record.branch_of(study, variant.name)
        record.done_tag(study, variant.name)
    record.start_tag(study)
    if options["retries"] < 0:
        raise InvalidInput(f"retries is {options['retries']}: it counts further attempts, from 0")
    if options["threads"] < 1:
        raise InvalidInput(f"threads is {options['threads']}: a worker needs at least 1")
    if options["ranks"] < 1:
        raise InvalidInput(f"ranks is {options['ranks']}: a variant needs at least 1")
    if not callable(train):
        raise InvalidInput(f"train is {values.shown(train)}: pass a function that takes a Job")
    if group is not None:
        return _check_group(group, executor, options)
    if executor is None or options["ranks"] > 1:
        check_pickles(train, stop)
    if executor is None:
        return None
    if isinstance(executor, Executor):
        check_executor(executor)
    elif not callable(executor):
        raise InvalidInput(f"the executor is {values.shown(executor)}: pass a concurrent.futures.Executor, or a function that makes one")
    return None


def _check_group(group: object, executor: object, options: RunOptions) -> None:
    if not isinstance(group, Group):
        raise InvalidInput(f"group is {values.shown(group)}: give a datastates.ranks.MPIGroup, TorchGroup or SoloGroup")
    for name, given in (
        ("executor", executor),
        ("share", options["share"]),
        ("ranks", None if options["ranks"] == 1 else options["ranks"]),
    ):
        if given is not None:
            raise InvalidInput(f"{name} is for variants in other processes, and group trains them in this one: give one of the two")


def _serve(repo: Repository, url: str, stack: ExitStack) -> Share:
    token = secrets.token_urlsafe(32)
    server = stack.enter_context(repo.serve(url, token=token))
    return Share(server.url, token)
