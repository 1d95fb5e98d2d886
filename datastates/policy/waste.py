"""How much of a training's time checkpoints and failures waste, and the intervals that waste least.

Failures come at random, at a constant rate. The cost of a checkpoint is the delay that it causes. It may take longer; N. Vaidya, "Impact of
Checkpoint Latency on Overhead Ratio of a Checkpointing Scheme", 1997, shows that the best interval depends on the delay alone.

- ``young``: J. W. Young, "A first order approximation to the optimum checkpoint interval", CACM 1974. It holds where a checkpoint costs
  little compared with the time between failures: with a delay of a good half of that, its intervals waste over 2 % more than the best ones.
- ``daly_first``, ``daly``: J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", FGCS 2006. The first
  order fails in the same way, at larger delays and worse; the higher order holds everywhere.
- ``two_level``: near checkpoints (this node's disk) survive most failures; far ones, every n-th of them, survive all. The expected waste of
  that pattern is computed exactly, and its minimum is searched for.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Level", "Pattern", "daly", "daly_first", "expected_waste", "two_level", "young"]

_GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True, slots=True)
class Level:
    """A place of checkpoints: one delays the training by ``cost_s``. A failure that these checkpoints survive, and no nearer ones do, comes
    every ``mtbf_s``, and recovering takes ``recovery_s``.
    """

    cost_s: float
    mtbf_s: float
    recovery_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Pattern:
    """``interval_s`` of work between two checkpoints, every ``every``-th of which is also kept far; and the share of time expected as
    waste.
    """

    interval_s: float
    every: int
    waste: float


def young(cost_s: float, mtbf_s: float) -> float:
    """The work between two checkpoints, in seconds."""
    return math.sqrt(2 * cost_s * mtbf_s)


def daly_first(cost_s: float, mtbf_s: float, recovery_s: float = 0.0) -> float:
    """The work between two checkpoints, in seconds, by Daly's first order; 0 if a checkpoint costs too much."""
    return max(0.0, math.sqrt(2 * cost_s * (mtbf_s + recovery_s)) - cost_s)


def daly(cost_s: float, mtbf_s: float) -> float:
    """The work between two checkpoints, in seconds, by Daly's higher order."""
    if cost_s >= 2 * mtbf_s:
        return mtbf_s
    half = cost_s / (2 * mtbf_s)
    return math.sqrt(2 * cost_s * mtbf_s) * (1 + math.sqrt(half) / 3 + half / 9) - cost_s


def expected_waste(interval_s: float, near: Level, far: Level | None = None, every: int = 1) -> float:
    """The share of the time that is no new work: from 0 to 1. Exact for failures at a constant rate, none of them during a recovery."""
    near_rate, far_rate = 1 / near.mtbf_s, 0.0 if far is None else 1 / far.mtbf_s
    rate = near_rate + far_rate
    back = near.recovery_s if far is None else (near_rate * near.recovery_s + far_rate * far.recovery_s) / rate
    to_far = far_rate / rate

    def segment(length_s: float) -> tuple[float, float]:
        """The time that one segment adds to the expected time, and the factor of what comes after it."""
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
    """The pattern with the least expected waste, with at least ``least_s`` between two checkpoints."""
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
    interval = math.exp(_least(lambda log: expected_waste(math.exp(log), near, far, every), math.log(least_s), math.log(most)))
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
