"""Tracking one training: what ``repo.track`` returns and a training loop calls."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from types import TracebackType
from typing import TYPE_CHECKING, Self, SupportsFloat, TypeVar

import msgspec

from datastates import values as checks
from datastates.capture.arriving import Arriving, is_late
from datastates.capture.handle import Capture, Progress
from datastates.capture.line import Staged
from datastates.capture.stage import CopyJob
from datastates.config import BackPressure
from datastates.content.tree import encode_values, flatten
from datastates.errors import DatastatesError, Unsupported
from datastates.lineage.states import State, StateFacts, Value, Why
from datastates.objects import dirty
from datastates.objects.restore import RestoreReport
from datastates.policy.contract import CadenceChoice
from datastates.system.interrupts import undisturbed

from .replicas import differing
from .training import Training

if TYPE_CHECKING:
    import torch

    from datastates.capture.replicas import Difference
    from datastates.transport.clone.groups import Group

    from .guard import Data, Guard

__all__ = ["Tracker"]

_logger = logging.getLogger(__name__)
Batch = TypeVar("Batch")


class Tracker:
    """Captures the tracked objects as states of one branch. Made by ``Repository.track``; use it as a context manager.

    All methods belong to the training thread. ``step`` counts optimizer steps: ``steps`` moves it on, or else each
    ``capture`` does; ``micro_step`` counts the batches of a step that is being accumulated (0: the step is complete).
    ``values`` are the plain values that were tracked; change them there and the next capture has them.
    """

    def __init__(self, training: Training, *, back_pressure: BackPressure, is_deferring: bool) -> None:
        self._training = training
        self._host = training.host
        self._back_pressure, self._is_deferring = back_pressure, is_deferring

    @property
    def training(self) -> Training:
        """What the rest of this package works with; nothing of it is promised to users."""
        return self._training

    @property
    def branch(self) -> str:
        """The branch that captures move."""
        return self._training.branch

    @property
    def head(self) -> State | None:
        """The newest state of the branch, once every capture so far is recorded; None before the first.

        A torn capture has no state: the head is then the state before it, and the log says so.
        """
        return self._training.head()

    @property
    def step(self) -> int:
        """How many steps of the optimizers were made; may be set."""
        return self._training.step

    @step.setter
    def step(self, step: int) -> None:
        self._training.step = step

    @property
    def micro_step(self) -> int:
        """How many batches of the step at hand were seen, 0 once it is complete; may be set."""
        return self._training.micro_step

    @micro_step.setter
    def micro_step(self, micro_step: int) -> None:
        self._training.micro_step = micro_step

    @property
    def values(self) -> dict[str, object]:
        """The plain values that were tracked."""
        return self._training.values

    @values.setter
    def values(self, found: dict[str, object]) -> None:
        self._training.values = found

    @property
    def attributes(self) -> dict[str, Value]:
        """Attributes that each state from now on has besides its own, such as the number of the job; add to them at any time.

        with repo.track(branch="in-a-job", model=model, optimizer=optimizer) as run:
            run.attributes["job"] = 4711
            run.capture(attributes={"lr": 0.01})  # has both
        """
        return self._training.attributes

    @property
    def config(self) -> dict[str, Value]:
        """The configuration that was given, by flat names such as ``optimizer.lr``."""
        return self._training.run.chosen

    @property
    def cadence(self) -> CadenceChoice:
        """How often states of this training become durable by themselves, and why; see ``CadenceChoice``."""
        return self._training.cadence

    @property
    def resumed_from(self) -> State | None:
        """The state that the training set out from; None where it began from nothing."""
        return self._training.resumed_from

    @property
    def report(self) -> RestoreReport | None:
        """What the newest restoring did; None where there was none."""
        return self._training.report

    @property
    def epoch(self) -> int:
        """The epoch that ``epochs`` is at, from 0; once it is over, how many were done."""
        return self._training.loops.epoch

    def epochs(self, count: int) -> Iterator[int]:
        """The numbers, from 0, of the epochs that are left of ``count``: a training that was stopped goes on in its epoch.

            with repo.track(branch="three-epochs", model=model, optimizer=optimizer) as run:
                for epoch in run.epochs(3):
                    for batch in run.steps(loader):
                        run.capture(metrics={"loss": train_step(batch)})

        Loop over ``steps`` in its body. A state that is captured inside that loop goes on with the next batch, then with what follows
        the loop in the body; a state that is captured after it counts the epoch as done, so capture last. Samplers that ask for it are
        told the epoch (``set_epoch``). Nothing is left of a training that ended, unless ``count`` is raised.

        :raises InvalidInput: ``count`` is no number of epochs.
        """
        return self._training.loops.count(checks.integer(count, "the number of epochs", least=0), is_resumed=self._training.is_resumed)

    @checks.takes(loader=checks.iterable, accumulate=checks.positive)
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
        self._training.is_driven = True
        try:
            for batch in self._training.loops.batches(loader, is_resumed=self._training.is_resumed):
                self._training.count_batch(accumulate)
                yield batch
        finally:
            self._training.is_driven = self._training.loops.is_counting  # what follows in an epoch counts no step

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
        ``skip``; while nothing can be written, older states that are not durable make room instead, or this capture is skipped. An argument
        that is refused changes nothing; if anything else is raised, the step has been counted: the training made it.

            with repo.track(branch="captured", model=model, optimizer=optimizer) as run:
                for batch in run.steps(loader):
                    capture = run.capture(metrics={"loss": train_step(batch)}, attributes={"lr": 0.01})

        :param metrics: numbers or 0-d tensors, by name; one on a device arrives with the state, and nobody waits for it here.
        :param step: the step to record; None: as counted.
        :param message: a text for people.
        :param attributes: plain values to search by.
        :raises InvalidInput: an argument cannot be recorded; names it.
        :raises DatastatesError: (or another error of the background) an earlier capture could not be recorded; this one was not taken.
        :raises Dirty: a clone into what is tracked did not end.
        :raises OverBudget: a state does not fit ``memory_bytes``; or, with ``on_failure="raise"``, memory is full and nothing can be
            written. It was not taken.
        :raises Unsupported: something tracked cannot be encoded; names it.
        :raises Closed: the tracker was closed, or this is a forked child.
        """
        with undisturbed():
            return self._capture(metrics, step, message, attributes)

    def _capture(
        self, metrics: Mapping[str, SupportsFloat] | None, step: int | None, message: str | None, attributes: Mapping[str, Value] | None
    ) -> Capture:
        began, training = time.monotonic(), self._training
        training.check_usable()
        noted = _Noted.of(metrics, attributes, message, training.attributes)
        self.micro_step = checks.integer(self.micro_step, "run.micro_step", least=0, most=2**31 - 1)
        self.step = self._step_of(step)
        line = training.line
        uid = line.uids.next(training.branch, self.step, self.micro_step)
        facts = StateFacts(
            uid=uid,
            parent=line.follow(uid),
            branch=training.branch,
            run=None,
            step=self.step,
            micro_step=self.micro_step,
            metrics=noted.metrics,
            attributes=noted.attributes,
            message=noted.message,
            created_at=datetime.now(UTC),
            world_size=line.size,
        )
        try:
            return self._take(facts, noted.late, began)
        except BaseException as exc:
            self._host.skip(line, facts, Why.FAILED, str(exc) or repr(exc))
            raise

    def _take(self, facts: StateFacts, late: Mapping[str, torch.Tensor], began: float) -> Capture:
        """The capture of a state with these facts, which ``began`` then."""
        training, uid = self._training, facts.uid
        training.raise_background_error()
        training.heed_edits()
        training.oversights.look()
        flat = flatten(training.tree(), training.known(), training.adapted.lasting)
        if dirty.is_any():
            dirty.check(leaf.tensor for leaf in flat.tensors)
        plan = training.plan_for(flat)
        plan.refuse_recording()
        arriving = Arriving.of(late, flat)
        progress = Progress(uid)
        host = self._host  # a handle does not keep the tracker
        handle = Capture(progress, self.step, want=host.want, hurry=host.hurry, trouble=lambda: host.trouble, missing=host.missing)
        slots = self._host.acquire(plan.slot_count, self._back_pressure, line=training.line)
        if slots is None:
            host.recorder.count("skipped")
            progress.skip(None if self._back_pressure is BackPressure.SKIP else self._host.trouble)
            host.skip(training.line, facts, Why.SKIPPED, progress.why_skipped or "there was no room (back_pressure='skip')")
            return handle
        try:
            staged = Staged(
                line=training.line,
                progress=progress,
                layout=plan.layout,
                values=msgspec.Raw(b"" if flat.has_numbers else encode_values(flat.values)),
                facts=facts,
                taken_at=began,
                held_s=training.held_s,
                arriving=arriving,
            )
            job = staged.job = CopyJob(plan, slots, on_done=lambda _: None, numbers=[] if arriving is None else arriving.tensors, uid=uid)
        except BaseException:
            self._host.release(slots)
            raise
        try:
            self._host.submit(staged, is_deferring=self._is_deferring and not training.line.edits.are_anywhere)
        finally:
            if not job.is_copied.is_set():
                training.pending.add(job)
        ended = time.monotonic()
        training.newest, training.held_s = handle.uid, ended - began
        host.recorder.span("capture", began, ended, uid, self.step)
        return handle

    @property
    def group(self) -> Group:
        """The ranks that track this training together: ``run.group.rank`` of ``run.group.size``; 0 of 1 where it is one process's."""
        return self._training.ranks.group

    def check_replicas(self) -> list[Difference]:
        """The differences between ranks that should hold the same: each has its ``path``, and the ``ranks`` that disagree with the others.

        Collective. It waits for all copies and devices, so it is too slow for every step. In a single process it finds nothing.

            with repo.track(branch="replicas", model=model, optimizer=optimizer) as run:
                assert not run.check_replicas()
        """
        self._training.check_usable()
        return differing(self._training)

    def fence(self) -> None:
        """Wait until no copy reads the tracked tensors any more; call it before changing them by hand.

        The host waits for what lies in its memory, and each device's current stream for what lies there. Call it before each replay of
        a step that was recorded (``torch.cuda.CUDAGraph``), on the stream of the replay: no hook runs then. Compiled steps need none.
        """
        self._training.fence()

    @checks.takes(rev=checks.revision, only=checks.patterns, strict=checks.flag)
    def restore(self, rev: str | State, *, only: str | Sequence[str] | None = None, strict: bool = True) -> RestoreReport:
        """Put a state back into the tracked objects and go on from there: the branch moves to it, with a reflog entry. Collective.

        :raises NotFound: no such revision.
        :raises Unavailable: its bytes are gone; names the nearest ancestor that has them.
        :raises Conflict: another process moved the branch meanwhile.
        """
        training, ranks = self._training, self._training.ranks
        with ranks.united("end its captures"):
            training.check_usable()
            training.fence()
            self._host.settle(training.line)
        uid = ranks.first("find the state", lambda: training.core.state(rev).uid, str)
        return training.go_back(training.core.state(uid), only=only, strict=strict)

    @checks.takes(
        spike=checks.optional(checks.number),
        patience=checks.count,
        window=checks.count,
        back=checks.count,
        data=checks.string,
        limit=checks.count,
        keep=checks.several(checks.string),
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
        :param keep: names of tracked objects that keep their present values, such as a count of batches.
        :raises InvalidInput: one of these means nothing, or there is no order of the data that could be changed.
        :raises Unsupported: the training has several ranks.
        """
        from .guard import Guard, Rules  # few guard

        self._training.check_usable()
        if self.group.size > 1:
            raise Unsupported(
                f"run.guard is for one process, and this training has {self.group.size}: its ranks would have to agree on every loss;"
                " reduce the loss over them yourself, and call run.restore on all of them"
            )
        return Guard(self, self._training, Rules(spike, patience, window, back, data, limit, keep))

    def close(self) -> None:
        """Take the hooks off and make the branch's head durable; idempotent.

        :raises DatastatesError: (or another error of the background) the last captures could not be recorded.
        """
        self._training.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self._training.close(error)
        except Exception as exc:  # it must not hide the error that ended the block
            if error is None:
                raise
            if not (isinstance(exc, DatastatesError) and exc.repeats(error)):
                _logger.exception("closing the tracker of branch %s failed", self.branch)

    def _step_of(self, given: int | None) -> int:
        """The step of the training: as the caller says, or one further unless ``steps`` counts."""
        if given is not None:
            return checks.step(given)
        return checks.step(checks.integer(self.step, "run.step") + (not self._training.is_driven), "run.step")


@dataclass(frozen=True, slots=True)
class _Noted:
    """The arguments of a capture, copied for the background: what cannot be recorded is refused here, in the caller's thread.

    Of ``metrics`` those that are ``late`` lie on a device, and are not known yet.
    """

    metrics: dict[str, float]
    late: dict[str, torch.Tensor]
    attributes: dict[str, Value]
    message: str | None

    @classmethod
    def of(cls, metrics: object, attributes: object, message: object, standing: dict[str, Value]) -> Self:
        said = None if message is None else checks.text(message, "message")
        own = checks.attributes(attributes)
        late = [is_late(value) for value in metrics.values()] if isinstance(metrics, Mapping) else []
        if not any(late):
            return cls(checks.metrics(metrics), {}, {**checks.attributes(standing), **own} if standing else own, said)
        assert isinstance(metrics, Mapping)
        known = checks.metrics({name: math.nan if is_late(value) else value for name, value in metrics.items()})
        arriving = {name: value for name, value in zip(known, metrics.values(), strict=True) if is_late(value)}
        return cls(known, arriving, {**checks.attributes(standing), **own} if standing else own, said)
