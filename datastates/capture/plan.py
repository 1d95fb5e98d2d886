"""The copy plan: where each byte of a state goes, compiled once and reused until the layout changes.

A plan knows, for each chunk, which pieces of which tensors make it up. Copying a state is then: one slot a chunk, one
``split`` of each slot into destination views, one ``_foreach_copy_`` for all pieces. Everything is copied as bytes, so
that pieces of all dtypes go through the same call.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import msgspec
import torch

from datastates.content.geometry import compact, dense_view, memory_key, spec_of
from datastates.content.manifest import CHUNK_BYTES, Shard, TensorSpec
from datastates.content.tree import Flat, Leaf, encode_skeleton
from datastates.system.devices import devices

from .tripwire import Tripwire, Watched

__all__ = ["DEFER_BYTES", "CopyPlan", "Layout", "Pieces", "compile_plan"]

DEFER_BYTES = 64 << 10
"""Smaller tensors are copied before ``capture`` returns: a deferred copy would gain nothing."""


@dataclass(frozen=True, slots=True)
class Layout:
    """What all captures of a plan have in common, encoded for the manifest once."""

    skeleton: msgspec.Raw
    tensors: msgspec.Raw
    chunk_lengths: tuple[int, ...]
    bytes_total: int

    @property
    def slot_bytes(self) -> int:
        """The bytes that the slots of a state take."""
        return len(self.chunk_lengths) * CHUNK_BYTES


@dataclass(slots=True)
class Pieces:
    """The copies into one chunk at a time: ``sources[i]``, bytes, is the piece ``places[i]`` of the chunk."""

    places: list[int] = field(default_factory=list)
    sources: list[torch.Tensor] = field(default_factory=list)


@dataclass(slots=True)
class _Source:
    """One leaf that is stored: its tensor as last seen, and its bytes as a flat view."""

    leaf: int
    path: str
    tensor: torch.Tensor
    pointer: int
    flat: torch.Tensor
    start: int
    is_deferred: bool
    is_dense: bool
    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    pieces: list[tuple[int, int]] = field(default_factory=list)

    def is_as_it_was(self, tensor: torch.Tensor) -> bool:
        """Whether ``flat`` is still the bytes of ``tensor``: the same object may lie elsewhere, or otherwise, by now (``.data = …``)."""
        return (
            tensor is self.tensor
            and self.is_dense
            and tensor.data_ptr() == self.pointer
            and tensor.shape == self.shape
            and tensor.stride() == self.strides
            and tensor.dtype is self.dtype
            and tensor.requires_grad is self.requires_grad
            and not (self.dtype.is_complex and tensor.is_conj())
        )


@dataclass(slots=True)
class CopyPlan:
    """A compiled plan. Belongs to one tracker; built and refreshed on the training thread only.

    ``sizes[c]`` are the lengths of the pieces of chunk ``c``; ``eager[c]`` and ``deferred[c]`` say which of them are copied when.
    ``is_taught``: some are copied at once because they tore.
    """

    layout: Layout
    flat: Flat
    specs: tuple[TensorSpec, ...]
    sizes: list[list[int]]
    eager: list[Pieces]
    deferred: list[Pieces]
    sources: list[_Source]
    aliases: list[tuple[int, torch.Tensor, object]]
    tripwire: Tripwire
    is_on_device: bool
    eager_bytes: int
    is_taught: bool = False
    _marks: _Marks | None = None

    @property
    def slot_count(self) -> int:
        """How many slots a capture takes."""
        return len(self.sizes)

    def refresh(self, flat: Flat) -> bool:
        """Point the plan at this capture's tensors; False when the layout changed and the plan must be compiled anew.

        A tensor that is a new object of the same geometry (an RNG state, say) is taken over if it is copied eagerly.
        """
        leaves = flat.tensors
        if flat.skeleton is not self.flat.skeleton:  # ``flatten`` keeps the object as long as it is equal
            return False
        if leaves is self.flat.tensors and self._marks is not None and self._marks.are_right():  # the common case: not one moved
            self.flat = flat
            return True
        self.flat = flat
        for source in self.sources:
            leaf = leaves[source.leaf]
            if not source.is_as_it_was(leaf.tensor) and not self._take_over(source, leaf):
                return False
        if not all(leaves[index].tensor is tensor and memory_key(tensor) == key for index, tensor, key in self.aliases):
            return False
        self._marks = _Marks([leaf.tensor for leaf in leaves]) if all(source.is_dense for source in self.sources) else None
        return True

    def targets(self, chunk: int, slot: torch.Tensor) -> Sequence[torch.Tensor]:
        """The destination views of a chunk's pieces inside its slot (uint8, ``CHUNK_BYTES`` long)."""
        sizes = self.sizes[chunk]
        if len(sizes) == 1:
            return (slot if sizes[0] == CHUNK_BYTES else slot[: sizes[0]],)
        length = self.layout.chunk_lengths[chunk]
        views: Sequence[torch.Tensor] = torch.split(slot if length == CHUNK_BYTES else slot[:length], sizes)
        return views

    def _take_over(self, source: _Source, leaf: Leaf) -> bool:
        tensor, spec = leaf.tensor, self.specs[source.leaf]
        if source.is_deferred or leaf.path != source.path:
            return False
        dense = _dense(tensor)
        fresh = spec_of(leaf.path, dense)
        if msgspec.structs.replace(fresh, shards=spec.shards) != spec or devices().of(dense) != devices().of(source.flat):
            return False
        flat = _bytes_of(dense)
        source.tensor, source.pointer, source.flat, source.is_dense = tensor, tensor.data_ptr(), flat, dense is tensor
        for chunk, index in source.pieces:
            pieces = self.eager[chunk].sources
            begin = max(0, chunk * CHUNK_BYTES - source.start)
            pieces[index] = flat[begin : begin + pieces[index].numel()]
        return True


