"""Tensors and values of a job of several ranks: which rank holds which elements, and what each rank
has separately.

Each rank computes the places for all ranks, without a message. Every rank holds a plain tensor
whole. A DTensor has a mesh and placements, which determine the boxes of every rank. A mesh that is
a slice of a larger one has siblings, whose ranks hold the same tensor if they belong to this
training. A tensor that only some ranks got has a list of these ranks (``geometry.owners_of``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, product
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Sampler

from datastates.errors import Unsupported
from datastates.system.logs import say

from .generators import RngState, is_generator
from .geometry import (
    Holding,
    dense_strides,
    give,
    held_by,
    is_spread,
    is_wrapping,
    owners_of,
    stand_in,
)
from .loaders import is_prepared
from .tree import PerRank, join

Cut = tuple[int, int]
"""A placement: the dimension that it cuts (-1: none), and into how many pieces that is cut first
(1 except for ``_StridedShard``)."""

_Pieces = tuple[tuple[int, int], ...]
"""Intervals (start, length) along a dimension of the whole tensor, in the order in which they are
in the local one."""

OWN_BUFFERS = "own_buffers"
"""The top-level name. ``bytes`` has each rank's bytes. ``places`` has for each of them the rank and
the begin."""

MOST_BYTES = 64 << 10
"""A larger buffer is not a statistic but a mask or a table: those are equal on all ranks, and
stored once."""

_ALIGNED = 16


def holdings_of(
    tensor: torch.Tensor, size: int, members: Sequence[int] | None = None
) -> Sequence[Holding]:
    """The boxes of a tensor in the memory of all ``size`` ranks. They tile it. ``members`` are the
    numbers that meshes use for these ranks.

    :raises Unsupported: it is a DTensor of which no rank has the values (Partial), or with an
        unknown placement, or with other ranks.
    """
    item, shape = tensor.element_size(), tuple(tensor.shape)
    if not is_spread(tensor):
        owners = owners_of(tensor) or tuple(range(size))
        return (
            Holding(
                shape, dense_strides(shape, tensor.stride()), item, (0,) * len(shape), shape, owners
            ),
        )
    spread: Any = tensor  # a DTensor
    strides = dense_strides(shape, tensor.stride())
    if 0 in strides:  # the elements of an expanded tensor may be on different ranks
        strides = dense_strides(shape, torch.empty(shape, device="meta").stride())
    ranks = _ranks_of(spread.device_mesh)
    if members is not None:
        ranks = _renumbered(ranks, members)
    cuts = tuple([_cut_of(placement) for placement in spread.placements])
    return boxes_of_mesh(
        shape, strides, item, tuple(ranks.shape[1:]), tuple(ranks.flatten().tolist()), cuts
    )


@lru_cache(maxsize=4096)
def boxes_of_mesh(
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    item_bytes: int,
    mesh: tuple[int, ...],
    ranks: tuple[int, ...],
    cuts: tuple[Cut, ...],
) -> tuple[Holding, ...]:
    """The boxes of a tensor over a mesh of that shape. ``ranks`` are the ranks of the mesh and of
    its siblings, one mesh after the other."""
    count = 1
    for side in mesh:
        count *= side
    owners: dict[tuple[_Pieces, ...], list[int]] = {}
    for number, coordinate in enumerate(product(*map(range, mesh))):
        owners.setdefault(_pieces_at(shape, mesh, coordinate, cuts), []).extend(
            ranks[number::count]
        )
    found = []
    for pieces, holders in owners.items():
        of = tuple(sorted(holders))
        places = [list(accumulate((length for _, length in dim), initial=0)) for dim in pieces]
        for choice in product(*(range(len(dim)) for dim in pieces)):
            box = [pieces[dim][each] for dim, each in enumerate(choice)]
            place = tuple([places[dim][each] for dim, each in enumerate(choice)])
            found.append(
                Holding(
                    shape,
                    strides,
                    item_bytes,
                    tuple([at for at, _ in box]),
                    tuple([size for _, size in box]),
                    of,
                    place,
                )
            )
    if 0 in shape:
        return (
            Holding(shape, strides, item_bytes, (0,) * len(shape), shape, tuple(sorted(ranks))),
        )
    return tuple(found)


def _pieces_at(
    shape: tuple[int, ...], mesh: tuple[int, ...], coordinate: Sequence[int], cuts: Sequence[Cut]
) -> tuple[_Pieces, ...]:
    """What the rank at a coordinate of the mesh holds, by dimension: the mesh dimensions cut one
    after the other."""
    pieces: list[_Pieces] = [((0, size),) for size in shape]
    for index, count, (dim, factor) in zip(coordinate, mesh, cuts, strict=True):
        if dim < 0:
            continue
        runs = [_chunk(pieces[dim], factor, number) for number in range(factor)]
        pieces[dim] = _merged([piece for run in runs for piece in _chunk(run, count, index)])
    return tuple(pieces)


def _chunk(pieces: _Pieces, count: int, index: int) -> _Pieces:
    """The chunk with that index out of ``count``, as ``torch.chunk`` cuts."""
    total = sum(length for _, length in pieces)
    each = -(-total // count)
    begin, end = index * each, min(total, (index + 1) * each)
    found, position = [], 0
    for start, length in pieces:
        first, last = max(begin, position), min(end, position + length)
        if first < last:
            found.append((start + first - position, last - first))
        position += length
    return tuple(found)


def _merged(pieces: list[tuple[int, int]]) -> _Pieces:
    found: list[tuple[int, int]] = []
    for start, length in pieces:
        if found and sum(found[-1]) == start:
            found[-1] = (found[-1][0], found[-1][1] + length)
        else:
            found.append((start, length))
    return tuple(found)


def _ranks_of(mesh: Any) -> torch.Tensor:
    """The ranks of a mesh, and of the siblings sliced from the same mesh. The first dimension
    counts the meshes. All other dimensions are the mesh's."""
    layout, everyone = getattr(mesh, "_layout", None), getattr(mesh, "_rank_map", None)
    ranks: torch.Tensor = (
        mesh.mesh[None] if layout is None or everyone is None else layout.remap_to_tensor(everyone)
    )
    return ranks


