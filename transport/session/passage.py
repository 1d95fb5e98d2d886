"""Leads a process that cannot reach a server to that server, through a process that can.

    a program -> Passage: a Unix socket in a folder of this user -> Gate: a port of the other process -> the server

    passage -> "dsPass1\n", nonce
    gate    -> nonce
    passage -> HMAC(key, "passage", both nonces)
    gate    -> HMAC(key, "gate", both nonces)
    both    -> the bytes of the server's own protocol, as they are

A gate leads only to the server for which it was made. Every process that knows the key passes; strangers give way to newcomers
(``admission``). The passage encrypts nothing: what passes is as safe on the network as it would be on the way to the server without TLS.
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
from datastates.system.admission import Admission, Limits
from datastates.transport import loop
from datastates.transport.wire.arrival import Arrival, Door
from datastates.transport.wire.sockets import keep_from_children, let_go_by, set_up, stop_listening, who
from datastates.transport.wire.visitors import Visitors

__all__ = ["Gate", "Passage"]

_HELLO = b"dsPass1\n"
_NONCE_BYTES = _CODE_BYTES = 32
_MEET_S = 5.0
_MOST_STRANGERS = 64
_BACKLOG = 128
_BUFFER_BYTES = 1 << 18


class Gate:
    """Lets processes that know ``key`` through to ``server``: host and port, or the path of a Unix socket. Use it on any thread but the
    loop's.

    It listens on every address of this machine, on a port that the system chooses; ``most`` connections pass at once.
    """

    def __init__(self, server: tuple[str, int] | str, key: bytes, *, most: int) -> None:
        self._server, self._key, self._most = server, key, most
        places = most + _MOST_STRANGERS
        self._door = Door(Admission(Limits(connections=places, per_address=places, proof_s=_MEET_S)))
        self._visits: dict[asyncio.Task[None], socket.socket] = {}
        self._passing: set[asyncio.StreamWriter] = set()
        self._listening: socket.socket | None = None
        self.port = loop.run(self._open())

    @property
    def passing(self) -> int:
        """How many connections are passing now."""
        return len(self._passing)

    def close(self) -> None:
        """Let nobody through any more; idempotent."""
        with suppress(Closed):  # the process is ending, and has closed all its connections
            loop.run(self._close())

    async def _open(self) -> int:
        family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
        self._listening = socket.create_server(("", 0), family=family, backlog=_BACKLOG, dualstack_ipv6=family == socket.AF_INET6)
        self._listening.setblocking(False)
        keep_from_children(self, self._listening)
        port = int(self._listening.getsockname()[1])
        self._visitors = Visitors(self._listening, self._door, word=_word, arrived=self._come, name=f"port {port}")
        return port

    async def _close(self) -> None:
        if self._listening is None:
            return
        self._visitors.close()
        self._listening.close()
        self._listening = None
        let_go_by(self)
        visits = dict(self._visits)
        for visit in visits:
            visit.cancel()
        if visits:
            await asyncio.wait(visits)
        for connection in visits.values():  # a task that was cancelled before it began has closed nothing
            connection.close()

    def _come(self, connection: socket.socket, arrival: Arrival, _: bytes) -> None:
        visit = asyncio.create_task(self._visit(connection, arrival))
        self._visits[visit] = connection
        visit.add_done_callback(self._visits.pop)
        visit.add_done_callback(lambda _: arrival.release())

    async def _visit(self, connection: socket.socket, arrival: Arrival) -> None:
        try:
            reader, writer = await asyncio.open_connection(sock=connection, limit=_BUFFER_BYTES)
        except OSError:  # it left at once
            connection.close()
            return
        try:
            is_ours = len(self._passing) < self._most and await self._greet(reader, writer)
            if is_ours:
                arrival.hold()
                await _joined(reader, writer, self._dial, self._passing)
        except (OSError, EOFError):
            pass
        finally:
            writer.close()

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        set_up(writer.get_extra_info("socket"))
        theirs, ours = (await reader.readexactly(len(_HELLO) + _NONCE_BYTES))[len(_HELLO) :], secrets.token_bytes(_NONCE_BYTES)
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

    ``gates`` are hosts and ports, in the order in which they are tried, anew for each connection. Use it on any thread but the loop's.
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
        """Close the socket and remove it; idempotent."""
        with suppress(Closed):  # the process is ending, and has closed all its connections
            loop.run(self._close())
        shutil.rmtree(self.folder, ignore_errors=True)

    async def _close(self) -> None:
        if self._listening is not None:
            await stop_listening(self._listening)
        for writer in list(self._passing):
            writer.close()

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
        writer.write(_HELLO + ours)
        both = ours + await reader.readexactly(_NONCE_BYTES)
        writer.write(_code(self._key, b"passage", both))
        return hmac.compare_digest(await reader.readexactly(_CODE_BYTES), _code(self._key, b"gate", both))


async def _joined(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, dial: Any, passing: set[asyncio.StreamWriter]) -> None:
    """Pass bytes both ways between this connection and the dialled one, until either ends."""
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


def _word(said: bytes) -> int:
    return len(_HELLO) + _NONCE_BYTES if _HELLO.startswith(said[: len(_HELLO)]) else 0


def _code(key: bytes, role: bytes, nonces: bytes) -> bytes:
    return hmac.digest(key, b"datastates " + role + b"\0" + nonces, "sha256")
