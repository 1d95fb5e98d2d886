"""Groups of processes that know each other by rank: how they meet, exchange values, and pass bytes on."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Collection
from itertools import accumulate
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

from datastates.errors import Closed, InvalidInput, Unavailable, Unsupported
from datastates.values import shown

if TYPE_CHECKING:
    import torch
    from mpi4py import MPI

__all__ = ["EXCHANGE_BYTES", "PATIENCE_S", "Group", "MPIGroup", "SoloGroup", "bytes_of", "check", "group_of"]

EXCHANGE_BYTES: Final = 1 << 20
"""The most bytes that one rank may give to an exchange."""

PATIENCE_S: Final = 1800.0
"""How long a rank waits for the others, unless the group sets another time: as long as torch's own collectives do."""

_MESSAGE_BYTES: Final = 1 << 30
"""MPI counts in 32 bits."""

_POLL_S: Final = (50e-6, 2e-3)  # between two checks of a collective under way: at first, and at most


class Group(ABC):
    """A fixed number of processes. Every method is collective: all ranks call the same ones in the same order, on their training threads.

    If a rank does not come, the others raise Unavailable: at once if its connections broke because it died, else after the group's
    ``timeout_s``. The group cannot be used after that.
    """

    @property
    @abstractmethod
    def rank(self) -> int:
        """The rank of this process, from 0."""

    @property
    @abstractmethod
    def size(self) -> int:
        """The number of ranks."""

    @property
    def members(self) -> tuple[int, ...] | None:
        """The numbers by which torch.distributed knows these ranks, by rank; None: they are all of its ranks, with the same numbers."""
        return None

    @abstractmethod
    def exchange(self, value: bytes) -> list[bytes]:
        """What every rank gave, by rank, once all have called this. At most 1 MiB each.

        :raises InvalidInput: it is more; nothing was sent, and the other ranks keep waiting.
        :raises Unavailable: a rank did not come.
        :raises Closed: the group was closed.
        """

    @abstractmethod
    def pass_on(self, buffer: memoryview | bytearray | bytes | torch.Tensor, root: int, to: Collection[int] | None = None) -> None:
        """Fill the buffers of other ranks with the root's bytes. All buffers have the same size, are contiguous, and writable except at the
        root.

        ``to`` are the ranks that get the bytes, None: all. It is the same everywhere. A rank that neither gives nor gets need not call
        this, as long as the others meet in the same order.

        :raises Unavailable: a rank did not come. The contents of the buffers are then undefined.
        :raises Closed: the group was closed.
        """

    def barrier(self) -> None:
        """Return once every rank is here."""
        self.exchange(b"")

    @abstractmethod
    def close(self) -> None:
        """Release the group; idempotent, and collective like everything else."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Close, except after an error: the other ranks may never reach it."""
        if error is None:
            self.close()


class SoloGroup(Group):
    """One process by itself, so that the same script runs without ``mpiexec``."""

    rank = 0
    size = 1

    def __init__(self) -> None:
        self._is_closed = False

    def exchange(self, value: bytes) -> list[bytes]:
        check(value, is_closed=self._is_closed)
        return [bytes(value)]

    def pass_on(self, buffer: memoryview | bytearray | bytes | torch.Tensor, root: int, to: Collection[int] | None = None) -> None:
        check(is_closed=self._is_closed)

    def close(self) -> None:
        self._is_closed = True


