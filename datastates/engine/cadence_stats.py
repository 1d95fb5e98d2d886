"""The facts that a line's policy gets from the engine: its captures, its writes, and their
costs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from datastates.policy.auto import Measures
from datastates.policy.contract import CadenceChoice, Costs, Moment, Policy

_NOTHING: Mapping[str, float] = {}


@dataclass(frozen=True, slots=True)
class CaptureFacts:
    """A capture, as its training saw it. ``at`` is when it began. ``held_s`` is for how long the
    previous capture blocked the training. ``size`` is the number of its bytes, or None if unknown.
    """

    at: float | None = None
    held_s: float | None = None
    step: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)
    size: int | None = None


@dataclass(slots=True)
class CadenceFacts:
    """The facts about one line of the engine. ``idle`` captures were made since its last write
    ended. A state adds ``size`` bytes to the disk, as far as is known. Up to ``most_waiting``
    states waited since ``costs`` were computed; see ``Costs.waiting``.
    """

    policy: Policy
    size: float = 0.0
    count: int = 0
    idle: int = 0
    picks: int = 0
    last_write: float | None = None
    choice: CadenceChoice | None = None
    costs: Costs | None = None
    most_waiting: float = 0
    _last_index: int | None = None
    _last_step: int | None = None
    _step: int = 0
    _extremes: dict[str, tuple[float, float]] = field(default_factory=dict)
    _measures: Measures = field(default_factory=Measures)
    _reckoned: Costs | None = None
    _debt: float = 0.0
    _debt_at: float = 0.0

    def is_due_at_capture(self, taken: CaptureFacts, now: float, *, waiting: int) -> bool:
        """Whether to write the capture that was just recorded, which is the newest; it is
        counted."""
        self.count += 1
        self.idle += 1
        self.most_waiting = max(self.most_waiting, waiting)
        self._step = taken.step
        if taken.at is not None:
            self._measures.captured(taken.at, taken.held_s)
        is_due = self.policy.is_due(
            self._moment(now, index=self.count - 1, metrics=taken.metrics, waiting=waiting)
        )
        for key, value in taken.metrics.items():
            if math.isfinite(value):
                least, greatest = self._extremes.get(key, (value, value))
                self._extremes[key] = min(least, value), max(greatest, value)
        if is_due:
            self.picked(now)
        return is_due

    def is_due_now(self, now: float, *, waiting: int) -> bool:
        """Whether to write the newest capture now that time has passed or a write ended."""
        is_due = self.policy.is_due(self._moment(now, waiting=waiting))
        if is_due:
            self.picked(now)
        return is_due

    @property
    def keeps_near(self) -> bool:
        """Whether the state that was picked last stays off the further tiers."""
        return self.choice is not None and self.picks % self.choice.further_every != 0

    def picked(self, now: float) -> None:
        """Note that the newest capture will be written."""
        self.picks += 1
        self.last_write, self._last_index, self._last_step = now, self.count - 1, self._step

    def next_due(self, *, waiting: int) -> float | None:
        """The time at which the newest capture becomes due without another event. None: never, or
        not before the next capture."""
        return self.policy.next_due(self._moment(0.0, waiting=waiting))

    def wrote(
        self,
        began: float,
        ended: float,
        *,
        is_own: bool,
        states: int = 1,
        size: int = 0,
        cpu_s: float | None = None,
        further_s: float | None = None,
    ) -> bool:
        """Note that states were written together, by this line or another of the process; returns
        whether the policy made a new choice.

        ``size`` is how many bytes they added to the disk, and ``cpu_s`` how long that kept a
        processor busy. ``further_s`` is how long it lately took to put a state onto the further
        tiers.
        """
        self._measures.wrote(began, ended, is_own=is_own, states=states, size=size, cpu_s=cpu_s)
        if not is_own:
            return False
        self.idle, self.size = 0, self._measures.size or self.size
        self._debt, self._debt_at = self._owed(ended) + size, ended
        costs = self._measures.costs()
        if costs is None or costs is self._reckoned:
            return False
        self._reckoned, self.costs = (
            costs,
            replace(costs, further_s=further_s, debt=self._debt, waiting=self.most_waiting),
        )
        self.most_waiting = 0
        chosen = self.policy.choose(self.costs, self.choice)
        has_changed = chosen is not self.choice
        self.choice = chosen
        return has_changed

    def _owed(self, now: float) -> float:
        rate = self.policy.bytes_per_s
        return 0.0 if rate is None else max(0.0, self._debt - rate * max(0.0, now - self._debt_at))

    def _moment(
        self,
        now: float,
        *,
        index: int | None = None,
        metrics: Mapping[str, float] = _NOTHING,
        waiting: int,
    ) -> Moment:
        return Moment(
            now=now,
            index=index,
            last_write=self.last_write,
            step=self._step,
            last_index=self._last_index,
            last_step=self._last_step,
            metrics=metrics,
            extremes=self._extremes,
            count=self.count,
            idle=self.idle,
            waiting=waiting,
            choice=self.choice,
            size=self.size,
            debt=self._owed(now),
        )
