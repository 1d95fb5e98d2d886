"""The notes on states and branches. ``change.notes`` writes them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from sqlalchemy import bindparam, select

from datastates.errors import InvalidInput, NotFound
from datastates.lineage.batches import batches
from datastates.lineage.schema import NoteRow, StateRow, from_us, table
from datastates.lineage.states import Note

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

__all__ = ["get", "notes", "of_states"]

_BATCH = 500  # uids in one IN list

_note, _state = table(NoteRow), table(StateRow)
_NOTES = select(_note, _state.c.uid.label("state")).outerjoin_from(_note, _state, _state.c.id == _note.c.state_id)


def get(session: Session, uid: str) -> Note:
    """The note of this uid.

    :raises NotFound: there is none.
    """
    row = session.execute(_NOTES.where(_note.c.uid == bindparam("note")), {"note": uid}).first()
    if row is None:
        raise NotFound(f"there is no note {uid!r}: it may have been deleted, the list of notes has those that are there")
    return _to_note(row)


def notes(
    session: Session, *, state: str | None = None, branch: str | None = None, limit: int | None = None, after: str | None = None
) -> list[Note]:
    """The notes on a state (by its uid) or a branch, or all of them, newest first; only those after the note ``after``, if given.

    :raises NotFound: there is no note ``after``.
    """
    if state is not None and branch is not None:
        raise InvalidInput("notes are of a state or of a branch: name one of the two")
    query = _NOTES.order_by(_note.c.id.desc()).limit(limit)
    if state is not None:
        query = query.where(_state.c.uid == state)
    if branch is not None:
        query = query.where(_note.c.branch == branch)
    if after is not None:
        last = session.execute(select(_note.c.id).where(_note.c.uid == after)).scalar()
        if last is None:
            raise NotFound(f"there is no note {after!r} to go on after: begin again at the first page")
        query = query.where(_note.c.id < last)
    return [_to_note(row) for row in session.execute(query)]


def of_states(session: Session, uids: Iterable[str]) -> list[Note]:
    """The notes on some states, oldest first."""
    wanted, found = sorted(set(uids)), list[Any]()
    for some in batches(wanted, _BATCH):
        found += session.execute(_NOTES.where(_state.c.uid.in_(some))).all()
    return [_to_note(row) for row in sorted(found, key=lambda row: row.id)]


def _to_note(row: Any) -> Note:
    edited_at = None if row.edited_at is None else from_us(row.edited_at)
    return Note(row.uid, row.state, row.branch, row.author, row.text, from_us(row.created_at), edited_at)
