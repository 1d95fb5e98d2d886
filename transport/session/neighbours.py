"""How two processes of one host and one user prove that they are: over an abstract Unix socket, whose ends the kernel identifies.

    server  names a socket in its first sealed frame: random, revealed to nobody else
    client -> the session's name, nonce          each asks the kernel for the other one's user and pid (SO_PEERCRED)
    server -> nonce
    client -> HMAC(key, "near client", name, both nonces)
    server -> HMAC(key, "near server", …), where its beacon is, the beacon

Only then does the server reveal where chunks are, and the client read them. The connection stays open as long as the session. While it
does, the process that the kernel identified is alive, and no other process has its pid.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import re
import secrets
import socket
import struct
from contextlib import suppress

from datastates.transport.contract import Terms
from datastates.transport.wire.near import Near, is_wanted, own_beacon
from datastates.transport.wire.sockets import keep_from_children, stop_listening, who

__all__ = ["Neighbours", "meet"]

_NONCE_BYTES = _CODE_BYTES = 32
_NAME = re.compile(r"datastates-[0-9a-f]{32}")
_MEET_S = 2.0
_AT_ONCE = 64
_place = struct.Struct(f">Q{_NONCE_BYTES}s")


class Neighbours:
    """Where processes of this host connect, for all sessions of one server. Belongs to the loop thread; ``name`` is empty where
    none can."""

    def __init__(self) -> None:
        self.name = ""
        self._server: asyncio.Server | None = None
        self._expected: dict[bytes, Terms] = {}
        self._here: dict[bytes, asyncio.StreamWriter] = {}
        self._arriving: set[asyncio.StreamWriter] = set()
        self._news = asyncio.Event()
        self._is_closed = False

    async def open(self) -> None:
        """Let them in from now on."""
        if not is_wanted():
            return
        name = f"datastates-{secrets.token_hex(16)}"
        with suppress(OSError):
            self._server = await asyncio.start_unix_server(self._visit, "\0" + name, limit=256)
            keep_from_children(self, self._server.sockets[0])
            self.name = name

    def expect(self, terms: Terms) -> None:
        """Expect the other end of a session."""
        self._expected[terms.name] = terms
        self._news.set()
        self._news = asyncio.Event()

    def has(self, name: bytes) -> bool:
        """Whether the other end of a session has proved that it is near."""
        return name in self._here

    def forget(self, name: bytes) -> None:
        """Forget a session that is over; idempotent."""
        self._expected.pop(name, None)
        writer = self._here.pop(name, None)
        if writer is not None:
            writer.close()

    async def close(self) -> None:
        """Let nobody in any more, and disconnect everybody; idempotent."""
        self._is_closed = True
        server, self._server = self._server, None
        if server is not None:
            await stop_listening(server)
        self._expected.clear()
        for writer in [*self._arriving, *self._here.values()]:
            writer.close()
        self._here.clear()

    async def _visit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = writer.get_extra_info("socket")
        _, user, _ = who(connection)
        if self._is_closed or user != os.geteuid() or len(self._arriving) >= _AT_ONCE:
            writer.close()
            return
        keep_from_children(writer, connection)
        self._arriving.add(writer)
        try:
            async with asyncio.timeout(_MEET_S):
                name = await self._greet(reader, writer)
        except (OSError, EOFError, TimeoutError):
            name = None
        finally:
            self._arriving.discard(writer)
        if name is None:
            writer.close()
        else:
            with suppress(OSError):
                await reader.read(1)  # until the other end leaves
            self.forget(name)

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes | None:
        """The name of the session whose other end has proved itself."""
        hello = await reader.readexactly(16 + _NONCE_BYTES)
        name, nonce = hello[:16], secrets.token_bytes(_NONCE_BYTES)
        while (terms := self._expected.get(name)) is None:  # it came before its own last frame of the handshake
            await self._news.wait()
        writer.write(nonce)
        said = await reader.readexactly(_CODE_BYTES)
        if name in self._here or not hmac.compare_digest(said, _code(terms, b"client", hello + nonce)):
            return None
        if name not in self._expected:
            return None  # the session ended meanwhile
        self._here[name] = writer
        writer.write(_code(terms, b"server", hello + nonce) + _place.pack(*own_beacon()))
        return name


async def meet(name: str, terms: Terms) -> Near | None:
    """The process behind such a socket, if it is of this host and user, knows the session, and can be read."""
    if not is_wanted() or not _NAME.fullmatch(name):
        return None
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.setblocking(False)
    try:
        async with asyncio.timeout(_MEET_S):
            near = await _met(connection, name, terms)
    except (OSError, EOFError, TimeoutError):
        near = None
    except BaseException:
        connection.close()
        raise
    if near is None:
        connection.close()
    else:
        keep_from_children(near, connection)
    return near


async def _met(connection: socket.socket, name: str, terms: Terms) -> Near | None:
    loop = asyncio.get_running_loop()
    await loop.sock_connect(connection, "\0" + name)
    pid, user, _ = who(connection)
    if user != os.geteuid() or pid in {0, os.getpid()}:
        return None
    hello = terms.name + secrets.token_bytes(_NONCE_BYTES)
    await loop.sock_sendall(connection, hello)
    nonce = await _exactly(connection, _NONCE_BYTES)
    await loop.sock_sendall(connection, _code(terms, b"client", hello + nonce))
    said = await _exactly(connection, _CODE_BYTES + _place.size)
    if not hmac.compare_digest(said[:_CODE_BYTES], _code(terms, b"server", hello + nonce)):
        return None
    near, seen = Near(pid, connection), bytearray(_NONCE_BYTES)
    address, beacon = _place.unpack(said[_CODE_BYTES:])
    return near if near.read(address, [memoryview(seen)]) and bytes(seen) == beacon else None


async def _exactly(connection: socket.socket, count: int) -> bytes:
    found = b""
    while len(found) < count:
        more = await asyncio.get_running_loop().sock_recv(connection, count - len(found))
        if not more:
            raise EOFError
        found += more
    return found


def _code(terms: Terms, role: bytes, said: bytes) -> bytes:
    return hmac.digest(terms.key, b"datastates near " + role + b"\0" + said, "sha256")
