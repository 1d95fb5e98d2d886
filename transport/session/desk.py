"""A desk where the processes of one node hand in bytes and get answers, for many at once, over an abstract Unix socket.

    caller -> nonce                  each asks the kernel for the other one's user (SO_PEERCRED)
    desk   -> nonce
    caller -> HMAC(key, "desk caller", both nonces)
    desk   -> HMAC(key, "desk", both nonces)
    caller -> what it hands in       desk -> the answer      (each with its length before it; any number of times)

Every process that knows the key is accepted; the processes of a job exchange it among themselves.

Rules:
- Requests that come while an answer is being worked out are answered together the next time. The first one waits for others for at most
  20 ms, at most 1 ms for each seat, and not at all once every connected caller has handed something in.
- A caller whose desk does not answer closes its connection, and only then does the work itself. The desk can see that
  (``Asked.is_awaited``), and must not do work for a caller that no longer waits.
- An empty answer means that the caller has to do the work itself.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import secrets
import socket
import struct
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field

from datastates.errors import Closed, Disconnected
from datastates.transport import loop
from datastates.transport.wire.sockets import keep_from_children, stop_listening, who

__all__ = ["MOST_BYTES", "Asked", "Caller", "Desk", "Place"]

_logger = logging.getLogger(__name__)

LINGER_S, LINGER_FOR_EACH_S = 0.02, 0.001
"""The longest wait between the first request and the start of the work on it: in all, and for each seat."""

ANSWER_S = 10.0
"""How long a caller waits for an answer."""

RETRY_S = 30.0
"""How long a caller whose desk did not answer does everything itself."""

MOST_BYTES = 16 << 20
"""The most bytes of a request, and of an answer."""

_NONCE_BYTES = _CODE_BYTES = 32
_MEET_S = 2.0
_MOST_STRANGERS = 64
_length = struct.Struct(">I")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a desk is and how to open it, both drawn at random: its address among the abstract sockets, and the key."""

    name: str
    key: bytes = field(repr=False)

    @staticmethod
    def drawn() -> Place:
        """A new place that no other process knows yet."""
        return Place(f"datastates-desk-{secrets.token_hex(16)}", secrets.token_bytes(_NONCE_BYTES))


