"""``export`` and ``import``: states as a folder that can be carried elsewhere, and checkpoint files of other tools."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from datastates.errors import InvalidInput, NotFound
from datastates.lineage.show.texts import plural

from .complete import ref_names
from .shell import AsJson, Repo, Shell

if TYPE_CHECKING:
    from datastates.export.bundle import Bundle
    from datastates.repository import Repository

__all__ = ["register"]

_SHOWN = 20

Revs = Annotated[list[str], typer.Argument(metavar="REV", help="States: uids, names, main~3, …", autocompletion=ref_names)]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("export")(export_states)
    app.command("import")(import_states)


def export_states(
    context: typer.Context,
    revs: Revs,
    bundle: Annotated[Path | None, typer.Option("--bundle", metavar="FOLDER", help="A new folder.", show_default=False)] = None,
    parents: Annotated[
        bool, typer.Option("--parents", help="Also the bytes of what merged states were made of, so that they can be verified.")
    ] = False,
    into: Annotated[
        Path | None,
        typer.Option(
            "--into", metavar="FOLDER", help="Instead of a bundle: a file for each state, as other programs read it.", show_default=False
        ),
    ] = None,
    kind: Annotated[
        str, typer.Option("--format", metavar="FORMAT", help="With --into: torch, safetensors, hf (Hugging Face) or dcp.")
    ] = "torch",
    pattern: Annotated[
        str | None,
        typer.Option("--pattern", metavar="NAME", help="With --into: 'step_{step}.pt', or with {uid}.", show_default=False),
    ] = None,
    history: Annotated[bool, typer.Option("--history", help="With --into: also all ancestors of each state that can be restored.")] = False,
    repo: Repo = None,
    as_json: AsJson = False,
) -> None:
    """Write states with their lineage and tags to a folder that `import` reads elsewhere; with --into, files of torch and others."""
    if (bundle is None) == (into is None):
        raise InvalidInput("states go to a bundle or to files: give --bundle FOLDER, or --into FOLDER with --format")
    shell = Shell(context, repo, as_json)
    with shell.repository() as repository:
        if into is not None:
            return _export_files(shell, repository, revs, into, kind, pattern, history=history)
        from datastates.export.bundle import export_bundle

        done = export_bundle(repository, revs, str(bundle), with_parents=parents)
    return _say(shell, done, f"to {bundle}", "written")


def _export_files(
    shell: Shell, repository: Repository, revs: list[str], into: Path, kind: str, pattern: str | None, *, history: bool
) -> None:
    from datastates.export.importing import export_files

    from .payload import counting

    chosen = {state.uid: state for state in map(repository.state, revs)}
    for uid in list(chosen) if history else ():
        chosen |= {state.uid: state for state in repository.ancestors(uid) if state.status.is_restorable}
    with counting(shell, "exporting") as count:
        done = export_files(repository, list(chosen.values()), into, format=kind, pattern=pattern, on_progress=count)
    if shell.as_json:
        shell.write_lines({"state": each.state.uid, "step": each.state.step, "path": str(each.path)} for each in done)
        return
    for each in done[:_SHOWN]:
        shell.write(f"{each.path}: step {each.state.step}, {each.state.uid[:10]}")
    if len(done) > _SHOWN:
        shell.write(f"and {len(done) - _SHOWN} more")


def import_states(
    context: typer.Context,
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="What `export` wrote; with --pattern, a folder of checkpoint files.")],
    digest: Annotated[
        str | None, typer.Option("--digest", metavar="HEX", help="The digest that `export` printed; a bundle with another one is refused.")
    ] = None,
    pattern: Annotated[
        str | None,
        typer.Option(
            "--pattern",
            metavar="NAME",
            help="Names of checkpoint files: 'step_{step}.pt', 'checkpoint-{step}'. Each is a state, in the order of steps.",
            show_default=False,
        ),
    ] = None,
    branch: Annotated[str, typer.Option("--branch", metavar="NAME", help="With --pattern: a new branch, or that of an earlier import.")] = (
        "imported"
    ),
    dry_run: Annotated[bool, typer.Option("--dry-run", "-n", help="With --pattern: only say which files there are.")] = False,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="With --pattern: leave out files that are refused, and say why.")] = False,
    repo: Repo = None,
    as_json: AsJson = False,
) -> None:
    """Bring the states of a folder that `export` wrote into a repository, durable; those that no tag names get the tag import/UID.

    A repository that does not exist is made.

    With --pattern, a folder of checkpoints of torch.save, safetensors, Hugging Face or torch.distributed.checkpoint becomes a branch.

    Nothing in them is executed. An import that was broken off goes on when the same command is given again.
    """
    shell = Shell(context, repo, as_json)
    if pattern is not None:
        if digest is not None:
            raise InvalidInput("--digest belongs to a bundle: leave it out, or leave out --pattern")
        return _import_files(shell, folder, pattern, branch, dry_run=dry_run, skip_bad=skip_bad)
    if not (folder / "lineage.json").is_file():
        shell.hint("a folder of checkpoint files is imported with --pattern, such as --pattern 'step_{step}.pt'")
        raise NotFound(f"{folder} holds no bundle: name a folder that `export` wrote")
    with shell.repository(must_exist=False) as repository:
        from datastates.export.bundle import import_bundle

        done = import_bundle(repository, folder, digest=digest)
        named = {ref.state for ref in repository.refs()}
        for state in done.states:
            if state.uid not in named:
                repository.tag(f"import/{state.uid[:10]}", state.uid)
    return _say(shell, done, f"from {folder}", "new")


def _import_files(shell: Shell, folder: Path, pattern: str, branch: str, *, dry_run: bool, skip_bad: bool) -> None:
    from datastates.export.importing import import_files

    from .payload import counting

    with shell.repository(must_exist=dry_run) as repository, counting(shell, "importing") as count:
        done = import_files(repository, folder, pattern, branch=branch, dry_run=dry_run, skip_bad=skip_bad, on_progress=count)
    if shell.as_json:
        shell.write_json(
            {
                "branch": done.branch,
                "states": [state.uid for state in done.states],
                "known": [source.name for source in done.known],
                "waiting": [source.name for source in done.waiting],
                "refused": done.refused,
            }
        )
        return
    for name, why in done.refused.items():
        shell.write(f"{name} was left out: {why}")
    known = f"; {len(done.known)} were there already" * bool(done.known)
    if not dry_run:
        shell.write(f"{plural(len(done.states), 'state')} on branch {done.branch}{known}")
        return
    for source in done.waiting:
        shell.write(f"step {source.step}: {source.name} ({source.format})")
    shell.write(f"{plural(len(done.waiting), 'file')} would go to branch {done.branch}{known}")


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
    said = f"{plural(len(done.states), 'state')} {where}, {size_text(done.bytes_new)} {what}"
    shell.write(f"{said}; {plural(done.ancestors, 'ancestor')} without bytes{tags}")
    shell.write(f"its digest is {done.digest}")
