"""Which rank stores which part of a state that several ranks hold: from the boxes in the memory of each rank, its shares.

Tensors that the same ranks hold are laid end to end, and the line is cut into one stretch for each of those ranks, of such lengths that all
ranks store equal amounts in total (DeepFreeze, Nicolae et al., 2020, divides what replicas hold by whole tensors). A stretch is a few
boxes, each contiguous if the tensor is dense. Every rank computes this alone, with the same result; the shares tile every tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec
from blake3 import blake3

from .shards import MAX_CUT

__all__ = ["Box", "Holding", "digest_of", "divide", "held_by"]

_FINEST = 256
"""A stretch differs from its intended length by at most about one part in this many, if rows can be cut at all."""


@dataclass(frozen=True, slots=True)
class Holding:
    """A box of a tensor that lies in the memory of each of ``owners``, in ascending order.

    ``shape`` and ``strides`` are those of the whole tensor, dense. ``offset`` and ``local_shape`` are the box in it, which is not cut along
    dimensions of stride 0.
    ``place`` is where the box begins in the owners' local tensor; empty: at its beginning.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    item_bytes: int
    offset: tuple[int, ...]
    local_shape: tuple[int, ...]
    owners: tuple[int, ...]
    place: tuple[int, ...] = ()

    @property
    def sizes(self) -> tuple[int, ...]:
        """The stored elements along each dimension: one if the tensor is expanded along it."""
        return tuple([size if stride or not size else 1 for size, stride in zip(self.local_shape, self.strides, strict=True)])

    @property
    def length(self) -> int:
        """The bytes that the box takes in the stream."""
        return self.item_bytes * _product(self.sizes)


@dataclass(frozen=True, slots=True)
class Box:
    """A hyper-rectangle of a tensor: ``offset`` in the whole tensor, ``place`` in the local tensor of the rank whose share it is."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    place: tuple[int, ...]


def held_by(held: Sequence[Holding], rank: int) -> list[Holding]:
    """The boxes of a tensor that lie in a rank's memory."""
    return [holding for holding in held if rank in holding.owners]


def digest_of(held: Sequence[Sequence[Holding]]) -> bytes:
    """32 bytes that are equal on two ranks if both divide alike."""
    return blake3(msgspec.msgpack.encode(held)).digest()


def divide(held: Sequence[Sequence[Holding]], size: int) -> list[list[tuple[Box, ...]]]:
    """The shares of ``size`` ranks: by rank and by tensor, its boxes.

    ``held`` has, by tensor, all boxes of it that any rank holds; they tile it. A tensor without elements belongs to its first owner.
    """
    loads, nothing = [0] * size, [()] * len(held)
    shares: list[list[tuple[Box, ...]]] = [list(nothing) for _ in range(size)]
    lines: dict[tuple[int, ...], list[tuple[int, Holding]]] = {}
    for index, holdings in enumerate(held):
        for holding in holdings:
            if len(holding.owners) == 1:
                (rank,) = holding.owners
                shares[rank][index] += (_whole(holding),)
                loads[rank] += holding.length
            else:
                lines.setdefault(holding.owners, []).append((index, holding))
    # Tensors that the fewest ranks hold come first: those that more ranks hold then even out the rest.
    for owners in sorted(lines, key=lambda owners: (len(owners), owners)):
        for rank, index, box in _stretches(owners, lines[owners], held, loads):
            shares[rank][index] += (box,)
            loads[rank] += held[index][0].item_bytes * _product(_stored(box.shape, held[index][0].strides))
    return shares


def _stretches(
    owners: tuple[int, ...], line: list[tuple[int, Holding]], held: Sequence[Sequence[Holding]], loads: list[int]
) -> Iterator[tuple[int, int, Box]]:
    """The boxes of a line, each with its rank and its tensor."""
    total = sum(holding.length for _, holding in line)
    ends = _ends([loads[rank] for rank in owners], total)
    finest = total // len(owners) // _FINEST
    start = number = 0
    for index, holding in line:
        end = start + holding.length
        if not holding.length:
            yield owners[0], index, _whole(holding)
            continue
        dims, unit = _grain(holding, held[index], finest)
        count, done = holding.length // holding.item_bytes, 0
        while done < count:
            # The stretch that ends in this tensor goes up to the nearest whole grain.
            upto = (
                count
                if ends[number] >= end or number == len(owners) - 1
                else _nearest(ends[number] - start, unit * holding.item_bytes) * unit
            )
            upto = min(upto, count)
            if upto > done:
                for box in _boxes(holding, dims, done, upto):
                    yield owners[number], index, box
            done = max(done, upto)
            if done < count:
                number += 1
        start = end


