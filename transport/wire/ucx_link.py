"""One endpoint of UCX, held by a helper, and the transfers under way on it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from datastates.errors import Disconnected, InvalidInput, PeerFault
from datastates.transport.contract import Link

from .staging import PART_BYTES, Stretch
from .transfers import Transfers
from .ucx_process import Helper, fail

__all__ = ["UcxLink"]

_ABORTED = "the link was aborted"
_COPIED_AT_ONCE = 256 << 10  # on the loop's thread: waking another thread takes as long


class UcxLink(Link):
    """Tag messages to and from one peer; UCX matches tags over all peers of the helper.

    What is sent is copied into the helper's memory, and what arrives is copied out of it, so a later check covers bytes that no other
    process can change. A message of more than ``PART_BYTES`` travels as several with its tag, which UCX keeps in order. UCX notices a
    message that is longer than the memory. A shorter one leaves the rest of the memory as it was, and nothing reports that: the digest
    reveals it.
    """

    def __init__(self, helper: Helper, number: int, threads: ThreadPoolExecutor, on_abort: Callable[[UcxLink], None]) -> None:
        self._helper, self._number, self._threads, self._on_abort = helper, number, threads, on_abort
        self._transfers = Transfers()
        self._waiting: set[asyncio.Future[None]] = set()  # wait for the helper
        self._unposted: set[asyncio.Future[None]] = set()
        self._aborting: asyncio.Task[None] | None = None

    async def send(self, tag: int, data: memoryview) -> None:
        """Send to the receiver of the tag in the peer's process."""
        await self._transfers.run(self._send(tag, data.cast("B")))

    async def receive(self, tag: int, into: memoryview) -> None:
        """Receive from the sender of the tag to this process."""
        if into.readonly:
            raise InvalidInput(f"the message of tag {tag} was to be received into read-only memory")
        posted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._unposted.add(posted)
        posted.add_done_callback(self._unposted.discard)
        try:
            await self._transfers.run(self._receive(tag, into.cast("B"), posted))
        except PeerFault as exc:
            raise PeerFault(f"the message of tag {tag} has more than the {into.nbytes} bytes that were waited for") from exc

    async def posted(self) -> None:
        """Wait until each receive that was begun has memory in the helper."""
        await asyncio.sleep(0)
        if self._unposted:
            await asyncio.wait(list(self._unposted))

    async def abort(self) -> None:
        """Abort; takes only as long as the copies under way, whatever the peer and the helper do."""
        if self._aborting is None:
            self._aborting = asyncio.create_task(self._abort())
        await asyncio.shield(self._aborting)

    async def _abort(self) -> None:
        closing = asyncio.create_task(self._helper.disconnect(self._number))
        self._helper.closing.add(closing)
        closing.add_done_callback(self._helper.closing.discard)
        for future in list(self._waiting):
            fail(future, Disconnected(_ABORTED))
        for region in (self._helper.out, self._helper.into):
            region.refuse(self, Disconnected(_ABORTED))
        await self._transfers.end()
        self._on_abort(self)

    async def _send(self, tag: int, data: memoryview) -> None:
        region, sent = self._helper.out, list[asyncio.Future[None]]()
        for part in _parts(data):
            self._check()
            stretch = await region.take(self, part.nbytes)
            try:
                await self._copy(region.view(stretch), part)
                sent.append(self._waits(self._helper.send(self._number, tag, stretch)))
            except BaseException:
                region.give_back(stretch)
                raise
        for future in sent:
            await future

    async def _receive(self, tag: int, into: memoryview, posted: asyncio.Future[None]) -> None:
        region, landing = self._helper.into, list[asyncio.Task[None]]()
        try:
            for part in _parts(into):
                self._check()
                stretch = await region.take(self, part.nbytes)
                try:
                    self._check()
                    arrived = self._waits(self._helper.receive(self._number, tag, stretch))
                except BaseException:
                    region.give_back(stretch)
                    raise
                landing.append(self._transfers.begin(self._land(arrived, stretch, part)))
        finally:
            posted.set_result(None)
        await asyncio.gather(*landing)

    async def _land(self, arrived: asyncio.Future[None], stretch: Stretch, into: memoryview) -> None:
        await arrived  # from here on the stretch is ours
        try:
            await self._copy(into, self._helper.into.view(stretch))
        finally:
            self._helper.into.give_back(stretch)

    async def _copy(self, into: memoryview, data: memoryview) -> None:
        self._check()
        if data.nbytes <= _COPIED_AT_ONCE:
            into[:] = data
        else:
            await asyncio.get_running_loop().run_in_executor(self._threads, _copy, into, data)
        self._check()

    def _waits(self, future: asyncio.Future[None]) -> asyncio.Future[None]:
        self._waiting.add(future)
        future.add_done_callback(self._waiting.discard)
        return future

    def _check(self) -> None:
        if self._aborting is not None:
            raise Disconnected(_ABORTED)


def _parts(memory: memoryview) -> Iterator[memoryview]:
    for start in range(0, memory.nbytes, PART_BYTES):
        yield memory[start : start + PART_BYTES]


def _copy(into: memoryview, data: memoryview) -> None:
    np.copyto(np.frombuffer(into, np.uint8), np.frombuffer(data, np.uint8))  # lets other threads run meanwhile
