"""Cadences that compute their interval from measured costs: ``CheckFreq``, ``Young``, ``Daly`` and
``TwoLevel``.

The docstring of each class names its paper. The file also has the expected waste of checkpoints and
failures that the last three minimize.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Self

from datastates import values
from datastates.errors import InvalidInput

from .contract import INTERVAL_S, CadenceChoice, Costs, Moment, Policy, duration, percent, span

APART = 8
"""The number of captures without a write between two of these writes, for comparison."""

_AFTER = 8
"""How many writes must follow a choice before it changes, unless the new interval would be more
than ``_SUDDEN`` times as long."""

_SUDDEN = 2.0

LONGER = 1.15
_SHORTER = 0.7
"""A chosen interval stays while the best one is between these multiples of it. The share of the
time that writing takes is then at most 15 % above the requested share."""

OVERHEAD = 0.035
"""The default share of the time that writing may take. The value is the paper's."""

_GOLDEN = (math.sqrt(5) - 1) / 2
PRIOR_S = 86400.0
"""One failure in this time is assumed in addition to those that were seen, so that a repository
without any gives an estimate, too."""

NODE_MTBF_S = 30 * 86400.0
"""The default time between losses of a node with its disk."""

_LEAST_S = 1e-9
"""Replaces a delay of a write that is too small to measure."""


def is_probe_due(moment: Moment) -> bool:
    """Whether to write a state in order to measure. This is the first state, then one at a time. No
    state waits longer than without a computed cadence."""
    if moment.is_writing or not moment.is_newest:
        return False
    if moment.last_write is None:
        return moment.index is not None
    return moment.idle > APART or moment.now - moment.last_write >= INTERVAL_S


def stays(current: float, best: float, before: Costs | None, now: Costs) -> bool:
    """Whether an interval chosen by some costs stays, although another would now be best: noise
    must not move it to and fro."""
    if before is not None and now.writes - before.writes < _AFTER and best <= _SUDDEN * current:
        return True
    return _SHORTER * current < best <= LONGER * current


# --- CheckFreq ---


@dataclass(frozen=True, slots=True)
class CheckFreq(Policy):
    """The shortest interval with which writing states delays the training by at most ``overhead``
    of its time.

    The cost is measured during the training. A few states are written far apart at first. After
    that, states are written as often as allowed.

        repo.track(model=model, cadence=datastates.CheckFreq(0.02))

    The method is from J. Mohan, A. Phanishayee, V. Chidambaram, "CheckFreq: Frequent, Fine-Grained
    DNN Checkpointing", FAST 2021. The interval k, in captures, is the smallest one with which

    - a write has ended before the next begins: k >= write / interval
    - the delay that a write causes is at most a share p of k intervals: k >= delay / (p * interval)

    In the paper a checkpoint is a snapshot and its write. Here every capture is a snapshot, and the
    interval chooses which captures are written. So p bounds what writing adds.

    :raises InvalidInput: ``overhead`` is not a share above 0 and at most 1.
    """

    overhead: float = OVERHEAD
    is_computed = True

    def __post_init__(self) -> None:
        given = values.number(self.overhead, "the overhead of CheckFreq")
        if isinstance(self.overhead, bool) or not 0 < given <= 1:
            raise InvalidInput(
                f"the overhead of CheckFreq is {values.shown(self.overhead)}: give a share of the"
                " time, such as 0.035"
            )
        object.__setattr__(self, "overhead", given)

    def is_due(self, moment: Moment, /) -> bool:
        """See ``Policy``."""
        every = None if moment.choice is None else moment.choice.every
        if every is None:
            return is_probe_due(moment)
        return (
            moment.is_newest
            and not moment.is_writing
            and (moment.last_index is None or moment.since >= every)
        )

    def next_due(self, moment: Moment, /) -> float | None:
        """See ``Policy``."""
        return None

    def told(self) -> CadenceChoice:
        """See ``Policy``."""
        return CadenceChoice(
            str(self),
            "CheckFreq looks for the shortest interval that costs at most"
            f" {percent(self.overhead)}",
        )

    def choose(self, costs: Costs, current: CadenceChoice | None, /) -> CadenceChoice | None:
        """See ``Policy``."""
        bound, share = self.bounds(costs)
        every = max(bound, share)
        if (
            current is not None
            and current.every is not None
            and stays(current.every, every, current.costs, costs)
        ):
            return current
        if bound >= share:
            limit = "the next write would begin before the last has ended" if bound > 1 else ""
        else:
            limit = f"writing would delay the training by more than {percent(self.overhead)}"
        why = (
            (f"every {every} captures" if every > 1 else "each capture")
            + f": a capture comes every {span(costs.interval_s)}, a write takes"
            f" {span(costs.write_s)} and delays by {span(costs.overhead_s)}"
        )
        return CadenceChoice(
            str(self), f"{why}; more often {limit}" if limit else why, every=every, costs=costs
        )

    def bounds(self, costs: Costs) -> tuple[int, int]:
        """The least interval in captures, once by the length of a write and once by its cost."""
        return (
            max(1, math.ceil(costs.write_s / costs.interval_s)),
            max(1, math.ceil(costs.overhead_s / (self.overhead * costs.interval_s))),
        )

    def __str__(self) -> str:
        return f"checkfreq:{percent(self.overhead)}"


