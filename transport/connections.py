"""Options of all our sockets, and the closing of their copies in a forked child."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import ipaddress
import logging
import os
import socket
import struct
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from datastates.system.admission import Admission, Place
from datastates.system.logs import RateLimitFilter


def set_up(connection: Any) -> None:
    """Set the options of all our connections: nothing is delayed before sending, and a peer that
    vanished is noticed."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_KEEPIDLE"):
        # Linux: a peer that vanished is noticed within a minute, not two hours
        for option, value in (
            (socket.TCP_KEEPIDLE, 30),
            (socket.TCP_KEEPINTVL, 10),
            (socket.TCP_KEEPCNT, 3),
        ):
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


def keep_from_children(owner: object, connection: Any) -> None:
    """Make a child that is forked while ``owner`` lives close its copy of this socket."""
    _open[owner] = connection


def let_go_by(owner: object) -> None:
    """Note that the owner has closed it."""
    _open.pop(owner, None)


async def receive_exactly(connection: socket.socket, count: int) -> bytes:
    """Exactly ``count`` bytes from a non-blocking socket.

    :raises EOFError: it ended before.
    """
    found = b""
    while len(found) < count:
        more = await asyncio.get_running_loop().sock_recv(connection, count - len(found))
        if not more:
            raise EOFError
        found += more
    return found


async def stop_listening(server: asyncio.Server) -> None:
    """Close an asyncio server, once connections accepted before have arrived: it fails for those
    half in, and leaves their sockets open."""
    for each in server.sockets:
        asyncio.get_running_loop().remove_reader(each.fileno())
    await asyncio.sleep(0)
    server.close()


_open: weakref.WeakKeyDictionary[object, Any] = weakref.WeakKeyDictionary()


def _let_go_of_inherited() -> None:
    """Close the parent's sockets in a forked child.

    If it held them, no peer would notice that the parent died, and no port be free."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for inherited in list(_open.values()):
        if inherited.fileno() >= 0:
            # keeps the number in use, so that a later close does not close another file
            os.dup2(nothing, inherited.fileno(), inheritable=False)
    os.close(nothing)
    _open.clear()


os.register_at_fork(after_in_child=_let_go_of_inherited)


# A connection from ``accept`` until its other end has proved itself: it has a place, and a
# deadline for the proof.


class ConnectionLimiter:
    """Admits connections while an ``Admission`` has free places. Belongs to the loop thread.

    ``late`` counts connections that missed the deadline. ``foreign`` counts connections whose first
    bytes are of another protocol. ``unproved`` counts these and all other connections that ended
    without having proved anything, except late and displaced ones.
    """

    def __init__(self, admission: Admission | None = None) -> None:
        self.admission = Admission() if admission is None else admission
        self.late = self.foreign = self.unproved = 0

    @property
    def refused(self) -> int:
        """The number of connections that never became a peer's."""
        return self.admission.refused + self.admission.displaced + self.late + self.unproved

    def admit(
        self, address: str, descriptor: int, end: Callable[[], None]
    ) -> AdmittedConnection | None:
        """A place for a connection, whose end ``end`` causes; None if all are taken."""
        place = self.admission.admit(address, descriptor, end)
        return None if place is None else AdmittedConnection(self, place, end)


class AdmittedConnection:
    """An admitted connection. Until it is held, others may displace it, and it ends at ``due``
    on the loop's clock."""

    def __init__(self, limiter: ConnectionLimiter, place: Place, end: Callable[[], None]) -> None:
        self._limiter, self._place, self._end = limiter, place, end
        self._is_counted = False
        loop = asyncio.get_running_loop()
        self.due = loop.time() + limiter.admission.limits.proof_s
        self._timer = loop.call_at(self.due, self._expire)

    def hold(self) -> None:
        """Remove the deadline, since the other end has proved itself."""
        self._timer.cancel()
        self._place.hold()
        self._is_counted = True

    def hand_over(self) -> Place:
        """The place.

        From now on the caller is responsible for it and for the deadline. Other connections may
        still displace this one."""
        self._timer.cancel()
        self._is_counted = True
        return self._place

    def release(self) -> None:
        """Give the place back once the connection is closed; idempotent."""
        self._timer.cancel()
        if not (self._is_counted or self._place.is_released):  # it was not sent away either
            self._limiter.unproved += 1
            self._is_counted = True
        self._place.release()

    def _expire(self) -> None:
        if not self._place.is_released:
            self._limiter.late += 1
        self._is_counted = True
        self._end()


