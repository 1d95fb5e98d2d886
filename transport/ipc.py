"""The data plane between two processes of one host and user for bytes that belong on a device: the
sender puts them there.

A receiver has *shared regions* on its device, which the sender opens by a handle of the driver
(``Land``). The receiver announces the place of a message in a region (``Room``), or of several
messages that follow each other. The sender copies each to its place on its own stream, waits until
the copy is done, and reports the last one (``Laid``). The receiver copies them out before anything
reads them, so later writes of the sender have no effect. The three messages travel on the session's
control channel. They belong to a generation of the data plane, as requests for chunks do.

A region is not returned to the driver while the process lives, since this process cannot detect
when the other one has released it. It is kept for the next session.
"""

from __future__ import annotations

import asyncio
import ctypes
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch

from datastates.errors import InvalidInput, PeerFault, Unavailable
from datastates.system.devices import Devices, Mark, Shared, Stream, devices

from .contract import End, Link, OnDevice
from .data_plane import StagedLink, mark_retrieved
from .protocol import Laid, Land, Message, Room
from .same_host import address_of
from .ucx_messages import PART_BYTES, Allocator, Stretch

ADDRESS = b"datastates ipc 1"
"""The place of the other end, which is always in the session."""

_LANDING_BYTES = 128 << 20
_TOGETHER_BYTES = _LANDING_BYTES // 4  # of messages that are announced together
_REGIONS = 16  # how many regions a peer may have us open
_ROOMS = 4096  # how many rooms a peer may announce before anything is sent there
_COPIES = 2

_Key = tuple[int, int, int]
"""Identifies a part of a message: generation, tag, number."""

_kept: WeakKeyDictionary[Devices, dict[torch.device, list[Shared]]] = WeakKeyDictionary()
_lock = threading.Lock()


@dataclass(slots=True)
class _OwnRegion:
    """A region of ours, and which stretch of it each owner has."""

    number: int
    shared: Shared
    stream: Stream
    is_told: bool = False
    allocator: Allocator = field(default_factory=lambda: Allocator(_LANDING_BYTES))


@dataclass(slots=True)
class _PeerRegion:
    """A region of the peer."""

    shared: Shared
    stream: Stream


@dataclass(slots=True)
class _Announced:
    """An announcement of the peer, and how many messages of it are still to be copied."""

    room: Room
    left: int


@dataclass(frozen=True, slots=True)
class _Place:
    """The place of one message, or of a part of it."""

    announced: _Announced
    start: int
    length: int
    total: int


@dataclass(frozen=True, slots=True)
class _Coming:
    """Messages that are received together: a part of one, or the whole ones of consecutive tags.

    They may be written after ``ready``, points in the streams of their owner."""

    tag: int
    number: int
    total: int
    into: Sequence[torch.Tensor]
    ready: Sequence[Mark]


