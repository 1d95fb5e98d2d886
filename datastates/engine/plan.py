"""The copy plan: where each byte of a state goes, compiled once and reused until the layout
changes.

A plan has, for each chunk, the pieces of tensors in it. To copy a state takes one slot for each
chunk, one look-up of each slot's destination views, and one ``_foreach_copy_`` for all pieces.
Everything is copied as bytes, so that pieces of all dtypes go through the same call.
``differences`` compares the copies of a tensor on several ranks.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, field

import msgspec
import torch
from blake3 import blake3

from datastates.errors import InvalidInput, Unsupported
from datastates.state.digest import chunk_digest
from datastates.state.geometry import (
    Box,
    Holding,
    Placements,
    compact,
    dense_strides,
    dense_view,
    digest_of,
    divide,
    dtype_name,
    held_by,
    is_spread,
    local_of,
    memory_key,
    spec_of,
)
from datastates.state.manifest import ALIGNED_BYTES, CHUNK_BYTES, LARGE_BYTES, Shard, TensorSpec
from datastates.state.per_rank import holdings_of
from datastates.state.tree import Flat, Leaf
from datastates.system.devices import devices

from .device_copies import (
    HOST,
    DeviceDigests,
    FrozenChunks,
    Packing,
    Pairs,
    Route,
    packing_of,
    routes_of,
    stills_of,
)
from .tear_check import SAMPLES, STATE_SAMPLES, Tripwire, Watched

_Sign = tuple[torch.Size, tuple[int, ...], torch.dtype, bool]


class Shares:
    """The shares of ``rank`` of ``size``. ``specs`` are the whole tensors, without a shard;
    ``boxes`` are this rank's boxes of each.

    ``ties`` are equal for tensors that are the same memory on every rank; of such tensors the first
    is divided. ``digest`` is the same on all ranks if they divide alike. ``apart`` are ids of
    tensors that may differ between ranks. These are not pieced together from several ranks; the
    first rank that holds one stores it.
    """

    def __init__(
        self,
        leaves: Sequence[Leaf],
        rank: int,
        size: int,
        apart: Collection[int],
        members: Sequence[int] | None,
    ) -> None:
        self._size, self._members = size, members
        self._known = [leaf.tensor for leaf in leaves]
        self._signs = [*map(_sign, self._known)]
        self._held = [_holdings(leaf, size, members) for leaf in leaves]
        self.ties = [*map(tie_of, self._known)]
        self.specs = [_spec(leaf, held[0]) for leaf, held in zip(leaves, self._held, strict=True)]
        first: dict[Hashable, int] = {}
        divided = [
            (
                ()
                if tie is not None and first.setdefault(tie, index) != index
                else _by_the_first(held)
                if id(leaf.tensor) in apart
                else held
            )
            for index, (leaf, tie, held) in enumerate(
                zip(leaves, self.ties, self._held, strict=True)
            )
        ]
        self.boxes = divide(divided, size)[rank]
        self.digest = digest_of(divided)

    def are_still(self, leaves: Sequence[Leaf]) -> bool:
        """Whether the leaves are in the same memory as before, including those of which this rank
        copies nothing."""
        for index, leaf in enumerate(leaves):
            tensor = leaf.tensor
            if _sign(tensor) != self._signs[index]:
                return False
            if tensor is not self._known[index]:
                if holdings_of(tensor, self._size, self._members) != self._held[index]:
                    return False
                self._known[index] = tensor
        return True


def shares_of(
    leaves: Sequence[Leaf],
    rank: int,
    size: int,
    apart: Collection[int] = (),
    members: Sequence[int] | None = None,
) -> Shares | None:
    """The shares that ``rank`` of ``size`` copies. None if they are all whole tensors. ``apart`` is
    as for ``Shares``, ``members`` as for ``holdings_of``.

    :raises Unsupported: a rank outside the group holds something of a tensor, or a tensor has no
        value. The text names it.
    """
    is_divided = size > 1 or any(is_spread(leaf.tensor) or leaf.tensor.is_meta for leaf in leaves)
    return Shares(leaves, rank, size, apart, members) if is_divided else None


def bytes_at(tensor: torch.Tensor, box: Box, strides: Sequence[int]) -> tuple[torch.Tensor, bool]:
    """The stored bytes of a share, flat, and whether they are a view of the tensor and not a copy.
    ``strides`` describe the whole tensor."""
    found = local_of(tensor)
    assert found is not None
    local = found.detach()
    if 0 in box.shape:
        return torch.empty(0, dtype=torch.uint8, device=local.device), True
    sizes = [side if stride else 1 for side, stride in zip(box.shape, strides, strict=True)]
    view = local[
        tuple([slice(start, start + side) for start, side in zip(box.place, sizes, strict=True)])
    ]
    packed = dense_strides(box.shape, strides)
    lies_so = all(
        side == 1 or stride == wanted
        for side, stride, wanted in zip(sizes, view.stride(), packed, strict=True)
    )
    if lies_so and not view.is_conj() and not view.is_neg():
        return view.as_strided((view.numel(),), (1,)).view(torch.uint8), True
    dense = torch.empty(view.numel() * view.element_size(), dtype=torch.uint8, device=view.device)
    dense.view(view.dtype).as_strided(sizes, packed).copy_(view)
    return dense, False


def tie_of(tensor: torch.Tensor) -> Hashable | None:
    """A key that is equal for two tensors that are the same memory. For a DTensor it does not
    use the local tensors, since these may be empty on a rank."""
    return id(tensor) if is_spread(tensor) else memory_key(tensor)


def _holdings(leaf: Leaf, size: int, members: Sequence[int] | None) -> Sequence[Holding]:
    try:
        held = holdings_of(leaf.tensor, size, members)
    except Unsupported as exc:
        raise Unsupported(f"{leaf.path}: {exc}") from exc
    beyond = max(owner for holding in held for owner in holding.owners)
    if beyond >= size:
        raise Unsupported(
            f"{leaf.path} is held by rank {beyond}, and states of this training have {size}"
            f" part{'s' if size > 1 else ''}: track it with the group of all its ranks,"
            " repo.track(..., group=…)"
        )
    return held


def _by_the_first(held: Sequence[Holding]) -> Sequence[Holding]:
    return [dataclasses.replace(holding, owners=holding.owners[:1]) for holding in held]


def _sign(tensor: torch.Tensor) -> _Sign:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad


def _spec(leaf: Leaf, held: Holding) -> TensorSpec:
    return TensorSpec(
        leaf.path,
        dtype_name(leaf.tensor.dtype),
        held.shape,
        held.strides,
        None,
        leaf.tensor.requires_grad,
        (),
    )


# --- Compiling and using a plan ---


DEFER_BYTES = LARGE_BYTES
"""Smaller tensors are copied before ``capture`` returns: a deferred copy would gain nothing."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The properties that all captures of a plan share, encoded for the manifest once.

    ``form`` is equal on all ranks whose parts make one state together. It is empty if one process
    has all of it.
    """

    skeleton: msgspec.Raw
    tensors: msgspec.Raw
    chunk_lengths: tuple[int, ...]
    bytes_total: int
    form: str = ""


@dataclass(slots=True)
class Pieces:
    """The copies into one chunk that are made together: the bytes ``sources[i]`` are the piece
    ``places[i]`` of the chunk."""

    places: list[int] = field(default_factory=list)
    sources: list[torch.Tensor] = field(default_factory=list)


@dataclass(slots=True)
class _Source:
    """One leaf that is stored, or a share of one: its tensor as last seen, and its bytes as a flat
    view.

    The facts about its memory describe this rank's local tensor, ``local``. For most tensors that
    is the tensor itself.
    """

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
    local: torch.Tensor
    box: Box | None = None
    is_still: bool = False
    pieces: list[tuple[int, int]] = field(default_factory=list)

    def is_as_it_was(self, tensor: torch.Tensor) -> bool:
        """Whether ``flat`` is still the bytes of ``tensor``: the same object may have other
        memory or another layout (``.data = …``)."""
        local = tensor if self.box is None else local_of(tensor)
        return (
            tensor is self.tensor
            and self.is_dense
            and local is self.local
            and local.data_ptr() == self.pointer
            and local.shape == self.shape
            and local.stride() == self.strides
            and local.dtype is self.dtype
            and tensor.requires_grad is self.requires_grad
            and not (self.dtype.is_complex and local.is_conj())
        )


_Alias = tuple[int, torch.Tensor, Hashable]
"""A leaf that is tied to an earlier one, its tensor as last seen, and the key that both share."""


@dataclass(slots=True)
class CopyPlan:
    """A compiled plan. Belongs to one tracker. It is built and refreshed on the training thread
    only.

    ``sizes[c]`` are the lengths of the pieces of chunk ``c``. ``eager[c]`` and ``deferred[c]`` are
    the pieces that are copied before and after ``capture`` returns. ``gaps`` are zeros that belong
    to no tensor: the chunk, the first byte, and the byte after the last. ``shares`` are this rank's
    if several hold the state.

    These are set once a capture was taken. ``routes`` has the place of each tensor, and ``stills``
    the chunks that may stay the same on a device. ``packings`` has the layout of a device's tensors
    in a snapshot. ``digested`` are the chunks that a device digests as they cross. ``placed`` are
    the copies of deferred pieces, by the device and the slots.

    ``is_taught``: some tensors are copied at once because they tore before.
    """

    layout: Layout
    flat: Flat
    specs: tuple[TensorSpec, ...]
    sizes: list[list[int]]
    eager: list[Pieces]
    deferred: list[Pieces]
    gaps: list[tuple[int, int, int]]
    sources: list[_Source]
    aliases: list[_Alias]
    shares: Shares | None
    tripwire: Tripwire
    routes: dict[torch.device, Route]
    stills: dict[torch.device, FrozenChunks]
    eager_bytes: int
    is_taught: bool = False
    packings: dict[torch.device, Packing] = field(default_factory=dict)
    digested: dict[torch.device, DeviceDigests] = field(default_factory=dict)
    placed: dict[tuple[torch.device, tuple[int, ...]], Pairs] = field(default_factory=dict)
    _placements: Placements | None = None

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """The devices that have tensors of the state."""
        return tuple(device for device in self.routes if device != HOST)

    def refresh(self, flat: Flat) -> bool:
        """Point the plan at this capture's tensors. False when the layout changed and the plan must
        be compiled again.

        A tensor that is a new object of the same geometry (an RNG state, for example) is accepted
        if it is copied eagerly.
        """
        leaves = flat.tensors
        if flat.skeleton is not self.flat.skeleton:
            # ``flatten`` returns the same object as long as it is equal
            return False
        if (
            leaves is self.flat.tensors
            and self._placements is not None
            and self._placements.are_same()
        ):
            # the common case: none has moved
            self.flat = flat
            return True
        self.flat = flat
        if self.shares is not None and not self.shares.are_still(leaves):
            return False
        moved = []
        for source in self.sources:
            leaf = leaves[source.leaf]
            if not source.is_as_it_was(leaf.tensor):
                if not self._take_over(source, leaf):
                    return False
                moved.append(source)
        if not all(self._is_tied_still(leaves, *alias) for alias in self.aliases):
            return False
        for device in {
            devices().of(source.flat) for source in moved if self.packings
        } & self.packings.keys():
            self.packings[device] = packing_of(self.routes[device], self.gaps)
        are_dense = all(source.is_dense for source in self.sources)
        self._placements = (
            Placements([leaf.tensor for leaf in leaves], are_whole=self.shares is None)
            if are_dense
            else None
        )
        return True

    def _is_tied_still(
        self, leaves: Sequence[Leaf], index: int, tensor: torch.Tensor, key: Hashable
    ) -> bool:
        """Whether a tensor is still the one that was left out, and still shares the memory of the
        stored one."""
        first = self.specs[index].alias
        return (
            leaves[index].tensor is tensor
            and tie_of(tensor) == key
            and first is not None
            and tie_of(leaves[first].tensor) == key
        )

    def refuse_recording(self) -> None:
        """Raise if a graph is being recorded, because the copies would be recorded instead of
        executed.

        :raises InvalidInput: this thread records a graph on a device of the state.
        """
        if any(map(devices().is_recording, self.devices)):
            raise InvalidInput(
                "a graph is being recorded, and nothing of it happens now: capture after it, or"
                " after a replay"
            )

    def _take_over(self, source: _Source, leaf: Leaf) -> bool:
        tensor, spec = leaf.tensor, self.specs[source.leaf]
        if source.is_deferred or source.is_still or leaf.path != source.path:
            return False
        if source.box is None:
            local = tensor
            dense = _dense(tensor)
            if msgspec.structs.replace(spec_of(leaf.path, dense), shards=spec.shards) != spec:
                return False
            flat, is_dense = _bytes_of(dense), dense is tensor
        else:  # it has the same geometry, since the shares are unchanged
            local = _present(tensor)
            flat, is_dense = bytes_at(tensor, source.box, spec.strides)
        if devices().of(flat) != devices().of(source.flat):
            return False
        source.tensor, source.local, source.pointer, source.flat, source.is_dense = (
            tensor,
            local,
            local.data_ptr(),
            flat,
            is_dense,
        )
        source.shape, source.strides = local.shape, local.stride()
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
    rank: int = 0,
    size: int = 1,
    apart: Collection[int] = (),
    members: Sequence[int] | None = None,
) -> CopyPlan:
    """A plan that lays a state's tensors out over chunks: all of them, or what ``rank`` stores if
    ``size`` ranks hold them.

    ``fenced`` and ``frozen`` are ids of tensors. Fenced ones are changed by a tracked optimizer
    alone, and deferred if they are large enough. Frozen ones stay the same, and are grouped apart,
    so that their chunks keep their digests. ``eager_paths`` are never deferred, because the
    tripwire saw them change outside the fence. ``apart`` are ids of tensors that may differ between
    ranks. ``members`` are the numbers of all ranks in torch.distributed, if these are different.

    :raises Unsupported: a rank outside the group holds something of a tensor, or a tensor has no
        value. The text names it.
    """
    shares = shares_of(flat.tensors, rank, size, apart, members)
    specs: list[TensorSpec] = []
    sources: list[_Source] = []
    aliases: list[_Alias] = []
    first_of: dict[Hashable, int] = {}
    for index, leaf in enumerate(flat.tensors):
        tensor = leaf.tensor
        key = tie_of(tensor)
        if key is not None and key in first_of:
            spec = spec_of(leaf.path, tensor) if shares is None else shares.specs[index]
            specs.append(msgspec.structs.replace(spec, alias=first_of[key]))
            aliases.append((index, tensor, key))
            continue
        if key is not None:
            first_of[key] = index
        may_wait = id(tensor) in fenced and leaf.path not in eager_paths
        if shares is None:
            dense = dense_view(tensor)
            is_dense = dense is not None
            packed = tensor if is_dense else compact(tensor)
            specs.append(spec_of(leaf.path, packed))
            data = _bytes_of(packed) if dense is None else dense
            sources.append(_source(index, leaf, tensor, data, is_dense=is_dense, may_wait=may_wait))
            continue
        specs.append(shares.specs[index])
        for box in shares.boxes[index]:
            data, is_dense = bytes_at(tensor, box, specs[index].strides)
            sources.append(
                _source(
                    index,
                    leaf,
                    _present(tensor),
                    data,
                    is_dense=is_dense,
                    may_wait=may_wait,
                    box=box,
                )
            )
    for source in sources:
        may_be = id(source.tensor) in frozen and source.path not in eager_paths
        source.is_still = may_be and source.is_dense and devices().is_on(source.flat)
    plan = _lay_out(flat, specs, sources, aliases, shares, frozen)
    plan.is_taught = bool(eager_paths)
    return plan


def _source(
    index: int,
    leaf: Leaf,
    local: torch.Tensor,
    data: torch.Tensor,
    *,
    is_dense: bool,
    may_wait: bool,
    box: Box | None = None,
) -> _Source:
    is_deferred = is_dense and may_wait and data.numel() >= DEFER_BYTES
    # inference tensors have no version that a tripwire could compare
    is_deferred = is_deferred and not local.is_inference()
    geometry = (local.shape, local.stride(), local.dtype, leaf.tensor.requires_grad)
    return _Source(
        index,
        leaf.path,
        leaf.tensor,
        local.data_ptr(),
        data,
        0,
        is_deferred,
        is_dense,
        *geometry,
        local,
        box,
    )


def _lay_out(
    flat: Flat,
    specs: list[TensorSpec],
    sources: list[_Source],
    aliases: list[_Alias],
    shares: Shares | None,
    frozen: Collection[int],
) -> CopyPlan:
    skeleton = flat.skeleton.encoded
    form = "" if shares is None else _form_of(skeleton, specs, shares)
    # Large tensors stay in the order of the leaves, whether still or not. If a variant freezes what
    # a prefix trained, these tensors then fill the same chunks, up to the first tensor that the
    # variant trains.
    still_small, still_large = _by_size(
        [source for source in sources if id(source.tensor) in frozen]
    )
    # Small tensors are adjacent, so that what is copied before ``capture`` returns takes one
    # ``split`` of one or two chunks.
    small, large = _by_size([source for source in sources if id(source.tensor) not in frozen])
    sizes: list[list[int]] = []
    eager: list[Pieces] = []
    deferred: list[Pieces] = []
    gaps: list[tuple[int, int, int]] = []
    for group in (still_small, still_large, small, large):
        # Decreasing item size keeps every tensor aligned to its items without padding.
        group.sort(key=lambda source: (-source.tensor.element_size(), source.leaf))
        position = len(sizes) * CHUNK_BYTES
        for source in group:
            if source.flat.numel() >= LARGE_BYTES:
                position = _align(position, sizes, gaps)
            position = _place(source, position, sizes, eager, deferred)
    for source in sources:
        spec = specs[source.leaf]
        offset, shape = (
            ((0,) * len(spec.shape), spec.shape)
            if source.box is None
            else (source.box.offset, source.box.shape)
        )
        shard = Shard(offset, shape, source.start, source.flat.numel())
        specs[source.leaf] = msgspec.structs.replace(spec, shards=(*spec.shards, shard))
    watched = [
        Watched(
            source.path,
            source.local,
            source.flat,
            source.start,
            SAMPLES if source.requires_grad else STATE_SAMPLES,
        )
        for source in sources
        if source.is_deferred
    ]
    lengths = tuple(sum(chunk) for chunk in sizes)
    layout = Layout(
        skeleton=msgspec.Raw(skeleton),
        tensors=msgspec.Raw(msgspec.msgpack.encode(specs)),
        chunk_lengths=lengths,
        bytes_total=sum(lengths),
        form=form,
    )
    return CopyPlan(
        layout,
        flat,
        tuple(specs),
        sizes,
        eager,
        deferred,
        gaps,
        sources,
        aliases,
        shares,
        Tripwire(watched),
        routes=routes_of(sources),
        stills=stills_of([source for source in sources if source.is_still], lengths),
        eager_bytes=sum(source.flat.numel() for source in sources if not source.is_deferred),
    )


def _form_of(skeleton: bytes, specs: Sequence[TensorSpec], shares: Shares) -> str:
    """A digest of what must be equal in every part: the tree, each whole tensor (no shard is
    known yet), and which rank stores what."""
    return blake3(skeleton).update(msgspec.msgpack.encode(specs)).update(shares.digest).hexdigest(8)


def _by_size(sources: list[_Source]) -> tuple[list[_Source], list[_Source]]:
    """The small sources, and the large ones."""
    small = [source for source in sources if source.flat.numel() < LARGE_BYTES]
    return small, [source for source in sources if source.flat.numel() >= LARGE_BYTES]


def _align(position: int, sizes: list[list[int]], gaps: list[tuple[int, int, int]]) -> int:
    """The begin of the next large tensor after ``position``. It is less than one block further, so
    in the same chunk."""
    chunk, offset = divmod(position, CHUNK_BYTES)
    gap = -offset % ALIGNED_BYTES
    if gap:
        sizes[chunk].append(gap)
        gaps.append((chunk, offset, offset + gap))
    return position + gap


def _place(
    source: _Source,
    position: int,
    sizes: list[list[int]],
    eager: list[Pieces],
    deferred: list[Pieces],
) -> int:
    """Put one tensor at ``position`` of the stream; returns the position after it."""
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


def _present(tensor: torch.Tensor) -> torch.Tensor:
    local = local_of(tensor)
    assert local is not None
    return local


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself if its bytes can be viewed flat, else a dense copy."""
    return tensor if dense_view(tensor) is not None else compact(tensor)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    flat = dense_view(tensor)
    assert flat is not None
    return flat


