"""The commands ``serve`` and ``token``.

``serve`` opens repositories on disk for browsers and programs, and for clones by other processes.
``token`` writes a secret to a private file.
"""

from __future__ import annotations

import gc
import re
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from enum import StrEnum
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from datastates.config import Data
from datastates.errors import InvalidInput
from datastates.lineage.views.text import size_text
from datastates.maintenance.location import locate
from datastates.system import logs
from datastates.system.files import append_secret, make_token, write_secret

from .app import AsJson, Globals, Shell, function_of
from .interrupt import INTERRUPTED, orderly

if TYPE_CHECKING:
    from datastates.api.serve import WebServer
    from datastates.repository import Repository
    from datastates.transport.serving import Server, ServerStats

_NAMED = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)=(.+)")
_LOOK_S = 1.0
_TLS = "for TLS put a proxy before the page (docs/deployment.md, 'Behind a proxy')"
_PEERS = "leave out what is for peers, or add a tcp:// address"
_PAGE = "leave out what is for the page, or add an http:// address"
_OF_CLONES = {
    "token_file": "the tokens of the page are in the file of --web-tokens",
    "tls_certificate": _TLS,
    "tls_key": _TLS,
    "writable": "--write lets the page write",
    "data": _PEERS,
    "timeout": _PEERS,
}
"""The options that concern only addresses for peers, by parameter, and what to do instead."""

_OF_PAGE = {
    "web_tokens": "the token of peers is in the file of --token-file",
    "write": "--writable lets peers push states",
    **dict.fromkeys(
        ("allowed_host", "prefix", "cors", "trusted_proxy", "access_log", "pictures"), _PAGE
    ),
}
"""Those that concern only addresses of the page."""

_Seen = Callable[["ServerStats"], None]


@contextmanager
def opened(shell: Shell, options: Globals, named: Sequence[str]) -> Iterator[dict[str, Repository]]:
    """The repositories that were named (``NAME=URL`` or URL), or the command's own, by name.

    :raises InvalidInput: two have the same name.
    :raises NotFound: one does not exist.
    """
    places: list[tuple[str | None, str]] = []
    for each in named or [shell.url]:
        match = _NAMED.fullmatch(each)
        places.append((match[1], match[2]) if match else (None, each))
    located = [(name, locate(url, options.packs, must_exist=True)) for name, url in places]
    from datastates.api.serve import name_of
    from datastates.repository import open as open_repository

    with ExitStack() as stack:
        found: dict[str, Repository] = {}
        for name, location in located:
            url = location.database_url if location.root is None else location.root
            repository = stack.enter_context(open_repository(url, packs=location.packs))
            name = name or name_of(repository)
            if name in found:
                raise InvalidInput(
                    f"two repositories would be called {name!r}: say how one is to be called:"
                    f" --repo NAME={location}"
                )
            found[name] = repository
        yield found


def serve_web(
    repositories: Mapping[str, Repository],
    url: str,
    *,
    tokens_file: Path | None,
    is_writable: bool,
    has_access_log: bool,
    pictures: str | None,
    **options: Any,
) -> tuple[WebServer, str | None]:
    """The server, and the token that was made for it if it is writable and none was given."""
    from datastates.api.routing import Scope
    from datastates.api.security import read_tokens
    from datastates.api.serve import WebServer

    show = (
        None
        if pictures is None
        else function_of(pictures, "gives a picture for the index of a sample")
    )
    tokens = read_tokens(tokens_file)
    made = make_token() if is_writable and not tokens else None
    if is_writable and tokens and max(tokens.values()) < Scope.WRITE:
        raise InvalidInput(
            "--write, but no token may write: add a line 'write TOKEN' to the tokens, or leave out"
            " --write"
        )
    if has_access_log:
        _log_access()
    server = WebServer(
        repositories,
        url,
        tokens={made: Scope.WRITE} if made else tokens,
        has_access_log=has_access_log,
        **options,
    )
    if show is not None:
        server.show_samples(show)
    return server, made


