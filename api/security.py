"""Permissions: the layers around the application, which every request passes before a route is
chosen.

- ``Shield``, the outermost: every failure is answered as a problem, and every answer has the
  headers that browsers need.
- ``Gatekeeper``: Host, origin, sizes, token. Access is denied by default: only the page's files and
  ``/healthz`` are open. Everything else needs ``read``, and any method but GET, HEAD and OPTIONS
  needs ``write``. A route may require more, not less.

They are plain ASGI, so that streams flow through them.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import logging
import os
import re
import socket
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import RedirectResponse
from uvicorn.protocols.http.h11_impl import H11Protocol

from datastates.errors import DatastatesError, InvalidInput
from datastates.system.admission import Admission, Limits
from datastates.system.files import is_sendable, read_secret
from datastates.transport.connections import (
    Acceptor,
    AdmittedConnection,
    ConnectionLimiter,
    keep_from_children,
    let_go_by,
)

from .routing import Refusal, Scope, respond

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Send
    from starlette.types import Scope as Request

    from datastates.system.admission import Place

VARIABLE = "DATASTATES_WEB_TOKENS"
_CHARACTERS = 16
_MAKE = "make one with: datastates token FILE --scope read"
_SCOPES = {scope.name.lower(): scope for scope in (Scope.READ, Scope.WRITE, Scope.ADMIN)}


def read_tokens(
    path: str | os.PathLike[str] | None = None, environ: Mapping[str, str] | None = None
) -> dict[str, Scope]:
    """Each token and its scope, from a file with lines ``SCOPE TOKEN``, else from
    ``DATASTATES_WEB_TOKENS``; there may be none.

    :raises InvalidInput: the file cannot be read; a line has no scope, or a token that can be
        guessed; or other users of the machine can read the file. Tokens are not shown.
    """
    if path is None:
        said = (os.environ if environ is None else environ).get(VARIABLE, "")
        return dict(
            _entry(*each.partition(":")[::2], where=f"{VARIABLE}, entry {n}")
            for n, each in enumerate(said.split(), 1)
        )
    try:
        lines = read_secret(path, f"the file of tokens {os.fspath(path)!r}").decode().splitlines()
    except UnicodeDecodeError as exc:
        raise InvalidInput(
            f"the tokens in {os.fspath(path)!r} cannot be read (it is no text): name a file with"
            " lines SCOPE TOKEN"
        ) from exc
    found: dict[str, Scope] = {}
    for number, line in enumerate(lines, 1):
        said = line.strip()
        if said and not said.startswith("#"):
            scope, _, token = said.partition(" ")
            found.update([_entry(scope, token.strip(), where=f"{os.fspath(path)}, line {number}")])
    if not found:
        raise InvalidInput(f"{os.fspath(path)!r} holds no tokens: write lines SCOPE TOKEN; {_MAKE}")
    return found


def _entry(scope: str, token: str, *, where: str) -> tuple[str, Scope]:
    if scope.lower() not in _SCOPES:
        raise InvalidInput(
            f"{where}: it begins with no scope: write {', '.join(_SCOPES)}, then the token"
        )
    check_token(token, where)
    return token, _SCOPES[scope.lower()]


def check_token(token: str, where: str) -> None:
    """Raise unless a token can be used.

    :raises InvalidInput: it can be guessed, or can never arrive. The token is not shown.
    """
    if len(token) < _CHARACTERS:
        raise InvalidInput(
            f"{where}: the token has {len(token)} characters, and fewer than {_CHARACTERS} can be"
            f" guessed: {_MAKE}"
        )
    if not is_sendable(token):
        raise InvalidInput(f"{where}: the token has characters that a header cannot carry: {_MAKE}")


# One connection of a browser or a program: admitted or refused, and ended when it makes no
# progress.


PLACE = "datastates.place"
"""The key in a request's ``state`` for the place of its connection, which ``Gatekeeper`` holds."""

REQUEST_S = 10.0
"""The time for a whole request: from the connection, or the first byte of a further request, to
the request's last byte."""

ANSWER_S = 30.0
"""The time within which some bytes of an answer that waits to be taken must leave."""

_logger = logging.getLogger(__name__)
_logger.setLevel(logging.ERROR)  # nothing is logged of what strangers send: that would fill a disk


def limits() -> Limits:
    return Limits(proof_s=REQUEST_S)


