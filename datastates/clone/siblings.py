"""The ranks of a job that serve: their group tells each of them once where the others do."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable, Sequence
from urllib.parse import urlsplit

from datastates.errors import InvalidInput
from datastates.transport.clone.groups import Group
from datastates.transport.clone.meeting import Meeting

from .serving import PeerServer, Server

__all__ = ["announced", "own_address", "serve_together"]


def serve_together(group: Group, begin: Callable[[], Server]) -> Server:
    """The server of this rank, which knows those of the others; collective. If one cannot serve, none does.

    :raises InvalidInput: it is a server for browsers.
    :raises Unavailable: another rank failed, or did not come; names it.
    """
    meeting, server = Meeting(group, "serve its states"), None
    try:
        with meeting.united():
            server = begin()
            met = _meeting_others(server)
        urls = [said.decode() for said in meeting.meet(announced(server.url).encode())]
    except BaseException:
        if server is not None:
            server.close(grace_s=0.0)
        raise
    met([url for rank, url in enumerate(urls) if rank != group.rank])
    return server


def _meeting_others(server: Server) -> Callable[[Sequence[str]], None]:
    if not isinstance(server, PeerServer):
        raise InvalidInput(f"{server.url} is for browsers, who clone no states: leave group= out, or serve at a tcp:// address")
    return server.meet


def announced(url: str) -> str:
    """The url of a server for processes elsewhere: with an address, even if it listens on all of them, or under a name."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        address = ipaddress.ip_address(socket.getaddrinfo(host, None)[0][4][0])
    found = own_address() if address.is_unspecified else str(address)
    return f"{parts.scheme}://{f'[{found}]' if ':' in found else found}:{parts.port}"


def own_address() -> str:
    """This machine's address as others see it, as far as its name and routes tell."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("198.51.100.1", 9))  # nothing is sent: the kernel only picks the interface
            return str(probe.getsockname()[0])
        except OSError:
            return socket.gethostbyname(socket.gethostname())
