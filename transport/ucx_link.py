"""One endpoint of UCX, and what is under way on it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from . import ucx_settings  # noqa: F401 — before UCX is loaded

# isort: split
from ucxx._lib.arr import Array
from ucxx.exceptions import UCXError, UCXMessageTruncatedError
from ucxx.types import Tag, TagMaskFull

from datastates.errors import Disconnected, InvalidInput, PeerFault

from .contract import Link
from .worker import Worker, keep_over_fork

__all__ = ["UcxLink"]

_CLOSE_NS = 10**9
_SLOW_S = 5.0
_logger = logging.getLogger(__name__)


class UcxLink(Link):
    """Tag messages to and from one peer; UCX matches tags over all peers of the process.

    UCX finds a message that is longer than the memory; a shorter one leaves the rest of the memory as it was, and nothing says so:
    the digest finds it. ``worker`` made ``endpoint``; ``aside`` runs something in a thread; ``on_abort`` is called once.
    """

    def __init__(
        self, worker: Worker, endpoint: Any, aside: Callable[[Callable[[], None]], Awaitable[None]], on_abort: Callable[[UcxLink], None]
    ) -> None:
        self._worker, self._endpoint, self._aside, self._on_abort = worker, endpoint, aside, on_abort
        self._under_way: dict[asyncio.Future[object], object] = {}
        self._aborting: asyncio.Future[None] | None = None
        keep_over_fork(self)

    async def send(self, tag: int, data: memoryview) -> None:
        """To whoever receives the tag in the peer's process."""
        await self._transfer(tag, data, self._begin_send)

    async def receive(self, tag: int, into: memoryview) -> None:
        """From whoever sends the tag to this process."""
        if into.readonly:
            raise InvalidInput(f"the message of tag {tag} was to be received into read-only memory")
        await self._transfer(tag, into, self._begin_receive)

    async def abort(self) -> None:
        """Whatever the peer does, this takes some milliseconds."""
        if self._aborting is None:
            self._aborting = asyncio.ensure_future(self._abort())
        await asyncio.shield(self._aborting)

    async def _abort(self) -> None:
        await self._aside(self._close_endpoint)
        while self._under_way:  # cancelled; until the last has ended UCX may still write
            _, left = await asyncio.wait(list(self._under_way), timeout=_SLOW_S)
            if left:
                _logger.warning("UCX has not yet given back the memory of %d messages whose link was aborted", len(left))
        self._on_abort(self)

    async def _transfer(self, tag: int, memory: memoryview, begin: Callable[[int, memoryview], Any]) -> None:
        if self._is_aborted():
            raise Disconnected("the link was aborted")
        self._worker.refill()
        try:
            request = begin(tag, memory)
            future: asyncio.Future[object] = request.future
            self._under_way[future] = request  # UCXX cancels a request that nobody holds
            future.add_done_callback(self._ended)
            await asyncio.shield(future)  # a caller that is cancelled must not cancel what UCX goes on with
        except UCXMessageTruncatedError as exc:
            raise PeerFault(f"the message of tag {tag} has more than the {memory.nbytes} bytes that were waited for") from exc
        except UCXError as exc:
            raise Disconnected("the link was aborted" if self._is_aborted() else f"the peer's data plane is gone ({exc})") from exc

    def _is_aborted(self) -> bool:
        return self._aborting is not None

    def _begin_send(self, tag: int, data: memoryview) -> Any:
        return self._endpoint.tag_send(Array(data), Tag(tag))

    def _begin_receive(self, tag: int, into: memoryview) -> Any:
        return self._endpoint.tag_recv(Array(into), Tag(tag), TagMaskFull)

    def _ended(self, future: asyncio.Future[object]) -> None:
        del self._under_way[future]
        if not future.cancelled():
            future.exception()  # looked at: who began it may wait no more

    def _close_endpoint(self) -> None:
        self._endpoint.close_blocking(_CLOSE_NS, 1)
