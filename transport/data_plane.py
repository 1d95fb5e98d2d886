"""A session's end of the data plane: a link made on first use, and dropped as a whole when buffers
must be taken back.

Both ends must drop their links. Otherwise messages over the old one hang, and break the new one.
Each reset begins a *generation*, whose number is sent with each request. An end that receives a
later number resets itself too.

Each end sends its address to the peer in the first frame, or when the end is first needed. It sends
the address again whenever that changes: a helper process may die and be restarted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any

from datastates.errors import DatastatesError, Disconnected
from datastates.system.failures import Failure, describe, revive

from .contract import End, Link
from .protocol import Message, Moved
from .ucx_messages import Allocator

_ABORTED = "the link was aborted"

_MEET_S = 30.0  # for a living peer to send the address of its end; it may have to start a process


class Plane:
    """The link to one peer. A single transfer cannot be stopped. To get memory back, drop the link;
    the next use makes a new one.

    ``end`` makes the links. ``told`` is the own address that was sent to the peer, ``address``
    is the peer's; both may be empty.
    """

    def __init__(
        self,
        end: End,
        told: bytes,
        address: bytes,
        peer: str,
        post: Callable[[Message], Awaitable[None]],
    ) -> None:
        self._end, self._announced, self._address, self._peer, self._post = (
            end,
            told,
            address,
            peer,
            post,
        )
        self._failure: Failure | None = None
        self._news = asyncio.Event()
        self._link: Link | None = None
        self._making = asyncio.Lock()
        self._aborts: dict[int, asyncio.Task[None]] = {}
        self._is_closed = self._is_answering = False
        self.generation = 0

    async def link(self, generation: int | None = None) -> Link:
        """The link to send and receive on; for requests of a ``generation``, only while that lasts.

        :raises Disconnected: the session is over, or the generation, or the peer's data plane
            cannot be reached.
        :raises Unavailable: this end, or the peer's, cannot be made.
        """
        async with self._making:
            for abort in list(self._aborts.values()):
                await finish(abort)
            if self._link is None and not self._is_closed:
                self._link = await self._settled()
            if self._is_closed or self._link is None:
                await self.drop(self._link)
                raise Disconnected(f"the connection to {self._peer} is closed")
            if generation not in {None, self.generation}:
                raise Disconnected(f"the data plane to {self._peer} was reset meanwhile: ask again")
            return self._link

    async def drop(self, link: Link | None = None) -> None:
        """Stop everything under way on ``link`` (by default the present one), even when this is
        cancelled: once it returns no buffer is read or written any more."""
        link = self._link if link is None else link
        if link is not None and self._link is link:
            self.generation += 1
        self._give_up(link)
        for abort in list(self._aborts.values()):
            await finish(abort)
        if self._announced and self._end.located != self._announced and not self._is_closed:
            self._announced = b""
            with suppress(Disconnected):  # the session is over
                await self._post(Moved(b""))

    def moved(self, message: Moved) -> None:
        """Note that the peer's end has another address."""
        if message.address != self._address and self._link is not None:
            self.generation += 1
            self._give_up(self._link)
        self._address, self._failure = message.address, message.failure
        self._news.set()

    async def answer(self) -> None:
        """Send the peer the address of this end, or the error that keeps it from being made."""
        if self._is_answering:
            return
        self._is_answering = True
        try:
            address, failure = await self._end.address(), None
        except DatastatesError as exc:
            address, failure = b"", describe(exc)
        self._announced, self._is_answering = address, False
        await self._post(Moved(address, failure=failure))

    def follow(self, generation: int) -> None:
        """Reset this end after the peer has reset its own, unless that was done before."""
        if generation > self.generation:
            self.generation = generation
            self._give_up(self._link)

    async def close(self) -> None:
        """Drop the link, and make no new one; idempotent."""
        self._is_closed = True
        self._news.set()
        await self.drop()
        await self._end.leave()

    async def _settled(self) -> Link:
        """A link that was made within one generation."""
        while True:
            begun = self.generation
            link = await self._connected()
            if begun == self.generation:
                return link
            await link.abort()

    async def _connected(self) -> Link:
        """A link. If the known address fails, its end may be gone, so a new address is requested
        once."""
        await self._exchange_addresses()
        try:
            return await self._reached()
        except Disconnected:
            self._address = b""
        await self._exchange_addresses()
        return await self._reached()

    async def _reached(self) -> Link:
        address = self._address
        link = await self._end.link(address)
        if address != self._address:
            await link.abort()
            raise Disconnected(f"the data plane of {self._peer} moved meanwhile")
        return link

    async def _exchange_addresses(self) -> None:
        """Exchange addresses with the peer, as far as that is needed."""
        own = await self._end.address()
        asks = not self._address
        if asks:
            self._failure = None
        if asks or own != self._announced:
            self._announced = own
            await self._post(Moved(own, asks))
        if asks:
            await self._wait_for_address()

    async def _wait_for_address(self) -> None:
        try:
            async with asyncio.timeout(_MEET_S):
                while not self._address and self._failure is None and not self._is_closed:
                    await self._news.wait()
                    self._news.clear()
        except TimeoutError:
            raise Disconnected(
                f"{self._peer} is alive, but has not sent its data plane address in {_MEET_S:g} s"
            ) from None
        if self._is_closed:
            raise Disconnected(f"the connection to {self._peer} is closed")
        if not self._address and self._failure is not None:
            raise revive(self._failure)

    def _give_up(self, link: Link | None) -> None:
        if link is not None and id(link) not in self._aborts:
            self._aborts[id(link)] = asyncio.create_task(self._abort(link))
        if self._link is link:
            self._link = None

    async def _abort(self, link: Link) -> None:
        try:
            await link.abort()
        finally:
            del self._aborts[id(link)]


