"""Tracking one training: what ``repo.track`` returns and a training loop calls."""

from __future__ import annotations

import logging
import os
import secrets
import threading
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Self, SupportsFloat, TypeVar

import msgspec

from datastates import values
from datastates.capture.fence import Fence, Pending
from datastates.capture.handle import Capture, Progress
from datastates.capture.line import Line, Staged
from datastates.capture.plan import Plan, compile_plan
from datastates.capture.shutdown import end_later
from datastates.capture.stage import CopyJob
from datastates.config import BackPressure
from datastates.content.tree import Flat, encode_values, flatten
from datastates.errors import Closed, DatastatesError, InvalidInput
from datastates.lineage.change import refs as lineage_refs
from datastates.lineage.states import State, StateFacts, Value
from datastates.objects import dirty
from datastates.objects.adapters import Adapted, parts
from datastates.objects.loops import LOOPS, Loops
from datastates.objects.oversights import Oversights
from datastates.objects.restore import RestoreReport
from datastates.policy.cadence import Cadence
from datastates.system.interrupts import undisturbed
from datastates.upkeep import loading

if TYPE_CHECKING:
    from datastates.capture.runner import Runner
    from datastates.repository import Repository

    from .guard import Data, Guard

__all__ = ["Tracker"]

_log = logging.getLogger("datastates")
Batch = TypeVar("Batch")