def _ends(loads: list[int], total: int) -> list[int]:
    """Where the stretches of a line of ``total`` bytes end, so that all ranks with a stretch reach the same load, given what they had."""
    level, rest, below = 0, total, sorted(loads)
    for number, load in enumerate(below, 1):
        above = below[number] if number < len(below) else None
        level = load + rest // number
        if above is None or level < above:
            break
        rest -= number * (above - load)
    wanted = [max(0, level - load) for load in loads]
    ends, position = [], 0
    for each in wanted:
        position += each
        ends.append(position)
    ends[-1] = total
    return ends


def _grain(holding: Holding, holdings: Sequence[Holding], finest: int) -> tuple[list[int], int]:
    """The dimensions along which a box is cut, outermost first, and how many elements stay together: rows, or rows of rows, down to
    ``finest``.
    """
    sizes = holding.sizes
    order = sorted((dim for dim, size in enumerate(sizes) if size > 1), key=lambda dim: (-holding.strides[dim], dim))
    cut = {dim for each in holdings for dim, size in enumerate(each.shape) if (each.offset[dim], each.local_shape[dim]) != (0, size)}
    unit, dims = _product(sizes), []
    for dim in order:
        if unit * holding.item_bytes <= finest or len(cut | {dim}) > MAX_CUT:
            break
        cut.add(dim)
        dims.append(dim)
        unit //= sizes[dim]
    return dims, unit


def _boxes(holding: Holding, dims: Sequence[int], begin: int, end: int) -> Iterator[Box]:
    """The elements from ``begin`` to ``end``, in the order of memory, as boxes that are each contiguous."""
    sizes = holding.sizes
    unit = _product(sizes)
    fixed: dict[int, tuple[int, int]] = {}
    yield from _inside(holding, sizes, list(dims), unit, begin, end, fixed)


def _inside(
    holding: Holding, sizes: Sequence[int], dims: list[int], count: int, begin: int, end: int, fixed: dict[int, tuple[int, int]]
) -> Iterator[Box]:
    """As ``_boxes``, within the ``count`` elements that are left once the dimensions in ``fixed`` are narrowed to (offset, size)."""
    if not dims or (begin, end) == (0, count):
        yield _narrowed(holding, fixed)
        return
    dim, *inner = dims
    row = count // sizes[dim]
    first, last = -(-begin // row), end // row
    if first > last:  # all of it lies in one row
        yield from _inside(holding, sizes, inner, row, begin - last * row, end - last * row, {**fixed, dim: (last, 1)})
        return
    if begin < first * row:
        yield from _inside(holding, sizes, inner, row, begin - (first - 1) * row, row, {**fixed, dim: (first - 1, 1)})
    if first < last:
        yield _narrowed(holding, {**fixed, dim: (first, last - first)})
    if last * row < end:
        yield from _inside(holding, sizes, inner, row, 0, end - last * row, {**fixed, dim: (last, 1)})


def _narrowed(holding: Holding, fixed: dict[int, tuple[int, int]]) -> Box:
    place = holding.place or (0,) * len(holding.shape)
    starts = [fixed[dim][0] if dim in fixed else 0 for dim in range(len(place))]
    shape = tuple([fixed[dim][1] if dim in fixed else size for dim, size in enumerate(holding.local_shape)])
    offset = tuple([first + start for first, start in zip(holding.offset, starts, strict=True)])
    return Box(offset, shape, tuple([first + start for first, start in zip(place, starts, strict=True)]))


def _whole(holding: Holding) -> Box:
    return Box(holding.offset, holding.local_shape, holding.place or (0,) * len(holding.shape))


def _stored(shape: Sequence[int], strides: Sequence[int]) -> list[int]:
    return [size if stride or not size else 1 for size, stride in zip(shape, strides, strict=True)]


def _nearest(number: int, unit: int) -> int:
    return (2 * number + unit) // (2 * unit)


def _product(sizes: Sequence[int]) -> int:
    count = 1
    for size in sizes:
        count *= size
    return count
