"""Writing a state because one of its metrics is better than ever before."""

from __future__ import annotations

from dataclasses import dataclass

from datastates import values
from datastates.lineage.show.goals import Direction, direction_of

from .contract import CadenceChoice, Moment, Policy
from .spelling import name

__all__ = ["OnImprovement"]


@dataclass(frozen=True, slots=True)
class OnImprovement(Policy):
    """Writes each state whose ``metric`` is better than that of every earlier capture of its training; NaN is never better.

    ``is_rising`` says whether larger values are better; None: the metric's name decides, as everywhere (accuracies rise, losses fall).
    Earlier captures of a resumed training do not count: its first value after the resume counts as an improvement.

        repo.track(model=model, cadence=datastates.Cadence(every=100) | datastates.OnImprovement("val_loss"))

    :raises InvalidInput: ``metric`` cannot be a metric's name, or ``is_rising`` is neither True, False nor None.
    """

    metric: str
    is_rising: bool | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "metric", values.key(self.metric, "the metric of OnImprovement"))
        if self.is_rising is not None:
            object.__setattr__(self, "is_rising", values.flag(self.is_rising, "is_rising"))

    @property
    def rises(self) -> bool:
        """Whether larger values are better."""
        return direction_of(self.metric) is Direction.MAX if self.is_rising is None else self.is_rising

    def is_due(self, moment: Moment, /) -> bool:
        """See ``Policy``."""
        value = moment.metrics.get(self.metric)
        if moment.index is None or value is None or value != value:  # NaN
            return False
        before = moment.extremes.get(self.metric)
        return before is None or (value > before[1] if self.rises else value < before[0])

    def next_due(self, moment: Moment, /) -> float | None:
        """See ``Policy``."""
        return None

    def counted(self) -> Policy | None:
        """See ``Policy``."""
        return self if type(self) is OnImprovement else None  # a subclass may depend on anything

    def told(self) -> CadenceChoice:
        """See ``Policy``."""
        return CadenceChoice(str(self), f"each state with a {'larger' if self.rises else 'smaller'} {self.metric} than all before")

    def __str__(self) -> str:
        direction = "" if self.is_rising is None else ":max" if self.is_rising else ":min"
        return f"best:{name(self.metric)}{direction}"