def compile_plan(
    flat: Flat,
    *,
    fenced: Collection[int] = (),
    frozen: Collection[int] = (),
    eager_paths: Collection[str] = (),
) -> CopyPlan:
    """Lay a state's tensors out over chunks.

    ``fenced`` and ``frozen`` are ids of tensors: those that a tracked optimizer alone changes (deferred when large
    enough), and those that stay the same (grouped apart, so that their chunks keep their digests). ``eager_paths`` are
    never deferred: the tripwire saw them change outside the fence.
    """
    specs: list[TensorSpec] = []
    sources: list[_Source] = []
    aliases: list[tuple[int, torch.Tensor, object]] = []
    first_of: dict[object, int] = {}
    for index, leaf in enumerate(flat.tensors):
        tensor = leaf.tensor
        key = memory_key(tensor)
        if key is not None and key in first_of:
            specs.append(msgspec.structs.replace(spec_of(leaf.path, tensor), alias=first_of[key]))
            aliases.append((index, tensor, key))
            continue
        if key is not None:
            first_of[key] = index
        dense = dense_view(tensor)
        is_dense = dense is not None
        packed = tensor if is_dense else _dense(tensor)
        specs.append(spec_of(leaf.path, packed))
        data = _bytes_of(packed)
        is_deferred = is_dense and id(tensor) in fenced and data.numel() >= DEFER_BYTES and leaf.path not in eager_paths
        is_deferred = is_deferred and not tensor.is_inference()  # those have no version that a tripwire could compare
        geometry = (tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad)
        sources.append(_Source(index, leaf.path, tensor, tensor.data_ptr(), data, 0, is_deferred, is_dense, *geometry))
    plan = _lay_out(flat, specs, sources, aliases, frozen)
    plan.is_taught = bool(eager_paths)
    return plan


