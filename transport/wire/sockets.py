"""What all our sockets have in common: their options, and that a forked child closes its copies."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import sys
import weakref
from typing import Any

__all__ = ["keep_from_children", "let_go_by", "set_up", "stop_listening", "who"]

_credentials = struct.Struct("3i")


def set_up(connection: Any) -> None:
    """Set the options of all our connections: nothing is delayed before sending, and a peer that vanished is noticed."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_KEEPIDLE"):  # Linux: a peer that vanished is noticed within a minute, not two hours
        for option, value in ((socket.TCP_KEEPIDLE, 30), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3)):
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


def keep_from_children(owner: object, connection: Any) -> None:
    """Make a child that is forked while ``owner`` lives close its copy of this socket."""
    _open[owner] = connection


def let_go_by(owner: object) -> None:
    """Note that the owner has closed it."""
    _open.pop(owner, None)


def who(connection: Any) -> tuple[int, int, int]:
    """Pid, user and group of a Unix socket's other end, as the kernel knows them; for a listener, those of the process that made it
    listen. Where the kernel does not tell, those of nobody."""
    if sys.platform != "linux":
        return 0, -1, -1
    pid, user, group = _credentials.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _credentials.size))
    return pid, user, group


async def stop_listening(server: asyncio.Server) -> None:
    """Close an asyncio server, once connections accepted before have arrived: it fails for those half in, and leaves their sockets open."""
    for each in server.sockets:
        asyncio.get_running_loop().remove_reader(each.fileno())
    await asyncio.sleep(0)
    server.close()


_open: weakref.WeakKeyDictionary[object, Any] = weakref.WeakKeyDictionary()


def _let_go_of_inherited() -> None:
    """Close the parent's sockets in a forked child. If it held them, no peer would notice that the parent died, and no port be free."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for inherited in list(_open.values()):
        if inherited.fileno() >= 0:
            os.dup2(nothing, inherited.fileno(), inheritable=False)  # keeps the number taken: a later close closes nothing else
    os.close(nothing)
    _open.clear()


os.register_at_fork(after_in_child=_let_go_of_inherited)
