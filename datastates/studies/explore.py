"""``explore`` trains the variants of a plan; their results are states of the lineage.

Each variant is a task of an executor. With ``group``, the groups of a running job train the
variants instead: each group takes the next variant that no other group has.
"""

from __future__ import annotations

import logging
import os
import queue
import re
import secrets
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import BrokenExecutor, Executor, Future
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from datastates import values
from datastates.collective import AnyGroup, Group
from datastates.errors import Conflict, InvalidInput, Unavailable
from datastates.lineage.states import Revision, State
from datastates.lineage.write import attachments
from datastates.maintenance.environment import node_id
from datastates.system.at_exit import take_signals
from datastates.training.collective import Ranks, using
from datastates.values import Value

from . import plan as arguments
from . import records, sharing
from .executors import Pool, check_executor, check_pickles
from .limits import Gpus, Limits
from .plan import Plan, Variant
from .records import Claim, Outcome, failed, holder
from .results import (
    Display,
    Exploration,
    announce,
    display_for,
    prefix_epochs,
    read_study,
    say_alike,
    storage,
    work,
)
from .sharing import Reception
from .worker import Assignment, Explorer, Stop, Task, Train, noted, train_variant

if TYPE_CHECKING:
    from datastates.repository import Repository

_logger = logging.getLogger(__name__)
_AMONG_LOOK_S = 0.2
_NONE_NOW = "/"  # no variant has this name
_SHARED = "groups since "
_HEARD = re.compile(r"\w+: rank \d+ of \d+ could not ")
_EXPLORER_LOOK_S = 0.5
_GRACE_S = 3.0
_DECLINES = 10


@dataclass(frozen=True, slots=True)
class Study:
    """A plan that is trained in a repository under a name; ``config`` is the configuration that
    the variants' configurations change."""

    repo: Repository
    name: str
    plan: Plan
    config: Mapping[str, Value] | None

    def begin(self, start: str) -> tuple[State, Exploration]:
        """The state from which the study forks, tagged and durable, and the progress of its
        variants.

        The variants are recorded as planned.

        :raises Conflict: the study began from another state, or a variant was trained by another
            plan.
        """
        origin = records.tag_start(self.repo, self.name, start)  # from here on there is a study
        known = read_study(self.repo, self.name, self.plan, config=self.config)
        self._record({name for rung in self._rungs(known.done, known.errors) for name in rung})
        return origin, known

    def admit(self, done: Mapping[str, State], lost: Collection[str]) -> frozenset[str]:
        """The variants that may be trained now. With halving, these are in the current rung.

        A decision about the next rung is recorded before any of its variants begins. It stays, even
        if variants that failed would be better.
        """
        rungs = self._rungs(done, lost)
        if self.plan.halving is not None:
            self._record({name for rung in rungs for name in rung})
        return frozenset(rungs[-1])

    def _rungs(self, done: Mapping[str, State], lost: Collection[str]) -> list[list[str]]:
        with self.repo.core.reading() as session:
            recorded = attachments.planned(session, self.name)
        metrics = {name: state.metrics for name, state in done.items()}
        return self.plan.decided(recorded, metrics, lost)

    def _record(self, names: Collection[str]) -> None:
        planned = [
            attachments.PlannedVariant(one.name, one.parent, one.epochs, one.config)
            for one in self.plan.variants
            if one.name in names
        ]
        with self.repo.core.writing() as session:
            attachments.plan(session, self.name, planned)

    def assign(self, variant: Variant, parent: State) -> Assignment:
        """What the worker of a variant needs of its plan."""
        plan, name = self.plan, variant.name
        return Assignment(
            self.name,
            variant,
            plan.digest(name, self.config),
            plan.config(name, self.config),
            plan.rows(variant.train or ()),
            plan.rows(variant.validation),
            parent.uid,
            plan.size,
            plan.halving is not None and variant.parent is not None,
        )

    def report(self, errors: Mapping[str, str], reused: Collection[str]) -> Exploration:
        """The result of the study; suspicious results are logged."""
        report = read_study(
            self.repo, self.name, self.plan, config=self.config, errors=errors, reused=reused
        )
        for alike in report.alike:
            _logger.warning("study %s: %s", self.name, say_alike(alike))
        return replace(report, storage=storage(self.repo, self.name))


