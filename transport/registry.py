"""Chooses the transport for a url."""

from __future__ import annotations

import os
from collections.abc import Callable

from datastates.errors import InvalidInput

from .contract import Transport
from .data_connection import TcpTransport
from .in_process import MemoryTransport
from .ucx import UcxTransport

_made: dict[str, Transport] = {}


def transport_for(url: str) -> Transport:
    """The transport of a url's scheme: one instance in a process.

    :raises InvalidInput: no transport has this scheme; the error lists those that exist.
    """
    scheme, is_url, _ = url.partition("://")
    scheme = scheme.lower()
    make = _KINDS.get(scheme) if is_url else None
    if make is None:
        raise InvalidInput(
            f"{url!r} begins with no transport's name: use"
            f" {' or '.join(f'{each}://…' for each in _KINDS)}"
        )
    # several threads may come first at once
    return _made.get(scheme) or _made.setdefault(scheme, make())


_KINDS: dict[str, Callable[[], Transport]] = {
    "tcp": TcpTransport,
    "ucx": UcxTransport,
    "memory": MemoryTransport,
}

os.register_at_fork(after_in_child=_made.clear)
