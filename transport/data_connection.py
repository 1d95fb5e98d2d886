"""Our own data plane: TCP connections in addition to a session's control channel, over which chunks
go from memory to memory.

A *lane* is one connection for one direction, with its own thread at each end. The kernel copies
directly from and to the given memory, while the interpreter's lock is released. The end that
dialled the control channel dials the lanes too, at the same port, when a direction is first used.
At either end, a lane may arrive before its link is made, or after it.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import queue
import secrets
import socket
import ssl
import struct
import threading
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from datastates.errors import DatastatesError, Disconnected, InvalidInput, PeerFault, Unavailable

from . import tcp
from .connections import (
    AdmittedConnection,
    ConnectionLimiter,
    keep_from_children,
    receive_exactly,
    set_up,
)
from .contract import Channel, End, Link, Listener, Terms, Tls, Transport
from .data_plane import fail, finish
from .loop import at_stop
from .tcp import JOIN

NAME_BYTES: Final = 16
_NONCE_BYTES = 32
_header = struct.Struct(f">{len(JOIN)}s{NAME_BYTES}sQc{_NONCE_BYTES}s")
HEADER_BYTES: Final = _header.size

Direction = bytes
"""``b">"``: bytes go from the end that dialled; ``b"<"``: to it."""


@dataclass(frozen=True, slots=True)
class Join:
    """The beginning of a data connection."""

    name: bytes
    generation: int
    direction: Direction
    raw: bytes


def greet(
    connection: socket.socket, terms: Terms, generation: int, direction: Direction
) -> socket.socket:
    """Join from the end that dialled. Returns the socket to read or write, encrypted if the session
    is.

    :raises PeerFault: the other end does not know the session's key.
    """
    header = _header.pack(
        JOIN, terms.name, generation, direction, secrets.token_bytes(_NONCE_BYTES)
    )
    connection.sendall(header)
    if terms.tls is not None:
        connection = terms.tls.wrap_socket(connection, server_hostname=terms.host)
    nonce = exactly(connection, _NONCE_BYTES)
    connection.sendall(_proof(terms, b"dialled", header, nonce))
    _check(connection, terms, b"answered", header, nonce)
    return connection


def answer(
    connection: socket.socket, terms: Terms, join: Join, tls: ssl.SSLContext | None
) -> socket.socket:
    """Join from the end that was dialled, after the header."""
    if tls is not None:
        connection = tls.wrap_socket(connection, server_side=True)
    nonce = secrets.token_bytes(_NONCE_BYTES)
    connection.sendall(nonce)
    _check(connection, terms, b"dialled", join.raw, nonce)
    connection.sendall(_proof(terms, b"answered", join.raw, nonce))
    return connection


def exactly(connection: socket.socket, count: int) -> bytes:
    """Read exactly this many bytes.

    :raises ConnectionError: it ended before.
    """
    found = b""
    while len(found) < count:
        more = connection.recv(count - len(found))
        if not more:
            raise ConnectionError("it closed the connection")
        found += more
    return found


def _proof(terms: Terms, role: bytes, header: bytes, nonce: bytes) -> bytes:
    return hmac.digest(terms.key, b"datastates data " + role + b"\0" + header + nonce, "sha256")


def _check(
    connection: socket.socket, terms: Terms, role: bytes, header: bytes, nonce: bytes
) -> None:
    said = exactly(connection, 32)
    if not hmac.compare_digest(said, _proof(terms, role, header, nonce)):
        raise PeerFault(
            f"a connection for data of {terms.peer} does not know the session's key: something on"
            " the way joins it"
        )


LANES: Final = 2
"""Connections in one direction.

One leaves a core idle while the other end's core works; three move no more than two (measured)."""

MOST: Final = 4
"""The most connections that a peer may have in one direction: for another version another number
may be best."""

_AT_ONCE = 3
"""How many finished chunks wake the loop together while others are under way: each wake-up finds
Python's code gone from the caches."""

_PLACE = b"lanes"
_message = struct.Struct(">QQ")
_FROM_DIALLER = b">"
_TO_DIALLER = b"<"
_DIRECTIONS = (_FROM_DIALLER, _TO_DIALLER)
_logger = logging.getLogger(__name__)