# --- Groups of a job that share the variants ---


def explore_among(
    study: Study, start: str, train: Train, group: Group, *, stop: Stop | None, retries: int
) -> Exploration:
    """Train variants of a study in this group until all are over, whichever group trained them; see
    ``explore``. Collective among its ranks.
    """
    ranks = Ranks(group)
    with ExitStack() as stack:
        since = ranks.first("begin the study", partial(_begin, stack, study, start), int)
        ours = _Ours(study, ranks, since)
        stack.callback(ours.release)
        reused = frozenset(ours.done())
        while name := ranks.first("choose a variant", ours.choose, str):
            if name != _NONE_NOW:
                ours.train(study.plan[name], train, stop, retries)
        return study.report(ours.errors(), reused)


def _begin(stack: ExitStack, study: Study, start: str) -> int:
    """Begin the study, or join the groups that have begun it.

    Returns when they began, in microseconds. One group holds the study's claim.

    :raises Conflict: an explorer of another kind holds the claim.
    """
    repo = study.repo
    folder, name = records.claims_folder(repo), records.claim_name(repo, study.name)
    with _turn(folder, f"{name}-begin"):
        since = time.time_ns() // 1000
        claim = Claim.take(folder, name, f"{_SHARED}{since}, process {os.getpid()} on {repo.node}")
        if claim is None:
            note = holder(folder, name) or ""
            if not note.startswith(_SHARED):
                raise Conflict(
                    f"study {study.name!r} is being explored by {note or 'another process'}: wait"
                    " for it, or end it"
                )
            since = int(note.removeprefix(_SHARED).partition(",")[0])
        stack.enter_context(claim or nullcontext())
        study.begin(start)
    return since


@contextmanager
def _turn(folder: Path, name: str) -> Iterator[None]:
    """Let groups do this one after the other; it takes each only a moment."""
    while (claim := Claim.take(folder, name, f"process {os.getpid()}")) is None:
        time.sleep(_AMONG_LOOK_S / 10)
    with claim:
        yield


