"""The messages between a training and the process that runs UCX for it: frames of MessagePack on a
socket between the two.

Orders go to the helper, reports come back. Either side treats what it receives as bytes from a
process that may have been taken over: every field has bounds, and an unexpected report ends the
helper.
"""

from __future__ import annotations

import asyncio
import fcntl
import mmap
import os
from bisect import insort
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Final, Generic, TypeVar

import msgspec
from msgspec import Meta, Struct

ADDRESS_BYTES: Final = 8 << 10

_FRAME_BYTES = 64 << 10
_HEADER = 4

_T = TypeVar("_T")
_Number = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
_Tag = Annotated[int, Meta(ge=0)]
_Address = Annotated[bytes, Meta(min_length=1, max_length=ADDRESS_BYTES)]
_Text = Annotated[str, Meta(max_length=500)]


class Started(Struct, frozen=True, tag=0, array_like=True):
    """The worker is ready.

    ``resources`` are its transports with their devices (``tcp/eth0``); ``open`` is what could
    not be forbidden."""

    address: _Address
    versions: tuple[_Text, _Text]
    resources: Annotated[tuple[_Text, ...], Meta(max_length=256)]
    open: Annotated[tuple[_Text, ...], Meta(max_length=16)]


class Go(Struct, frozen=True, tag=1, array_like=True):
    """The memory may be mapped: the outgoing region for writing too, if devices do not accept it
    otherwise."""

    is_writable: bool


class Connect(Struct, frozen=True, tag=2, array_like=True):
    """Make an endpoint."""

    link: _Number
    address: _Address


class Connected(Struct, frozen=True, tag=3, array_like=True):
    """The endpoint was made, unless there is a ``problem``."""

    link: _Number
    problem: _Text | None = None


class Send(Struct, frozen=True, tag=4, array_like=True):
    """Send bytes from the outgoing memory."""

    number: _Number
    link: _Number
    tag: _Tag
    start: _Number
    length: _Number


class Receive(Struct, frozen=True, tag=5, array_like=True):
    """Receive into the incoming memory."""

    number: _Number
    link: _Number
    tag: _Tag
    start: _Number
    length: _Number


class Ended(Struct, frozen=True, tag=6, array_like=True):
    """A message was sent or received, unless there is a ``problem``.

    Its memory is not touched any more."""

    number: _Number
    problem: _Text | None = None
    is_too_long: bool = False


class Close(Struct, frozen=True, tag=7, array_like=True):
    """Stop what is under way on an endpoint, and release it."""

    link: _Number


class Closed(Struct, frozen=True, tag=8, array_like=True):
    """An endpoint is gone: everything under way on it has ended."""

    link: _Number


class Failed(Struct, frozen=True, tag=9, array_like=True):
    """UCX does not start; the helper ends."""

    problem: _Text


Order = Go | Connect | Send | Receive | Close
Report = Started | Failed | Connected | Ended | Closed

_encode = msgspec.msgpack.Encoder().encode


def frame(message: Order | Report) -> bytes:
    """The message as a frame."""
    body = _encode(message)
    return len(body).to_bytes(_HEADER, "little") + body


