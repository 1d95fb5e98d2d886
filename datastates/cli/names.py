"""The commands ``tag``, ``branch``, ``rm``, ``refs``, ``reflog``, ``note`` and ``annotate``."""

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

from .app import EXIT_CODES, AsJson, Limit, Repo, Shell, branch_names, ref_names, tag_names
from .tables import events_table, refs_table

if TYPE_CHECKING:
    from datastates.lineage import Note

RefRev = Annotated[
    str | None,
    typer.Argument(
        metavar="REV",
        help="The state: uid, name, main~3, main@best:val_loss, …",
        autocompletion=ref_names,
    ),
]
DeleteRef = Annotated[
    bool, typer.Option("--delete", "-d", help="Forget the name; the states stay.")
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
Author = Annotated[
    str | None,
    typer.Option(
        "--author", metavar="WHO", help="Who wrote it (default: you).", show_default=False
    ),
]


def tag(
    context: typer.Context,
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME", help="The tag; without it, all are listed.", autocompletion=tag_names
        ),
    ] = None,
    rev: RefRev = None,
    message: Annotated[
        str | None,
        typer.Option("--message", "-m", help="Why this state has a name.", show_default=False),
    ] = None,
    delete: DeleteRef = False,
    move: Move = False,
    expected: Expected = None,
    repo: Repo = None,
    as_json: AsJson = False,
) -> None:
    """List the tags; make, move or delete one.

    A tag of a state whose bytes are gone is made, with a warning and exit code 7."""
    _change(
        Shell(context, repo, as_json),
        RefKind.TAG,
        name,
        rev,
        message,
        delete=delete,
        move=move,
        expected=expected,
    )


def branch(
    context: typer.Context,
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            help="The branch; without it, all are listed.",
            autocompletion=branch_names,
        ),
    ] = None,
    rev: RefRev = None,
    delete: DeleteRef = False,
    move: Move = False,
    rename: Annotated[
        bool,
        typer.Option("--rename", "-m", help="Give branch NAME the name REV; its history stays."),
    ] = False,
    expected: Expected = None,
    repo: Repo = None,
    as_json: AsJson = False,
) -> None:
    """List the branches; make, move, rename or delete one."""
    shell = Shell(context, repo, as_json)
    if not rename:
        return _change(
            shell, RefKind.BRANCH, name, rev, None, delete=delete, move=move, expected=expected
        )
    if name is None or rev is None or delete or move or expected:
        raise typer.BadParameter(
            "--rename takes the old name and the new one, and nothing else", param_hint="--rename"
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
        typer.Option("--dry-run", "-n", help="Delete nothing; only say what --bytes would drop."),
    ] = False,
    repo: Repo = None,
    as_json: AsJson = False,
) -> None:
    """Delete a branch or a tag; with --bytes, also free what only that name holds."""
    from .upkeep import show_pruned

    shell = Shell(context, repo, as_json)
    with shell.repository() as repository:
        report = repository.delete_ref(name, bytes=with_bytes, dry_run=dry_run)
    if report is not None:
        show_pruned(shell, report)


def list_refs(context: typer.Context, repo: Repo = None, as_json: AsJson = False) -> None:
    """List the branches and tags, and what they name."""
    _list_refs(Shell(context, repo, as_json), None)


def reflog(
    context: typer.Context,
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="A branch or a tag, even one that was deleted.",
            autocompletion=ref_names,
        ),
    ],
    limit: Limit = 20,
    repo: Repo = None,
    as_json: AsJson = False,
) -> None:
    """Show where a branch or a tag stood, newest first."""
    shell = Shell(context, repo, as_json)
    with shell.reading() as session:
        events = names.reflog(session, name, limit=limit or None)
    if shell.as_json:
        shell.write_lines(events)
    else:
        shell.write(events_table(events))


