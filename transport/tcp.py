"""Control frames over TCP, optionally with TLS: four bytes of length, then the frame."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from datastates.errors import Disconnected, InvalidInput, PeerFault, Unavailable
from datastates.system.logs import RateLimitFilter

from .connections import (
    Acceptor,
    AdmittedConnection,
    ConnectionLimiter,
    keep_from_children,
    let_go_by,
    set_up,
)
from .contract import Channel, Listener, Tls

JOIN = b"Datum\0\0\2"
"""The first bytes of a data connection. A frame begins with a zero, TLS with 22."""

_LENGTH_BYTES = 4
_TLS_FIRST = b"\x16"
_TLS_HEAD_BYTES = 5  # type, version, and the length of the first record in two bytes
_WORD_BYTES = 16 << 10  # as much as a TLS record may have
_BUFFER_BYTES = 256 << 10
_FLUSH_S = 1.0
_TLS_S = 10.0
_BACKLOG = 128
_GONE = (OSError, EOFError)
_logger = logging.getLogger(__name__)
_logger.addFilter(RateLimitFilter())


class TcpChannel(Channel):
    """One end of a connection."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        admitted: AdmittedConnection | None = None,
    ) -> None:
        self._reader, self._writer, self._admitted = reader, writer, admitted
        self.peer = _printable(writer.get_extra_info("peername"))
        self.host: str = writer.get_extra_info("sockname")[0]
        self.remote = writer.get_extra_info("peername")[:2]
        self.is_secret = writer.get_extra_info("ssl_object") is not None
        self._announced: int | None = None
        self._is_closed = False
        self._closing: asyncio.Future[None] | None = None
        socket_ = writer.get_extra_info("socket")
        with contextlib.suppress(OSError):  # it is already gone, which the first use will report
            set_up(socket_)
        keep_from_children(self, socket_)

    async def send(self, frame: bytes) -> None:
        try:
            if self._is_closed or self._writer.is_closing():
                raise ConnectionError("the connection was lost")
            self._writer.write(len(frame).to_bytes(_LENGTH_BYTES, "big") + frame)
            await self._writer.drain()
        except _GONE as exc:
            raise self._lost(exc) from exc

    async def receive(self, limit: int) -> bytes:
        """The next frame.

        Its length is checked before anything is read for it. This may be cancelled, and called
        again."""
        try:
            if self._is_closed:
                raise ConnectionError("the connection was closed")
            if self._announced is None:
                self._announced = int.from_bytes(
                    await self._reader.readexactly(_LENGTH_BYTES), "big"
                )
            if self._announced > limit:
                fault = PeerFault(
                    f"{self.peer} announced a frame of {self._announced} bytes, at most {limit} are"
                    " allowed here: it may be another program"
                )
                await self.close()
                raise fault
            frame = await self._reader.readexactly(self._announced)
        except _GONE as exc:
            raise self._lost(exc) from exc
        self._announced = None
        return frame

    def hold(self) -> None:
        if self._admitted is not None:
            self._admitted.hold()

    async def close(self) -> None:
        """Send what was handed over, for a second at most, and close."""
        if self._closing is None:
            self._is_closed = True
            self._closing = asyncio.ensure_future(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        try:
            async with asyncio.timeout(_FLUSH_S):
                self._writer.close()
                await self._writer.wait_closed()
        except (TimeoutError, OSError):
            self._writer.transport.abort()
        let_go_by(self)
        if self._admitted is not None:
            self._admitted.release()

    def _lost(self, exc: BaseException) -> Disconnected:
        if self._is_closed:
            return Disconnected(f"the connection to {self.peer} was closed here")
        reason = "it closed the connection" if isinstance(exc, EOFError) else exc
        return Disconnected(f"{self.peer} is gone: {reason}")


_Arrive = Callable[
    [socket.socket, AdmittedConnection, bytes, Callable[[], None]], Coroutine[Any, Any, None]
]


class TcpListener(Listener):
    """A listening socket.

    Connections are sorted by their first bytes: TLS, a control frame, or a data connection."""

    def __init__(
        self,
        listening: socket.socket,
        url: str,
        word: Callable[[bytes], int],
        arrive: _Arrive,
        limiter: ConnectionLimiter,
    ) -> None:
        self._socket, self.url, self._arrive = listening, url, arrive
        self._silent: dict[asyncio.Task[None], tuple[socket.socket, AdmittedConnection]] = {}
        self._visits: set[asyncio.Task[None]] = set()
        keep_from_children(self, listening)
        self._acceptor = Acceptor(listening, limiter, word=word, arrived=self._begin, name=url)

    async def close(self) -> None:
        """Accept no more peers, and close connections that have sent nothing."""
        self._acceptor.close()
        silent = dict(self._silent)
        for task in silent:
            task.cancel()
        if silent:
            await asyncio.wait(silent)
        for (
            connection,
            admitted,
        ) in silent.values():  # a task that was cancelled before it began has closed nothing
            _let_go(connection, admitted)
        self._socket.close()
        let_go_by(self)

    def _begin(self, connection: socket.socket, admitted: AdmittedConnection, first: bytes) -> None:
        visit: asyncio.Task[None] = asyncio.create_task(
            self._arrive(connection, admitted, first, lambda: self._spoke(visit))
        )
        self._visits.add(visit)
        self._silent[visit] = connection, admitted
        visit.add_done_callback(self._visits.discard)
        visit.add_done_callback(self._spoke)

    def _spoke(self, visit: asyncio.Task[None]) -> None:
        self._silent.pop(visit, None)


Accept = Callable[[Channel], Awaitable[None]]
Join = Callable[[socket.socket, ssl.SSLContext | None, AdmittedConnection], Awaitable[None]]
"""Called with a data connection. It calls ``hold`` once the connection has proved itself, and
``release`` on the loop thread when the connection is closed."""


async def listen(
    url: str,
    accept: Accept,
    *,
    tls: Tls | None = None,
    join: Join | None = None,
    limiter: ConnectionLimiter | None = None,
) -> TcpListener:
    """Listen at a url. ``accept`` runs for each peer that has sent its first message.
    ``join`` gets data connections as they arrive, before any byte of them is read.

    :raises Unavailable: the address cannot be bound.
    :raises InvalidInput: the url names no host and port, or a file for TLS is missing.
    """
    scheme, host, port = split(url)
    context = _server_context(tls)

    async def arrive(
        connection: socket.socket,
        admitted: AdmittedConnection,
        first: bytes,
        spoke: Callable[[], None],
    ) -> None:
        try:
            if first == JOIN and join is not None:
                spoke()
                await join(connection, context, admitted)
                return
            channel = await _channel(connection, context, admitted)
            spoke()
        except (OSError, TimeoutError) as exc:
            _logger.debug("a connection to %s was given up: %s", url, exc)
            _let_go(connection, admitted)
            return
        except BaseException as exc:
            _let_go(connection, admitted)
            if isinstance(exc, Exception):
                _logger.exception("a connection to %s was given up", url)
                return
            raise
        await _visit(accept, channel)

    try:
        listening = _listening(await _first_address(host, port), port)
    except (OSError, ValueError) as exc:
        reason = getattr(exc, "strerror", None) or exc
        raise Unavailable(
            f"{url} cannot be listened on ({reason}): choose another address, or port 0 for any"
        ) from exc
    bound_host, bound_port = listening.getsockname()[:2]
    bound, word = (
        f"{scheme}://{_bracketed(bound_host)}:{bound_port}",
        partial(_word, is_tls=context is not None, has_data=join is not None),
    )
    return TcpListener(
        listening, bound, word, arrive, ConnectionLimiter() if limiter is None else limiter
    )


def _listening(host: str, port: int) -> socket.socket:
    listening = socket.socket(
        socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM
    )
    try:
        listening.setblocking(False)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if listening.family == socket.AF_INET6:
            listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listening.bind((host, port))
        listening.listen(_BACKLOG)
    except BaseException:
        listening.close()
        raise
    return listening


def _let_go(connection: socket.socket, admitted: AdmittedConnection) -> None:
    connection.close()
    admitted.release()


def _word(said: bytes, *, is_tls: bool, has_data: bool) -> int:
    """The length of the first message, from its first bytes. 0 if they begin neither a frame (or,
    with TLS, a TLS record) nor a data connection."""
    if has_data and said and JOIN.startswith(said):
        return len(JOIN)  # the join itself checks what follows
    known = _TLS_HEAD_BYTES if is_tls else _LENGTH_BYTES
    if is_tls and said and said[:1] != _TLS_FIRST:
        return 0
    if len(said) < known:
        return known
    size = int.from_bytes(said[known - 2 : known] if is_tls else said[:known])
    return known + size if size <= _WORD_BYTES else 0


async def _channel(
    connection: socket.socket, context: ssl.SSLContext | None, admitted: AdmittedConnection
) -> TcpChannel:
    """An accepted connection as a channel, after TLS's handshake if there is any."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=_BUFFER_BYTES, loop=loop)
    protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
    transport, _ = await loop.connect_accepted_socket(
        lambda: protocol,
        connection,
        ssl=context,
        ssl_handshake_timeout=None if context is None else _TLS_S,
    )
    if transport.get_extra_info("peername") is None:
        transport.abort()
        raise ConnectionResetError("it left at once")
    return TcpChannel(reader, asyncio.StreamWriter(transport, protocol, reader, loop), admitted)


async def dial(url: str, *, timeout_s: float, tls: Tls | None = None) -> TcpChannel:
    """Connect to ``scheme://host:port``.

    :raises Disconnected: no process accepts in time, or the other end cannot be trusted.
    """
    _, host, port = split(url)
    context = client_context(tls)
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(
                host,
                port,
                limit=_BUFFER_BYTES,
                ssl=context,
                server_hostname=None if context is None else host,
            )
    except TimeoutError as exc:
        raise Disconnected(
            f"{url} did not answer within {timeout_s:g} s: is it served there, and not behind a"
            " firewall?"
        ) from exc
    except ssl.SSLError as exc:
        reason = getattr(exc, "verify_message", None) or exc.reason or exc
        raise Disconnected(
            f"{url} cannot be trusted ({reason}): check the certificates that tls= names on both"
            " sides, or leave tls= out if that server uses no TLS"
        ) from exc
    except (OSError, ValueError) as exc:  # no host has such a name
        reason = getattr(exc, "strerror", None) or exc
        hint = "" if context is None else " With TLS? If not, leave tls= and --tls-ca out"
        raise Disconnected(
            f"{url} cannot be reached ({reason}): is it served there?{hint}"
        ) from exc
    return TcpChannel(reader, writer)


async def _visit(accept: Callable[[Channel], Awaitable[None]], channel: TcpChannel) -> None:
    try:
        await accept(channel)
    except Exception:  # a fault of ours ends this connection, not the server
        _logger.exception("the connection from %s was given up", channel.peer)
        await channel.close()


async def _first_address(host: str, port: int) -> str:
    """One address of a host, IPv4 if it has any: with several addresses, port 0 would give
    several ports."""
    found = await asyncio.get_running_loop().getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    *_, place = min(found, key=lambda each: each[0] != socket.AF_INET)
    return str(place[0])


def split(url: str) -> tuple[str, str, int]:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as exc:
        raise InvalidInput(f"{url!r}: {exc}") from exc
    if not parts.hostname or port is None:
        raise InvalidInput(
            f"{url!r} names no host and port: write {parts.scheme or 'ucx'}://host:port"
        )
    return parts.scheme, parts.hostname, port


def _server_context(tls: Tls | None) -> ssl.SSLContext | None:
    if tls is None:
        return None
    if tls.certificate is None:
        raise InvalidInput(
            "a server with TLS needs tls.certificate, and tls.key if the key is in another file"
        )
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    try:
        context.load_cert_chain(tls.certificate, tls.key)
    except OSError as exc:
        raise InvalidInput(f"the certificate {tls.certificate} cannot be used: {exc}") from exc
    return context


def client_context(tls: Tls | None) -> ssl.SSLContext | None:
    """The TLS context of a client.

    :raises InvalidInput: the files cannot be used.
    """
    if tls is None:
        return None
    try:
        context = ssl.create_default_context(ssl.Purpose.SERVER_AUTH, cafile=tls.trusted)
    except OSError as exc:
        raise InvalidInput(f"the certificates in {tls.trusted} cannot be used: {exc}") from exc
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    return context


def _printable(name: object) -> str:
    return f"{_bracketed(name[0])}:{name[1]}" if isinstance(name, tuple) else str(name)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
