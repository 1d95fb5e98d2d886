"""A way to a server for a process that cannot reach it: through one that can.

    a program -> Passage: a Unix socket in a folder of this user -> Gate: a port of the other process -> the server

    passage -> nonce
    gate    -> nonce
    passage -> HMAC(key, "passage", both nonces)
    gate    -> HMAC(key, "gate", both nonces)
    both    -> the bytes of the server's own protocol, as they are

A gate leads to the one server that it was made for. Whoever knows the key passes; a stranger costs a connection for some seconds. The
passage encrypts nothing: what passes is as safe on the network as it would be on the way to the server without TLS.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import secrets
import shutil
import socket
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from datastates.errors import Closed
from datastates.transport import loop
from datastates.transport.wire.sockets import keep_from_children, set_up, stop_listening, who

__all__ = ["Gate", "Passage"]

_NONCE_BYTES = _CODE_BYTES = 32
_MEET_S = 5.0
_MOST_STRANGERS = 64
_BUFFER_BYTES = 1 << 18


class Gate:
    """Lets who knows ``key`` through to ``server``: host and port, or the path of a Unix socket. Any thread but the loop's.

    It listens on every address of this machine, on a port that the system chooses; ``most`` connections pass at once.
    """

    def __init__(self, server: tuple[str, int] | str, key: bytes, *, most: int) -> None:
        self._server, self._key, self._most = server, key, most
        self._strangers = 0
        self._visits: set[asyncio.Task[None]] = set()
        self._passing: set[asyncio.StreamWriter] = set()
        self._listening: asyncio.Server | None = None
        self.port = loop.run(self._open())

    @property
    def passing(self) -> int:
        """How many connections pass just now."""
        return len(self._passing)

    def close(self) -> None:
        """Let nobody through any more; idempotent."""
        with suppress(Closed):  # the process is ending, and has closed all its connections
            loop.run(_closed(self._listening, self._passing))

    async def _open(self) -> int:
        family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
        listening = socket.create_server(("", 0), family=family, dualstack_ipv6=family == socket.AF_INET6)
        keep_from_children(self, listening)
        self._listening = await asyncio.start_server(self._come, sock=listening, limit=_BUFFER_BYTES)
        return int(listening.getsockname()[1])

    def _come(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        visit = asyncio.create_task(self._visit(reader, writer))
        self._visits.add(visit)  # the loop itself keeps no task
        visit.add_done_callback(self._visits.discard)

    async def _visit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._strangers >= _MOST_STRANGERS or len(self._passing) >= self._most:
            writer.close()
            return
        keep_from_children(writer, writer.get_extra_info("socket"))
        is_ours = False
        self._strangers += 1
        try:
            async with asyncio.timeout(_MEET_S):
                is_ours = await self._greet(reader, writer)
        except (OSError, EOFError, TimeoutError):
            pass
        finally:
            self._strangers -= 1
        if is_ours:
            await _joined(reader, writer, self._dial, self._passing)
        else:
            writer.close()

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        set_up(writer.get_extra_info("socket"))
        theirs, ours = await reader.readexactly(_NONCE_BYTES), secrets.token_bytes(_NONCE_BYTES)
        writer.write(ours)
        if not hmac.compare_digest(await reader.readexactly(_CODE_BYTES), _code(self._key, b"passage", theirs + ours)):
            return False
        writer.write(_code(self._key, b"gate", theirs + ours))
        return True

    async def _dial(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if isinstance(self._server, str):
            return await asyncio.open_unix_connection(self._server, limit=_BUFFER_BYTES)
        return await asyncio.open_connection(*self._server, limit=_BUFFER_BYTES)


class Passage:
    """A Unix socket named ``name`` in ``folder``, for processes of this user, that leads through the first of these gates that answers.

    ``gates`` are hosts and ports, in the order in which they are tried, each time anew. Any thread but the loop's.
    """

    def __init__(self, gates: Sequence[tuple[str, int]], key: bytes, *, name: str) -> None:
        self._gates, self._key = gates, key
        self._visits: set[asyncio.Task[None]] = set()
        self._passing: set[asyncio.StreamWriter] = set()
        self._listening: asyncio.Server | None = None
        self.folder = Path(tempfile.mkdtemp(prefix="datastates-"))  # nobody else may look into it
        loop.run(self._open(name))

    def is_open(self) -> bool:
        """Whether one of the gates lets this process through."""
        return loop.run(self._try())

    def close(self) -> None:
        """Close the socket and take it away; idempotent."""
        with suppress(Closed):  # the process is ending, and has closed all its connections
            loop.run(_closed(self._listening, self._passing))
        shutil.rmtree(self.folder, ignore_errors=True)

    async def _open(self, name: str) -> None:
        self._listening = await asyncio.start_unix_server(self._come, self.folder / name, limit=_BUFFER_BYTES)
        keep_from_children(self, self._listening.sockets[0])

    def _come(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        visit = asyncio.create_task(self._visit(reader, writer))
        self._visits.add(visit)  # the loop itself keeps no task
        visit.add_done_callback(self._visits.discard)

    async def _visit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if who(writer.get_extra_info("socket"))[1] not in (os.geteuid(), -1):
            writer.close()
            return
        keep_from_children(writer, writer.get_extra_info("socket"))
        await _joined(reader, writer, self._dial, self._passing)

    async def _try(self) -> bool:
        try:
            _, writer = await self._dial()
        except OSError:
            return False
        writer.close()
        return True

    async def _dial(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        for host, port in self._gates:
            writer = None
            try:
                async with asyncio.timeout(_MEET_S):
                    reader, writer = await asyncio.open_connection(host, port, limit=_BUFFER_BYTES)
                    keep_from_children(writer, writer.get_extra_info("socket"))
                    set_up(writer.get_extra_info("socket"))
                    if await self._prove(reader, writer):
                        return reader, writer
            except (OSError, EOFError, TimeoutError, UnicodeError):
                pass
            if writer is not None:
                writer.close()
        raise ConnectionError("no gate answers")

    async def _prove(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        ours = secrets.token_bytes(_NONCE_BYTES)
        writer.write(ours)
        both = ours + await reader.readexactly(_NONCE_BYTES)
        writer.write(_code(self._key, b"passage", both))
        return hmac.compare_digest(await reader.readexactly(_CODE_BYTES), _code(self._key, b"gate", both))


async def _joined(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, dial: Any, passing: set[asyncio.StreamWriter]) -> None:
    """Pass bytes on both ways between this connection and the one that is dialled, until either ends."""
    passing.add(writer)
    onward: asyncio.StreamWriter | None = None
    try:
        back, onward = await dial()
        keep_from_children(onward, onward.get_extra_info("socket"))
        pouring = [asyncio.create_task(_pour(reader, onward)), asyncio.create_task(_pour(back, writer))]
        try:
            await asyncio.wait(pouring, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pour in pouring:
                pour.cancel()
    except OSError:
        pass
    finally:
        passing.discard(writer)
        for each in (writer, onward):
            if each is not None:
                each.close()


async def _pour(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(_BUFFER_BYTES):
            writer.write(data)
            await writer.drain()


async def _closed(listening: asyncio.Server | None, passing: set[asyncio.StreamWriter]) -> None:
    if listening is not None:
        await stop_listening(listening)
    for writer in list(passing):
        writer.close()


def _code(key: bytes, role: bytes, nonces: bytes) -> bytes:
    return hmac.digest(key, b"datastates " + role + b"\0" + nonces, "sha256")