class Connection(H11Protocol):
    """Runs on the server's loop once the head of its first request is there; until then the
    connection is an ``arrival``."""

    def __init__(self, *args: Any, arrival: AdmittedConnection, **options: Any) -> None:
        super().__init__(*args, **options)
        self.logger = _logger
        self._arrival = arrival
        self._place: Place = arrival.hand_over()
        self._request_timer: asyncio.TimerHandle | None = None
        self._answer_timer: asyncio.TimerHandle | None = None

    # as in uvicorn's own
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Give the request the time that is left."""
        super().connection_made(transport)
        self._await_request(self._arrival.due)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        self._stop_waiting()
        if self._answer_timer is not None:
            self._answer_timer.cancel()
        self._place.release()

    def data_received(self, data: bytes) -> None:
        """Take in part of a request; data that comes after the connection was given up is
        ignored."""
        if self.transport.is_closing():
            return
        if self._request_timer is None and self._is_idle():
            self._await_request()
        super().data_received(data)

    def handle_events(self) -> None:
        """Stop waiting for a request once it is complete."""
        super().handle_events()
        if self._is_idle():
            return
        self.scope["state"][PLACE] = self._place
        if not self.cycle.more_body:
            self._stop_waiting()
        elif self._request_timer is None:
            self._await_request()

    def on_response_complete(self) -> None:
        """Let other connections have the place until the next request."""
        self._place.release_hold()
        super().on_response_complete()
        self._await_taking()

    def pause_writing(self) -> None:
        """Begin to time the other side, which takes no more bytes for now."""
        super().pause_writing()
        self._await_taking()

    def _is_idle(self) -> bool:
        # uvicorn has None there at first
        return self.cycle is None or self.cycle.response_complete  # type: ignore[redundant-expr]

    def _await_request(self, due: float | None = None) -> None:
        self._request_timer = self.loop.call_at(
            self.loop.time() + REQUEST_S if due is None else due, self.transport.abort
        )

    def _stop_waiting(self) -> None:
        if self._request_timer is not None:
            self._request_timer.cancel()
            self._request_timer = None

    def _await_taking(self) -> None:
        """End the connection unless some of the waiting bytes leave within ``ANSWER_S``; repeat
        until none wait."""
        waiting = self.transport.get_write_buffer_size()
        if not waiting or self._answer_timer is not None:
            return

        def look() -> None:
            self._answer_timer = None
            if self.transport.get_write_buffer_size() < waiting:
                self._await_taking()
            else:
                self.transport.abort()

        self._answer_timer = self.loop.call_later(ANSWER_S, look)


# Permissions: the layers around the application, which every request passes before a route is
# chosen.


BODY_BYTES = 64 << 10
QUERY_BYTES = 32 << 10
_PATH_BYTES = 4 << 10
_TOKEN_BYTES = 1 << 10
_READING = ("GET", "HEAD", "OPTIONS")

OPEN = ("/", "/healthz", "/icon.svg", "/favicon.ico", "/favicon.svg")
"""What anybody may read, besides everything below ``/assets/``: it contains no data."""

_PAGE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; font-src"
    " 'self'; connect-src 'self'; manifest-src 'self'; base-uri 'none'; form-action 'none';"
    " frame-ancestors 'none'"
)
_POLICY = "default-src 'none'; frame-ancestors 'none'"
_HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([^\[\]:@/?#\s]+))(?::\d{1,5})?")
_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


def is_open(method: str, path: str) -> bool:
    """Whether this needs no token; ``path`` is without the server's prefix."""
    return method in ("GET", "HEAD") and (path in OPEN or path.startswith("/assets/"))


class Tokens:
    """Tokens and what each allows. The server keeps only their digests. It compares a token with
    all of them, in constant time.

    :raises InvalidInput: a token can be guessed, or can never arrive.
    """

    def __init__(self, tokens: Mapping[str, Scope]) -> None:
        for number, token in enumerate(tokens, 1):
            check_token(token, f"token {number}")
        self._digests = [(_digest(token.encode()), Scope(scope)) for token, scope in tokens.items()]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def scope_of(self, token: bytes) -> Scope:
        """The scope of a token; an unknown token has none."""
        presented, granted = _digest(token), Scope.NONE
        for digest, scope in self._digests:
            if hmac.compare_digest(presented, digest):
                granted = scope
        return granted


