"""Deciding when a recorded state is written to disk, by counts and times that the user gave."""

from __future__ import annotations

from dataclasses import dataclass

from datastates import values

from .contract import CadenceChoice, Moment, Policy
from .spelling import plain

__all__ = ["INTERVAL_S", "Cadence"]

INTERVAL_S = 30.0
"""The seconds between two writes of the newest state, unless the user says otherwise."""


@dataclass(frozen=True, slots=True)
class Cadence(Policy):
    """Decides which captures become durable by themselves; tagged states and branch heads at exit always do.

    ``every`` counts the captures of this tracker: 5 picks captures 5, 10, 15 and so on. ``interval_s`` is the least time between two writes
    of the newest state. ``steps`` picks the first capture at or after each multiple of so many steps of the optimizers. All may be None;
    then only tags, the exit and ``capture.wait("durable")`` make states durable. Give it to ``Config`` or ``Repository.track`` as
    ``cadence``, alone or joined by ``|`` with others.

        repo.track(model=model, cadence=datastates.Cadence(every=10, interval_s=None))

    :raises InvalidInput: one of the values is not of its kind.
    """

    every: int | None = None
    interval_s: float | None = INTERVAL_S
    steps: int | None = None

    def __post_init__(self) -> None:
        if self.every is not None:
            object.__setattr__(self, "every", values.integer(self.every, "durable_every, which counts captures,", least=1))
        if self.interval_s is not None:
            object.__setattr__(self, "interval_s", values.seconds(self.interval_s, "durable_interval_s"))
        if self.steps is not None:
            object.__setattr__(self, "steps", values.integer(self.steps, "steps", least=1))

    def is_due(self, moment: Moment, /) -> bool:
        """See ``Policy``."""
        if moment.index is not None:
            if self.every is not None and (moment.index + 1) % self.every == 0:
                return True
            if self.steps is not None and moment.step // self.steps != (moment.last_step or 0) // self.steps:
                return True
        if self.interval_s is None or not moment.is_newest:
            return False
        return moment.last_write is None or moment.now - moment.last_write >= self.interval_s

    def next_due(self, moment: Moment, /) -> float | None:
        """See ``Policy``."""
        if self.interval_s is None or moment.last_write is None:
            return None
        return moment.last_write + self.interval_s

    def counted(self) -> Policy | None:
        """See ``Policy``."""
        return Cadence(self.every, None) if type(self) is Cadence and self.every is not None else None  # a subclass may depend on anything

    def told(self) -> CadenceChoice:
        """See ``Policy``."""
        parts = (
            None if self.every is None else "each capture" if self.every == 1 else f"every {self.every} captures",
            None if self.steps is None else f"a state every {self.steps} steps",
            None if self.interval_s is None else f"the newest state every {plain(self.interval_s)} s",
        )
        why = f"{' and '.join(filter(None, parts)) or 'nothing by itself'}, as it was told"
        return CadenceChoice(str(self), why, every=self.every, interval_s=self.interval_s)

    def __or__(self, other: object) -> Policy:
        """A policy that writes what either would write. Two cadences that do not set the same field differently become one with the fields
        of both.
        """
        if type(self) is type(other) is Cadence:  # a subclass may decide otherwise
            pairs = [(self.every, other.every), (self.interval_s, other.interval_s), (self.steps, other.steps)]
            if all(None in pair or pair[0] == pair[1] for pair in pairs):
                every, interval_s, steps = (mine if mine is not None else theirs for mine, theirs in pairs)
                return Cadence(every, interval_s, steps)  # type: ignore[arg-type]  # they keep their order
        return Policy.__or__(self, other)

    def __str__(self) -> str:
        parts = {"every": self.every, "steps": self.steps, "seconds": self.interval_s}
        return "|".join(f"{name}:{plain(value)}" for name, value in parts.items() if value is not None) or "never"