class Tracker:
    """Captures the tracked objects as states of one branch. Made by ``Repository.track``; use it as a context manager.

    All methods belong to the training thread. ``step`` counts optimizer steps: ``steps`` moves it on, or else each
    ``capture`` does; ``micro_step`` counts the batches of a step that is being accumulated (0: the step is complete).
    ``values`` are the plain values that were tracked; change them there and the next capture has them.
    """

    def __init__(
        self,
        repository: Repository,
        *,
        line: Line,
        objects: Mapping[str, object],
        values: dict[str, object],
        cadence: Cadence,
        back_pressure: BackPressure,
        gradients: bool,
        is_deferring: bool,
    ) -> None:
        self._repository, self._line = repository, line
        self._objects, self.values = dict(objects), values
        self._adapted = Adapted(self._objects, gradients=gradients)
        outlook = self._adapted.outlook()
        flatten({**outlook, **values})  # what no state can hold is refused here
        self._runner = repository.core.runner()
        self._back_pressure, self._is_deferring = back_pressure, is_deferring
        self._plan: Plan | None = None
        self._pending = Pending(self._runner.stager)
        self._newest: str | None = None
        self._is_driven = False
        self._is_resumed = False
        self._loops = Loops(partial(_found, self._objects))  # and not what knows this tracker: it would outlive its last name
        self._is_closed = self._is_ended = self._has_given_way = False
        self._pid = os.getpid()
        self.step = 0
        self.micro_step = 0
        self.resumed_from: State | None = None
        self.report: RestoreReport | None = None
        self._fence = Fence(self._pending.wait)
        self._fence.install(self._adapted.optimizers, self._adapted.modules)
        self._oversights = Oversights(self._adapted.objects, outlook, self._fence.has_stepped)
        self._runner.expect(line, self._adapted.size_bytes())
        self._runner.open_line(line, cadence)  # the last that may fail
        self._finalizer = weakref.finalize(self, _end_dropped, self._runner, line, self._fence, self._pid)
        self._finalizer.atexit = False  # the repository is closed then

    @property
    def branch(self) -> str:
        """The branch that captures move."""
        return self._line.branch

    @property
    def head(self) -> State | None:
        """The newest state of the branch, once every capture so far is recorded; None before the first.

        A capture that tore has no state: the head is the one before it then, and the log says so.
        """
        self._runner.flush()
        self._heed_edits()
        return None if self._line.tip is None else self._repository.state(self._line.tip[0])

    @property
    def epoch(self) -> int:
        """The epoch that ``epochs`` is at, from 0; once it is over, how many were done."""
        return self._loops.epoch

    def epochs(self, count: int) -> Iterator[int]:
        """The numbers of those of ``count`` epochs that are left, from 0: a training that was stopped goes on in the epoch in which it was.

            with repo.track(branch="three-epochs", model=model, optimizer=optimizer) as run:
                for epoch in run.epochs(3):
                    for batch in run.steps(loader):
                        run.capture(metrics={"loss": train_step(batch)})

        Loop over ``steps`` in its body. A state that is captured inside that loop goes on with the next batch, then with what follows
        the loop in the body; a state that is captured after it counts the epoch as done, so capture last. Samplers that ask for it are
        told the epoch (``set_epoch``). Nothing is left of a training that ended, unless ``count`` is raised.

        :raises InvalidInput: ``count`` is no number of epochs.
        """
        return self._loops.count(values.integer(count, "the number of epochs", least=0), is_resumed=self._is_resumed)

    @values.takes(loader=values.iterable, accumulate=values.positive)
    def steps(self, loader: Iterable[Batch], *, accumulate: int = 1) -> Iterator[Batch]:
        """The loader's batches; ``step`` moves on with every ``accumulate``-th of them, before it is handed out.

            with repo.track(branch="one-pass", model=model, optimizer=optimizer) as run:
                for batch in run.steps(loader):
                    run.capture(metrics={"loss": train_step(batch)})

        Capture inside the loop body, after the update: the state then says which batches were used, and a training that goes on from it
        begins with the next one. A loader need not be tracked for that: a plain DataLoader, with workers or without, is begun again with
        the random numbers that it had, and what was used is read and dropped. Tracked loaders and samplers find their place by
        themselves. Outside of ``epochs`` a state of the last batch goes on with another pass over the data.

        :raises InvalidInput: a tracked sampler in a loader with workers, which take from it ahead of the training.
        """
        self._is_driven = True
        try:
            for batch in self._loops.batches(loader, is_resumed=self._is_resumed):
                self.micro_step = (self.micro_step + 1) % accumulate
                if self.micro_step == 0:
                    self.step += 1
                yield batch
        finally:
            self._is_driven = self._loops.is_counting  # what follows in an epoch counts no step

    def capture(
        self,
        *,
        metrics: Mapping[str, SupportsFloat] | None = None,
        step: int | None = None,
        message: str | None = None,
        attributes: Mapping[str, Value] | None = None,
    ) -> Capture:
        """Take a state of everything tracked, as it is now; returns at once.

        What the tracked optimizers alone change is copied in the background while training goes on, and their next ``step``
        waits for it; everything else is copied before this returns. It blocks only when the arena has no room and ``back_pressure`` is not
        ``skip``. An argument that is refused changes nothing; if anything else is raised, the step has been counted: the training made it.

            with repo.track(branch="captured", model=model, optimizer=optimizer) as run:
                for batch in run.steps(loader):
                    capture = run.capture(metrics={"loss": train_step(batch)}, attributes={"lr": 0.01})

        :param metrics: numbers or 0-d tensors (reading one from a GPU waits for it), by name.
        :param step: the step to record; None: as counted.
        :param message: a text for people.
        :param attributes: plain values to search by.
        :raises InvalidInput: an argument cannot be recorded; names it.
        :raises DatastatesError: (or another error of the background) an earlier capture could not be recorded; this one was not taken.
        :raises Dirty: a clone into what is tracked did not end.
        :raises OverBudget: a state does not fit ``memory_bytes``; or memory is full and nothing can be written. It was not taken.
        :raises Unsupported: something tracked cannot be encoded; names it.
        :raises Closed: the tracker was closed, or this is a forked child.
        """
        with undisturbed():
            return self._capture(metrics, step, message, attributes)

    def _capture(
        self, metrics: Mapping[str, SupportsFloat] | None, step: int | None, message: str | None, attributes: Mapping[str, Value] | None
    ) -> Capture:
        self._check_usable()
        noted = _Noted.of(metrics, attributes, message)
        self.micro_step = values.integer(self.micro_step, "run.micro_step", least=0, most=2**31 - 1)
        self.step = self._step_of(step)
        self._raise_background_error()
        self._heed_edits()
        self._oversights.look()
        tree = {**self._adapted.tree(), **self.values}
        if self._loops.is_used:
            tree[LOOPS] = self._loops.state_dict()
        flat = flatten(tree, self._plan.flat if self._plan is not None else None, self._adapted.lasting)
        if dirty.is_any():
            dirty.check(leaf.tensor for leaf in flat.tensors)
        plan = self._plan_for(flat)
        progress = Progress(secrets.token_hex(12))
        handle = Capture(progress, self.step, want=self._runner.want, hurry=self._runner.hurry)
        slots = self._runner.acquire(plan.slot_count, self._back_pressure, line=self._line)
        if slots is None:
            progress.skip()
            return handle
        try:
            staged = Staged(
                line=self._line,
                progress=progress,
                layout=plan.layout,
                values=msgspec.Raw(encode_values(flat.values)),
                facts=StateFacts(
                    uid=handle.uid,
                    parent=None,
                    branch=self._line.branch,
                    run=None,
                    step=self.step,
                    micro_step=self.micro_step,
                    metrics=noted.metrics,
                    attributes=noted.attributes,
                    message=noted.message,
                    created_at=datetime.now(UTC),
                ),
            )
            job = staged.job = CopyJob(plan, slots, on_done=lambda _: None)
        except BaseException:
            self._runner.release(slots)
            raise
        try:
            self._runner.submit(staged, is_deferring=self._is_deferring and not self._line.edits.are_anywhere)
        finally:
            if not job.is_copied.is_set():
                self._pending.job = job
        self._newest = handle.uid
        return handle

    def fence(self) -> None:
        """Wait until no copy reads the tracked tensors any more; call it before changing them by hand."""
        self._pending.wait()

    @values.takes(rev=values.revision, only=values.patterns, strict=values.flag)
    def restore(self, rev: str | State, *, only: str | Sequence[str] | None = None, strict: bool = True) -> RestoreReport:
        """Put a state back into the tracked objects and go on from there: the branch moves to it, with a reflog entry.

        :raises NotFound: no such revision.
        :raises Unavailable: its bytes are gone; names the nearest ancestor that has them.
        :raises Conflict: another process moved the branch meanwhile.
        """
        self._check_usable()
        self.fence()
        self._runner.flush()
        return self._go_back(self._repository.state(rev), only=only, strict=strict)

    @values.takes(
        spike=values.optional(values.number),
        patience=values.count,
        window=values.count,
        back=values.count,
        data=values.string,
        limit=values.count,
        keep=values.several(values.string),
    )
    def guard(
        self,
        *,
        spike: float | None = 6.0,
        patience: int = 2,
        window: int = 64,
        back: int = 1,
        data: Data = "skip",
        limit: int = 5,
        keep: Sequence[str] = (),
    ) -> Guard:
        """Watch over the loss: on NaN, infinity or a spike the last good state comes back from memory. See ``Guard``.

            with repo.track(branch="guarded", model=model, optimizer=optimizer) as run:
                guard = run.guard()
                for batch in run.steps(loader):
                    loss = train_step(batch)
                    if guard.rewound(loss):
                        continue  # everything is back at a good state
                    run.capture(metrics={"loss": loss})

        A branch without a state gets its first one now.

        :param spike: how many deviations above the median of the window a loss must be (``policy.spikes`` has the rule); None: only NaN and
            infinity are trouble.
        :param patience: how many such losses in a row make a spike.
        :param window: how many normal losses the median is taken of; so many normal losses also end a row of rewinds.
        :param back: how many good states the first rewind goes back; each further one in a row goes back by twice as many.
        :param data: ``skip`` goes on with the batches that follow, ``reshuffle`` takes those since then again in another order.
        :param limit: how many rewinds in a row are made at most.
        :param keep: names of tracked objects that are not to go back, such as a count of batches.
        :raises InvalidInput: one of these means nothing, or there is no order of the data that could be changed.
        """
        from .guard import Guard  # few guard

        self._check_usable()
        return Guard(self, spike=spike, patience=patience, window=window, back=back, data=data, limit=limit, keep=keep)

    def close(self) -> None:
        """Take the hooks off and make the branch's head durable; idempotent.

        :raises DatastatesError: (or another error of the background) the last captures could not be recorded.
        """
        if self._is_ended or self._pid != os.getpid():
            return
        self._is_closed = True
        self._runner.close_line(self._line)
        self._fence.remove()
        self._repository.core.trainings.discard(self)  # a repository outlives the models of its trainings
        self._repository.core.drain()
        self._is_ended = True  # an interrupt before this: the next call goes on
        self._finalizer.detach()
        self._heed_edits()
        self._raise_background_error()

    def _give_way(self) -> None:
        """Another tracker is about to be made for this branch: its head becomes durable, and no more captures are taken here."""
        self._has_given_way = True
        try:
            self.close()
        except Exception as exc:
            _log.warning("branch %s: the last captures of its earlier tracker failed: %s", self.branch, exc)
        with undisturbed():
            _log.warning("branch %s is tracked anew in this process: the earlier tracker ends here and takes no more captures", self.branch)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self.close()
        except Exception as exc:
            if error is None:
                raise
            if not (isinstance(exc, DatastatesError) and exc.repeats(error)):
                _log.exception("closing the tracker of branch %s failed", self.branch)

    def _go_back(
        self,
        state: State,
        *,
        only: str | Sequence[str] | None = None,
        strict: bool = True,
        without: Collection[str] = (),
        reason: str = "move",
    ) -> RestoreReport:
        """Put a state back, but for the objects ``without``, and the branch with it; ``reason`` is for the reflog. Nothing is in flight."""
        with undisturbed():
            report = self._restore_objects(state, only=only, strict=strict, without=without)
            if self._line.tip is None:
                self._repository.branch(self._line.branch, state.uid)
            elif self._line.tip[0] != state.uid:
                with self._repository._changing(state) as (session, uid):
                    lineage_refs.move(session, self._line.branch, uid, expected=self._line.tip[0], reason=reason)
            self._line.tip = (state.uid, state.digest)
            self._newest = state.uid
        return report

    def _restore_objects(
        self, state: State, *, only: str | Sequence[str] | None, strict: bool, without: Collection[str] = ()
    ) -> RestoreReport:
        everything = {LOOPS: self._loops, **self._objects, **self.values}
        into = {name: found for name, found in everything.items() if name not in without}
        version = self._loops.version
        self.report = loading.restore(self._repository.core, state, into, only=only, strict=strict)
        for optimizer in self._adapted.optimizers:
            if optimizer.state:
                optimizer._opt_called = True  # type: ignore[attr-defined]  # else schedulers warn that it never stepped
        if LOOPS in into and only is None and self._loops.version == version:
            self._loops.load_state_dict({})
        self.values.update({key: value for key, value in self.report.values.items() if key in self.values})
        self.step, self.micro_step = state.step, state.micro_step
        self._plan = None
        return self.report

    def _step_of(self, given: int | None) -> int:
        """The step of the training: as the caller says, or one further unless ``steps`` counts."""
        if given is not None:
            return values.step(given)
        return values.step(values.integer(self.step, "run.step") + (not self._is_driven), "run.step")

    def _plan_for(self, flat: Flat) -> Plan:
        if self._plan is not None and self._plan.refresh(flat):
            return self._plan
        self.fence()
        self._fence.install(self._adapted.optimizers, self._adapted.modules)
        self._plan = compile_plan(
            flat,
            fenced={id(tensor) for tensor in self._adapted.fenced()},
            frozen={id(tensor) for tensor in self._adapted.frozen()},
            eager_paths=self._line.edits.paths,
        )
        return self._plan

    def _raise_background_error(self) -> None:
        error, self._line.error = self._line.error, None
        if error is not None:
            raise error

    def _heed_edits(self) -> None:
        """Copy at once from now on what was edited by hand while it was copied."""
        with undisturbed():
            if self._line.edits.learn(self.branch):
                self._plan = None

    def _check_usable(self) -> None:
        if self._pid != os.getpid():
            raise Closed("this tracker belongs to the parent process: open the repository and track again in the child")
        if self._has_given_way:
            raise Closed(
                f"this tracker gave way to another that was made for branch {self.branch} in this process: capture with that one, "
                "or track a branch of another name"
            )
        if self._is_closed:
            raise Closed(f"the tracker of branch {self.branch} was closed: call repo.track(...) again")
        if threading.current_thread().name.startswith("datastates-"):
            raise InvalidInput("captures are taken on the training thread, not from callbacks of the engine")


def _found(objects: Mapping[str, object]) -> list[object]:
    return [found for _, found in parts(objects)]


def _end_dropped(runner: Runner, line: Line, fence: Fence, pid: int) -> None:
    """Ends a tracker that was dropped without a close; runs wherever it was collected."""
    fence.is_over = True
    end_later(partial(runner.close_line, line), pid)


@dataclass(frozen=True, slots=True)
class _Noted:
    """The arguments of a capture, copied for the background: what cannot be recorded is refused here, in the caller's thread."""

    metrics: dict[str, float]
    attributes: dict[str, Value]
    message: str | None

    @classmethod
    def of(cls, metrics: object, attributes: object, message: object) -> Self:
        said = None if message is None else values.text(message, "message")
        return cls(values.metrics(metrics), values.attributes(attributes), said)
