"""Turns a tier's bytes back into a tree of tensors."""

from __future__ import annotations

import ctypes
import math
import operator
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec
import numpy as np
import torch

from datastates.errors import Closed, Corrupt, NotFound, Unavailable, Unsupported
from datastates.lineage.states import State
from datastates.state.digest import chunk_digest, first_chunks, join
from datastates.state.encoding import decode_values
from datastates.state.geometry import (
    assemble,
    bytes_of,
    dense_strides,
    dtype_of,
    is_whole,
    rebuild,
    stored_bytes,
)
from datastates.state.manifest import CHUNK_BYTES, Manifest, Shard, TensorSpec
from datastates.state.skeleton import decode_skeleton
from datastates.state.tree import unflatten
from datastates.system.interrupts import checkpoint

from .tier import Reader


def of_state(reader: Reader, state: State) -> Reader:
    """The reader, if its digest is the digest in the lineage; otherwise it is closed.

    :raises Corrupt: it reads another state.
    """
    found = reader.manifest.digest
    if found == state.digest:
        return reader
    reader.close()
    raise Corrupt(
        f"state {state.uid} has the digest {found[:16]} where its bytes lie, and"
        f" {state.digest[:16]} in the lineage: its manifest is another state's, forged or left by a"
        " clone or an import that was refused; restore another state, or clone this one again"
    )


def specs_of(reader: Reader) -> list[TensorSpec]:
    """The tensors of a state, in tree order."""
    return msgspec.msgpack.decode(reader.manifest.content.tensors, type=list[TensorSpec])


def read_tree(
    reader: Reader,
    *,
    wants: Callable[[str], bool] = lambda path: True,
    is_borrowing: bool = False,
    device: torch.device | str | None = None,
    on_progress: Callable[[int], None] | None = None,
    given: Mapping[int, torch.Tensor] | None = None,
    specs: Sequence[TensorSpec] | None = None,
) -> Any:
    """The state's tree, every byte of it checked against its digest.

    Tensors that are not wanted are ``None``. With ``is_borrowing``, tensors may be in the tier's
    memory: the caller may only read them, until the reader is closed. Without it, they belong to
    the caller: private, writable and lasting. ``on_progress`` gets the number of bytes of each
    tensor once it is read. ``given`` has, by index, tensors to use instead of reading them.
    ``specs`` are ``specs_of(reader)``, if the caller has them.

    :raises Corrupt: a chunk fails its digest.
    """
    with torch.inference_mode(False):  # training must be able to use the tensors
        return _read_tree(
            reader, wants, is_borrowing, device, on_progress, given or {}, specs or specs_of(reader)
        )


def _read_tree(
    reader: Reader,
    wants: Callable[[str], bool],
    is_borrowing: bool,
    device: torch.device | str | None,
    on_progress: Callable[[int], None] | None,
    given: Mapping[int, torch.Tensor],
    specs: Sequence[TensorSpec],
) -> Any:
    content = reader.manifest.content
    tensors: list[torch.Tensor | None] = []
    owners: dict[
        int, torch.Tensor
    ] = {}  # those that are not wanted, and that wanted ones are tied to
    stretches = _stretches(specs, wants, given)
    if is_borrowing:
        reader.prepare(stretches)
    else:
        reader.ahead([index for stretch in stretches for index in reader.chunks_of(*stretch)])
    for index, spec in enumerate(specs):
        if index in given:
            tensors.append(given[index])
            continue
        checkpoint()
        if spec.alias is not None and tensors[spec.alias] is None and wants(spec.path):
            if spec.alias not in owners:
                owners[spec.alias] = _read(reader, specs[spec.alias], is_borrowing, device)
            tensors.append(owners[spec.alias])
        elif spec.alias is not None:
            tensors.append(tensors[spec.alias])
        elif wants(spec.path):
            tensors.append(_read(reader, spec, is_borrowing, device))
        else:
            tensors.append(None)
        if on_progress is not None and tensors[-1] is not None:
            on_progress(bytes_of(spec))
    return unflatten(decode_skeleton(content.skeleton), decode_values(content.values), tensors)