def _change(
    shell: Shell,
    kind: RefKind,
    name: str | None,
    rev: str | None,
    message: str | None,
    *,
    delete: bool,
    move: bool,
    expected: str | None,
) -> None:
    """Make, move or delete a ref; list them if none is named."""
    if name is None:
        if delete or move or expected or message:
            raise typer.BadParameter("name the ref that is meant", param_hint="NAME")
        return _list_refs(shell, kind)
    if delete and (move or rev or expected or message):
        raise typer.BadParameter("--delete takes nothing but the name", param_hint="--delete")
    if rev is None and not delete:
        raise typer.BadParameter(
            f"name the state that {name!r} is to name: {kind.value} {name} REV", param_hint="REV"
        )
    if move and message:
        raise typer.BadParameter("a message is given when the tag is made", param_hint="--message")
    if expected and not move:
        raise typer.BadParameter("it goes with --move", param_hint="--expected")
    from datastates.lineage.query import revision
    from datastates.lineage.write import refs

    with shell.writing() as session:
        old = names.get(session, name) if delete or move else None
        if old is not None and old.kind is not kind:
            raise NotFound(f"{name!r} is a {old.kind}, not a {kind}: use `datastates {old.kind} …`")
        if rev is None:
            ref, is_gone = refs.delete_ref(session, name), False
            text = f"{ref.kind} {ref.name} is forgotten; it named {ref.state}"
        else:
            state = revision.resolve(session, rev)
            if old is not None:
                seen = old.state if expected is None else revision.resolve(session, expected).uid
                ref = refs.move(session, name, state.uid, expected=seen)
                text = f"{kind} {ref.name} moved from {old.state[:10]} to {ref.state[:10]}"
            else:
                if kind is RefKind.TAG:
                    ref = refs.tag(session, name, state.uid, message=message)
                else:
                    ref = refs.branch(session, name, state.uid)
                text = f"{kind} {ref.name} names {ref.state[:10]} (step {state.step})"
            is_gone = refs.warn(session, ref)
    shell.report(ref, text)
    if is_gone:  # the bytes of the state
        raise typer.Exit(EXIT_CODES["unavailable"])
    return None


def _list_refs(shell: Shell, kind: RefKind | None) -> None:
    with shell.reading() as session:
        found = names.refs(session, kind)
        states = {
            state.uid: state for state in lookup.states(session, [ref.state for ref in found])
        }
    if shell.as_json:
        shell.write_lines(found)
    elif found:
        shell.write(refs_table(found, states))
    else:
        what = {None: "branches or tags", "branch": "branches", "tag": "tags"}[kind]
        shell.hint(
            f"no {what} yet in {shell.url}: a training makes its branch; `datastates tag NAME REV`"
            " and `datastates branch NAME REV`"
        )


# --- ``note`` and ``annotate``: notes on states and branches, and metrics that people add ---


def annotate(
    context: typer.Context,
    rev: Annotated[
        str,
        typer.Argument(
            metavar="REV", help="The state: uid, name, main~3, …", autocompletion=ref_names
        ),
    ],
    metric: Annotated[
        list[str],
        typer.Option(
            "--metric", "-m", metavar="KEY=NUMBER", help="A metric to add; may be repeated."
        ),
    ],
    replace: Annotated[
        bool,
        typer.Option(
            "--replace", help="Change metrics that the state has; the log keeps the old values."
        ),
    ] = False,
    author: Author = None,
    repo: Repo = None,
    as_json: AsJson = False,
) -> None:
    """Add metrics to a state that was captured before; `show` lists who added them."""
    shell = Shell(context, repo, as_json)
    metrics = dict(map(_metric, metric))
    with shell.repository() as repository:
        state = repository.annotate(rev, metrics=metrics, replace=replace, author=author)
    added = ", ".join(f"{key} = {state.metrics[key]:.9g}" for key in metrics)
    shell.report(state, f"state {state.uid[:10]} has {added}")


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
            help="Delete the note of this uid for good.",
            show_default=False,
        ),
    ] = None,
    author: Author = None,
    repo: Repo = None,
    as_json: AsJson = False,
) -> None:
    """List the notes on a state, a branch or anything; write, edit or delete one."""
    shell = Shell(context, repo, as_json)
    if sum(each is not None for each in (rev, branch, edit, delete)) > 1:
        raise typer.BadParameter(
            "name a state, a branch, or one note: not several of them", param_hint="REV"
        )
    if edit is not None and message is None:
        raise typer.BadParameter("say by -m what the note is to be", param_hint="--edit")
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