def announce_web(
    shell: Shell,
    repositories: Mapping[str, Repository],
    server: WebServer,
    token: str | None,
    dialled: Callable[[str], str],
) -> None:
    """Print the addresses; the address with the token is printed once, and only here."""
    from datastates.api.app import STATIC

    if shell.as_json:
        said: dict[str, object] = {"url": server.url, "repositories": list(repositories)}
        shell.write_json({**said, "token": token} if token else said)
        return
    names = ", ".join(
        f"{name} ({repository.location})" for name, repository in repositories.items()
    )
    shell.write(f"serving {names} at {server.url}")
    address = dialled(server.url) + (
        f"{'' if server.url.endswith('/') else '/'}#token={token}" if token else ""
    )
    shell.write(f"open {address} in a browser; Ctrl-C ends it")
    if not (STATIC / "index.html").is_file():
        shell.hint(
            "the page is not built: `make ui` in the source tree builds it; the API works"
            " without it"
        )


def _log_access() -> None:
    import logging

    class Masked(logging.Formatter):
        def format(self, record: logging.LogRecord) -> str:
            return logs.text(super().format(record))

    handler = logging.StreamHandler()
    handler.setFormatter(Masked("%(asctime)s %(message)s"))
    logger = logging.getLogger("uvicorn.access")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False


# --- ``serve`` ---