# --- Waste by checkpoints and failures, and the intervals that waste least ---


@dataclass(frozen=True, slots=True)
class Level:
    """A place of checkpoints: one delays the training by ``cost_s``. A failure that these
    checkpoints survive, and no nearer ones do, comes every ``mtbf_s``, and recovering takes
    ``recovery_s``.
    """

    cost_s: float
    mtbf_s: float
    recovery_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Pattern:
    """``interval_s`` of work between two checkpoints, every ``every``-th of which is also kept far;
    and the share of time expected as waste.
    """

    interval_s: float
    every: int
    waste: float


def young(cost_s: float, mtbf_s: float) -> float:
    """The work between two checkpoints, in seconds."""
    return math.sqrt(2 * cost_s * mtbf_s)


def daly_first(cost_s: float, mtbf_s: float, recovery_s: float = 0.0) -> float:
    """The work between two checkpoints, in seconds, by Daly's first order; 0 if a checkpoint
    costs too much."""
    return max(0.0, math.sqrt(2 * cost_s * (mtbf_s + recovery_s)) - cost_s)


def daly(cost_s: float, mtbf_s: float) -> float:
    """The work between two checkpoints, in seconds, by Daly's higher order."""
    if cost_s >= 2 * mtbf_s:
        return mtbf_s
    half = cost_s / (2 * mtbf_s)
    return math.sqrt(2 * cost_s * mtbf_s) * (1 + math.sqrt(half) / 3 + half / 9) - cost_s


def expected_waste(
    interval_s: float, near: Level, far: Level | None = None, every: int = 1
) -> float:
    """The share of the time that is no new work: from 0 to 1.

    Exact for failures at a constant rate, none of them during a recovery."""
    near_rate, far_rate = 1 / near.mtbf_s, 0.0 if far is None else 1 / far.mtbf_s
    rate = near_rate + far_rate
    back = (
        near.recovery_s
        if far is None
        else (near_rate * near.recovery_s + far_rate * far.recovery_s) / rate
    )
    to_far = far_rate / rate

    def segment(length_s: float) -> tuple[float, float]:
        """The time that one segment adds to the expected time, and the factor of what comes
        after it."""
        survives = math.exp(-rate * length_s)
        fails = -math.expm1(-rate * length_s)
        ends = survives + fails * to_far  # else the segment starts over
        return (fails * (1 / rate + back) / ends, survives / ends) if ends > 0 else (math.inf, 0.0)

    own, factor = segment(interval_s + near.cost_s)
    last, last_factor = segment(interval_s + near.cost_s + (0.0 if far is None else far.cost_s))
    before = every - 1
    through = factor**before
    total = own * (before if factor == 1 else (1 - through) / (1 - factor)) + through * last
    reached = through * last_factor if far is not None else 1.0
    if not math.isfinite(total) or reached == 0:
        return 1.0
    return 1 - min(1.0, every * interval_s * reached / total)


