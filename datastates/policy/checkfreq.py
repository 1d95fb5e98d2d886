"""CheckFreq: the shortest interval between writes that keeps their cost below a share of the time.

After J. Mohan, A. Phanishayee, V. Chidambaram, "CheckFreq: Frequent, Fine-Grained DNN Checkpointing", FAST 2021. The costs are profiled at
the start of the training. The interval k (in iterations there, in captures here) is the smallest one with which

- a write has ended before the next begins (their second phase, ``persist``, is never in flight twice):  k >= write / interval
- the delay that a write causes is at most a share p of k intervals:                                     k >= delay / (p * interval)

The interval is tuned again while the training runs. In the paper a checkpoint is a snapshot and its write. Here every capture is a
snapshot, whatever the cadence; the interval chooses which of them are written, so p bounds what writing adds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from datastates import values
from datastates.errors import InvalidInput

from .contract import CadenceChoice, Costs, Moment, Policy, span
from .probing import is_probe_due, stays
from .spelling import percent

__all__ = ["OVERHEAD", "CheckFreq"]

OVERHEAD = 0.035
"""The share of the time that writing may take, unless the user says otherwise; the value is the paper's."""


@dataclass(frozen=True, slots=True)
class CheckFreq(Policy):
    """The shortest interval with which writing states delays the training by at most ``overhead`` of its time.

    The cost is measured while the training runs: first a few states are written far apart, then states are written as often as allowed.

        repo.track(model=model, cadence=datastates.CheckFreq(0.02))

    :raises InvalidInput: ``overhead`` is not a share above 0 and at most 1.
    """

    overhead: float = OVERHEAD
    is_computed = True

    def __post_init__(self) -> None:
        given = values.number(self.overhead, "the overhead of CheckFreq")
        if isinstance(self.overhead, bool) or not 0 < given <= 1:
            raise InvalidInput(f"the overhead of CheckFreq is {values.shown(self.overhead)}: give a share of the time, such as 0.035")
        object.__setattr__(self, "overhead", given)

    def is_due(self, moment: Moment, /) -> bool:
        """See ``Policy``."""
        every = None if moment.choice is None else moment.choice.every
        if every is None:
            return is_probe_due(moment)
        return moment.is_newest and not moment.is_writing and (moment.last_index is None or moment.since >= every)

    def next_due(self, moment: Moment, /) -> float | None:
        """See ``Policy``."""
        return None

    def told(self) -> CadenceChoice:
        """See ``Policy``."""
        return CadenceChoice(str(self), f"CheckFreq looks for the shortest interval that costs at most {percent(self.overhead)}")

    def choose(self, costs: Costs, current: CadenceChoice | None, /) -> CadenceChoice | None:
        """See ``Policy``."""
        bound, share = self.bounds(costs)
        every = max(bound, share)
        if current is not None and current.every is not None and stays(current.every, every, current.costs, costs):
            return current
        if bound >= share:
            limit = "the next write would begin before the last has ended" if bound > 1 else ""
        else:
            limit = f"writing would delay the training by more than {percent(self.overhead)}"
        why = (
            f"every {every} captures" if every > 1 else "each capture"
        ) + f": a capture comes every {span(costs.interval_s)}, a write takes {span(costs.write_s)} and delays by {span(costs.overhead_s)}"
        return CadenceChoice(str(self), f"{why}; more often {limit}" if limit else why, every=every, costs=costs)

    def bounds(self, costs: Costs) -> tuple[int, int]:
        """The least interval in captures, once by the length of a write and once by its cost."""
        return (
            max(1, math.ceil(costs.write_s / costs.interval_s)),
            max(1, math.ceil(costs.overhead_s / (self.overhead * costs.interval_s))),
        )

    def __str__(self) -> str:
        return f"checkfreq:{percent(self.overhead)}"
