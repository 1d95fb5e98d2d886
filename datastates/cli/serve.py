"""``serve``: a repository on disk, for other processes to clone from."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from datastates.errors import InvalidInput

from .exits import INTERRUPTED
from .shell import AsJson, Shell

if TYPE_CHECKING:
    from datastates.repository import Repository
    from datastates.serving import Server, ServerStats

__all__ = ["register"]

_LOOK_S = 1.0
_Seen = Callable[["ServerStats"], None]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(serve)


def serve(
    context: typer.Context,
    url: Annotated[
        str | None, typer.Argument(metavar="URL", help="Where to listen (default: ucx://127.0.0.1:0, any free port).", show_default=False)
    ] = None,
    store: Annotated[
        str | None,
        typer.Option("--store", "--repo", "-r", metavar="REPO", help="The repository (default: as --repo elsewhere).", show_default=False),
    ] = None,
    host: Annotated[str | None, typer.Option("--host", metavar="ADDRESS", help="Instead of URL.", show_default=False)] = None,
    port: Annotated[int | None, typer.Option("--port", min=0, max=65535, help="Instead of URL.", show_default=False)] = None,
    token_file: Annotated[
        Path | None, typer.Option("--token-file", metavar="FILE", help="Holds the token (default: DATASTATES_TOKEN).", show_default=False)
    ] = None,
    tls_cert: Annotated[
        Path | None, typer.Option("--tls-cert", metavar="FILE", help="TLS, with this certificate.", show_default=False)
    ] = None,
    tls_key: Annotated[Path | None, typer.Option("--tls-key", metavar="FILE", help="Its key.", show_default=False)] = None,
    writable: Annotated[bool, typer.Option("--writable", help="Take states that peers push, and make them durable.")] = False,
    timeout: Annotated[
        float, typer.Option("--timeout", metavar="SECONDS", min=0.1, help="A peer that is silent for so long is gone.")
    ] = 10.0,
    as_json: AsJson = False,
) -> None:
    """Let other processes browse a repository and clone its states, until Ctrl-C or SIGTERM. Beyond 127.0.0.1 a token is a must."""
    shell = Shell(context, store, as_json)
    where = _where(url, host, port)
    if tls_key is not None and tls_cert is None:
        raise InvalidInput("--tls-key is of no use without --tls-cert: name the certificate too")
    with _signals() as ended, shell.repository() as repository:
        from datastates.transport.contract import Tls

        tls = None if tls_cert is None else Tls(certificate=tls_cert, key=tls_key)
        with repository.serve(where, token_file=token_file, tls=tls, is_writable=writable, timeout_s=timeout) as server:
            _announce(shell, repository, server, has_tls=tls is not None, is_writable=writable)
            with _status(shell) as show:
                _attend(repository, server, ended, show)
    if ended.number == signal.SIGINT:
        raise typer.Exit(INTERRUPTED)


class _Ended(threading.Event):
    """Set by the signal that ends the server."""

    number: int | None = None


@contextmanager
def _signals() -> Iterator[_Ended]:
    """SIGINT and SIGTERM end the server in order; the second of them ends the process as it would have."""
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


def _where(url: str | None, host: str | None, port: int | None) -> str:
    if url is not None:
        if host is not None or port is not None:
            raise InvalidInput(f"{url} names host and port: leave out --host and --port, or the url")
        return url
    host = "127.0.0.1" if host is None else host
    return f"ucx://{f'[{host}]' if ':' in host else host}:{port or 0}"


def _announce(shell: Shell, repository: Repository, server: Server, *, has_tls: bool, is_writable: bool) -> None:
    """Say where it is, at once: who started this may wait for the line."""
    if shell.as_json:
        shell.write_json({"url": server.url, "repository": str(repository.location), "writable": is_writable, "tls": has_tls})
    else:
        options = " --tls-ca FILE" if has_tls else ""
        named = [ref.name for ref in repository.refs()]
        rev = next((name for name in ("main", *named) if name in named), "REV")
        for line in (
            f"serving {repository.location} at {server.url}",
            f"clone with: datastates clone {_dialled(server.url)}/{rev} --into DIR{options}",
        ):
            shell.console.print(line, soft_wrap=True)  # to be copied: not folded
    sys.stdout.flush()


def _dialled(url: str) -> str:
    """What others dial: a server on all interfaces is reached by the host's name."""
    from datastates.environment import node_name

    for everywhere in ("//0.0.0.0:", "//[::]:"):
        url = url.replace(everywhere, f"//{node_name()}:")
    return url


def _attend(repository: Repository, server: Server, ended: _Ended, show: _Seen) -> None:
    """Wait for the end; meanwhile what peers push becomes durable, named or not, for this process's memory ends with it."""
    asked: set[str] = set()
    while not ended.wait(_LOOK_S):
        _make_durable(repository, asked)
        show(server.stats())
    server.close()
    _make_durable(repository, asked)


def _make_durable(repository: Repository, asked: set[str]) -> None:
    if repository._memory is None or repository._running is None:
        return
    for uid in set(repository._memory.uids()) - asked:
        asked.add(uid)
        repository._running.want(uid)


@contextmanager
def _status(shell: Shell) -> Iterator[_Seen]:
    """A line that changes, for people only."""
    if shell.as_json or not shell.console.is_terminal:
        yield lambda stats: None
        return
    from rich.live import Live
    from rich.text import Text

    from .render import size_text

    with Live(console=shell.console, auto_refresh=False, transient=True) as live:

        def show(stats: ServerStats) -> None:
            said = f"{stats.peers} connections, {stats.peers_ever} so far, {size_text(stats.bytes_sent)} sent, {stats.refused} turned away"
            live.update(Text(f"{said} (Ctrl-C ends)", style="dim"), refresh=True)

        yield show
