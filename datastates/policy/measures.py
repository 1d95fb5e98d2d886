"""What captures and writes of a training cost, learnt from when they happened: arithmetic on times that others read.

A write goes on beside the training, so its duration is not its cost. Its cost is how much longer the intervals between captures are while
it goes on. Each interval is plotted against the seconds of it that overlap with a write, and a line is fitted (least squares). The
intercept is the interval without a write; the slope is how many seconds of training a second of writing costs.

Rules:
- The overlap of an interval is computed as if the interval were as long as usual. An interval that happens to be longer would overlap with
  more of a write, and so noise alone would look like a cost.
- The first ``WARM_UP`` intervals of a training are left out.
- An interval that is far longer than others (an evaluation, a night in suspend) counts as ``_FAR`` times their length, and one that lies
  far off the line counts as ``_FAR`` deviations off it.
- The slope is taken half a standard error lower, and not below 0: a difference that can hardly be told from noise is no cost. The more
  writes, the less noise.
- Another process that slows down the machine for a while makes intervals and writes longer alike, and so looks like a cost. A policy that
  must not be misled uses ``sure_s``: it compares intervals only with their neighbours, and is three standard errors lower.
- Several states may be written together. The costs are those of one of them.
- Intervals without a write that are older than all known intervals beside one are left out: the training may have had another pace then.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from operator import itemgetter
from statistics import median

from .contract import Costs

__all__ = ["EACH", "LEAST_CAPTURES", "LEAST_WRITES", "WARM_UP", "Measures"]

WARM_UP = 4
"""The number of first intervals of a training that are left out: those compile, fill caches and touch memory."""

LEAST_CAPTURES = 16
"""The least number of intervals from which costs are computed."""

LEAST_WRITES = 3
"""The least number of writes from which costs are computed."""

EACH = 4
"""Costs are computed anew after this many more writes, which takes a millisecond."""

_AGAIN_S = 0.5  # costs are computed at most this often

_KEPT = 256
"""How many intervals of each kind are used, the newest ones."""

_OVERLAPPING = 1.4  # differences of neighbours overlap, and so the standard error of what they show is larger by this factor

_FAR = 10.0
_NORMAL = 1.4826
"""The deviation of a normal distribution, in median absolute deviations."""


class Measures:
    """Takes in the times of captures and writes of one training: on one clock, captures in their order and writes in theirs."""

    def __init__(self) -> None:
        self._last: float | None = None
        self._skipped = self._captures = self._writes = 0
        self._waiting: deque[tuple[float, float]] = deque(maxlen=4 * _KEPT)
        self._quiet: deque[tuple[float, float, float]] = deque(maxlen=_KEPT)  # duration, overlap with writes, end
        self._beside: deque[tuple[float, float, float]] = deque(maxlen=_KEPT)
        self._held: deque[float] = deque(maxlen=_KEPT)
        self._recent: deque[tuple[float, float]] = deque(maxlen=16)
        self._durations: deque[float] = deque(maxlen=12)
        self._cpu: deque[float] = deque(maxlen=12)
        self._sizes: deque[float] = deque(maxlen=12)
        self._known: Costs | None = None
        self._next, self._next_at, self._now = LEAST_WRITES, -math.inf, 0.0

    def captured(self, at: float, held_s: float | None = None) -> None:
        """Note that a capture began; ``held_s`` is how long the capture before it held the training."""
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
        """The bytes that a state lately added to the disk; None: nothing was written yet."""
        return median(self._sizes) if self._sizes else None

    def wrote(self, began: float, ended: float, *, is_own: bool = True, states: int = 1, size: int = 0, cpu_s: float | None = None) -> None:
        """Note that some states were written together; ``is_own``: they are of this training, not of another one in this process.

        ``size`` is how many bytes they added to the disk, and ``cpu_s`` how long the writing thread kept a processor busy.
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
            overlap = sum(max(0.0, min(until, last) - max(begin, first)) for first, last in self._recent if first < end and last > begin)
            (self._beside if overlap > 0 else self._quiet).append((end - begin, overlap, end))
            self._captures += 1

    def _usual(self) -> float:
        """The usual length of an interval beside a write."""
        known = [duration for duration, *_ in self._beside or self._quiet] or [end - begin for begin, end in self._waiting]
        return median(known) if known else 0.0

    def costs(self) -> Costs | None:
        """The costs that are known so far; None: too little is known."""
        if self._captures >= LEAST_CAPTURES and self._writes >= self._next and self._now >= self._next_at and self._beside:
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
            *(max(base, min(durations)), write_s, slope * write_s, held_s, self._captures, self._writes),
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
        (duration - (before[0] + after[0]) / 2 + usual, overlap - (before[1] + after[1]) / 2 + share)
        for before, (duration, overlap), after in zip(samples, samples[1:], samples[2:], strict=False)
    ]


def _means(samples: Sequence[tuple[float, float]]) -> tuple[float, float]:
    return sum(duration for duration, _ in samples) / len(samples), sum(overlap for _, overlap in samples) / len(samples)


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
    """The line of least squares: intercept, slope, and the slope's standard error. If all overlap alike, slope and error are 0 and inf."""
    count = len(samples)
    mean, centre = _means(samples)
    spread = sum((overlap - centre) ** 2 for _, overlap in samples)
    if count < 3 or spread < 1e-18:
        return mean, 0.0, math.inf
    slope = sum((overlap - centre) * (duration - mean) for duration, overlap in samples) / spread
    base = mean - slope * centre
    left = sum((duration - base - slope * overlap) ** 2 for duration, overlap in samples)
    return base, slope, math.sqrt(left / (count - 2) / spread)
