"""``tag``, ``branch``, ``rm``, ``refs`` and ``reflog``: the names of states."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from datastates.errors import NotFound

from .complete import branch_names, ref_names, tag_names
from .exits import EXIT_CODES
from .shell import AsJson, Limit, Repo, Shell

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

    from datastates.lineage import Ref, RefKind

__all__ = ["register"]

Rev = Annotated[
    str | None, typer.Argument(metavar="REV", help="The state: uid, name, main~3, main@best:val_loss, …", autocompletion=ref_names)
]
TagName = Annotated[str | None, typer.Argument(metavar="NAME", help="The tag; without it, all are listed.", autocompletion=tag_names)]
BranchName = Annotated[
    str | None, typer.Argument(metavar="NAME", help="The branch; without it, all are listed.", autocompletion=branch_names)
]
Delete = Annotated[bool, typer.Option("--delete", "-d", help="Forget the name; the states stay.")]
Move = Annotated[bool, typer.Option("--move", help="Point a name that exists at REV.")]
Rename = Annotated[bool, typer.Option("--rename", "-m", help="Give branch NAME the name REV; its history stays.")]
Expected = Annotated[
    str | None,
    typer.Option(
        metavar="REV",
        help="With --move: only if the name still stands there (default: where it stands now).",
        show_default=False,
        autocompletion=ref_names,
    ),
]
Message = Annotated[str | None, typer.Option("--message", "-m", help="Why this state has a name.", show_default=False)]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command()(tag)
    app.command()(branch)
    app.command()(rm)
    app.command("refs")(list_refs)
    app.command()(reflog)


def tag(
    context: typer.Context,
    name: TagName = None,
    rev: Rev = None,
    message: Message = None,
    delete: Delete = False,
    move: Move = False,
    expected: Expected = None,
    repo: Repo = None,
    as_json: AsJson = False,
) -> None:
    """List the tags; make, move or delete one. A tag of a state whose bytes are gone is made, with a warning and exit code 7."""
    from datastates.lineage.states import RefKind

    _change(Shell(context, repo, as_json), RefKind.TAG, name, rev, message, delete=delete, move=move, expected=expected)


def branch(
    context: typer.Context,
    name: BranchName = None,
    rev: Rev = None,
    delete: Delete = False,
    move: Move = False,
    rename: Rename = False,
    expected: Expected = None,
    repo: Repo = None,
    as_json: AsJson = False,
) -> None:
    """List the branches; make, move, rename or delete one."""
    from datastates.lineage.states import RefKind

    shell = Shell(context, repo, as_json)
    if not rename:
        return _change(shell, RefKind.BRANCH, name, rev, None, delete=delete, move=move, expected=expected)
    if name is None or rev is None or delete or move or expected:
        raise typer.BadParameter("--rename takes the old name and the new one, and nothing else", param_hint="--rename")
    with shell.repository() as repository:
        renamed = repository.rename(name, rev)
    return _say(shell, renamed, f"{renamed.kind} {name} is {renamed.name} now")


def rm(
    context: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The branch or the tag.", autocompletion=ref_names)],
    with_bytes: Annotated[
        bool, typer.Option("--bytes", help="Also drop the bytes of the states that only this name leads to; they stay in the lineage.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", "-n", help="Delete nothing; only say what --bytes would drop.")] = False,
    repo: Repo = None,
    as_json: AsJson = False,
) -> None:
    """Delete a branch or a tag; with --bytes, also free what only that name holds."""
    from .room import show_pruned

    shell = Shell(context, repo, as_json)
    with shell.repository() as repository:
        report = repository.delete_ref(name, bytes=with_bytes, dry_run=dry_run)
    if report is not None:
        show_pruned(shell, report)


def list_refs(context: typer.Context, repo: Repo = None, as_json: AsJson = False) -> None:
    """List the branches and tags, and what they name."""
    _list(Shell(context, repo, as_json), None)


def reflog(
    context: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME", help="A branch or a tag, even one that was deleted.", autocompletion=ref_names)],
    limit: Limit = 20,
    repo: Repo = None,
    as_json: AsJson = False,
) -> None:
    """Show where a branch or a tag stood, newest first."""
    from datastates.lineage.search import refs

    from .render import events_table

    shell = Shell(context, repo, as_json)
    with shell.reading() as session:
        events = refs.reflog(session, name, limit=limit or None)
    if shell.as_json:
        shell.write_lines(events)
    else:
        shell.write(events_table(events))


def _change(
    shell: Shell, kind: RefKind, name: str | None, rev: str | None, message: str | None, *, delete: bool, move: bool, expected: str | None
) -> None:
    if name is None:
        if delete or move or expected or message:
            raise typer.BadParameter("name the ref that is meant", param_hint="NAME")
        _list(shell, kind)
    elif delete:
        if move or rev or expected or message:
            raise typer.BadParameter("--delete takes nothing but the name", param_hint="--delete")
        _delete(shell, kind, name)
    elif rev is None:
        raise typer.BadParameter(f"name the state that {name!r} is to name: {kind.value} {name} REV", param_hint="REV")
    elif move:
        if message:
            raise typer.BadParameter("a message is given when the tag is made", param_hint="--message")
        _move(shell, kind, name, rev, expected)
    else:
        if expected:
            raise typer.BadParameter("it goes with --move", param_hint="--expected")
        _make(shell, kind, name, rev, message)


def _list(shell: Shell, kind: RefKind | None) -> None:
    from datastates.lineage.search import refs, walk

    from .render import refs_table

    with shell.reading() as session:
        found = refs.refs(session, kind)
        states = {state.uid: state for state in walk.states(session, [ref.state for ref in found])}
    if shell.as_json:
        shell.write_lines(found)
    elif found:
        shell.write(refs_table(found, states))
    else:
        what = {None: "branches or tags", "branch": "branches", "tag": "tags"}[kind]
        shell.hint(f"no {what} yet in {shell.url}: a training makes its branch; `datastates tag NAME REV` and `datastates branch NAME REV`")


def _make(shell: Shell, kind: RefKind, name: str, rev: str, message: str | None) -> None:
    from datastates.lineage.change import refs
    from datastates.lineage.search import revision
    from datastates.lineage.states import RefKind

    with shell.writing() as session:
        state = revision.resolve(session, rev)
        made = refs.tag(session, name, state.uid, message=message) if kind is RefKind.TAG else refs.branch(session, name, state.uid)
        is_gone = refs.warn(session, made)
    _say(shell, made, f"{made.kind} {made.name} names {made.state[:10]} (step {state.step})", is_gone=is_gone)


def _move(shell: Shell, kind: RefKind, name: str, rev: str, expected: str | None) -> None:
    from datastates.lineage.change import refs
    from datastates.lineage.search import revision

    with shell.writing() as session:
        old = _get(session, kind, name)
        wanted = old.state if expected is None else revision.resolve(session, expected).uid
        moved = refs.move(session, name, revision.resolve(session, rev).uid, expected=wanted)
        is_gone = refs.warn(session, moved)
    _say(shell, moved, f"{moved.kind} {moved.name} moved from {old.state[:10]} to {moved.state[:10]}", is_gone=is_gone)


def _delete(shell: Shell, kind: RefKind, name: str) -> None:
    from datastates.lineage.change import refs

    with shell.writing() as session:
        _get(session, kind, name)
        gone = refs.delete(session, name)
    _say(shell, gone, f"{gone.kind} {gone.name} is forgotten; it named {gone.state}")


def _get(session: Session, kind: RefKind, name: str) -> Ref:
    from datastates.lineage.change import refs

    found = refs.get(session, name)
    if found.kind is not kind:
        raise NotFound(f"{name!r} is a {found.kind}, not a {kind}: use `datastates {found.kind} …`")
    return found


def _say(shell: Shell, ref: Ref, text: str, *, is_gone: bool = False) -> None:
    """Write what was done. If the bytes of the state ``is_gone``, the command then ends with the exit code for that."""
    if shell.as_json:
        shell.write_json(ref)
    else:
        shell.write(text)
    if is_gone:
        raise typer.Exit(EXIT_CODES["unavailable"])
