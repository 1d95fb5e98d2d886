"""Groups of processes with ranks: how they connect, exchange values, and pass bytes on."""

from __future__ import annotations

import ctypes
import hashlib
import sys
import time
from abc import ABC, abstractmethod
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import accumulate
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any, Final, Self
from weakref import WeakKeyDictionary

import msgspec

from datastates.system.failures import Failure, revive

from .errors import Closed, DatastatesError, InvalidInput, Unavailable, Unsupported
from .values import shown

if TYPE_CHECKING:
    import torch
    from mpi4py import MPI
    from torch.distributed import ProcessGroup

EXCHANGE_BYTES: Final = 1 << 20
"""The most bytes that one rank may give to an exchange."""

PATIENCE_S: Final = 1800.0
"""How long a rank waits for the others, unless the group sets another time: as long as torch's
own collectives do."""

_MESSAGE_BYTES: Final = 1 << 30
"""MPI counts in 32 bits."""

# between two checks of a collective under way: at first, and at most
_POLL_S: Final = (
    50e-6,
    2e-3,
)


class Group(ABC):
    """A fixed number of processes. Every method is collective: all ranks call the same ones in the
    same order, on their training threads.

    If a rank does not call, all other ranks raise Unavailable: at once if its connections broke
    because it died, else after the group's ``timeout_s``. The group cannot be used after that.
    """

    rank: int
    """The rank of this process, from 0."""

    size: int
    """The number of ranks."""

    members: tuple[int, ...] | None = None
    """The numbers of these ranks in torch.distributed, by rank. None: they are all of its ranks,
    with the same numbers."""

    @abstractmethod
    def exchange(self, value: bytes) -> list[bytes]:
        """The values of all ranks, by rank, once all have called this. At most 1 MiB each.

        :raises InvalidInput: it is more; nothing was sent, and the other ranks keep waiting.
        :raises Unavailable: a rank did not come.
        :raises Closed: the group was closed.
        """

    @abstractmethod
    def pass_on(
        self,
        buffer: memoryview | bytearray | bytes | torch.Tensor,
        root: int,
        to: Collection[int] | None = None,
    ) -> None:
        """Fill the buffers of other ranks with the root's bytes. All buffers have the same size,
        are contiguous, and writable except at the root.

        ``to`` are the ranks that get the bytes, None: all. It is the same everywhere. A rank that
        neither gives nor gets need not call this, if the order of the other calls is the same.

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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close, except after an error: the other ranks may never reach it."""
        if error is None:
            self.close()


class SoloGroup(Group):
    """A single process, so that the same script runs without ``mpiexec``."""

    rank = 0
    size = 1

    def __init__(self) -> None:
        self._is_closed = False

    def exchange(self, value: bytes) -> list[bytes]:
        check(value, is_closed=self._is_closed)
        return [bytes(value)]

    def pass_on(
        self,
        buffer: memoryview | bytearray | bytes | torch.Tensor,
        root: int,
        to: Collection[int] | None = None,
    ) -> None:
        check(is_closed=self._is_closed)

    def close(self) -> None:
        self._is_closed = True