class Lanes(End):
    """One session's end of the plane. ``generation`` returns the session's present generation;
    ``forget`` is called once this is closed.

    Every method belongs to the loop thread.
    """

    located = _PLACE

    def __init__(
        self, terms: Terms, generation: Callable[[], int], forget: Callable[[], None]
    ) -> None:
        self.terms = terms
        self._generation, self._forget = generation, forget
        self._link: _LanesLink | None = None
        self._early: list[_Lane] = []
        self._joining = 0
        self._is_closed = False

    async def address(self) -> bytes:
        """A constant: the lanes go where the control channel went."""
        return _PLACE

    async def link(self, address: bytes) -> Link:
        if address != _PLACE or self._is_closed:
            raise PeerFault(
                f"{self.terms.peer} names {address[:20]!r} as its end of a data plane that needs no"
                " address"
            )
        link = self._link = _LanesLink(self.terms, self._generation())
        early, self._early = self._early, []
        for lane in early:
            self.joined(lane)
        return link

    def join(
        self,
        connection: socket.socket,
        join: Join,
        context: ssl.SSLContext | None,
        left: Callable[[], None],
    ) -> None:
        """Take a connection that names this session. A thread checks its proof of the key.

        ``left`` is called once it is closed."""
        if self._is_closed or self._joining + len(self._early) >= 2 * MOST:
            connection.close()
            left()
            return
        self._joining += 1
        loop = asyncio.get_running_loop()

        def prove() -> socket.socket:
            connection.settimeout(self.terms.timeout_s)
            return answer(connection, self.terms, join, context)

        def ready(lane: _Lane, error: Exception | None) -> None:
            self._joining -= 1
            if error is not None:
                _logger.info(
                    "a connection for data of %s was turned away: %s", self.terms.peer, error
                )
            else:
                self.joined(lane)

        _Lane(
            connection,
            join.generation,
            is_sending=join.direction == _TO_DIALLER,
            loop=loop,
            left=left,
        ).start(prove, ready)

    def joined(self, lane: _Lane) -> None:
        """Take in a lane that has proved itself."""
        link = self._link
        if self._is_closed or (link is not None and lane.generation < link.generation):
            lane.end()
        elif link is not None and link.generation == lane.generation:
            link.take(lane)
        else:
            self._early.append(lane)

    def cut(self) -> int:
        """Break the existing connections; returns how many there were."""
        return 0 if self._link is None else self._link.cut()

    async def leave(self) -> None:
        """Let no lane join any more; the link was aborted before. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self._forget()
        for lane in self._early:
            lane.end()
        self._early.clear()
        if self._link is not None:
            await self._link.abort()


def _no_callback(number: int) -> None:
    pass


@dataclass(slots=True, eq=False)
class _Moving:
    """The pieces of some chunks under way; the link guards ``left``.

    ``is_alone``: the task that waits for it is woken at once."""

    left: int
    done: asyncio.Future[None]
    moved: Callable[[int], None] = _no_callback
    is_alone: bool = False


@dataclass(slots=True, eq=False)
class _Slot:
    """Memory that waits for a message: piece ``number`` of what is moving."""

    into: memoryview
    moving: _Moving
    number: int


@dataclass(slots=True, eq=False)
class _Outgoing:
    """Messages that wait to be sent, with consecutive tags."""

    tag: int
    data: Sequence[memoryview]
    moving: _Moving


class _LanesLink(Link):
    """Messages by tag, over all lanes of one generation.

    ``_changed`` guards what the lanes' threads share with the loop's."""

    def __init__(self, terms: Terms, generation: int) -> None:
        self._terms, self.generation = terms, generation
        self._loop = asyncio.get_running_loop()
        self._changed = threading.Condition()
        self._slots: dict[int, _Slot] = {}
        self._outgoing: queue.SimpleQueue[_Outgoing | None] = queue.SimpleQueue()
        self._waiting: set[asyncio.Future[None]] = set()
        self._over: list[asyncio.Future[None]] = []
        self._under_way = 0
        self._lanes: set[_Lane] = set()
        self._dialled: set[Direction] = set()
        self._error: DatastatesError | None = None
        self._aborting: asyncio.Task[None] | None = None
        self._idle = asyncio.Event()

    # --- the loop thread --------------------------------------------------------------------------

    async def send(self, tag: int, data: memoryview) -> None:
        await self.send_all(tag, [data], None)

    async def receive(self, tag: int, into: memoryview) -> None:
        if into.readonly:
            raise InvalidInput(f"the message of tag {tag} was to be received into read-only memory")
        await self.receive_all(tag, [into], None)

    def send_all(
        self, tag: int, data: Sequence[memoryview], moved: Callable[[int], None] | None
    ) -> asyncio.Future[None]:
        """Let one lane send all of it, straight from where the bytes are. The link must be aborted
        when the future is cancelled."""
        moving = self._moving(len(data), moved)
        if self._begin(_FROM_DIALLER, moving):
            with self._changed:
                self._wait_for(moving)
            self._outgoing.put(_Outgoing(tag, [_flat(piece) for piece in data], moving))
        return moving.done

    def receive_all(
        self, tag: int, into: Sequence[memoryview], moved: Callable[[int], None] | None
    ) -> asyncio.Future[None]:
        """Let memory wait for any lane, which receives straight into it. The link must be aborted
        when the future is cancelled."""
        moving = self._moving(len(into), moved)
        if self._begin(_TO_DIALLER, moving):
            with self._changed:
                if any(tag + n in self._slots for n in range(len(into))):
                    _fail(moving.done, PeerFault(f"tag {tag} is used twice at once"))
                    return moving.done
                self._wait_for(moving)
                self._slots.update(
                    (tag + n, _Slot(_flat(piece), moving, n)) for n, piece in enumerate(into)
                )
                self._changed.notify_all()
        return moving.done

    async def posted(self) -> None:
        """Return at once: memory that waits here waits for anyone's bytes."""

    async def abort(self) -> None:
        """Shut every lane down, and wait until none of them uses the caller's memory."""
        if self._aborting is None:
            self._aborting = asyncio.create_task(self._abort())
        await finish(self._aborting)

    def take(self, lane: _Lane) -> None:
        """Take in a lane that has proved itself."""
        is_many = sum(each.is_sending == lane.is_sending for each in self._lanes) >= MOST
        if self._error is not None or is_many:
            lane.end()
            return
        self._lanes.add(lane)
        lane.give(self)

    def cut(self) -> int:
        """Break every lane."""
        for lane in self._lanes:
            lane.cut()
        return len(self._lanes)

    def _moving(self, left: int, moved: Callable[[int], None] | None) -> _Moving:
        done = self._loop.create_future()
        return _Moving(left, done, moved or _no_callback, is_alone=moved is None)

    def _begin(self, direction: Direction, moving: _Moving) -> bool:
        if self._error is None and self._terms.where is not None and direction not in self._dialled:
            self._dialled.add(direction)
            for _ in range(LANES):
                self._dial(self._terms.where, direction)
        if self._error is not None:
            _fail(moving.done, self._error)
            return False
        return True

    def _wait_for(self, moving: _Moving) -> None:
        self._waiting.add(moving.done)
        self._under_way += not moving.is_alone

    def _dial(self, where: tuple[str, int], direction: Direction) -> None:
        terms = self._terms
        try:
            connection = socket.socket(socket.AF_INET6 if ":" in where[0] else socket.AF_INET)
        except OSError as exc:
            self.fail(Disconnected(f"the data plane of {terms.peer} cannot be reached ({exc})"))
            return

        def prove() -> socket.socket:
            connection.settimeout(terms.timeout_s)
            connection.connect(where)
            return greet(connection, terms, self.generation, direction)

        def ready(lane: _Lane, error: Exception | None) -> None:
            if error is not None:
                self.fail(
                    Disconnected(f"the data plane of {terms.peer} cannot be reached ({error})")
                )
            else:
                lane.give(self)

        lane = _Lane(
            connection, self.generation, is_sending=direction == _FROM_DIALLER, loop=self._loop
        )
        self._lanes.add(lane)
        lane.start(prove, ready)

    def fail(self, error: DatastatesError) -> None:
        """End the link: nothing more comes or goes, and every waiting task gets the error."""
        with self._changed:
            if self._error is None:
                self._error = error
            self._slots.clear()
            self._changed.notify_all()
        self._finish()
        for lane in self._lanes:
            lane.end()
            self._outgoing.put(None)
        for done in self._waiting:
            _fail(done, self._error)
        self._waiting.clear()

    async def _abort(self) -> None:
        self.fail(Disconnected("the link was aborted"))
        while any(lane.is_busy for lane in self._lanes):
            self._idle.clear()
            await self._idle.wait()

    def _finish(self) -> None:
        with self._changed:
            over, self._over = self._over, []
        for done in over:
            self._waiting.discard(done)
            if not done.done():
                done.set_result(None)

    # --- the lanes' threads -----------------------------------------------------------------------

    def next_slot(self, lane: _Lane, tag: int, length: int) -> _Slot | None:
        """The memory that waits for a tag, once there is some; the lane is then busy with it.

        None: there will be none."""
        with self._changed:
            while tag not in self._slots and self._error is None:
                self._changed.wait()
            slot = self._slots.pop(tag, None)
            if slot is None or self._error is not None:
                return None
            if slot.into.nbytes != length:
                fault = PeerFault(
                    f"the message of tag {tag} has {length} bytes, {slot.into.nbytes} were"
                    " waited for"
                )
                self._call(self._refuse, slot, fault)
                return None
            lane.is_busy = True
            return slot

    def next_outgoing(self, lane: _Lane) -> _Outgoing | None:
        """The next message to send; the lane is then busy with it. None: nothing more."""
        outgoing = self._outgoing.get()
        with self._changed:
            if outgoing is None or self._error is not None:
                return None
            lane.is_busy = True
            return outgoing

    def moved(self, lane: _Lane, moving: _Moving, count: int = 1) -> None:
        """Note that ``count`` messages are done."""
        lane.is_busy = False
        with self._changed:
            moving.left -= count
            if moving.left:
                return
            self._over.append(moving.done)
            self._under_way -= not moving.is_alone
            is_due = moving.is_alone or len(self._over) >= _AT_ONCE or self._under_way < _AT_ONCE
        if is_due:
            self._call(self._finish)

    def ended(self, lane: _Lane, error: str) -> None:
        """Note that a lane has ended."""
        lane.is_busy = False
        self._call(self._lost, lane, error)

    def _lost(self, lane: _Lane, error: str) -> None:
        self._lanes.discard(lane)
        if self._error is None:
            self.fail(
                Disconnected(
                    f"the data plane of {self._terms.peer} is gone:"
                    f" {error or 'it closed the connection'}"
                )
            )
        self._idle.set()

    def _refuse(self, slot: _Slot, fault: PeerFault) -> None:
        _fail(slot.moving.done, fault)
        self.fail(Disconnected(str(fault)))

    def _call(self, work: Callable[..., object], *arguments: Any) -> None:
        with suppress(RuntimeError):  # the loop was closed, and its tasks ended
            self._loop.call_soon_threadsafe(work, *arguments)


