"""What people write of states and branches."""

from __future__ import annotations

import pytest

from datastates.errors import Conflict, InvalidInput, NotFound
from datastates.lineage import Database
from datastates.lineage.change import notes, refs
from tests.lineage.conftest import Grow


def test_a_note_is_there_with_who_and_when_until_it_is_deleted(database: Database, grow: Grow) -> None:
    state, other = grow(), grow()
    with database.write() as session:
        refs.branch(session, "main", other.uid)
        first = notes.write(session, "Diverges *here*.\n\n- größe", state=state.uid, author="ada")
        second = notes.write(session, "of the branch", branch="main", author=" ")

    with database.write() as session:
        assert notes.notes(session) == [second, first]
        assert notes.notes(session, state=state.uid) == [first]
        assert notes.notes(session, branch="main") == [second]
        assert notes.notes(session, state=other.uid) == []
        assert (first.state, first.branch, first.author, first.edited_at) == (state.uid, None, "ada", None)
        assert (second.state, second.branch, second.author) == (None, "main", "unknown")
        edited = notes.edit(session, first.uid, "It did not.")
    with database.write() as session:
        assert notes.get(session, first.uid) == edited
        assert edited.text == "It did not."
        assert edited.edited_at is not None
        assert edited.edited_at >= edited.created_at == first.created_at
        assert notes.remove(session, first.uid) == edited
    with database.read() as session:
        assert notes.notes(session) == [second]
        with pytest.raises(NotFound, match=first.uid):
            notes.get(session, first.uid)


def test_a_note_that_was_edited_meanwhile_is_neither_changed_nor_deleted(database: Database, grow: Grow) -> None:
    state = grow()
    with database.write() as session:
        seen = notes.write(session, "first", state=state.uid, author="ada")
        now = notes.edit(session, seen.uid, "mine", seen=seen)
    with pytest.raises(Conflict, match="read it again"), database.write() as session:
        notes.edit(session, seen.uid, "theirs", seen=seen)
    with pytest.raises(Conflict, match="read it again"), database.write() as session:
        notes.remove(session, seen.uid, seen=seen)
    with database.write() as session:
        assert notes.notes(session) == [now]
        assert notes.remove(session, seen.uid, seen=now) == now


def test_what_becomes_of_a_note_is_an_event(database: Database, grow: Grow) -> None:
    state = grow()
    with database.write() as session:
        refs.branch(session, "main", state.uid)
        note = notes.write(session, "x", branch="main", author="ada")
        notes.edit(session, note.uid, "y")
        notes.remove(session, note.uid)
        assert [event.reason for event in refs.reflog(session, note.uid)] == [
            f"note on main {what}" for what in ("deleted", "edited", "written by ada")
        ]
        assert len(refs.reflog(session, "main")) == 1, "a branch's own reflog has only its moves"


def test_notes_come_in_pages(database: Database, grow: Grow) -> None:
    state = grow()
    with database.write() as session:
        written = [notes.write(session, f"note {number}", state=state.uid, author="x") for number in range(5)][::-1]
    with database.read() as session:
        assert notes.notes(session, limit=2) == written[:2]
        assert notes.notes(session, limit=9, after=written[1].uid) == written[2:]
        with pytest.raises(NotFound, match="go on after"):
            notes.notes(session, after="0" * 24)


@pytest.mark.parametrize("text", ["", " \n ", "x" * (notes.TEXT + 1), "a\x00b", "\ud800"])
def test_what_is_no_note_is_refused(database: Database, grow: Grow, text: str) -> None:
    state = grow()
    with pytest.raises(InvalidInput), database.write() as session:
        notes.write(session, text, state=state.uid, author="x")
    with database.write() as session:
        note = notes.write(session, "y" * notes.TEXT, state=state.uid, author="x")
    with pytest.raises(InvalidInput), database.write() as session:
        notes.edit(session, note.uid, text)
    with database.read() as session:
        assert notes.notes(session) == [note]


def test_a_note_is_of_one_thing_that_is_there(database: Database, grow: Grow) -> None:
    state = grow()
    with database.write() as session:
        refs.tag(session, "warm", state.uid)
    for of, error in (
        ({"state": "0" * 24}, NotFound),
        ({"branch": "nobody"}, NotFound),
        ({"branch": "warm"}, InvalidInput),
        ({}, InvalidInput),
        ({"state": state.uid, "branch": "main"}, InvalidInput),
    ):
        with pytest.raises(error), database.write() as session:
            notes.write(session, "x", author="x", **of)
    with pytest.raises(NotFound), database.write() as session:
        notes.edit(session, "0" * 24, "x")


def test_notes_do_not_pile_up_for_ever(database: Database, grow: Grow, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notes, "NOTES", 3)
    state, other = grow(), grow()
    with database.write() as session:
        for number in range(3):
            notes.write(session, str(number), state=state.uid, author="x")
        notes.write(session, "elsewhere", state=other.uid, author="x")
        with pytest.raises(InvalidInput, match="3 notes"):
            notes.write(session, "one more", state=state.uid, author="x")


def test_a_branch_keeps_its_notes_by_its_name(database: Database, grow: Grow) -> None:
    state = grow()
    with database.write() as session:
        refs.branch(session, "try", state.uid)
        note = notes.write(session, "bad idea", branch="try", author="x")
        refs.delete(session, "try")
        refs.branch(session, "try", state.uid)
    with database.read() as session:
        assert notes.notes(session, branch="try") == [note]
