"""The geometry of tensors in memory: dtypes, strides, shards, and the parts of unusual tensors.

A tensor is *dense* when its elements fill one stretch of memory without holes or overlap, in any
order of dimensions (channels_last, transposes). Dimensions with stride 0 (``expand``) are stored
once and expanded again. The file also decides which rank stores which part of a tensor.
"""

from __future__ import annotations

import math
import operator
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from itertools import product
from typing import Any

import msgspec
import torch
from blake3 import blake3
from torch.utils.weak import WeakIdKeyDictionary

from datastates.errors import Corrupt, InvalidInput

from .encoding import Unencodable, decode_values, encode_values, encoder_of, pack, unpack
from .manifest import CHUNK_BYTES, Shard, TensorSpec

_DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype)
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}

MemoryKey = tuple[int, torch.device, torch.dtype, tuple[int, ...], tuple[int, ...], bool, bool]
MAX_CUT = 4
"""The most dimensions along which the shards of one tensor may be cut: a mesh cuts as many as it
has itself."""

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
"""The dtypes as which elements are copied, by their size: bit by bit, whatever they mean."""

_FINEST = 256
"""A stretch differs from its intended length by at most about one part in this many, if rows can
be cut at all."""

_HOME = "torch.distributed.tensor"
_PLAIN: frozenset[type[Any]] = frozenset({torch.Tensor, torch.nn.Parameter})
_owners = WeakIdKeyDictionary()
_COMPRESSED: dict[torch.layout, str] = {
    torch.sparse_csr: "csr",
    torch.sparse_csc: "csc",
    torch.sparse_bsr: "bsr",
    torch.sparse_bsc: "bsc",
}
Parts = tuple[tuple[Any, ...], tuple[object, ...]]
"""A skeleton's node, and the children that follow it."""


def dtype_name(dtype: torch.dtype) -> str:
    """torch's name of the dtype without the prefix: ``float32``."""
    return _NAMES[dtype]


def dtype_of(name: str) -> torch.dtype:
    """The dtype with that name.

    :raises InvalidInput: this torch has none.
    """
    try:
        return _DTYPES[name]
    except KeyError:
        raise InvalidInput(
            f"torch {torch.__version__} has no dtype {name!r}: upgrade torch to read this state"
        ) from None


def dense_view(tensor: torch.Tensor) -> torch.Tensor | None:
    """The tensor's bytes in memory order as a flat ``uint8`` view that shares its memory, without
    autograd.

    None if there is no such view (holes, overlap, pending conjugation): use ``compact``.
    """
    tensor = tensor.detach()
    if tensor.is_conj() or tensor.is_neg():
        return None
    if tensor.is_contiguous():
        count = tensor.numel()
    else:
        shape = _stored_shape(tensor.shape, tensor.stride())
        if not _fills(shape, tensor.stride()):
            return None
        count = math.prod(shape)
    # Not view(-1): a tensor of one element, or of none, is contiguous with any stride, and keeps
    # it.
    flat = tensor.as_strided((count,), (1,))
    return flat if flat.dtype == torch.uint8 else flat.view(torch.uint8)


class Placements:
    """Shows whether tensors are still where and as they were; one takes about 0.2 µs."""

    __slots__ = ("_aliases", "_complex", "_kinds", "_spread", "_tensors")

    def __init__(self, tensors: list[torch.Tensor], *, are_whole: bool) -> None:
        self._spread = [] if are_whole else [tensor for tensor in tensors if is_spread(tensor)]
        self._tensors = (
            tensors
            if are_whole
            else [local for tensor in tensors if (local := local_of(tensor)) is not None]
        )
        self._aliases = [tensor.detach() for tensor in self._tensors]
        self._complex = [tensor for tensor in self._tensors if tensor.dtype.is_complex]
        self._kinds = self._look()

    def are_same(self) -> bool:
        """Whether every tensor has the memory, offset, shape, strides, dtype and flags that it
        had."""
        return (
            all(map(torch.Tensor.is_set_to, self._tensors, self._aliases))
            and self._look() == self._kinds
        )

    def _look(self) -> list[object]:
        kinds = [
            *map(_DTYPE, self._tensors),
            *map(_REQUIRES_GRAD, self._tensors),
            *map(torch.Tensor.is_conj, self._complex),
        ]
        return (
            [*kinds, *map(_REQUIRES_GRAD, self._spread), *map(id, map(_LOCAL, self._spread))]
            if self._spread
            else kinds
        )


