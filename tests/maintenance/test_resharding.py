"""From any number of ranks and any layout to any other: what was captured comes back bit by bit,
without a process for a rank."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from datastates.maintenance.loading import restore_from
from datastates.state.geometry import divide
from datastates.state.per_rank import boxes_here
from datastates.storage.reading import Region, chunks_of, specs_of
from tests.support.effort import examples
from tests.support.fake_ranks import as_rank
from tests.support.meshes import Job, jobs, local_tensors
from tests.support.sharding import opened

torch.set_num_threads(1)


def captured(
    job: Job,
) -> tuple[dict[str, torch.Tensor], dict[str, list[list[tuple[tuple[int, ...], tuple[int, ...]]]]]]:
    """The tensors by name, and the boxes of each that the parts of a capture hold, by rank."""
    shares = divide([each.held for each in job.tensors], job.size)
    names = [f"t{index}" for index in range(len(job.tensors))]
    tree = {name: each.whole for name, each in zip(names, job.tensors, strict=True)}
    return tree, {
        name: [[(box.offset, box.shape) for box in shares[rank][index]] for rank in range(job.size)]
        for index, name in enumerate(names)
    }


@st.composite
def layouts(draw: st.DrawFn) -> tuple[tuple[int, ...], list[list[int]]]:
    """A mesh, and for each of up to seven tensors how each dimension of the mesh cuts it: seeds,
    as the tensor is not known yet."""
    mesh = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=2)))
    return mesh, draw(
        st.lists(
            st.lists(st.integers(0, 29), min_size=len(mesh), max_size=len(mesh)),
            min_size=7,
            max_size=7,
        )
    )


def placement(seed: int, dims: int) -> Any:
    kind, dim = divmod(seed, 10)
    if not dims or kind == 0:
        return Replicate()
    return Shard(dim % dims) if kind == 1 else _StridedShard(dim % dims, split_factor=1 + dim % 3)


@settings(max_examples=examples(500), deadline=None)
@given(job=jobs(), layout=layouts())
def test_what_any_ranks_captured_comes_back_on_any_others_bit_by_bit(
    job: Job, layout: tuple[tuple[int, ...], list[list[int]]]
) -> None:
    mesh, seeds = layout
    tree, shares = captured(job)
    placements = {
        name: [placement(seed, tensor.dim()) for seed in row]
        for (name, tensor), row in zip(tree.items(), seeds, strict=False)
    }
    wanted = {name: local_tensors(tensor, mesh, placements[name]) for name, tensor in tree.items()}
    for rank in range(prod(mesh)):
        with as_rank(rank, mesh) as device_mesh, opened(tree, shares, job.size) as reader:
            live = {
                name: DTensor.from_local(
                    torch.zeros_like(wanted[name][rank]),
                    device_mesh,
                    placements[name],
                    run_check=False,
                    shape=tensor.shape,
                    stride=tensor.stride(),
                )
                for name, tensor in tree.items()
            }
            assert restore_from(reader, live)
            for name, tensor in live.items():
                assert torch.equal(tensor._local_tensor, wanted[name][rank])
            specs = {spec.path: spec for spec in specs_of(reader)}
            boxes = [
                Region(specs[name], box.offset, box.local_shape)
                for name, tensor in live.items()
                for box in boxes_here(tensor)
            ]
            assert sorted(reader.read) == chunks_of(boxes)
    with opened(tree, shares, job.size) as reader:
        plain = {name: torch.zeros_like(tensor) for name, tensor in tree.items()}
        assert restore_from(reader, plain)
        for name, whole in tree.items():
            assert torch.equal(plain[name], whole)
