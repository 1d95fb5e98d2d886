"""Answers that are sent piece by piece, and end when the client has hung up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import TYPE_CHECKING

from fastapi import Response

if TYPE_CHECKING:
    from starlette.types import Receive, Send
    from starlette.types import Scope as AsgiScope

__all__ = ["Streamed"]

STALLED_S = 60.0


class Streamed(Response):
    """``pieces`` as the body. ``close`` is called once, however it ends: all sent, client gone or stalled, or an error.

    The client bounds the memory: the next piece is produced once the one before was taken. An error in ``pieces`` breaks the connection, so
    that no client mistakes what was sent for the whole.
    """

    def __init__(
        self,
        pieces: AsyncGenerator[bytes],
        *,
        close: Callable[[], object],
        headers: Mapping[str, str],
        media_type: str,
        status: int = 200,
    ) -> None:
        self.status_code, self.media_type, self.background = status, media_type, None
        self._pieces, self._close = pieces, close
        self.init_headers(headers)

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        """Send until either the pieces or the connection ends."""
        sending, leaving = asyncio.ensure_future(self._send(send)), asyncio.ensure_future(_gone(receive))
        try:
            await asyncio.wait((sending, leaving), return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        finally:
            for task in (sending, leaving):
                task.cancel()
            try:
                await asyncio.gather(sending, leaving, return_exceptions=True)  # a thread that is still reading for it ends first
                await self._pieces.aclose()
            finally:
                self._close()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for piece in self._pieces:
            async with asyncio.timeout(STALLED_S):
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
