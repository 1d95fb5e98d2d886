"""A way for ranks whose node cannot reach the database: through a rank that can."""

from __future__ import annotations

import secrets
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import msgspec
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError

from datastates import values
from datastates.errors import InvalidInput, Unavailable
from datastates.lineage.database import Database
from datastates.opening.whereabouts import node_id
from datastates.system import masking
from datastates.tracking.belonging import find
from datastates.tracking.together import Together
from datastates.transport.clone.groups import Group, group_of
from datastates.transport.session.passage import Gate, Passage

__all__ = ["reach"]

_MOST_GATES = 3
"""The number of ranks through which others go: the first that can reach the database, and two more in case that one dies."""

_CONNECTIONS = 40
"""The most connections of one process; somewhat more than a database keeps."""

_PATIENCE_S, _FAILING_S = 60.0, 3.0
"""How many seconds a rank through which others go waits at the end until they have left; the second after an error."""

_PORT = "5432"

_SOCKET = f".s.PGSQL.{_PORT}"
"""The name that PostgreSQL's own library gives a socket in a folder, for this port."""

_ENCRYPTED = ("require", "verify-ca", "verify-full")

_DECIDING = ("sslmode", "sslrootcert", "service")
"""What of a URL decides on its TLS. It may say things besides that are for psycopg, and that PostgreSQL's own library does not know."""


class _Gate(msgspec.Struct, frozen=True):
    """Where others go through a rank: its machine, the addresses that it may have, and the port."""

    node: str
    hosts: tuple[str, ...]
    port: int


@contextmanager
def reach(url: str, *, group: Group | None = None) -> Iterator[str]:
    """The URL by which this rank reaches a repository's database: ``url`` itself, or one that leads through a rank that can reach it.

        with datastates.ranks.reach("postgresql://ann@db/lineage") as url, datastates.open(url, packs=folder) as repo:
            run = repo.track(model=model)

    Collective at its beginning, on the training threads: each rank tries ``url``. If some cannot reach it, the first three ranks that can
    each open a port, which leads only to the database, and only for peers with a key that the ranks draw now. For the others the URL is
    that of a Unix socket of this process, through which all their queries go. Ranks through which others go wait at the end of the block,
    for a minute at most (3 s after an error), until those have closed what they opened. SQLite's databases are files: a rank reaches the
    folder or does not.

    :param group: the ranks; None: those of this job, as ``track`` finds them.
    :raises Unavailable: no rank can reach the database, or this rank can reach none of those that can.
    :raises InvalidInput: the URL, or PostgreSQL's settings on this node, ask for TLS, which ends at the server and does not go through a
        rank; or opening refuses the URL.
    """
    text = values.path(url, "url")
    ranks = Together(find() if group is None else group_of(group, "group"))
    if ranks.size == 1 or "://" not in text:
        yield text
        return
    try:
        parsed = make_url(text)
    except (ArgumentError, ValueError) as exc:
        raise InvalidInput(f"{masking.text(text)!r} is no URL of a database: write postgresql://user:password@host:port/database") from exc
    with ExitStack() as stack:
        server: tuple[str, int] | str | None = None
        why = ""
        with ranks.united("open the database"):
            try:
                server = _server(text)
            except Unavailable as error:
                why = str(error)
        gates, key = _gates(ranks, server, why, stack)
        reached = text
        with ranks.united("reach the database through another rank"):
            if server is None:
                reached = _through(parsed, gates, key, why, stack)
        yield reached


def _server(url: str) -> tuple[str, int] | str:
    """The address at which the database answers this rank.

    :raises Unavailable: it does not answer.
    """
    database = Database(url)
    try:
        with database.read() as session:
            info: Any = getattr(session.connection().connection.driver_connection, "info", None)
            if info is None:
                raise InvalidInput(f"{masking.text(url)} is no server: ranks reach the file of a lineage, or they do not")
            return f"{info.host}/.s.PGSQL.{info.port}" if info.host.startswith("/") else (info.host, info.port)
    finally:
        database.close()


def _gates(ranks: Together, server: tuple[str, int] | str | None, why: str, stack: ExitStack) -> tuple[list[_Gate], bytes]:
    """The gates through which ranks may go, and the key; none are opened if all ranks reach the database themselves. Collective."""
    key = ranks.first("draw a key", lambda: secrets.token_bytes(32), bytes)
    can = [bool(said) for said in ranks.group.exchange(b"" if server is None else b"1")]
    if not any(can):
        raise Unavailable(f"no rank of this job reaches the database: {why}")
    own = None
    if server is not None and not all(can) and ranks.rank in [rank for rank, is_there in enumerate(can) if is_there][:_MOST_GATES]:
        with suppress(OSError):  # others may open theirs
            gate = Gate(server, key, most=_CONNECTIONS * can.count(False))
            stack.callback(_leave, gate)
            own = _Gate(node_id(), _hosts(), gate.port)
    everyone = [msgspec.msgpack.decode(said, type=_Gate | None) for said in ranks.group.exchange(msgspec.msgpack.encode(own))]
    return [gate for gate in everyone if gate is not None], key


def _through(url: URL, gates: list[_Gate], key: bytes, why: str, stack: ExitStack) -> str:
    """The URL of a way through one of the gates."""
    sslmode = _sslmode(url)
    if sslmode in _ENCRYPTED:
        raise InvalidInput(
            f"{masking.text(url.render_as_string())} asks for sslmode={sslmode}, by itself or with this node's settings (PGSSLMODE, a"
            " service, PGSSLROOTCERT), and this rank reaches the database only through another one, where TLS does not go: let this node"
            " reach the database, or set sslmode=prefer in the URL on a private network"
        )
    places = [(host, gate.port) for gate in gates for host in (*gate.hosts, *(["127.0.0.1"] if gate.node == node_id() else []))]
    passage = Passage(places, key, name=_SOCKET)
    stack.callback(passage.close)
    if not passage.is_open():
        tried = ", ".join(f"{host}:{port}" for host, port in places)
        raise Unavailable(f"this rank reaches neither the database ({why}) nor a rank that does ({tried}): open one of these ways")
    query = {key: value for key, value in url.query.items() if key not in ("host", "hostaddr", "port")}
    return url.set(host=None, port=None, query={**query, "host": str(passage.folder), "port": _PORT}).render_as_string(hide_password=False)


def _sslmode(url: URL) -> str:
    """The mode that PostgreSQL's own library takes for this URL, with this node's environment and file of services."""
    from psycopg import conninfo, pq

    asked = {key: url.normalized_query[key][-1] for key in _DECIDING if key in url.query}
    nowhere = {**asked, "host": "/", "port": _PORT}  # the library says what it takes once it has tried to connect
    tried = pq.PGconn.connect_start(conninfo.make_conninfo(**nowhere).encode())
    try:
        return next((option.val or b"").decode() for option in tried.info if option.keyword == b"sslmode")
    finally:
        tried.finish()


def _hosts() -> tuple[str, ...]:
    """The names and addresses by which others may reach this machine."""
    name = socket.gethostname()
    found = {name: None}
    with suppress(OSError):
        for *_, address in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM):
            found[str(address[0])] = None
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # nothing is sent: the kernel only tells from which address it would be
        found[str(probe.getsockname()[0])] = None
    return tuple(host for host in found if not host.startswith("127.") and host != "::1")


def _leave(gate: Gate) -> None:
    """Close a gate, once no rank goes through it any more."""
    ends_at = time.monotonic() + (_PATIENCE_S if sys.exc_info()[1] is None else _FAILING_S)
    while gate.passing and time.monotonic() < ends_at:
        time.sleep(0.01)
    gate.close()