# --- Differences between ranks, found by a digest of each copy ---


class Copy(msgspec.Struct, frozen=True, array_like=True):
    """One rank's copy of a box of a tensor that others hold, too."""

    path: str
    offset: tuple[int, ...]
    digest: bytes


class Difference(msgspec.Struct, frozen=True):
    """A tensor whose copies are not equal. ``ranks`` are those that differ from the most common
    copy. If several are equally common, the first of them counts."""

    path: str
    ranks: tuple[int, ...]


def copies_of(
    leaves: Sequence[Leaf],
    rank: int,
    size: int,
    *,
    apart: Collection[int] = (),
    members: Sequence[int] | None = None,
) -> list[Copy]:
    """A digest of this rank's copy of each tensor that should be equal on several ranks, all of it
    read once. No capture may be in flight.

    ``apart`` are ids of tensors that may differ; ``members`` is as for ``holdings_of``.
    """
    found = []
    for leaf in leaves:
        if id(leaf.tensor) in apart:
            continue
        for box in held_by(holdings_of(leaf.tensor, size, members), rank):
            if len(box.owners) > 1 and box.length:
                share = Box(box.offset, box.local_shape, box.place or (0,) * len(box.shape))
                data, _ = bytes_at(leaf.tensor, share, box.strides)
                # waits for a device
                found.append(Copy(leaf.path, box.offset, chunk_digest(data.cpu().numpy().data)))
    return found


def differences(copies: Sequence[Sequence[Copy]]) -> list[Difference]:
    """The differences between the copies of all ranks, which are given by rank, in order of path.
    Tensors that a rank does not have are not compared."""
    by_box: dict[tuple[str, tuple[int, ...]], dict[int, bytes]] = {}
    for rank, of_rank in enumerate(copies):
        for copy in of_rank:
            by_box.setdefault((copy.path, copy.offset), {})[rank] = copy.digest
    odd: dict[str, set[int]] = {}
    for (path, _), digests in by_box.items():
        common, count = Counter(digests.values()).most_common(1)[0]
        if count < len(digests):
            odd.setdefault(path, set()).update(
                rank for rank, digest in digests.items() if digest != common
            )
    return [Difference(path, tuple(sorted(ranks))) for path, ranks in sorted(odd.items())]
