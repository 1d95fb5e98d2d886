"""The facts with which the engine asks a line's policy: its captures, its writes, and what they cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from datastates.policy.contract import CadenceChoice, Costs, Moment, Policy
from datastates.policy.measures import Measures

__all__ = ["Pacing", "Taken"]

_NOTHING: Mapping[str, float] = {}


@dataclass(frozen=True, slots=True)
class Taken:
    """A capture, as its training saw it. ``at`` is when it began, ``held_s`` is for how long the one before it held the training up."""

    at: float | None = None
    held_s: float | None = None
    step: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class Pacing:
    """The facts about one line of the engine. ``idle`` captures were made since its last write ended."""

    policy: Policy
    count: int = 0
    idle: int = 0
    picks: int = 0
    last_write: float | None = None
    choice: CadenceChoice | None = None
    costs: Costs | None = None
    _last_index: int | None = None
    _last_step: int | None = None
    _step: int = 0
    _extremes: dict[str, tuple[float, float]] = field(default_factory=dict)
    _measures: Measures = field(default_factory=Measures)
    _reckoned: Costs | None = None

    def is_due_at_capture(self, taken: Taken, now: float, *, is_writing: bool) -> bool:
        """Whether to write the capture that was just recorded, which is the newest; it is counted."""
        self.count += 1
        self.idle += 1
        self._step = taken.step
        if taken.at is not None:
            self._measures.captured(taken.at, taken.held_s)
        is_due = self.policy.is_due(self._moment(now, index=self.count - 1, metrics=taken.metrics, is_writing=is_writing))
        for key, value in taken.metrics.items():
            if value == value:  # not NaN
                least, greatest = self._extremes.get(key, (value, value))
                self._extremes[key] = min(least, value), max(greatest, value)
        if is_due:
            self.picked(now)
        return is_due

    def is_due_now(self, now: float, *, is_writing: bool) -> bool:
        """Whether to write the newest capture now that time has passed or a write ended."""
        is_due = self.policy.is_due(self._moment(now, is_writing=is_writing))
        if is_due:
            self.picked(now)
        return is_due

    @property
    def keeps_near(self) -> bool:
        """Whether the state that was picked last stays off the further tiers."""
        return self.choice is not None and (self.picks - 1) % self.choice.further_every != 0

    def picked(self, now: float) -> None:
        """Note that the newest capture will be written."""
        self.picks += 1
        self.last_write, self._last_index, self._last_step = now, self.count - 1, self._step

    def next_due(self, *, is_writing: bool) -> float | None:
        """The time at which the newest capture becomes due without another event; None: never, or not before the next capture."""
        return self.policy.next_due(self._moment(0.0, is_writing=is_writing))

    def wrote(self, began: float, ended: float, *, is_own: bool, further_s: float | None = None) -> bool:
        """Note that a state was written, by this line or another of the process; returns whether the policy made a new choice.

        ``further_s`` is how long it lately took to put a state onto the further tiers.
        """
        self._measures.wrote(began, ended, is_own=is_own)
        if not is_own:
            return False
        self.idle = 0
        costs = self._measures.costs()
        if costs is None or costs is self._reckoned:
            return False
        self._reckoned, self.costs = costs, replace(costs, further_s=further_s)
        chosen = self.policy.choose(self.costs, self.choice)
        has_changed = chosen is not self.choice
        self.choice = chosen
        return has_changed

    def _moment(self, now: float, *, index: int | None = None, metrics: Mapping[str, float] = _NOTHING, is_writing: bool) -> Moment:
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
            is_writing=is_writing,
            choice=self.choice,
        )
