"""``run.guard`` notices that a training goes wrong, and takes it back to a state where it went
well.

    guard = run.guard()
    for batch in run.steps(loader):
        loss = train_step(batch)
        if guard.rewound(loss):
            continue
        run.capture(metrics={"loss": loss})

The loss of a step depends on the parameters that the previous step computed. A state is therefore
good only once the loss of the next step was normal. The guard never goes back to the state that is
newest at the time of trouble.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from statistics import median
from typing import TYPE_CHECKING, Literal

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Sampler

from datastates import values
from datastates.engine.device_copies import Snapshot, tensors_of
from datastates.errors import InvalidInput, NotFound, Unavailable
from datastates.lineage.query import names as names_query
from datastates.lineage.query import walk
from datastates.lineage.states import State
from datastates.lineage.write import refs
from datastates.state.adapters import Adapted, parts
from datastates.state.data_position import LOOPS
from datastates.state.sampler import PermutationSampler
from datastates.state.tree import flatten, join
from datastates.storage.reading import read_tree, specs_of
from datastates.storage.tier import Reader
from datastates.system.devices import Mark, devices
from datastates.system.logs import event

from .training import Training, without_later_groups

if TYPE_CHECKING:
    from .tracker import Tracker


def is_sound(reader: Reader, adapted: Adapted, near: Sequence[Snapshot] = ()) -> bool:
    """Whether in this state no module or optimizer of ``adapted`` holds a NaN, and no parameter or
    optimizer an infinity.

    A buffer may hold an infinity, as a mask does. Other tracked objects are not checked: NaN may
    mean something there. Tensors that the snapshots ``near`` hold are checked there.
    """
    optimizers = {path for path, found in parts(adapted.objects) if isinstance(found, Optimizer)}
    models = adapted.models()
    parameters = {
        join(path, name)
        for path, model in models
        for name, leaf in model.tree().items()
        if isinstance(leaf, nn.Parameter)
    }
    finite = optimizers | parameters
    watched = finite | {path for path, _ in models}
    specs = specs_of(reader)
    given = {
        index: tensor
        for index, tensor in tensors_of(near, specs).items()
        if _is_under(specs[index].path, watched)
    }
    tree = read_tree(
        reader,
        wants=lambda path: _is_under(path, watched),
        is_borrowing=True,
        given=given,
        specs=specs,
    )
    return all(
        _is_good(leaf.tensor, may_be_infinite=not _is_under(leaf.path, finite))
        for leaf in flatten(tree).tensors
    )


def _is_under(path: str, roots: set[str]) -> bool:
    """Whether ``path`` is one of ``roots`` or below one."""
    parts = path.split("/")
    return any("/".join(parts[:length]) in roots for length in range(1, len(parts) + 1))


def _is_good(tensor: torch.Tensor, *, may_be_infinite: bool) -> bool:
    if not tensor.is_floating_point() and not tensor.is_complex():
        return True
    if tensor.is_floating_point() and tensor.element_size() < 2:
        tensor = tensor.float()  # torch has no isfinite for eight bits
    return not bool(tensor.isnan().any()) if may_be_infinite else bool(tensor.isfinite().all())


# Deciding which losses show that a training has gone wrong: a pure function of the losses before.


_NORMAL = 1.4826
"""The deviation of a normal distribution, in median absolute deviations."""

_LEAST = 0.05
"""The least deviation that is assumed, as a part of the median: when a loss hardly moves, noise
must not count as a spike."""


class Spikes:
    """Judges each loss by the last ``window`` normal ones.

    A loss is too high if it is more than ``factor`` deviations above their median. The deviation is
    1.4826 times the median absolute deviation (Hampel's rule, which outliers among the losses do
    not move), and at least a twentieth of the median. Losses near zero scatter over orders of
    magnitude, so where all losses are positive, their logarithms must be too high as well. A single
    hard batch does no harm: only ``patience`` losses in a row make a spike. Fewer count as normal
    once the next loss is normal. Before a quarter of the window is known, no loss is too high. NaN
    and infinity are trouble at once; with ``factor`` None only those are looked for.

    Measured on 54,000 losses of 36 trainings on digits: both scales, 6 and 2 gave 1 false alarm,
    and found 48 of 48 updates that were made 1,000 times too large. One scale and one loss (the
    plain rule) gave 1,134 false alarms.
    """

    def __init__(self, factor: float | None, window: int, patience: int) -> None:
        if factor is not None and not factor > 0:
            raise InvalidInput(
                f"spike is {factor}: give the number of deviations above the median that a loss may"
                " have, or None"
            )
        if window < 4:
            raise InvalidInput(f"window is {window}: judge a loss by at least 4 before it")
        if patience < 1:
            raise InvalidInput(f"patience is {patience}: it counts losses in a row, from 1")
        self._factor, self._patience, self._least_known = factor, patience, -(-window // 4)
        self._normal: deque[float] = deque(maxlen=window)
        self._high: list[float] = []

    @property
    def is_calm(self) -> bool:
        return not self._high

    def problem(self, loss: float) -> str | None:
        """The problem, as the end of a sentence about the loss; None if there is none, or it is
        not certain yet."""
        if not math.isfinite(loss):
            self._high.clear()
            return f"is {loss}"
        if not self._is_high(loss):
            self._normal.extend((*self._high, loss))
            self._high.clear()
            return None
        self._high.append(loss)
        if len(self._high) < self._patience:
            return None
        self._high.clear()
        return f"is {loss:.6g}, and the median of those before is {median(self._normal):.6g}"

    def _is_high(self, loss: float) -> bool:
        known = list(self._normal)
        if self._factor is None or len(known) < self._least_known:
            return False
        middle, deviation = _spread(known)
        deviation = max(deviation, _LEAST * abs(middle))
        if deviation == 0 or loss <= middle + self._factor * deviation:
            return False
        if min(known) <= 0:
            return True
        middle, deviation = _spread([math.log(value) for value in known])
        return math.log(loss) > middle + self._factor * max(deviation, _LEAST)


def _spread(values: Sequence[float]) -> tuple[float, float]:
    middle = median(values)
    return middle, _NORMAL * median(abs(value - middle) for value in values)


_logger = logging.getLogger(__name__)

Data = Literal["skip", "reshuffle"]
"""What happens to the batches between a good state and the trouble after it."""

_FURTHER = 256
"""How many states beyond the wanted one are searched for one that is whole."""


@dataclass(frozen=True, slots=True)
class Rewind:
    """One rewind: the loss of ``step`` had a ``problem``, training resumed at ``good``, and
    the states in between are on ``branch``."""

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


class Guard:
    """Judges the loss of each step, and rewinds the training when one is bad. ``Tracker.guard``
    makes it.

    Ask it about each loss after the update and before the capture. A rewind takes these steps:

    - It captures the current state, with its loss, and makes a branch ``abandoned/<branch>/<step>``
      there. All states stay, and the head becomes durable, as the head of any branch does.
    - It restores the newest good state that has no NaN, and no infinity in parameters and
      optimizer: weights, optimizer, scheduler, scaler, random number generators, ``run.step``.
      Gradients are dropped (unless they are tracked).
    - It moves the branch back, with ``rewind`` in its reflog.

    With ``data="skip"`` loaders and samplers stay where they are: the batches since the good state
    are not seen again. Parameters that the script froze or unfroze since then stay so. Parameter
    groups that it added stay, as they were when it had just added them. With ``data="reshuffle"``
    all this goes back too, and the remaining epoch of each tracked ``PermutationSampler`` is
    shuffled again. Use ``run.steps`` then, which begins a new iteration of
    the loader, and let ``run.epochs`` or ``run.step`` end the training, since it may go back over
    the beginning of an epoch. The training will meet broken data again in that case.

    A loss on a device is read one call later, when the next step is under way: training does not
    wait for it, and a rewind comes one step later. Pass ``float(loss)`` to know at once. A guard
    watches one process; trainings of several ranks cannot have one. The guard's memory of the last
    losses starts afresh in each process.
    """

    def __init__(self, run: Tracker, training: Training, rules: Rules) -> None:
        data = rules.data
        if rules.back < 1 or rules.limit < 1:
            raise InvalidInput(f"back is {rules.back} and limit {rules.limit}: both count from 1")
        refs.check_name(_name(run.branch, 10**12, 100))
        self._run, self._training, self._rules = run, training, rules
        self._spikes = Spikes(rules.spike, rules.window, rules.patience)
        self._samplers = [
            found for _, found in parts(training.objects) if isinstance(found, PermutationSampler)
        ]
        self._kept = _kept(training, rules.keep, is_skipping=data == "skip")
        if data == "reshuffle" and not self._samplers:
            raise InvalidInput(
                "data='reshuffle' changes the order of a PermutationSampler, and none is tracked:"
                " track one, or choose data='skip'"
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
        """Whether the loss of this step was trouble and everything is back at a good state:
        ``continue`` then, and do not capture.

        Without a loss, it judges the losses that are still on their way from a device: call it so
        at the end of the training.

        :raises Unavailable: there have been ``limit`` rewinds in a row (everything is back once
            more; the message names the branches), or there is no good state to go back to.
        """
        if loss is not None:
            self._arriving.append(_Loss.of(loss, self._training))
        while self._arriving and (
            self._arriving[0].is_here or loss is None or len(self._arriving) > 1
        ):
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
        self._training.runner.snapshots.keep(self._training.branch, uid)

    def _rewind(self, step: int, loss: float, problem: str) -> None:
        """Rewind the training: abandon the current states, find a good one, restore it."""
        run = self._run
        branch = self._abandon(step, loss, problem)
        depth = self._rules.back << min(self._in_a_row, 30)
        good = self._find(depth)
        if good is None:
            raise Unavailable(
                f"the loss of step {step} on branch {run.branch!r} {problem}, and no good state"
                f" before it can be restored: the states so far are on {branch!r}. Start again"
                " with a lower learning rate, other data, or more memory_bytes"
            )
        self._put_back(good)
        self.rewinds.append(Rewind(step, loss, problem, good, branch))
        self._in_a_row, self._calm = self._in_a_row + 1, 0
        if self._in_a_row > self._rules.limit:
            branches = ", ".join(repr(each.branch) for each in self.rewinds[-self._in_a_row :])
            raise Unavailable(
                f"branch {run.branch!r} does not get over step {step}: its loss {problem}, after"
                f" {self._rules.limit} rewinds in a row; the branch and what it tracks are back at"
                f" step {good.step} ({good.uid[:10]}), what was tried is on {branches}: lower the"
                " learning rate, look at the data, or go further back (back=…)",
                nearest=good.uid,
            )
        _logger.warning(
            "the loss of step %d %s: back at step %d (%s), and the states since then are on %s"
            " (rewind %d of %d in a row)",
            step,
            problem,
            good.step,
            good.uid[:10],
            branch,
            self._in_a_row,
            self._rules.limit,
            extra=event(
                "guard.rewound",
                branch=self._training.branch,
                step=step,
                loss=loss,
                state=good.uid,
                abandoned=branch,
            ),
        )

    def _abandon(self, step: int, loss: float, problem: str) -> str:
        """The name of a new branch for the states that went wrong; its head is the current
        state."""
        run = self._run
        run.capture(metrics={"loss": loss}, message=f"abandoned: the loss of step {step} {problem}")
        head, core = _uid(run.head), self._training.core
        with core.reading() as session:
            names = (_name(run.branch, step, number) for number in count(1))
            branch = next(name for name in names if names_query.find(session, name) is None)
        with core.writing() as session:
            refs.branch(session, branch, head)
        return branch

    def _find(self, depth: int) -> State | None:
        """The ``depth``-th newest good state, or the next older one that is whole; the oldest
        one if there are fewer."""
        history = self._history(depth)
        in_order = [*history[depth - 1 :], *reversed(history[: depth - 1])]
        return next((state for state in in_order if self._is_sound(state)), None)

    def _history(self, depth: int) -> list[State]:
        """Good states, newest first, down to where the branch began."""
        with self._training.core.reading() as session:
            if self._began is None:
                self._began = next(
                    event.new
                    for event in names_query.reflog(session, self._run.branch)
                    if event.old is None
                )
            for uid in reversed(self._good):
                try:
                    states = walk.log(session, uid, limit=depth + _FURTHER)
                except NotFound:
                    continue  # its capture failed
                end = next(
                    (index for index, state in enumerate(states) if state.uid == self._began),
                    len(states),
                )
                return states[: end + 1]
        return []

    def _is_sound(self, state: State) -> bool:
        """Whether a state can be restored, and holds no number that would spoil the training."""
        adapted = self._training.adapted
        if not state.status.is_restorable or (state.micro_step and not adapted.has_gradients):
            return False
        snapshots = self._training.runner.snapshots
        try:
            with (
                self._training.core.open_payload(state) as reader,
                snapshots.reading(state.uid, state.digest) as near,
            ):
                try:
                    return is_sound(reader, adapted, near)
                except torch.OutOfMemoryError:
                    # the check takes some memory on the device of the tensors
                    return is_sound(reader, adapted)
        except Unavailable:
            return False  # dropped meanwhile, or in the memory of another process

    def _put_back(self, good: State) -> None:
        training = self._training
        go_back = partial(training.go_back, good, without=self._kept, reason="rewind")
        try:
            go_back()
        except InvalidInput:
            with without_later_groups(
                training, good, without=self._kept, are_kept=self._rules.data == "skip"
            ) as were_any:
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
                salt = sum(ref.name.startswith(prefix) for ref in names_query.refs(session))
            for sampler in self._samplers:
                sampler.reshuffle(salt)
            training.loops.restart()


@dataclass(frozen=True, slots=True)
class _Loss:
    """The loss of a step, perhaps on its way from a device, and the newest state before it."""

    step: int
    newest: str | None
    number: float | torch.Tensor
    is_copied: Mark | None = None

    @classmethod
    def of(cls, loss: float | torch.Tensor, training: Training) -> _Loss:
        read = cls(
            training.step + (not training.is_driven),
            training.newest,
            loss.detach() if isinstance(loss, torch.Tensor) else loss,
        )
        if (
            not isinstance(read.number, torch.Tensor)
            or not devices().is_on(read.number)
            or read.number.numel() != 1
        ):
            return replace(read, number=values.number(read.number, "loss"))
        here = devices().pinned((), torch.float32)
        here.copy_(read.number.float().reshape(()), non_blocking=True)
        return replace(
            read,
            number=here,
            is_copied=devices().mark(devices().current(devices().of(read.number))),
        )

    @property
    def is_here(self) -> bool:
        """Whether reading it never waits.

        It does not depend on whether a copy has arrived, because a repeated training must do
        the same."""
        return self.is_copied is None

    def value(self) -> float:
        """The number; waits until the device has computed it."""
        if self.is_copied is not None:
            # the host waits for the device, for a step that ended before the last one began
            self.is_copied.synchronize()
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
        raise InvalidInput(
            f"keep names {', '.join(unknown)}, and nothing of that name is tracked: there are"
            f" {', '.join(sorted(known))}"
        )
    kept = {*keep, LOOPS} if is_skipping else set(keep)
    for name, found in training.objects.items() if is_skipping else ():
        kinds = [isinstance(each, DataLoader | Sampler) for _, each in parts({name: found})]
        if any(kinds) and not all(kinds) and name not in kept:
            raise InvalidInput(
                f"{name!r} holds a loader and other objects, and only the loader is to keep its"
                " place: track the loader under a separate name"
            )
        if any(kinds):
            kept.add(name)
    return frozenset(kept)