def serve(
    context: typer.Context,
    urls: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="URL",
            help=(
                "Where to listen: http://HOST:PORT for the page and the web API (default:"
                " http://127.0.0.1:8642), "
                "tcp://HOST:PORT for other processes to clone from (ucx:// where UCX may carry the"
                " bytes); or both. Port 0: any that is free."
            ),
            show_default=False,
        ),
    ] = None,
    repos: Annotated[
        list[str] | None,
        typer.Option(
            "--repo",
            "-r",
            "--store",
            metavar="[NAME=]REPO",
            help=(
                "A repository (default: as --repo elsewhere). May be repeated. Its name is its"
                " folder's unless it is given."
            ),
            show_default=False,
        ),
    ] = None,
    host: Annotated[
        str | None,
        typer.Option(
            "--host",
            metavar="ADDRESS",
            help="Listen for HTTP at this address, instead of naming a URL.",
            show_default=False,
        ),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(
            "--port",
            min=0,
            max=65535,
            help="Listen for HTTP at this port, instead of naming a URL.",
            show_default=False,
        ),
    ] = None,
    write: Annotated[
        bool,
        typer.Option(
            "--write", help="The page may write; makes a token if there is none, and prints it."
        ),
    ] = False,
    web_tokens: Annotated[
        Path | None,
        typer.Option(
            "--web-tokens",
            metavar="FILE",
            help="http: a file of lines 'SCOPE TOKEN' (default: DATASTATES_WEB_TOKENS).",
            show_default=False,
        ),
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(
            "--allowed-host",
            metavar="NAME",
            help="http: a name that this server goes by. May be repeated.",
            show_default=False,
        ),
    ] = None,
    prefix: Annotated[
        str,
        typer.Option(
            "--prefix", metavar="PATH", help="http: the path below which a proxy serves it."
        ),
    ] = "",
    cors: Annotated[
        list[str] | None,
        typer.Option(
            "--cors",
            metavar="ORIGIN",
            help="http: an origin whose pages may ask. May be repeated.",
            show_default=False,
        ),
    ] = None,
    trusted_proxy: Annotated[
        list[str] | None,
        typer.Option(
            "--trusted-proxy",
            metavar="ADDRESS",
            help="http: whose X-Forwarded headers are believed. May be repeated.",
            show_default=False,
        ),
    ] = None,
    access_log: Annotated[
        bool, typer.Option("--access-log", help="http: a line on standard error for each request.")
    ] = False,
    pictures: Annotated[
        str | None,
        typer.Option(
            "--pictures",
            metavar="MODULE:FUNCTION",
            help="http: gives the picture of a sample for its index, for the page's outliers.",
            show_default=False,
        ),
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(
            "--token-file",
            metavar="FILE",
            help="tcp, ucx: holds the token (default: DATASTATES_TOKEN).",
            show_default=False,
        ),
    ] = None,
    tls_certificate: Annotated[
        Path | None,
        typer.Option(
            "--tls-certificate",
            metavar="FILE",
            help="tcp, ucx: TLS, with this certificate.",
            show_default=False,
        ),
    ] = None,
    tls_key: Annotated[
        Path | None,
        typer.Option("--tls-key", metavar="FILE", help="tcp, ucx: its key.", show_default=False),
    ] = None,
    writable: Annotated[
        bool,
        typer.Option(
            "--writable", help="tcp, ucx: take states that peers push, and make them durable."
        ),
    ] = False,
    data: Annotated[
        Data | None,
        typer.Option(
            "--data",
            help=(
                "What carries the bytes of clones (default: DATASTATES_DATA, else auto). ucx needs"
                " ucx://."
            ),
            show_default=False,
        ),
    ] = None,
    timeout: Annotated[
        float,
        typer.Option(
            "--timeout",
            metavar="SECONDS",
            min=0.1,
            help="tcp, ucx: treat a peer that is silent for this long as dead.",
        ),
    ] = 10.0,
    as_json: AsJson = False,
) -> None:
    """Serve repositories until Ctrl-C or SIGTERM: the page and the web API, or states to clone.

    Beyond 127.0.0.1 it needs a token."""
    from datastates.transport.contract import Tls

    shell = Shell(context, None, as_json)
    web_urls, clone_urls = _where(urls or [], host, port)
    _check_options(context, web_urls, clone_urls)
    if tls_key is not None and tls_certificate is None:
        raise InvalidInput(
            "--tls-key is of no use without --tls-certificate: name the certificate too"
        )
    orderly()
    with (
        _signals() as ended,
        opened(shell, context.ensure_object(Globals), repos or []) as repositories,
        ExitStack() as stack,
    ):
        for url in web_urls:
            made, token = serve_web(
                repositories,
                url,
                tokens_file=web_tokens,
                is_writable=write,
                has_access_log=access_log,
                pictures=pictures,
                allowed_hosts=allowed_host or (),
                prefix=prefix,
                cors=cors or (),
                trusted_proxies=trusted_proxy or (),
            )
            stack.callback(made.close)
            # a full collection looks at everything that was imported: requests would wait for 0.2
            # s, again and again
            gc.freeze()
            announce_web(shell, repositories, made, token, _dialled)
        servers: list[tuple[Repository, Server]] = []
        for url in clone_urls:
            if len(repositories) > 1:
                raise InvalidInput(
                    f"{url} serves the states of one repository, not of"
                    f" {', '.join(repositories)}: start a server for each"
                )
            (repository,) = repositories.values()
            tls = None if tls_certificate is None else Tls(certificate=tls_certificate, key=tls_key)
            server = repository.serve(
                url,
                token_file=token_file,
                tls=tls,
                is_writable=writable,
                timeout_s=timeout,
                data=data,
            )
            servers.append((repository, stack.enter_context(server)))
            _announce(
                shell, repository, server, has_tls=tls_certificate is not None, is_writable=writable
            )
        sys.stdout.flush()
        with _status(shell) as show:
            _attend(servers, ended, show)
    if ended.number == signal.SIGINT:
        raise typer.Exit(INTERRUPTED)


def _where(urls: Sequence[str], host: str | None, port: int | None) -> tuple[list[str], list[str]]:
    """The addresses for people and those for peers."""
    if urls and (host is not None or port is not None):
        raise InvalidInput(
            f"{urls[0]} names host and port: leave out --host and --port, or the url"
        )
    if not urls:
        host = "127.0.0.1" if host is None else host
        return [
            f"http://{f'[{host}]' if ':' in host else host}:{8642 if port is None else port}"
        ], []
    return [url for url in urls if url.startswith("http:")], [
        url for url in urls if not url.startswith("http:")
    ]


def _check_options(
    context: typer.Context, web_urls: Sequence[str], clone_urls: Sequence[str]
) -> None:
    """Refuse options that none of the addresses would use.

    :raises InvalidInput: there is one. The text names the next step.
    """
    for of, urls, steps in (
        ("tcp:// and ucx://", clone_urls, _OF_CLONES),
        ("http://", web_urls, _OF_PAGE),
    ):
        given = {
            parameter.opts[0]: steps[parameter.name]
            for parameter in context.command.params
            if parameter.name in steps
            and (source := context.get_parameter_source(parameter.name)) is not None
            and source.name == "COMMANDLINE"
        }
        if given and not urls:
            what = f"{' and '.join(given)} {'concern' if len(given) > 1 else 'concerns'} only {of}"
            raise InvalidInput(
                f"{what}, not {', '.join([*web_urls, *clone_urls])}:"
                f" {'; '.join(dict.fromkeys(given.values()))}"
            )