class MPIGroup(Group):
    """The ranks of an MPI communicator, ``COMM_WORLD`` by default; making one is collective.

    It communicates on a duplicate of the communicator, so that it never takes a message of the
    program's own. A rank that waits sleeps between checks, since MPI's blocking calls burn the core
    that a transfer of the same process may need. When a rank dies, most launchers end the whole
    job. If one does not, or if a rank hangs, all other ranks raise after ``timeout_s``.

    :raises Unsupported: mpi4py is not installed.
    """

    def __init__(self, comm: MPI.Intracomm | None = None, *, timeout_s: float = PATIENCE_S) -> None:
        mpi = _mpi()
        self._mpi, self._timeout_s = mpi, timeout_s
        self._is_closed = False
        self._unfinished: object = (
            None  # a collective that was given up: MPI may still write to its memory
        )
        of = mpi.COMM_WORLD if comm is None else comm
        self.rank, self.size = of.Get_rank(), of.Get_size()
        self._comm: MPI.Intracomm
        self._comm, made = of.Idup()
        self._wait(lambda: made)

    def exchange(self, value: bytes) -> list[bytes]:
        check(value, is_closed=self._is_closed)
        lengths = array("i", [0]) * self.size
        self._wait(
            self._comm.Iallgather,
            [array("i", [len(value)]), self._mpi.INT],
            [lengths, self._mpi.INT],
        )
        ends = list(accumulate(lengths, initial=0))
        data = bytearray(ends[-1])
        self._wait(
            self._comm.Iallgatherv,
            [bytes(value), self._mpi.BYTE],
            [data, (lengths, ends[:-1]), self._mpi.BYTE],
        )
        return [
            bytes(data[start : start + length])
            for start, length in zip(ends, lengths, strict=False)
        ]

    def pass_on(
        self,
        buffer: memoryview | bytearray | bytes | torch.Tensor,
        root: int,
        to: Collection[int] | None = None,
    ) -> None:
        check(is_closed=self._is_closed)
        view = bytes_of(buffer)
        for start in range(0, view.nbytes, _MESSAGE_BYTES):
            message = [view[start : start + _MESSAGE_BYTES], self._mpi.BYTE]
            if to is None:
                self._wait(self._comm.Ibcast, message, root)
            elif self.rank == root:
                for rank in sorted({*to} - {root}):
                    self._wait(self._comm.Isend, message, rank)
            elif self.rank in to:
                self._wait(self._comm.Irecv, message, root)

    def _wait(self, begin: Callable[..., Any], *arguments: Any) -> None:
        """Wait for the operation that ``begin`` starts."""
        if self._unfinished is not None:
            raise Unavailable(
                "a rank of this group did not come before: make another group, on every rank"
            )
        try:
            request = begin(*arguments)
            pause, most = _POLL_S
            give_up_at = time.monotonic() + self._timeout_s
            while not request.Test():
                if time.monotonic() > give_up_at:
                    self._unfinished = request, arguments
                    raise Unavailable(
                        f"rank {self.rank} of {self.size} waited {self._timeout_s:g} s for the"
                        " others: one of them hangs or died"
                    )
                time.sleep(pause)
                pause = min(2 * pause, most)
        except self._mpi.Exception as exc:
            self._unfinished = arguments
            raise Unavailable(f"rank {self.rank} of {self.size} lost the others: {exc}") from exc

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
        raise InvalidInput(
            f"{what} is {shown(value)}: give a datastates.ranks.TorchGroup, MPIGroup or SoloGroup"
        )
    return value


AnyGroup = Annotated[Group, group_of]


def check(value: bytes = b"", *, is_closed: bool) -> None:
    """Raise unless the group is open and an exchange accepts the value."""
    if is_closed:
        raise Closed("the group was closed: make another one, on every rank")
    if len(value) > EXCHANGE_BYTES:
        raise InvalidInput(
            f"{len(value)} bytes were given to an exchange, which takes {EXCHANGE_BYTES} of each"
            " rank: pass on what is large"
        )


def bytes_of(buffer: memoryview | bytearray | bytes | torch.Tensor) -> memoryview:
    """The bytes of a buffer, or of a byte tensor on the CPU, without a copy."""
    view = memoryview(
        buffer if isinstance(buffer, memoryview | bytearray | bytes) else buffer.numpy().data
    )
    return view.cast("B") if view.nbytes else memoryview(b"")


# Ranks that know each other through torch.distributed.


_made: WeakKeyDictionary[Any, Counter[tuple[int, ...]]] = WeakKeyDictionary()
"""How many groups were made over the same ranks, by torch's group of all ranks: each gets a name
in its store that none had before."""


