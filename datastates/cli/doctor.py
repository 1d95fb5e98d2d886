"""``doctor``: what works on this machine, and what would make the rest work."""

from __future__ import annotations

from contextlib import nullcontext

import typer

from .interrupt import orderly
from .shell import AsJson, Repo, Shell

__all__ = ["register"]

_STYLES = {"ok": "green", "warn": "yellow", "missing": "bright_black", "failed": "bold red"}
_UNAVAILABLE = 7


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(doctor)


def doctor(context: typer.Context, repo: Repo = None, as_json: AsJson = False) -> None:
    """Check torch, CUDA, UCX, MPI, databases, memory and disk. Writes 64 MiB where the packs are, twice, and moves as much over UCX."""
    from rich.text import Text

    from .checks import Verdict, examine, interpreter
    from .render import table

    shell = Shell(context, repo, as_json)
    location = shell.location(must_exist=False)
    found = [*interpreter()]
    orderly()
    with shell.console.status("looking around") if shell.console.is_terminal and not shell.as_json else nullcontext():
        found.extend(examine(location))
    is_fit = all(check.status is not Verdict.FAILED for check in found)
    if shell.as_json:
        shell.write_json({"ok": is_fit, "checks": found})
    else:
        made = table("check", "status", "found", "next step")
        for column in made.columns[2:]:
            column.no_wrap = False
        for check in found:
            made.add_row(check.name, Text(check.status.value, style=_STYLES[check.status]), Text(check.detail), Text(check.next or ""))
        shell.write(made)
    if not is_fit:
        raise typer.Exit(_UNAVAILABLE)