class _Lane:
    """One connection and its thread, which first proves the connection and then waits for the
    link that it is for."""

    def __init__(
        self,
        connection: socket.socket,
        generation: int,
        *,
        is_sending: bool,
        loop: asyncio.AbstractEventLoop,
        left: Callable[[], None] = lambda: None,
    ) -> None:
        self._connection, self.generation, self.is_sending, self._loop = (
            connection,
            generation,
            is_sending,
            loop,
        )
        self._left = left
        self._link: queue.SimpleQueue[_LanesLink | None] = queue.SimpleQueue()
        self.is_busy = False
        keep_from_children(self, connection)

    def start(
        self, prove: Callable[[], socket.socket], ready: Callable[[_Lane, Exception | None], None]
    ) -> None:
        """Start the thread; ``ready`` is called on the loop when ``prove`` has ended in it."""
        threading.Thread(
            target=self._run, args=(prove, ready), name="datastates-lane", daemon=True
        ).start()

    def give(self, link: _LanesLink) -> None:
        """Give the lane the link to work for."""
        self._link.put(link)

    def end(self) -> None:
        """Shut the lane down: the thread ends. On the loop's thread."""
        self._link.put(None)
        self.cut()

    def cut(self) -> None:
        """Break the connection."""
        with suppress(OSError):  # it is not connected yet, or not any more
            # TLS's own would remove the key while the thread uses it
            socket.socket.shutdown(self._connection, socket.SHUT_RDWR)

    def _run(
        self, prove: Callable[[], socket.socket], ready: Callable[[_Lane, Exception | None], None]
    ) -> None:
        link: _LanesLink | None = None
        error = ""
        try:
            if self._prove(prove, ready):
                link = self._link.get()
            if link is not None:
                (self._send if self.is_sending else self._receive)(link)
        except (OSError, DatastatesError) as exc:
            error = str(exc)  # the exception itself would keep the memory that it was using alive
        finally:
            self._connection.close()
            with suppress(RuntimeError):  # the loop has ended, with everything that counts
                self._loop.call_soon_threadsafe(self._left)
            if link is not None:
                link.ended(self, error)

    def _prove(
        self, prove: Callable[[], socket.socket], ready: Callable[[_Lane, Exception | None], None]
    ) -> bool:
        error: Exception | None = None
        try:
            self._connection = prove()
            keep_from_children(self, self._connection)
            set_up(self._connection)
            self._connection.settimeout(None)
        except (OSError, DatastatesError) as exc:
            error = exc
        try:
            self._loop.call_soon_threadsafe(ready, self, error)
        except RuntimeError:
            return False
        return error is None

    def _send(self, link: _LanesLink) -> None:
        while (outgoing := link.next_outgoing(self)) is not None:
            for n, data in enumerate(outgoing.data):
                self._put(memoryview(_message.pack(outgoing.tag + n, data.nbytes)), data)
                outgoing.moving.moved(n)
            link.moved(self, outgoing.moving, len(outgoing.data))
            del outgoing, data

    def _put(self, header: memoryview, data: memoryview) -> None:
        left = [header, data]
        if isinstance(self._connection, ssl.SSLSocket):
            for part in left:
                self._connection.sendall(part)
            return
        while left:
            left = _rest(left, self._connection.sendmsg(left))

    def _receive(self, link: _LanesLink) -> None:
        header = memoryview(bytearray(_message.size))
        while self._fill(header):
            tag, length = _message.unpack(header)
            slot = link.next_slot(self, tag, length)
            if slot is None or not self._fill(slot.into):
                return
            slot.moving.moved(slot.number)
            link.moved(self, slot.moving)
            del slot

    def _fill(self, memory: memoryview) -> bool:
        """Fill the memory with received bytes; False if the connection ends before."""
        flags = 0 if isinstance(self._connection, ssl.SSLSocket) else socket.MSG_WAITALL
        while memory:
            count = self._connection.recv_into(memory, memory.nbytes, flags)
            if not count:
                return False
            memory = memory[count:]
        return True


