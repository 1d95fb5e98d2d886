"""Processes that belong together and know each other by rank: how they meet, so that states can be cloned among them.

What travels here is small (urls, tokens, outcomes); states travel over the transports.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from array import array
from itertools import accumulate
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

from datastates.errors import Closed, InvalidInput, Unsupported

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["Group", "MPIGroup", "SoloGroup"]

EXCHANGE_BYTES: Final = 1 << 20
"""The most that one rank may give to an exchange."""

_POLL_S: Final = (50e-6, 2e-3)  # between two looks at a collective that is under way: at first, at most


class Group(ABC):
    """A fixed number of processes. Every method is collective: all ranks call the same ones in the same order, one thread each."""

    @property
    @abstractmethod
    def rank(self) -> int:
        """The rank of this process, from 0."""

    @property
    @abstractmethod
    def size(self) -> int:
        """The number of ranks."""

    @abstractmethod
    def exchange(self, value: bytes) -> list[bytes]:
        """Exchange bytes: returns what every rank gave, by rank, once all have called it. At most 1 MiB each.

        :raises InvalidInput: it is more; nothing was sent, and the other ranks wait on.
        :raises Closed: the group was closed.
        """

    def barrier(self) -> None:
        """Return once every rank is here."""
        self.exchange(b"")

    @abstractmethod
    def close(self) -> None:
        """Let go; idempotent, and collective as all else."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Close, but not after an error: the other ranks may never come to it."""
        if error is None:
            self.close()


class SoloGroup(Group):
    """One process by itself, so that the same script runs without ``mpiexec``."""

    rank = 0
    size = 1

    def __init__(self) -> None:
        self._is_closed = False

    def exchange(self, value: bytes) -> list[bytes]:
        _check(value, is_closed=self._is_closed)
        return [bytes(value)]

    def close(self) -> None:
        self._is_closed = True


class MPIGroup(Group):
    """The ranks of an MPI communicator, ``COMM_WORLD`` by default; making one is collective.

    It talks on a duplicate of the communicator, so that it never takes a message of the program's own. A rank that waits
    sleeps between looks: MPI's blocking calls burn the core that a transfer of the same process may need.

    :raises Unsupported: mpi4py is not installed.
    """

    def __init__(self, comm: MPI.Intracomm | None = None) -> None:
        mpi = _mpi()
        self._mpi, self._comm = mpi, (mpi.COMM_WORLD if comm is None else comm).Dup()
        self._rank, self._size = self._comm.Get_rank(), self._comm.Get_size()
        self._is_closed = False

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._size

    def exchange(self, value: bytes) -> list[bytes]:
        _check(value, is_closed=self._is_closed)
        lengths = array("i", [0]) * self._size
        _wait(self._comm.Iallgather([array("i", [len(value)]), self._mpi.INT], [lengths, self._mpi.INT]))
        ends = list(accumulate(lengths, initial=0))
        data = bytearray(ends[-1])
        _wait(self._comm.Iallgatherv([bytes(value), self._mpi.BYTE], [data, (lengths, ends[:-1]), self._mpi.BYTE]))
        return [bytes(data[start : start + length]) for start, length in zip(ends, lengths, strict=False)]

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            if not self._mpi.Is_finalized():
                self._comm.Free()


def _mpi() -> Any:
    try:
        from mpi4py import MPI
    except ImportError as exc:
        raise Unsupported("a group over MPI needs mpi4py: pip install 'datastates[mpi]'") from exc
    return MPI


def _wait(request: Any) -> None:
    pause, most = _POLL_S
    while not request.Test():
        time.sleep(pause)
        pause = min(2 * pause, most)


def _check(value: bytes, *, is_closed: bool) -> None:
    if is_closed:
        raise Closed("the group was closed: make another one, on every rank")
    if len(value) > EXCHANGE_BYTES:
        raise InvalidInput(f"{len(value)} bytes were given to an exchange, which takes {EXCHANGE_BYTES} of each rank: clone what is large")
