"""Agreement between the ranks of one training: where it begins, which rank moves the branch, and
errors.

Each method is collective, and belongs to the training thread. If one rank fails, all ranks raise.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import msgspec

from datastates import values
from datastates.collective import (
    EXCHANGE_BYTES,
    AnyGroup,
    CollectiveCall,
    Group,
    MPIGroup,
    SoloGroup,
    TorchGroup,
    initialized,
)
from datastates.errors import InvalidInput
from datastates.lineage.states import State
from datastates.maintenance.core import Core

T = TypeVar("T")


class Ranks:
    """The ranks of a group, as one training uses them."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.rank, self.size = group.rank, group.size

    @property
    def is_first(self) -> bool:
        """Whether this rank is the one that does what is done only once."""
        return self.rank == 0

    @contextmanager
    def synchronized(self, what: str) -> Iterator[None]:
        """A block that all ranks run. It ends once all of them have finished it, with or without an
        error. ``what`` completes "could not …".

        :raises DatastatesError: this rank's own error, as it is; or the error of the first rank
            that failed, with its number.
        """
        if self.size == 1:
            yield
            return
        with CollectiveCall(self.group, what).synchronized():
            yield

    def first(self, what: str, work: Callable[[], T], kind: type[T]) -> T:
        """The result of the work, on every rank; rank 0 does the work, and the result is a
        ``kind``.

        :raises DatastatesError: the error of rank 0.
        """
        if self.size == 1:
            return work()
        meeting = CollectiveCall(self.group, what)
        if not self.is_first:
            return msgspec.msgpack.decode(meeting.meet()[0], type=kind)
        with meeting.reporting_errors():
            found = work()
        meeting.meet(msgspec.msgpack.encode(found))
        return found

    def ended(self, what: str, error: str | None) -> dict[int, str]:
        """Wait until every rank has come to the end of ``what`` they did together; returns the
        errors of those that failed, by rank.

        A rank that failed calls this early. The other ranks then get its error from every
        collective call, until they call this too.
        """
        if self.size == 1:
            return {} if error is None else {0: error}
        return CollectiveCall(self.group, what).end(error)

    def state(
        self, core: Core, rev: str | State, *, nearest: bool = False, **terms: object
    ) -> State:
        """The state that ``rev`` names for rank 0, on every rank, to restore it on these terms;
        ``nearest`` as in ``Core.state``.

        Ranks that give another text for the revision must mean the same state. A branch may move
        meanwhile: they look only the uid up.

        :raises InvalidInput: the ranks give different states, or different terms; the error is the
            same on each.
        """
        if self.size == 1:
            return core.state(rev, nearest=nearest)
        said = values.revision(rev)
        theirs, uid = self.first(
            "find the state", lambda: (said, core.state(said, nearest=nearest).uid), tuple[str, str]
        )
        with self.synchronized("find the state"):
            state = core.state(uid)
            own = uid if said == theirs else core.state(said, nearest=nearest).uid
        self.same(
            {"the state": own, "nearest": nearest, **terms},
            task="restore the same",
            advice="let all ranks call restore with the same state and the same other arguments",
        )
        return state

    def same(
        self,
        what: Mapping[str, object],
        *,
        task: str = "track the same training",
        advice: str = (
            "let all ranks call track with the same arguments, or give those that train something"
            " else, as the stages of a pipeline do, a group and a branch of their own"
        ),
    ) -> None:
        """Raise unless all ranks give the same value under each name, as their ``task`` needs.
        ``advice`` ends the error text.

        :raises InvalidInput: they do not; the error is the same on each.
        """
        if self.size == 1:
            return
        own = {name: str(value) for name, value in what.items()}
        everyone = [
            msgspec.msgpack.decode(said, type=dict[str, str])
            for said in self.group.exchange(_fit(own))
        ]
        for name in sorted({name for said in everyone for name in said}):
            for rank, said in enumerate(everyone):
                if said.get(name) != everyone[0].get(name):
                    raise InvalidInput(
                        f"the ranks of this job do not {task}: {name} is {everyone[0].get(name)} on"
                        f" rank 0 and {said.get(name)} on rank {rank}; {advice}"
                    )


def _fit(said: Mapping[str, str]) -> bytes:
    """The encoded texts, small enough for one exchange: texts that are too long are cut, which
    still shows most differences."""
    encoded = msgspec.msgpack.encode(said)
    if len(encoded) <= EXCHANGE_BYTES:
        return encoded
    most = EXCHANGE_BYTES // (8 * len(said))
    return msgspec.msgpack.encode({name[:255]: value[:most] for name, value in said.items()})


# The group of ranks to which a training belongs: the one of ``using``, or the job's.


_in_force: ContextVar[Group | None] = ContextVar("datastates_group", default=None)
_made: dict[str, tuple[object, Group]] = {}
"""The group of each kind that was found last, and what it was made from: all trainings of a
process share one group."""

_SIZES: Mapping[str, tuple[str, str]] = {
    "WORLD_SIZE": ("torchrun", "call torch.distributed.init_process_group() before it"),
    "OMPI_COMM_WORLD_SIZE": (
        "mpiexec",
        "import mpi4py.MPI, or call torch.distributed.init_process_group(), before it",
    ),
    "PMI_SIZE": (
        "mpiexec",
        "import mpi4py.MPI, or call torch.distributed.init_process_group(), before it",
    ),
    "SLURM_STEP_NUM_TASKS": (
        "srun",
        "call torch.distributed.init_process_group(), or import mpi4py.MPI, before it",
    ),
}


@contextmanager
@values.checked
def using(group: AnyGroup) -> Iterator[Group]:
    """Make this the group of every ``track`` in the block that is given none.

        with datastates.ranks.using(datastates.ranks.SoloGroup()):  # each rank trains something of
        its own
            run = repo.track(branch=f"rank-{rank}", model=model)

    It applies to this thread only.
    """
    token = _in_force.set(group)
    try:
        yield group
    finally:
        _in_force.reset(token)


def find() -> Group:
    """The group of this process: the one of ``using``, else the ranks of torch.distributed or of
    MPI, else this process alone.

    Collective unless this process is alone. It does not import torch.distributed or mpi4py.

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
    """``mpi4py.MPI``, if this program uses it and has several ranks that are not a pool; else
    None."""
    mpi: Any = sys.modules.get("mpi4py.MPI")
    if mpi is None or not mpi.Is_initialized() or mpi.Is_finalized() or _is_pool():
        return None
    return mpi if mpi.COMM_WORLD.Get_size() > 1 else None


def _is_pool() -> bool:
    """Whether the ranks are a pool of ``mpi4py.futures``: independent workers, and the process that
    gives them tasks."""
    core = sys.modules.get("mpi4py.futures._core")
    return "mpi4py.futures.server" in sys.modules or getattr(core, "SharedPool", None) is not None


def _check_environment() -> None:
    for name, (launcher, advice) in _SIZES.items():
        said = os.environ.get(name, "")
        if said.isdecimal() and int(said) > 1:
            raise InvalidInput(
                f"{launcher} began {said} processes ({name}), of which this is one, and they are"
                f" not connected. Each would make separate states, where the job needs one:"
                f" {advice}, or pass group=datastates.ranks.SoloGroup() if each trains alone"
            )