@dataclass(slots=True)
class _Ours:
    """The part of a study that one group trains.

    Rank 0 alone calls ``choose``. All ranks call the other methods.
    """

    study: Study
    ranks: Ranks
    since: int
    claim: Claim | None = None

    def release(self) -> None:
        """Release the variant that this group holds, so that others can take it."""
        claim, self.claim = self.claim, None
        if claim is not None:
            claim.close()

    def done(self) -> dict[str, State]:
        """The variants that are finished."""
        study, refs = self.study, records.refs_of(self.study.repo)
        digests = {
            one.name: study.plan.digest(one.name, study.config) for one in study.plan.variants
        }
        found = {
            name: records.finished(study.repo, study.name, name, digest, refs)
            for name, digest in digests.items()
        }
        return {name: state for name, state in found.items() if state is not None}

    def errors(self) -> dict[str, str]:
        """Why variants failed since the first of the groups began."""
        with self.study.repo.core.reading() as session:
            return attachments.failures(session, self.study.name, self.since)

    def choose(self) -> str:
        """The next variant, which is now claimed.

        Empty when all variants are over. ``_NONE_NOW`` while other groups hold all remaining
        variants.
        """
        self.release()
        done, errors = self.done(), self.errors()
        lost: set[str] = set()
        is_over = True
        admitted = self._admit(done, errors)
        for variant in self.study.plan.variants:
            if variant.name in done or variant.name not in admitted:
                continue
            if variant.parent in lost or (variant.name in errors and self._is_lost(variant)):
                lost.add(variant.name)
                continue
            is_over = False
            if (variant.parent is None or variant.parent in done) and self._take(variant):
                return variant.name
        if not is_over:
            time.sleep(_AMONG_LOOK_S)
        return "" if is_over else _NONE_NOW

    def _admit(self, done: Mapping[str, State], errors: Collection[str]) -> Collection[str]:
        """The variants that may be trained now, by whichever group."""
        study, plan = self.study, self.study.plan
        if plan.halving is None:
            return {variant.name for variant in plan.variants}
        lost = {one.name for one in plan.variants if one.name in errors and self._is_lost(one)}
        name = records.claim_name(study.repo, study.name)
        with _turn(records.claims_folder(study.repo), f"{name}-rung"):
            return study.admit(done, lost)

    def _is_lost(self, variant: Variant) -> bool:
        """Whether a failed variant is given up: no group holds it, and its error is still
        recorded after that check."""
        folder, claim = self._claim_of(variant)
        return holder(folder, claim) is None and variant.name in self.errors()

    def _take(self, variant: Variant) -> bool:
        """Claim the variant; False if another group holds it, or it is over since the last look."""
        self.claim = Claim.take(
            *self._claim_of(variant), f"process {os.getpid()} on {self.study.repo.node}"
        )
        if self.claim is None:
            return False
        if variant.name in self.done() or variant.name in self.errors():
            self.release()
            return False
        return True

    def _claim_of(self, variant: Variant) -> tuple[Path, str]:
        repo = self.study.repo
        return records.claims_folder(repo), records.claim_name(repo, self.study.name, variant.name)

    def train(self, variant: Variant, train: Train, stop: Stop | None, retries: int) -> None:
        """Train the variant, again if it fails."""
        study, repo = self.study.name, self.study.repo
        start = (
            records.start_tag(study)
            if variant.parent is None
            else records.done_tag(study, variant.parent)
        )
        assignment = self.study.assign(variant, repo.state(start))
        for attempt in range(1, 2 + retries):
            error = None
            with noted(repo, study, variant.name) if self.ranks.is_first else nullcontext():
                if self.ranks.is_first:
                    _logger.info("study %s: %s begins, attempt %d", study, variant.name, attempt)
                try:
                    with using(self.ranks.group):
                        train_variant(repo, assignment, train, stop=stop, group=self.ranks.group)
                except Exception as exc:
                    # the user's function may raise anything: the variant failed
                    error = exc
                said = self.ranks.ended(
                    "train a variant", None if error is None else _text(variant.name, error)
                )
            if not said:
                return
            rank = min(said, key=lambda each: (_HEARD.match(said[each]) is not None, each))
            if self.ranks.is_first:
                why = (
                    f"rank {rank} of {self.ranks.size}: {said[rank]}"
                    if self.ranks.size > 1
                    else said[rank]
                )
                _logger.warning("variant %s of study %s failed: %s", variant.name, study, why)
                with repo.core.writing() as session:
                    attachments.fail(session, study, variant.name, why)


def _text(variant: str, error: Exception) -> str:
    outcome = failed(variant, error)
    return f"{outcome.error}\n\n{outcome.traceback}".rstrip()


# --- One explorer and an executor ---


