"""Where the elements of a tensor lie, over all ranks of a job: each rank computes it for all of them, without a message.

Every rank holds a plain tensor whole. A DTensor has a mesh and placements, which determine the boxes of every rank. A mesh that is a
slice of a larger one has siblings, whose ranks hold the same tensor if they belong to this training. A tensor that was given to some ranks
only (each rank has its own small buffers) says to which: see ``content/spread``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, product
from typing import Any

import torch

from datastates.content.division import Holding
from datastates.content.geometry import dense_strides
from datastates.content.spread import give, is_spread, local_of, owners_of, stand_in
from datastates.errors import Unsupported

__all__ = ["boxes_of_mesh", "give", "holdings_of", "is_spread", "local_of", "owners_of", "stand_in"]

Cut = tuple[int, int]
"""A placement: the dimension that it cuts (-1: none), and into how many pieces that is cut first (1 except for ``_StridedShard``)."""

_Pieces = tuple[tuple[int, int], ...]
"""Intervals (start, length) along a dimension of the whole tensor, in the order in which they lie in the local one."""


def holdings_of(tensor: torch.Tensor, size: int, members: Sequence[int] | None = None) -> Sequence[Holding]:
    """The boxes of a tensor in the memory of all ``size`` ranks; they tile it. ``members`` are the numbers that meshes use for these ranks.

    :raises Unsupported: it is a DTensor of which no rank has the values (Partial), or with an unknown placement, or with other ranks.
    """
    item, shape = tensor.element_size(), tuple(tensor.shape)
    if not is_spread(tensor):
        owners = owners_of(tensor) or tuple(range(size))
        return (Holding(shape, dense_strides(shape, tensor.stride()), item, (0,) * len(shape), shape, owners),)
    spread: Any = tensor  # a DTensor
    strides = dense_strides(shape, tensor.stride())
    if 0 in strides:  # the elements of an expanded tensor may lie with different ranks
        strides = dense_strides(shape, torch.empty(shape, device="meta").stride())
    ranks = _ranks_of(spread.device_mesh)
    if members is not None:
        ranks = _renumbered(ranks, members)
    cuts = tuple([_cut_of(placement) for placement in spread.placements])
    return boxes_of_mesh(shape, strides, item, tuple(ranks.shape[1:]), tuple(ranks.flatten().tolist()), cuts)


@lru_cache(maxsize=4096)
def boxes_of_mesh(
    shape: tuple[int, ...], strides: tuple[int, ...], item_bytes: int, mesh: tuple[int, ...], ranks: tuple[int, ...], cuts: tuple[Cut, ...]
) -> tuple[Holding, ...]:
    """The boxes of a tensor over a mesh of that shape; ``ranks`` are those of the mesh and of its siblings, one mesh after the other."""
    count = 1
    for side in mesh:
        count *= side
    owners: dict[tuple[_Pieces, ...], list[int]] = {}
    for number, coordinate in enumerate(product(*map(range, mesh))):
        owners.setdefault(_pieces_at(shape, mesh, coordinate, cuts), []).extend(ranks[number::count])
    found = []
    for pieces, holders in owners.items():
        of = tuple(sorted(holders))
        places = [list(accumulate((length for _, length in dim), initial=0)) for dim in pieces]
        for choice in product(*(range(len(dim)) for dim in pieces)):
            box = [pieces[dim][each] for dim, each in enumerate(choice)]
            place = tuple([places[dim][each] for dim, each in enumerate(choice)])
            found.append(Holding(shape, strides, item_bytes, tuple([at for at, _ in box]), tuple([size for _, size in box]), of, place))
    if 0 in shape:
        return (Holding(shape, strides, item_bytes, (0,) * len(shape), shape, tuple(sorted(ranks))),)
    return tuple(found)


def _pieces_at(shape: tuple[int, ...], mesh: tuple[int, ...], coordinate: Sequence[int], cuts: Sequence[Cut]) -> tuple[_Pieces, ...]:
    """What the rank at a coordinate of the mesh holds, by dimension: the mesh dimensions cut one after the other."""
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
    """The ranks of a mesh, and of the siblings sliced from the same mesh: the first dimension counts these, the others are the mesh's."""
    layout, everyone = getattr(mesh, "_layout", None), getattr(mesh, "_rank_map", None)
    ranks: torch.Tensor = mesh.mesh[None] if layout is None or everyone is None else layout.remap_to_tensor(everyone)
    return ranks


def _renumbered(ranks: torch.Tensor, members: Sequence[int]) -> torch.Tensor:
    """The mesh and its siblings by the ranks of a group. A sibling with no rank in it is of another training, such as another stage."""
    number = {member: rank for rank, member in enumerate(members)}
    meshes = [mesh for mesh in ranks.flatten(1).tolist() if any(rank in number for rank in mesh)]
    strange = next((mesh for mesh in meshes if any(rank not in number for rank in mesh)), None)
    if strange is not None or not meshes:
        mesh = strange or ranks[0].flatten().tolist()
        raise Unsupported(
            f"a DTensor lies with the ranks {mesh} of torch.distributed, and {list(members)} track it: pass a group of all that hold it,"
            " repo.track(..., group=datastates.ranks.TorchGroup(…))"
        )
    return torch.tensor([[number[rank] for rank in mesh] for mesh in meshes]).reshape(len(meshes), *ranks.shape[1:])


def _cut_of(placement: Any) -> Cut:
    if placement.is_replicate():
        return -1, 1
    dim = getattr(placement, "dim", None)
    if placement.is_partial() or not isinstance(dim, int):
        raise Unsupported(
            f"a DTensor is placed as {placement!r}, and so no rank has its values: redistribute it to Replicate() or Shard(...) first"
        )
    return dim, int(getattr(placement, "split_factor", 1))
