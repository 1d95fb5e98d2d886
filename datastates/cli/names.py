"""The commands ``tag``, ``branch``, ``rm``, ``refs``, ``reflog``, ``note`` and ``annotate``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from datastates.errors import NotFound

from .app import EXIT_CODES, AsJson, Limit, Repo, Shell, branch_names, ref_names, tag_names

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

    from datastates.lineage import Note, Ref, RefKind

RefRev = Annotated[
    str | None,
    typer.Argument(
        metavar="REV",
        help="The state: uid, name, main~3, main@best:val_loss, …",
        autocompletion=ref_names,
    ),
]
TagName = Annotated[
    str | None,
    typer.Argument(
        metavar="NAME", help="The tag; without it, all are listed.", autocompletion=tag_names
    ),
]
BranchName = Annotated[
    str | None,
    typer.Argument(
        metavar="NAME", help="The branch; without it, all are listed.", autocompletion=branch_names
    ),
]
DeleteRef = Annotated[
    bool, typer.Option("--delete", "-d", help="Forget the name; the states stay.")
]
Move = Annotated[bool, typer.Option("--move", help="Point a name that exists at REV.")]
Rename = Annotated[
    bool, typer.Option("--rename", "-m", help="Give branch NAME the name REV; its history stays.")
]
Expected = Annotated[
    str | None,
    typer.Option(
        metavar="REV",
        help="With --move: only if the name still stands there (default: where it stands now).",
        show_default=False,
        autocompletion=ref_names,
    ),
]
RefMessage = Annotated[
    str | None,
    typer.Option("--message", "-m", help="Why this state has a name.", show_default=False),
]
NoteRev = Annotated[
    str | None,
    typer.Argument(
        metavar="REV",
        help="The state: uid, name, main~3, …; without it, all notes are listed.",
        autocompletion=ref_names,
    ),
]
Branch = Annotated[
    str | None,
    typer.Option(
        "--branch",
        "-b",
        metavar="NAME",
        help="A branch instead of a state.",
        show_default=False,
        autocompletion=branch_names,
    ),
]
NoteMessage = Annotated[
    str | None,
    typer.Option(
        "--message", "-m", metavar="TEXT", help="The note, in Markdown.", show_default=False
    ),
]
Edit = Annotated[
    str | None,
    typer.Option(
        "--edit",
        metavar="NOTE",
        help="Give the note of this uid the TEXT of -m.",
        show_default=False,
    ),
]
DeleteNote = Annotated[
    str | None,
    typer.Option(
        "--delete",
        "-d",
        metavar="NOTE",
        help="Delete the note of this uid for good.",
        show_default=False,
    ),
]
Author = Annotated[
    str | None,
    typer.Option(
        "--author", metavar="WHO", help="Who wrote it (default: you).", show_default=False
    ),
]


def register_refs(app: typer.Typer) -> None:
    """Add the commands."""
    app.command()(tag)
    app.command()(branch)
    app.command()(rm)
    app.command("refs")(list_refs)
    app.command()(reflog)


def tag(
    context: typer.Context,
    name: TagName = None,
    rev: RefRev = None,
    message: RefMessage = None,
    delete: DeleteRef = False,
    move: Move = False,
    expected: Expected = None,
    repo: Repo = None,
    as_json: AsJson = False,
) -> None:
    """List the tags; make, move or delete one.

    A tag of a state whose bytes are gone is made, with a warning and exit code 7."""
    from datastates.lineage.states import RefKind

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
    name: BranchName = None,
    rev: RefRev = None,
    delete: DeleteRef = False,
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
        return _change(
            shell, RefKind.BRANCH, name, rev, None, delete=delete, move=move, expected=expected
        )
    if name is None or rev is None or delete or move or expected:
        raise typer.BadParameter(
            "--rename takes the old name and the new one, and nothing else", param_hint="--rename"
        )
    with shell.repository() as repository:
        renamed = repository.rename(name, rev)
    return _say_refs(shell, renamed, f"{renamed.kind} {name} is {renamed.name} now")


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
    from datastates.lineage.query import names

    from .tables import events_table

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
    if name is None:
        if delete or move or expected or message:
            raise typer.BadParameter("name the ref that is meant", param_hint="NAME")
        _list_refs(shell, kind)
    elif delete:
        if move or rev or expected or message:
            raise typer.BadParameter("--delete takes nothing but the name", param_hint="--delete")
        _delete_refs(shell, kind, name)
    elif rev is None:
        raise typer.BadParameter(
            f"name the state that {name!r} is to name: {kind.value} {name} REV", param_hint="REV"
        )
    elif move:
        if message:
            raise typer.BadParameter(
                "a message is given when the tag is made", param_hint="--message"
            )
        _move(shell, kind, name, rev, expected)
    else:
        if expected:
            raise typer.BadParameter("it goes with --move", param_hint="--expected")
        _make(shell, kind, name, rev, message)


def _list_refs(shell: Shell, kind: RefKind | None) -> None:
    from datastates.lineage import lookup
    from datastates.lineage.query import names

    from .tables import refs_table

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


def _make(shell: Shell, kind: RefKind, name: str, rev: str, message: str | None) -> None:
    from datastates.lineage.query import revision
    from datastates.lineage.states import RefKind
    from datastates.lineage.write import refs

    with shell.writing() as session:
        state = revision.resolve(session, rev)
        made = (
            refs.tag(session, name, state.uid, message=message)
            if kind is RefKind.TAG
            else refs.branch(session, name, state.uid)
        )
        is_gone = refs.warn(session, made)
    _say_refs(
        shell,
        made,
        f"{made.kind} {made.name} names {made.state[:10]} (step {state.step})",
        is_gone=is_gone,
    )


def _move(shell: Shell, kind: RefKind, name: str, rev: str, expected: str | None) -> None:
    from datastates.lineage.query import revision
    from datastates.lineage.write import refs

    with shell.writing() as session:
        old = _get(session, kind, name)
        wanted = old.state if expected is None else revision.resolve(session, expected).uid
        moved = refs.move(session, name, revision.resolve(session, rev).uid, expected=wanted)
        is_gone = refs.warn(session, moved)
    _say_refs(
        shell,
        moved,
        f"{moved.kind} {moved.name} moved from {old.state[:10]} to {moved.state[:10]}",
        is_gone=is_gone,
    )


def _delete_refs(shell: Shell, kind: RefKind, name: str) -> None:
    from datastates.lineage.write import refs

    with shell.writing() as session:
        _get(session, kind, name)
        gone = refs.delete_ref(session, name)
    _say_refs(shell, gone, f"{gone.kind} {gone.name} is forgotten; it named {gone.state}")


def _get(session: Session, kind: RefKind, name: str) -> Ref:
    from datastates.lineage.query import names

    found = names.get(session, name)
    if found.kind is not kind:
        raise NotFound(f"{name!r} is a {found.kind}, not a {kind}: use `datastates {found.kind} …`")
    return found


def _say_refs(shell: Shell, ref: Ref, text: str, *, is_gone: bool = False) -> None:
    """Write what was done.

    If the bytes of the state ``is_gone``, the command then ends with the exit code for that."""
    if shell.as_json:
        shell.write_json(ref)
    else:
        shell.write(text)
    if is_gone:
        raise typer.Exit(EXIT_CODES["unavailable"])


# --- ``note`` and ``annotate``: notes on states and branches, and metrics that people add ---


def register_notes(app: typer.Typer) -> None:
    """Add the commands."""
    app.command()(note)
    app.command()(annotate)


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
    if shell.as_json:
        shell.write_json(state)
    else:
        shell.write(
            f"state {state.uid[:10]} has"
            f" {', '.join(f'{key} = {state.metrics[key]:.9g}' for key in metrics)}"
        )


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
    rev: NoteRev = None,
    message: NoteMessage = None,
    branch: Branch = None,
    edit: Edit = None,
    delete: DeleteNote = None,
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
    if delete is not None:
        _delete_notes(shell, delete)
    elif edit is not None:
        _edit(shell, edit, message or "")
    elif message is not None:
        _write(shell, rev, branch, message, author)
    else:
        _list_notes(shell, rev, branch)


def _list_notes(shell: Shell, rev: str | None, branch: str | None) -> None:
    from datastates.lineage.query import names, revision

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
    from datastates.lineage.views.text import age_text, short

    lines: list[str] = []
    for note in found:
        of = (
            f"branch {note.branch}"
            if note.branch is not None
            else f"state {short(note.state or '')}"
        )
        edited = f", edited {age_text(note.edited_at)}" if note.edited_at else ""
        lines.append(f"{note.uid}  {of}  {note.author}, {age_text(note.created_at)}{edited}")
        lines += [f"    {line}" for line in note.text.splitlines()]
    return lines


def _write(
    shell: Shell, rev: str | None, branch: str | None, text: str, author: str | None
) -> None:
    from datastates.lineage.query import revision
    from datastates.lineage.write import refs
    from datastates.maintenance.environment import user_name

    if rev is None and branch is None:
        raise typer.BadParameter(
            "name the state or the branch that the note is on", param_hint="REV"
        )
    with shell.writing() as session:
        uid = None if rev is None else revision.resolve(session, rev).uid
        made = refs.write(
            session,
            text,
            state=uid,
            branch=branch,
            author=user_name() if author is None else author,
        )
    _say_notes(
        shell,
        made,
        f"note {made.uid} is on"
        f" {f'branch {made.branch}' if made.branch else f'state {(made.state or str())[:10]}'}",
    )


def _edit(shell: Shell, uid: str, text: str) -> None:
    from datastates.lineage.query import names
    from datastates.lineage.write import refs

    with shell.writing() as session:
        before = names.get_note(session, uid)
        changed = refs.edit(session, uid, text, seen=before)
    _say_notes(
        shell,
        changed,
        f"note {changed.uid} is changed; it read: {before.text.splitlines()[0][:60]}",
    )


def _delete_notes(shell: Shell, uid: str) -> None:
    from datastates.lineage.write import refs

    with shell.writing() as session:
        gone = refs.remove(session, uid)
    _say_notes(
        shell, gone, f"note {gone.uid} is deleted; it read: {gone.text.splitlines()[0][:60]}"
    )


def _say_notes(shell: Shell, note: Note, text: str) -> None:
    if shell.as_json:
        shell.write_json(note)
    else:
        shell.write(text)
