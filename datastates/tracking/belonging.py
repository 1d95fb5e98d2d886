"""The group of ranks to which a training belongs: the group in force, or the job in which this process runs."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from datastates.errors import InvalidInput
from datastates.transport.clone.groups import Group, MPIGroup, SoloGroup, group_of
from datastates.transport.clone.torch_groups import TorchGroup, initialized

__all__ = ["find", "using"]

_in_force: ContextVar[Group | None] = ContextVar("datastates_group", default=None)
_made: dict[str, tuple[object, Group]] = {}
"""The group of each kind that was found last, and what it was made from: all trainings of a process share one group."""

_SIZES: Mapping[str, tuple[str, str]] = {
    "WORLD_SIZE": ("torchrun", "call torch.distributed.init_process_group() before it"),
    "OMPI_COMM_WORLD_SIZE": ("mpiexec", "import mpi4py.MPI, or call torch.distributed.init_process_group(), before it"),
    "PMI_SIZE": ("mpiexec", "import mpi4py.MPI, or call torch.distributed.init_process_group(), before it"),
    "SLURM_STEP_NUM_TASKS": ("srun", "call torch.distributed.init_process_group(), or import mpi4py.MPI, before it"),
}


@contextmanager
def using(group: Group) -> Iterator[Group]:
    """Make this the group of every ``track`` in the block that is given none.

        with datastates.ranks.using(datastates.ranks.SoloGroup()):  # each rank trains something of its own
            run = repo.track(branch=f"rank-{rank}", model=model)

    It applies to this thread only.
    """
    token = _in_force.set(group_of(group, "group"))
    try:
        yield group
    finally:
        _in_force.reset(token)


def find() -> Group:
    """The group of the job in which this process is a rank: that of ``using``, of torch.distributed, of MPI, or this process alone.

    Collective unless this process is alone. Neither torch.distributed nor mpi4py is imported for it.

    :raises InvalidInput: the launcher of this process launched several, and they have not met yet.
    """
    found = _in_force.get()
    if found is not None:
        return found
    dist = initialized()
    if dist is not None and dist.get_world_size() > 1:
        world = dist.group.WORLD
        if "torch" not in _made or _made["torch"][0] is not world:
            _made["torch"] = world, TorchGroup()
        return _made["torch"][1]
    mpi = _mpi()
    if mpi is not None:
        if "mpi" not in _made:
            _made["mpi"] = mpi, MPIGroup()
        return _made["mpi"][1]
    if dist is None and not _is_pool():
        _check_environment()
    return SoloGroup()


def _mpi() -> Any:
    """``mpi4py.MPI``, if this program uses it and has several ranks, and they are not those of a pool; else None."""
    mpi: Any = sys.modules.get("mpi4py.MPI")
    if mpi is None or not mpi.Is_initialized() or mpi.Is_finalized() or _is_pool():
        return None
    return mpi if mpi.COMM_WORLD.Get_size() > 1 else None


def _is_pool() -> bool:
    """Whether the ranks are those of ``mpi4py.futures``: the workers and the process that gives them tasks. Each works by itself."""
    core = sys.modules.get("mpi4py.futures._core")
    return "mpi4py.futures.server" in sys.modules or getattr(core, "SharedPool", None) is not None


def _check_environment() -> None:
    for name, (launcher, advice) in _SIZES.items():
        said = os.environ.get(name, "")
        if said.isdecimal() and int(said) > 1:
            raise InvalidInput(
                f"{launcher} began {said} processes ({name}), of which this is one, and they have not met: each would make states of its"
                f" own, where the job has one: {advice}, or pass group=datastates.ranks.SoloGroup() if each trains by itself"
            )
