"""``export`` and ``import``: states as a folder that can be carried elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .complete import ref_names
from .shell import AsJson, Repo, Shell

if TYPE_CHECKING:
    from datastates.export.bundle import Bundle

__all__ = ["register"]

Revs = Annotated[list[str], typer.Argument(metavar="REV…", help="States: uids, names, main~3, …", autocompletion=ref_names)]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("export")(export_states)
    app.command("import")(import_states)


def export_states(
    context: typer.Context,
    revs: Revs,
    bundle: Annotated[Path, typer.Option("--bundle", metavar="FOLDER", help="A new folder.")],
    parents: Annotated[
        bool, typer.Option("--parents", help="Also the bytes of what merged states were made of, so that they can be verified.")
    ] = False,
    repo: Repo = None,
    as_json: AsJson = False,
) -> None:
    """Write states with their lineage and tags to a folder that `import` reads elsewhere."""
    shell = Shell(context, repo, as_json)
    with shell.repository() as repository:
        from datastates.export.bundle import export_bundle

        done = export_bundle(repository, revs, bundle, with_parents=parents)
    _say(shell, done, f"to {bundle}", "written")


def import_states(
    context: typer.Context,
    bundle: Annotated[Path, typer.Argument(metavar="FOLDER", help="What `export` wrote.")],
    digest: Annotated[
        str | None, typer.Option("--digest", metavar="HEX", help="What `export` said of it; a bundle of another digest is refused.")
    ] = None,
    repo: Repo = None,
    as_json: AsJson = False,
) -> None:
    """Bring the states of a folder that `export` wrote into a repository, durable; those that no tag names get the tag import/UID."""
    shell = Shell(context, repo, as_json)
    with shell.repository() as repository:
        from datastates.export.bundle import import_bundle

        done = import_bundle(repository, bundle, digest=digest)
        named = {ref.state for ref in repository.refs()}
        for state in done.states:
            if state.uid not in named:
                repository.tag(f"import/{state.uid[:10]}", state.uid)
    _say(shell, done, f"from {bundle}", "new")


def _say(shell: Shell, done: Bundle, where: str, what: str) -> None:
    if shell.as_json:
        uids = [state.uid for state in done.states]
        shell.write_json(
            {
                "states": uids,
                "ancestors": done.ancestors,
                "tags": [ref.name for ref in done.tags],
                "bytes": done.bytes_new,
                "digest": done.digest,
            }
        )
        return
    from .render import size_text

    tags = f", tags {', '.join(ref.name for ref in done.tags)}" if done.tags else ""
    shell.write(f"{len(done.states)} states {where}, {size_text(done.bytes_new)} {what}; {done.ancestors} ancestors without bytes{tags}")
    shell.write(f"its digest is {done.digest}")