@values.checked
def explore(
    repo: arguments.AnyRepository,
    start: Revision,
    plan: Plan,
    train: Train,
    executor: Executor | Callable[[], Executor] | None = None,
    *,
    study: str,
    stop: Stop | None = None,
    group: AnyGroup | None = None,
    config: arguments.Configuration | None = None,
    workers: values.Positive | None = None,
    gpus_per_variant: Gpus | None = None,
    timeout_s: values.Seconds | None = None,
    stall_s: values.Seconds | None = None,
    retries: values.Count = 1,
    threads: values.Positive = 1,
    ranks: values.Positive = 1,
    share: str | None = None,
    progress: bool = True,
) -> Exploration:
    """Train every variant of a plan, each on its own branch ``<study>/<variant>``.

    Call it again with the same arguments to continue a study that was interrupted.

        def train(job):
            model, optimizer = build()
            job.track(model=model, optimizer=optimizer)
            for _ in job.epochs():
                job.report(val_loss=train_step(next(iter(loader))))


        plan = grid({"lr": [0.1, 0.2]}, epochs=1)
        report = explore(repo, "main", plan, train, SerialExecutor(), study="rates")
        print(report.best("val_loss").variant)

    The configuration of ``repo`` decides what a worker keeps in memory, and what becomes durable
    when.

    :param repo: the repository that holds the variants' branches.
    :param start: the state from which the plan's first variants fork.
    :param plan: the plan to train.
    :param train: a function that gets a ``Job`` and trains one variant.
    :param executor: any ``concurrent.futures.Executor`` whose calls run in processes, or a function
        that makes one. The function is called again when the executor breaks. By default, as many
        processes as the machine has cores for, with ``threads`` each.
    :param study: the name of the study.
    :param config: the configuration that the variants' configurations change.
    :param workers: how many variants are trained at once, at most. By default, as many as the
        executor has workers for.
    :param gpus_per_variant: how many GPUs each variant gets for itself, such as 1 or 2; 0.5 lets
        two variants share a GPU. The variant sees only these (``CUDA_VISIBLE_DEVICES``), and waits
        until they are free. By default, variants see all GPUs of their worker.
    :param timeout_s: the longest time of an attempt at a variant. An attempt that takes longer is
        ended, and the next one resumes from the last durable state.
    :param stall_s: the longest time without a step or a report, from the beginning of the attempt.
        A variant that stalls is named in the log, ended, and tried again, on another machine if
        there is one. Steps are counted by ``run.steps``.
    :param retries: how often a variant that raises is tried again. After that, it is reported with
        its error, and its descendants are skipped.
    :param threads: torch's threads in each worker.
    :param ranks: how many processes train each variant together. The variant's worker starts them
        on its machine, as torchrun would, with torch.distributed initialised. If one fails or dies,
        the variant is tried again.
    :param group: trains variants in this process, which is a rank of this group. Every rank of a
        job calls ``explore`` with its own group. Each group takes the next variant that no other
        group has.
    :param stop: called after each epoch. The variant ends there if it returns True.
    :param share: a url such as ``ucx://127.0.0.1:0`` at which ``repo`` is served during the study.
        Workers then take starting states from its memory. With ``ranks``, the first rank takes them
        and passes them on.
    :param progress: whether the plan and its progress are shown.
    :raises Conflict: the study is being explored by another process, began from another state, or a
        variant was trained by another plan. Nothing was run.
    :raises InvalidInput: the executor, the train function or a name cannot be used.
    :raises KeyboardInterrupt: the study was interrupted. Its states stay, and the same call resumes
        it. After 3 s, worker processes that have not ended are killed.
    :raises SystemExit: the same, by SIGTERM or SIGHUP.
    """
    for variant in plan.variants:
        records.branch_of(study, variant.name)
        records.done_tag(study, variant.name)
    records.start_tag(study)
    if group is None:
        limits = Limits(gpus_per_variant, timeout_s, stall_s)
        _check_executor(executor, train, stop, is_sent=ranks > 1 or limits.is_any)
    else:
        others = {
            "executor": executor,
            "share": share,
            "ranks": None if ranks == 1 else ranks,
            "workers": workers,
            "gpus_per_variant": gpus_per_variant,
            "timeout_s": timeout_s,
            "stall_s": stall_s,
        }
        for name, given in others.items():
            if given is not None:
                raise InvalidInput(
                    f"{name} is for variants in other processes, and group trains them in this one:"
                    " give one of the two"
                )
    of = Study(repo, study, plan, config)
    if group is not None:
        return explore_among(of, values.revision(start), train, group, stop=stop, retries=retries)
    take_signals()
    with ExitStack() as stack:
        presence = stack.enter_context(closing(_Presence(repo, study)))
        reception = stack.enter_context(closing(Reception(repo, share)))
        most = workers or len(os.sched_getaffinity(0)) // (threads * ranks)
        most = max(1, min(len(plan), most))
        pool = stack.enter_context(Pool(executor, workers=most, is_limited=limits.is_any))
        origin, known = of.begin(values.revision(start))
        worker_config = replace(repo.config, on_step=None, trace=None)  # a trace is of one process

        def task(
            variant: Variant, parent: State, sources: Collection[str], avoid: Collection[str]
        ) -> Task:
            return Task(
                repo.location,
                worker_config,
                of.assign(variant, parent),
                train,
                stop,
                presence.explorer,
                reception.share,
                threads,
                ranks,
                limits,
                tuple(sources),
                frozenset(avoid),
            )

        if progress:
            announce(study, plan, work(plan, prefix_epochs=prefix_epochs(repo, origin.uid)))
        display = stack.enter_context(display_for(study, plan, progress=progress))
        run = _Run(
            repo,
            study,
            plan,
            origin,
            dict(known.done),
            pool,
            task,
            display,
            retries,
            presence.close,
            reception,
            workers or len(plan),
            of.admit,
        )
        run.until_done()
        return of.report(run.errors, run.reused)


