"""The cadence that is used unless the user gives another: every state is kept while that costs little, and else every n-th one."""

from __future__ import annotations

import math
from dataclasses import dataclass

from datastates import values
from datastates.errors import InvalidInput

from .cadence import INTERVAL_S
from .checkfreq import OVERHEAD
from .contract import CadenceChoice, Costs, Moment, Policy
from .probing import LONGER, stays
from .retention import size_text
from .spelling import percent

__all__ = ["BYTES_PER_S", "KEPT", "Auto"]

BYTES_PER_S = 32_000_000
"""The rate at which states are written for long, unless the user says otherwise, for the sake of the endurance of an SSD."""

KEPT = "is kept on disk"  # what ``why`` of its choices contains: they are whole sentences
_BURST_S = 60.0  # the bytes of so many seconds may be written at once
_SMALL_BYTES_PER_S = 4_000_000  # what is written so slowly is not limited by what it costs

# So many states, and bytes of them, may wait for the disk. If half of that waits, the disk is slow, full or away.
_WAITING, _WAITING_BYTES = 512, 64 << 20

# After so many captures, or so much time, the measured delay limits what is written. The token bucket limits it from the start.
_LEARNT, _LEARNT_S = 256, 30.0

# If the delay is still unknown then, and captures are so far apart, every second state is left out for a while, for comparison. Of captures
# that come more often, a group is written now and then.
_LONG_S = 0.05


@dataclass(frozen=True, slots=True)
class Auto(Policy):
    """Writes every state while that delays the training by at most ``overhead`` of its time, and stays within ``bytes_per_s``.

    The rate is that of a token bucket. It holds one minute's bytes and starts full. A training that writes less than 4 MB/s is not limited
    by ``overhead``. Above the limits every n-th state is written, and at least one each 30 s.

        repo.track(model=model, cadence=datastates.Auto(bytes_per_s=100_000_000))

    :raises InvalidInput: ``overhead`` is not a share above 0 and at most 1, or ``bytes_per_s`` is not a size.
    """

    overhead: float = OVERHEAD
    bytes_per_s: float = BYTES_PER_S
    is_computed = True

    def __post_init__(self) -> None:
        given = values.number(self.overhead, "the overhead of Auto")
        if isinstance(self.overhead, bool) or not 0 < given <= 1:
            raise InvalidInput(f"the overhead of Auto is {values.shown(self.overhead)}: give a share of the time, such as 0.035")
        object.__setattr__(self, "overhead", given)
        object.__setattr__(self, "bytes_per_s", values.size(self.bytes_per_s, "the bytes_per_s of Auto", least=1))

    def is_due(self, moment: Moment, /) -> bool:
        """See ``Policy``."""
        if not moment.is_newest or moment.since < 1:
            return False
        if moment.last_write is not None and moment.now - moment.last_write >= INTERVAL_S:
            return True
        every = 1 if moment.choice is None or moment.choice.every is None else moment.choice.every
        owed = moment.debt + moment.size * (moment.waiting + 1)
        is_first = moment.last_write is None
        return is_first or (moment.since >= every and moment.waiting < room_for(moment.size) and owed <= _BURST_S * self.bytes_per_s)

    def next_due(self, moment: Moment, /) -> float | None:
        """See ``Policy``."""
        return None if moment.last_write is None else moment.last_write + INTERVAL_S

    def told(self) -> CadenceChoice:
        """See ``Policy``."""
        limits = f"at most {percent(self.overhead)} of the time and {self.bytes_per_s / 1e6:.3g} MB/s"
        return CadenceChoice(str(self), f"each of your steps {KEPT} while that takes {limits}", every=1)

    def choose(self, costs: Costs, current: CadenceChoice | None, /) -> CadenceChoice | None:
        """See ``Policy``."""
        pace_s = costs.pace_s or costs.interval_s
        rate, allowed_s = costs.size / pace_s, self.overhead * pace_s
        before = 1 if current is None or current.every is None else current.every
        most_s = math.inf if costs.cpu_s is None else costs.cpu_s  # what does not use the processor delays no training
        by_cost = math.ceil(min(most_s, costs.sure_s) / (LONGER * allowed_s))
        if min(most_s, 2 * costs.error_s) > allowed_s and pace_s >= _LONG_S:
            by_cost = max(by_cost, 2)
        if costs.captures < _LEARNT and costs.captures * pace_s < _LEARNT_S:
            by_cost = 1
        by_rate = math.ceil(rate / self.bytes_per_s)
        is_dry = costs.debt > 0.9 * _BURST_S * self.bytes_per_s
        by_disk = min(before, math.ceil(costs.write_s / pace_s))
        if costs.waiting >= room_for(costs.size) / 2 + 1:
            by_disk = max(before + 1, math.ceil(costs.write_s / pace_s))
        limits = {
            "the disk is slow": by_disk,
            f"more would delay the training by over {percent(self.overhead)}": min(by_cost, math.ceil(rate / _SMALL_BYTES_PER_S)),
            f"more would exceed {self.bytes_per_s / 1e6:.3g} MB/s": by_rate if is_dry or before > 0.7 * by_rate else 1,
        }
        every = max(1, *limits.values())
        if current is not None and current.costs is not None and stays(before, every, current.costs, costs):
            return current
        why = "each of your steps" if every == 1 else f"one of every {every} steps"
        why += f" {KEPT}; {rate / every / 1e6:.2g} MB/s"
        if every > 1:
            why += f"; {max(limits, key=limits.__getitem__)}"
        return CadenceChoice(str(self), why, every=every, costs=costs)

    def __str__(self) -> str:
        parts = ["auto"]
        if (self.overhead, self.bytes_per_s) != (OVERHEAD, BYTES_PER_S):
            parts.append(percent(self.overhead))
        if self.bytes_per_s != BYTES_PER_S:
            parts.append(size_text(int(self.bytes_per_s)))
        return ":".join(parts)


def room_for(size: float) -> float:
    """How many states of this size may wait for the disk."""
    return min(_WAITING, max(1.0, _WAITING_BYTES / max(1.0, size)))
