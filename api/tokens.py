"""The tokens of a server: from a file, from the environment, or made for the occasion."""

from __future__ import annotations

import os
from collections.abc import Mapping

from datastates.errors import InvalidInput
from datastates.system.secret_file import is_sendable, make_token, read_secret

from .routing import Scope

__all__ = ["VARIABLE", "check_token", "make_token", "read_tokens"]

VARIABLE = "DATASTATES_WEB_TOKENS"
_CHARACTERS = 16
_MAKE = "make one with: datastates token FILE --scope read"
_SCOPES = {scope.name.lower(): scope for scope in (Scope.READ, Scope.WRITE, Scope.ADMIN)}


def read_tokens(path: str | os.PathLike[str] | None = None, environ: Mapping[str, str] | None = None) -> dict[str, Scope]:
    """Each token and its scope, from a file with lines ``SCOPE TOKEN``, else from ``DATASTATES_WEB_TOKENS``; there may be none.

    :raises InvalidInput: the file cannot be read; a line has no scope, or a token that can be guessed; or other users
        of the machine can read the file. Tokens are not shown.
    """
    if path is None:
        said = (os.environ if environ is None else environ).get(VARIABLE, "")
        return dict(_entry(*each.partition(":")[::2], where=f"{VARIABLE}, entry {n}") for n, each in enumerate(said.split(), 1))
    try:
        lines = read_secret(path, f"the file of tokens {os.fspath(path)!r}").decode().splitlines()
    except UnicodeDecodeError as exc:
        raise InvalidInput(f"the tokens in {os.fspath(path)!r} cannot be read (it is no text): name a file with lines SCOPE TOKEN") from exc
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
        raise InvalidInput(f"{where}: it begins with no scope: write {', '.join(_SCOPES)}, then the token")
    check_token(token, where)
    return token, _SCOPES[scope.lower()]


def check_token(token: str, where: str) -> None:
    """Raise unless a token can be used.

    :raises InvalidInput: it can be guessed, or can never arrive. The token is not shown.
    """
    if len(token) < _CHARACTERS:
        raise InvalidInput(f"{where}: the token has {len(token)} characters, and fewer than {_CHARACTERS} can be guessed: {_MAKE}")
    if not is_sendable(token):
        raise InvalidInput(f"{where}: the token has characters that a header cannot carry: {_MAKE}")
