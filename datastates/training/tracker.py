"""The tracker of one training: ``repo.track`` returns it, and the training loop calls it."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, SupportsFloat, TypeVar

import msgspec
import torch

from datastates import values as checks
from datastates.config import BackPressure
from datastates.engine.copy import CopyJob
from datastates.engine.handle import Capture, LateNumbers, Progress, StagedCapture, is_late
from datastates.engine.plan import Copy, Difference, copies_of, differences
from datastates.errors import DatastatesError, InvalidInput, Unsupported
from datastates.lineage.states import Revision, State, StateFacts, Why
from datastates.policy.contract import CadenceChoice
from datastates.state import in_place
from datastates.state.encoding import encode_values
from datastates.state.per_rank import mark_per_rank
from datastates.state.report import RestoreReport
from datastates.state.tree import flatten
from datastates.system.interrupts import undisturbed
from datastates.system.logs import reason_of
from datastates.thumbnails import files_to_capture
from datastates.values import Value

from .training import Training

if TYPE_CHECKING:
    from datastates.collective import Group

    from .guard import Guard

_BATCH = 2_000
"""The number of digests, with their names, that go into one exchange."""

_SHOWN = 10


def check_replicas(training: Training) -> None:
    """Raise unless everything that should be equal on all ranks is equal. Collective.

    :raises InvalidInput: it is not; names what differs, with the same message on every rank.
    """
    found = differing(training)
    if found:
        shown = [f"{each.path} (rank {', '.join(map(str, each.ranks))})" for each in found[:_SHOWN]]
        more = f", and {len(found) - len(shown)} more" if len(found) > len(shown) else ""
        raise InvalidInput(
            f"branch {training.branch!r}: a state has one value of what all ranks hold, and"
            f" {', '.join(shown)}{more} differ. Make them equal, name what is each rank's own in"
            " own=…, or pass check=None. DistributedDataParallel makes a model equal when it wraps"
            " it, so track the model after that"
        )


def differing(training: Training) -> list[Difference]:
    """The differences between ranks that should hold the same, by path.

    Collective; it waits for copies and devices."""
    ranks = training.ranks
    if ranks.size == 1:
        return []
    with ranks.synchronized("look at what it holds"):
        training.fence()
        apart = {id(tensor) for tensor in training.adapted.buffers()}
        tree = mark_per_rank(
            {**training.adapted.outlook(is_shared=True), **training.values}, training.own
        )
        copies = copies_of(
            flatten(tree).tensors, ranks.rank, ranks.size, apart=apart, members=ranks.group.members
        )
    everyone: list[list[Copy]] = [[] for _ in range(ranks.size)]
    count = max(int(said) for said in ranks.group.exchange(str(len(copies)).encode()))
    for start in range(0, count, _BATCH):
        for rank, said in enumerate(
            ranks.group.exchange(msgspec.msgpack.encode(copies[start : start + _BATCH]))
        ):
            everyone[rank] += msgspec.msgpack.decode(said, type=list[Copy])
    return differences(everyone)


_logger = logging.getLogger(__name__)
Batch = TypeVar("Batch")


class Tracker:
    """Captures the tracked objects as states of one branch. ``Repository.track`` makes it; use it
    as a context manager.

    Call all methods on the training thread. ``step`` counts optimizer steps: ``steps`` advances it,
    or else each ``capture`` does. ``micro_step`` counts the batches of a step that is being
    accumulated (0: the step is complete). ``values`` are the plain values that were tracked; change
    them there and the next capture has them.
    """

    def __init__(
        self, training: Training, *, back_pressure: BackPressure, is_deferring: bool
    ) -> None:
        self._training = training
        self._runner = training.runner
        self._back_pressure, self._is_deferring = back_pressure, is_deferring

    @property
    def training(self) -> Training:
        """The training, for other modules of this package. It is not public."""
        return self._training

    @property
    def branch(self) -> str:
        """The branch that captures move forward."""
        return self._training.branch

    @property
    def head(self) -> State | None:
        """The newest state of the branch, once every capture so far is recorded; None before the
        first.

        A torn capture has no state: the head is then the state before it, and this is logged. While
        the lineage cannot be written, the head is the newest state that is recorded.
        """
        return self._training.head()

    @property
    def step(self) -> int:
        """The number of optimizer steps so far; may be set."""
        return self._training.step

    @step.setter
    def step(self, step: int) -> None:
        self._training.step = step

    @property
    def micro_step(self) -> int:
        """The number of batches of the current step so far, 0 once it is complete; may be set."""
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
        """Attributes that every later state gets in addition to its own, such as the number of the
        job. Add to them at any time.

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
        """How often states of this training become durable automatically, and why; see
        ``CadenceChoice``."""
        return self._training.cadence

    @property
    def resumed_from(self) -> State | None:
        """The state from which the training started; None if it started from nothing."""
        return self._training.resumed_from

    @property
    def report(self) -> RestoreReport | None:
        """The report of the last restore; None if there was none."""
        return self._training.report

    @property
    def epoch(self) -> int:
        """The current epoch of ``epochs``, from 0; once ``epochs`` is over, the number of epochs
        done."""
        return self._training.loops.epoch

    @property
    def batch(self) -> int:
        """The number of the current batch of ``steps`` in its pass over the data, from 0, also if
        that pass was resumed in the middle.

        ``enumerate(run.steps(loader))`` counts from 0 again there. If several loaders are read in
        parallel, the pass that began last counts.
        """
        return self._training.loops.batch

    def epochs(self, count: int) -> Iterator[int]:
        """The numbers, from 0, of the remaining epochs out of ``count``. A training that was
        stopped resumes in its epoch.

            with repo.track(branch="three-epochs", model=model, optimizer=optimizer) as run:
                for epoch in run.epochs(3):
                    for batch in run.steps(loader):
                        run.capture(metrics={"loss": train_step(batch)})

        Loop over ``steps`` in the body. A state captured inside that inner loop resumes with the
        next batch, and then with what follows the inner loop in the body. A state captured after
        the inner loop counts the epoch as done, so capture there last of all. The epoch is passed
        to samplers that have ``set_epoch``. A training that has finished has no epochs left, unless
        ``count`` is raised.

        :raises InvalidInput: ``count`` is no number of epochs.
        """
        self._training.script_checks.note_temporaries(self._training.kept)
        return self._training.loops.count(
            checks.integer(count, "the number of epochs", least=0),
            is_resumed=self._training.is_resumed,
        )

    @checks.checked
    def steps(
        self,
        loader: Iterable[Batch],
        *,
        accumulate: checks.Positive = 1,
        limit: checks.Positive | None = None,
        verify: bool = True,
    ) -> Steps[Batch]:
        """The loader's batches; ``step`` advances with every ``accumulate``-th of them, before it
        is handed out.

            with repo.track(branch="one-pass", model=model, optimizer=optimizer) as run:
                for batch in run.steps(loader):
                    run.capture(metrics={"loss": train_step(batch)})

        Capture inside the loop body, after the update: the state then records which batches were
        used, and a training that resumes from it begins with the next one. The loader need not be
        tracked for that. A plain DataLoader, with workers or without, is started again with the
        random numbers that it had. The batches that were used are read and dropped. Tracked loaders
        and samplers restore their own place. Outside of ``epochs``, a training that
        resumes from the last batch's state makes another pass over the data. ``len`` is the number
        of batches in a whole pass. ``next`` and ``close`` work as for a generator.

        :param loader: what is iterated over: a loader, a sampler's batches, a list.
        :param accumulate: how many batches make a step.
        :param limit: the most batches of a pass, counted from its beginning also where a pass is
            resumed. ``islice`` and ``enumerate`` count from 0 again there; see ``enumerate`` of
            this class.
        :param verify: whether the last of the batches that are read again must be the one that was
            used.
        :raises InvalidInput: a sampler is tracked and its loader has workers, which read from the
            sampler ahead of the training; the loader is in a wrapper, such as a progress bar; or,
            with the first batch, the data come in another order than before.
        """
        return self._steps(loader, limit, accumulate, verify=verify, is_numbered=False)

    @checks.checked
    def enumerate(
        self,
        loader: Iterable[Batch],
        *,
        accumulate: checks.Positive = 1,
        limit: checks.Positive | None = None,
        verify: bool = True,
    ) -> Steps[tuple[int, Batch]]:
        """``steps``, where each batch comes with its number in its pass, from 0, also if that pass
        was resumed in the middle.

        with repo.track(branch="numbered", model=model, optimizer=optimizer) as run:
            for number, batch in run.enumerate(loader, limit=100):
                run.capture(metrics={"loss": train_step(batch)})

        :param loader: as for ``steps``.
        :param accumulate: as for ``steps``.
        :param limit: as for ``steps``.
        :param verify: as for ``steps``.
        """
        return self._steps(loader, limit, accumulate, verify=verify, is_numbered=True)

    def _steps(
        self,
        loader: Iterable[Any],
        limit: int | None,
        accumulate: int,
        *,
        verify: bool,
        is_numbered: bool,
    ) -> Steps[Any]:
        self._training.script_checks.note_temporaries(self._training.kept)
        batches = self._training.loops.batches(
            loader,
            is_resumed=self._training.is_resumed,
            is_outside=not self._training.loops.is_counting,
            limit=limit,
            is_checked=verify,
            is_numbered=is_numbered,
        )
        return Steps(loader, limit, self._counted(batches, loader, accumulate))

    def _counted(self, batches: Generator[Any], loader: object, accumulate: int) -> Generator[Any]:
        self._training.is_driven = True
        self._training.settle(loader)
        try:
            for batch in batches:
                self._training.halt.check()
                self._training.count_batch(accumulate)
                yield batch
        finally:
            # captures after this loop, in the same epoch, count no step
            self._training.is_driven = self._training.loops.is_counting

    def capture(
        self,
        *,
        metrics: Mapping[str, SupportsFloat] | None = None,
        step: int | None = None,
        message: str | None = None,
        attributes: Mapping[str, Value] | None = None,
        files: Mapping[str, object] | None = None,
    ) -> Capture:
        """Take a state of everything tracked, as it is now; returns at once.

        Tensors that only the tracked optimizers change are copied in the background, and the next
        ``step`` waits for that copy. Everything else is copied before this returns. It blocks only
        when memory is full and ``back_pressure`` is not ``skip``. While nothing can be written,
        older states that are not durable are dropped instead, or this capture is skipped. A refused
        argument changes nothing. If anything else is raised, the step has been counted, since the
        training made it.

            with repo.track(branch="captured", model=model, optimizer=optimizer) as run:
                for batch in run.steps(loader):
                    capture = run.capture(metrics={"loss": train_step(batch)}, attributes={"lr":
                    0.01})

        :param metrics: numbers or 0-d tensors, by name. A tensor on a device is read together with
            the state; this call does not wait for it.
        :param step: the step to record. None takes the counted one.
        :param message: a text for people.
        :param attributes: plain values to search by.
        :param files: pictures and small files by name, 4 MiB together: each is the path of a file,
            a figure of matplotlib, or bytes. They are read and drawn before this returns. They are
            part of the state and its digest. A restore leaves them out, ``repo.load`` has them
            under ``captured_files`` as bytes, and the page shows them. Of several ranks, rank 0's
            are shown.
        :raises InvalidInput: an argument cannot be recorded; names it.
        :raises DatastatesError: (or another error) an earlier capture could not be recorded in the
            background; this one was not taken.
        :raises Dirty: a clone into the tracked objects did not finish.
        :raises OverBudget: a state does not fit ``memory_bytes``; or, with ``on_failure="raise"``,
            memory is full and nothing can be written. The capture was not taken.
        :raises Unsupported: something tracked cannot be encoded; names it.
        :raises Closed: the tracker was closed, or this is a forked child.
        """
        halt = self._training.halt
        halt.check()
        drawn = files_to_capture(files)
        with undisturbed():
            capture = self._capture(metrics, step, message, attributes, drawn)
        if halt.count():
            capture.wait("durable")
            halt.end(self.step)
        return capture

    @property
    def should_stop(self) -> bool:
        """Whether somebody asked this training to halt, and its last state is durable: end the
        loop. A loop over ``steps`` and a further ``capture`` end the process by themselves, with
        exit status 0.

        with repo.track(branch="halting", model=model, optimizer=optimizer) as run:
            while not run.should_stop and run.step < 100:
                run.capture(metrics={"loss": train_step(next(batches))})
        """
        return self._training.halt.is_over

    def _capture(
        self,
        metrics: Mapping[str, SupportsFloat] | None,
        step: int | None,
        message: str | None,
        attributes: Mapping[str, Value] | None,
        files: Mapping[str, torch.Tensor],
    ) -> Capture:
        began, training = time.monotonic(), self._training
        training.check_usable()
        noted = _CaptureArguments.of(metrics, attributes, message, training.attributes)
        self.micro_step = checks.integer(self.micro_step, "run.micro_step", least=0, most=2**31 - 1)
        self.step = (
            checks.step(
                checks.integer(self.step, "run.step") + (not training.is_driven), "run.step"
            )  # ``steps`` counts if it drives
            if step is None
            else checks.step(step)
        )
        line = training.line
        # Ranks whose captures count the steps may drift apart unnoticed, but their optimizers step
        # together.
        updates = (
            training.updates()
            if line.part is not None and step is None and not training.is_driven
            else None
        )
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
            return self._take(facts, noted.late, files, began, updates)
        except BaseException as exc:
            self._runner.skip(line, facts, Why.FAILED, str(exc) or repr(exc))
            raise

    def _take(
        self,
        facts: StateFacts,
        late: Mapping[str, torch.Tensor],
        files: Mapping[str, torch.Tensor],
        began: float,
        updates: int | None,
    ) -> Capture:
        """The capture of a state with these facts and files; ``began`` is when it started.
        ``updates``: as in ``StagedCapture``."""
        training, uid = self._training, facts.uid
        training.raise_background_error()
        training.apply_edits()
        training.script_checks.look(training.kept)
        training.note_capture()
        progress = Progress(uid)
        runner = self._runner  # a handle must not keep the tracker alive
        handle = Capture(
            progress,
            self.step,
            want=runner.want,
            hurry=runner.rounds.hurry,
            trouble=lambda: runner.trouble,
            missing=runner.outbox.missing,
            check=runner.copies.check_goal,
        )
        try:
            flat = flatten(training.tree(files), training.known(), training.adapted.lasting)
            if in_place.is_any():
                in_place.check(leaf.tensor for leaf in flat.tensors)
            plan = training.plan_for(flat, has_files=bool(files))
            plan.refuse_recording()
            arriving = LateNumbers.of(late, flat)
        except torch.OutOfMemoryError as exc:
            self._skip(facts, progress, f"a device ran out of memory ({reason_of(exc)})")
            _logger.warning(
                "branch %s has no state of step %d: %s",
                training.branch,
                self.step,
                progress.why_skipped,
            )
            return handle
        slots = self._runner.slots.acquire(
            plan.layout.chunk_lengths, self._back_pressure, line=training.line
        )
        if slots is None:
            why = None if self._back_pressure is BackPressure.SKIP else runner.trouble
            self._skip(facts, progress, why)
            return handle
        try:
            staged = StagedCapture(
                line=training.line,
                progress=progress,
                layout=plan.layout,
                values=msgspec.Raw(b"" if flat.has_numbers else encode_values(flat.values)),
                facts=facts,
                taken_at=began,
                held_s=training.held_s,
                updates=updates,
                late_numbers=arriving,
            )
            job = staged.job = CopyJob(
                plan,
                slots,
                on_done=lambda _: None,
                numbers=[] if arriving is None else arriving.tensors,
                uid=uid,
            )
        except BaseException:
            self._runner.slots.release(slots)
            raise
        try:
            self._runner.submit(
                staged, is_deferring=self._is_deferring and not training.line.edits.are_anywhere
            )
        finally:
            if not job.is_copied.is_set():
                training.pending.add(job)
        ended = time.monotonic()
        training.newest, training.held_s = handle.uid, ended - began
        runner.recorder.span("capture", began, ended, uid, self.step)
        return handle

    def _skip(self, facts: StateFacts, progress: Progress, why: str | None) -> None:
        """Take no state. ``why`` is the reason, unless the back-pressure was ``skip``."""
        self._runner.recorder.count("skipped")
        progress.skip(why)
        why = why or "there was no room (back_pressure='skip')"
        self._runner.skip(self._training.line, facts, Why.SKIPPED, why)

    @property
    def group(self) -> Group:
        """The ranks that track this training together: ``run.group.rank`` of ``run.group.size``.
        A single process is rank 0 of 1."""
        return self._training.ranks.group

    def check_replicas(self) -> list[Difference]:
        """The differences between ranks that should hold the same: each has its ``path``, and the
        ``ranks`` that differ.

        Collective. It waits for all copies and devices, so it is too slow for every step. In a
        single process it finds no differences.

            with repo.track(branch="replicas", model=model, optimizer=optimizer) as run:
                assert not run.check_replicas()
        """
        self._training.check_usable()
        return differing(self._training)

    def fence(self) -> None:
        """Wait until no copy reads the tracked tensors any more; call it before changing them by
        hand.

        The host waits for copies of tensors in its memory, and each device's current stream waits
        for copies of tensors on that device. Call it before each replay of a recorded step
        (``torch.cuda.CUDAGraph``), on the stream of the replay, because no hook runs then. Compiled
        steps need no fence.
        """
        self._training.fence()

    @checks.checked
    def restore(
        self,
        rev: Revision,
        *,
        only: checks.Patterns | None = None,
        strict: bool = True,
        nearest: bool = False,
    ) -> RestoreReport:
        """Restore a state into the tracked objects and continue from it. The branch moves to it,
        with a reflog entry. Collective.

        :param rev: the state.
        :param only: as in ``Repository.restore``.
        :param strict: as in ``Repository.restore``.
        :param nearest: True goes back to the nearest state by steps, if the bytes of this one are
            gone. The log names it.

        :raises InvalidInput: the ranks give different states or other arguments.
        :raises NotFound: no such revision.
        :raises Unavailable: its bytes are gone; names the nearest states that have them.
        :raises Conflict: another process moved the branch meanwhile.
        """
        training, ranks = self._training, self._training.ranks
        with ranks.synchronized("end its captures"):
            training.check_usable()
            training.fence()
            self._runner.settle(training.line)
        return training.go_back(
            ranks.state(training.core, rev, nearest=nearest, only=only, strict=strict),
            only=only,
            strict=strict,
        )

    @checks.checked
    def guard(
        self,
        *,
        spike: float | None = 6.0,
        patience: checks.Count = 2,
        window: checks.Count = 64,
        back: checks.Count = 1,
        data: Literal["skip", "reshuffle"] = "skip",
        limit: checks.Count = 5,
        keep: Sequence[str] = (),
    ) -> Guard:
        """Watch the loss: on NaN, infinity or a spike, the last good state is restored from memory.
        See ``Guard``.

            with repo.track(branch="guarded", model=model, optimizer=optimizer) as run:
                guard = run.guard()
                for batch in run.steps(loader):
                    loss = train_step(batch)
                    if guard.rewound(loss):
                        continue  # everything is back at a good state
                    run.capture(metrics={"loss": loss})

        A branch without a state gets its first one now.

        :param spike: how many deviations above the median of the window a loss must be
            (``policy.spikes`` has the rule); None: only NaN and infinity are trouble.
        :param patience: how many such losses in a row make a spike.
        :param window: how many normal losses the median is taken over; as many normal losses also
            end a series of rewinds.
        :param back: how many good states the first rewind goes back; each further rewind in a
            series goes back twice as many.
        :param data: ``skip`` continues with the batches that follow; ``reshuffle`` repeats the
            batches since the good state in another order.
        :param limit: the most rewinds in a series.
        :param keep: names of tracked objects that keep their present values, such as a count of
            batches.
        :raises InvalidInput: an argument makes no sense, or the data have no order that could be
            changed.
        :raises Unsupported: the training has several ranks.
        """
        from .guard import Guard, Rules  # few trainings use it

        self._training.check_usable()
        if self.group.size > 1:
            raise Unsupported(
                f"run.guard is for one process, and this training has {self.group.size}, which"
                " would have to agree on every loss: reduce the loss over the ranks, and call"
                " run.restore on all of them"
            )
        return Guard(self, self._training, Rules(spike, patience, window, back, data, limit, keep))

    def close(self) -> None:
        """Remove the hooks and make the branch's head durable; idempotent.

        :raises DatastatesError: (or another error of the background) the last captures could not be
            recorded.
        """
        self._training.close()

    def __enter__(self) -> Self:
        self._training.script_checks.note_temporaries(self._training.kept)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self._training.close(error)
        except Exception as exc:  # it must not hide the error that ended the block
            if error is None:
                raise
            if not (isinstance(exc, DatastatesError) and exc.repeats(error)):
                _logger.exception("closing the tracker of branch %s failed", self.branch)


