"""What a train function gets: its configuration, its data, the epochs that are left, and a tracker on its branch."""

from __future__ import annotations

import hashlib
import logging
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, SupportsFloat

import msgspec
import numpy as np
import torch

from datastates.capture.handle import Capture
from datastates.errors import InvalidInput
from datastates.lineage.states import State, Value
from datastates.tracking.configuration import configuration
from datastates.tracking.together import Together
from datastates.tracking.tracker import Tracker
from datastates.transport.clone.groups import Group, SoloGroup
from datastates.workflows.plans.plan import Variant

from . import record

if TYPE_CHECKING:
    from datastates.repository import Repository

__all__ = ["Assignment", "Job", "Stop"]

_logger = logging.getLogger(__name__)

Stop = Callable[[Sequence[State]], bool]
"""A study's stop rule: takes the states that a variant has reported so far, first epoch first, and says whether the variant ends here."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """One variant of a study, as its worker needs it; ``origin`` is the uid of the state from which it forks.

    ``samples_all`` is the number of samples in the plan's whole data.
    """

    study: str
    variant: Variant
    digest: str
    config: Mapping[str, Value]
    train: tuple[int, ...]
    validation: tuple[int, ...]
    origin: str
    samples_all: int = 0


class _Place(msgspec.Struct, frozen=True):
    """Where a variant stands: the uid of the state from which it goes on, and the uids of its reports."""

    at: str
    reported: list[str]


class Job:
    """One variant in the process that trains it. A train function calls ``track`` once, then loops over ``epochs``.

    If a group trains the variant, each of its ranks has a job, and all ranks call the same methods in the same order: all but ``report``
    are collective. Every method belongs to the training thread. ``check`` is called once an epoch and raises if the variant must not go
    on; ``fetch`` brings a state near before it is restored.
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
        self._ranks = Together(group or SoloGroup())
        self._branch = record.branch_of(assignment.study, assignment.variant.name)
        self._origin = repository.state(assignment.origin)
        place = self._ranks.first("find where the variant stands", self._stand, _Place)
        self._from = repository.state(place.at)
        self._history = [repository.state(uid) for uid in place.reported]
        self._done = len(self._history)
        self._captures: list[Capture] = []
        self._tracker: Tracker | None = None
        self._step = 0
        self._set = str(self._history[-1].attributes.get(record.SET, "")) if self._history else ""

    @property
    def variant(self) -> Variant:
        """The variant, as the plan has it."""
        return self._assignment.variant

    @property
    def group(self) -> Group:
        """The ranks that train the variant together: a group of one, unless ``explore`` was given ``ranks`` or a ``group``."""
        return self._ranks.group

    @property
    def config(self) -> Mapping[str, Value]:
        """The study's configuration with the changes of the variant and of its ancestors."""
        return self._assignment.config

    @property
    def train(self) -> tuple[int, ...]:
        """The indices to train on, ascending; empty if the plan leaves that to the train function."""
        return self._assignment.train

    @property
    def validation(self) -> tuple[int, ...]:
        """The indices that neither this variant nor an ancestor of it trains on, ascending."""
        return self._assignment.validation

    @property
    def is_new(self) -> bool:
        """Whether the variant stands where it forks. Apply then what its configuration changes in restored objects, other than options of
        optimizers.
        """
        return self._from.uid == self._origin.uid

    @property
    def is_over(self) -> bool:
        """Whether no epoch is left: all are done, or the study's stop rule ended the variant."""
        if self._done >= self.variant.epochs or self._stop is None or not self._done:
            return self._done >= self.variant.epochs
        return self._ranks.first("ask the stop rule", partial(self._is_stopped, self._stop), bool)

    def track(self, **objects: Any) -> Tracker:
        """Track on the variant's branch: restored from its newest state, or else from the state where it forks.

        A variant uses the options with which ``train`` built optimizers and schedulers, as ``hyperparameters="script"`` does, unless that
        argument is given. The variant's configuration is recorded. It has precedence over a ``config`` that is given here.

        ``objects`` and options are those of ``Repository.track``, without branch, start, resume and group. ``only`` and ``strict`` apply to
        the fork alone: what the variant itself captured is restored whole. A variant with its own ``seed`` is seeded at the fork. Each
        rank of a group gets another number that follows from the seed.

        :raises InvalidInput: it was called before, or an object does not fit.
        :raises Conflict: somebody else moved the branch.
        """
        if self._tracker is not None:
            raise InvalidInput(f"track was called twice for variant {self.variant.name!r}: track everything in one call")
        if taken := sorted({"branch", "start", "resume", "group"} & objects.keys()):
            raise InvalidInput(f"{', '.join(taken)}: the plan decides that; rename what you track, or leave it out")
        if not self.is_new:
            objects = {name: value for name, value in objects.items() if name not in ("only", "strict")}
        config = configuration(objects.pop("config", None)) | configuration(self.config)
        seed = self.variant.config.get("seed")
        if self.is_new and isinstance(seed, int):
            seed_everything(_seed_of(seed, self._ranks.rank))
            objects = {"rng": "script", **objects}
        self._fetch(self._from)
        objects = {"takeover": True, **objects}  # the claim on the variant decides who trains it
        self._tracker = self._repository.track(branch=self._branch, start=self._origin.uid, config=config, group=self.group, **objects)
        self._tracker.training.loops.begin_elsewhere(is_between=self.is_new or record.EPOCH in self._from.attributes)
        self._step = self._tracker.step
        if self.is_new:
            self._set = ", ".join(map(str, self._tracker.training.built.differences))
        return self._tracker

    def epochs(self) -> Iterator[int]:
        """The epochs that are left, from 0 in the variant; ends early if the study's stop rule says so.

        :raises InvalidInput: an epoch ended without a report.
        """
        while not self.is_over:
            with self._ranks.united("go on to the next epoch"):
                self._check()
            epoch = self._done
            if self._tracker is not None:
                self._tracker.training.settle()
            yield epoch
            if self._done == epoch:
                raise InvalidInput(f"epoch {epoch} of variant {self.variant.name!r} was not reported: end each with job.report(...)")

    def report(self, **metrics: SupportsFloat) -> Capture:
        """Report the end of an epoch: capture the state with its metrics. The last report is the variant's result.

        :raises InvalidInput: nothing is tracked yet, or more epochs are reported than the plan has.
        """
        name = self.variant.name
        if self._tracker is None:
            raise InvalidInput(f"variant {name!r} reported before it tracked anything: call job.track(model=model, …) first")
        if self._done >= self.variant.epochs:
            raise InvalidInput(f"variant {name!r} has {self.variant.epochs} epochs and reported one more: loop over job.epochs()")
        self._check()
        step = None if self._tracker.step == self._step else self._tracker.step  # run.steps has counted
        capture = self._tracker.capture(metrics=metrics, step=step, attributes=self._attributes(self._done + 1))
        self._tracker.fence()  # once an epoch: weights may be edited right after, for an evaluation for example
        self._step = self._tracker.step
        self._captures.append(capture)
        self._done += 1
        return capture

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
            state = record.make_durable(self._repository.core, self._history[-1].uid)
        else:
            raise InvalidInput(f"variant {self.variant.name!r} ended without a result: call job.report(...) at the end of each epoch")
        return self._repository.state(self._ranks.first("tag the result", lambda: self._tag(state), str))

    def _tag(self, state: State) -> str:
        assignment = self._assignment
        return record.tag_done(self._repository, assignment.study, assignment.variant.name, assignment.digest, state).uid

    def _stand(self) -> _Place:
        """Where the variant stands. One rank finds it, because the branch may have to be moved back."""
        assignment = self._assignment
        at = record.back_to_what_is_here(self._repository, self._branch, self._origin)
        history = record.reports(self._repository, assignment.study, assignment.variant.name, self._origin)
        if history:
            record.check_digest(history[-1], assignment.study, assignment.variant.name, assignment.digest)
        return _Place(at.uid, [state.uid for state in history])

    def _is_stopped(self, stop: Stop) -> bool:
        return bool(stop(self._reported()))

    def _reported(self) -> Sequence[State]:
        """Every report so far, once the last of them is recorded."""
        return (*self._history, *(capture.wait() for capture in self._captures))

    def _attributes(self, epoch: int) -> dict[str, Value]:
        assignment = self._assignment
        attributes: dict[str, Value] = {
            record.STUDY: assignment.study,
            record.VARIANT: assignment.variant.name,
            record.DIGEST: assignment.digest,
            record.EPOCH: epoch,
        }
        if self._set:
            attributes[record.SET] = self._set
        if assignment.variant.train is not None:
            attributes |= {record.SAMPLES: len(assignment.train), record.SAMPLES_ALL: assignment.samples_all}
        return attributes


def _seed_of(seed: int, rank: int) -> int:
    """The seed of a rank: the variant's own on rank 0, others on other ranks, so that no two ranks draw the same numbers."""
    return int(hashlib.sha256(f"{seed}/{rank}".encode()).hexdigest()[:15], 16) if rank else seed


def seed_everything(seed: int) -> None:
    """Seed Python's, NumPy's and torch's generators, including those of every CUDA device."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
