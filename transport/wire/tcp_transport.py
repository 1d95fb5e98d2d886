"""``tcp://host:port``: control frames over a connection of ours, and data over further connections to the same port (``lanes``)."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable

from datastates.errors import Unavailable
from datastates.transport.contract import Channel, End, Link, Listener, Terms, Tls, Transport
from datastates.transport.loop import at_stop

from . import tcp
from .arrival import Arrival, Door
from .joining import HEADER_BYTES, Join, read_header
from .lanes import Lanes

__all__ = ["TcpTransport"]

_HEADER_S = 10.0


class TcpTransport(Transport):
    """Our own transport. Data connections find their session by its name, whichever port of this process they came to."""

    scheme = "tcp"

    @property
    def planes(self) -> tuple[str, ...]:
        """Only our own plane."""
        return ("tcp",)

    def __init__(self) -> None:
        self._sessions: dict[bytes, Lanes] = {}
        self._is_watched = False

    async def listen(
        self, url: str, accept: Callable[[Channel], Awaitable[None]], *, tls: Tls | None = None, door: Door | None = None
    ) -> Listener:
        """Listen on one address, for control channels and for the data of their sessions."""
        return await tcp.listen(url, accept, tls=tls, join=self._join, door=door)

    async def dial(self, url: str, *, timeout_s: float, tls: Tls | None = None) -> Channel:
        """Open a control channel."""
        return await tcp.dial(url, timeout_s=timeout_s, tls=tls)

    def end(self, plane: str, terms: Terms, generation: Callable[[], int]) -> End:
        """One session's end of our own plane."""
        if plane != "tcp":
            return super().end(plane, terms, generation)
        if not self._is_watched:
            self._is_watched = True
            at_stop(self._stop)
        lanes = Lanes(terms, generation, lambda: self._forget(terms.name))
        self._sessions[terms.name] = lanes
        return lanes

    @property
    def located(self) -> bytes:
        """An empty address: our own plane belongs to a session."""
        return b""

    async def address(self) -> bytes:
        """Raise: there is no address of the whole process.

        :raises Unavailable: always.
        """
        raise Unavailable("tcp:// carries bytes within a session only")

    async def link(self, address: bytes) -> Link:
        """Raise: there are only links of sessions.

        :raises Unavailable: always.
        """
        raise Unavailable("tcp:// carries bytes within a session only")

    async def close(self) -> None:
        """End every data plane; the sessions will notice."""
        for lanes in list(self._sessions.values()):
            await lanes.leave()

    def cut(self) -> int:
        """Break every data connection, as a network does; returns how many there were. For tests."""
        return sum(lanes.cut() for lanes in self._sessions.values())

    def _forget(self, name: bytes) -> None:
        self._sessions.pop(name, None)

    async def _stop(self) -> None:
        self._is_watched = False
        await TcpTransport.close(self)

    async def _join(self, connection: socket.socket, context: ssl.SSLContext | None, arrival: Arrival) -> None:
        try:
            async with asyncio.timeout(_HEADER_S):
                join = await _header(connection)
        except (OSError, TimeoutError):
            join = None
        lanes = None if join is None else self._sessions.get(join.name)
        if join is None or lanes is None:
            connection.close()
            arrival.release()
        else:
            arrival.hold()  # only the peer knows the name
            lanes.join(connection, join, context, arrival.release)


async def _header(connection: socket.socket) -> Join | None:
    loop, raw = asyncio.get_running_loop(), b""
    while len(raw) < HEADER_BYTES:
        more = await loop.sock_recv(connection, HEADER_BYTES - len(raw))
        if not more:
            return None
        raw += more
    return read_header(raw)
