"""``restore``: writes the bytes of a state to files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from datastates.errors import InvalidInput

from .complete import ref_names
from .shell import AsJson, Repo, Shell

if TYPE_CHECKING:
    from rich.progress import Progress

__all__ = ["counting", "progress_of", "register"]

Rev = Annotated[str, typer.Argument(metavar="REV", help="A state: uid, name, main~3, main@best:val_loss, …", autocompletion=ref_names)]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(restore)


def restore(
    context: typer.Context,
    rev: Rev,
    into: Annotated[
        Path, typer.Option("--into", metavar="FILE.safetensors|FOLDER", help="One file, or a folder with one file for each object.")
    ],
    only: Annotated[
        list[str] | None,
        typer.Option(
            "--only", metavar="PATTERN", help="Only these objects or tensors: model, 'model/*.weight'; may be repeated.", show_default=False
        ),
    ] = None,
    nearest: Annotated[bool, typer.Option("--nearest", help="If its bytes are gone, take the nearest state by steps.")] = False,
    force: Annotated[bool, typer.Option("--force", "-f", help="Replace files that are there.")] = False,
    repo: Repo = None,
    as_json: AsJson = False,
) -> None:
    """Write the tensors of a state to safetensors files, and read them back to check them."""
    shell = Shell(context, repo, as_json)
    is_file = into.suffix == ".safetensors"
    if is_file and into.is_dir():
        raise InvalidInput(f"{into} is a folder: name a file in it, or a folder without the ending .safetensors")
    if not is_file and into.exists() and not into.is_dir():
        raise InvalidInput(f"{into} is a file: name a folder, or a file that ends in .safetensors")
    with shell.repository() as repository:
        from datastates.export.tensors import export, plan_export

        state = repository.core.state(rev, nearest=nearest)
        tree = repository.load(state.uid, only=only or None)
        plan = plan_export(tree, state, into)
        taken = [str(path) for path in plan if path.exists()]
        if taken and not force:
            raise InvalidInput(f"{', '.join(taken)} would be replaced: name another place, or add --force")
        with progress_of(shell) as progress:
            total = 2 * sum(file.bytes_total for file in plan.values())
            bar = progress.add_task(f"restoring {state.uid[:10]}", total=total)
            export(plan, on_progress=lambda count: progress.advance(bar, count))
    written = [{"path": str(path), "tensors": len(file.tensors), "bytes": file.bytes_total} for path, file in plan.items()]
    if shell.as_json:
        shell.write_json({"state": state.uid, "step": state.step, "files": written})
        return
    from .render import size_text

    for file in written:
        shell.write(f"{file['path']}: {file['tensors']} tensors, {size_text(int(str(file['bytes'])))}")


@contextmanager
def counting(shell: Shell, what: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar that counts things other than bytes: it takes how many are done, and how many there are at most."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    hidden = shell.as_json or not shell.console.is_terminal
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=hidden) as progress:
        bar = progress.add_task(what, total=None)
        yield lambda done, total: progress.update(bar, completed=done, total=total)


def progress_of(shell: Shell) -> Progress:
    """A progress bar on standard error, shown only to people."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True, disable=shell.as_json or not shell.console.is_terminal)
