"""Control frames over TCP, with TLS where it is asked for: four bytes of length, then the frame."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

from datastates.errors import Disconnected, InvalidInput, PeerFault, Unavailable

from .contract import Channel, Listener, Tls

__all__ = ["TcpChannel", "TcpListener", "dial", "listen"]

_LENGTH_BYTES = 4
_BUFFER_BYTES = 256 << 10
_FLUSH_S = 1.0
_GONE = (OSError, asyncio.IncompleteReadError, EOFError)


class TcpChannel(Channel):
    """One end of a connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self.peer = _printable(writer.get_extra_info("peername"))
        self.host = writer.get_extra_info("sockname")[0]
        self._is_closed = False
        raw = writer.get_extra_info("socket")
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    async def send(self, frame: bytes) -> None:
        """Hand a frame to the socket; waits while its buffer is full."""
        if self._is_closed:
            raise Disconnected(f"the connection to {self.peer} is closed")
        try:
            self._writer.write(len(frame).to_bytes(_LENGTH_BYTES, "big") + frame)
            await self._writer.drain()
        except _GONE as exc:
            raise self._lost(exc) from exc

    async def receive(self, limit: int) -> bytes:
        """The next frame; its length is looked at before anything is read for it."""
        if self._is_closed:
            raise Disconnected(f"the connection to {self.peer} is closed")
        try:
            length = int.from_bytes(await self._reader.readexactly(_LENGTH_BYTES), "big")
            if length > limit:
                await self.close()
                raise PeerFault(f"{self.peer} announced a frame of {length} bytes, at most {limit} are allowed here")
            return await self._reader.readexactly(length)
        except _GONE as exc:
            raise self._lost(exc) from exc

    async def close(self) -> None:
        """Send what was handed over, for a second at most, and let go."""
        if self._is_closed:
            return
        self._is_closed = True
        self._reader.feed_eof()  # who waits in ``receive`` waits no longer
        self._writer.close()
        try:
            await asyncio.wait_for(self._writer.wait_closed(), _FLUSH_S)
        except (TimeoutError, OSError):
            self._writer.transport.abort()

    def _lost(self, exc: BaseException) -> Disconnected:
        if self._is_closed:
            return Disconnected(f"the connection to {self.peer} was closed here")
        reason = "it closed the connection" if isinstance(exc, EOFError) else exc
        return Disconnected(f"{self.peer} is gone: {reason}")


class TcpListener(Listener):
    """A listening socket."""

    def __init__(self, server: asyncio.Server, url: str) -> None:
        self._server, self.url = server, url

    async def close(self) -> None:
        """Take no more peers."""
        self._server.close()


async def listen(url: str, accept: Callable[[Channel], Awaitable[None]], *, tls: Tls | None = None) -> TcpListener:
    """Listen on ``scheme://host:port``.

    :raises Unavailable: the address cannot be bound.
    :raises InvalidInput: the url names no host and port, or a file for TLS is missing.
    """
    scheme, host, port = _address(url)

    async def arrive(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):  # it is gone already
            await accept(TcpChannel(reader, writer))

    try:
        server = await asyncio.start_server(arrive, host, port, ssl=_server_context(tls), limit=_BUFFER_BYTES)
    except OSError as exc:
        raise Unavailable(f"{url} cannot be listened on ({exc.strerror or exc}): choose another address, or port 0 for any") from exc
    bound_host, bound_port = server.sockets[0].getsockname()[:2]
    return TcpListener(server, f"{scheme}://{_bracketed(bound_host)}:{bound_port}")


async def dial(url: str, *, timeout_s: float, tls: Tls | None = None) -> TcpChannel:
    """Connect to ``scheme://host:port``.

    :raises Disconnected: nobody answers there in time, or what answers cannot be trusted.
    """
    _, host, port = _address(url)
    name = host if tls is not None else None
    try:
        connecting = asyncio.open_connection(host, port, ssl=_client_context(tls), server_hostname=name, limit=_BUFFER_BYTES)
        reader, writer = await asyncio.wait_for(connecting, timeout_s)
    except TimeoutError as exc:
        raise Disconnected(f"{url} did not answer within {timeout_s:g} s: is it served there, and not behind a firewall?") from exc
    except ssl.SSLError as exc:
        raise Disconnected(f"{url} cannot be trusted ({exc.reason or exc}): check the certificate that tls= names") from exc
    except OSError as exc:
        raise Disconnected(f"{url} cannot be reached ({exc.strerror or exc}): is it served there?") from exc
    return TcpChannel(reader, writer)


def _address(url: str) -> tuple[str, str, int]:
    parts = urlsplit(url)
    try:
        port = parts.port
    except ValueError as exc:
        raise InvalidInput(f"{url!r}: {exc}") from exc
    if not parts.hostname or port is None:
        raise InvalidInput(f"{url!r} names no host and port: write {parts.scheme or 'ucx'}://host:port")
    return parts.scheme, parts.hostname, port


def _server_context(tls: Tls | None) -> ssl.SSLContext | None:
    if tls is None:
        return None
    if tls.certificate is None:
        raise InvalidInput("a server with TLS needs tls.certificate, and tls.key if the key lies in another file")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=tls.trusted)
    try:
        context.load_cert_chain(tls.certificate, tls.key)
    except OSError as exc:
        raise InvalidInput(f"the certificate {tls.certificate} cannot be used: {exc}") from exc
    return context


def _client_context(tls: Tls | None) -> ssl.SSLContext | None:
    if tls is None:
        return None
    try:
        return ssl.create_default_context(ssl.Purpose.SERVER_AUTH, cafile=tls.trusted)
    except OSError as exc:
        raise InvalidInput(f"the certificates in {tls.trusted} cannot be used: {exc}") from exc


def _printable(name: object) -> str:
    return f"{_bracketed(name[0])}:{name[1]}" if isinstance(name, tuple) else str(name)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
