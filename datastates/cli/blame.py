"""``blame``: which state last changed each tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from .complete import ref_names
from .shell import AsJson, Repo, Shell

if TYPE_CHECKING:
    from datastates.algebra.blame import Blame

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(blame)


def blame(
    context: typer.Context,
    rev: Annotated[
        str, typer.Argument(metavar="REV", help="A state: uid, name, main~3, main@best:val_loss, …", autocompletion=ref_names)
    ] = "main",
    only: Annotated[
        list[str] | None,
        typer.Option(
            "--only", metavar="PATTERN", help="Only these objects or tensors: model, 'model/*.weight'; may be repeated.", show_default=False
        ),
    ] = None,
    size: Annotated[bool, typer.Option("--size", help="Also by how much, relative to the old norm: reads both versions.")] = False,
    repo: Repo = None,
    as_json: AsJson = False,
) -> None:
    """Show which state last changed each tensor, along first parents; where bytes are gone, between which states it was.

    It compares digests, and reads bytes only where small tensors share what changed.
    """
    from .payload import counting

    shell = Shell(context, repo, as_json)
    with shell.repository() as repository, counting(shell, "states") as count:
        found = repository.blame(rev, only=only or None, size=size, on_progress=count)
    if shell.as_json:
        from datastates.algebra.blame import to_plain

        shell.write_lines(to_plain(each) for each in found)
        return
    from .render import table

    made = table("tensor", "shape", "last changed", *(["change / norm"] if size else []), "how")
    for each in found:
        shape = "[" + ", ".join(map(str, each.shape)) + "]"
        made.add_row(each.path, shape, _when(each), *([_much(each)] if size else []), _how(each))
    shell.write(made)
    if any(each.earliest is not None for each in found):
        shell.hint("the bytes of the states in between are gone, or are not here")


def _when(found: Blame) -> str:
    last = f"step {found.state.step}, {found.state.uid[:10]}"
    earliest = found.earliest
    return last if earliest is None else f"at or after step {earliest.step}, {earliest.uid[:10]}; at or before {last}"


def _much(found: Blame) -> str:
    return "" if found.relative is None else f"{found.relative:.4g}"


def _how(found: Blame) -> str:
    return f"{found.change}{', by a merge or from its other parents' * found.is_merged}"
