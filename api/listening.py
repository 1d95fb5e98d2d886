"""The web server's listening sockets. The kernel holds a connection's bytes, and we only peek at them, until the head of its first
request is complete: a crowd that only connects costs a training next to nothing (see ``visitors``).
"""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Callable

from datastates.system.admission import Admission
from datastates.transport.wire.arrival import Arrival, Door
from datastates.transport.wire.sockets import keep_from_children, let_go_by
from datastates.transport.wire.visitors import Visitors

__all__ = ["Listening"]

_LEAST_BYTES = 8  # no request is shorter
_HEAD_BYTES = 16 << 10  # a longer head is no longer awaited here
_END_OF_HEAD = re.compile(rb"\n\r?\n")  # as h11 defines it
_SPACE = 0x20


class Listening:
    """One listening socket; ``made`` creates the protocol that reads and answers an arrival. Belongs to the server's loop, which treats it
    as an ``asyncio.Server``."""

    def __init__(self, listening: socket.socket, admission: Admission, made: Callable[[Arrival], asyncio.Protocol]) -> None:
        listening.setblocking(False)
        name = f"port {listening.getsockname()[1]}"
        self._made = made
        self._beginning: set[asyncio.Task[None]] = set()
        keep_from_children(self, listening)
        self._visitors = Visitors(
            listening, Door(admission), word=_word, arrived=self._begin, name=name, head_bytes=_HEAD_BYTES, is_crowd_silent=True
        )

    def close(self) -> None:
        """Accept no more; connections that have sent no request are closed. Idempotent."""
        self._visitors.close()
        let_go_by(self)

    async def wait_closed(self) -> None:
        """Wait until each accepted connection has been handed to the server."""
        if self._beginning:
            await asyncio.wait(self._beginning)

    def _begin(self, connection: socket.socket, arrival: Arrival, _: bytes) -> None:
        beginning = asyncio.create_task(self._give(connection, arrival))
        self._beginning.add(beginning)
        beginning.add_done_callback(self._beginning.discard)

    async def _give(self, connection: socket.socket, arrival: Arrival) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(lambda: self._made(arrival), connection)
        except OSError:  # the client left at once
            connection.close()
            arrival.release()


def _word(said: bytes) -> int:
    """The length of a request's head; while the head is incomplete, one byte more than has come. h11 refuses what cannot be a head."""
    if len(said) < _LEAST_BYTES:
        return _LEAST_BYTES
    is_whole = _END_OF_HEAD.search(said) is not None or len(said) >= _HEAD_BYTES
    return len(said) if is_whole or said[0] <= _SPACE else len(said) + 1
