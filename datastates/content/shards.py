"""A tensor's shards: whether they make up all of it, its bytes joined from theirs and cut into theirs again, and the gaps between those of
a state.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import product

import msgspec
import torch

from .geometry import dense_strides, dtype_of, rebuild, stored_bytes
from .manifest import CHUNK_BYTES, Shard, TensorSpec

__all__ = ["MAX_CUT", "assemble", "bytes_of", "covers", "cut", "empty", "gaps", "is_whole"]

MAX_CUT = 4
"""The most dimensions along which the shards of one tensor may be cut: a mesh cuts as many as it has itself."""

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
"""The dtypes as which elements are copied, by their size: bit by bit, whatever they mean."""


def is_whole(spec: TensorSpec) -> bool:
    """Whether the tensor lies in one stretch: a single shard that is all of it."""
    return len(spec.shards) == 1 and spec.shards[0].shape == spec.shape and not any(spec.shards[0].offset)


def bytes_of(spec: TensorSpec) -> int:
    """The bytes of all its shards; 0 for a tensor that is tied to an earlier one."""
    return sum(shard.length for shard in spec.shards)


def covers(spec: TensorSpec) -> bool:
    """Whether the shards, each of which lies inside the tensor, hold every element exactly once.

    Every box adds one to some of its corners and subtracts one from the others, alternately. Boxes tile the whole exactly if all of these
    add up to what the whole alone gives. This takes time in proportion to the number of shards, however they lie.
    """
    if 0 in spec.shape or is_whole(spec):
        return True
    dims = [dim for dim, size in enumerate(spec.shape) if any((each.offset[dim], each.shape[dim]) != (0, size) for each in spec.shards)]
    if len(dims) > MAX_CUT:
        return False
    corners: Counter[tuple[int, ...]] = Counter()
    _add_corners(corners, [(0, spec.shape[dim]) for dim in dims], -1)
    for shard in spec.shards:
        _add_corners(corners, [(shard.offset[dim], shard.offset[dim] + shard.shape[dim]) for dim in dims], 1)
    return not any(corners.values())


def empty(spec: TensorSpec) -> torch.Tensor:
    """Untouched memory for the tensor's stored bytes."""
    return torch.empty(stored_bytes(dtype_of(spec.dtype), spec.shape, spec.strides), dtype=torch.uint8, device="cpu")


def assemble(spec: TensorSpec, read: Callable[[Shard], torch.Tensor]) -> torch.Tensor:
    """The tensor's stored bytes, flat: those that ``read`` returns for a single shard, as they are, else memory of their own.

    ``read`` returns the stored bytes of a shard as flat ``uint8``; the shards cover the tensor.
    """
    if is_whole(spec):
        return read(spec.shards[0])
    flat = empty(spec)
    for shard in spec.shards:
        if shard.length:
            _box(flat, spec, shard).copy_(_elements(read(shard), _spec_of(spec, shard)))
    return flat


def cut(spec: TensorSpec, flat: torch.Tensor) -> Iterator[tuple[Shard, torch.Tensor]]:
    """Each shard and its stored bytes, cut out of those of the whole tensor: the reverse of ``assemble``."""
    for shard in spec.shards:
        if is_whole(spec):
            yield shard, flat
        elif shard.length:
            piece = torch.empty(shard.length, dtype=torch.uint8, device="cpu")
            _elements(piece, _spec_of(spec, shard)).copy_(_box(flat, spec, shard))
            yield shard, piece


def gaps(specs: Sequence[TensorSpec], lengths: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """The parts of chunks of these lengths that no shard has: the chunk, and from which byte to which."""
    taken: dict[int, list[tuple[int, int]]] = {}
    for spec in specs:
        for shard in spec.shards:
            end = shard.start + shard.length
            for chunk in range(shard.start // CHUNK_BYTES, -(-end // CHUNK_BYTES) if shard.length else 0):
                begin = chunk * CHUNK_BYTES
                taken.setdefault(chunk, []).append((max(0, shard.start - begin), min(CHUNK_BYTES, end - begin)))
    for chunk, length in enumerate(lengths):
        done = 0
        for begin, end in [*sorted(taken.get(chunk, ())), (length, length)]:
            if done < begin:
                yield chunk, done, begin
            done = max(done, end)


def _add_corners(corners: Counter[tuple[int, ...]], sides: list[tuple[int, int]], count: int) -> None:
    for ends in product((0, 1), repeat=len(sides)):
        corners[tuple([side[end] for side, end in zip(sides, ends, strict=True)])] += -count if sum(ends) % 2 else count


def _spec_of(spec: TensorSpec, shard: Shard) -> TensorSpec:
    """The shard as a tensor by itself."""
    return msgspec.structs.replace(spec, shape=shard.shape, strides=dense_strides(shard.shape, spec.strides))


def _elements(flat: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """The stored elements in their shape, as integers over the memory of ``flat``; a dimension of stride 0 is stored once."""
    item = dtype_of(spec.dtype).itemsize
    name = str(_INTEGERS[item]).removeprefix("torch.")
    once = tuple(1 if size and not stride else size for size, stride in zip(spec.shape, spec.strides, strict=True))
    return rebuild(flat, msgspec.structs.replace(spec, dtype=name, shape=once))


def _box(flat: torch.Tensor, spec: TensorSpec, shard: Shard) -> torch.Tensor:
    """The view of the shard's elements in the whole tensor."""
    whole = _elements(flat, spec)
    return whole[tuple(slice(offset, offset + size) for offset, size in zip(shard.offset, shard.shape, strict=True))]