def _stretches(
    specs: Sequence[TensorSpec], wants: Callable[[str], bool], given: Mapping[int, torch.Tensor]
) -> list[tuple[int, int]]:
    """The stretches of the stream with the tensors that are wanted and not given, each once."""
    wanted = [
        index if spec.alias is None else spec.alias
        for index, spec in enumerate(specs)
        if wants(spec.path)
    ]
    return [
        (shard.start, shard.length)
        for index in dict.fromkeys(wanted)
        if index not in given
        for shard in specs[index].shards
        if shard.length
    ]


def sketch_tree(
    reader: Reader, specs: Sequence[TensorSpec], *, wants: Callable[[str], bool]
) -> tuple[Any, list[torch.Tensor | None]]:
    """A tree of tensors with the state's shapes and types but without its values, in memory that
    is never touched; and its tensors by index."""
    content = reader.manifest.content
    sources = dict.fromkeys(
        index if spec.alias is None else spec.alias
        for index, spec in enumerate(specs)
        if wants(spec.path)
    )
    sizes = {
        index: stored_bytes(dtype_of(specs[index].dtype), specs[index].shape, specs[index].strides)
        for index in sources
    }
    untouched = torch.from_numpy(np.empty(max((1, *sizes.values())), np.uint8))
    tensors: list[torch.Tensor | None] = [None] * len(specs)
    for index, spec in enumerate(specs):
        if index in sizes:
            tensors[index] = rebuild(untouched[: sizes[index]], spec)
        elif spec.alias is not None and wants(spec.path):
            tensors[index] = tensors[spec.alias]
    return (
        unflatten(
            decode_skeleton(content.skeleton),
            decode_values(content.values),
            tensors,
            is_sketch=True,
        ),
        tensors,
    )


def read_flat(reader: Reader, spec: TensorSpec) -> torch.Tensor:
    """The stored bytes of a tensor that is not tied to an earlier one, checked. The caller may only
    read them, until the reader is closed.

    A tensor of several shards is put together in separate memory.
    """
    return assemble(
        spec, lambda shard: _flat_reading(reader, shard.start, shard.length, is_borrowing=True)
    )


def _read(
    reader: Reader, spec: TensorSpec, is_borrowing: bool, device: torch.device | str | None
) -> torch.Tensor:
    is_lent = is_borrowing or not is_whole(spec)  # several shards are copied together anyway
    tensor = rebuild(
        assemble(spec, lambda shard: _flat_reading(reader, shard.start, shard.length, is_lent)),
        spec,
    )
    return tensor if device is None else tensor.to(device)


def _flat_reading(reader: Reader, start: int, length: int, is_borrowing: bool) -> torch.Tensor:
    """The bytes of a tensor: in place if that is allowed, else gathered from their chunks."""
    if length == 0:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    view = reader.loan(start, length) if is_borrowing else reader.span(start, length)
    if view is not None and (is_borrowing or not view.readonly):
        return over(view)
    flat = torch.empty(length, dtype=torch.uint8, device="cpu")
    reader.gather(start, memoryview(flat.numpy().data))
    return flat


def over(view: memoryview) -> torch.Tensor:
    """The bytes of ``view`` as a tensor over its memory.

    If that is read-only, which torch cannot express, callers must not write. The memory lives as
    long as the tensor."""
    if not view.readonly:
        return torch.frombuffer(view, dtype=torch.uint8)
    address = np.frombuffer(view, dtype=np.uint8).ctypes.data
    memory: Any = (ctypes.c_ubyte * view.nbytes).from_address(address)
    memory.owner = view
    return torch.frombuffer(memory, dtype=torch.uint8)


# Reads boxes of tensors from their shards, however these are cut. It reads each chunk that has a
# part of a box once.


_WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}
"""The dtype as which elements are copied bit by bit, by their size, whatever they mean."""

Point = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Region:
    """A box of a tensor: ``shape`` elements from ``offset`` on. The tensor must not be tied to
    an earlier one: use that one instead."""

    spec: TensorSpec
    offset: Point
    shape: Point

    def as_tensor(self) -> TensorSpec:
        """The box as a separate tensor, whose dimensions are in the order of the whole tensor's
        strides."""
        return msgspec.structs.replace(
            self.spec, shape=self.shape, strides=dense_strides(self.shape, self.spec.strides)
        )


def whole(spec: TensorSpec) -> Region:
    """The region that is a whole tensor."""
    return Region(spec, (0,) * len(spec.shape), spec.shape)


def chunks_of(regions: Iterable[Region]) -> list[int]:
    """The chunks from which ``read_regions`` reads something, in rising order."""
    return sorted(
        {index for region in regions for piece in _pieces(region) for index, _ in piece.by_chunk()}
    )


def read_regions(
    reader: Reader, regions: Sequence[Region], *, is_borrowing: bool = False
) -> list[torch.Tensor]:
    """Each box as a tensor, in the order of the whole tensor's strides; every byte is checked.

    With ``is_borrowing``, tensors may be in the tier's memory: the caller may only read them, until
    the reader is closed. Without it, they belong to the caller.

    :raises Corrupt: a chunk fails its digest.
    """
    pieces = [list(_pieces(region)) for region in regions]
    stretches = [_stretch(*each) for each in zip(regions, pieces, strict=True)]
    if is_borrowing:
        reader.prepare([stretch for stretch in stretches if stretch is not None])
    found: list[torch.Tensor] = []
    copies: dict[int, list[_Copy]] = {}
    for region, mine, stretch in zip(regions, pieces, stretches, strict=True):
        view = None if stretch is None else (reader.loan if is_borrowing else reader.span)(*stretch)
        if view is not None and (is_borrowing or not view.readonly):
            found.append(rebuild(over(view), region.as_tensor()))
            continue
        flat = torch.empty(_bytes_of(region), dtype=torch.uint8, device="cpu")
        found.append(rebuild(flat, region.as_tensor()))
        for piece in mine:
            for index, cuts in piece.by_chunk():
                copies.setdefault(index, []).append(
                    _Copy(piece, cuts, _ordered(region, flat, piece.item))
                )
    reader.ahead(sorted(copies))
    for index in sorted(copies):
        checkpoint()
        data = np.frombuffer(reader.chunk(index), np.uint8)
        for copy in copies[index]:
            copy.put(data, index)
    return found


@dataclass(frozen=True, slots=True)
class _Cut:
    """A box of a shard, and where it belongs in the region."""

    begin: Point
    end: Point
    target: Point


