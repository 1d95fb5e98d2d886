"""Writing as often as minimizes the expected waste of failures and writes together: Young's and Daly's intervals, and two levels."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Self

from datastates import values
from datastates.errors import InvalidInput

from .contract import CadenceChoice, Costs, Moment, Policy, span
from .probing import is_probe_due, stays
from .spelling import duration
from .waste import Level, daly, daly_first, two_level, young

__all__ = ["NODE_MTBF_S", "Daly", "TwoLevel", "Young", "mtbf_of"]

PRIOR_S = 86400.0
"""One failure in this time is assumed in addition to those that were seen, so that a repository without any gives an estimate, too."""

NODE_MTBF_S = 30 * 86400.0
"""The time between losses of a node with its disk, unless the user says otherwise."""

_LEAST_S = 1e-9
"""Stands for a delay of a write that is too small to measure."""


def mtbf_of(ran_s: float, failures: int) -> float:
    """The time between failures, given how long processes ran together, and how many of them died."""
    return (ran_s + PRIOR_S) / (failures + 1)


@dataclass(frozen=True, slots=True)
class _ByFailures(Policy):
    """Writes by time, computed from the delay that a write causes and ``mtbf_s``; None: as often as processes of the repository died."""

    mtbf_s: float | None = None
    is_computed = True
    is_observed: bool = field(default=False, kw_only=True, repr=False)

    def __post_init__(self) -> None:
        if self.mtbf_s is not None:
            object.__setattr__(self, "mtbf_s", _positive(self.mtbf_s, "mtbf_s"))
        object.__setattr__(self, "is_observed", values.flag(self.is_observed, "is_observed"))

    @property
    def asks_mtbf(self) -> bool:  # type: ignore[override]  # a constant of other policies
        """See ``Policy``."""
        return self.mtbf_s is None

    def informed(self, mtbf_s: float, /) -> Self:
        """See ``Policy``."""
        return replace(self, mtbf_s=mtbf_s, is_observed=True) if self.mtbf_s is None else self

    def is_due(self, moment: Moment, /) -> bool:
        """See ``Policy``."""
        if moment.choice is None or moment.choice.interval_s is None:
            return is_probe_due(moment)
        if moment.is_writing or not moment.is_newest:
            return False
        return moment.last_write is None or moment.now >= moment.last_write + moment.choice.interval_s

    def next_due(self, moment: Moment, /) -> float | None:
        """See ``Policy``."""
        if moment.last_write is None or moment.is_writing or moment.choice is None or moment.choice.interval_s is None:
            return None
        return moment.last_write + moment.choice.interval_s

    def told(self) -> CadenceChoice:
        """See ``Policy``."""
        return CadenceChoice(str(self), f"waits for what writes cost: {self._name()}, a failure every {self._said_mtbf()}")

    def choose(self, costs: Costs, current: CadenceChoice | None, /) -> CadenceChoice | None:
        """See ``Policy``."""
        best_s, further_every = self._best(costs)
        interval_s = max(best_s + costs.overhead_s, costs.write_s)
        if current is not None and current.interval_s is not None and stays(current.interval_s, interval_s, current.costs, costs):
            return current
        why = (
            f"every {span(interval_s)}, by {self._name()}: a write delays by {span(costs.overhead_s)} and takes {span(costs.write_s)}, and "
            f"a failure comes every {self._said_mtbf()}"
        )
        if interval_s == costs.write_s:
            why += "; more often the next write would begin before the last has ended"
        if further_every > 1:
            why += f"; every {further_every}th of them goes on to further tiers"
        return CadenceChoice(str(self), why, interval_s=interval_s, further_every=further_every, costs=costs)

    def _best(self, costs: Costs) -> tuple[float, int]:
        """The work between two writes, and the number of writes for each one that goes further."""
        raise NotImplementedError

    def _name(self) -> str:
        raise NotImplementedError

    def _mtbf(self) -> float:
        return PRIOR_S if self.mtbf_s is None else self.mtbf_s

    def _said_mtbf(self) -> str:
        return span(self._mtbf()) + (" as observed here" if self.is_observed else "" if self.mtbf_s is not None else ", unless told")

    def _given(self) -> str:
        """The ``mtbf_s`` that the user gave, as text."""
        return "" if self.mtbf_s is None or self.is_observed else duration(self.mtbf_s)


@dataclass(frozen=True, slots=True)
class Young(_ByFailures):
    """Writes every ``sqrt(2 * delay * mtbf_s)`` (Young 1974). ``mtbf_s`` is the time between failures; None: as observed here.

        repo.track(model=model, cadence=datastates.Young(mtbf_s=6 * 3600))

    :raises InvalidInput: ``mtbf_s`` is not a time span above 0.
    """

    def _best(self, costs: Costs) -> tuple[float, int]:
        return young(max(_LEAST_S, costs.overhead_s), self._mtbf()), 1

    def _name(self) -> str:
        return "Young's interval"

    def __str__(self) -> str:
        return f"young:{self._given()}".rstrip(":")


@dataclass(frozen=True, slots=True)
class Daly(_ByFailures):
    """Like ``Young``, with Daly's estimates of 2006: the higher order, which holds however expensive writing is, or the first order.

        repo.track(model=model, cadence=datastates.Daly(mtbf_s=6 * 3600))

    :raises InvalidInput: ``mtbf_s`` is not a time span above 0.
    """

    is_first_order: bool = False

    def __post_init__(self) -> None:
        _ByFailures.__post_init__(self)
        object.__setattr__(self, "is_first_order", values.flag(self.is_first_order, "is_first_order"))

    def _best(self, costs: Costs) -> tuple[float, int]:
        cost_s = max(_LEAST_S, costs.overhead_s)
        return (daly_first(cost_s, self._mtbf()) if self.is_first_order else daly(cost_s, self._mtbf())), 1

    def _name(self) -> str:
        return f"Daly's interval of {'first' if self.is_first_order else 'higher'} order"

    def __str__(self) -> str:
        return f"daly:{self._given()}:{'first' if self.is_first_order else ''}".rstrip(":")


@dataclass(frozen=True, slots=True)
class TwoLevel(_ByFailures):
    """Writes to this node's disk often, and sends every n-th of those states on to the further tiers, so that the expected waste is least.

    A process dies every ``mtbf_s`` (None: as observed here), and states on the disk survive. The node is lost with its disk every
    ``node_mtbf_s``, and only states on the further tiers survive. Tagged states go on in any case.

        repo.track(model=model, cadence=datastates.TwoLevel(mtbf_s=6 * 3600, node_mtbf_s=14 * 86400))

    :raises InvalidInput: one of them is not a time span above 0.
    """

    node_mtbf_s: float = NODE_MTBF_S

    def __post_init__(self) -> None:
        _ByFailures.__post_init__(self)
        object.__setattr__(self, "node_mtbf_s", _positive(self.node_mtbf_s, "node_mtbf_s"))

    def _best(self, costs: Costs) -> tuple[float, int]:
        cost_s = max(_LEAST_S, costs.overhead_s)
        if costs.further_s is None:  # there is no further tier
            return daly(cost_s, self._mtbf()), 1
        beside = cost_s / max(costs.write_s, _LEAST_S)  # what a second of writing costs; a second of copying is assumed to cost the same
        far = Level(max(_LEAST_S, beside * costs.further_s), self.node_mtbf_s)
        found = two_level(Level(cost_s, self._mtbf()), far, least_s=max(_LEAST_S, costs.write_s / 10))
        return found.interval_s, found.every

    def _name(self) -> str:
        return f"two levels, with a node lost every {span(self.node_mtbf_s)}"

    def __str__(self) -> str:
        node = "" if self.node_mtbf_s == NODE_MTBF_S else duration(self.node_mtbf_s)
        return f"two-level:{self._given()}:{node}".rstrip(":")


def _positive(given: object, what: str) -> float:
    found = values.seconds(given, what)
    if not 0 < found < float("inf"):
        raise InvalidInput(f"{what} is {values.shown(given)}: give a number of seconds above 0, such as 6 * 3600")
    return found
