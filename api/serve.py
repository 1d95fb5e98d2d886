"""The web server: uvicorn on a separate thread, both in ``datastates serve`` and in a training."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import logging
import os
import re
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Self
from urllib.parse import urlsplit

import uvicorn

from datastates.errors import InvalidInput, Unavailable, Unsupported
from datastates.maintenance.core import Opened, core_of
from datastates.system.admission import Admission
from datastates.system.threads import Latch
from datastates.transport.serving import ServerStats

from .app import create_app
from .live import Pictures, Show
from .routing import Scope
from .security import Connection, Listening, limits

if TYPE_CHECKING:
    from fastapi import FastAPI

    from datastates.transport.connections import AdmittedConnection
    from datastates.transport.contract import Tls

_logger = logging.getLogger(__name__)

DEFAULT_URL = "http://127.0.0.1:8642"
_GRACE_S = 5
_HEADER_BYTES = 64 << 10
_BACKLOG = 512


class WebServer:
    """Repositories by name, served over HTTP until ``close``. Safe from any thread.

    ``url`` is ``http://HOST:PORT``; port 0 takes any that is free. ``trusted_proxies`` are
    addresses whose ``X-Forwarded-…`` headers are believed. The other arguments are the same as of
    ``create_app``.

    :raises InvalidInput: other machines can reach it and there is no token, or the address is not
        valid.
    :raises Unavailable: the address is taken.
    """

    def __init__(
        self,
        repositories: Mapping[str, Opened],
        url: str = DEFAULT_URL,
        *,
        tokens: Mapping[str, Scope] | None = None,
        allowed_hosts: Sequence[str] = (),
        prefix: str = "",
        cors: Sequence[str] = (),
        trusted_proxies: Sequence[str] = (),
        has_access_log: bool = False,
    ) -> None:
        host, port = _address(url)
        if not tokens and not _is_loopback(host):
            raise InvalidInput(
                f"{url} can be reached from other machines, and there is no token: give"
                " --web-tokens FILE or DATASTATES_WEB_TOKENS (in Python token=), or serve on"
                " 127.0.0.1"
            )
        prefix = _prefix(prefix)
        names = [
            *allowed_hosts,
            host,
            *([socket.gethostname()] if host in ("0.0.0.0", "::") else []),
        ]
        self.app = create_app(
            repositories, tokens=tokens, allowed_hosts=names, prefix=prefix, cors=cors
        )
        self._socket = _listen(host, port, url)
        # connections inherit it; asyncio does not set it here: 40 ms
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        taken = self._socket.getsockname()[1]
        self._shown = (
            f"http://{f'[{host}]' if ':' in host else host}:{taken}{prefix and prefix + '/'}"
        )
        self._pid = os.getpid()
        self._is_closed = False
        self._admission = Admission(limits(), unlimited=trusted_proxies)
        self._uvicorn = _Uvicorn(
            self.app, self._admission, trusted_proxies, has_access_log=has_access_log
        )
        self._thread = threading.Thread(target=self._run, name="datastates-web", daemon=True)
        self._thread.start()
        self._uvicorn.is_ready.wait()

    @property
    def url(self) -> str:
        """The URL to connect to, with the port that was taken, and the prefix."""
        return self._shown

    def show_samples(self, show: Show) -> None:
        """Let the page show pictures of samples. ``show`` returns the picture for a sample's
        index: an array, or bytes of a PNG, JPEG, GIF or WebP. It is called on a thread of the
        server, for one sample at a time."""
        for served in self.app.state.served.values():
            served.pictures = Pictures(show)

    def stats(self) -> ServerStats:
        """Counts of this server: bytes sent, and as ``peers`` the requests under way and all
        requests so far. Chunks are not counted here. ``refused`` counts requests without a
        sufficient token, and connections beyond the limits.
        """
        totals = self.app.state.meter.totals()
        turned_away = totals.refused + self._admission.refused + self._admission.displaced
        return ServerStats(totals.bytes_sent, 0, totals.under_way, totals.requests, turned_away)

    def close(self, *, grace_s: float = _GRACE_S) -> None:
        """Stop: take no more requests, end event streams, finish the responses under way.

        Idempotent."""
        if self._is_closed or self._pid != os.getpid():
            return
        self._is_closed = True
        self._uvicorn.config.timeout_graceful_shutdown = max(1, round(grace_s))
        self._uvicorn.should_exit = True
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<WebServer {self.url}{' (closed)' if self._is_closed else ''}>"

    def _run(self) -> None:
        try:
            self._uvicorn.run(sockets=[self._socket])
        except Exception:  # uvicorn may raise anything, and no caller waits for this thread
            _logger.exception("the server at %s ended", self._shown)
        finally:
            self._socket.close()
            self._uvicorn.is_ready.set()


class _Uvicorn(uvicorn.Server):
    """A uvicorn server that signals when it listens, leaves signals alone, and first ends event
    streams, which have no end."""

    def __init__(
        self,
        app: FastAPI,
        admission: Admission,
        trusted_proxies: Sequence[str],
        *,
        has_access_log: bool,
    ) -> None:
        config = uvicorn.Config(
            app,
            lifespan="on",
            ws="none",
            http=Connection,
            log_config=None,
            log_level=logging.WARNING,
            access_log=has_access_log,
            server_header=False,
            proxy_headers=bool(trusted_proxies),
            forwarded_allow_ips=list(trusted_proxies),
            timeout_graceful_shutdown=_GRACE_S,
            h11_max_incomplete_event_size=_HEADER_BYTES,
        )
        if has_access_log:
            # everything else stays at warnings
            logging.getLogger("uvicorn.access").setLevel(logging.INFO)
        super().__init__(config)
        self._admission = admission
        self.is_ready = Latch()
        self._application = app

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup([])
        # closed as those are
        self.servers = [
            Listening(each, self._admission, self._connection)  # type: ignore[misc]
            for each in sockets or ()
        ]
        self.is_ready.set()

    def _connection(self, arrival: AdmittedConnection) -> Connection:
        return Connection(self.config, self.server_state, self.lifespan.state, arrival=arrival)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for served in self._application.state.served.values():
            await asyncio.to_thread(served.close)
        await super().shutdown(sockets)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def serve_in_thread(
    repositories: Opened | Mapping[str, Opened], url: str = "http://127.0.0.1:0", **options: object
) -> WebServer:
    """A server on a thread of this process; a context manager.

    Its ``url`` is the address; ``options`` are passed to ``WebServer``."""
    named = (
        repositories if isinstance(repositories, Mapping) else {name_of(repositories): repositories}
    )
    return WebServer(named, url, **options)  # type: ignore[arg-type]  # passed on as they are


def serve_repository(
    repository: Opened,
    url: str,
    *,
    token: bytes,
    tls: Tls | None,
    is_writable: bool,
    pictures: Show | None = None,
) -> WebServer:
    """``Repository.serve`` for an ``http://`` address. The one token allows reading, and also
    writing if ``is_writable``.

    :raises Unsupported: ``tls`` was given. Over HTTP, a proxy provides TLS.
    :raises InvalidInput: it should be writable, and there is no token.
    """
    if tls is not None:
        raise Unsupported(
            f"{url} speaks plain HTTP: leave out tls=, and put a proxy with TLS before it"
            " (docs/deployment.md)"
        )
    if is_writable and not token:
        raise InvalidInput(
            "whoever may write must show a token: give token= or token_file=, or leave out"
            " is_writable=True"
        )
    scope = Scope.WRITE if is_writable else Scope.READ
    server = serve_in_thread(
        repository, url, tokens={token.decode("latin-1"): scope} if token else None
    )
    if pictures is not None:
        server.show_samples(pictures)
    return server


def name_of(repository: Opened) -> str:
    """The default name of a repository: the name of its folder or database."""
    location = core_of(repository, "repository").location
    name = (
        location.root.name
        if location.root is not None
        else urlsplit(location.database_url).path.strip("/")
    )
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.") or "repository"


def _address(url: str) -> tuple[str, int]:
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        parts, host, port = urlsplit(""), None, None
    if (
        parts.scheme != "http"
        or not host
        or port is None
        or parts.path.strip("/")
        or parts.query
        or parts.username
    ):
        raise InvalidInput(
            f"{url} is no address to serve at: write http://HOST:PORT, such as {DEFAULT_URL}; a"
            " path goes with --prefix"
        )
    return host, port


def _prefix(prefix: str) -> str:
    stripped = prefix.strip("/")
    if not re.fullmatch(r"[A-Za-z0-9._~/-]*", stripped) or ".." in stripped or "//" in stripped:
        raise InvalidInput(f"{prefix!r} is no prefix: write a path such as /lineage")
    return f"/{stripped}" if stripped else ""


def _listen(host: str, port: int, url: str) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        # with SO_REUSEADDR: a restart need not wait
        return socket.create_server(address[:2], family=family, backlog=_BACKLOG)
    except OSError as exc:
        if exc.errno == errno.EADDRINUSE:
            raise Unavailable(
                f"{url} is taken by another process: end that, or choose another port; port 0 takes"
                " one that is free"
            ) from exc
        raise Unavailable(
            f"{url} cannot be served at ({exc.strerror}): choose an address of this machine"
        ) from exc


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