@dataclass(frozen=True, slots=True)
class _Piece:
    """The intersection of a region and a shard: from ``begin`` to ``end`` of a shard of size
    ``sizes``, and where that is in the region.

    Dimensions are in the order of memory, the innermost last; dimensions that are stored only once
    have one element.
    """

    start: int
    item: int
    sizes: Point
    begin: Point
    end: Point
    target: Point

    def extent(self) -> tuple[int, int]:
        """The number of its first element in the shard, and of the one after its last."""
        return (
            _flat_regions(self.begin, self.sizes),
            _flat_regions(tuple(each - 1 for each in self.end), self.sizes) + 1,
        )

    def by_chunk(self) -> Iterator[tuple[int, list[_Cut]]]:
        """Each chunk from which something is needed, and the cuts needed."""
        first, last = self.extent()
        for index in range(
            (self.start + first * self.item) // CHUNK_BYTES,
            -(-(self.start + last * self.item) // CHUNK_BYTES),
        ):
            low = max(first, (index * CHUNK_BYTES - self.start) // self.item)
            high = min(last, ((index + 1) * CHUNK_BYTES - self.start) // self.item)
            cuts = [
                cut for box in _boxes(low, high, self.sizes) if (cut := self._cut(*box)) is not None
            ]
            if cuts:
                yield index, cuts

    def _cut(self, begin: Point, end: Point) -> _Cut | None:
        low, high = tuple(map(max, begin, self.begin)), tuple(map(min, end, self.end))
        if not all(map(operator.lt, low, high)):
            return None
        return _Cut(
            low,
            high,
            tuple(
                at - first + to for at, first, to in zip(low, self.begin, self.target, strict=True)
            ),
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Copy:
    """The bytes that one chunk gives to a region."""

    piece: _Piece
    cuts: Sequence[_Cut]
    into: np.ndarray[Any, Any]

    def put(self, chunk: np.ndarray[Any, Any], index: int) -> None:
        item, start = self.piece.item, self.piece.start - index * CHUNK_BYTES
        strides = [
            item * math.prod(self.piece.sizes[dim + 1 :]) for dim in range(len(self.piece.sizes))
        ]
        for cut in self.cuts:
            shape = tuple(map(operator.sub, cut.end, cut.begin))
            begin = start + item * _flat_regions(cut.begin, self.piece.sizes)
            source: np.ndarray[Any, Any] = np.ndarray(shape, self.into.dtype, chunk, begin, strides)
            self.into[
                tuple(slice(at, at + size) for at, size in zip(cut.target, shape, strict=True))
            ] = source


def _pieces(region: Region) -> Iterator[_Piece]:
    spec = region.spec
    if 0 in region.shape:
        return
    for shard in spec.shards:
        low = tuple(map(max, region.offset, shard.offset))
        high = tuple(
            min(sum(one), sum(other))
            for one, other in zip(_sides(region), _sides(shard), strict=True)
        )
        if all(map(operator.lt, low, high)):
            yield _piece(region, shard, low, high)


def _piece(region: Region, shard: Shard, low: Point, high: Point) -> _Piece:
    spec, item = region.spec, dtype_of(region.spec.dtype).itemsize
    kept = _order(spec)
    sizes = tuple(shard.shape[dim] for dim in kept)
    begin = tuple(low[dim] - shard.offset[dim] for dim in kept)
    end = tuple(high[dim] - shard.offset[dim] for dim in kept)
    target = tuple(low[dim] - region.offset[dim] for dim in kept)
    if shard.start % item:
        # an element may be in two chunks, so its bytes become a separate dimension
        return _Piece(shard.start, 1, (*sizes, item), (*begin, 0), (*end, item), (*target, 0))
    return _Piece(shard.start, item, sizes, begin, end, target)


def _sides(box: Region | Shard) -> Iterator[tuple[int, int]]:
    return zip(box.offset, box.shape, strict=True)


def _order(spec: TensorSpec) -> list[int]:
    """The dimensions in the order of memory, without those that are stored only once."""
    return [
        dim
        for dim in sorted(range(len(spec.shape)), key=lambda dim: (-spec.strides[dim], dim))
        if spec.strides[dim]
    ]


def _stretch(region: Region, pieces: Sequence[_Piece]) -> tuple[int, int] | None:
    """The start and length of the region in the stream, if it is one stretch there; else None."""
    if len(pieces) != 1:
        return None
    (piece,) = pieces
    first, last = piece.extent()
    length = (last - first) * piece.item
    return (piece.start + first * piece.item, length) if length == _bytes_of(region) else None


def _bytes_of(region: Region) -> int:
    return stored_bytes(dtype_of(region.spec.dtype), region.shape, region.spec.strides)


def _ordered(region: Region, flat: torch.Tensor, item: int) -> np.ndarray[Any, Any]:
    """The elements of the region, in the order of its memory; as bytes, if they are copied as
    bytes."""
    sizes = tuple(region.shape[dim] for dim in _order(region.spec))
    is_by_byte = item < dtype_of(region.spec.dtype).itemsize
    return flat.numpy().view(_WORDS[item]).reshape((*sizes, -1) if is_by_byte else sizes)


def _flat_regions(point: Point, sizes: Point) -> int:
    """The number of an element, counted in the order of memory."""
    number = 0
    for at, size in zip(point, sizes, strict=True):
        number = number * size + at
    return number


def _boxes(low: int, high: int, sizes: Point) -> Iterator[tuple[Point, Point]]:
    """The elements from number ``low`` up to ``high``, as a few boxes, each given by its first
    point and its end."""
    if low >= high:
        return
    if not sizes:
        yield (), ()
        return
    row = math.prod(sizes[1:])
    first, last = -(-low // row), high // row
    if first > last:  # within one row
        yield from _within(last, low - last * row, high - last * row, sizes)
        return
    yield from _within(first - 1, low - (first - 1) * row, row, sizes)
    if first < last:
        yield (first, *(0 for _ in sizes[1:])), (last, *sizes[1:])
    yield from _within(last, 0, high - last * row, sizes)


def _within(number: int, low: int, high: int, sizes: Point) -> Iterator[tuple[Point, Point]]:
    """The same for elements within one row."""
    for begin, end in _boxes(low, high, sizes[1:]):
        yield (number, *begin), (number + 1, *end)


# Reads a state of several parts as one: each chunk comes from the part that holds it.


_NAMED = 16
"""How many missing parts an error names."""

_SOUGHT = 4096
"""After how many missing parts the search ends: the number of parts is whatever a lineage from
elsewhere claims."""


def refuse_parts(
    state: State, what: str, *, instead: str = "load it here, and capture that"
) -> None:
    """Raise if a state has several parts, which ``what`` does not support. ``instead`` is the next
    step in the error.

    :raises Unsupported: it has several.
    """
    if state.world_size > 1:
        raise Unsupported(
            f"state {state.uid} has {state.world_size} parts, and {what} takes states of one part:"
            f" {instead}"
        )


def open_parts(opened: Callable[[int], Reader], size: int, uid: str, *, rank: int = 0) -> Reader:
    """A reader of the whole state of ``size`` parts. ``opened`` opens the part of a rank. Values
    come from the part of ``rank``.

    :raises NotFound: no part is there.
    :raises Unavailable: some parts are there and others are missing; names these.
    :raises Corrupt: they are not the parts of one state.
    """
    missing, readers = [], []
    with ExitStack() as stack:
        for number in range(size):
            try:
                readers.append(stack.enter_context(opened(number)))
            except NotFound:
                missing.append(str(number))
                if len(missing) == _SOUGHT:
                    break
        if not readers and len(missing) == size:
            raise NotFound(f"no part of state {uid} is here")
        if missing:
            least = "at least " if len(missing) == _SOUGHT else ""
            named = ", ".join(missing[:_NAMED]) + (
                f" and {least}{len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
            )
            raise Unavailable(
                f"state {uid} has {size} parts, and those of rank {named} are not here: bring"
                " them, too"
            )
        found = PartsReader(readers, rank=rank)
        stack.pop_all()
        return found


class PartsReader(Reader):
    """A reader of the whole state. It takes the readers of all parts, by rank, and closes them.

    :raises Corrupt: they are not the parts of one state.
    """

    is_waited_for: ClassVar[bool] = True

    def __init__(self, parts: Sequence[Reader], *, rank: int = 0) -> None:
        manifests = [part.manifest for part in parts]
        self.manifest = join(manifests, rank=rank)
        self._parts, self._starts = tuple(parts), first_chunks(manifests)

    def chunk(self, index: int) -> memoryview:
        part, start = self._part_of(index)
        return part.chunk(index - start)

    def span(self, start: int, length: int) -> memoryview | None:
        """The part's own span, if one part holds the whole stretch."""
        touched = self.chunks_of(start, length)
        part, first = self._part_of(touched.start)
        return part.span(start - first * CHUNK_BYTES, length) if self._is_in_one(touched) else None

    def prepare(self, stretches: Sequence[tuple[int, int]]) -> None:
        """Have each part prepare the stretches that it holds entirely."""
        for part, first in zip(self._parts, self._starts, strict=False):
            mine = [
                each
                for each in stretches
                if (touched := self.chunks_of(*each)) and self._holds(part, touched)
            ]
            part.prepare([(start - first * CHUNK_BYTES, length) for start, length in mine])

    def ahead(self, chunks: Sequence[int]) -> None:
        """Begin to fetch these chunks of the parts that are elsewhere."""
        for part, begin, end in zip(self._parts, self._starts, self._starts[1:], strict=False):
            part.ahead([chunk - begin for chunk in chunks if begin <= chunk < end])

    def loan(self, start: int, length: int) -> memoryview | None:
        """The part's own loan, if one part holds the whole stretch."""
        touched = self.chunks_of(start, length)
        part, first = self._part_of(touched.start)
        return part.loan(start - first * CHUNK_BYTES, length) if self._is_in_one(touched) else None

    def lying(self, index: int) -> memoryview:
        part, start = self._part_of(index)
        return part.lying(index - start)

    def when_wanted(self, tell: Callable[[], None]) -> None:
        for part in self._parts:
            part.when_wanted(tell)

    def verify_headers(self) -> None:
        for part in self._parts:
            part.verify_headers()

    def close(self) -> None:
        with ExitStack() as stack:
            for part in self._parts:
                stack.callback(part.close)

    def _holds(self, part: Reader, touched: range) -> bool:
        return self._part_of(touched[0])[0] is part and self._is_in_one(touched)

    def _is_in_one(self, touched: range) -> bool:
        return len(touched) < 2 or self._part_of(touched[0]) == self._part_of(touched[-1])

    def _part_of(self, index: int) -> tuple[Reader, int]:
        number = bisect_right(self._starts, index, hi=len(self._parts)) - 1
        return self._parts[number], self._starts[number]


# A reader of a state whose chunks are in memory as plain bytes, for tiers that fetch a whole
# state at once.


class HeldReader(Reader):
    """Reads ``chunks``, in the order of the manifest.

    Errors name ``source`` as the place from which they came."""

    def __init__(
        self,
        manifest: Manifest,
        chunks: Sequence[bytes | memoryview],
        *,
        source: str,
        verify: bool = True,
    ) -> None:
        if len(chunks) != len(manifest.content.chunks):
            raise Corrupt(
                f"state {manifest.origin.uid}: {len(manifest.content.chunks)} chunks are listed,"
                f" {len(chunks)} are in {source}"
            )
        self.manifest = manifest
        self._chunks: list[memoryview] | None = [memoryview(chunk).toreadonly() for chunk in chunks]
        self._source = source
        self._unverified = set(range(len(chunks))) if verify else set[int]()

    def chunk(self, index: int) -> memoryview:
        """One chunk, compared with its digest the first time."""
        uid = self.manifest.origin.uid
        if self._chunks is None:
            raise Closed(f"the reader of state {uid} is closed: open the state again")
        view, chunk = self._chunks[index], self.manifest.content.chunks[index]
        if index in self._unverified:
            if view.nbytes != chunk.length or chunk_digest(view) != chunk.digest:
                raise Corrupt(
                    f"state {uid}: chunk {index} fails its digest in {self._source}: restore"
                    " another state"
                )
            self._unverified.discard(index)
        return view

    def span(self, start: int, length: int) -> memoryview | None:
        """A view if the stretch is in one chunk, else None."""
        touched = self.chunks_of(start, length)
        if len(touched) > 1:
            for index in touched:
                self.chunk(index)
            return None
        if not touched:
            return memoryview(b"")
        offset = start - touched.start * CHUNK_BYTES
        return self.chunk(touched.start)[offset : offset + length]

    def close(self) -> None:
        self._chunks = None
