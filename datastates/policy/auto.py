"""``Auto``, the default cadence, and the measurement of costs that all computed cadences use.

``Auto`` writes every state while that is cheap, and otherwise every n-th state. ``Measures``
computes costs from times that the engine reads.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from statistics import median

from datastates import values
from datastates.errors import InvalidInput

from .computed import LONGER, OVERHEAD, stays
from .contract import INTERVAL_S, CadenceChoice, Costs, Moment, Policy, percent
from .retention import size_text

BYTES_PER_S = 32_000_000
"""The default rate at which states are written for long. It protects the endurance of an SSD."""

KEPT = "is kept on disk"  # what ``why`` of its choices contains: they are whole sentences
_BURST_S = 60.0  # the bytes of so many seconds may be written at once
_SMALL_BYTES_PER_S = 4_000_000  # what is written so slowly is not limited by what it costs

# Limits for states, and their bytes, that wait for the disk. If half of that waits, the disk is
# slow, full or unavailable.
_WAITING = 512
_WAITING_BYTES = 64 << 20

# After so many captures, or so much time, the measured delay limits what is written. The token
# bucket limits it from the start.
_LEARNT = 256
_LEARNT_S = 30.0

# If the delay is still unknown then, and captures are this far apart, every second state is left
# out for a while, for comparison. More frequent captures are written in groups.
_LONG_S = 0.05
WARM_UP = 4
"""The number of first intervals of a training that are left out: those compile, fill caches and
touch memory."""

LEAST_CAPTURES = 16
"""The least number of intervals from which costs are computed."""

LEAST_WRITES = 3
"""The least number of writes from which costs are computed."""

EACH = 4
"""Costs are computed again after this many more writes, which takes a millisecond."""

_AGAIN_S = 2.0  # costs are computed at most this often
_KEPT = 256
"""How many intervals of each kind are used, the newest ones."""

# adjacent differences overlap, which makes the standard error larger by this factor
_OVERLAPPING = 1.4
_FAR = 10.0
_NORMAL = 1.4826
"""The deviation of a normal distribution, in median absolute deviations."""


@dataclass(frozen=True, slots=True)
class Auto(Policy):
    """Writes every state while that delays the training by at most ``overhead`` of its time, and
    stays within ``bytes_per_s``.

    The rate is limited by a token bucket, which holds one minute's bytes and starts full. A
    training that writes less than 4 MB/s is not limited by ``overhead``. Above the limits every
    n-th state is written, and at least one each 30 s.

        repo.track(model=model, cadence=datastates.Auto(bytes_per_s=100_000_000))

    :raises InvalidInput: ``overhead`` is not a share above 0 and at most 1, or ``bytes_per_s`` is
        not a size.
    """

    overhead: float = OVERHEAD
    bytes_per_s: float = BYTES_PER_S
    is_computed = True

    def __post_init__(self) -> None:
        given = values.number(self.overhead, "the overhead of Auto")
        if isinstance(self.overhead, bool) or not 0 < given <= 1:
            raise InvalidInput(
                f"the overhead of Auto is {values.shown(self.overhead)}: give a share of the time,"
                " such as 0.035"
            )
        object.__setattr__(self, "overhead", given)
        object.__setattr__(
            self, "bytes_per_s", values.size(self.bytes_per_s, "the bytes_per_s of Auto", least=1)
        )

    def is_due(self, moment: Moment, /) -> bool:
        """See ``Policy``."""
        if not moment.is_newest or moment.since < 1:
            return False
        if moment.last_write is not None and moment.now - moment.last_write >= INTERVAL_S:
            return True
        every = 1 if moment.choice is None or moment.choice.every is None else moment.choice.every
        owed = moment.debt + moment.size * (moment.waiting + 1)
        is_first = moment.last_write is None
        return is_first or (
            moment.since >= every
            and moment.waiting < room_for(moment.size)
            and owed <= _BURST_S * self.bytes_per_s
        )

    def next_due(self, moment: Moment, /) -> float | None:
        """See ``Policy``."""
        return None if moment.last_write is None else moment.last_write + INTERVAL_S

    def told(self) -> CadenceChoice:
        """See ``Policy``."""
        limits = (
            f"at most {percent(self.overhead)} of the time and {self.bytes_per_s / 1e6:.3g} MB/s"
        )
        return CadenceChoice(
            str(self), f"each of your steps {KEPT} while that takes {limits}", every=1
        )

    def choose(self, costs: Costs, current: CadenceChoice | None, /) -> CadenceChoice | None:
        """See ``Policy``."""
        pace_s = costs.pace_s or costs.interval_s
        rate, allowed_s = costs.size / pace_s, self.overhead * pace_s
        before = 1 if current is None or current.every is None else current.every
        # what does not use the processor delays no training
        most_s = math.inf if costs.cpu_s is None else costs.cpu_s
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
            f"more would delay the training by over {percent(self.overhead)}": min(
                by_cost, math.ceil(rate / _SMALL_BYTES_PER_S)
            ),
            f"more would exceed {self.bytes_per_s / 1e6:.3g} MB/s": (
                by_rate if is_dry or before > 0.7 * by_rate else 1
            ),
        }
        every = max(1, *limits.values())
        if (
            current is not None
            and current.costs is not None
            and stays(before, every, current.costs, costs)
        ):
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


# --- Measured costs of captures and writes ---


class Measures:
    """Takes in the times of captures and writes of one training: on one clock, captures in their
    order and writes in theirs."""

    def __init__(self) -> None:
        self._last: float | None = None
        self._skipped = self._captures = self._writes = 0
        self._waiting: deque[tuple[float, float]] = deque(maxlen=4 * _KEPT)
        # duration, overlap with writes, end
        self._quiet: deque[tuple[float, float, float]] = deque(maxlen=_KEPT)
        self._beside: deque[tuple[float, float, float]] = deque(maxlen=_KEPT)
        self._held: deque[float] = deque(maxlen=_KEPT)
        self._recent: deque[tuple[float, float]] = deque(maxlen=16)
        self._durations: deque[float] = deque(maxlen=12)
        self._cpu: deque[float] = deque(maxlen=12)
        self._sizes: deque[float] = deque(maxlen=12)
        self._known: Costs | None = None
        self._next, self._next_at, self._now = LEAST_WRITES, -math.inf, 0.0

    def captured(self, at: float, held_s: float | None = None) -> None:
        """Note that a capture began; ``held_s`` is how long the capture before it held the
        training."""
        if self._last is not None and at > self._last:
            if self._skipped < WARM_UP:
                self._skipped += 1
            else:
                self._waiting.append((self._last, at))
        if held_s is not None and self._last is not None:
            self._held.append(held_s)
        self._last = at

    @property
    def size(self) -> float | None:
        """The bytes that a state lately added to the disk. None before the first write."""
        return median(self._sizes) if self._sizes else None

    def wrote(
        self,
        began: float,
        ended: float,
        *,
        is_own: bool = True,
        states: int = 1,
        size: int = 0,
        cpu_s: float | None = None,
    ) -> None:
        """Note that some states were written together. ``is_own`` is False for a write of another
        training in this process.

        ``size`` is how many bytes they added to the disk, and ``cpu_s`` how long the writing thread
        kept a processor busy.
        """
        self._recent.append((began, ended))
        self._now = ended
        if is_own:
            self._writes += 1
            self._durations.append((ended - began) / states)
            self._sizes.append(size / states)
            if cpu_s is not None:
                self._cpu.append(cpu_s / states)
        usual = self._usual()
        while self._waiting and self._waiting[0][1] <= ended:
            begin, end = self._waiting.popleft()
            until = begin + usual
            overlap = sum(
                max(0.0, min(until, last) - max(begin, first))
                for first, last in self._recent
                if first < end and last > begin
            )
            (self._beside if overlap > 0 else self._quiet).append((end - begin, overlap, end))
            self._captures += 1

    def _usual(self) -> float:
        """The usual length of an interval with a write."""
        known = [duration for duration, *_ in self._beside or self._quiet] or [
            end - begin for begin, end in self._waiting
        ]
        return median(known) if known else 0.0

    def costs(self) -> Costs | None:
        """The costs, or None if too little was measured."""
        if (
            self._captures >= LEAST_CAPTURES
            and self._writes >= self._next
            and self._now >= self._next_at
            and self._beside
        ):
            self._known = self._reckoned()
            self._next, self._next_at = self._writes + EACH, self._now + _AGAIN_S
        return self._known

    def _reckoned(self) -> Costs:
        known_since = self._beside[0][2] if len(self._beside) == _KEPT else -math.inf
        quiet = (each for each in self._quiet if each[2] >= known_since)
        ordered = sorted((*quiet, *self._beside), key=itemgetter(2))
        samples = [(duration, overlap) for duration, overlap, _ in ordered]
        durations = [duration for duration, _ in samples]
        base, slope, _ = fit(samples)
        _, local, error = fit(_beside_neighbours(samples))
        error *= _OVERLAPPING
        write_s = median(self._durations)
        held_s = median(self._held) if self._held else 0.0
        return Costs(
            *(
                max(base, min(durations)),
                write_s,
                slope * write_s,
                held_s,
                self._captures,
                self._writes,
            ),
            pace_s=median(durations),
            sure_s=max(0.0, local - 2.5 * error) * write_s,
            error_s=error * write_s,
            cpu_s=median(self._cpu) if self._cpu else None,
            size=self.size or 0.0,
        )


def _beside_neighbours(samples: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Each sample less the mean of the one before and the one after it, on the level of all."""
    usual, share = _means(samples)
    return [
        (
            duration - (before[0] + after[0]) / 2 + usual,
            overlap - (before[1] + after[1]) / 2 + share,
        )
        for before, (duration, overlap), after in zip(
            samples, samples[1:], samples[2:], strict=False
        )
    ]


