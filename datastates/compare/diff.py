"""The changes from one state to another: tensors, values, metrics, configuration and code. Also
histograms of one tensor.

Tensors are read piece by piece, so a few tensors' memory is enough. Chunks that both states share
are not read. If the bytes of a state are missing, all other changes are returned, with the nearest
state that has its bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
import torch
from msgspec.structs import replace

from datastates.errors import InvalidInput, NotFound, Unavailable, Unsupported
from datastates.lineage.query import walk
from datastates.lineage.states import Run, State
from datastates.lineage.write import runs
from datastates.maintenance.core import Core, nearest_here
from datastates.state.encoding import decode_values
from datastates.state.geometry import bytes_of, dtype_of, rebuild
from datastates.state.manifest import CHUNK_BYTES, Manifest, Shard, TensorSpec
from datastates.state.report import Selection
from datastates.state.skeleton import VALUE, decode_skeleton, paths
from datastates.storage.reading import read_flat, specs_of
from datastates.system import logs

if TYPE_CHECKING:
    from datastates.storage.tier import Reader

_PIECE = 1 << 20  # elements that are compared at once, as float64
_LONG = (torch.int64, torch.uint64)
_INTEGERS = {1: "uint8", 2: "int16"}  # by their size
_EXACT = 2.0**62  # a smaller difference of two integers is a difference of their bits too
Pair = tuple[object, object]
"""The old and the new value; None where a value does not exist."""

BINS = 64
MOST_BINS = 512
MOST_STATES = 4
"""The most states that may be counted over the same bins."""

_LISTED = 5
_EPSILON = float(np.finfo(np.float64).eps)
_POWERS = (-323.0, 308.0)  # powers of ten that are numbers


@cache
def is_numeric(dtype: str) -> bool:
    """Whether torch can convert between elements of a dtype and numbers."""
    kind = dtype_of(dtype)
    if kind.is_complex:
        return True
    try:
        torch.zeros(kind.itemsize, dtype=torch.uint8, device="cpu").view(kind).to(torch.float64)
    except NotImplementedError:
        return False
    return True


def check_numeric(spec: TensorSpec, advice: str) -> None:
    """Raise unless torch computes with the tensor. The message ends with the advice.

    :raises Unsupported: it does not.
    """
    if not is_numeric(spec.dtype):
        raise Unsupported(
            f"{spec.path} is {spec.dtype}, which torch stores but does not compute with: {advice}"
        )


# --- Diff of two states ---


class Change(StrEnum):
    """How a tensor changed. ``RECAST``: its dtype or its shape differs.

    ``UNREAD``, if no payload is read: the tensor is in chunks that differ, and may or may not have
    changed.
    """

    SAME = "same"
    CHANGED = "changed"
    UNREAD = "unread"
    RECAST = "recast"
    ADDED = "added"
    REMOVED = "removed"


@dataclass(frozen=True, slots=True)
class TensorChange:
    """One tensor of two states. Norms and the distance between the two are Euclidean; NaN in a
    tensor makes them NaN.

    Numbers are None if there is nothing to compare: added, removed, another shape, a dtype that
    torch does not compute with, or the same bytes, which are not read. ``largest`` is the largest
    change of one element, ``at`` is its indices, ``fraction`` is the share of elements that differ,
    from 0 to 1. ``relative`` is the distance in units of the old norm, None if that is 0.
    """

    path: str
    change: Change
    shape: tuple[int, ...]
    dtype: str
    old_shape: tuple[int, ...] | None = None
    old_dtype: str | None = None
    old_norm: float | None = None
    norm: float | None = None
    distance: float | None = None
    cosine: float | None = None
    largest: float | None = None
    at: tuple[int, ...] | None = None
    fraction: float | None = None
    relative: float | None = None


@dataclass(frozen=True, slots=True)
class Lacking:
    """A state whose tensors and values could not be compared, why, and the nearest of its first
    parents that can be restored."""

    state: str
    why: str
    nearest: State | None


@dataclass(frozen=True, slots=True)
class Diff:
    """The changes from ``old`` to ``new``. ``base`` is their nearest common ancestor.

    Metrics, config and versions that are equal are left out. If the bytes of one state are not
    available, ``tensors`` and ``values`` are empty, and ``lacking`` names the state and the reason.
    """

    old: State
    new: State
    base: State | None
    tensors: tuple[TensorChange, ...]
    values: Mapping[str, Pair]
    metrics: Mapping[str, Pair]
    attributes: Mapping[str, Pair]
    config: Mapping[str, Pair]
    versions: Mapping[str, Pair]
    code: Pair | None
    lacking: tuple[Lacking, ...] = ()

    def count(self, change: Change) -> int:
        """How many tensors changed in this way."""
        return sum(tensor.change is change for tensor in self.tensors)


def diff(
    core: Core,
    old: str | State,
    new: str | State,
    *,
    only: str | Sequence[str] | None = None,
    with_tensors: bool = True,
    stat: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
) -> Diff:
    """Compare two states; see ``Repository.diff``.

    ``on_progress`` gets the bytes of ``new`` that were compared, and their total. An error that it
    raises ends the comparison. Without ``with_tensors`` no payload is opened. The result then has
    no tensors, and no values, which are stored with them. With ``stat``, manifests are read and
    payloads are not.
    """
    one, other = core.state(old), core.state(new)
    tensors: tuple[TensorChange, ...] = ()
    values: Mapping[str, Pair] = {}
    lacking: tuple[Lacking, ...] = ()
    if with_tensors:
        with ExitStack() as stack:
            readers, lacking = _opened(core, (one, other), stack)
            if not lacking:
                before, after = readers
                selection, told = Selection(only), [_values(reader.manifest) for reader in readers]
                selection.check(
                    chain((spec.path for reader in readers for spec in specs_of(reader)), *told)
                )
                tensors = tuple(
                    _tensors(
                        before,
                        after,
                        selection.wants,
                        on_progress or (lambda done, total: None),
                        stat,
                    )
                )
                values = _masked(_delta(*told))
    with core.database.read() as session:
        base = walk.merge_base(session, one.uid, other.uid)
        ran = [
            None if state.run is None else runs.get(session, state.run) for state in (one, other)
        ]
    commits = tuple(map(_code, ran))
    return Diff(
        old=one,
        new=other,
        base=base,
        tensors=tensors,
        values=values,
        metrics=_delta(one.metrics, other.metrics),
        attributes=_delta(one.attributes, other.attributes),
        config=_delta(one.config, other.config),
        versions=_delta(*({} if run is None else run.versions for run in ran)),
        code=None if commits[0] == commits[1] else (commits[0], commits[1]),
        lacking=lacking,
    )


def _opened(
    core: Core, states: Sequence[State], stack: ExitStack
) -> tuple[list[Reader], tuple[Lacking, ...]]:
    """The payload of each state, open until the end of the block; and the states whose payload
    is not available."""
    readers, lacking = [], []
    for state in states:
        try:
            readers.append(stack.enter_context(core.open_payload(state)))
        except Unavailable as error:
            with core.reading() as session:
                nearest = nearest_here(core, session, state.parents[0]) if state.parents else None
            lacking.append(Lacking(state.uid, str(error), nearest))
    return readers, tuple(lacking)


# --- Tensors ---


def _tensors(
    before: Reader,
    after: Reader,
    wants: Callable[[str], bool],
    on_progress: Callable[[int, int], None],
    stat: bool,
) -> Iterator[TensorChange]:
    olds, news = (
        {spec.path: spec for spec in untied(reader) if wants(spec.path)}
        for reader in (before, after)
    )
    total = sum(map(bytes_of, news.values()))
    done = 0
    for path, new in news.items():
        yield compare(before, after, olds.get(path), new, stat=stat)
        done += bytes_of(new)
        on_progress(done, total)
    for path, old in olds.items():
        if path not in news:
            yield TensorChange(path, Change.REMOVED, old.shape, old.dtype)


def untied(reader: Reader) -> list[TensorSpec]:
    """Each tensor of a state with its place; a tied tensor has the place of the tensor to which
    it is tied."""
    specs = specs_of(reader)
    return [spec if spec.alias is None else _placed(spec, specs[spec.alias]) for spec in specs]


def _placed(spec: TensorSpec, owner: TensorSpec) -> TensorSpec:
    return TensorSpec(
        spec.path, owner.dtype, owner.shape, owner.strides, None, spec.requires_grad, owner.shards
    )


def compare(
    before: Reader, after: Reader, old: TensorSpec | None, new: TensorSpec, *, stat: bool
) -> TensorChange:
    """The change of one tensor between two states; with ``stat`` from the manifests alone."""
    if old is None:
        return TensorChange(new.path, Change.ADDED, new.shape, new.dtype)
    if old.shape != new.shape or dtype_of(old.dtype).is_complex != dtype_of(new.dtype).is_complex:
        return TensorChange(new.path, Change.RECAST, new.shape, new.dtype, old.shape, old.dtype)
    if _is_same_bytes(before.manifest, old, after.manifest, new):
        return TensorChange(new.path, Change.SAME, new.shape, new.dtype)
    if stat:
        if old.dtype != new.dtype:
            return TensorChange(new.path, Change.RECAST, new.shape, new.dtype, old.shape, old.dtype)
        return TensorChange(new.path, Change.UNREAD, new.shape, new.dtype)
    is_recast = old.dtype != new.dtype
    both = zip(_elements(before, old), _elements(after, new), strict=True)
    if not (is_numeric(old.dtype) and is_numeric(new.dtype)):
        if is_recast:
            return TensorChange(new.path, Change.RECAST, new.shape, new.dtype, old.shape, old.dtype)
        is_same = all(torch.equal(left, right) for left, right in both)
        return TensorChange(
            new.path, Change.SAME if is_same else Change.CHANGED, new.shape, new.dtype
        )
    sums = _Sums()
    for left, right in both:
        sums.add(left, right)
    change = Change.RECAST if is_recast else Change.CHANGED if sums.differing else Change.SAME
    return TensorChange(
        new.path,
        change,
        new.shape,
        new.dtype,
        old.shape if is_recast else None,
        old.dtype if is_recast else None,
        math.sqrt(sums.old),
        math.sqrt(sums.new),
        math.sqrt(sums.apart),
        sums.cosine,
        sums.largest,
        _indices(sums.at, new) if sums.differing else None,
        sums.differing / sums.count if sums.count else 0.0,
        math.sqrt(sums.apart) / math.sqrt(sums.old) if sums.old else None,
    )


def _is_same_bytes(before: Manifest, old: TensorSpec, after: Manifest, new: TensorSpec) -> bool:
    """Whether all shards of both are at the same places of chunks that have the same digests. They
    are then equal without reading."""
    if (old.dtype, old.strides, len(old.shards)) != (new.dtype, new.strides, len(new.shards)):
        return False
    return all(
        _is_same_shard(before, here, after, there)
        for here, there in zip(old.shards, new.shards, strict=True)
    )


def _is_same_shard(before: Manifest, here: Shard, after: Manifest, there: Shard) -> bool:
    if (here.offset, here.shape, here.start % CHUNK_BYTES) != (
        there.offset,
        there.shape,
        there.start % CHUNK_BYTES,
    ):
        return False
    if not here.length:
        return True
    first, other, count = (
        here.start // CHUNK_BYTES,
        there.start // CHUNK_BYTES,
        _last(here.start, here.length) - here.start // CHUNK_BYTES,
    )
    lefts, rights = (
        before.content.chunks[first : first + count + 1],
        after.content.chunks[other : other + count + 1],
    )
    return lefts == rights


def _last(start: int, length: int) -> int:
    return (start + length - 1) // CHUNK_BYTES


def pieces(reader: Reader, spec: TensorSpec) -> Iterator[torch.Tensor]:
    """The elements in the order of the indices, as float64; complex ones as pairs.

    :raises Unsupported: torch does not compute with them.
    """
    check_numeric(spec, "there is no figure of it")
    for piece in _elements(reader, spec):
        yield piece.to(torch.float64)


def _elements(reader: Reader, spec: TensorSpec) -> Iterator[torch.Tensor]:
    """The elements in the order of the indices, piece by piece; complex ones as pairs, and those
    with which torch does not compute as integers.
    """
    if 0 in spec.shape:
        return
    plain = (
        spec
        if is_numeric(spec.dtype)
        else replace(spec, dtype=_INTEGERS[dtype_of(spec.dtype).itemsize])
    )
    tensor = rebuild(read_flat(reader, spec), plain).detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    flat = tensor.reshape(-1)  # a copy if another order is stored
    for start in range(0, flat.numel(), _PIECE):
        yield flat[start : start + _PIECE]


class _Sums:
    """The sums over the pieces of two tensors."""

    def __init__(self) -> None:
        self.old = self.new = self.apart = self.product = self.largest = 0.0
        self.at = self.count = self.differing = 0

    def add(self, old: torch.Tensor, new: torch.Tensor) -> None:
        """Add the next elements of both."""
        bits = (
            (old.view(torch.int64), new.view(torch.int64))
            if old.dtype == new.dtype and old.dtype in _LONG
            else None
        )
        old, new = old.to(torch.float64), new.to(torch.float64)
        is_other = (old != new) & ~(old.isnan() & new.isnan())
        apart = torch.where(is_other, new - old, 0.0)  # infinite on both sides is no change
        if bits is not None:  # float64 does not hold every integer of 64 bits
            is_other = bits[0] != bits[1]
            apart = torch.where(apart.abs() < _EXACT, (bits[1] - bits[0]).to(torch.float64), apart)
        self.old += float(old.dot(old))
        self.new += float(new.dot(new))
        self.product += float(old.dot(new))
        self.apart += float(apart.dot(apart))
        self.differing += int(is_other.sum())
        sizes = apart.abs().nan_to_num(nan=math.inf)
        place = int(sizes.argmax())
        if float(sizes[place]) > self.largest:
            self.largest, self.at = float(sizes[place]), self.count + place
        self.count += old.numel()

    @property
    def cosine(self) -> float | None:
        """The cosine of the angle between the two; None if one of them is 0."""
        length = math.sqrt(self.old) * math.sqrt(self.new)
        return max(-1.0, min(1.0, self.product / length)) if length else None


def _indices(at: int, spec: TensorSpec) -> tuple[int, ...]:
    found = []
    if dtype_of(spec.dtype).is_complex:  # it counts their parts
        at //= 2
    for size in reversed(spec.shape):
        at, index = divmod(at, size)
        found.append(index)
    return tuple(reversed(found))


# --- Values, metrics, configuration and code ---


def _values(manifest: Manifest) -> dict[str, object]:
    nodes = decode_skeleton(manifest.content.skeleton).nodes
    places = [
        path
        for path, node in zip(paths(nodes), nodes, strict=False)
        if type(node) is int and node == VALUE
    ]
    return dict(zip(places, decode_values(manifest.content.values), strict=True))


def _delta(old: Mapping[str, object], new: Mapping[str, object]) -> dict[str, Pair]:
    keys = sorted({*old, *new})
    return {
        key: (old.get(key), new.get(key))
        for key in keys
        if not _is_equal(old.get(key), new.get(key)) or (key in old) != (key in new)
    }


def _masked(pairs: dict[str, Pair]) -> dict[str, Pair]:
    """The changes, with tracked secrets masked: everyone with read access sees a diff."""
    old, new = (logs.named({key: pair[side] for key, pair in pairs.items()}) for side in (0, 1))
    return {key: (old[key], new[key]) for key in pairs}


def _is_equal(one: object, other: object) -> bool:
    if (
        isinstance(one, float)
        and isinstance(other, float)
        and math.isnan(one)
        and math.isnan(other)
    ):
        return True
    return type(one) is type(other) and one == other


def _code(run: Run | None) -> str | None:
    if run is None or run.git_commit is None:
        return None
    return run.git_commit + (" with changes" if run.git_dirty else "")


# --- Histogram of one tensor, in one or several states over the same bins ---


class Scale(StrEnum):
    """The quantity in which bins are equally wide: the values, or the logarithms of their
    magnitudes."""

    LINEAR = "linear"
    LOG = "log"


@dataclass(frozen=True, slots=True)
class Spread:
    """The values of the tensor in one state. ``counts`` is the number of values in each bin. The
    last bin includes its upper edge.

    ``elements`` is the number of all values, including ``nan`` NaNs and ``infinite`` infinities.
    These are in no bin. On the scale ``log``, the ``zeros`` are in no bin either. All other numbers
    are over the finite values, and ``deviation`` is the standard deviation. They are None if there
    are no such values, or if these are too large.
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
    """One tensor in some states over the same bins: ``edges`` has one more element than there are
    bins. Complex numbers count as two values.
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
    :param on_progress: gets the bytes that were read, and their total. An error that it raises ends
        the counting.
    :raises NotFound: a state has no such tensor. The text names similar ones.
    :raises Unavailable: the bytes of a state are gone.
    :raises InvalidInput: there are too many states or bins.
    :raises Unsupported: torch does not compute with the tensor.
    """
    if not 1 <= len(states) <= MOST_STATES:
        raise InvalidInput(
            f"{len(states)} states are asked for: from 1 to {MOST_STATES} can be counted over the"
            " same bins"
        )
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
        spreads = [
            values.count(state.uid, known, edges, scale, tell)
            for (state, values), known in zip(found, ranges, strict=True)
        ]
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
    """Results of the first reading over the finite values. ``low`` and ``high`` are the ends of the
    range that is counted, on its scale."""

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
        """How often each stored value occurs in the tensor: more than once in an expanded
        tensor."""
        stored = self.bytes // dtype_of(self.spec.dtype).itemsize
        return math.prod(self.spec.shape) // stored if stored else 1

    def pieces(self, tell: Callable[[int], None]) -> Iterator[np.ndarray]:
        """All values as float64; complex ones as pairs."""
        dtype = dtype_of(self.spec.dtype)
        for shard in self.spec.shards:
            for done in range(0, shard.length, CHUNK_BYTES):
                piece = torch.empty(
                    min(CHUNK_BYTES, shard.length - done), dtype=torch.uint8, device="cpu"
                )
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
            known.least, known.most = (
                min(known.least, float(values.min())),
                max(known.most, float(values.max())),
            )
            scaled = _scaled(values, scale)
            known.zeros += self.times * (values.size - scaled.size) if scale is Scale.LOG else 0
            if scaled.size:
                known.low, known.high = (
                    min(known.low, float(scaled.min())),
                    max(known.high, float(scaled.max())),
                )
        return known

    def count(
        self, uid: str, known: _Known, edges: np.ndarray, scale: Scale, tell: Callable[[int], None]
    ) -> Spread:
        """Do the second reading."""
        counts = np.zeros(len(edges) - 1, dtype=np.int64)
        mean = known.total / known.count if known.count else 0.0
        apart = 0.0
        for piece in self.pieces(tell):
            values = piece[np.isfinite(piece)]
            counts += (
                self.times
                * np.histogram(
                    _scaled(values, scale),
                    bins=len(counts),
                    range=(float(edges[0]), float(edges[-1])),
                )[0]
            )
            with np.errstate(over="ignore", invalid="ignore"):
                # values near the largest number: then there is no such figure
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
    """The edges of bins from the least to the greatest value of all; around a single value as
    NumPy does it."""
    low, high = min(known.low for known in ranges), max(known.high for known in ranges)
    if low > high:  # nothing to count
        low, high = 0.0, 1.0
    if not math.isfinite(high - low):
        raise InvalidInput(
            f"values from {low:.3g} to {high:.3g} are too far apart for bins of one width: ask for"
            f" the scale {Scale.LOG}"
        )
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
    hint = (
        f"did you mean {' or '.join(close)}?"
        if close
        else f"it has {len(specs)} tensors, which 'tensors' lists"
    )
    raise NotFound(f"state {state.uid[:10]} has no tensor {path!r}: {hint}")
