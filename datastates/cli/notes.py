"""``note`` and ``annotate``: what people write about states and branches, and metrics that they add to states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from .complete import branch_names, ref_names
from .shell import AsJson, Repo, Shell

if TYPE_CHECKING:
    from datastates.lineage import Note

__all__ = ["register"]

Rev = Annotated[
    str | None,
    typer.Argument(metavar="REV", help="The state: uid, name, main~3, …; without it, all notes are listed.", autocompletion=ref_names),
]
Branch = Annotated[
    str | None,
    typer.Option("--branch", "-b", metavar="NAME", help="A branch instead of a state.", show_default=False, autocompletion=branch_names),
]
Message = Annotated[str | None, typer.Option("--message", "-m", metavar="TEXT", help="The note, in Markdown.", show_default=False)]
Edit = Annotated[str | None, typer.Option("--edit", metavar="NOTE", help="Give the note of this uid the TEXT of -m.", show_default=False)]
Delete = Annotated[
    str | None, typer.Option("--delete", "-d", metavar="NOTE", help="Delete the note of this uid for good.", show_default=False)
]
Author = Annotated[str | None, typer.Option("--author", metavar="WHO", help="Who wrote it (default: you).", show_default=False)]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command()(note)
    app.command()(annotate)


def annotate(
    context: typer.Context,
    rev: Annotated[str, typer.Argument(metavar="REV", help="The state: uid, name, main~3, …", autocompletion=ref_names)],
    metric: Annotated[list[str], typer.Option("--metric", "-m", metavar="KEY=NUMBER", help="A metric to add; may be repeated.")],
    replace: Annotated[bool, typer.Option("--replace", help="Change metrics that the state has; the log keeps the old values.")] = False,
    author: Author = None,
    repo: Repo = None,
    as_json: AsJson = False,
) -> None:
    """Add metrics to a state that was captured before; `show` says who added them."""
    shell = Shell(context, repo, as_json)
    metrics = dict(map(_metric, metric))
    with shell.repository() as repository:
        state = repository.annotate(rev, metrics=metrics, replace=replace, author=author)
    if shell.as_json:
        shell.write_json(state)
    else:
        shell.write(f"state {state.uid[:10]} has {', '.join(f'{key} = {state.metrics[key]:.9g}' for key in metrics)}")


def _metric(text: str) -> tuple[str, float]:
    key, _, number = text.rpartition("=")
    try:
        return key, float(number)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is no metric: write KEY=NUMBER, such as val_loss=0.3", param_hint="--metric") from None


def note(
    context: typer.Context,
    rev: Rev = None,
    message: Message = None,
    branch: Branch = None,
    edit: Edit = None,
    delete: Delete = None,
    author: Author = None,
    repo: Repo = None,
    as_json: AsJson = False,
) -> None:
    """List the notes on a state, a branch or anything; write, edit or delete one."""
    shell = Shell(context, repo, as_json)
    if sum(each is not None for each in (rev, branch, edit, delete)) > 1:
        raise typer.BadParameter("name a state, a branch, or one note: not several of them", param_hint="REV")
    if edit is not None and message is None:
        raise typer.BadParameter("say by -m what the note is to be", param_hint="--edit")
    if delete is not None:
        _delete(shell, delete)
    elif edit is not None:
        _edit(shell, edit, message or "")
    elif message is not None:
        _write(shell, rev, branch, message, author)
    else:
        _list(shell, rev, branch)


def _list(shell: Shell, rev: str | None, branch: str | None) -> None:
    from datastates.lineage.search import notes, revision

    with shell.reading() as session:
        uid = None if rev is None else revision.resolve(session, rev).uid
        found = notes.notes(session, state=uid, branch=branch)
    if shell.as_json:
        shell.write_lines(found)
    elif found:
        shell.write(*_lines(found))
    else:
        of = f" on {branch or rev}" if branch or rev else ""
        shell.hint(f"no notes{of} yet in {shell.url}: `datastates note REV -m TEXT`, or --branch NAME instead of REV")


def _lines(found: Sequence[Note]) -> list[str]:
    from .render import age_text, short

    lines: list[str] = []
    for note in found:
        of = f"branch {note.branch}" if note.branch is not None else f"state {short(note.state or '')}"
        edited = f", edited {age_text(note.edited_at)}" if note.edited_at else ""
        lines.append(f"{note.uid}  {of}  {note.author}, {age_text(note.created_at)}{edited}")
        lines += [f"    {line}" for line in note.text.splitlines()]
    return lines


def _write(shell: Shell, rev: str | None, branch: str | None, text: str, author: str | None) -> None:
    from datastates.lineage.change import notes
    from datastates.lineage.search import revision
    from datastates.opening.environment import user_name

    if rev is None and branch is None:
        raise typer.BadParameter("name the state or the branch that the note is on", param_hint="REV")
    with shell.writing() as session:
        uid = None if rev is None else revision.resolve(session, rev).uid
        made = notes.write(session, text, state=uid, branch=branch, author=user_name() if author is None else author)
    _say(shell, made, f"note {made.uid} is on {f'branch {made.branch}' if made.branch else f'state {(made.state or str())[:10]}'}")


def _edit(shell: Shell, uid: str, text: str) -> None:
    from datastates.lineage.change import notes

    with shell.writing() as session:
        before = notes.get(session, uid)
        changed = notes.edit(session, uid, text, seen=before)
    _say(shell, changed, f"note {changed.uid} is changed; it read: {before.text.splitlines()[0][:60]}")


def _delete(shell: Shell, uid: str) -> None:
    from datastates.lineage.change import notes

    with shell.writing() as session:
        gone = notes.remove(session, uid)
    _say(shell, gone, f"note {gone.uid} is deleted; it read: {gone.text.splitlines()[0][:60]}")


def _say(shell: Shell, note: Note, text: str) -> None:
    if shell.as_json:
        shell.write_json(note)
    else:
        shell.write(text)
