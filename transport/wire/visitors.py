"""Connections at a listening socket that have not sent a complete first word: each costs a descriptor and a check, but no task.

A crowd that only connects is accepted in batches: beyond a rate that honest clients do not reach, the listener checks twenty times a
second, so that a training beside it is not woken for each connection. The kernel holds the rest meanwhile, which costs nothing.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Callable
from contextlib import suppress

from datastates.system.seldom import Seldom

from .arrival import Arrival, Door
from .sockets import keep_from_children

__all__ = ["HEAD_BYTES", "Visitors"]

HEAD_BYTES = 8
"""How many bytes of a first word suffice to tell what it is and how long."""

_AT_ONCE = 64
_BURST = 32  # connections that are accepted as they come, and as many more each second; an honest clone makes three
_TICK_S = 0.05
_PAUSE_S = 1.0
_SHORT = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
_logger = logging.getLogger(__name__)
_logger.addFilter(Seldom())


class Visitors:
    """Accepts connections from ``listening`` through a ``door`` until ``close``; belongs to the loop thread.

    ``word`` gets the first bytes, at most ``head_bytes``, and returns how many there must be in all; 0 means that they cannot be ours.
    ``arrived`` gets each connection whose first word is there, with its first bytes, none of which has been read from the socket. With
    ``is_crowd_silent`` a connection that has sent a complete word does not count as part of a crowd.
    """

    def __init__(
        self,
        listening: socket.socket,
        door: Door,
        *,
        word: Callable[[bytes], int],
        arrived: Callable[[socket.socket, Arrival, bytes], None],
        name: str,
        head_bytes: int = HEAD_BYTES,
        is_crowd_silent: bool = False,
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self._socket, self._number, self._name = listening, listening.fileno(), name
        self.door, self.word, self.arrived = door, word, arrived
        self.least, self.head_bytes = word(b""), head_bytes
        self._is_crowd_silent = is_crowd_silent
        self.here: set[_Visitor] = set()
        self._credit, self._counted_at = float(_BURST), self.loop.time()
        self._rest: asyncio.TimerHandle | None = None
        self._is_closed = False
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, self.least)  # accepted connections inherit it
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
        """Accept what waits. A connection belongs to its visitor before anything can come in between."""
        for taken in range(_AT_ONCE):
            try:
                connection, address = self._socket.accept()
            except BlockingIOError:
                return self._count(taken)
            except OSError as exc:  # no descriptors, no memory, or the client left
                _logger.warning("no connection can be taken at %s: %s", self._name, exc)
                return self._pause(_PAUSE_S if exc.errno in _SHORT else _TICK_S)
            connection.setblocking(False)
            _Visitor(self, connection).enter(address[0])
        return self._count(_AT_ONCE)

    def _count(self, taken: int) -> None:
        now = self.loop.time()
        self._credit = min(_BURST, self._credit + (now - self._counted_at) * _BURST) - taken
        self._counted_at = now
        if self._credit < 0:
            self._credit = 0.0
            self._pause(_TICK_S)


class _Visitor:
    """One such connection."""

    __slots__ = ("_arrival", "_connection", "_is_waiting", "_loop", "_number", "_visitors", "_wanted")

    def __init__(self, visitors: Visitors, connection: socket.socket) -> None:
        self._visitors, self._connection, self._loop = visitors, connection, visitors.loop
        self._number = connection.fileno()  # given to the loop instead of the socket, whose text a selector would make each time
        self._wanted, self._is_waiting = visitors.least, False
        self._arrival: Arrival | None = None

    def enter(self, address: str) -> None:
        """Take a place, if there is one, and look at what has already been sent."""
        self._arrival = self._visitors.door.enter(address, self._connection.fileno(), self._end)
        if self._arrival is None:
            self._connection.close()
            return
        keep_from_children(self._arrival, self._connection)
        self._visitors.here.add(self)
        self._look()

    def leave(self) -> None:
        """Close the connection."""
        self._stop_waiting()
        self._connection.close()
        assert self._arrival is not None, "it was let in"
        self._arrival.release()

    def _look(self) -> None:
        head = self._visitors.head_bytes
        try:
            said = self._connection.recv(max(self._wanted, head), socket.MSG_PEEK)
        except BlockingIOError:
            return self._wait(self._wanted)
        except OSError:
            return self.leave()
        wanted = self._visitors.word(said[:head])
        if not said or not wanted:
            self._visitors.door.foreign += bool(said)
            return self.leave()
        if len(said) >= wanted:
            return self._arrive(said[:head])
        if self._is_waiting and wanted == self._wanted:  # the kernel wakes us for less only when no more comes
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
        assert self._arrival is not None, "it was let in"
        self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
        self._visitors.spoke()
        self._visitors.arrived(self._connection, self._arrival, said)

    def _stop_waiting(self) -> None:
        self._visitors.here.discard(self)
        if self._is_waiting:
            self._is_waiting = False
            self._loop.remove_reader(self._number)

    def _end(self) -> None:
        """End it: its time is up, or others need its place. Whichever layer waits on it by now notices and closes it."""
        if self in self._visitors.here:
            self.leave()
        else:
            with suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)