class Asked:
    """What one caller handed in. The caller waits as long as ``is_awaited``, which any thread may ask."""

    def __init__(self, said: bytes, connection: socket.socket, answer: asyncio.Future[bytes]) -> None:
        self.said, self._connection, self.answer = said, connection, answer
        keep_from_children(self, connection)

    @property
    def is_awaited(self) -> bool:
        """Whether the caller is still waiting."""
        try:
            return bool(self._connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        except BlockingIOError:
            return True
        except OSError:
            return False

    def let_go(self, answer: bytes) -> None:
        """Give the answer, on the loop's thread. The connection stays open until then, whatever else happens to it here."""
        self._connection.close()
        if not self.answer.done():
            self.answer.set_result(answer)


class Desk:
    """Accepts what is handed in at ``place``. ``work`` answers several requests at once, on a thread of its own, one call at a time.

    ``open`` and ``close`` may be called on any thread but the loop's; the rest belongs to the loop's.
    """

    def __init__(self, place: Place, work: Callable[[Sequence[Asked]], Sequence[bytes]], *, seats: int) -> None:
        self._place, self._work, self._seats = place, work, seats
        self._server: asyncio.Server | None = None
        self._visits: set[asyncio.Task[None]] = set()
        self._here: set[asyncio.StreamWriter] = set()
        self._strangers: set[asyncio.StreamWriter] = set()
        self._waiting: list[Asked] = []
        self._thread = ThreadPoolExecutor(1, "datastates-desk")
        self._working: asyncio.Task[None] | None = None
        self._is_closed = False

    def open(self) -> bool:
        """Let callers in; returns False if this system has no such sockets."""
        return loop.run(self._open())

    def close(self) -> None:
        """Finish the current work, then let nobody in; waiting callers are told to do the work themselves. Idempotent."""
        with suppress(Closed):  # the process is ending, and has closed all its connections
            loop.run(self._close())
        self._thread.shutdown(wait=False)

    async def _open(self) -> bool:
        if sys.platform != "linux":
            return False
        self._news = asyncio.Event()
        try:
            self._server = await asyncio.start_unix_server(self._come, "\0" + self._place.name, backlog=max(128, self._seats))
        except OSError:
            return False
        keep_from_children(self, self._server.sockets[0])
        self._working = asyncio.create_task(self._keep_working())
        return True

    async def _close(self) -> None:
        self._is_closed = True
        if self._server is None:
            return
        await stop_listening(self._server)
        self._news.set()
        if self._working is not None and self._working.get_loop() is asyncio.get_running_loop():
            await asyncio.wait([self._working])
        for writer in [*self._here, *self._strangers]:
            writer.close()

    def _come(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        visit = asyncio.create_task(self._visit(reader, writer))
        self._visits.add(visit)  # the loop itself keeps no task
        visit.add_done_callback(self._visits.discard)

    async def _visit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = writer.get_extra_info("socket")
        is_ours = who(connection)[1] == os.geteuid() and len(self._strangers) < _MOST_STRANGERS and len(self._here) < 2 * self._seats
        if not is_ours or self._is_closed:
            writer.close()
            return
        keep_from_children(writer, connection)
        try:
            self._strangers.add(writer)
            async with asyncio.timeout(_MEET_S):
                is_ours = await self._greet(reader, writer)
            self._strangers.discard(writer)
            if is_ours:
                self._here.add(writer)
                await self._serve(reader, writer)
        except (OSError, EOFError, TimeoutError):
            pass
        finally:
            self._strangers.discard(writer)
            self._here.discard(writer)
            self._news.set()
            writer.close()

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Whether the caller knows the key."""
        theirs, ours = await reader.readexactly(_NONCE_BYTES), secrets.token_bytes(_NONCE_BYTES)
        writer.write(ours)
        said = await reader.readexactly(_CODE_BYTES)
        if not hmac.compare_digest(said, _code(self._place, b"desk caller", theirs + ours)):
            return False
        writer.write(_code(self._place, b"desk", theirs + ours))
        return True

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while not self._is_closed:
            (length,) = _length.unpack(await reader.readexactly(_length.size))
            if length > MOST_BYTES:
                return
            said = await reader.readexactly(length)
            answer = await self._answered(said, writer)
            writer.write(_length.pack(len(answer)) + answer)
            await writer.drain()

    async def _answered(self, said: bytes, writer: asyncio.StreamWriter) -> bytes:
        """What ``work`` answers, or nothing once the desk has closed: nobody would be left to tell this caller."""
        if self._is_closed:
            return b""
        asked = Asked(said, writer.get_extra_info("socket").dup(), asyncio.get_running_loop().create_future())
        self._waiting.append(asked)
        self._news.set()
        return await asked.answer

    async def _keep_working(self) -> None:
        while True:
            await self._linger()
            if self._is_closed:
                break
            asked, self._waiting = self._waiting, []
            answers: Sequence[bytes] = [b""] * len(asked)
            try:
                answers = await asyncio.get_running_loop().run_in_executor(self._thread, self._work, asked)
            except Exception:  # whatever it is, each caller will find out by itself
                _logger.exception("what %d processes of this node handed in was not done here: each does it by itself", len(asked))
            finally:
                for each, answer in zip(asked, answers, strict=True):
                    each.let_go(answer if len(answer) <= MOST_BYTES else b"")
        for each in self._waiting:
            each.let_go(b"")

    async def _linger(self) -> None:
        """Wait until one caller has handed something in, and then until all others have, or the time is up."""
        ends_at = None
        while not self._is_closed and (not self._waiting or len(self._waiting) < len(self._here)):
            if self._waiting and ends_at is None:
                ends_at = time.monotonic() + min(LINGER_S, self._seats * LINGER_FOR_EACH_S)
            self._news.clear()
            try:
                async with asyncio.timeout(None if ends_at is None else ends_at - time.monotonic()):
                    await self._news.wait()
            except TimeoutError:
                return


class Caller:
    """One end of a connection to a desk, made when it is needed. One thread at a time; blocking."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._connection: socket.socket | None = None
        self._not_before = -RETRY_S

    def ask(self, said: bytes) -> bytes:
        """The answer to a request; empty if the caller has to do the work itself.

        :raises Disconnected: the desk did not answer, or did not accept this process, and will not do the work.
        """
        if time.monotonic() < self._not_before:
            raise Disconnected("the desk of this node did not answer lately")
        try:
            if self._connection is None:
                self._connection = self._meet()
            self._connection.sendall(_length.pack(len(said)) + said)
            return _answer(self._connection)
        except (OSError, EOFError) as exc:
            self.close()
            self._not_before = time.monotonic() + RETRY_S
            raise Disconnected(f"the desk of this node does not answer ({str(exc) or 'it is gone'})") from exc
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the connection, and stop waiting; idempotent."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _meet(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            keep_from_children(self, connection)
            connection.settimeout(_MEET_S)
            connection.connect("\0" + self._place.name)
            self._prove(connection)
            connection.settimeout(ANSWER_S)
        except BaseException:
            connection.close()
            raise
        return connection

    def _prove(self, connection: socket.socket) -> None:
        """Prove that this process knows the key, and check that the other end does."""
        if who(connection)[1] != os.geteuid():
            raise EOFError("somebody else sits there")
        ours = secrets.token_bytes(_NONCE_BYTES)
        connection.sendall(ours)
        both = ours + _exactly(connection, _NONCE_BYTES)
        connection.sendall(_code(self._place, b"desk caller", both))
        if not hmac.compare_digest(_exactly(connection, _CODE_BYTES), _code(self._place, b"desk", both)):
            raise EOFError("somebody else sits there")


def _answer(connection: socket.socket) -> bytes:
    (length,) = _length.unpack(_exactly(connection, _length.size))
    if length > MOST_BYTES:
        raise EOFError("that is no answer")
    return _exactly(connection, length)


def _exactly(connection: socket.socket, count: int) -> bytes:
    """Exactly so many bytes, within the connection's time-out for all of them."""
    ends_at, timeout_s = time.monotonic() + (connection.gettimeout() or ANSWER_S), connection.gettimeout()
    found = bytearray()
    try:
        while len(found) < count:
            connection.settimeout(max(1e-3, ends_at - time.monotonic()))
            more = connection.recv(min(count - len(found), 1 << 20))
            if not more:
                raise EOFError
            found += more
    finally:
        connection.settimeout(timeout_s)
    return bytes(found)


def _code(place: Place, role: bytes, nonces: bytes) -> bytes:
    return hmac.digest(place.key, b"datastates " + role + b"\0" + place.name.encode() + nonces, "sha256")