_DTYPE = operator.attrgetter("dtype")
_REQUIRES_GRAD = operator.attrgetter("requires_grad")
_LOCAL = operator.attrgetter("_local_tensor")


def compact(tensor: torch.Tensor) -> torch.Tensor:
    """A dense copy of the same shape; its strides are those with which the tensor will come
    back."""
    source = tensor.detach()
    strides = dense_strides(source.shape, source.stride())
    shape = _stored_shape(source.shape, source.stride())
    # Made as bytes: making complex32 directly warns.
    dense = torch.empty(
        (math.prod(shape) * source.element_size(),), dtype=torch.uint8, device=source.device
    ).view(source.dtype)
    # copy_ resolves a pending conjugation or negation.
    dense.as_strided(shape, strides).copy_(source.as_strided(shape, source.stride()))
    return dense.as_strided(source.shape, strides).requires_grad_(tensor.requires_grad)


def dense_strides(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """``strides`` themselves if they are dense, otherwise the packed ones with the same order of
    dimensions."""
    stored = _stored_shape(shape, strides)
    if 0 in shape or _fills(stored, strides):
        return tuple(strides)
    packed = [0] * len(stored)
    step = 1
    for dim in sorted(range(len(stored)), key=lambda dim: (strides[dim], -dim)):
        if strides[dim] != 0 or stored[dim] == shape[dim]:
            packed[dim] = step
            step *= stored[dim]
    return tuple(packed)


def is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether elements of this geometry fill their memory once, dimensions of stride 0 aside."""
    return 0 in shape or _fills(_stored_shape(shape, strides), strides)


def stored_bytes(dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int]) -> int:
    """The bytes that a tensor, or a shard of it, takes in the stream: dimensions of stride 0
    count once."""
    return dtype.itemsize * math.prod(_stored_shape(shape, strides))


def spec_of(
    path: str, tensor: torch.Tensor, *, alias: int | None = None, shards: Sequence[Shard] = ()
) -> TensorSpec:
    """The entry of ``tensor`` in a manifest; its strides are those with which it will come back."""
    shape = tuple(tensor.shape)
    strides = dense_strides(shape, tensor.stride())
    return TensorSpec(
        path, _NAMES[tensor.dtype], shape, strides, alias, tensor.requires_grad, tuple(shards)
    )


def rebuild(data: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """The tensor that ``spec`` describes. ``data`` is its stored bytes as flat ``uint8``, whose
    memory it shares.

    Copies only if ``data`` is not aligned to the item size. Values, shape and strides are the
    original's. ``requires_grad`` is False.

    :raises Corrupt: the bytes do not fit the description.
    """
    dtype = dtype_of(spec.dtype)
    needed = stored_bytes(dtype, spec.shape, spec.strides)
    if data.numel() != needed or not is_dense(spec.shape, spec.strides):
        raise Corrupt(
            f"{spec.path}: {data.numel()} bytes for {spec.dtype} {spec.shape} with strides"
            f" {spec.strides}, which take {needed}"
        )
    if data.data_ptr() % dtype.itemsize or data.storage_offset() % dtype.itemsize:
        data = data.clone()
    flat = data.view(dtype)
    return flat.as_strided(spec.shape, spec.strides, flat.storage_offset())


def memory_key(tensor: torch.Tensor) -> MemoryKey | None:
    """Equal for two tensors that are the same memory with the same geometry (tied weights). None
    for a tensor without memory."""
    if not tensor.numel() or not (pointer := tensor.data_ptr()):
        return None
    return (
        pointer,
        tensor.device,
        tensor.dtype,
        tuple(tensor.shape),
        tensor.stride(),
        tensor.is_conj(),
        tensor.is_neg(),
    )


def _stored_shape(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """The shape in which elements are stored: each dimension of stride 0 has one element, unless
    it is empty."""
    if 0 in strides:
        return tuple(
            [
                1 if size and not stride else size
                for size, stride in zip(shape, strides, strict=True)
            ]
        )
    return tuple(shape)


def _fills(shape: Sequence[int], strides: Sequence[int]) -> bool:
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != expected:
            break
        expected *= size
    else:
        return True  # in the usual order: no need to sort
    expected = 1
    for stride, size in sorted(
        (stride, size) for size, stride in zip(shape, strides, strict=True) if size != 1
    ):
        if stride != expected:
            return False
        expected *= size
    return True


# --- Shards of a tensor: are they complete, join them, cut them ---


def is_whole(spec: TensorSpec) -> bool:
    """Whether the tensor is in one stretch: a single shard that is all of it."""
    return (
        len(spec.shards) == 1
        and spec.shards[0].shape == spec.shape
        and not any(spec.shards[0].offset)
    )


def bytes_of(spec: TensorSpec) -> int:
    """The bytes of all its shards; 0 for a tensor that is tied to an earlier one."""
    return sum(shard.length for shard in spec.shards)


def covers(spec: TensorSpec) -> bool:
    """Whether the shards, which are inside the tensor, hold every element exactly once.

    Every box adds one to some of its corners and subtracts one from the other corners, alternately.
    Boxes tile the whole exactly if the sum is what the whole alone gives. This takes time in
    proportion to the number of shards.
    """
    if 0 in spec.shape or is_whole(spec):
        return True
    dims = [
        dim
        for dim, size in enumerate(spec.shape)
        if any((each.offset[dim], each.shape[dim]) != (0, size) for each in spec.shards)
    ]
    if len(dims) > MAX_CUT:
        return False
    corners: Counter[tuple[int, ...]] = Counter()
    _add_corners(corners, [(0, spec.shape[dim]) for dim in dims], -1)
    for shard in spec.shards:
        _add_corners(
            corners, [(shard.offset[dim], shard.offset[dim] + shard.shape[dim]) for dim in dims], 1
        )
    return not any(corners.values())


def empty(spec: TensorSpec) -> torch.Tensor:
    """Untouched memory for the tensor's stored bytes."""
    return torch.empty(
        stored_bytes(dtype_of(spec.dtype), spec.shape, spec.strides),
        dtype=torch.uint8,
        device="cpu",
    )


def assemble(spec: TensorSpec, read: Callable[[Shard], torch.Tensor]) -> torch.Tensor:
    """The tensor's stored bytes, flat. The result is what ``read`` returns for a single shard, and
    new memory for several shards.

    ``read`` returns the stored bytes of a shard as flat ``uint8``. The shards cover the tensor.
    """
    if is_whole(spec):
        return read(spec.shards[0])
    flat = empty(spec)
    for shard in spec.shards:
        if shard.length:
            _box(flat, spec, shard).copy_(_elements(read(shard), _spec_of(spec, shard)))
    return flat


def cut(spec: TensorSpec, flat: torch.Tensor) -> Iterator[tuple[Shard, torch.Tensor]]:
    """Each shard and its stored bytes, cut from the bytes of the whole tensor: the reverse of
    ``assemble``."""
    for shard in spec.shards:
        if is_whole(spec):
            yield shard, flat
        elif shard.length:
            piece = torch.empty(shard.length, dtype=torch.uint8, device="cpu")
            _elements(piece, _spec_of(spec, shard)).copy_(_box(flat, spec, shard))
            yield shard, piece


def gaps(specs: Sequence[TensorSpec], lengths: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """The parts of chunks of these lengths that no shard has: the chunk, and from which byte to
    which."""
    taken: dict[int, list[tuple[int, int]]] = {}
    for spec in specs:
        for shard in spec.shards:
            end = shard.start + shard.length
            for chunk in range(
                shard.start // CHUNK_BYTES, -(-end // CHUNK_BYTES) if shard.length else 0
            ):
                begin = chunk * CHUNK_BYTES
                taken.setdefault(chunk, []).append(
                    (max(0, shard.start - begin), min(CHUNK_BYTES, end - begin))
                )
    for chunk, length in enumerate(lengths):
        done = 0
        for begin, end in [*sorted(taken.get(chunk, ())), (length, length)]:
            if done < begin:
                yield chunk, done, begin
            done = max(done, end)


def _add_corners(
    corners: Counter[tuple[int, ...]], sides: list[tuple[int, int]], count: int
) -> None:
    for ends in product((0, 1), repeat=len(sides)):
        corners[tuple([side[end] for side, end in zip(sides, ends, strict=True)])] += (
            -count if sum(ends) % 2 else count
        )


def _spec_of(spec: TensorSpec, shard: Shard) -> TensorSpec:
    return msgspec.structs.replace(
        spec, shape=shard.shape, strides=dense_strides(shard.shape, spec.strides)
    )


def _elements(flat: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """The stored elements in their shape, as integers over the memory of ``flat``; a dimension
    of stride 0 is stored once."""
    item = dtype_of(spec.dtype).itemsize
    name = str(_INTEGERS[item]).removeprefix("torch.")
    stored = _stored_shape(spec.shape, spec.strides)
    return rebuild(flat, msgspec.structs.replace(spec, dtype=name, shape=stored))


def _box(flat: torch.Tensor, spec: TensorSpec, shard: Shard) -> torch.Tensor:
    """The view of the shard's elements in the whole tensor."""
    whole = _elements(flat, spec)
    return whole[
        tuple(
            slice(offset, offset + size)
            for offset, size in zip(shard.offset, shard.shape, strict=True)
        )
    ]


# --- Assignment of a state's parts to ranks, from the boxes in each rank's memory ---


@dataclass(frozen=True, slots=True)
class Holding:
    """A box of a tensor in the memory of each of ``owners``, in ascending order.

    ``shape`` and ``strides`` describe the whole tensor, dense. ``offset`` and ``local_shape`` are
    the box in it, which is not cut along dimensions of stride 0. ``place`` is where the box begins
    in the owners' local tensor, and empty if it begins at the start.
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
        return _stored_shape(self.local_shape, self.strides)

    @property
    def length(self) -> int:
        """The bytes that the box takes in the stream."""
        return self.item_bytes * math.prod(self.sizes)


@dataclass(frozen=True, slots=True)
class Box:
    """A hyper-rectangle of a tensor: ``offset`` in the whole tensor, ``place`` in the local
    tensor of the rank whose share it is."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    place: tuple[int, ...]


def held_by(held: Sequence[Holding], rank: int) -> list[Holding]:
    """The boxes of a tensor in a rank's memory."""
    return [holding for holding in held if rank in holding.owners]


def digest_of(held: Sequence[Sequence[Holding]]) -> bytes:
    """32 bytes that are equal on two ranks if both divide alike."""
    return blake3(msgspec.msgpack.encode(held)).digest()


def divide(held: Sequence[Sequence[Holding]], size: int) -> list[list[tuple[Box, ...]]]:
    """The shares of ``size`` ranks: by rank and by tensor, its boxes.

    ``held`` has, by tensor, all boxes of it that any rank holds; they tile it. A tensor without
    elements belongs to its first owner.
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
    # Tensors that the fewest ranks hold come first: those that more ranks hold then even out the
    # rest.
    for owners in sorted(lines, key=lambda owners: (len(owners), owners)):
        for rank, index, box in _stretches(owners, lines[owners], held, loads):
            shares[rank][index] += (box,)
            loads[rank] += held[index][0].item_bytes * math.prod(
                _stored_shape(box.shape, held[index][0].strides)
            )
    return shares


def _stretches(
    owners: tuple[int, ...],
    line: list[tuple[int, Holding]],
    held: Sequence[Sequence[Holding]],
    loads: list[int],
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
    """The ends of the stretches in a line of ``total`` bytes. With them, all ranks with a stretch
    reach the same load, given their earlier loads."""
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
    """The dimensions along which a box is cut, outermost first, and how many elements stay
    together: rows, or rows of rows, down to ``finest``.
    """
    sizes = holding.sizes
    order = sorted(
        (dim for dim, size in enumerate(sizes) if size > 1),
        key=lambda dim: (-holding.strides[dim], dim),
    )
    cut = {
        dim
        for each in holdings
        for dim, size in enumerate(each.shape)
        if (each.offset[dim], each.local_shape[dim]) != (0, size)
    }
    unit, dims = math.prod(sizes), []
    for dim in order:
        if unit * holding.item_bytes <= finest or len(cut | {dim}) > MAX_CUT:
            break
        cut.add(dim)
        dims.append(dim)
        unit //= sizes[dim]
    return dims, unit


def _boxes(holding: Holding, dims: Sequence[int], begin: int, end: int) -> Iterator[Box]:
    """The elements from ``begin`` to ``end``, in the order of memory, as boxes that are each
    contiguous."""
    sizes = holding.sizes
    unit = math.prod(sizes)
    fixed: dict[int, tuple[int, int]] = {}
    yield from _inside(holding, sizes, list(dims), unit, begin, end, fixed)


def _inside(
    holding: Holding,
    sizes: Sequence[int],
    dims: list[int],
    count: int,
    begin: int,
    end: int,
    fixed: dict[int, tuple[int, int]],
) -> Iterator[Box]:
    """As ``_boxes``, within the ``count`` elements that are left once the dimensions in
    ``fixed`` are narrowed to (offset, size)."""
    if not dims or (begin, end) == (0, count):
        yield _narrowed(holding, fixed)
        return
    dim, *inner = dims
    row = count // sizes[dim]
    first, last = -(-begin // row), end // row
    if first > last:  # all of it is in one row
        yield from _inside(
            holding,
            sizes,
            inner,
            row,
            begin - last * row,
            end - last * row,
            {**fixed, dim: (last, 1)},
        )
        return
    if begin < first * row:
        yield from _inside(
            holding,
            sizes,
            inner,
            row,
            begin - (first - 1) * row,
            row,
            {**fixed, dim: (first - 1, 1)},
        )
    if first < last:
        yield _narrowed(holding, {**fixed, dim: (first, last - first)})
    if last * row < end:
        yield from _inside(
            holding, sizes, inner, row, 0, end - last * row, {**fixed, dim: (last, 1)}
        )


def _narrowed(holding: Holding, fixed: dict[int, tuple[int, int]]) -> Box:
    place = holding.place or (0,) * len(holding.shape)
    starts = [fixed[dim][0] if dim in fixed else 0 for dim in range(len(place))]
    shape = tuple(
        [fixed[dim][1] if dim in fixed else size for dim, size in enumerate(holding.local_shape)]
    )
    offset = tuple([first + start for first, start in zip(holding.offset, starts, strict=True)])
    return Box(
        offset, shape, tuple([first + start for first, start in zip(place, starts, strict=True)])
    )


def _whole(holding: Holding) -> Box:
    return Box(holding.offset, holding.local_shape, holding.place or (0,) * len(holding.shape))


def _nearest(number: int, unit: int) -> int:
    return (2 * number + unit) // (2 * unit)


# --- Tensors in part of one process's memory: DTensors, and tensors that some ranks got ---


def kinds() -> frozenset[type[Any]]:
    """The exact types of the tensors that a state takes as they are."""
    found = _dtensor()
    return _PLAIN if found is None else _PLAIN | {found}


def is_spread(tensor: object) -> bool:
    """Whether it is a DTensor: one tensor over the ranks of a mesh."""
    found = _dtensor()
    return found is not None and type(tensor) is found


def local_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """This rank's memory of a tensor: all of a plain one, the local tensor of a DTensor (which
    may be empty), None for a stand-in."""
    if is_spread(tensor):
        # `to_local` is autograd's, and 100 times slower
        local: torch.Tensor = tensor._local_tensor  # type: ignore[attr-defined]
        return local
    return None if tensor.is_meta else tensor


def give(tensor: torch.Tensor, owners: Sequence[int]) -> torch.Tensor:
    """Note that only the ranks ``owners`` hold this tensor, and return it.

    The other ranks have a ``stand_in`` for it."""
    _owners[tensor] = tuple(sorted(owners))
    return tensor


def owners_of(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """The ranks to which a plain tensor was given, ascending. None: nothing was noted, and every
    rank has it."""
    found: tuple[int, ...] | None = _owners.get(tensor)
    return found


def stand_in(like: torch.Tensor, owners: Sequence[int]) -> torch.Tensor:
    """A tensor without bytes, of the geometry of ``like``. It represents one that other ranks
    hold."""
    return give(
        torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="meta"), owners
    )


def _dtensor() -> type[Any] | None:
    return getattr(sys.modules.get(_HOME), "DTensor", None)


# --- Sparse, quantized and wrapping tensors as dense parts, and back ---


_LAYOUTS = {tag: layout for layout, tag in _COMPRESSED.items()}


def decompose(tensor: torch.Tensor) -> torch.Tensor | Parts:
    """The tensor itself if it is a plain strided one, otherwise its parts.

    :raises Unencodable: it has no bytes, or its layout has no parts, or it is of a subclass that
        cannot be taken apart.
    """
    if type(tensor) not in kinds():
        return _wrapping(tensor)
    if tensor.is_meta:
        if owners_of(tensor) is not None:
            return tensor
        raise Unencodable(
            "is a meta tensor, which has no bytes: materialize it first, for example with"
            " module.to_empty(device=...)"
        )
    layout = tensor.layout
    if layout is torch.strided:
        if tensor.is_quantized:
            return _quantized(tensor.detach())
        if tensor.is_nested or torch._is_functional_tensor(tensor):
            raise Unencodable(
                "is a nested or functional tensor: convert it to plain tensors, for example with"
                " tensor.unbind()"
            )
        return tensor
    tensor = tensor.detach()
    if layout is torch.sparse_coo:
        return ("coo", tuple(tensor.shape), tensor.is_coalesced()), (
            tensor._indices(),
            tensor._values(),
        )
    if layout in (torch.sparse_csr, torch.sparse_bsr):
        return (_COMPRESSED[layout], tuple(tensor.shape)), (
            tensor.crow_indices(),
            tensor.col_indices(),
            tensor.values(),
        )
    if layout in (torch.sparse_csc, torch.sparse_bsc):
        return (_COMPRESSED[layout], tuple(tensor.shape)), (
            tensor.ccol_indices(),
            tensor.row_indices(),
            tensor.values(),
        )
    raise Unencodable(
        f"is a tensor of layout {layout}, which is not stored: call to_dense() on it first"
    )


def compose(node: tuple[Any, ...], parts: Sequence[Any]) -> Any:
    """The tensor for which ``decompose`` returned ``node`` and ``parts``; indices are checked. The
    parts of a wrapping tensor by name, if this process has not imported its class.

    Raises torch's own error if the parts do not fit together.
    """
    tag, first = node[0], node[1]
    if tag == "s":
        return _wrapped(node, dict(zip(node[2], parts, strict=True)))
    if tag == "coo":
        return torch.sparse_coo_tensor(
            parts[0],
            parts[1],
            first,
            is_coalesced=node[2],
            check_invariants=True,
            device=parts[1].device,
        )
    if tag in _LAYOUTS:
        where = {"layout": _LAYOUTS[tag], "device": parts[2].device}
        return torch.sparse_compressed_tensor(
            parts[0], parts[1], parts[2], first, check_invariants=True, **where
        )
    dtype = dtype_of(first)
    with warnings.catch_warnings():
        # torch 2.13 deprecates making quantized tensors; those that exist must still come back.
        warnings.simplefilter("ignore", UserWarning)
        if tag == "qt":
            tensor = torch._make_per_tensor_quantized_tensor(parts[0], parts[1], parts[2])
        else:
            # A copy of such a tensor shares its scales, which may be in memory that is only lent.
            tensor = torch._make_per_channel_quantized_tensor(
                parts[0], parts[1].clone(), parts[2].clone(), node[2]
            )
    if tensor.dtype != dtype:
        raise Corrupt(f"a quantized tensor came back as {dtype_name(tensor.dtype)}, not {first}")
    return tensor


def is_wrapping(found: object) -> bool:
    """Whether it is a tensor whose elements are in inner tensors, and that no registered encoder
    takes."""
    kind = type(found)
    return (
        isinstance(found, torch.Tensor)
        and hasattr(kind, "__tensor_flatten__")
        and not is_spread(found)
        and encoder_of(kind) is None
    )


def is_storable(found: object) -> bool:
    """Whether a state can hold a tensor of this class."""
    return type(found) in kinds() or is_wrapping(found) or encoder_of(type(found)) is not None


def inner(tensor: Any) -> dict[str, torch.Tensor]:
    """The inner tensors of a wrapping tensor, by attribute."""
    return {name: getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]}


def plain_tensors(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that hold the elements: the tensor itself, or those within a wrapping tensor."""
    return (
        [plain for part in inner(tensor).values() for plain in plain_tensors(part)]
        if is_wrapping(tensor)
        else [tensor]
    )


def are_alike(live: object, stored: object) -> bool:
    """Whether both are tensors of the same shape, dtype, layout, class and metadata: ``stored``
    can be copied into ``live``."""
    if not isinstance(live, torch.Tensor) or not isinstance(stored, torch.Tensor):
        return False
    if not is_wrapping(live) and not is_wrapping(stored):
        return (live.shape, live.dtype, live.layout) == (stored.shape, stored.dtype, stored.layout)
    return (
        type(live) is type(stored)
        and _wrapping(live)[0] == _wrapping(stored)[0]
        and all(map(are_alike, inner(live).values(), inner(stored).values()))
    )


def _wrapping(tensor: Any) -> Parts:
    kind = type(tensor)
    name = f"{kind.__module__}:{kind.__qualname__}"
    if not is_wrapping(tensor) or tensor.is_nested or name.startswith("torch.distributed."):
        raise Unencodable(
            f"is a tensor subclass, {name.replace(':', '.')}: convert it to a plain tensor, or"
            " register it with datastates.register_encoder(...). track(frozen=False) leaves out"
            " parameters that require no gradient"
        )
    names, metadata = tensor.__tensor_flatten__()
    try:
        packed = encode_values([pack(_plain(metadata))])
    except Unencodable as exc:
        raise Unencodable(
            f"is a {name.replace(':', '.')}, and in its metadata a value {exc}"
        ) from exc
    return ("s", name, tuple(names), tuple(tensor.shape), tensor.stride(), packed), tuple(
        inner(tensor).values()
    )


def like(tensor: torch.Tensor, parts: Sequence[object]) -> Any:
    """A wrapping tensor of the same form with other inner tensors."""
    return compose(_wrapping(tensor)[0], parts)


def _wrapped(node: tuple[Any, ...], parts: dict[str, Any]) -> Any:
    _, name, _, shape, strides, packed = node
    kind = _imported(name)
    if not hasattr(kind, "__tensor_unflatten__") or name.startswith("torch.distributed."):
        return parts
    device = next((part.device for part in parts.values() if isinstance(part, torch.Tensor)), _HERE)
    metadata = _rich(unpack(decode_values(packed)[0]), device, name)
    made = kind.__tensor_unflatten__(parts, metadata, torch.Size(shape), strides)
    if type(made) is not kind or _wrapping(made)[0] != node:
        raise Corrupt(f"a tensor of {name} came back as another one")
    return made


_CLASS = "datastates.class"
_HERE = torch.device("meta")


def _plain(value: Any) -> Any:
    # Enums, named tuples and dataclasses become a dict with the name of their class. Every device
    # is the inner tensors' device.
    kind = type(value)
    if kind is list or kind is tuple:
        return kind(map(_plain, value))
    if kind is dict:
        return {key: _plain(child) for key, child in value.items()}
    names = (
        [each.name for each in fields(kind)] if is_dataclass(kind) else getattr(kind, "_fields", ())
    )
    if not names and not isinstance(value, Enum):
        return _HERE if kind is torch.device else value
    # Whether a gradient is required belongs to the live parameter, and not to the form of its
    # bytes.
    state = {
        name: name != "requires_grad" and _plain(getattr(value, name)) for name in names
    } or value.name
    return {_CLASS: f"{kind.__module__}:{kind.__qualname__}", "state": state}


def _rich(plain: Any, device: torch.device, owner: str) -> Any:
    # The reverse. No code of a class runs. Dataclasses are accepted from the package of ``owner``,
    # the tensor's class.
    kind = type(plain)
    if kind is list or kind is tuple:
        return kind(_rich(child, device, owner) for child in plain)
    if kind is not dict:
        return device if kind is torch.device else plain
    items = {key: _rich(child, device, owner) for key, child in plain.items()}
    if _CLASS not in items:
        return items
    found, state = _imported(items[_CLASS]), items["state"]
    if issubclass(found, Enum | tuple):
        return found[state] if issubclass(found, Enum) else tuple.__new__(found, state.values())
    if (
        not is_dataclass(found)
        or found.__module__.partition(".")[0] != owner.partition(":")[0].partition(".")[0]
    ):
        raise TypeError(f"{items[_CLASS]} is no class of metadata")
    made: Any = object.__new__(found)  # type: ignore[arg-type]  # a class
    made.__dict__.update(state)  # the class may be frozen
    return made


def _imported(name: str) -> Any:
    # Not by ``getattr``: some modules import on demand.
    module, _, qualname = name.partition(":")
    found = vars(sys.modules[module]).get(qualname) if module in sys.modules else None
    return found if isinstance(found, type) else None


def _quantized(tensor: torch.Tensor) -> Parts:
    scheme, name = tensor.qscheme(), dtype_name(tensor.dtype)
    if name in ("qint8", "quint8", "qint32"):
        if scheme == torch.per_tensor_affine:
            return ("qt", name), (tensor.int_repr(), tensor.q_scale(), tensor.q_zero_point())
        if scheme == torch.per_channel_affine:
            scales, zero_points = tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()
            return ("qc", name, tensor.q_per_channel_axis()), (
                tensor.int_repr(),
                scales,
                zero_points,
            )
    raise Unencodable(
        f"is a quantized tensor of dtype {name} and scheme {scheme}, which is not stored:"
        " dequantize() it first"
    )


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is nothing but its elements: neither sparse nor quantized."""
    return tensor.layout is torch.strided and not tensor.is_quantized