class TorchGroup(Group):
    """The ranks of torch.distributed, or of its group ``of``. Making one is collective among these
    ranks only.

    It communicates over separate gloo connections, on the CPU. It never interferes with the
    collectives of the training, which may use NCCL. When a rank dies, all other ranks raise as soon
    as one of them misses it. When a rank hangs, they raise after ``timeout_s``.

    :param of: a group of torch.distributed, whose ranks are the ranks of this one.
    :raises InvalidInput: torch.distributed is not initialised, or ``of`` is not one of its groups,
        or this process is not in it.
    :raises Unavailable: a rank did not come, or cannot be connected to.
    """

    def __init__(self, of: ProcessGroup | None = None, *, timeout_s: float = PATIENCE_S) -> None:
        dist = initialized()
        if dist is None:
            raise InvalidInput(
                "torch.distributed is not initialised: call torch.distributed.init_process_group()"
                " before"
            )
        self._ranks = _ranks_of(dist, of)
        self.rank, self.size = self._ranks.index(dist.get_rank()), len(self._ranks)
        is_everyone = self._ranks == list(range(dist.get_world_size()))
        self.members = None if is_everyone else tuple(self._ranks)
        self._is_closed = False
        self._gloo: Any
        try:
            self._gloo = dist.ProcessGroupGloo(
                _store(dist, self._ranks), self.rank, self.size, timedelta(seconds=timeout_s)
            )
        except RuntimeError as exc:
            raise Unavailable(
                f"rank {self.rank} of {self.size} did not meet the others: make the group again,"
                f" on every rank: {exc}"
            ) from exc

    def exchange(self, value: bytes) -> list[bytes]:
        import torch

        check(value, is_closed=self._is_closed)
        lengths = torch.zeros(self.size, dtype=torch.int64)
        self._wait("allgather", list(lengths.split(1)), torch.tensor([len(value)]))
        longest = int(lengths.max())
        if not longest:
            return [b""] * self.size
        given, got = (
            torch.zeros(longest, dtype=torch.uint8),
            torch.empty(self.size, longest, dtype=torch.uint8),
        )
        if value:
            given[: len(value)] = torch.frombuffer(bytearray(value), dtype=torch.uint8)
        self._wait("allgather", list(got), given)
        return [
            row[: int(length)].numpy().tobytes() for row, length in zip(got, lengths, strict=True)
        ]

    def pass_on(
        self,
        buffer: memoryview | bytearray | bytes | torch.Tensor,
        root: int,
        to: Collection[int] | None = None,
    ) -> None:
        check(is_closed=self._is_closed)
        data = _as_tensor(bytes_of(buffer))
        if to is None:
            self._wait("broadcast", data, root)
        elif self.rank == root:
            for rank in sorted({*to} - {root}):
                self._wait("send", [data], rank, 0)
        elif self.rank in to:
            self._wait("recv", [data], root, 0)

    def close(self) -> None:
        self._is_closed, self._gloo = True, None

    def _wait(self, collective: str, *arguments: object) -> None:
        if self._gloo is None:
            raise Unavailable(
                "a rank of this group did not come before: make another group, on every rank"
            )
        try:
            getattr(self._gloo, collective)(*arguments).wait()
        except RuntimeError as exc:
            self._gloo = (
                None  # closes this rank's connections, so ranks that wait for it notice now
            )
            raise Unavailable(
                f"rank {self.rank} of {self.size} lost another one, which hangs or died: {exc}"
            ) from exc


def initialized() -> Any:
    """``torch.distributed`` if this process initialised it, else None; never imports it for
    that."""
    dist: Any = sys.modules.get("torch.distributed")
    return dist if dist is not None and dist.is_available() and dist.is_initialized() else None


def _ranks_of(dist: Any, of: ProcessGroup | None) -> list[int]:
    """The numbers of the group's ranks in torch.distributed, by rank.

    :raises InvalidInput: it is no group of torch.distributed, or this process is not in it.
    """
    if of is None:
        return list(range(dist.get_world_size()))
    try:
        is_in = dist.get_rank(of) >= 0
        ranks: list[int] = dist.get_process_group_ranks(of) if is_in else []
    except (ValueError, TypeError, KeyError, AttributeError) as exc:
        raise InvalidInput(
            f"of is {shown(of)}, which is no group of torch.distributed: give one that"
            " torch.distributed.new_group() made and nobody destroyed, or mesh.get_group() of a"
            " mesh"
        ) from exc
    if not is_in:
        raise InvalidInput(
            "this process is not in the group of torch.distributed that was given: give it one that"
            " it is in"
        )
    return ranks


def _store(dist: Any, ranks: list[int]) -> Any:
    """The store in which these ranks exchange their addresses. No earlier group has used it."""
    made = _made.setdefault(dist.group.WORLD, Counter())
    made[tuple(ranks)] += 1
    digest = hashlib.sha256(",".join(map(str, ranks)).encode()).hexdigest()
    return dist.PrefixStore(
        f"datastates/{digest}/{made[tuple(ranks)]}", dist.distributed_c10d._get_default_store()
    )


