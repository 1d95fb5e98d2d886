"""Notes: what people write about states and branches, in Markdown. The notes of a branch belong to its name, whatever becomes of it."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from sqlalchemy import ColumnElement, bindparam, delete, func, insert, select, update

from datastates import values
from datastates.errors import Conflict, InvalidInput, NotFound
from datastates.lineage.lookup import id_of
from datastates.lineage.schema import NoteRow, table, to_us
from datastates.lineage.search.notes import get, notes, of_states
from datastates.lineage.search.refs import get as ref_of
from datastates.lineage.states import Note, RefKind

from .refs import note_event

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

__all__ = ["NOTES", "TEXT", "bring", "check", "edit", "get", "notes", "of_states", "remove", "write"]

TEXT = 16_384
"""The most characters that a note may have."""

NOTES = 1_000
"""The most notes that a state or a branch may have."""

_AUTHOR = 255


def write(session: Session, text: str, *, state: str | None = None, branch: str | None = None, author: str) -> Note:
    """Write a note on a state (by its uid) or on a branch.

    :raises NotFound: there is no such state, or no such branch.
    :raises InvalidInput: the text is empty or too long, or there are too many notes already.
    """
    if (state is None) == (branch is None):
        raise InvalidInput("a note is of a state or of a branch: name one of the two")
    if branch is not None and ref_of(session, branch).kind is not RefKind.BRANCH:
        raise InvalidInput(f"{branch!r} is a tag: write the note of the state that it names")
    row = {"state_id": None if state is None else id_of(session, state), "branch": branch}
    count = session.execute(select(func.count()).where(_note.c.state_id == row["state_id"] if branch is None else _note.c.branch == branch))
    if count.scalar_one() >= NOTES:
        raise InvalidInput(f"{state or branch} has {NOTES} notes: delete some, or add to one that is there")
    made = {"uid": secrets.token_hex(12), "author": _author(author), "text": _text(text), "created_at": to_us(None), "edited_at": None}
    session.execute(insert(_note), {**row, **made})
    note = get(session, str(made["uid"]))
    _log(session, note, f"written by {note.author}")
    return note


def edit(session: Session, uid: str, text: str, *, seen: Note | None = None) -> Note:
    """Change the text of a note, which is marked as edited from then on. ``seen``: only if the note is still this one.

    :raises NotFound: there is no such note.
    :raises Conflict: the note was edited since ``seen`` was read.
    """
    done: Any = session.execute(_EDIT.where(*_as_seen(seen)), {"note": uid, "text": _text(text), "edited_at": to_us(None)})
    changed = get(session, uid)
    if done.rowcount == 0:
        raise _was_edited(changed)
    _log(session, changed, "edited")
    return changed


def remove(session: Session, uid: str, *, seen: Note | None = None) -> Note:
    """Delete a note for good; returns it as it was. ``seen``: only if the note is still this one.

    :raises NotFound: there is no such note.
    :raises Conflict: the note was edited since ``seen`` was read.
    """
    gone = get(session, uid)
    done: Any = session.execute(_DELETE.where(*_as_seen(seen)), {"note": uid})
    if done.rowcount == 0:
        raise _was_edited(get(session, uid))
    _log(session, gone, "deleted")
    return gone


def check(coming: Iterable[Note]) -> None:
    """Raise unless ``bring`` could add these notes.

    :raises InvalidInput: a text cannot be stored; the error names its note.
    """
    for note in coming:
        _text(note.text)
        _author(note.author)


def bring(session: Session, coming: Iterable[Note]) -> int:
    """Add those notes that are not here yet, on states that came along with them. Returns how many there were."""
    count = 0
    for note in coming:
        if note.state is None:
            continue
        try:
            get(session, note.uid)
        except NotFound:
            row = {"uid": note.uid, "author": _author(note.author), "text": _text(note.text), "state_id": id_of(session, note.state)}
            edited_at = None if note.edited_at is None else to_us(note.edited_at)
            session.execute(insert(_note), {**row, "branch": None, "created_at": to_us(note.created_at), "edited_at": edited_at})
            count += 1
    return count


def _text(text: str) -> str:
    found = values.text(text, "the note", at_most=TEXT)
    if not found.strip():
        raise InvalidInput("the note is empty: write something, or delete it")
    return found


def _author(author: str) -> str:
    return values.text(author, "the author", at_most=_AUTHOR).strip() or "unknown"


def _as_seen(seen: Note | None) -> list[ColumnElement[bool]]:
    return [] if seen is None else [func.coalesce(_note.c.edited_at, _note.c.created_at) == to_us(seen.edited_at or seen.created_at)]


def _was_edited(note: Note) -> Conflict:
    return Conflict(f"note {note.uid} was edited at {note.edited_at}, after it was read here: read it again, then change it")


def _log(session: Session, note: Note, what: str) -> None:
    """Append to the reflog under the note's uid. Whoever follows the events reads the notes again."""
    note_event(session, note.uid, RefKind.TAG, None, None, f"note on {note.branch or note.state} {what}")


_note = table(NoteRow)
_EDIT = update(_note).where(_note.c.uid == bindparam("note"))
_DELETE = delete(_note).where(_note.c.uid == bindparam("note"))