def _rest(left: Sequence[memoryview], sent: int) -> list[memoryview]:
    """The unsent part of some pieces after ``sent`` bytes were sent."""
    rest = []
    for piece in left:
        if sent < piece.nbytes:
            rest.append(piece[sent:])
        sent = max(0, sent - piece.nbytes)
    return rest


def _flat(memory: memoryview) -> memoryview:
    return memory if memory.format == "B" and memory.ndim == 1 else memory.cast("B")


def _fail(done: asyncio.Future[None], error: DatastatesError) -> None:
    fail(done, error if isinstance(error, PeerFault) else Disconnected(str(error)))


# The transport of ``tcp://host:port``. It has one connection for control frames, and more for data,
# to the same port.


_HEADER_S = 10.0


class TcpTransport(Transport):
    """Our own transport.

    Data connections find their session by its name, whichever port of this process they came to."""

    scheme = "tcp"

    @property
    def planes(self) -> tuple[str, ...]:
        return ("tcp",)

    def __init__(self) -> None:
        self._sessions: dict[bytes, Lanes] = {}
        self._is_watched = False

    async def listen(
        self,
        url: str,
        accept: Callable[[Channel], Awaitable[None]],
        *,
        tls: Tls | None = None,
        limiter: ConnectionLimiter | None = None,
    ) -> Listener:
        """Listen on one address, for control channels and for the data of their sessions."""
        return await tcp.listen(url, accept, tls=tls, join=self._join, limiter=limiter)

    async def dial(self, url: str, *, timeout_s: float, tls: Tls | None = None) -> Channel:
        return await tcp.dial(url, timeout_s=timeout_s, tls=tls)

    def end(self, plane: str, terms: Terms, generation: Callable[[], int]) -> End:
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
        """Break every data connection, as a network does; returns how many there were.

        For tests."""
        return sum(lanes.cut() for lanes in self._sessions.values())

    def _forget(self, name: bytes) -> None:
        self._sessions.pop(name, None)

    async def _stop(self) -> None:
        self._is_watched = False
        await TcpTransport.close(self)

    async def _join(
        self,
        connection: socket.socket,
        context: ssl.SSLContext | None,
        admitted: AdmittedConnection,
    ) -> None:
        try:
            async with asyncio.timeout(_HEADER_S):
                raw = await receive_exactly(connection, HEADER_BYTES)
        except (OSError, EOFError, TimeoutError):
            raw = bytes(HEADER_BYTES)
        magic, name, generation, direction, _ = _header.unpack(raw)
        lanes = self._sessions.get(name)
        if magic != JOIN or direction not in _DIRECTIONS or lanes is None:
            connection.close()
            admitted.release()
        else:
            admitted.hold()  # the name is known to the peer only
            lanes.join(
                connection, Join(name, generation, direction, raw), context, admitted.release
            )