async def finish(task: asyncio.Future[Any]) -> None:
    """Wait for a task to end, whatever its outcome.

    If the caller is cancelled meanwhile, it keeps waiting, and is cancelled afterwards."""
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as exc:
            cancelled = exc
    if cancelled is not None:
        raise cancelled


def mark_retrieved(future: asyncio.Future[Any]) -> None:
    """Mark a future's error as retrieved: the task that began it may wait no more."""
    if not future.cancelled():
        future.exception()


def fail(future: asyncio.Future[Any], error: BaseException) -> None:
    """Give the error to the waiting task, unless it is done."""
    if not future.done():
        future.set_exception(error)
        mark_retrieved(future)


class StagedLink(Link):
    """A link whose messages pass through memory that is shared with another process.

    Each transfer has its own task, which continues when the caller that began it is cancelled.
    Belongs to the loop thread."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self._waiting: set[asyncio.Future[Any]] = set()  # for the other process
        self._unposted: set[asyncio.Future[None]] = set()
        self._allocators: set[Allocator] = set()
        self._aborting: asyncio.Task[None] | None = None

    async def posted(self) -> None:
        """Wait until each receive that was begun has memory in the other process."""
        await asyncio.sleep(0)
        if self._unposted:
            await asyncio.wait(list(self._unposted))

    async def abort(self) -> None:
        """Abort; takes only as long as the copies under way, whatever other processes do."""
        if self._aborting is None:
            self._aborting = asyncio.create_task(self._abort())
        await asyncio.shield(self._aborting)

    async def _abort(self) -> None:
        for future in list(self._waiting):
            fail(future, Disconnected(_ABORTED))
        for allocator in self._allocators:
            allocator.refuse(self, Disconnected(_ABORTED))
        while self._tasks:
            await asyncio.wait(list(self._tasks))

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(mark_retrieved)
        return task

    def _begin_post(self) -> asyncio.Future[None]:
        """A future for ``posted``, to be set when a receive has its memory."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._unposted.add(future)
        future.add_done_callback(self._unposted.discard)
        return future

    def _wait_for(self, future: asyncio.Future[Any]) -> asyncio.Future[Any]:
        """The same future; ``abort`` makes it fail."""
        self._waiting.add(future)
        future.add_done_callback(self._waiting.discard)
        return future

    def _check(self) -> None:
        if self._aborting is not None:
            raise Disconnected(_ABORTED)
