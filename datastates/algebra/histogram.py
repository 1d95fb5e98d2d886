"""The distribution of the values of one tensor, in one state or in several over the same bins.

Chunks are read one after the other, twice: for the extremes, and for the counts. A few MiB of memory are enough for a tensor of any size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

import numpy as np
import torch

from datastates.content.geometry import dtype_of
from datastates.content.manifest import CHUNK_BYTES, TensorSpec
from datastates.errors import InvalidInput, NotFound
from datastates.lineage.states import State

from .diff import untied
from .numeric import check_numeric

if TYPE_CHECKING:
    from datastates.opening.core import Core
    from datastates.store.tier import Reader

__all__ = ["BINS", "MOST_BINS", "MOST_STATES", "Histogram", "Scale", "Spread", "histogram"]

BINS, MOST_BINS = 64, 512
MOST_STATES = 4
"""The most states that may be counted over the same bins."""

_LISTED = 5
_EPSILON = float(np.finfo(np.float64).eps)
_POWERS = (-323.0, 308.0)  # powers of ten that are numbers


class Scale(StrEnum):
    """The quantity in which bins are equally wide: the values, or the logarithms of their magnitudes."""

    LINEAR = "linear"
    LOG = "log"


@dataclass(frozen=True, slots=True)
class Spread:
    """The values of the tensor in one state. ``counts`` is the number of values in each bin; the last bin includes its upper edge.

    Of ``elements``, ``nan`` are NaN and ``infinite`` are infinite, and lie in no bin; on the scale ``log`` neither do the ``zeros``. All
    other numbers are over the finite values, ``deviation`` is the standard deviation; they are None if there are no such values, or if
    these are too large.
    """

    state: str
    counts: tuple[int, ...]
    elements: int
    nan: int
    infinite: int
    zeros: int
    least: float | None
    most: float | None
    mean: float | None
    deviation: float | None


@dataclass(frozen=True, slots=True)
class Histogram:
    """One tensor in some states over the same bins: ``edges`` has one more element than there are bins. Complex numbers count as two
    values.
    """

    path: str
    scale: Scale
    edges: tuple[float, ...]
    states: tuple[Spread, ...]


def histogram(
    core: Core,
    states: Sequence[str | State],
    path: str,
    *,
    bins: int = BINS,
    scale: Scale = Scale.LINEAR,
    on_progress: Callable[[int, int], None] | None = None,
) -> Histogram:
    """Count the values of one tensor.

    :param core: the core of the repository.
    :param states: revisions or states.
    :param path: the path of the tensor, as ``diff`` gives it.
    :param bins: the number of bins.
    :param scale: the quantity in which bins are equally wide.
    :param on_progress: gets the bytes that were read, and their total; an error that it raises ends the counting.
    :raises NotFound: a state has no such tensor; names close ones.
    :raises Unavailable: the bytes of a state are gone.
    :raises InvalidInput: there are too many states or bins.
    :raises Unsupported: torch does not compute with the tensor.
    """
    if not 1 <= len(states) <= MOST_STATES:
        raise InvalidInput(f"{len(states)} states are asked for: from 1 to {MOST_STATES} can be counted over the same bins")
    if not 1 <= bins <= MOST_BINS:
        raise InvalidInput(f"bins is {bins}: choose from 1 to {MOST_BINS}")
    with ExitStack() as stack:
        found = []
        for state in map(core.state, states):
            reader = stack.enter_context(core.open_payload(state))
            spec = _spec(reader, path, state)
            check_numeric(spec, "its values cannot be counted")
            found.append((state, _Values(reader, spec)))
        tell = _Progress(2 * sum(values.bytes for _, values in found), on_progress)
        ranges = [values.look(scale, tell) for _, values in found]
        edges = _edges(ranges, bins, scale)
        spreads = [values.count(state.uid, known, edges, scale, tell) for (state, values), known in zip(found, ranges, strict=True)]
    said = 10.0 ** np.clip(edges, *_POWERS) if scale is Scale.LOG else edges
    return Histogram(path, scale, tuple(map(float, said)), tuple(spreads))


@dataclass(slots=True)
class _Progress:
    total: int
    say: Callable[[int, int], None] | None
    done: int = 0

    def __call__(self, count: int) -> None:
        self.done += count
        if self.say is not None:
            self.say(self.done, self.total)


@dataclass(slots=True)
class _Known:
    """What the first reading finds of the finite values; ``low`` and ``high`` are the ends of the range that is counted, on its scale."""

    least: float = math.inf
    most: float = -math.inf
    low: float = math.inf
    high: float = -math.inf
    count: int = 0
    total: float = 0.0
    nan: int = 0
    infinite: int = 0
    zeros: int = 0


@dataclass(slots=True)
class _Values:
    """The values of a tensor of an open state, a chunk at a time, in no particular order."""

    reader: Reader
    spec: TensorSpec

    @property
    def bytes(self) -> int:
        """The number of bytes that are read for the values."""
        return sum(shard.length for shard in self.spec.shards)

    @property
    def times(self) -> int:
        """How often each stored value occurs in the tensor: more than once in an expanded tensor."""
        stored = self.bytes // dtype_of(self.spec.dtype).itemsize
        return math.prod(self.spec.shape) // stored if stored else 1

    def pieces(self, tell: Callable[[int], None]) -> Iterator[np.ndarray]:
        """All values as float64; complex ones as pairs."""
        dtype = dtype_of(self.spec.dtype)
        for shard in self.spec.shards:
            for done in range(0, shard.length, CHUNK_BYTES):
                piece = torch.empty(min(CHUNK_BYTES, shard.length - done), dtype=torch.uint8, device="cpu")
                self.reader.gather(shard.start + done, memoryview(piece.numpy().data))
                values = piece.view(dtype)
                values = torch.view_as_real(values).reshape(-1) if dtype.is_complex else values
                yield values.to(torch.float64).numpy()
                tell(piece.numel())

    def look(self, scale: Scale, tell: Callable[[int], None]) -> _Known:
        """Do the first reading."""
        known = _Known()
        for piece in self.pieces(tell):
            values = piece[np.isfinite(piece)]
            known.nan += self.times * int(np.isnan(piece).sum())
            known.infinite += self.times * int(np.isinf(piece).sum())
            known.count += self.times * values.size
            if not values.size:
                continue
            with np.errstate(over="ignore", invalid="ignore"):
                known.total += self.times * float(values.sum())
            known.least, known.most = min(known.least, float(values.min())), max(known.most, float(values.max()))
            scaled = _scaled(values, scale)
            known.zeros += self.times * (values.size - scaled.size) if scale is Scale.LOG else 0
            if scaled.size:
                known.low, known.high = min(known.low, float(scaled.min())), max(known.high, float(scaled.max()))
        return known

    def count(self, uid: str, known: _Known, edges: np.ndarray, scale: Scale, tell: Callable[[int], None]) -> Spread:
        """Do the second reading."""
        counts = np.zeros(len(edges) - 1, dtype=np.int64)
        mean = known.total / known.count if known.count else 0.0
        apart = 0.0
        for piece in self.pieces(tell):
            values = piece[np.isfinite(piece)]
            counts += self.times * np.histogram(_scaled(values, scale), bins=len(counts), range=(float(edges[0]), float(edges[-1])))[0]
            with np.errstate(over="ignore", invalid="ignore"):  # values near the largest number: then there is no such figure
                apart += self.times * float(np.square(values - mean).sum())
        has = known.count > 0
        return Spread(
            state=uid,
            counts=tuple(map(int, counts)),
            elements=known.count + known.nan + known.infinite,
            nan=known.nan,
            infinite=known.infinite,
            zeros=known.zeros,
            least=known.least if has else None,
            most=known.most if has else None,
            mean=mean if has and math.isfinite(mean) else None,
            deviation=math.sqrt(apart / known.count) if has and math.isfinite(apart) else None,
        )


def _scaled(values: np.ndarray, scale: Scale) -> np.ndarray:
    return values if scale is Scale.LINEAR else np.log10(np.abs(values[values != 0]))


def _edges(ranges: Sequence[_Known], bins: int, scale: Scale) -> np.ndarray:
    """The edges of bins from the least to the greatest value of all; around a single value as NumPy does it."""
    low, high = min(known.low for known in ranges), max(known.high for known in ranges)
    if low > high:  # nothing to count
        low, high = 0.0, 1.0
    if not math.isfinite(high - low):
        raise InvalidInput(f"values from {low:.3g} to {high:.3g} are too far apart for bins of one width: ask for the scale {Scale.LOG}")
    least = 4 * bins * _EPSILON * max(abs(low), abs(high))
    if low == high:
        least = max(1.0, least)
    if high - low < least:
        middle = low + (high - low) / 2
        low, high = middle - least / 2, middle + least / 2
    return np.linspace(low, high, bins + 1)


def _spec(reader: Reader, path: str, state: State) -> TensorSpec:
    specs = {spec.path: spec for spec in untied(reader)}
    if path in specs:
        return specs[path]
    from difflib import get_close_matches

    close = get_close_matches(path, specs, n=_LISTED, cutoff=0.4)
    hint = f"did you mean {' or '.join(close)}?" if close else f"it has {len(specs)} tensors, which 'tensors' lists"
    raise NotFound(f"state {state.uid[:10]} has no tensor {path!r}: {hint}")
