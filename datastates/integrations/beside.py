"""A run in somebody else's log beside a training of ours: what MLflow, W&B and TensorBoard have in common.

Each state of the training names their run (the attribute ``mlflow.run``, ``wandb.run``, ``tensorboard.run``), and their run names our
repository, branch and training. So a training that is resumed finds the run that it had, and a fork the one of its parent. Metrics that
are given to ``Tracker.capture`` go to theirs once their state is recorded: on a thread of its own, as theirs may be at the other end of a
network.

    recorded -> queue -> datastates-mlflow: ``_send``, several points at once; what fails is tried again with the next
"""

from __future__ import annotations

import logging
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from datastates import values
from datastates.errors import InvalidInput
from datastates.lineage.states import State, Value
from datastates.tracking.tracker import Tracker

__all__ = ["Beside", "Ours"]

_logger = logging.getLogger(__name__)

_MOST = 100_000
"""So many states wait for a log that is away; then the oldest are given up."""

PATIENCE_S = 30.0
"""So long a log that does not answer is waited for when the training ends."""


@dataclass(frozen=True, slots=True)
class Ours:
    """What their run is told of a training. ``start`` is the state that it set out from; ``is_resumed``: on this very branch."""

    repository: str
    branch: str
    run: str
    git_commit: str | None
    config: Mapping[str, Value]
    start: State | None
    is_resumed: bool

    @classmethod
    def of(cls, tracker: Tracker) -> Ours:
        """What there is to tell of this training."""
        training = tracker.training
        run, start = training.run, tracker.resumed_from
        return cls(str(training.core.location), tracker.branch, run.uid, run.git_commit, tracker.config, start, training.is_resumed)

    def named(self) -> dict[str, str]:
        """By the names that theirs have for it."""
        found = {"datastates.repository": self.repository, "datastates.branch": self.branch, "datastates.run": self.run}
        return found if self.start is None else {**found, "datastates.start": self.start.uid}


class Beside(ABC):
    """Their run beside one training; a subclass is one log. ``id`` is what theirs call it.

    ``kind`` is how attributes and threads name the log. The training's end ends their run, too, unless that was the caller's own.
    """

    kind: ClassVar[str]
    id: str

    def __init__(self, tracker: Tracker, own: str | None = None) -> None:
        if not isinstance(tracker, Tracker):
            raise InvalidInput(f"tracker is {values.shown(tracker)}: give what repo.track returned")
        ours = Ours.of(tracker)
        key = f"{self.kind}.run"
        before = None if ours.start is None else ours.start.attributes.get(key)
        known = None if before is None else str(before)
        self._is_own = own is not None
        if own is not None:
            self.id = own
            self._tell(ours, None if ours.is_resumed else known)
        elif known is not None and ours.is_resumed and self._go_on(known, ours):
            self.id = known
            self._tell(ours, None)
        else:
            if known is not None and ours.is_resumed:
                _logger.warning(
                    "branch %s: %s has no run %s any more, which it went on in: it gets a new one", ours.branch, self.kind, known
                )
            self.id = self._begin(ours)
            self._tell(ours, known)
        tracker.attributes[key] = self.id
        self._queue: queue.SimpleQueue[State | None] = queue.SimpleQueue()
        self._head, self._untold, self._has_failed = None if ours.start is None else ours.start.uid, 0, False
        self._thread = threading.Thread(target=self._run, name=f"datastates-{self.kind}", daemon=True)
        self._thread.start()
        tracker.training.accompany(self)

    # --- what a log does -----------------------------------------------------------------------------------------------------

    @abstractmethod
    def _go_on(self, id: str, ours: Ours) -> bool:
        """Open their run again; False where it is not there."""

    @abstractmethod
    def _begin(self, ours: Ours) -> str:
        """Begin a run of theirs; what they call it."""

    @abstractmethod
    def _tell(self, ours: Ours, parent: str | None) -> None:
        """Note in their run what it is of ours, and the run of theirs that it was forked from."""

    @abstractmethod
    def _send(self, states: Sequence[State]) -> None:
        """Log the metrics of these states at their steps. On a thread of its own; raises what keeps it from that."""

    @abstractmethod
    def _end(self, head: str | None, error: BaseException | None) -> None:
        """Note the newest state, and end their run unless it is the caller's own."""

    # --- a companion ---------------------------------------------------------------------------------------------------------

    def recorded(self, state: State, /) -> None:
        """See ``Companion``."""
        self._queue.put(state)

    def ended(self, error: BaseException | None, /) -> None:
        """See ``Companion``."""
        self._queue.put(None)
        self._thread.join(PATIENCE_S)
        if self._thread.is_alive():
            _logger.warning(
                "%s does not answer for %.0f s and is not waited for: its run stays open; all metrics are in the lineage",
                self.kind,
                PATIENCE_S,
            )
            return
        if self._untold:
            _logger.warning("%s did not take the metrics of %d states; they are in the lineage", self.kind, self._untold)
        self._end(self._head, error)

    def _run(self) -> None:
        waiting: list[State] = []
        is_over = False
        while not is_over:
            taken = [self._queue.get()]
            while not self._queue.empty():
                taken.append(self._queue.get())
            is_over = taken[-1] is None
            waiting = self._sent([*waiting, *(state for state in taken if state is not None)])
        self._untold += len(waiting)

    def _sent(self, states: list[State]) -> list[State]:
        """Those that are to be tried again."""
        if not states:
            return []
        self._head = states[-1].uid
        try:
            self._send([state for state in states if state.metrics])
        except Exception:  # whatever their client raises: the training goes on, and so do its captures
            if not self._has_failed:
                _logger.warning("%s does not take metrics for now; they are sent again with the next", self.kind, exc_info=True)
            self._has_failed = True
            self._untold += max(0, len(states) - _MOST)
            return states[-_MOST:]
        self._has_failed = False
        return []
