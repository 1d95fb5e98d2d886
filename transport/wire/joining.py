"""How a data connection joins its session: both ends prove that they know the session's key, over what was said on this connection.

    the dialling end -> JOIN, the session's name, generation, direction, nonce      in the clear
    both             -> TLS's handshake, if the session has TLS
    the other end    -> nonce
    both in turn     -> HMAC(key, role, all of that)

Blocking, for the thread to which the connection belongs.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import ssl
import struct
from dataclasses import dataclass
from typing import Final

from datastates.errors import PeerFault
from datastates.transport.contract import Terms

from .tcp import JOIN

__all__ = ["HEADER_BYTES", "NAME_BYTES", "Direction", "Join", "answer", "greet", "read_header"]

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


def read_header(raw: bytes) -> Join | None:
    """The header's content; None if the header is not ours."""
    if len(raw) != HEADER_BYTES:
        return None
    magic, name, generation, direction, _ = _header.unpack(raw)
    return Join(name, generation, direction, raw) if magic == JOIN and direction in b"<>" else None


def greet(connection: socket.socket, terms: Terms, generation: int, direction: Direction) -> socket.socket:
    """Join from the end that dialled. Returns the socket to read or write, encrypted if the session is.

    :raises PeerFault: the other end does not know the session's key.
    """
    header = _header.pack(JOIN, terms.name, generation, direction, secrets.token_bytes(_NONCE_BYTES))
    connection.sendall(header)
    if terms.tls is not None:
        connection = terms.tls.wrap_socket(connection, server_hostname=terms.host)
    nonce = exactly(connection, _NONCE_BYTES)
    connection.sendall(_proof(terms, b"dialled", header, nonce))
    _check(connection, terms, b"answered", header, nonce)
    return connection


def answer(connection: socket.socket, terms: Terms, join: Join, tls: ssl.SSLContext | None) -> socket.socket:
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


def _check(connection: socket.socket, terms: Terms, role: bytes, header: bytes, nonce: bytes) -> None:
    said = exactly(connection, 32)
    if not hmac.compare_digest(said, _proof(terms, role, header, nonce)):
        raise PeerFault(f"a connection for data of {terms.peer} does not know the session's key: something on the way joins it")
