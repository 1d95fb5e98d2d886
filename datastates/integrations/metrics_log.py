"""The common part of MLflow, W&B and TensorBoard: a run in another log for one of our trainings.

Each state of the training has the id of the log's run in an attribute (``mlflow.run``,
``wandb.run``, ``tensorboard.run``). The log's run has our repository, branch and training. A
resumed training therefore continues its run, and a fork finds its parent's run. The metrics of a
capture are sent once its state is recorded. A separate thread sends them, because the log may be a
remote server.

    recorded -> queue -> datastates-mlflow: ``_send``, several points at once; points that fail are
    sent again with the next
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
from datastates.lineage.states import State
from datastates.training.tracker import Tracker
from datastates.values import Value

_logger = logging.getLogger(__name__)

_MOST = 100_000
"""The most states that wait for a log that is away; beyond that the oldest are dropped."""

PATIENCE_S = 30.0
"""How long, in seconds, the end of the training waits for a log that does not answer."""


@dataclass(frozen=True, slots=True)
class TrainingFacts:
    """The facts about a training that the log's run records. ``start`` is the state from which the
    training started. ``is_resumed``: it is a state of the same branch."""

    repository: str
    branch: str
    run: str
    git_commit: str | None
    config: Mapping[str, Value]
    start: State | None
    is_resumed: bool

    @classmethod
    def of(cls, tracker: Tracker) -> TrainingFacts:
        training = tracker.training
        run, start = training.run, tracker.resumed_from
        return cls(
            str(training.core.location),
            tracker.branch,
            run.uid,
            run.git_commit,
            tracker.config,
            start,
            training.is_resumed,
        )

    def named(self) -> dict[str, str]:
        """The values by the names that the log's run has for them."""
        found = {
            "datastates.repository": self.repository,
            "datastates.branch": self.branch,
            "datastates.run": self.run,
        }
        return found if self.start is None else {**found, "datastates.start": self.start.uid}


class MetricsLog(ABC):
    """A run of another log for one training. Each log is a subclass. ``id`` is the log's own name
    for the run.

    ``kind`` is the log's name in attributes and threads. The end of the training also ends the run,
    unless the caller made the run.
    """

    kind: ClassVar[str]
    id: str

    def __init__(self, tracker: Tracker, own: str | None = None) -> None:
        if not isinstance(tracker, Tracker):
            raise InvalidInput(f"tracker is {values.shown(tracker)}: give what repo.track returned")
        facts = TrainingFacts.of(tracker)
        key = f"{self.kind}.run"
        before = None if facts.start is None else facts.start.attributes.get(key)
        known = None if before is None else str(before)
        self._is_own = own is not None
        if own is not None:
            self.id = own
            self._describe(facts, None if facts.is_resumed else known)
        elif known is not None and facts.is_resumed and self._resume(known, facts):
            self.id = known
            self._describe(facts, None)
        else:
            if known is not None and facts.is_resumed:
                _logger.warning(
                    "branch %s: %s has no run %s any more, so the branch gets a new one",
                    facts.branch,
                    self.kind,
                    known,
                )
            self.id = self._begin(facts)
            self._describe(facts, known)
        tracker.attributes[key] = self.id
        self._queue: queue.SimpleQueue[State | None] = queue.SimpleQueue()
        self._head, self._unsent, self._has_failed = (
            None if facts.start is None else facts.start.uid,
            0,
            False,
        )
        self._thread = threading.Thread(
            target=self._run, name=f"datastates-{self.kind}", daemon=True
        )
        self._thread.start()
        tracker.training.add_listener(self._queue.put, self._on_end)

    # --- what a log does --------------------------------------------------------------------------

    @abstractmethod
    def _resume(self, id: str, facts: TrainingFacts) -> bool:
        """Open the run again; False if it does not exist."""

    @abstractmethod
    def _begin(self, facts: TrainingFacts) -> str:
        """Begin a run; returns the log's name for it."""

    @abstractmethod
    def _describe(self, facts: TrainingFacts, parent: str | None) -> None:
        """Note our training in the run, and the run of the log from which it was forked."""

    @abstractmethod
    def _send(self, states: Sequence[State]) -> None:
        """Log the metrics of these states at their steps. Runs on the log's thread, and raises if
        it fails."""

    @abstractmethod
    def _end(self, head: str | None, error: BaseException | None) -> None:
        """Note the newest state, and end the run unless it is the caller's own."""

    # --- the queue and its thread -----------------------------------------------------------------

    def _on_end(self, error: BaseException | None) -> None:
        self._queue.put(None)
        self._thread.join(PATIENCE_S)
        if self._thread.is_alive():
            _logger.warning(
                "%s does not answer for %.0f s and is not waited for. Its run stays open. All"
                " metrics are in the lineage",
                self.kind,
                PATIENCE_S,
            )
            return
        if self._unsent:
            _logger.warning(
                "%s did not take the metrics of %d states; they are in the lineage",
                self.kind,
                self._unsent,
            )
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
        self._unsent += len(waiting)

    def _sent(self, states: list[State]) -> list[State]:
        """Send the states; returns those that have to be tried again."""
        if not states:
            return []
        self._head = states[-1].uid
        try:
            self._send([state for state in states if state.metrics])
        except Exception:  # the log's client may raise anything, and the training continues
            if not self._has_failed:
                _logger.warning(
                    "%s does not take metrics for now; they are sent again with the next",
                    self.kind,
                    exc_info=True,
                )
            self._has_failed = True
            self._unsent += max(0, len(states) - _MOST)
            return states[-_MOST:]
        self._has_failed = False
        return []