def _lay_out(
    flat: Flat, specs: list[TensorSpec], sources: list[_Source], aliases: list[tuple[int, torch.Tensor, object]], frozen: Collection[int]
) -> CopyPlan:
    # Large ones in the order of the leaves, whether still or not: what a prefix trained and a variant freezes then fills the same chunks,
    # up to the first that the variant trains.
    still_small, still_large = _by_size([source for source in sources if id(source.tensor) in frozen])
    # Small tensors together: what is copied before ``capture`` returns then takes one ``split`` of one chunk or two.
    small, large = _by_size([source for source in sources if id(source.tensor) not in frozen])
    sizes: list[list[int]] = []
    eager: list[Pieces] = []
    deferred: list[Pieces] = []
    for group in (still_small, still_large, small, large):
        # Falling item size keeps every tensor aligned to its item without padding.
        group.sort(key=lambda source: (-source.tensor.element_size(), source.leaf))
        position = len(sizes) * CHUNK_BYTES
        for source in group:
            position = _place(source, position, sizes, eager, deferred)
    for source in sources:
        spec = specs[source.leaf]
        shard = Shard((0,) * len(spec.shape), spec.shape, source.start, source.flat.numel())
        specs[source.leaf] = msgspec.structs.replace(spec, shards=(shard,))
    watched = [Watched(source.path, source.tensor, source.flat, source.start) for source in sources if source.is_deferred]
    lengths = tuple(sum(chunk) for chunk in sizes)
    layout = Layout(
        skeleton=msgspec.Raw(encode_skeleton(flat.skeleton)),
        tensors=msgspec.Raw(msgspec.msgpack.encode(specs)),
        chunk_lengths=lengths,
        bytes_total=sum(lengths),
    )
    return CopyPlan(
        layout,
        flat,
        tuple(specs),
        sizes,
        eager,
        deferred,
        sources,
        aliases,
        Tripwire(watched),
        is_on_device=any(devices().is_on(source.flat) for source in sources),
        eager_bytes=sum(source.flat.numel() for source in sources if not source.is_deferred),
    )


def _by_size(sources: list[_Source]) -> tuple[list[_Source], list[_Source]]:
    """The small and the large ones."""
    small = [source for source in sources if source.flat.numel() < DEFER_BYTES]
    return small, [source for source in sources if source.flat.numel() >= DEFER_BYTES]


def _place(
    source: _Source,
    position: int,
    sizes: list[list[int]],
    eager: list[Pieces],
    deferred: list[Pieces],
) -> int:
    """Put one tensor at ``position`` of the stream; the position after it."""
    source.start = position
    total, done = source.flat.numel(), 0
    while done < total:
        chunk, offset = divmod(position, CHUNK_BYTES)
        if chunk == len(sizes):
            sizes.append([])
            eager.append(Pieces())
            deferred.append(Pieces())
        count = min(total - done, CHUNK_BYTES - offset)
        copies = deferred[chunk] if source.is_deferred else eager[chunk]
        source.pieces.append((chunk, len(copies.sources)))
        copies.places.append(len(sizes[chunk]))
        copies.sources.append(source.flat[done : done + count])
        sizes[chunk].append(count)
        done += count
        position += count
    return position


class _Marks:
    """Marks that show that tensors are still where and as they were; checking one takes about 0.2 µs."""

    __slots__ = ("_aliases", "_complex", "_kinds", "_tensors")

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._tensors = tensors
        self._aliases = [tensor.detach() for tensor in tensors]
        self._complex = [tensor for tensor in tensors if tensor.dtype.is_complex]
        self._kinds = self._look()

    def are_right(self) -> bool:
        """Whether every tensor has the memory, offset, shape, strides, dtype and flags that it had."""
        return all(map(torch.Tensor.is_set_to, self._tensors, self._aliases)) and self._look() == self._kinds

    def _look(self) -> list[object]:
        return [*map(_DTYPE, self._tensors), *map(_REQUIRES_GRAD, self._tensors), *map(torch.Tensor.is_conj, self._complex)]


_DTYPE, _REQUIRES_GRAD = operator.attrgetter("dtype"), operator.attrgetter("requires_grad")


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself where its bytes can be viewed flat, else a dense copy."""
    return tensor if dense_view(tensor) is not None else compact(tensor)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    flat = dense_view(tensor)
    assert flat is not None
    return flat