class Hosts:
    """The host names of this server. A page of another site whose name was pointed here (DNS
    rebinding) sends a different one.

    The address ``0.0.0.0`` or ``::`` allows every address: only names can be pointed elsewhere.
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._names = {
            "localhost",
            "127.0.0.1",
            "::1",
            *(name.strip("[]").lower().rstrip(".") for name in names),
        }
        self._is_any_address = bool(self._names & {"0.0.0.0", "::"})

    def allow(self, header: str) -> bool:
        """Whether a Host header, with or without a port, names this server."""
        name = _without_port(header.strip().lower())
        return name in self._names or (self._is_any_address and _is_address(name))


class Origins:
    """The origins whose pages may send requests. A page of another site can make a browser send any
    request, though not read the answer.

    Browsers send the origin of a request: as ``Sec-Fetch-Site``, or in older ones and over plain
    HTTP as ``Origin``. Programs do not.
    """

    def __init__(self, hosts: Hosts, allowed: Iterable[str] = ()) -> None:
        self._hosts, self._allowed = hosts, frozenset(allowed)

    def allow(self, headers: Headers) -> bool:
        """Whether a request comes from this server's own page, an allowed origin, or no page at
        all."""
        origin, site = headers.get("origin"), headers.get("sec-fetch-site", "").strip().lower()
        if origin in self._allowed or (origin is not None and "*" in self._allowed):
            return True
        if site:
            return site in ("same-origin", "none")
        return origin is None or self._hosts.allow(origin.partition("://")[2])


class Shield:
    """Turns failures into responses, and puts the headers on every response."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Request, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        has_begun = False

        async def dressed(message: Message) -> None:
            nonlocal has_begun
            if message["type"] == "http.response.start":
                has_begun = True
                _dress(MutableHeaders(raw=message["headers"]), scope)
                message = {**message, "headers": message["headers"]}
            await send(message)

        try:
            await self._app(scope, receive, dressed)
        except Exception as error:  # every error of the application is answered, or logged
            if not has_begun:
                await respond(error, scope)(scope, receive, dressed)
            elif not isinstance(error.__cause__ or error, DatastatesError):
                # those were logged where they occurred
                _logger.exception("%s %s broke off", scope["method"], scope["path"])