def _as_tensor(view: memoryview) -> torch.Tensor:
    """The bytes as a tensor, without a copy."""
    import numpy as np
    import torch

    if not view.nbytes:
        return torch.empty(0, dtype=torch.uint8)
    if not view.readonly:
        return torch.frombuffer(view, dtype=torch.uint8)
    address = np.frombuffer(
        view, dtype=np.uint8
    ).ctypes.data  # the root's, which is only read: torch warns of memory that is read-only
    return torch.frombuffer((ctypes.c_ubyte * view.nbytes).from_address(address), dtype=torch.uint8)


# A task of several ranks: a rank that fails reports it in the next collective call, and all raise.


_CHARACTERS = 4 << 10
_END = b"at the end"


class _Message(msgspec.Struct, frozen=True, array_like=True):
    """A message of one rank to all others: its error, or its part of the exchange."""

    failure: Failure | None = None
    body: bytes = b""


class CollectiveCall:
    """One task that the ranks of a group do together. ``what`` completes "could not …". Collective,
    on the training threads."""

    def __init__(self, group: Group, what: str) -> None:
        self.group, self._what = group, what
        self._is_over = False

    @contextmanager
    def synchronized(self) -> Iterator[None]:
        """The block that all ranks run; it ends once all of them have finished it.

        :raises DatastatesError: this rank's own error, as it is; or the error of the first rank
            that failed, with its number.
        """
        with self.reporting_errors():
            yield
        self.meet()

    @contextmanager
    def reporting_errors(self) -> Iterator[None]:
        """A block before ``meet``. An error in it is sent to the other ranks, and then raised here
        as it is."""
        try:
            yield
        except Exception as exc:
            if not self._is_over:
                self._is_over = True
                self._exchange(_Message(_described(exc)))
            raise

    def meet(self, body: bytes = b"") -> list[bytes]:
        """The ``body`` of every rank, once all have called this and none has failed."""
        try:
            said = self._exchange(_Message(body=body))
        except BaseException:
            self._is_over = True  # no rank is left that could get it
            raise
        for rank, each in enumerate(said):
            if each.failure is not None:
                self._is_over = True
                message = (
                    f"rank {rank} of {self.group.size} could not {self._what}:"
                    f" {each.failure.message}"
                )
                raise revive(msgspec.structs.replace(each.failure, message=message))
        return [each.body for each in said]

    def end(self, error: str | None = None) -> dict[int, str]:
        """Wait until all ranks reach the end; returns the errors of the ranks that failed.

        A rank that failed arrives first. It repeats its error in every collective call of the other
        ranks, until all are here.
        """
        own = _Message(
            None if error is None else Failure(DatastatesError.kind, _shortened(error)), _END
        )
        while True:
            everyone = [_decoded(said) for said in self.group.exchange(msgspec.msgpack.encode(own))]
            if all(each is not None and each.body == _END for each in everyone):
                return {
                    rank: each.failure.message
                    for rank, each in enumerate(everyone)
                    if each is not None and each.failure is not None
                }

    def _exchange(self, own: _Message) -> list[_Message]:
        return [
            msgspec.msgpack.decode(said, type=_Message)
            for said in self.group.exchange(msgspec.msgpack.encode(own))
        ]


def _described(error: Exception) -> Failure:
    """An error, described for the other ranks.

    They are of the same job, so they may read all of it."""
    if isinstance(error, DatastatesError):
        return Failure(error.kind, str(error)[:_CHARACTERS])
    return Failure(DatastatesError.kind, f"{type(error).__name__}: {error}"[:_CHARACTERS])


def _shortened(text: str) -> str:
    """The beginning of a text, and its end, where a traceback has the line that raised."""
    half = _CHARACTERS // 2
    return text if len(text) <= _CHARACTERS else f"{text[:half]}\n…\n{text[-half:]}"


def _decoded(said: bytes) -> _Message | None:
    """The message of a rank; None if the bytes are an exchange of another form."""
    try:
        return msgspec.msgpack.decode(said, type=_Message)
    except msgspec.DecodeError:
        return None
