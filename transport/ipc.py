"""The data plane between two processes of one host and user for bytes that belong on a device: the
sender puts them there.

A receiver has *shared regions* on its device, which the sender opens by a handle of the driver
(``Land``). The receiver announces the place of each part of a message in a region (``Room``). The
sender copies the part to this place on its own stream, waits until the copy is done, and reports it
(``Laid``). The receiver copies the part out before anything reads it, so later writes of the sender
have no effect. The three messages travel on the session's control channel. They belong to a
generation of the data plane, as requests for chunks do.

A region is not returned to the driver while the process lives, since this process cannot detect
when the other one has released it. It is kept for the next session.
"""

from __future__ import annotations

import asyncio
import ctypes
import threading
from collections.abc import Awaitable, Callable, Iterator
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

_LANDING_BYTES = 64 << 20
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
        self.rooms: dict[_Key, asyncio.Future[Room]] = {}
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
                key = message.generation, message.tag, message.number
                room = self.room(key)
                if room.done() or len(self.rooms) > _ROOMS:
                    raise PeerFault(
                        f"{self.peer} announced the place of a message twice, or of more than"
                        f" {_ROOMS} messages"
                    )
                if message.generation >= self._generation():
                    room.set_result(message)
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

    def room(self, key: _Key) -> asyncio.Future[Room]:
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
        await self._received(
            tag, here[0], torch.frombuffer(into, dtype=torch.uint8) if into.nbytes else None, None
        )

    def receive_there(
        self, tag: int, into: OnDevice, moved: Callable[[], None]
    ) -> asyncio.Future[Any]:
        async def receiving() -> None:
            await self._received(tag, devices().of(into.memory), into.memory, into.ready)
            moved()

        return asyncio.ensure_future(receiving())

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
                room = await self._wait_for(self._end.room(key))
            finally:
                self._end.rooms.pop(key, None)  # no task waits for it any more
            if room.total != data.nbytes:
                await self._post(
                    Laid(tag, number, data.nbytes, is_other=True, generation=self._generation)
                )
                return
            opened = await self._end.opened(room.region)
            if (
                room.length != min(PART_BYTES, room.total - done)
                or room.start + room.length > opened.shared.tensor.numel()
            ):
                raise PeerFault(
                    f"{self._end.peer} announced a place that is too small for {room.length} bytes"
                )
            self._check()
            there, part = (
                opened.shared.tensor[room.start :][: room.length],
                data[done : done + room.length],
            )
            await self._end.apart(partial(_copy, opened.stream, there, _as_tensor(part), None))
            self._check()
            await self._post(Laid(tag, number, room.length, generation=self._generation))
            done, number = done + room.length, number + 1

    # --- in ---------------------------------------------------------------------------------------

    async def _received(
        self, tag: int, device: torch.device, into: torch.Tensor | None, ready: Mark | None
    ) -> None:
        if into is None:
            return
        receiving = self._receive(tag, device, into, ready, self._begin_post())
        await asyncio.shield(self._begin(receiving))

    async def _receive(
        self,
        tag: int,
        device: torch.device,
        into: torch.Tensor,
        ready: Mark | None,
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
            for number, part in enumerate(_parts(into)):
                self._check()
                stretch = await landing.allocator.take(self, part.numel())
                try:
                    self._check()
                    laid = self._wait_for(self._end.laid((self._generation, tag, number)))
                    where = landing.number, stretch.start, stretch.length
                    await self._post(
                        Room(tag, number, into.numel(), *where, generation=self._generation)
                    )
                except BaseException:
                    landing.allocator.give_back(stretch)
                    raise
                arriving.append(self._begin(self._land(landing, laid, stretch, part, ready)))
        finally:
            posted.set_result(None)
        await asyncio.gather(*arriving)

    async def _land(
        self,
        landing: _OwnRegion,
        coming: asyncio.Future[Laid],
        stretch: Stretch,
        into: torch.Tensor,
        ready: Mark | None,
    ) -> None:
        try:
            laid = await coming
            if laid.is_other or laid.length != stretch.length:
                raise PeerFault(
                    f"the message of tag {laid.tag} has {laid.length} bytes, and others were"
                    " waited for"
                )
            self._check()
            there = landing.shared.tensor[stretch.start :][: stretch.length]
            await self._end.apart(lambda: _copy(landing.stream, into, there, ready))
            self._check()
        finally:
            landing.allocator.give_back(stretch)

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


def _copy(stream: Stream, into: torch.Tensor, data: torch.Tensor, ready: Mark | None) -> None:
    """Copy, and wait until the copy is done."""
    if ready is not None:
        devices().wait(stream, ready)
    with devices().on(stream):
        into.copy_(data, non_blocking=True)
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