class Gatekeeper:
    """Lets permitted requests in, and notes in ``scope["state"]`` what their token allows:
    ``granted``, ``is_known``.

    A path is understood with and without ``prefix``: some proxies remove it, some leave it.
    """

    def __init__(
        self, app: ASGIApp, *, tokens: Tokens, hosts: Hosts, origins: Origins, prefix: str = ""
    ) -> None:
        self._app, self._tokens, self._hosts, self._origins, self._prefix = (
            app,
            tokens,
            hosts,
            origins,
            prefix,
        )

    async def __call__(self, scope: Request, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            return  # there are no web sockets: the server refuses them
        headers = Headers(scope=scope)
        _check_size(scope)
        self._check_host(headers)
        path = (
            scope["path"].removeprefix(self._prefix)
            if scope["path"].startswith(f"{self._prefix}/")
            else scope["path"]
        )
        if self._prefix and path == self._prefix:
            await RedirectResponse(f"{self._prefix}/", status_code=308)(scope, receive, send)
            return
        # in place: Shield reads them too
        scope.update({"path": self._prefix + path, "root_path": self._prefix})
        if not is_open(scope["method"], path) and not self._origins.allow(headers):
            raise Refusal(
                403,
                "unauthorized",
                "a page of another site asks for this: start the server with --cors ORIGIN to"
                " let it",
            )
        scope["state"] = {**scope.get("state", {}), **self._admit(scope["method"], path, headers)}
        if (place := scope["state"].get(PLACE)) is not None and not is_open(scope["method"], path):
            place.hold()  # until the answer is complete; see connections
        if scope["method"] not in _READING:
            receive = await _bounded(headers, receive)
        await self._app(scope, receive, send)

    def _check_host(self, headers: Headers) -> None:
        names = headers.getlist("host")
        if len(names) != 1 or not self._hosts.allow(names[0]):
            said = names[0][:100] if names else ""
            raise Refusal(
                421,
                "invalid-input",
                f"this server does not go by the name {said!r}: start it with --allowed-host NAME",
            )

    def _admit(self, method: str, path: str, headers: Headers) -> dict[str, object]:
        """What the request's token allows, for ``scope["state"]``.

        :raises Refusal: it allows nothing, or not this.
        """
        presented = _token(headers)
        granted = Scope.NONE if presented is None else self._tokens.scope_of(presented)
        is_known = granted > Scope.NONE
        if not self._tokens:
            granted = Scope.READ
        needed = (
            Scope.NONE
            if is_open(method, path)
            else Scope.READ
            if method in _READING
            else Scope.WRITE
        )
        if needed > Scope.NONE and self._tokens and not is_known:
            why = (
                "this server wants a token"
                if presented is None
                else "this server does not know the token"
            )
            raise _unauthorized(f"{why}: send it as 'Authorization: Bearer TOKEN'")
        if granted < needed and not is_known:
            raise _unauthorized("this server only reads: start it with --write, or with tokens")
        if granted < needed:
            raise Refusal(
                403,
                "unauthorized",
                f"this token may {granted.name.lower()}, this needs one that may"
                f" {needed.name.lower()}",
            )
        return {"granted": granted, "is_known": is_known}


def _check_size(scope: Request) -> None:
    if len(scope.get("query_string", b"")) > QUERY_BYTES:
        raise Refusal(
            414, "invalid-input", f"the query has more than {QUERY_BYTES} bytes: ask in several"
        )
    if len(scope["path"]) > _PATH_BYTES:
        raise Refusal(
            414,
            "invalid-input",
            f"the path has more than {_PATH_BYTES} characters: none that is served has",
        )


async def _bounded(headers: Headers, receive: Receive) -> Receive:
    """Read the whole body, which is small, before anything is done."""
    with suppress(ValueError):
        if int(headers.get("content-length", "0")) > BODY_BYTES:
            raise _too_large()
    body, has_more = b"", True
    while has_more:
        message = await receive()
        if message["type"] == "http.disconnect":
            break
        body += message.get("body", b"")
        has_more = message.get("more_body", False)
        if len(body) > BODY_BYTES:
            raise _too_large()
    is_given = False

    async def replay() -> Message:
        nonlocal is_given
        if is_given:
            return await receive()
        is_given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


def _too_large() -> Refusal:
    return Refusal(
        413,
        "invalid-input",
        f"the body has more than {BODY_BYTES} bytes: no route takes as many",
        {"Connection": "close"},
    )


def _unauthorized(detail: str) -> Refusal:
    return Refusal(401, "unauthorized", detail, {"WWW-Authenticate": "Bearer"})


def _token(headers: Headers) -> bytes | None:
    """The token of a request, from its one header, never from its URL."""
    said = headers.getlist("authorization")
    if not said:
        return None
    scheme, _, token = said[0].partition(" ")
    is_one = len(said) == 1 and scheme.lower() == "bearer" and len(token) <= _TOKEN_BYTES
    return token.strip().encode("latin-1") if is_one else b""


def _digest(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()


def _dress(headers: MutableHeaders, scope: Request) -> None:
    root = scope.get("root_path", "")
    is_page = is_open("GET", scope["path"].removeprefix(root)) if "path" in scope else False
    headers.setdefault("Content-Security-Policy", _PAGE_POLICY if is_page else _POLICY)
    for name, value in _HEADERS.items():
        headers.setdefault(name, value)
    headers.setdefault("Cache-Control", "private, no-cache" if "etag" in headers else "no-store")


def _without_port(host: str) -> str:
    """The name in a Host header; empty if the header is malformed."""
    found = _HOST.fullmatch(host)
    return (found[1] or found[2].rstrip(".")) if found else ""


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


# The web server's listening sockets. The kernel holds a connection's bytes, and we only peek at
# them, until the head of its first request is complete: a crowd that only connects costs a
# training next to nothing (see ``transport.connections``).


_LEAST_BYTES = 8  # no request is shorter
_HEAD_BYTES = 16 << 10  # a longer head is no longer awaited here
_END_OF_HEAD = re.compile(rb"\n\r?\n")  # as h11 defines it
_SPACE = 0x20


class Listening:
    """One listening socket; ``made`` creates the protocol that serves an arrival.
    Belongs to the server's loop, which treats it as an ``asyncio.Server``."""

    def __init__(
        self,
        listening: socket.socket,
        admission: Admission,
        made: Callable[[AdmittedConnection], asyncio.Protocol],
    ) -> None:
        listening.setblocking(False)
        name = f"port {listening.getsockname()[1]}"
        self._made = made
        self._beginning: set[asyncio.Task[None]] = set()
        keep_from_children(self, listening)
        self._visitors = Acceptor(
            listening,
            ConnectionLimiter(admission),
            word=_word,
            arrived=self._begin,
            name=name,
            head_bytes=_HEAD_BYTES,
            is_crowd_silent=True,
        )

    def close(self) -> None:
        """Accept no more; connections that have sent no request are closed. Idempotent."""
        self._visitors.close()
        let_go_by(self)

    async def wait_closed(self) -> None:
        """Wait until each accepted connection has been handed to the server."""
        if self._beginning:
            await asyncio.wait(self._beginning)

    def _begin(self, connection: socket.socket, arrival: AdmittedConnection, _: bytes) -> None:
        beginning = asyncio.create_task(self._give(connection, arrival))
        self._beginning.add(beginning)
        beginning.add_done_callback(self._beginning.discard)

    async def _give(self, connection: socket.socket, arrival: AdmittedConnection) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: self._made(arrival), connection
            )
        except OSError:  # the client left at once
            connection.close()
            arrival.release()


def _word(said: bytes) -> int:
    """The length of a request's head; while the head is incomplete, one byte more than has come.
    h11 refuses what cannot be a head."""
    if len(said) < _LEAST_BYTES:
        return _LEAST_BYTES
    is_whole = _END_OF_HEAD.search(said) is not None or len(said) >= _HEAD_BYTES
    return len(said) if is_whole or said[0] <= _SPACE else len(said) + 1