@dataclass(slots=True)
class _Run:
    """One pass over a plan: which variants may begin, are under way, or have failed.

    All of it runs on the explorer's thread."""

    repo: Repository
    study: str
    plan: Plan
    origin: State
    done: dict[str, State]
    pool: Pool
    task: Callable[[Variant, State, Collection[str], Collection[str]], Task]
    display: Display
    retries: int
    leave: Callable[[], None]
    reception: Reception
    most: int
    admit: Callable[[Mapping[str, State], Collection[str]], frozenset[str]]
    admitted: frozenset[str] = field(init=False)
    reused: frozenset[str] = field(init=False)
    errors: dict[str, str] = field(default_factory=dict)
    _attempts: Counter[str] = field(default_factory=Counter)
    _holders: defaultdict[str, set[str]] = field(default_factory=partial(defaultdict, set))
    """By the uid of a state, the addresses of workers that have it."""
    _nodes: set[str] = field(default_factory=set)
    _ended_at: defaultdict[str, list[str]] = field(default_factory=partial(defaultdict, list))
    """By variant, the nodes that ended or declined it."""
    _at_work: dict[str, _Flight] = field(default_factory=dict)
    _ended: queue.SimpleQueue[tuple[str, Future[Outcome]]] = field(
        default_factory=queue.SimpleQueue
    )

    def __post_init__(self) -> None:
        self.reused = frozenset(self.done)
        self.admitted = self.admit(self.done, self.errors)

    def until_done(self) -> None:
        """Submit variants that may begin and take in those that ended, until nothing is left."""
        for name in self.reused:
            self.display.ended(name, "reused")
        try:
            while self._submit_ready() or self._at_work:
                with suppress(queue.Empty):
                    self._take_in(*self._ended.get(timeout=_EXPLORER_LOOK_S))
                self._look()
        except (KeyboardInterrupt, SystemExit):  # SIGTERM and SIGHUP raise the latter
            self._interrupt()
            raise

    def _submit_ready(self) -> bool:
        if self.plan.halving is not None and not self._at_work:
            self._next_rung(self.plan.halving.metric)
        ready = [variant for variant in self.plan.variants if self._may_begin(variant)]
        ready = ready[: max(0, self.most - len(self._at_work))]
        for variant in ready:
            self._submit(variant)
        return bool(ready)

    def _next_rung(self, metric: str) -> None:
        """Decide about the next rung if the current one is over."""
        before, self.admitted = self.admitted, self.admit(self.done, self.errors)
        if self.admitted == before:
            return
        if not self.admitted:
            _logger.warning(
                "study %s: no variant of the rung ended with a finite %s, so none continues",
                self.study,
                metric,
            )
        parents = before & self.done.keys()
        for variant in self.plan.variants:
            if variant.parent in parents and variant.name not in self.admitted:
                parents |= {variant.name}
                self.display.ended(variant.name, "dropped")

    def _may_begin(self, variant: Variant) -> bool:
        name = variant.name
        if name in self.done or name in self.errors or name in self._at_work:
            return False
        if name not in self.admitted:
            return False
        return variant.parent is None or variant.parent in self.done

    def _submit(self, variant: Variant) -> None:
        name = variant.name
        self._attempts[name] += 1
        parent = self.origin if variant.parent is None else self.done[variant.parent]
        task = self.task(variant, parent, self._holders[parent.uid], self._avoided(name))
        self._adopt(task.assignment, parent)
        flight = _Flight(parent, self._epochs_behind(name, parent), task)
        self.display.begun(name, self._attempts[name])
        try:
            future = self.pool.submit(task)
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
        self._nodes.add(outcome.node)
        if outcome.is_ended or outcome.is_declined:
            self._ended_at[name].append(outcome.node)
        if outcome.is_declined:
            self._attempts[name] -= 1
            return None
        if outcome.addresses is not None:
            self.reception.admit(outcome.node, outcome.addresses)
            if flight.task.share != self.reception.share:
                self._attempts[name] -= 1  # it could not begin, and can connect the next time
                return None
        if outcome.url is not None:
            try:
                self._take_over(outcome.url, flight, outcome)
            except Unavailable as exc:  # the worker was lost right after its report
                return self._failed(name, f"its result did not come: {exc}", "")
        if outcome.is_death:
            return self._died(name, flight, outcome.error or "")
        if outcome.uid is None:
            return self._failed(name, outcome.error or "it failed", outcome.traceback)
        self.done[name] = self.repo.state(outcome.uid)
        if self.plan.halving is not None:
            self.plan.halving.value(name, self.done[name].metrics)  # before more is trained
        self.display.reported(name, self.done[name])
        self.display.ended(name, "done")
        _logger.debug("variant %s began from %s", name, outcome.source)
        return None

    def _avoided(self, name: str) -> Collection[str]:
        """The nodes that leave a variant to others: it was ended there, other nodes are at work,
        and it was not declined too often."""
        ended = self._ended_at[name]
        return ended if len(ended) < _DECLINES and self._nodes.difference(ended) else ()

    def _take_over(self, url: str, flight: _Flight, outcome: Outcome) -> None:
        """Record the work of a worker without this disk; its result becomes durable here."""
        study, parent, share = self.study, flight.parent, flight.task.share
        with self.repo.core.writing() as session:
            attachments.begin(session, study, outcome.variant)
            attachments.end(session, study, outcome.variant, outcome.took_s)
        self._holders[parent.uid].add(url)
        if outcome.uid is None:
            return self._adopt(flight.task.assignment, parent)
        if not records.is_here(self.repo, outcome.uid):
            sharing.clone(self.repo, outcome.uid, [url], share.token)
        sharing.adopt(self.repo, flight.task.assignment, parent, result=outcome.uid)
        state = records.make_durable(self.repo.core, outcome.uid)
        records.tag_done(self.repo, study, outcome.variant, flight.task.assignment.digest, state)
        self._holders[outcome.uid].add(url)
        return None

    def _adopt(self, assignment: Assignment, parent: State) -> None:
        if self.reception.share.urls:
            sharing.adopt(self.repo, assignment, parent)

    def _failed(self, name: str, error: str, trace: str) -> None:
        attempts = self._attempts[name]
        said = f"{error}\n\n{trace}".rstrip() if trace else error
        with self.repo.core.writing() as session:
            attachments.fail(session, self.study, name, said)
        if attempts <= self.retries:
            self.display.ended(name, f"tried again: {error}")
            _logger.warning(
                "variant %s of study %s failed, it is tried again: %s", name, self.study, error
            )
            return
        self.errors[name] = said
        self.display.ended(name, "failed")
        _logger.error(
            "variant %s of study %s failed after %d attempts: %s", name, self.study, attempts, error
        )

    def _broke(self, name: str, flight: _Flight, error: BrokenExecutor) -> None:
        """Note that a worker, or another one of the same pool, died.

        A variant that made progress meanwhile is not to blame."""
        what = (
            "its worker process died (a crash, the kernel's out-of-memory killer, a script without"
            " `if __name__ == '__main__'`, or a train function that no module has, as in a"
            " notebook)"
        )
        if not self.pool.mend():
            self._attempts[name] = self.retries + 1
            return self._failed(
                name, f"{what}; the executor is broken: pass a function that makes one: {error}", ""
            )
        return self._died(name, flight, f"{what}: {error}")

    def _died(self, name: str, flight: _Flight, what: str) -> None:
        if self._epochs_behind(name, flight.parent) > flight.epochs:
            self._attempts[name] -= 1
        self._failed(name, what, "")

    def _epochs_behind(self, name: str, parent: State) -> int:
        return len(records.reports(self.repo, self.study, name, parent))

    def _look(self) -> None:
        """Show on the display what was reported since the last call."""
        if not self._at_work:
            return
        for flight in self._at_work.values():
            self._adopt(flight.task.assignment, flight.parent)
        refs = records.refs_of(self.repo)
        for name, flight in self._at_work.items():
            ref = refs.get(records.branch_of(self.study, name))
            if ref is None or ref.state == flight.shown:
                continue
            flight.shown = ref.state
            state = self.repo.state(ref.state)
            if (
                state.attributes.get(records.VARIANT) == name
                and state.attributes.get(records.STUDY) == self.study
            ):
                self.display.reported(name, state)

    def _interrupt(self) -> None:
        """Ask every worker to stop, and wait a while for what they then make durable."""
        _logger.warning(
            "study %s is interrupted: %d variants make their last state durable",
            self.study,
            len(self._at_work),
        )
        self.leave()
        self.pool.stop()
        for flight in self._at_work.values():
            if flight.future is not None:
                flight.future.cancel()
        deadline = time.monotonic() + _GRACE_S
        while self._at_work and time.monotonic() < deadline:
            try:
                name, _ = self._ended.get(timeout=_EXPLORER_LOOK_S)
            except queue.Empty:
                continue
            self._at_work.pop(name, None)
        _logger.warning(
            "study %s: %d of %d variants are done; the same call goes on from here",
            self.study,
            len(self.done),
            len(self.plan),
        )


