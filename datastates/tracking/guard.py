"""``run.guard`` notices that a training goes wrong, and takes it back to a state where it went well.

    guard = run.guard()
    for batch in run.steps(loader):
        loss = train_step(batch)
        if guard.rewound(loss):
            continue
        run.capture(metrics={"loss": loss})

The loss of a step depends on the parameters that the step before left behind. So a state is good only once the loss of the step after
it was normal: the guard never goes back to the state that is newest at the time of trouble.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Literal, Protocol

import torch
from torch.utils.data import DataLoader, Sampler

from datastates import values
from datastates.capture.handle import Capture
from datastates.errors import InvalidInput, NotFound, Unavailable
from datastates.lineage.change import refs
from datastates.lineage.search import walk
from datastates.lineage.states import State
from datastates.objects.adapters import parts
from datastates.objects.loops import LOOPS
from datastates.objects.sampler import PermutationSampler
from datastates.policy.spikes import Spikes
from datastates.system.devices import Mark, devices
from datastates.system.logs import event

from .later_groups import without_later_groups
from .soundness import is_sound
from .training import Training

__all__ = ["Data", "Guard", "Rewind", "Rules"]

_logger = logging.getLogger(__name__)

Data = Literal["skip", "reshuffle"]
"""What happens to the batches between a good state and the trouble after it."""

_FURTHER = 256
"""How many states beyond the wanted one are searched for one that is whole."""


@dataclass(frozen=True, slots=True)
class Rewind:
    """One rewind: the loss of ``step`` had a ``problem``, training went on from ``good``, and the states in between are on ``branch``."""

    step: int
    loss: float
    problem: str
    good: State
    branch: str


@dataclass(frozen=True, slots=True)
class Rules:
    """When a guard intervenes, and what it does then; see ``Tracker.guard``."""

    spike: float | None
    patience: int
    window: int
    back: int
    data: Data
    limit: int
    keep: Sequence[str]


class Run(Protocol):
    """What a guard needs of the tracker that it watches."""

    @property
    def branch(self) -> str:
        """The branch that captures move."""

    @property
    def head(self) -> State | None:
        """The newest state of the branch."""

    @property
    def step(self) -> int:
        """The number of steps so far."""

    def capture(self, *, metrics: Mapping[str, float] | None = None, step: int | None = None, message: str | None = None) -> Capture:
        """Take a state."""


class Guard:
    """Judges the loss of each step, and rewinds the training when one is bad. ``Tracker.guard`` makes it.

    Ask it about each loss after the update and before the capture. A rewind takes these steps:

    - It captures the current state, with its loss, and makes a branch ``abandoned/<branch>/<step>`` there. So everything that was
      tried stays, and becomes durable as the head of any branch does.
    - It restores the newest good state that has no NaN, and no infinity in parameters and optimizer: weights, optimizer, scheduler,
      scaler, random number generators, ``run.step``. Gradients are dropped (unless they are tracked).
    - It moves the branch back, with ``rewind`` in its reflog.

    With ``data="skip"`` loaders and samplers stay where they are: the batches since the good state are not seen again, and parameters that
    the script froze or unfroze since then stay so. So do parameter groups that it added, as they were when it had just added them. With
    ``data="reshuffle"`` all this goes back too, and the rest of the epoch of each tracked ``PermutationSampler`` is shuffled anew. Use
    ``run.steps`` then, which begins a new iteration of the loader, and let ``run.epochs`` or ``run.step`` end the training, since it may go
    back over the beginning of an epoch. The training will meet broken data again in that case.

    A loss on a device is read one call later, when the next step is under way: training does not wait for it, and a rewind comes
    one step later. Pass ``float(loss)`` to know at once. A guard watches one process; trainings of several ranks cannot have one.
    The guard's memory of the last losses starts afresh in each process.
    """

    def __init__(self, run: Run, training: Training, rules: Rules) -> None:
        data = rules.data
        if data not in ("skip", "reshuffle"):
            raise InvalidInput(f"data is {data!r}: choose 'skip' or 'reshuffle'")
        if rules.back < 1 or rules.limit < 1:
            raise InvalidInput(f"back is {rules.back} and limit {rules.limit}: both count from 1")
        refs.check_name(_name(run.branch, 10**12, 100))
        self._run, self._training, self._rules = run, training, rules
        self._spikes = Spikes(rules.spike, rules.window, rules.patience)
        self._samplers = [found for _, found in parts(training.objects) if isinstance(found, PermutationSampler)]
        self._kept = _kept(training, rules.keep, is_skipping=data == "skip")
        if data == "reshuffle" and not self._samplers:
            raise InvalidInput(
                "data='reshuffle' changes the order of a PermutationSampler, and none is tracked: track one, or choose data='skip'"
            )
        self.rewinds: list[Rewind] = []
        self._began: str | None = None
        self._in_a_row = self._calm = 0
        self._arriving: deque[_Loss] = deque()
        if run.head is None or (training.report is not None and not training.report):
            run.capture(step=run.step, message="where the guard begins").wait()
        self._good: deque[str] = deque(maxlen=8)
        self._stand(_uid(run.head))
        training.newest = self._good[0]

    def rewound(self, loss: float | torch.Tensor | None = None) -> bool:
        """Whether the loss of this step was trouble and everything is back at a good state: ``continue`` then, and do not capture.

        Without a loss, it judges the losses that are still on their way from a device: call it so at the end of the training.

        :raises Unavailable: there have been ``limit`` rewinds in a row (everything is back once more; the message names the branches),
            or there is no good state to go back to.
        """
        if loss is not None:
            self._arriving.append(_Loss.of(loss, self._training))
        while self._arriving and (self._arriving[0].is_here or loss is None or len(self._arriving) > 1):
            read = self._arriving.popleft()
            value = read.value()
            problem = self._spikes.problem(value)
            if problem is not None:
                self._arriving.clear()
                self._rewind(read.step, value, problem)
                return True
            if self._spikes.is_calm:
                self._confirm(read.newest)
        return False

    def _confirm(self, uid: str | None) -> None:
        """Note a normal loss: the state that was the newest then is good."""
        if uid is not None and uid != self._good[-1]:
            self._stand(uid)
        self._calm += 1
        if self._calm >= self._rules.window:
            self._in_a_row = 0

    def _stand(self, uid: str) -> None:
        """Make this the newest good state, which is the first to go back to."""
        self._good.append(uid)
        self._training.host.snapshots.keep(self._training.branch, uid)

    def _rewind(self, step: int, loss: float, problem: str) -> None:
        """Rewind the training: abandon the current states, find a good one, restore it."""
        run = self._run
        branch = self._abandon(step, loss, problem)
        depth = self._rules.back << min(self._in_a_row, 30)
        good = self._find(depth)
        if good is None:
            raise Unavailable(
                f"the loss of step {step} on branch {run.branch!r} {problem}, and no good state before it can be restored:"
                f" what there is lies on {branch!r}; start again with a lower learning rate, other data, or more memory_bytes"
            )
        self._put_back(good)
        self.rewinds.append(Rewind(step, loss, problem, good, branch))
        self._in_a_row, self._calm = self._in_a_row + 1, 0
        if self._in_a_row > self._rules.limit:
            raise self._gave_up(self.rewinds[-self._in_a_row :])
        _logger.warning(
            "the loss of step %d %s: back at step %d (%s), what came since is on %s; rewind %d of %d in a row",
            step, problem, good.step, good.uid[:10], branch, self._in_a_row, self._rules.limit,
            extra=event("guard.rewound", branch=self._training.branch, step=step, loss=loss, state=good.uid, abandoned=branch),
        )  # fmt: skip

    def _abandon(self, step: int, loss: float, problem: str) -> str:
        """The name of a new branch for the states that went wrong; its head is the current state."""
        run = self._run
        run.capture(metrics={"loss": loss}, message=f"abandoned: the loss of step {step} {problem}")
        head, core = _uid(run.head), self._training.core
        with core.reading() as session:
            names = (_name(run.branch, step, number) for number in count(1))
            branch = next(name for name in names if refs.find(session, name) is None)
        with core.writing() as session:
            refs.branch(session, branch, head)
        return branch

    def _find(self, depth: int) -> State | None:
        """The ``depth``-th newest good state, or the next older one that is whole; the oldest one if there are fewer."""
        history = self._history(depth)
        in_order = [*history[depth - 1 :], *reversed(history[: depth - 1])]
        return next((state for state in in_order if self._is_sound(state)), None)

    def _history(self, depth: int) -> list[State]:
        """Good states, newest first, down to where the branch began."""
        with self._training.core.reading() as session:
            if self._began is None:
                self._began = next(event.new for event in refs.reflog(session, self._run.branch) if event.old is None)
            for uid in reversed(self._good):
                try:
                    states = walk.log(session, uid, limit=depth + _FURTHER)
                except NotFound:
                    continue  # its capture failed
                end = next((index for index, state in enumerate(states) if state.uid == self._began), len(states))
                return states[: end + 1]
        return []

    def _is_sound(self, state: State) -> bool:
        """Whether a state can be restored, and holds no number that would spoil the training."""
        adapted = self._training.adapted
        if not state.status.is_restorable or (state.micro_step and not adapted.has_gradients):
            return False
        snapshots = self._training.host.snapshots
        try:
            with self._training.core.open_payload(state) as reader, snapshots.reading(state.uid, state.digest) as near:
                try:
                    return is_sound(reader, adapted, near)
                except torch.OutOfMemoryError:  # the check takes some memory on the device of the tensors
                    return is_sound(reader, adapted)
        except Unavailable:
            return False  # dropped meanwhile, or in the memory of another process

    def _put_back(self, good: State) -> None:
        training = self._training
        go_back = partial(training.go_back, good, without=self._kept, reason="rewind")
        try:
            go_back()
        except InvalidInput:
            with without_later_groups(training, good, without=self._kept, are_kept=self._rules.data == "skip") as were_any:
                if not were_any:
                    raise
                go_back()
        if not training.adapted.has_gradients:
            for optimizer in training.adapted.optimizers:
                optimizer.zero_grad()
            for module in training.adapted.modules:
                module.zero_grad()
        self._good.clear()
        self._stand(good.uid)
        if self._rules.data == "reshuffle":
            prefix = _name(training.branch, 0, 1).removesuffix("0")
            with training.core.reading() as session:
                salt = sum(ref.name.startswith(prefix) for ref in refs.refs(session))
            for sampler in self._samplers:
                sampler.reshuffle(salt)
            training.loops.send_back()

    def _gave_up(self, rewinds: Sequence[Rewind]) -> Unavailable:
        last = rewinds[-1]
        branches = ", ".join(repr(rewind.branch) for rewind in rewinds)
        return Unavailable(
            f"branch {self._run.branch!r} does not get over step {last.step}: its loss {last.problem}, after {self._rules.limit} rewinds"
            f" in a row; the branch and what it tracks are back at step {last.good.step} ({last.good.uid[:10]}), what was tried is on"
            f" {branches}:"
            " lower the learning rate, look at the data, or go further back (back=…)",
            nearest=last.good.uid,
        )


@dataclass(frozen=True, slots=True)
class _Loss:
    """The loss of a step, perhaps on its way from a device, and the newest state before it."""

    step: int
    newest: str | None
    number: float | torch.Tensor
    is_copied: Mark | None = None

    @classmethod
    def of(cls, loss: float | torch.Tensor, training: Training) -> _Loss:
        read = cls(training.step + (not training.is_driven), training.newest, loss.detach() if isinstance(loss, torch.Tensor) else loss)
        if not isinstance(read.number, torch.Tensor) or not devices().is_on(read.number) or read.number.numel() != 1:
            return replace(read, number=values.number(read.number, "loss"))
        host = devices().pinned((), torch.float32)
        host.copy_(read.number.float().reshape(()), non_blocking=True)
        return replace(read, number=host, is_copied=devices().mark(devices().current(devices().of(read.number))))

    @property
    def is_here(self) -> bool:
        """Whether reading it never waits. It does not tell whether a copy has arrived: a training that is repeated must do the same."""
        return self.is_copied is None

    def value(self) -> float:
        """The number; waits until the device has computed it."""
        if self.is_copied is not None:
            self.is_copied.synchronize()  # the host waits for the device, for a step that ended before the last one began
        return float(self.number)


def _name(branch: str, step: int, number: int) -> str:
    return f"abandoned/{branch}/{step}" + (f".{number}" if number > 1 else "")


def _uid(state: State | None) -> str:
    assert state is not None
    return state.uid


def _kept(training: Training, keep: Iterable[str], *, is_skipping: bool) -> frozenset[str]:
    """The names of the objects that a rewind does not restore."""
    known = {**training.objects, **training.values}
    if unknown := sorted(set(keep) - set(known)):
        raise InvalidInput(f"keep names {', '.join(unknown)}, and nothing of that name is tracked: there are {', '.join(sorted(known))}")
    kept = {*keep, LOOPS} if is_skipping else set(keep)
    for name, found in training.objects.items() if is_skipping else ():
        kinds = [isinstance(each, DataLoader | Sampler) for _, each in parts({name: found})]
        if any(kinds) and not all(kinds) and name not in kept:
            raise InvalidInput(
                f"{name!r} holds a loader among other things, and only the loader is to go on: track it under a name of its own"
            )
        if any(kinds):
            kept.add(name)
    return frozenset(kept)