class IpcEnd(End):
    """One side's end of the data plane of a session; belongs to the loop thread. ``is_near``:
    the kernel has shown that the peer is a process of this host and user. ``take`` receives the
    peer's messages."""

    located = ADDRESS

    def __init__(
        self,
        peer: str,
        post: Callable[[Message], Awaitable[None]],
        generation: Callable[[], int],
        is_near: Callable[[], bool],
    ) -> None:
        self.peer, self.post = peer, post
        self._generation, self._is_near = generation, is_near
        self._landings: dict[torch.device, _OwnRegion] = {}
        self._making = asyncio.Lock()
        self._opened: dict[int, asyncio.Future[_PeerRegion]] = {}
        self.rooms: dict[_Key, asyncio.Future[_Place]] = {}
        self._laid: dict[_Key, asyncio.Future[Laid]] = {}
        self._threads = ThreadPoolExecutor(_COPIES, "datastates-ipc")
        self._has_left = False

    async def address(self) -> bytes:
        return ADDRESS

    async def link(self, address: bytes) -> Link:
        if address != ADDRESS:
            raise PeerFault(f"{self.peer} has sent an impossible address of its data plane")
        present = self._generation()
        for key in [key for key in self.rooms if key[0] < present]:
            del self.rooms[key]
        return _IpcLink(self, present)

    def take(self, message: Land | Room | Laid) -> None:
        """Take in a message of the peer's.

        :raises PeerFault: the message is impossible.
        """
        if self._has_left:
            return
        match message:
            case Land(region, handle):
                if not self._is_near() or region in self._opened or len(self._opened) >= _REGIONS:
                    raise PeerFault(
                        f"{self.peer} would have memory opened that it may not, or not again"
                    )
                opening = self._opened[region] = asyncio.ensure_future(
                    self.apart(lambda: _open(handle))
                )
                opening.add_done_callback(mark_retrieved)
            case Room():
                announced = _Announced(message, 1 + len(message.more))
                self._announce(
                    message.tag,
                    message.number,
                    _Place(announced, message.start, message.length, message.total),
                )
                start = message.start + message.length
                for tag, length in enumerate(message.more, message.tag + 1):
                    self._announce(tag, 0, _Place(announced, start, length, length))
                    start += length
            case Laid():
                laid = self._laid.get((message.generation, message.tag, message.number))
                if laid is not None and not laid.done():
                    laid.set_result(message)

    async def leave(self) -> None:
        """Release the peer's memory, and keep ours for other sessions; idempotent."""
        if self._has_left:
            return
        self._has_left = True
        self.rooms.clear()
        for opening in self._opened.values():
            await asyncio.wait({opening})
            if not opening.cancelled() and opening.exception() is None:
                await self.apart(opening.result().shared.close)
        with _lock:
            for device, landing in self._landings.items():
                _kept.setdefault(devices(), {}).setdefault(device, []).append(landing.shared)
        self._landings.clear()
        self._threads.shutdown(wait=False)

    async def landing(self, device: torch.device) -> _OwnRegion:
        """The region on a device; the peer must get its handle before use.

        :raises Unavailable: no memory can be shared.
        """
        async with self._making:
            found = self._landings.get(device)
            if found is None:
                shared, stream = await self.apart(lambda: _share(device))
                found = self._landings[device] = _OwnRegion(len(self._landings), shared, stream)
            return found

    async def opened(self, region: int) -> _PeerRegion:
        """A shared region of the peer.

        :raises PeerFault: the peer announced none with this number.
        :raises Unavailable: it cannot be opened here.
        """
        opening = self._opened.get(region)
        if opening is None:
            raise PeerFault(f"{self.peer} sends bytes to a region that it did not announce")
        return await asyncio.shield(opening)

    def _announce(self, tag: int, number: int, place: _Place) -> None:
        generation = place.announced.room.generation
        room = self.room((generation, tag, number))
        if room.done() or len(self.rooms) > _ROOMS:
            raise PeerFault(
                f"{self.peer} announced the place of a message twice, or of more than {_ROOMS}"
                " messages"
            )
        if generation >= self._generation():
            room.set_result(place)

    def room(self, key: _Key) -> asyncio.Future[_Place]:
        """The place of a part, once the peer announces it."""
        return self.rooms.setdefault(key, asyncio.get_running_loop().create_future())

    def laid(self, key: _Key) -> asyncio.Future[Laid]:
        """The peer's message that a part is there.

        :raises PeerFault: it is already being waited for.
        """
        if key in self._laid:
            raise PeerFault(f"tag {key[1]} is used twice at once")
        found = self._laid[key] = asyncio.get_running_loop().create_future()
        found.add_done_callback(lambda _: self._laid.pop(key, None))
        return found

    async def apart(self, work: Callable[[], Any]) -> Any:
        """Do ``work`` in a thread. A copy that was begun is finished, even if this is cancelled."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


class _IpcLink(StagedLink):
    def __init__(self, end: IpcEnd, generation: int) -> None:
        super().__init__()
        self._end, self._generation = end, generation
        # wait until the peer reads, which it may never do again
        self._posting: set[asyncio.Future[Any]] = set()

    async def send(self, tag: int, data: memoryview) -> None:
        await asyncio.shield(self._begin(self._send(tag, data.cast("B"))))

    async def receive(self, tag: int, into: memoryview) -> None:
        if into.readonly:
            raise InvalidInput(f"the message of tag {tag} was to be received into read-only memory")
        here = devices().in_use()
        if not here:
            raise Unavailable("no device is in use in this process: connect with data='auto'")
        if not into.nbytes:
            return
        parts = enumerate(_parts(torch.frombuffer(into, dtype=torch.uint8)))
        coming = [_Coming(tag, number, into.nbytes, [part], []) for number, part in parts]
        await self._received(here[0], coming, lambda _: None)

    def receive_there(
        self, tag: int, into: Sequence[OnDevice], moved: Callable[[int], None]
    ) -> asyncio.Future[Any]:
        if any(each.nbytes > PART_BYTES for each in into):
            raise InvalidInput(f"at most {PART_BYTES} bytes of a message are received on a device")
        together = _TOGETHER_BYTES // PART_BYTES
        coming = [
            _Coming(
                tag + first,
                0,
                into[first].nbytes,
                [each.memory for each in into[first : first + together]],
                [each.ready for each in into[first : first + together]],
            )
            for first in range(0, len(into), together)
        ]

        def landed(here: _Coming) -> None:
            for number in range(len(here.into)):
                moved(here.tag - tag + number)

        return asyncio.ensure_future(self._received(devices().of(into[0].memory), coming, landed))

    async def _abort(self) -> None:
        for posting in list(self._posting):
            posting.cancel()
        await super()._abort()

    # --- out --------------------------------------------------------------------------------------

    async def _send(self, tag: int, data: memoryview) -> None:
        done = number = 0
        while done < data.nbytes:
            self._check()
            key = self._generation, tag, number
            try:
                place = await self._wait_for(self._end.room(key))
            finally:
                self._end.rooms.pop(key, None)  # no task waits for it any more
            announced, room = place.announced, place.announced.room
            first = room.tag, room.number
            if place.total != data.nbytes:
                await self._post(
                    Laid(*first, data.nbytes, is_other=True, generation=self._generation)
                )
                return
            opened = await self._end.opened(room.region)
            if (
                place.length != min(PART_BYTES, place.total - done)
                or place.start + place.length > opened.shared.tensor.numel()
            ):
                raise PeerFault(
                    f"{self._end.peer} announced a place that is too small for {place.length} bytes"
                )
            self._check()
            there, part = (
                opened.shared.tensor[place.start :][: place.length],
                data[done : done + place.length],
            )
            await self._end.apart(partial(_copy, opened.stream, [there], [_as_tensor(part)], []))
            self._check()
            announced.left -= 1
            if not announced.left:
                length = room.length + sum(room.more)
                await self._post(Laid(*first, length, generation=self._generation))
            done, number = done + place.length, number + 1

    # --- in ---------------------------------------------------------------------------------------

    async def _received(
        self, device: torch.device, coming: Sequence[_Coming], landed: Callable[[_Coming], None]
    ) -> None:
        receiving = self._receive(device, coming, landed, self._begin_post())
        await asyncio.shield(self._begin(receiving))

    async def _receive(
        self,
        device: torch.device,
        coming: Sequence[_Coming],
        landed: Callable[[_Coming], None],
        posted: asyncio.Future[None],
    ) -> None:
        arriving = list[asyncio.Task[None]]()
        try:
            self._check()
            landing = await self._end.landing(device)
            if not landing.is_told:
                landing.is_told = True
                await self._post(Land(landing.number, landing.shared.handle))
            self._allocators.add(landing.allocator)
            for each in coming:
                self._check()
                lengths = [memory.numel() for memory in each.into]
                stretch = await landing.allocator.take(self, sum(lengths))
                try:
                    self._check()
                    laid = self._wait_for(self._end.laid((self._generation, each.tag, each.number)))
                    where = landing.number, stretch.start, lengths[0]
                    await self._post(
                        Room(
                            each.tag,
                            each.number,
                            each.total,
                            *where,
                            more=tuple(lengths[1:]),
                            generation=self._generation,
                        )
                    )
                except BaseException:
                    landing.allocator.give_back(stretch)
                    raise
                arriving.append(self._begin(self._land(landing, laid, stretch, each, landed)))
        finally:
            posted.set_result(None)
        await asyncio.gather(*arriving)

    async def _land(
        self,
        landing: _OwnRegion,
        laying: asyncio.Future[Laid],
        stretch: Stretch,
        coming: _Coming,
        landed: Callable[[_Coming], None],
    ) -> None:
        try:
            laid = await laying
            if laid.is_other or laid.length != stretch.length:
                raise PeerFault(
                    f"the message of tag {laid.tag} has {laid.length} bytes, and others were"
                    " waited for"
                )
            self._check()
            there = landing.shared.tensor[stretch.start :][: stretch.length]
            pieces = there.split([memory.numel() for memory in coming.into])
            await self._end.apart(partial(_copy, landing.stream, coming.into, pieces, coming.ready))
            self._check()
        finally:
            landing.allocator.give_back(stretch)
        landed(coming)

    async def _post(self, message: Message) -> None:
        """Send a message to the peer, or stop when this is aborted."""
        task = asyncio.ensure_future(self._end.post(message))
        self._posting.add(task)
        try:
            await task
        except asyncio.CancelledError:
            self._check()
            raise
        finally:
            self._posting.discard(task)


def _share(device: torch.device) -> tuple[Shared, Stream]:
    """A region: left by an earlier session, or new."""
    with _lock:
        kept = _kept.get(devices(), {}).get(device, [])
        found = kept.pop() if kept else None
    try:
        return (
            devices().share(device, _LANDING_BYTES) if found is None else found
        ), devices().stream(device)
    except RuntimeError as exc:
        raise Unavailable(
            f"no memory of {device} can be shared with another process ({exc}): connect with"
            " data='auto'"
        ) from exc


def _open(handle: bytes) -> _PeerRegion:
    try:
        shared = devices().open_shared(handle)
    except RuntimeError as exc:
        raise Unavailable(
            f"the memory of the other process cannot be opened here ({exc}): connect with"
            " data='auto'"
        ) from exc
    return _PeerRegion(shared, devices().stream(devices().of(shared.tensor)))


def _copy(
    stream: Stream,
    into: Sequence[torch.Tensor],
    data: Sequence[torch.Tensor],
    ready: Sequence[Mark],
) -> None:
    """Copy in one launch, and wait until the copy is done."""
    for mark in ready:
        devices().wait(stream, mark)
    with devices().on(stream):
        torch._foreach_copy_(list(into), list(data), non_blocking=True)
    devices().mark(stream).synchronize()


def _as_tensor(data: memoryview) -> torch.Tensor:
    """The bytes as a tensor without a copy; the caller keeps them alive. torch has no read-only
    tensors, but nothing writes to this one."""
    return torch.frombuffer(
        (ctypes.c_char * data.nbytes).from_address(address_of(data)), dtype=torch.uint8
    )


def _parts(memory: torch.Tensor) -> Iterator[torch.Tensor]:
    for start in range(0, memory.numel(), PART_BYTES):
        yield memory[start : start + PART_BYTES]
