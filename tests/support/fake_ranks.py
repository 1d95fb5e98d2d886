"""One rank after the other of a job that has no processes: torch.distributed says that there are
others, and collectives send nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextmanager
def as_rank(rank: int, mesh: tuple[int, ...]) -> Iterator[DeviceMesh]:
    """This process is that rank of a job whose ranks make up a mesh of this shape."""
    size = 1
    for side in mesh:
        size *= side
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        yield init_device_mesh("cpu", mesh, mesh_dim_names=("outer", "inner")[: len(mesh)])
    finally:
        dist.destroy_process_group()
