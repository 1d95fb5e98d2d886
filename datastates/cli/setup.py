"""``init`` and ``demo``: the first commands to run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from datastates.opening.location import check_whole

from .interrupt import orderly
from .shell import AsJson, Repo, Shell

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command()(init)
    app.command()(demo)


def init(
    context: typer.Context,
    url: Annotated[
        str | None, typer.Argument(metavar="URL", help="A folder, or postgresql://… (default: as --repo says).", show_default=False)
    ] = None,
    repo: Repo = None,
    as_json: AsJson = False,
) -> None:
    """Make a repository; one that exists is migrated to this version and otherwise left as it is."""
    from datastates.lineage import Database

    shell = Shell(context, url or repo, as_json)
    location = shell.location(must_exist=False)
    check_whole(location)
    existed = location.root is not None and location.is_present
    orderly()
    Database(location.database_url).close()
    location.packs.mkdir(parents=True, exist_ok=True)
    root = None if location.root is None else str(location.root)
    if shell.as_json:
        shell.write_json({"root": root, "database": str(location), "packs": str(location.packs), "existed": existed})
    else:
        shell.write(f"repository {'found' if existed else 'ready'} in {location}, packs in {location.packs}")


def demo(
    context: typer.Context,
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where it is made; a folder of an earlier demo is emptied.")] = Path(
        "runs/demo"
    ),
    short: Annotated[bool, typer.Option("--short", help="A tiny model and a few steps.")] = False,
) -> None:
    """Train a small GPT, capture every step, fork it, prove that it resumes bit for bit, and find wrong labels by their losses."""
    from datastates.demo.main_job import main

    orderly()
    raise typer.Exit(main([str(folder), *(["--short"] if short else [])]))