# Connections at a listening socket that have not sent a complete first word: each costs a
# descriptor and a check, but no task.


HEAD_BYTES = 8
"""How many bytes of a first word suffice to tell what it is and how long."""

_AT_ONCE = 64
# connections that are accepted as they come, and as many more each second; an honest clone makes
# three
_BURST = 32
_TICK_S = 0.05
_PAUSE_S = 1.0
_SHORT = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
_logger = logging.getLogger(__name__)
_logger.addFilter(RateLimitFilter())


class Acceptor:
    """Accepts connections from ``listening``, as far as ``limiter`` admits them, until ``close``.
    Belongs to the loop thread.

    ``word`` gets the first bytes, at most ``head_bytes``, and returns how many there must be in
    all; 0 means that they cannot be ours. ``arrived`` gets each connection whose first word is
    there, with its first bytes, none of which has been read from the socket. With
    ``is_crowd_silent`` a connection that has sent a complete word does not count as part of a
    crowd.
    """

    def __init__(
        self,
        listening: socket.socket,
        limiter: ConnectionLimiter,
        *,
        word: Callable[[bytes], int],
        arrived: Callable[[socket.socket, AdmittedConnection, bytes], None],
        name: str,
        head_bytes: int = HEAD_BYTES,
        is_crowd_silent: bool = False,
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self._socket, self._number, self._name = listening, listening.fileno(), name
        self.limiter, self.word, self.arrived = limiter, word, arrived
        self.least, self.head_bytes = word(b""), head_bytes
        self._is_crowd_silent = is_crowd_silent
        self.here: set[_NewConnection] = set()
        self._credit, self._counted_at = float(_BURST), self.loop.time()
        self._rest: asyncio.TimerHandle | None = None
        self._is_closed = False
        # accepted connections inherit it
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, self.least)
        self._go_on()

    def close(self) -> None:
        """Accept no more; connections that are still here are closed. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._rest is None:
            self.loop.remove_reader(self._number)
        else:
            self._rest.cancel()
        for visitor in list(self.here):
            visitor.leave()

    def spoke(self) -> None:
        """Note that a connection has sent its first word."""
        if self._is_crowd_silent:
            self._credit = min(_BURST, self._credit + 1)

    def _go_on(self) -> None:
        self._rest = None
        self.loop.add_reader(self._number, self._take)

    def _pause(self, pause_s: float) -> None:
        self.loop.remove_reader(self._number)
        self._rest = self.loop.call_later(pause_s, self._go_on)

    def _take(self) -> None:
        """Accept what waits.

        Each connection gets its owner before another callback can run."""
        for taken in range(_AT_ONCE):
            try:
                connection, address = self._socket.accept()
            except BlockingIOError:
                return self._count(taken)
            except OSError as exc:  # no descriptors, no memory, or the client left
                _logger.warning("no connection can be taken at %s: %s", self._name, exc)
                return self._pause(_PAUSE_S if exc.errno in _SHORT else _TICK_S)
            connection.setblocking(False)
            _NewConnection(self, connection).enter(address[0])
        return self._count(_AT_ONCE)

    def _count(self, taken: int) -> None:
        now = self.loop.time()
        self._credit = min(_BURST, self._credit + (now - self._counted_at) * _BURST) - taken
        self._counted_at = now
        if self._credit < 0:
            self._credit = 0.0
            self._pause(_TICK_S)


class _NewConnection:
    """One such connection."""

    __slots__ = (
        "_acceptor",
        "_admitted",
        "_connection",
        "_is_waiting",
        "_loop",
        "_number",
        "_wanted",
    )

    def __init__(self, acceptor: Acceptor, connection: socket.socket) -> None:
        self._acceptor, self._connection, self._loop = acceptor, connection, acceptor.loop
        # given to the loop instead of the socket, whose text a selector would make each time
        self._number = connection.fileno()
        self._wanted, self._is_waiting = acceptor.least, False
        self._admitted: AdmittedConnection | None = None

    def enter(self, address: str) -> None:
        """Take a place, if there is one, and look at what has already been sent."""
        self._admitted = self._acceptor.limiter.admit(address, self._connection.fileno(), self._end)
        if self._admitted is None:
            self._connection.close()
            return
        keep_from_children(self._admitted, self._connection)
        self._acceptor.here.add(self)
        self._look()

    def leave(self) -> None:
        """Close the connection."""
        self._stop_waiting()
        self._connection.close()
        assert self._admitted is not None, "it was let in"
        self._admitted.release()

    def _look(self) -> None:
        head = self._acceptor.head_bytes
        try:
            said = self._connection.recv(max(self._wanted, head), socket.MSG_PEEK)
        except BlockingIOError:
            return self._wait(self._wanted)
        except OSError:
            return self.leave()
        wanted = self._acceptor.word(said[:head])
        if not said or not wanted:
            self._acceptor.limiter.foreign += bool(said)
            return self.leave()
        if len(said) >= wanted:
            return self._arrive(said[:head])
        if self._is_waiting and wanted == self._wanted:
            # the kernel wakes us for less only when no more comes
            return self.leave()
        return self._wait(wanted)

    def _wait(self, wanted: int) -> None:
        """Arrange to be woken when so much is there, and not before."""
        if wanted != self._wanted:
            self._wanted = wanted
            self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wanted)
        if not self._is_waiting:
            self._is_waiting = True
            self._loop.add_reader(self._number, self._look)

    def _arrive(self, said: bytes) -> None:
        self._stop_waiting()
        assert self._admitted is not None, "it was let in"
        self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
        self._acceptor.spoke()
        self._acceptor.arrived(self._connection, self._admitted, said)

    def _stop_waiting(self) -> None:
        self._acceptor.here.discard(self)
        if self._is_waiting:
            self._is_waiting = False
            self._loop.remove_reader(self._number)

    def _end(self) -> None:
        """End it: its time is up, or others need its place.

        Whichever layer waits on it by now notices and closes it."""
        if self in self._acceptor.here:
            self.leave()
        else:
            with suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)


# Finds which of this machine's network devices has an address.


_RDMA = "/sys/class/infiniband"


class _Interface(ctypes.Structure):
    """The part of ``struct ifaddrs`` that is read here."""


_Interface._fields_ = (
    ("next", ctypes.POINTER(_Interface)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.POINTER(ctypes.c_char)),
)


def device_of(host: str) -> str | None:
    """The device that has this address, ``lo`` for all of loopback.

    None if no device has it, or all of them do (``0.0.0.0``)."""
    try:
        wanted = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
    if wanted.is_loopback:
        return "lo"
    return next((device for device, address in _addresses() if address == wanted), None)


def rdma_devices() -> list[str]:
    """The InfiniBand and similar devices, as UCX names them, such as ``mlx5_0:1``."""
    if not os.path.isdir(_RDMA):
        return []
    return [
        f"{device}:{port}"
        for device in sorted(os.listdir(_RDMA))
        for port in sorted(os.listdir(f"{_RDMA}/{device}/ports"))
    ]


def _addresses() -> Iterator[tuple[str, ipaddress.IPv4Address | ipaddress.IPv6Address]]:
    libc = ctypes.CDLL(None, use_errno=True)
    first = ctypes.POINTER(_Interface)()
    if libc.getifaddrs(ctypes.byref(first)) != 0:
        return
    try:
        place = first
        while place:  # type: ignore[truthy-bool] # a null pointer is false
            each = place.contents
            if each.address:
                family = (
                    struct.unpack_from("H", bytes(each.address[:2]))[0]
                    if sys.platform == "linux"
                    else 0
                )
                if family == socket.AF_INET:
                    yield each.name.decode(), ipaddress.IPv4Address(bytes(each.address[4:8]))
                elif family == socket.AF_INET6:
                    yield each.name.decode(), ipaddress.IPv6Address(bytes(each.address[8:24]))
            place = each.next
    finally:
        libc.freeifaddrs(first)