class Inbox(Generic[_T]):
    """Reassembles frames."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[_T]) -> None:
        self._decode = decoder.decode
        self._rest = bytearray()

    def take(self, data: bytes) -> Iterator[_T]:
        """The messages that are complete now.

        :raises ValueError: these are no messages.
        """
        rest = self._rest
        rest += data
        start = 0
        while len(rest) - start >= _HEADER:
            end = start + _HEADER + int.from_bytes(rest[start : start + _HEADER], "little")
            if end - start > _FRAME_BYTES:
                raise ValueError(
                    f"a frame of {end - start} bytes, at most {_FRAME_BYTES} are allowed"
                )
            if len(rest) < end:
                break
            yield self._decode(rest[start + _HEADER : end])
            start = end
        del rest[:start]


# Memory that a training shares with the process that runs UCX for it: one region for bytes that
# leave, one for bytes that arrive.


PART_BYTES = 4 << 20
"""A longer message travels in parts."""

_ALIGNED = 4096
_TRANSFERS = 1024  # the most that may be under way in a region: UCX looks at each
_F_ADD_SEALS = 1033
_SEAL = 1
_SHRINK = 2
_GROW = 4
_FUTURE_WRITE = 16


@dataclass(frozen=True, slots=True)
class Stretch:
    """A part of a region, and its owner."""

    start: int
    length: int
    owner: object

    @property
    def end(self) -> int:
        """The place where the next stretch may begin."""
        return self.start + max(-(-self.length // _ALIGNED), 1) * _ALIGNED


class Allocator:
    """Lends out stretches of ``size`` bytes; belongs to the loop thread.

    The lowest free stretch is lent first, since memory that is used again and again stays in the
    processor's cache. An owner gets no more than the other owners have left, so that one whose peer
    is stuck cannot keep everything.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._holes = [(0, size)]
        self._free = size
        self._lent: Counter[int] = Counter()
        self._count = 0
        self._error: Exception | None = None
        self._waiting: deque[tuple[object, int, asyncio.Future[Stretch]]] = deque()

    def close(self, error: Exception) -> None:
        """Give ``error`` to callers that wait for memory, now or later."""
        self._error = error
        for owner in [owner for owner, _, _ in self._waiting]:
            self.refuse(owner, error)

    def refuse(self, owner: object, error: Exception) -> None:
        """Give ``error`` to callers that wait for memory for ``owner``."""
        for waiting, _, future in self._waiting:
            if waiting is owner and not future.done():
                future.set_exception(error)
                future.exception()  # marks it as retrieved: the task that began it may wait no more

    async def take(self, owner: object, length: int) -> Stretch:
        """A stretch for some bytes, at most a quarter of all; waits its turn."""
        if self._error is not None:
            raise self._error
        if (
            not any(waiting is owner for waiting, _, _ in self._waiting)
            and (found := self._lend(owner, length)) is not None
        ):
            return found
        future: asyncio.Future[Stretch] = asyncio.get_running_loop().create_future()
        self._waiting.append((owner, length, future))
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self.give_back(future.result())
            raise

    def give_back(self, stretch: Stretch) -> None:
        """Take back a stretch that is not read or written any more."""
        self._count -= 1
        self._lent[id(stretch.owner)] -= stretch.end - stretch.start
        if not self._lent[id(stretch.owner)]:
            del self._lent[id(stretch.owner)]
        self._free += stretch.end - stretch.start
        insort(self._holes, (stretch.start, stretch.end))
        self._join(stretch.start)
        self._serve()

    def _serve(self) -> None:
        """Serve waiting callers in turn; of one owner, a later request never comes first."""
        late: set[int] = set()
        left: deque[tuple[object, int, asyncio.Future[Stretch]]] = deque()
        for owner, length, future in self._waiting:
            if future.done():
                continue
            found = self._lend(owner, length) if id(owner) not in late else None
            if found is None:
                late.add(id(owner))
                left.append((owner, length, future))
            else:
                future.set_result(found)
        self._waiting = left

    def _lend(self, owner: object, length: int) -> Stretch | None:
        lent = self._lent[id(owner)]
        for place, (start, end) in enumerate(self._holes):
            stretch = Stretch(start, length, owner)
            size = stretch.end - start
            if stretch.end > end:
                continue
            if self._count >= _TRANSFERS or (lent and lent + size > self._free):
                break
            self._holes[place : place + 1] = [(stretch.end, end)] if stretch.end < end else []
            self._free -= size
            self._count += 1
            self._lent[id(owner)] = lent + size
            return stretch
        if not lent:
            del self._lent[id(owner)]
        return None

    def _join(self, start: int) -> None:
        """Merge the hole at ``start`` with the holes that touch it."""
        place = next(index for index, hole in enumerate(self._holes) if hole[0] == start)
        for left in (place, place - 1):
            if (
                0 <= left < len(self._holes) - 1
                and self._holes[left][1] == self._holes[left + 1][0]
            ):
                self._holes[left : left + 2] = [(self._holes[left][0], self._holes[left + 1][1])]


class Region(Allocator):
    """Shared memory whose stretches are lent out. Pages are allocated when they are first used."""

    def __init__(self, name: str, size: int, *, is_written_here: bool) -> None:
        super().__init__(size)
        self.fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, size)
        fcntl.fcntl(self.fd, _F_ADD_SEALS, _SHRINK | _GROW)
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if is_written_here else 0)
        self._memory = memoryview(mmap.mmap(self.fd, size, mmap.MAP_SHARED, protection))

    def hand_over(self, *, is_writable_there: bool) -> None:
        """Close our descriptor. From now on the region can be mapped for writing only if
        ``is_writable_there``."""
        fcntl.fcntl(self.fd, _F_ADD_SEALS, _SEAL | (0 if is_writable_there else _FUTURE_WRITE))
        os.close(self.fd)
        self.fd = -1

    def close(self, error: Exception) -> None:
        """Give ``error`` to callers that wait for memory, now or later.

        The memory is freed with the last view of it."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        super().close(error)

    def view(self, stretch: Stretch) -> memoryview:
        """The memory of a stretch."""
        return self._memory[stretch.start : stretch.start + stretch.length]
