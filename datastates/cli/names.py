"""The commands ``refs``, ``branch``, ``tag``, ``rm`` and ``note``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from datastates.errors import NotFound
from datastates.lineage import lookup
from datastates.lineage.query import names
from datastates.lineage.states import RefKind
from datastates.lineage.views.text import age_text, short
from datastates.maintenance.environment import user_name

from .app import (
    EXIT_CODES,
    AsJson,
    Limit,
    Repo,
    Shell,
    branch_names,
    metric_names,
    ref_names,
    tag_names,
)
from .tables import events_table, refs_table

if TYPE_CHECKING:
    from datastates.lineage import Note

RefRev = Annotated[
    str,
    typer.Argument(
        metavar="REV",
        help="The state: uid, name, main~3, main@best:val_loss, …",
        autocompletion=ref_names,
    ),
]
Move = Annotated[bool, typer.Option("--move", help="Point a name that exists at REV.")]
Expected = Annotated[
    str | None,
    typer.Option(
        metavar="REV",
        help="With --move: only if the name still stands there (default: where it stands now).",
        show_default=False,
        autocompletion=ref_names,
    ),
]


def tag(
    context: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The tag.", autocompletion=tag_names)],
    rev: RefRev,
    message: Annotated[
        str | None,
        typer.Option("--message", "-m", help="Why this state has a name.", show_default=False),
    ] = None,
    move: Move = False,
    expected: Expected = None,
    repo: Repo = None,
    as_json: AsJson = False,
) -> None:
    """Make a tag, or move one. `refs` lists tags, `rm` deletes one.

    A tag of a state whose bytes are gone is made, with a warning and exit code 7."""
    if move and message:
        raise typer.BadParameter("a message is given when the tag is made", param_hint="--message")
    _change(
        Shell(context, repo, as_json), RefKind.TAG, name, rev, message, move=move, expected=expected
    )


def branch(
    context: typer.Context,
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="The branch.", autocompletion=branch_names)
    ],
    rev: RefRev,
    move: Move = False,
    rename: Annotated[
        bool,
        typer.Option("--rename", "-m", help="Give branch NAME the name REV; its history stays."),
    ] = False,
    expected: Expected = None,
    repo: Repo = None,
    as_json: AsJson = False,
) -> None:
    """Make a branch, or move or rename one. `branches` shows them, `rm` deletes one.

    A new branch is only a name: track(branch="NAME") in a training continues it."""
    shell = Shell(context, repo, as_json)
    if not rename:
        return _change(shell, RefKind.BRANCH, name, rev, None, move=move, expected=expected)
    if move or expected:
        raise typer.BadParameter(
            "it takes two names: the old one and the new one", param_hint="--rename"
        )
    with shell.repository() as repository:
        renamed = repository.rename(name, rev)
    return shell.report(renamed, f"{renamed.kind} {name} is {renamed.name} now")


def rm(
    context: typer.Context,
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="The branch or the tag.", autocompletion=ref_names)
    ],
    with_bytes: Annotated[
        bool,
        typer.Option(
            "--bytes",
            help=(
                "Also drop the bytes of the states that only this name leads to; they stay in the"
                " lineage."
            ),
        ),
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", "-n", help="Delete nothing, and print what --bytes would drop."),
    ] = False,
    repo: Repo = None,
    as_json: AsJson = False,
) -> None:
    """Delete a branch or a tag; with --bytes, also free what only that name holds."""
    shell = Shell(context, repo, as_json)
    if with_bytes or dry_run:
        from .upkeep import show_pruned

        with shell.repository() as repository:
            report = repository.delete_ref(name, bytes=with_bytes, dry_run=dry_run)
        return None if report is None else show_pruned(shell, report)
    from datastates.lineage.write import refs

    with shell.writing() as session:
        ref = refs.delete_ref(session, name)
    return shell.report(ref, f"{ref.kind} {ref.name} is deleted; it named {ref.state}")


def list_refs(
    context: typer.Context,
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            help="Instead, what this branch or tag has named, even if it was deleted.",
            autocompletion=ref_names,
        ),
    ] = None,
    limit: Limit = 20,
    repo: Repo = None,
    as_json: AsJson = False,
) -> None:
    """List branches and tags, or show what a name has named, newest first."""
    shell = Shell(context, repo, as_json)
    if name is None:
        return _list_refs(shell)
    with shell.reading() as session:
        events = names.reflog(session, name, limit=limit or None)
    if shell.as_json:
        shell.write_lines(events)
    else:
        shell.write(events_table(events))
    return None


def _change(
    shell: Shell,
    kind: RefKind,
    name: str,
    rev: str,
    message: str | None,
    *,
    move: bool,
    expected: str | None,
) -> None:
    """Make or move a ref."""
    if expected and not move:
        raise typer.BadParameter("it goes with --move", param_hint="--expected")
    from datastates.lineage.query import revision
    from datastates.lineage.write import refs

    with shell.writing() as session:
        old = names.get(session, name) if move else None
        if old is not None and old.kind is not kind:
            raise NotFound(
                f"{name!r} is a {old.kind}, not a {kind}:"
                f" `datastates {old.kind} {name} REV --move` moves it"
            )
        state = revision.resolve(session, rev)
        if old is not None:
            seen = old.state if expected is None else revision.resolve(session, expected).uid
            ref = refs.move(session, name, state.uid, expected=seen)
            text = f"{kind} {ref.name} moved from {short(old.state)} to {short(ref.state)}"
        else:
            if kind is RefKind.TAG:
                ref = refs.tag(session, name, state.uid, message=message)
            else:
                ref = refs.branch(session, name, state.uid)
            text = f"{kind} {ref.name} names {short(ref.state)} (step {state.step})"
        is_gone = refs.warn(session, ref)
    shell.report(ref, text)
    if is_gone:  # the bytes of the state
        raise typer.Exit(EXIT_CODES["unavailable"])


def _list_refs(shell: Shell) -> None:
    with shell.reading() as session:
        found = names.refs(session)
        states = {
            state.uid: state for state in lookup.states(session, [ref.state for ref in found])
        }
    if shell.as_json:
        shell.write_lines(found)
    elif found:
        shell.write(refs_table(found, states))
    else:
        shell.hint(
            f"no branches or tags yet in {shell.url}: a training makes its branch;"
            " `datastates tag NAME REV` and `datastates branch NAME REV` make others"
        )


# --- ``note``: notes on states and branches, and metrics that people add ---


def _metric(text: str) -> tuple[str, float]:
    key, _, number = text.rpartition("=")
    try:
        return key, float(number)
    except ValueError:
        raise typer.BadParameter(
            f"{text!r} is no metric: write KEY=NUMBER, such as val_loss=0.3", param_hint="--metric"
        ) from None


def note(
    context: typer.Context,
    rev: Annotated[
        str | None,
        typer.Argument(
            metavar="REV",
            help="The state: uid, name, main~3, …; without it, all notes are listed.",
            autocompletion=ref_names,
        ),
    ] = None,
    message: Annotated[
        str | None,
        typer.Option(
            "--message", "-m", metavar="TEXT", help="The note, in Markdown.", show_default=False
        ),
    ] = None,
    branch: Annotated[
        str | None,
        typer.Option(
            "--branch",
            "-b",
            metavar="NAME",
            help="A branch instead of a state.",
            show_default=False,
            autocompletion=branch_names,
        ),
    ] = None,
    edit: Annotated[
        str | None,
        typer.Option(
            "--edit",
            metavar="NOTE",
            help="Give the note of this uid the TEXT of -m.",
            show_default=False,
        ),
    ] = None,
    delete: Annotated[
        str | None,
        typer.Option(
            "--delete",
            "-d",
            metavar="NOTE",
            help="Delete the note of this uid permanently.",
            show_default=False,
        ),
    ] = None,
    metric: Annotated[
        list[str] | None,
        typer.Option(
            "--metric",
            metavar="KEY=NUMBER",
            help="Add a metric to a state that was captured before. May be repeated.",
            show_default=False,
            autocompletion=metric_names,
        ),
    ] = None,
    replace: Annotated[
        bool,
        typer.Option(
            "--replace",
            help="With --metric: change existing metrics; the log keeps the old values.",
        ),
    ] = False,
    author: Annotated[
        str | None,
        typer.Option(
            "--author", metavar="WHO", help="Who wrote it (default: you).", show_default=False
        ),
    ] = None,
    repo: Repo = None,
    as_json: AsJson = False,
) -> None:
    """List or write notes on states and branches, and add metrics to a state."""
    shell = Shell(context, repo, as_json)
    if metric:
        if rev is None or branch or edit or delete or message:
            raise typer.BadParameter("it takes a state, and no note", param_hint="--metric")
        metrics = dict(map(_metric, metric))
        with shell.repository() as repository:
            state = repository.annotate(rev, metrics=metrics, replace=replace, author=author)
        added = ", ".join(f"{key} = {state.metrics[key]:.9g}" for key in metrics)
        return shell.report(state, f"state {short(state.uid)} has {added}")
    if sum(each is not None for each in (rev, branch, edit, delete)) > 1:
        raise typer.BadParameter(
            "name a state, a branch, or one note: not several of them", param_hint="REV"
        )
    if edit is not None and message is None:
        raise typer.BadParameter("-m gives the new text of the note", param_hint="--edit")
    if message is None and delete is None:
        return _list_notes(shell, rev, branch)
    if rev is None and branch is None and edit is None and delete is None:
        raise typer.BadParameter(
            "name the state or the branch that the note is on", param_hint="REV"
        )
    from datastates.lineage.query import revision
    from datastates.lineage.write import refs

    with shell.writing() as session:
        if delete is not None:
            written = refs.remove(session, delete)
            text = f"note {written.uid} is deleted; it read: {_beginning(written)}"
        elif edit is not None:
            before = names.get_note(session, edit)
            written = refs.edit(session, edit, message or "", seen=before)
            text = f"note {written.uid} is changed; it read: {_beginning(before)}"
        else:
            written = refs.write(
                session,
                message or "",
                state=None if rev is None else revision.resolve(session, rev).uid,
                branch=branch,
                author=user_name() if author is None else author,
            )
            text = f"note {written.uid} is on {_subject(written)}"
    return shell.report(written, text)


def _beginning(note: Note) -> str:
    return note.text.splitlines()[0][:60]


def _subject(note: Note) -> str:
    return f"state {short(note.state)}" if note.branch is None else f"branch {note.branch}"


def _list_notes(shell: Shell, rev: str | None, branch: str | None) -> None:
    from datastates.lineage.query import revision

    with shell.reading() as session:
        uid = None if rev is None else revision.resolve(session, rev).uid
        found = names.notes(session, state=uid, branch=branch)
    if shell.as_json:
        shell.write_lines(found)
    elif found:
        shell.write(*_lines(found))
    else:
        of = f" on {branch or rev}" if branch or rev else ""
        shell.hint(
            f"no notes{of} yet in {shell.url}: `datastates note REV -m TEXT`, or --branch NAME"
            " instead of REV"
        )


def _lines(found: Sequence[Note]) -> list[str]:
    lines: list[str] = []
    for note in found:
        edited = f", edited {age_text(note.edited_at)}" if note.edited_at else ""
        written = f"{note.author}, {age_text(note.created_at)}{edited}"
        lines.append(f"{note.uid}  {_subject(note)}  {written}")
        lines += [f"    {line}" for line in note.text.splitlines()]
    return lines
