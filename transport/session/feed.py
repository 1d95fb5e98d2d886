"""A state that a peer holds open for us, and how its chunks are received."""

from __future__ import annotations

import asyncio
import logging
import secrets
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any

from datastates.errors import DatastatesError, Disconnected, InvalidInput
from datastates.transport.contract import Link, OnDevice
from datastates.transport.failures import revive
from datastates.transport.protocol import PIECES, Gone, Message, Want
from datastates.transport.wire.plane import Plane

from .sending import WANTS

__all__ = ["Feed", "Receiving"]

_WORD_S = 0.1
_TRIES = 4  # each over a new link
_logger = logging.getLogger(__name__)


class _Broken(Exception):
    """The link broke; the chunk itself is fine."""

    def __init__(self, error: DatastatesError) -> None:
        super().__init__(str(error))
        self.error = error


class Feed(ABC):
    """One state that a peer holds open. ``name`` says where it comes from; ``lengths`` is what the peer says of its chunks.

    With ``is_bound`` most chunks come in a way that proves whose they are. ``reaches_devices``: they can be received on a device.
    """

    def __init__(
        self, name: str, manifest: bytes, lengths: tuple[int, ...], *, is_bound: bool = False, reaches_devices: bool = False
    ) -> None:
        self.name, self.manifest, self.lengths, self.is_bound = name, manifest, lengths, is_bound
        self.reaches_devices = reaches_devices
        self._is_closed = False

    async def receive(self, index: int, buffers: Sequence[memoryview]) -> bool:
        """Fill ``buffers`` with the bytes of a chunk. However it ends, even when it is cancelled, nobody writes to them afterwards.

        True: the bytes came in a way that proves that they are the peer's own. Otherwise anybody may have sent them. In either case they
        are not checked: the caller compares digests.

        :raises DatastatesError: the error that kept the peer from sending it.
        :raises Disconnected: the session is over, nothing came for its ``timeout_s``, or the link broke four times in a row.
        """
        wanted = sum(buffer.nbytes for buffer in buffers)
        self._check(index, wanted)
        return not wanted or await self._receive(index, [buffer for buffer in buffers if buffer.nbytes])

    async def receive_there(self, index: int, into: OnDevice) -> bool:
        """Like ``receive``, into memory of a device; only if ``reaches_devices``."""
        self._check(index, into.nbytes)
        return await self._receive_there(index, into)

    def _check(self, index: int, wanted: int) -> None:
        if index >= len(self.lengths) or wanted != self.lengths[index]:
            had = f"{self.lengths[index]} bytes" if index < len(self.lengths) else "no such chunk"
            raise InvalidInput(f"{wanted} bytes were asked for as chunk {index} of a state that has {had} at {self.name}")

    @abstractmethod
    async def digests(self, indexes: Sequence[int]) -> Sequence[bytes]:
        """BLAKE3 of these chunks, as the peer has them."""

    async def close(self) -> None:
        """Let the peer unpin the state; idempotent, and does nothing once the session is over."""
        if not self._is_closed:
            self._is_closed = True
            with suppress(DatastatesError):
                await self._release()

    @abstractmethod
    async def _receive(self, index: int, buffers: Sequence[memoryview]) -> bool:
        """See ``receive``; the buffers have the right size, and none is empty."""

    async def _receive_there(self, index: int, into: OnDevice) -> bool:
        """See ``receive_there``."""
        raise InvalidInput(f"chunk {index} was to be received on a device, which {self.name} does not reach")

    @abstractmethod
    async def _release(self) -> None:
        """See ``close``."""