class Steps(Iterator[Batch]):
    """The batches of ``Tracker.steps``; ``len`` is their number in a whole pass, if the loader
    has a length."""

    def __init__(self, loader: Any, limit: int | None, batches: Generator[Batch]) -> None:
        self._loader, self._limit, self._batches = loader, limit, batches

    def __len__(self) -> int:
        length = len(self._loader)
        return length if self._limit is None else min(length, self._limit)

    def __next__(self) -> Batch:
        return next(self._batches)

    def close(self) -> None:
        """Leave the pass, as ``break`` does in a loop."""
        self._batches.close()


@dataclass(frozen=True, slots=True)
class _CaptureArguments:
    """The arguments of a capture, copied for the background. Values that cannot be recorded are
    refused here, on the caller's thread.

    The ``metrics`` that are also in ``late`` are on a device, and their values are not known yet.
    """

    metrics: dict[str, float]
    late: dict[str, torch.Tensor]
    attributes: dict[str, Value]
    message: str | None

    @classmethod
    def of(
        cls, metrics: object, attributes: object, message: object, standing: dict[str, Value]
    ) -> Self:
        said = None if message is None else checks.message(message)
        own = checks.attributes(attributes)
        late = (
            [is_late(value) for value in metrics.values()] if isinstance(metrics, Mapping) else []
        )
        if not any(late):
            return cls(
                checks.metrics(metrics),
                {},
                {**checks.attributes(standing), **own} if standing else own,
                said,
            )
        assert isinstance(metrics, Mapping)
        known = checks.metrics(
            {name: math.nan if is_late(value) else value for name, value in metrics.items()}
        )
        arriving = {
            name: value
            for name, value in zip(known, metrics.values(), strict=True)
            if is_late(value)
        }
        return cls(
            known, arriving, {**checks.attributes(standing), **own} if standing else own, said
        )