class MPIGroup(Group):
    """The ranks of an MPI communicator, ``COMM_WORLD`` by default; making one is collective.

    It communicates on a duplicate of the communicator, so that it never takes a message of the program's own. A rank that waits
    sleeps between checks, since MPI's blocking calls burn the core that a transfer of the same process may need. When a rank dies, most
    launchers end the whole job; where one does not, or a rank hangs, the others raise after ``timeout_s``.

    :raises Unsupported: mpi4py is not installed.
    """

    def __init__(self, comm: MPI.Intracomm | None = None, *, timeout_s: float = PATIENCE_S) -> None:
        mpi = _mpi()
        self._mpi, self._timeout_s = mpi, timeout_s
        self._is_closed = False
        self._unfinished: object = None  # a collective that was given up: MPI may still write to its memory
        of = mpi.COMM_WORLD if comm is None else comm
        self._rank, self._size = of.Get_rank(), of.Get_size()
        self._comm: MPI.Intracomm
        self._comm, made = of.Idup()
        self._wait(lambda: made)

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._size

    def exchange(self, value: bytes) -> list[bytes]:
        check(value, is_closed=self._is_closed)
        lengths = array("i", [0]) * self._size
        self._wait(self._comm.Iallgather, [array("i", [len(value)]), self._mpi.INT], [lengths, self._mpi.INT])
        ends = list(accumulate(lengths, initial=0))
        data = bytearray(ends[-1])
        self._wait(self._comm.Iallgatherv, [bytes(value), self._mpi.BYTE], [data, (lengths, ends[:-1]), self._mpi.BYTE])
        return [bytes(data[start : start + length]) for start, length in zip(ends, lengths, strict=False)]

    def pass_on(self, buffer: memoryview | bytearray | bytes | torch.Tensor, root: int, to: Collection[int] | None = None) -> None:
        check(is_closed=self._is_closed)
        view = bytes_of(buffer)
        for start in range(0, view.nbytes, _MESSAGE_BYTES):
            message = [view[start : start + _MESSAGE_BYTES], self._mpi.BYTE]
            if to is None:
                self._wait(self._comm.Ibcast, message, root)
            elif self._rank == root:
                for rank in sorted({*to} - {root}):
                    self._wait(self._comm.Isend, message, rank)
            elif self._rank in to:
                self._wait(self._comm.Irecv, message, root)

    def _wait(self, begin: Callable[..., Any], *arguments: Any) -> None:
        """Wait for the operation that ``begin`` starts."""
        if self._unfinished is not None:
            raise Unavailable("a rank of this group did not come before: make another group, on every rank")
        try:
            request = begin(*arguments)
            pause, most = _POLL_S
            give_up_at = time.monotonic() + self._timeout_s
            while not request.Test():
                if time.monotonic() > give_up_at:
                    self._unfinished = request, arguments
                    raise Unavailable(
                        f"rank {self._rank} of {self._size} waited {self._timeout_s:g} s for the others: one of them hangs or died"
                    )
                time.sleep(pause)
                pause = min(2 * pause, most)
        except self._mpi.Exception as exc:
            self._unfinished = arguments
            raise Unavailable(f"rank {self._rank} of {self._size} lost the others: {exc}") from exc

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            if not self._mpi.Is_finalized() and self._unfinished is None:
                self._comm.Free()


def _mpi() -> Any:
    try:
        from mpi4py import MPI
    except ImportError as exc:
        raise Unsupported("a group over MPI needs mpi4py: pip install 'datastates[mpi]'") from exc
    return MPI


def group_of(value: object, what: str) -> Group:
    """The group that a user passed.

    :raises InvalidInput: ``value`` is something else.
    """
    if not isinstance(value, Group):
        raise InvalidInput(f"{what} is {shown(value)}: give a datastates.ranks.TorchGroup, MPIGroup or SoloGroup")
    return value


def check(value: bytes = b"", *, is_closed: bool) -> None:
    """Raise unless the group is open and an exchange accepts the value."""
    if is_closed:
        raise Closed("the group was closed: make another one, on every rank")
    if len(value) > EXCHANGE_BYTES:
        raise InvalidInput(
            f"{len(value)} bytes were given to an exchange, which takes {EXCHANGE_BYTES} of each rank: pass on what is large"
        )


def bytes_of(buffer: memoryview | bytearray | bytes | torch.Tensor) -> memoryview:
    """The bytes of a buffer, or of a byte tensor on the CPU, without a copy."""
    view = memoryview(buffer if isinstance(buffer, memoryview | bytearray | bytes) else buffer.numpy().data)
    return view.cast("B") if view.nbytes else memoryview(b"")