def _renumbered(ranks: torch.Tensor, members: Sequence[int]) -> torch.Tensor:
    """The mesh and its siblings by the ranks of a group.

    A sibling with no rank in it is of another training, such as another stage."""
    number = {member: rank for rank, member in enumerate(members)}
    meshes = [mesh for mesh in ranks.flatten(1).tolist() if any(rank in number for rank in mesh)]
    strange = next((mesh for mesh in meshes if any(rank not in number for rank in mesh)), None)
    if strange is not None or not meshes:
        mesh = strange or ranks[0].flatten().tolist()
        raise Unsupported(
            f"a DTensor lies with the ranks {mesh} of torch.distributed, and {list(members)} track"
            " it: pass a group of all that hold it, repo.track(...,"
            " group=datastates.ranks.TorchGroup(…))"
        )
    return torch.tensor([[number[rank] for rank in mesh] for mesh in meshes]).reshape(
        len(meshes), *ranks.shape[1:]
    )


def _cut_of(placement: Any) -> Cut:
    if placement.is_replicate():
        return -1, 1
    dim = getattr(placement, "dim", None)
    if placement.is_partial() or not isinstance(dim, int):
        raise Unsupported(
            f"a DTensor is placed as {placement!r}, and so no rank has its values: redistribute it"
            " to Replicate() or Shard(...) first"
        )
    return dim, int(getattr(placement, "split_factor", 1))


# --- This rank's boxes of tensors over a mesh: whole tensors are cut, and nothing is sent ---


