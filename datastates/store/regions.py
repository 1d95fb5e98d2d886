"""Reads boxes of tensors from their shards, however these are cut. Only the chunks in which a box lies are read, each of them once.

A shard lies in the stream like a small tensor, and a chunk holds a stretch of it. Such a stretch is a few boxes (the rest of a
row, whole rows, the beginning of another), each of which is intersected with the wanted box. So the bytes to copy are found without looking
at single elements, and a chunk of which nothing is wanted is not read.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import torch

from datastates.content.geometry import dense_strides, dtype_of, rebuild, stored_bytes
from datastates.content.manifest import CHUNK_BYTES, Shard, TensorSpec
from datastates.system.interrupts import checkpoint

from .reading import over
from .tier import Reader

__all__ = ["Region", "chunks_of", "read_regions", "whole"]

_WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}
"""The dtype as which elements are copied bit by bit, by their size, whatever they mean."""

Point = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Region:
    """A box of a tensor: ``shape`` elements from ``offset`` on. The tensor must not be tied to an earlier one: use that one instead."""

    spec: TensorSpec
    offset: Point
    shape: Point

    def as_tensor(self) -> TensorSpec:
        """The box as a separate tensor, whose dimensions are in the order of the whole tensor's strides."""
        return msgspec.structs.replace(self.spec, shape=self.shape, strides=dense_strides(self.shape, self.spec.strides))


def whole(spec: TensorSpec) -> Region:
    """The region that is a whole tensor."""
    return Region(spec, (0,) * len(spec.shape), spec.shape)


def chunks_of(regions: Iterable[Region]) -> list[int]:
    """The chunks from which ``read_regions`` reads something, in rising order."""
    return sorted({index for region in regions for piece in _pieces(region) for index, _ in piece.by_chunk()})


def read_regions(reader: Reader, regions: Sequence[Region], *, is_borrowing: bool = False) -> list[torch.Tensor]:
    """Each box as a tensor, in the order of the whole tensor's strides; every byte is checked.

    With ``is_borrowing`` tensors may lie in the tier's own memory: the caller may only read them, and only until the reader is closed.
    Without it they belong to the caller.

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
                copies.setdefault(index, []).append(_Copy(piece, cuts, _ordered(region, flat, piece.item)))
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
    """The intersection of a region and a shard: from ``begin`` to ``end`` of a shard of size ``sizes``, and where that is in the region.

    Dimensions are in the order of memory, the innermost last; dimensions that are stored only once have one element.
    """

    start: int
    item: int
    sizes: Point
    begin: Point
    end: Point
    target: Point

    def extent(self) -> tuple[int, int]:
        """The number of its first element in the shard, and of the one after its last."""
        return _flat(self.begin, self.sizes), _flat(tuple(each - 1 for each in self.end), self.sizes) + 1

    def by_chunk(self) -> Iterator[tuple[int, list[_Cut]]]:
        """Each chunk from which something is needed, and the cuts needed."""
        first, last = self.extent()
        for index in range((self.start + first * self.item) // CHUNK_BYTES, -(-(self.start + last * self.item) // CHUNK_BYTES)):
            low = max(first, (index * CHUNK_BYTES - self.start) // self.item)
            high = min(last, ((index + 1) * CHUNK_BYTES - self.start) // self.item)
            cuts = [cut for box in _boxes(low, high, self.sizes) if (cut := self._cut(*box)) is not None]
            if cuts:
                yield index, cuts

    def _cut(self, begin: Point, end: Point) -> _Cut | None:
        low, high = tuple(map(max, begin, self.begin)), tuple(map(min, end, self.end))
        if not all(map(operator.lt, low, high)):
            return None
        return _Cut(low, high, tuple(at - first + to for at, first, to in zip(low, self.begin, self.target, strict=True)))


@dataclass(frozen=True, slots=True, eq=False)
class _Copy:
    """The bytes that one chunk gives to a region."""

    piece: _Piece
    cuts: Sequence[_Cut]
    into: np.ndarray[Any, Any]

    def put(self, chunk: np.ndarray[Any, Any], index: int) -> None:
        """Copy them from the bytes of the chunk."""
        item, start = self.piece.item, self.piece.start - index * CHUNK_BYTES
        strides = [item * math.prod(self.piece.sizes[dim + 1 :]) for dim in range(len(self.piece.sizes))]
        for cut in self.cuts:
            shape = tuple(map(operator.sub, cut.end, cut.begin))
            begin = start + item * _flat(cut.begin, self.piece.sizes)
            source: np.ndarray[Any, Any] = np.ndarray(shape, self.into.dtype, chunk, begin, strides)
            self.into[tuple(slice(at, at + size) for at, size in zip(cut.target, shape, strict=True))] = source


def _pieces(region: Region) -> Iterator[_Piece]:
    spec = region.spec
    if 0 in region.shape:
        return
    for shard in spec.shards:
        low = tuple(map(max, region.offset, shard.offset))
        high = tuple(min(sum(one), sum(other)) for one, other in zip(_sides(region), _sides(shard), strict=True))
        if all(map(operator.lt, low, high)):
            yield _piece(region, shard, low, high)


def _piece(region: Region, shard: Shard, low: Point, high: Point) -> _Piece:
    spec, item = region.spec, dtype_of(region.spec.dtype).itemsize
    kept = _order(spec)
    sizes = tuple(shard.shape[dim] for dim in kept)
    begin = tuple(low[dim] - shard.offset[dim] for dim in kept)
    end = tuple(high[dim] - shard.offset[dim] for dim in kept)
    target = tuple(low[dim] - region.offset[dim] for dim in kept)
    if shard.start % item:  # an element may lie in two chunks, so its bytes become a separate dimension
        return _Piece(shard.start, 1, (*sizes, item), (*begin, 0), (*end, item), (*target, 0))
    return _Piece(shard.start, item, sizes, begin, end, target)


def _sides(box: Region | Shard) -> Iterator[tuple[int, int]]:
    return zip(box.offset, box.shape, strict=True)


def _order(spec: TensorSpec) -> list[int]:
    """The dimensions in the order of memory, without those that are stored only once."""
    return [dim for dim in sorted(range(len(spec.shape)), key=lambda dim: (-spec.strides[dim], dim)) if spec.strides[dim]]


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
    """The elements of the region, in the order of its memory; as bytes, if they are copied as bytes."""
    sizes = tuple(region.shape[dim] for dim in _order(region.spec))
    is_by_byte = item < dtype_of(region.spec.dtype).itemsize
    return flat.numpy().view(_WORDS[item]).reshape((*sizes, -1) if is_by_byte else sizes)


def _flat(point: Point, sizes: Point) -> int:
    """The number of an element, counted in the order of memory."""
    number = 0
    for at, size in zip(point, sizes, strict=True):
        number = number * size + at
    return number


def _boxes(low: int, high: int, sizes: Point) -> Iterator[tuple[Point, Point]]:
    """The elements from number ``low`` up to ``high``, as a few boxes, each given by its first point and its end."""
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
