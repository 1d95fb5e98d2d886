"""The training behind a tracker: its objects, the branch that it moves, and where both stand."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from torch.optim import Optimizer

from datastates.capture.fence import Fence, Pending
from datastates.capture.line import Line
from datastates.capture.paces import facts_of
from datastates.capture.plan import CopyPlan, compile_plan
from datastates.capture.shutdown import end_later
from datastates.content.spread import is_spread
from datastates.content.tree import Flat, flatten
from datastates.errors import Closed, InvalidInput, NotFound, Unavailable, Unsupported
from datastates.lineage import endings
from datastates.lineage.change import refs as lineage_refs
from datastates.lineage.change import runs
from datastates.lineage.states import State, Value
from datastates.objects.adapters import GRADIENTS, Adapted, parts
from datastates.objects.loops import LOOPS, Loops
from datastates.objects.optimizers import with_inner
from datastates.objects.oversights import Oversights
from datastates.objects.owned import owned
from datastates.objects.report import RestoreReport
from datastates.opening.core import Core
from datastates.opening.environment import describe_training
from datastates.policy.contract import CadenceChoice, Policy
from datastates.policy.rules import Best
from datastates.system.interrupts import undisturbed
from datastates.system.notices import say
from datastates.transport.clone.groups import SoloGroup
from datastates.upkeep.loading import restore
from datastates.upkeep.retention import bests_at

from .companion import Companion
from .together import Together
from .trained import go_on_training, part_at

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

    from datastates.capture.host import Host

__all__ = ["Training"]

_logger = logging.getLogger(__name__)


class Training:
    """One training, from ``Repository.track`` to ``close``. Everything belongs to the training thread.

    ``run`` is its record in the lineage. ``newest`` is the uid of the newest capture, recorded or not, or of the state that was restored
    last. ``is_driven``: ``Tracker.steps`` counts the steps. ``completes``: where another library accumulates, it tells whether the current
    batch completes a step. ``is_resumed``: the branch existed before. ``held_s``: for how long the newest capture held the training up.
    ``ranks`` track it together. ``own`` names the objects that each rank has for itself, besides those that always are its own.
    """

    def __init__(
        self,
        core: Core,
        *,
        line: Line,
        objects: Mapping[str, object],
        values: dict[str, object],
        cadence: Policy,
        gradients: bool,
        config: Mapping[str, Value],
    ) -> None:
        self.core, self.line = core, line
        self.objects, self.values = dict(objects), values
        self.adapted = Adapted(self.objects, gradients=gradients)
        outlook = self.adapted.outlook()
        flatten({**outlook, **values})  # refuses what no state can hold
        self.host = core.host()
        self.run = line.run = describe_training(core.engage().run, line.branch, config)
        self.pending = Pending(self.host.fence)
        self.newest: str | None = None
        self.is_driven = self.is_resumed = False
        self.loops = Loops(partial(_found, self.objects))  # it must not refer to this training, or it would keep it alive
        self.step = self.micro_step = 0
        self.completes: Callable[[], bool] | None = None
        self.bests: tuple[Best, ...] = ()
        self.held_s: float | None = None
        self._told = line.choice = cadence.told()
        self.resumed_from: State | None = None
        self.attributes: dict[str, Value] = {}
        self._companions: list[Companion] = []
        self.report: RestoreReport | None = None
        self.ranks = Together(SoloGroup())
        self.own: frozenset[str] = frozenset()
        self._plan: CopyPlan | None = None
        self._is_closed = self._is_ended = self._has_given_way = False
        self._pid = os.getpid()
        self._fence = Fence(self.pending.wait)
        self._fence.install(self.adapted.optimizers, self.adapted.modules)
        self.oversights = Oversights(self.adapted.objects, outlook, self._fence.has_stepped, has_gradients=gradients)
        self.host.open_line(line, cadence, self.adapted.size_bytes())  # the last call here that may fail
        self._finalizer = weakref.finalize(self, _end_dropped, self.host, line, self._fence, self._pid)
        self._finalizer.atexit = False  # at exit the repository is closed anyway

    @property
    def branch(self) -> str:
        """The branch that captures move forward."""
        return self.line.branch

    def head(self) -> State | None:
        """See ``Tracker.head``."""
        self.host.settle(self.line)
        self.heed_edits()
        return None if self.line.tip is None else self.core.state(self.line.tip[0])

    @property
    def cadence(self) -> CadenceChoice:
        """See ``Tracker.cadence``."""
        return self.line.choice or self._told

    def fence(self) -> None:
        """Wait until no copy reads the tracked tensors any more."""
        self.pending.wait()

    def accompany(self, companion: Companion) -> None:
        """Tell a companion of each state from now on, and of the end."""
        self.check_usable()
        self._companions.append(companion)
        self.line.listeners.append(companion.recorded)

    def begin_run(self, session: Session) -> None:
        """Record the training as a run of its process."""
        runs.start(session, self.run)
        self.host.begin_run(self.run)

    def count_batch(self, accumulate: int) -> None:
        """Count a batch that is about to be handed out."""
        self.micro_step += 1
        if self.micro_step % accumulate == 0 if self.completes is None else self.completes():
            self.step, self.micro_step = self.step + 1, 0
        elif self.completes is None:
            self.micro_step %= accumulate

    # --- what a capture asks -------------------------------------------------------------------------------------------------

    def tree(self) -> dict[str, object]:
        """Everything that a capture holds, as it is now. With several ranks, the objects that are each rank's own are marked as such."""
        own = None if self.line.part is None else self.own
        tree = {**self.adapted.tree(is_shared=own is not None, is_waiting=False), **self.values}
        if self.loops.is_used:
            tree[LOOPS] = self.loops.state_dict()
        return tree if own is None else owned(tree, {*own, LOOPS})

    def known(self) -> Flat | None:
        """The leaves of the last capture, if the next one can be expected to have the same; else None."""
        return None if self._plan is None else self._plan.flat

    def plan_for(self, flat: Flat) -> CopyPlan:
        """The plan by which these leaves are copied; the last plan again if their layout is unchanged."""
        if self._plan is not None and self._plan.refresh(flat):
            return self._plan
        self.fence()
        self._fence.install(self.adapted.optimizers, self.adapted.modules)
        part = self.line.part
        if part is not None:
            _refuse_gradients(flat)
        self._plan = compile_plan(
            flat,
            rank=0 if part is None else part.rank,
            size=1 if part is None else part.size,
            apart=() if part is None else {id(tensor) for tensor in self.adapted.buffers()},
            fenced={id(tensor) for tensor in self.adapted.fenced()},
            frozen={id(tensor) for tensor in self.adapted.frozen()},
            eager_paths=self.line.edits.paths,
            members=self.ranks.group.members,
        )
        return self._plan

    def updates(self) -> int:
        """The most steps that a tracked optimizer has taken since ``track`` or ``go_back``, of those that are equal on all ranks."""
        shared = {name: found for name, found in self.adapted.objects.items() if name not in self.own}
        return max((self._fence.steps_of(found) for _, found in parts(shared) if isinstance(found, Optimizer)), default=0)

    def forget_layout(self) -> None:
        """Drop the plan of the last capture: the next capture is laid out anew."""
        self._plan = None

    def raise_background_error(self) -> None:
        """Raise, once, the error of an earlier capture, if there is one."""
        error, self.line.error = self.line.error, None
        if error is not None:
            raise error

    def heed_edits(self) -> None:
        """From now on, copy at once those tensors that were edited by hand during a copy."""
        with undisturbed():
            if self.line.edits.learn(self.branch):
                self._plan = None

    def check_usable(self) -> None:
        """Raise unless captures may be taken here and now.

        :raises Closed: the training was closed, gave way to another, or belongs to the parent process.
        :raises InvalidInput: this is a thread of the engine.
        """
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

    # --- going back ----------------------------------------------------------------------------------------------------------

    def go_back(
        self,
        state: State,
        *,
        only: str | Sequence[str] | None = None,
        strict: bool = True,
        without: Collection[str] = (),
        reason: str = "move",
    ) -> RestoreReport:
        """Restore a state, except for the objects ``without``, and move the branch to it; ``reason`` goes into the reflog. No capture may
        be in flight.

        The script goes on where the loops are: if these stay, so does what it trains.
        """
        with undisturbed():
            with self.ranks.united("restore its part"):
                report = self.restore(state, only=only, strict=strict, without=without)
            if LOOPS not in without:
                go_on_training(self.branch, self.adapted, report, is_told=self.ranks.is_first)
            self.ranks.first("move the branch", partial(self._move, state, reason), type(None))
            self.line.stand((state.uid, state.digest))
            self._fence.count_anew()
            self.newest = state.uid
            self.know_best()
        return report

    def _move(self, state: State, reason: str) -> None:
        tip = self.line.tip
        if tip is None or tip[0] != state.uid:
            with self.core.writing() as session:
                if tip is None:
                    lineage_refs.branch(session, self.branch, state.uid)
                else:
                    lineage_refs.move(session, self.branch, state.uid, expected=tip[0], reason=reason)

    def know_best(self) -> None:
        """Tell the engine which states up to the branch's head are the best, by the metrics whose best is kept."""
        if self.bests:
            self.host.know_best(self.line, bests_at(self.core, self.line.tip and self.line.tip[0], self.bests))

    def restore(self, state: State, *, only: str | Sequence[str] | None, strict: bool, without: Collection[str] = ()) -> RestoreReport:
        """Restore a state into the objects, and set ``step`` to its step; the branch stays."""
        everything = {LOOPS: self.loops, **self.objects, **self.values}
        into = {name: found for name, found in everything.items() if name not in without}
        version = self.loops.version
        self.report = restore(self.core, state, into, only=only, strict=strict, group=self.ranks.group)
        for optimizer in (each for tracked in self.adapted.optimizers for each in with_inner(tracked)):
            if optimizer.state:
                optimizer._opt_called = True  # type: ignore[attr-defined]  # else schedulers warn that it never stepped
        if LOOPS in into and only is None and self.loops.version == version:
            self.loops.load_state_dict({})
        for line in self.report.anew if self.ranks.is_first else ():
            say(f"branch {self.branch}: {line}")
        self.values.update({key: value for key, value in self.report.values.items() if key in self.values})
        self.step, self.micro_step = state.step, state.micro_step
        self._plan = None
        return self.report

    # --- the end -------------------------------------------------------------------------------------------------------------

    @property
    def is_living(self) -> bool:
        """Whether it belongs to this process and has not ended."""
        return not self._is_ended and self._pid == os.getpid()

    def close(self, error: BaseException | None = None) -> None:
        """Remove the hooks and make the branch's head durable; idempotent. ``error`` is the one that ended the training, if any.

        :raises DatastatesError: (or another error of the background) the last captures could not be recorded.
        """
        if not self.is_living:
            return
        self._is_closed = True
        self.host.close_line(self.line)
        self._fence.remove()
        self.core.trainings.discard(self)  # the repository may outlive the models, and must not keep them alive
        self.core.drain()
        self.forget_layout()  # it keeps captured tensors and places in memory alive
        if self.line.tip is not None:
            part_at(self.line.tip[0], self.adapted)
        if not self.core.database.is_closed:  # the repository may have been closed after an interrupt of this
            with suppress(Unavailable, NotFound), self.core.database.write() as session:  # its process finishes the run at the latest
                runs.note(session, self.run.uid, {**facts_of(self.line), **endings.facts_of(error, self.step)})
                runs.finish(session, self.run.uid)
        self._is_ended = True  # an interrupt before this: the next call goes on
        self._finalizer.detach()
        self._part(error)
        self.heed_edits()
        self.raise_background_error()

    def _part(self, error: BaseException | None) -> None:
        """Tell the companions of the end."""
        while self._companions:
            companion = self._companions.pop()
            try:
                companion.ended(error)
            except Exception:  # the other system may be away; the states are safe
                _logger.warning("branch %s: %s could not be ended", self.branch, companion, exc_info=True)

    def give_way(self) -> None:
        """End, because another training is about to begin on this branch: the head becomes durable, and this one captures no more."""
        self._has_given_way = True
        try:
            self.close()
        except Exception as exc:  # the new tracker begins, whatever happened to the earlier one
            _logger.warning("branch %s: the last captures of its earlier tracker failed: %s", self.branch, exc)
        with undisturbed():
            _logger.warning(
                "branch %s is tracked anew in this process: the earlier tracker ends here and takes no more captures", self.branch
            )

    def give_up(self) -> None:
        """Undo a training that never began: nothing was captured."""
        self._fence.remove()
        self.host.close_line(self.line)


def _refuse_gradients(flat: Flat) -> None:
    """Raise if there are gradients that are not sharded. Between two steps each replica may have summed up gradients of its own, so that
    pieces from several replicas would make up gradients that no replica has.

    :raises Unsupported: there are some.
    """
    for leaf in flat.tensors:
        if leaf.path.startswith(f"{GRADIENTS}/") and not is_spread(leaf.tensor):
            raise Unsupported(
                f"{leaf.path} is tracked by several ranks, each of which may have gradients of its own: track without gradients=True, and "
                "capture after optimizer.step()"
            )


def _found(objects: Mapping[str, object]) -> list[object]:
    return [found for _, found in parts(objects)]


def _end_dropped(host: Host, line: Line, fence: Fence, pid: int) -> None:
    """End a training that was dropped without a close; runs on whichever thread collected it."""
    fence.is_over = True
    end_later(partial(host.close_line, line), pid)