class Receiving:
    """The chunks that were asked for on one session."""

    def __init__(self, plane: Plane, post: Callable[[Message], Awaitable[None]], clock: Callable[[], float]) -> None:
        self._plane, self._post, self._clock = plane, post, clock
        self._room = asyncio.Semaphore(WANTS)
        self._wanted: dict[int, tuple[asyncio.Future[Any], asyncio.Future[Gone]]] = {}
        self._tags, self._count = secrets.randbits(31) << 32, 0
        self._moved_at, self._has_moved = clock(), False
        self._claimed = 0
        self.bytes_wanted = 0

    @property
    def stalled_s(self) -> float:
        """The seconds for which nothing has come of what was asked for, as of the last check."""
        if self._has_moved:
            self._moved_at, self._has_moved = self._clock(), False
        return self._clock() - self._moved_at if self._wanted else 0.0

    async def chunk(self, handle: int, index: int, buffers: Sequence[memoryview] | OnDevice) -> None:
        """Receive a chunk: first the receives are posted, then the peer is asked.

        A link that breaks while the session stands does not fail the chunk, which is asked for again over a new link. UCX may take down
        a new connection together with one that either end closes at that moment.
        """
        if not isinstance(buffers, OnDevice) and len(buffers) > PIECES:
            raise InvalidInput(f"chunk {index} is to be received in {len(buffers)} pieces: at most {PIECES} can be asked for")
        async with self._room:
            for left in reversed(range(_TRIES)):
                link = await self._plane.link()
                try:
                    await self._receive(link, handle, index, buffers)
                except _Broken as broken:
                    if not left:
                        raise broken.error from None
                    _logger.info("chunk %d is asked for again over a new link: %s", index, broken.error)
                else:
                    return

    async def _receive(self, link: Link, handle: int, index: int, buffers: Sequence[memoryview] | OnDevice) -> None:
        sizes = (buffers.nbytes,) if isinstance(buffers, OnDevice) else tuple(buffer.nbytes for buffer in buffers)
        tag = self._take_tags(len(sizes))
        gone: asyncio.Future[Gone] = asyncio.get_running_loop().create_future()
        here = link.receive_there(tag, buffers, self._move) if isinstance(buffers, OnDevice) else link.receive_all(tag, buffers, self._move)
        want = Want(handle, index, tag, sizes, self._plane.generation)
        try:
            await link.posted()
            if not self._wanted:
                self._moved_at = self._clock()
            self._wanted[tag] = here, gone
            self.bytes_wanted += sum(want.pieces)
            await self._post(want)
            await _outcome(here, gone)
        except BaseException:
            await self._take_back(link, here)
            raise
        finally:
            self._wanted.pop(tag, None)

    def gone(self, message: Gone) -> None:
        """Note that the peer will not send a chunk."""
        self._plane.follow(message.generation)
        here, gone = self._wanted.get(message.tag, (None, None))
        if here is not None and gone is not None and not gone.done():
            gone.set_result(message)
            here.cancel()

    def claim(self, sent: int) -> bool:
        """Check what the peer says that it has sent; False if that cannot be true. Only what arrives counts as progress."""
        if not self._claimed <= sent <= self.bytes_wanted:
            return False
        self._claimed = sent
        return True

    def _take_tags(self, count: int) -> int:
        if self._count + count >= 1 << 32:
            self._count = 0
        first, self._count = self._count, self._count + count
        return self._tags | first

    def _move(self) -> None:
        """Note that a piece has arrived; called on any thread."""
        self._has_moved = True

    async def _take_back(self, link: Link, here: asyncio.Future[Any]) -> None:
        """Give the buffers back to the caller: only a dropped link is certain not to write to them."""
        try:
            await self._plane.drop(link)
        finally:
            here.cancel()
            await asyncio.gather(here, return_exceptions=True)


async def _outcome(here: asyncio.Future[Any], gone: asyncio.Future[Gone]) -> None:
    """Wait until every piece is here, or one fails, or the peer says that they will not come."""
    try:
        await here
    except asyncio.CancelledError:
        caller = asyncio.current_task()
        if not gone.done() or (caller is not None and caller.cancelling()):
            raise
    except DatastatesError as exc:
        await asyncio.wait({gone}, timeout=_WORD_S)  # the peer's own message says more than a broken link
        if not gone.done():
            if isinstance(exc, Disconnected):
                raise _Broken(exc) from exc
            raise
    else:
        return
    error = revive(gone.result().failure)
    raise _Broken(error) if gone.result().is_link else error