def boxes_here(live: torch.Tensor) -> list[Holding]:
    """The boxes of a DTensor of which this rank's local tensor consists.

    :raises Unsupported: no rank has its values (Partial), or its local tensor is not what its
        placements say.
    """
    import torch.distributed as dist

    found = [
        box for box in held_by(holdings_of(live, 0), dist.get_rank()) if 0 not in box.local_shape
    ]
    local = _local(live)
    if (
        sum(box.item_bytes * torch.Size(box.local_shape).numel() for box in found)
        != local.numel() * local.element_size()
    ):
        raise Unsupported(
            f"a DTensor of shape {tuple(live.shape)} has {tuple(local.shape)} of it here, which is"
            f" not what {_layout(live)[1]} cuts: make it by distribute_tensor, or restore into a"
            " plain tensor"
        )
    return found


def is_laid_out_as(one: object, other: object) -> bool:
    """Whether both are DTensors of one shape and layout, so that this rank holds the same box of
    each."""
    return is_spread(one) and is_spread(other) and _layout(one) == _layout(other)


def put_together(
    like: torch.Tensor, pieces: Sequence[torch.Tensor], dtype: torch.dtype
) -> torch.Tensor:
    """A DTensor laid out as ``like``, from its pieces in ``boxes_here``; shares their memory if
    possible."""
    boxes, shape = boxes_here(like), _local(like).shape
    if len(pieces) == 1 and pieces[0].shape == shape:
        return _spread(pieces[0], like, like.placements)  # type: ignore[attr-defined]  # a DTensor
    local = torch.empty(shape, dtype=dtype, device="cpu")
    for box, piece in zip(boxes, pieces, strict=True):
        _at(local, box.place, box.local_shape).copy_(piece)
    return _spread(local, like, like.placements)  # type: ignore[attr-defined]  # a DTensor


def cut_for(like: torch.Tensor, stored: torch.Tensor) -> torch.Tensor:
    """A whole tensor as a DTensor laid out as ``like``; shares its memory if possible."""
    return put_together(
        like, [_at(stored, box.offset, box.local_shape) for box in boxes_here(like)], stored.dtype
    )


def on_all(like: torch.Tensor, stored: torch.Tensor) -> torch.Tensor:
    """A whole tensor as a DTensor that every rank of the mesh of ``like`` holds whole."""
    from torch.distributed.tensor import Replicate

    # a DTensor
    return _spread(stored, like, [Replicate()] * len(like.placements), stored)  # type: ignore[attr-defined]


def write_local(live: torch.Tensor, stored: torch.Tensor) -> None:
    """Overwrite in place what this rank holds of a DTensor, from a whole tensor, or from one
    laid out alike."""
    local = _local(live)
    if is_spread(stored):
        local.copy_(_local(stored))
        return
    for box in boxes_here(live):
        _at(local, box.place, box.local_shape).copy_(_at(stored, box.offset, box.local_shape))


