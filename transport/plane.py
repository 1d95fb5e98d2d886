"""A session's end of the data plane: a link made on first use, and given up as a whole when buffers must be had back.

Both ends must give up theirs, or what is sent over the old one hangs and breaks the new one: each reset begins a *generation*, which
travels with what is asked for, and who hears of a later one follows.
"""

from __future__ import annotations

import asyncio
from typing import Any

from datastates.errors import Disconnected

from .contract import Link, Transport

__all__ = ["Plane", "surely"]


class Plane:
    """The link to one peer. No transfer can be stopped alone: who needs memory back drops the link, and the next use makes a new one."""

    def __init__(self, transport: Transport, address: bytes, peer: str) -> None:
        self._transport, self._address, self._peer = transport, address, peer
        self._link: Link | None = None
        self._making = asyncio.Lock()
        self._aborts: dict[int, asyncio.Task[None]] = {}
        self._is_closed = False
        self.generation = 0

    async def link(self, generation: int | None = None) -> Link:
        """The link to send and receive on; for what was asked for in a ``generation``, only while that lasts.

        :raises Disconnected: the session is over, the generation too, or the peer's data plane cannot be reached.
        """
        async with self._making:
            for abort in list(self._aborts.values()):
                await surely(abort)
            if self._link is None and not self._is_closed:
                self._link = await self._transport.link(self._address)
            if self._is_closed or self._link is None:
                await self.drop(self._link)
                raise Disconnected(f"the connection to {self._peer} is closed")
            if generation not in {None, self.generation}:
                raise Disconnected(f"the data plane to {self._peer} was reset meanwhile: ask again")
            return self._link

    async def drop(self, link: Link | None = None) -> None:
        """Stop all that is under way on ``link`` (the present one, if none is given), even when this is cancelled: once it returns
        no buffer is read or written any more."""
        link = self._link if link is None else link
        if link is not None and self._link is link:
            self.generation += 1
        self._give_up(link)
        for abort in list(self._aborts.values()):
            await surely(abort)

    def follow(self, generation: int) -> None:
        """The peer has reset its end: so does this one, if it did not yet."""
        if generation > self.generation:
            self.generation = generation
            self._give_up(self._link)

    async def close(self) -> None:
        """Drop the link for good; idempotent."""
        self._is_closed = True
        await self.drop()

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


async def surely(task: asyncio.Future[Any]) -> None:
    """Wait for a task to end, whatever becomes of it; who is cancelled meanwhile waits on, and is cancelled then."""
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as exc:
            cancelled = exc
    if cancelled is not None:
        raise cancelled
