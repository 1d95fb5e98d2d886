"""``serve`` for people and programs: repositories by name, tokens, the address of the page."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from datastates.errors import InvalidInput
from datastates.opening.location import locate
from datastates.system import masking

from .functions import function_of
from .shell import Globals, Shell

if TYPE_CHECKING:
    from datastates.api.serve import WebServer
    from datastates.repository import Repository

__all__ = ["WebOptions", "announce_web", "opened", "serve_web"]

_NAMED = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)=(.+)")


@dataclass(frozen=True, slots=True)
class WebOptions:
    """The options of an ``http://`` address, as the command line gives them."""

    tokens: Path | None
    is_writable: bool
    allowed_hosts: Sequence[str]
    prefix: str
    cors: Sequence[str]
    trusted_proxies: Sequence[str]
    has_access_log: bool
    pictures: str | None = None


@contextmanager
def opened(shell: Shell, options: Globals, named: Sequence[str]) -> Iterator[dict[str, Repository]]:
    """The repositories that were named (``NAME=URL`` or URL), or the command's own; by name.

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
                raise InvalidInput(f"two repositories would be called {name!r}: say how one is to be called: --repo NAME={location}")
            found[name] = repository
        yield found


def serve_web(repositories: Mapping[str, Repository], url: str, options: WebOptions) -> tuple[WebServer, str | None]:
    """The server, and the token that was made for it if it is writable and none was given."""
    from datastates.api.routing import Scope
    from datastates.api.serve import WebServer
    from datastates.api.tokens import make_token, read_tokens

    show = None if options.pictures is None else function_of(options.pictures, "gives a picture for the index of a sample")
    tokens = read_tokens(options.tokens)
    made = make_token() if options.is_writable and not tokens else None
    if options.is_writable and tokens and max(tokens.values()) < Scope.WRITE:
        raise InvalidInput("--write, but no token may write: add a line 'write TOKEN' to the tokens, or leave out --write")
    if options.has_access_log:
        _log_access()
    server = WebServer(
        repositories,
        url,
        tokens={made: Scope.WRITE} if made else tokens,
        allowed_hosts=options.allowed_hosts,
        prefix=options.prefix,
        cors=options.cors,
        trusted_proxies=options.trusted_proxies,
        has_access_log=options.has_access_log,
    )
    if show is not None:
        server.show_samples(show)
    return server, made


def announce_web(
    shell: Shell, repositories: Mapping[str, Repository], server: WebServer, token: str | None, dialled: Callable[[str], str]
) -> None:
    """Print the addresses; the address with the token is printed once, and only here."""
    from datastates.api.page import STATIC

    if shell.as_json:
        said: dict[str, object] = {"url": server.url, "repositories": list(repositories)}
        shell.write_json({**said, "token": token} if token else said)
        return
    names = ", ".join(f"{name} ({repository.location})" for name, repository in repositories.items())
    shell.write(f"serving {names} at {server.url}")
    address = dialled(server.url) + (f"{'' if server.url.endswith('/') else '/'}#token={token}" if token else "")
    shell.write(f"open {address} in a browser; Ctrl-C ends it")
    if not (STATIC / "index.html").is_file():
        shell.hint("the page is not built: `make ui` in the source tree builds it; the API works without it")


def _log_access() -> None:
    import logging

    class Masked(logging.Formatter):
        def format(self, record: logging.LogRecord) -> str:
            return masking.text(super().format(record))

    handler = logging.StreamHandler()
    handler.setFormatter(Masked("%(asctime)s %(message)s"))
    logger = logging.getLogger("uvicorn.access")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