@dataclass(slots=True)
class _Flight:
    """A variant at work: the state that it comes from, what it had reported when it was
    submitted, its task, and what the display has shown."""

    parent: State
    epochs: int
    task: Task
    shown: str | None = None
    future: Future[Outcome] | None = None


class _Presence:
    """The claim on a study.

    It keeps other explorers out, and shows workers that theirs is alive."""

    def __init__(self, repo: Repository, study: str) -> None:
        folder, name = records.claims_folder(repo), records.claim_name(repo, study)
        note = f"process {os.getpid()} on {repo.node}, {secrets.token_hex(6)}"
        claim = Claim.take(folder, name, note)
        if claim is None:
            raise Conflict(
                f"study {study!r} is being explored by {holder(folder, name) or 'another process'}:"
                " wait for it, or end it"
            )
        self._claim = claim
        self.explorer = Explorer(name, note, node_id())

    def close(self) -> None:
        """End the explorer: workers that are still training stop at their next epoch."""
        self._claim.close()


def _check_executor(executor: object, train: Train, stop: Stop | None, *, is_sent: bool) -> None:
    if executor is None or is_sent:
        check_pickles(train, stop)
    if isinstance(executor, Executor):
        check_executor(executor)
    elif executor is not None and not callable(executor):
        raise InvalidInput(
            f"the executor is {values.shown(executor)}: pass a concurrent.futures.Executor, or a"
            " function that makes one"
        )