def two_level(near: Level, far: Level, *, least_s: float = 1e-6) -> Pattern:
    """The pattern with the least expected waste, with at least ``least_s`` between two
    checkpoints."""
    guess = math.sqrt(far.cost_s * far.mtbf_s / (max(near.cost_s, 1e-9) * near.mtbf_s))
    every = max(1, min(10**6, round(guess)))
    best = _best_of(near, far, every, least_s)
    step = max(1, every // 2)
    while step:
        for other in (best.every + step, max(1, best.every - step)):
            found = _best_of(near, far, other, least_s)
            if found.waste < best.waste:
                best = found
                break
        else:
            step //= 2
    return best


def _best_of(near: Level, far: Level, every: int, least_s: float) -> Pattern:
    most = max(10 * (near.mtbf_s + far.mtbf_s), 2 * least_s)
    interval = math.exp(
        _least(
            lambda log: expected_waste(math.exp(log), near, far, every),
            math.log(least_s),
            math.log(most),
        )
    )
    return Pattern(interval, every, expected_waste(interval, near, far, every))


def _least(of: Callable[[float], float], low: float, high: float) -> float:
    """The minimum of a function that falls and then rises, by golden section."""
    left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
    at_left, at_right = of(left), of(right)
    while high - low > 1e-4:
        if at_left <= at_right:
            high, right, at_right = right, left, at_left
            left = high - _GOLDEN * (high - low)
            at_left = of(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + _GOLDEN * (high - low)
            at_right = of(right)
    return (low + high) / 2


# --- Young's and Daly's intervals, and two levels ---


def mtbf_of(ran_s: float, failures: int) -> float:
    """The time between failures, given how long processes ran together, and how many of them
    died."""
    return (ran_s + PRIOR_S) / (failures + 1)


@dataclass(frozen=True, slots=True)
class _ByFailures(Policy):
    """Writes by time, computed from the delay that a write causes and from ``mtbf_s``. If that is
    None, failures of the repository's processes are counted."""

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
        return (
            moment.last_write is None or moment.now >= moment.last_write + moment.choice.interval_s
        )

    def next_due(self, moment: Moment, /) -> float | None:
        """See ``Policy``."""
        if (
            moment.last_write is None
            or moment.is_writing
            or moment.choice is None
            or moment.choice.interval_s is None
        ):
            return None
        return moment.last_write + moment.choice.interval_s

    def told(self) -> CadenceChoice:
        """See ``Policy``."""
        return CadenceChoice(
            str(self),
            f"waits for what writes cost: {self._name()}, a failure every {self._said_mtbf()}",
        )

    def choose(self, costs: Costs, current: CadenceChoice | None, /) -> CadenceChoice | None:
        """See ``Policy``."""
        best_s, further_every = self._best(costs)
        interval_s = max(best_s + costs.overhead_s, costs.write_s)
        if (
            current is not None
            and current.interval_s is not None
            and stays(current.interval_s, interval_s, current.costs, costs)
        ):
            return current
        why = (
            f"every {span(interval_s)}, by {self._name()}: a write delays by"
            f" {span(costs.overhead_s)} and takes {span(costs.write_s)}, and a failure comes every"
            f" {self._said_mtbf()}"
        )
        if interval_s == costs.write_s:
            why += "; more often the next write would begin before the last has ended"
        if further_every > 1:
            why += f"; every {further_every}th of them goes on to further tiers"
        return CadenceChoice(
            str(self), why, interval_s=interval_s, further_every=further_every, costs=costs
        )

    def _best(self, costs: Costs) -> tuple[float, int]:
        """The work between two writes, and the number of writes for each one that goes further."""
        raise NotImplementedError

    def _name(self) -> str:
        raise NotImplementedError

    def _mtbf(self) -> float:
        return PRIOR_S if self.mtbf_s is None else self.mtbf_s

    def _said_mtbf(self) -> str:
        return span(self._mtbf()) + (
            " as observed here"
            if self.is_observed
            else ""
            if self.mtbf_s is not None
            else ", unless told"
        )

    def _given(self) -> str:
        """The ``mtbf_s`` that the user gave, as text."""
        return "" if self.mtbf_s is None or self.is_observed else duration(self.mtbf_s)


@dataclass(frozen=True, slots=True)
class Young(_ByFailures):
    """Writes every ``sqrt(2 * delay * mtbf_s)`` (Young 1974). ``mtbf_s`` is the time between
    failures, by default as observed in the repository.

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
    """Like ``Young``, with Daly's estimates of 2006. The higher order holds for any cost of
    writing. The first order is available too.

        repo.track(model=model, cadence=datastates.Daly(mtbf_s=6 * 3600))

    :raises InvalidInput: ``mtbf_s`` is not a time span above 0.
    """

    is_first_order: bool = False

    def __post_init__(self) -> None:
        _ByFailures.__post_init__(self)
        object.__setattr__(
            self, "is_first_order", values.flag(self.is_first_order, "is_first_order")
        )

    def _best(self, costs: Costs) -> tuple[float, int]:
        cost_s = max(_LEAST_S, costs.overhead_s)
        return (
            daly_first(cost_s, self._mtbf()) if self.is_first_order else daly(cost_s, self._mtbf())
        ), 1

    def _name(self) -> str:
        return f"Daly's interval of {'first' if self.is_first_order else 'higher'} order"

    def __str__(self) -> str:
        return f"daly:{self._given()}:{'first' if self.is_first_order else ''}".rstrip(":")


@dataclass(frozen=True, slots=True)
class TwoLevel(_ByFailures):
    """Writes to this node's disk often, and every n-th of those states to the further tiers, so
    that the expected waste is least.

    A process dies every ``mtbf_s`` (None: as observed here), and states on the disk survive. The
    node is lost with its disk every ``node_mtbf_s``, and only states on the further tiers survive.
    Tagged states are always written to the further tiers.

        cadence = datastates.TwoLevel(mtbf_s=6 * 3600, node_mtbf_s=14 * 86400)
        repo.track(model=model, cadence=cadence)

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
        # what a second of writing costs; a second of copying is assumed to cost the same
        beside = cost_s / max(costs.write_s, _LEAST_S)
        far = Level(max(_LEAST_S, beside * costs.further_s), self.node_mtbf_s)
        found = two_level(
            Level(cost_s, self._mtbf()), far, least_s=max(_LEAST_S, costs.write_s / 10)
        )
        return found.interval_s, found.every

    def _name(self) -> str:
        return f"two levels, with a node lost every {span(self.node_mtbf_s)}"

    def __str__(self) -> str:
        node = "" if self.node_mtbf_s == NODE_MTBF_S else duration(self.node_mtbf_s)
        return f"two-level:{self._given()}:{node}".rstrip(":")


def _positive(given: object, what: str) -> float:
    found = values.seconds(given, what)
    if not 0 < found < float("inf"):
        raise InvalidInput(
            f"{what} is {values.shown(given)}: give a number of seconds above 0, such as 6 * 3600"
        )
    return found
