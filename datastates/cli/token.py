"""``token``: makes a secret in a file that nobody else ever reads."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from datastates.system.secret_file import append_secret, make_token, write_secret

from .shell import AsJson, Shell

__all__ = ["register"]


class Scope(StrEnum):
    """What a token of the web API allows."""

    READ = "read"
    WRITE = "write"
    ADMIN = "admin"


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(token)


def token(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Where it is written, for its owner's eyes only.", show_default=False)],
    scope: Annotated[
        Scope | None,
        typer.Option("--scope", help="For --web-tokens: adds a line 'SCOPE TOKEN'. Without: a file for --token-file.", show_default=False),
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
    if shell.as_json:
        shell.write_json({"file": str(file), "scope": scope})
    else:
        shell.write(f"{'a token' if scope is None else f'a token that may {scope}'} is in {file}: serve with {option} {file}")