class _Ended(threading.Event):
    """Set by the signal that ends the server."""

    number: int | None = None


@contextmanager
def _signals() -> Iterator[_Ended]:
    """Let SIGINT and SIGTERM end the server in order; a second signal ends the process as it
    would have without this."""
    ended = _Ended()

    def end(number: int, frame: FrameType | None) -> None:
        ended.number = number
        ended.set()
        restore()

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield ended
    finally:
        restore()


def _announce(
    shell: Shell, repository: Repository, server: Server, *, has_tls: bool, is_writable: bool
) -> None:
    """Print the address at once: the process that started this may wait for the line."""
    options = " --tls-ca FILE" if has_tls else ""
    named = [ref.name for ref in repository.refs()]
    rev = next((name for name in ("main", *named) if name in named), "REV")
    shell.report(
        {
            "url": server.url,
            "repository": str(repository.location),
            "writable": is_writable,
            "tls": has_tls,
        },
        f"serving {repository.location} at {server.url}",
        f"clone with: datastates clone {_dialled(server.url)}/{rev} --repo DIR{options}",
    )


def _dialled(url: str) -> str:
    """The address that others dial: a server on all interfaces is reached by the host's name."""
    for everywhere in ("//0.0.0.0:", "//[::]:"):
        url = url.replace(everywhere, f"//{socket.gethostname()}:")
    return url


def _attend(servers: Sequence[tuple[Repository, Server]], ended: _Ended, show: _Seen) -> None:
    """Wait for the end.

    Meanwhile make pushed states durable, named or not, because this process's memory ends with
    it."""
    asked: set[str] = set()
    while not ended.wait(_LOOK_S):
        for repository, server in servers:
            _make_durable(repository, asked)
            show(server.stats())
    for repository, server in servers:
        server.close()
        _make_durable(repository, asked)


def _make_durable(repository: Repository, asked: set[str]) -> None:
    captured, running = repository.core.tiers.captured, repository.core.running
    if captured is None or running is None:
        return
    for uid in set(captured.uids()) - asked:
        asked.add(uid)
        running.want(uid)


@contextmanager
def _status(shell: Shell) -> Iterator[_Seen]:
    """A line that changes, shown only to people."""
    if shell.as_json or not shell.console.is_terminal:
        yield lambda stats: None
        return
    from rich.live import Live

    with Live(console=shell.console, auto_refresh=False, transient=True) as live:

        def show(stats: ServerStats) -> None:
            said = (
                f"{stats.peers} connections, {stats.peers_ever} so far,"
                f" {size_text(stats.bytes_sent)} sent, {stats.refused} turned away"
            )
            live.update(Text(f"{said} (Ctrl-C ends)", style="dim"), refresh=True)

        yield show


# --- ``token``: a secret in a file that only its owner can read ---


class Scope(StrEnum):
    """What a token of the web API allows."""

    READ = "read"
    WRITE = "write"
    ADMIN = "admin"


def token(
    context: typer.Context,
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="Where it is written, for its owner's eyes only.",
            show_default=False,
        ),
    ],
    scope: Annotated[
        Scope | None,
        typer.Option(
            "--scope",
            help="For --web-tokens: adds a line 'SCOPE TOKEN'. Without: a file for --token-file.",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Make a token that cannot be guessed, and write it to a file. It is not shown."""
    shell = Shell(context, None, as_json)
    if scope is None:
        write_secret(file, make_token())
    else:
        append_secret(file, f"{scope} {make_token()}")
    option = "--token-file" if scope is None else "--web-tokens"
    what = "a token" if scope is None else f"a token that may {scope}"
    shell.report(
        {"file": str(file), "scope": scope}, f"{what} is in {file}: serve with {option} {file}"
    )