def _means(samples: Sequence[tuple[float, float]]) -> tuple[float, float]:
    return sum(duration for duration, _ in samples) / len(samples), sum(
        overlap for _, overlap in samples
    ) / len(samples)


def fit(samples: Sequence[tuple[float, float]]) -> tuple[float, float, float]:
    """The duration without a write, what a second of writing adds, and the standard error of that.

    :param samples: durations, each with its seconds of overlap with a write.
    """
    most = _FAR * median(duration for duration, _ in samples)
    samples = [(min(duration, most), overlap) for duration, overlap in samples]
    base, slope, _ = _line(samples)
    off = [duration - base - slope * overlap for duration, overlap in samples]
    middle = median(off)
    reach = max(_FAR * _NORMAL * median(abs(each - middle) for each in off), abs(base) / 2)
    near = [
        (base + slope * overlap + min(max(each, middle - reach), middle + reach), overlap)
        for (_, overlap), each in zip(samples, off, strict=True)
    ]
    base, slope, error = _line(near)
    slope = max(0.0, slope - error / 2)
    if slope == 0.0:
        base = sum(duration for duration, _ in near) / len(near)
    return max(base, 1e-9), slope, error


def _line(samples: Sequence[tuple[float, float]]) -> tuple[float, float, float]:
    """The line of least squares: intercept, slope, and the slope's standard error.

    If all overlap alike, slope and error are 0 and inf."""
    count = len(samples)
    mean, centre = _means(samples)
    spread = sum((overlap - centre) ** 2 for _, overlap in samples)
    if count < 3 or spread < 1e-18:
        return mean, 0.0, math.inf
    slope = sum((overlap - centre) * (duration - mean) for duration, overlap in samples) / spread
    base = mean - slope * centre
    left = sum((duration - base - slope * overlap) ** 2 for duration, overlap in samples)
    return base, slope, math.sqrt(left / (count - 2) / spread)
