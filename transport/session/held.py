"""The states that a peer holds open for one session, each as a feed, by its handle.

A chunk is read directly from memory if a process of this host has it; else it comes over the data plane (``Receiving``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from datastates.errors import DatastatesError, PeerFault
from datastates.transport.contract import OnDevice
from datastates.transport.failures import again
from datastates.transport.protocol import Digests, Message, Release, Took
from datastates.transport.wire.near import Near, NearChunks
from datastates.transport.wire.plane import Plane

from .asking import Asking
from .feed import Feed, Receiving
from .fingerprints import DIGEST_BYTES
from .life import Life

__all__ = ["Feeds"]


@dataclass(frozen=True, slots=True)
class Feeds:
    """What the feeds of one session share. ``is_bound`` says whether everything that comes over its data plane is the peer's own;
    ``reaches_devices`` says whether it can be received on a device."""

    peer: str
    timeout_s: float
    life: Life
    post: Callable[[Message], Awaitable[None]]
    asking: Asking
    receiving: Receiving
    plane: Plane
    near: Near | None
    is_bound: bool
    reaches_devices: bool = False

    def open(self, handle: int, manifest: bytes, lengths: tuple[int, ...], addresses: tuple[int, ...] = ()) -> Feed:
        """The feed of a state that the peer holds open under ``handle``; ``addresses`` are those of its chunks in the peer's memory."""
        if self.near is None or len(addresses) != len(lengths):
            return _HeldFeed(self, handle, manifest, lengths, None)

        def took(count: int, size: int) -> None:
            self.life.depend_on(self.post, Took(handle, count, size))

        return _HeldFeed(self, handle, manifest, lengths, NearChunks(self.near, addresses, took))


class _HeldFeed(Feed):
    def __init__(self, feeds: Feeds, handle: int, manifest: bytes, lengths: tuple[int, ...], near: NearChunks | None) -> None:
        is_bound = feeds.is_bound or near is not None
        super().__init__(feeds.peer, manifest, lengths, is_bound=is_bound, reaches_devices=feeds.reaches_devices)
        self._feeds, self._handle, self._near = feeds, handle, near

    async def digests(self, indexes: Sequence[int]) -> Sequence[bytes]:
        size = DIGEST_BYTES * len(indexes)
        said = await self._feeds.asking.ask(Digests(self._handle, tuple(indexes)), limit=size)
        if len(said) != size:
            raise PeerFault(f"{self.name} tells {len(said)} bytes of digests where {size} belong")
        return [said[start : start + DIGEST_BYTES] for start in range(0, size, DIGEST_BYTES)]

    async def _receive(self, index: int, buffers: Sequence[memoryview]) -> bool:
        return await self._come(index, buffers)

    async def _receive_there(self, index: int, into: OnDevice) -> bool:
        return await self._come(index, into)

    async def _come(self, index: int, buffers: Sequence[memoryview] | OnDevice) -> bool:
        feeds = self._feeds
        try:
            if self._near is not None and not isinstance(buffers, OnDevice) and await self._near.receive(index, buffers):
                feeds.life.check_open()  # memory read after the session's end may have been anything
                return True
            await feeds.receiving.chunk(self._handle, index, buffers)
        except DatastatesError as exc:
            if isinstance(exc, PeerFault):  # a message of the wrong length
                feeds.life.fall(exc)
            if feeds.life.error is not None:
                await feeds.life.ended.wait()
                raise again(feeds.life.error) from exc
            raise
        return feeds.is_bound

    async def _release(self) -> None:
        if self._near is not None:
            self._near.close()
        feeds = self._feeds
        releasing = feeds.life.spawn(feeds.asking.ask(Release(self._handle, feeds.plane.generation), limit=0))
        await asyncio.wait({releasing}, timeout=feeds.timeout_s)
