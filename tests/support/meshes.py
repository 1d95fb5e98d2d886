"""Tensors over random meshes, in one process: what each rank would hold of each, cut by torch's
own placements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

import torch
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard

from datastates.state.geometry import Holding, dense_strides
from datastates.state.per_rank import boxes_of_mesh


@dataclass(frozen=True)
class Spread:
    """A tensor, and the local tensor of each rank of a job; ``held`` are the boxes that the
    ranks work out."""

    whole: torch.Tensor
    locals: list[torch.Tensor]
    held: tuple[Holding, ...]
    mesh: tuple[int, ...]
    placements: Sequence[Any]

    def at(self, rank: int) -> torch.Tensor:
        """As this rank would have it: a plain tensor where all have all of it, every second
        time, else a DTensor."""
        if all(each.is_replicate() for each in self.placements) and self.whole.dim() % 2:
            return self.whole
        return dtensor(self.locals[rank], self.whole, self.mesh, self.placements, rank)


@dataclass(frozen=True)
class Job:
    """The tensors of a state over ``size`` ranks."""

    size: int
    tensors: list[Spread]


def dtensor(
    local: torch.Tensor,
    whole: torch.Tensor,
    mesh: Sequence[int],
    placements: Sequence[Any],
    rank: int,
) -> DTensor:
    """The DTensor of one rank of a mesh; there are no processes, and nothing can be sent."""
    ranks = DeviceMesh(
        "cpu", torch.arange(prod(mesh)).reshape(*mesh), _init_backend=False, _rank=rank
    )
    spec = DTensorSpec(
        ranks, tuple(placements), tensor_meta=TensorMeta(whole.shape, whole.stride(), whole.dtype)
    )
    return DTensor(local, spec, requires_grad=False)


def local_tensors(
    whole: torch.Tensor, mesh: tuple[int, ...], placements: list[Any]
) -> list[torch.Tensor]:
    """What each rank of a mesh holds: split dimension by dimension, as ``distribute_tensor``
    does."""
    parts: dict[tuple[int, ...], torch.Tensor] = {(): whole}
    for count, placement in zip(mesh, placements, strict=True):
        cut: dict[tuple[int, ...], torch.Tensor] = {}
        for at, part in parts.items():
            pieces = [part] * count
            if not placement.is_replicate():
                pieces = placement._split_tensor(part, count, with_padding=False, contiguous=True)[
                    0
                ]
            cut.update({(*at, number): piece for number, piece in enumerate(pieces)})
        parts = cut
    return [parts[at] for at in product(*map(range, mesh))]


_SIDES = st.sampled_from([1, 2, 3, 5, 8, 17, 40])


@st.composite
def _spreads(draw: st.DrawFn, mesh: tuple[int, ...]) -> Spread:
    shape = tuple(draw(st.lists(st.one_of(_SIDES, _SIDES, _SIDES, st.just(0)), max_size=4)))
    whole = torch.arange(
        prod(shape), dtype=draw(st.sampled_from([torch.int64, torch.float32, torch.int16]))
    ).reshape(shape)
    order = draw(st.permutations(range(len(shape))))
    whole = whole.permute(order)
    cuts: list[st.SearchStrategy[Any]] = [st.builds(Replicate)]
    if whole.dim():
        dims = st.integers(0, whole.dim() - 1)
        cuts += [
            st.builds(Shard, dims),
            st.builds(_StridedShard, dims, split_factor=st.integers(1, 3)),
        ]
    placements = [draw(st.one_of(cuts)) for _ in mesh]
    strides = dense_strides(tuple(whole.shape), whole.stride())
    known = tuple(
        [
            (-1, 1) if each.is_replicate() else (each.dim, getattr(each, "split_factor", 1))
            for each in placements
        ]
    )
    ranks = tuple(range(prod(mesh)))
    held = boxes_of_mesh(tuple(whole.shape), strides, whole.element_size(), mesh, ranks, known)
    return Spread(whole, local_tensors(whole, mesh, placements), held, mesh, placements)


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    """Up to seven tensors over a mesh of one or two dimensions, of up to 16 ranks."""
    mesh = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=2)))
    return Job(prod(mesh), draw(st.lists(_spreads(mesh), min_size=1, max_size=7)))