def _at(tensor: torch.Tensor, offset: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
    for dim, (at, size) in enumerate(zip(offset or [0] * len(shape), shape, strict=True)):
        tensor = tensor.narrow(dim, at, size)
    return tensor


def _local(live: torch.Tensor) -> torch.Tensor:
    # `to_local` is autograd's
    local: torch.Tensor = live._local_tensor  # type: ignore[attr-defined]
    return local.detach()


def _layout(live: Any) -> tuple[object, tuple[object, ...], torch.Size]:
    return live.device_mesh, tuple(live.placements), live.shape


def _spread(
    local: torch.Tensor, like: Any, placements: Sequence[Any], whole: torch.Tensor | None = None
) -> torch.Tensor:
    from torch.distributed.tensor import DTensor

    whole = like if whole is None else whole
    with torch.no_grad():
        return DTensor.from_local(
            local,
            like.device_mesh,
            placements,
            run_check=False,
            shape=whole.shape,
            stride=tuple(whole.stride()),
        )


# --- Separate values of each rank: random numbers, and the place in the data ---


def is_own(found: object) -> bool:
    """Whether a tracked object is each rank's own without being named so: a generator, a loader
    or a sampler."""
    if isinstance(found, nn.Module | Optimizer | dict | list | tuple | set | str | bytes):
        return False
    if (
        isinstance(found, RngState | DataLoader | Sampler)
        or is_generator(found)
        or is_prepared(found)
    ):
        return True
    # a user's own loader
    return isinstance(found, Iterable) and callable(getattr(found, "state_dict", None))


def mark_per_rank(tree: dict[str, object], names: Collection[str]) -> dict[str, object]:
    """The tree of a state in which the parts with these names are this rank's own."""
    return {
        name: PerRank(child) if name in names and type(child) is not PerRank else child
        for name, child in tree.items()
    }


# --- Buffers that differ between ranks, such as running statistics of a batch norm ---
# One tensor for each rank holds the buffers of all models.


class OwnBuffers:
    """The buffers of this rank of ``size``, gathered at each capture on the training thread.

    Rank 0 logs once that there are some."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        self._form: object = None
        self._views: list[torch.Tensor] = []
        self._tree: dict[str, object] = {}

    def tree(self, models: Iterable[tuple[str, Mapping[str, object]]]) -> dict[str, object]:
        """The buffers as a state holds them, as they are now; empty if the models, given by path
        as their trees, have none."""
        found = [(path, name, buffer) for path, tree in models for name, buffer in _buffers(tree)]
        if not found:
            return {}
        form = [(path, name, buffer.shape, buffer.dtype) for path, name, buffer in found]
        if form != self._form:
            self._lay_out(found)
            if self._form is None and self._rank == 0:
                say(
                    f"{len(found)} small buffers, such as {join(*found[0][:2])}, may differ from"
                    " rank to rank: states keep those of each"
                )
            self._form = form
        with torch.no_grad():
            torch._foreach_copy_(self._views, [buffer for _, _, buffer in found])
        return self._tree

    def _lay_out(self, found: list[tuple[str, str, torch.Tensor]]) -> None:
        places, begin = [], 0
        for path, name, buffer in found:
            places.append((path, name, begin))
            begin += -(-buffer.nbytes // _ALIGNED) * _ALIGNED
        mine = torch.zeros(begin, dtype=torch.uint8, device=found[0][2].device)
        self._views = [
            _view(mine, begin, buffer)
            for (_, _, begin), (_, _, buffer) in zip(places, found, strict=True)
        ]
        held = [
            give(mine, [rank]) if rank == self._rank else stand_in(mine, [rank])
            for rank in range(self._size)
        ]
        self._tree = {"places": places, "bytes": held}


def part_of(path: str) -> int | None:
    """The rank to which a stored tensor belongs, by its path; None if it is not such a tensor."""
    start = f"{OWN_BUFFERS}/bytes/"
    return int(path.removeprefix(start)) if path.startswith(start) else None


def put_back(tree: dict[str, Any], rank: int | None) -> None:
    """Take the buffers of all ranks out of a stored tree. The buffers of ``rank``, if any, replace
    those in its models."""
    kept = tree.pop(OWN_BUFFERS, None)
    mine = kept["bytes"][rank] if kept and rank is not None else None
    if kept is None or mine is None:
        return
    for path, name, begin in kept["places"]:
        holder = _holder(tree, path)
        stored = holder.get(name) if holder is not None else None
        if isinstance(stored, torch.Tensor):
            holder[name] = _view(mine, begin, stored)


def _holder(tree: dict[str, Any], path: str) -> Any:
    """The model's own part of a stored tree."""
    here: Any = tree
    for part in path.split("/"):
        children = (
            here.items()
            if isinstance(here, dict)
            else enumerate(here)
            if isinstance(here, list | tuple)
            else ()
        )
        here = next((child for key, child in children if join("", key) == part), None)
    return here if isinstance(here, dict) else None


def _buffers(tree: Mapping[str, object]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, found in tree.items():
        if (
            not isinstance(found, torch.Tensor)
            or isinstance(found, torch.nn.Parameter)
            or is_spread(found)
            or is_wrapping(found)
            or found.is_meta
        ):
            continue
        if (
            found.layout is torch.strided
            and not found.is_quantized
            and found.dtype is not torch.bool
            and 0 < found.nbytes <= MOST_BYTES
        ):
            yield name, found


def _view(flat: torch.Tensor, begin: int, like: torch.Tensor) -> torch.Tensor:
    return flat[begin : begin + like.nbytes].view(like.dtype).view(like.shape)
