"""What people write of states and branches."""

from __future__ import annotations

import pytest

from datastates.errors import Conflict, InvalidInput, NotFound
from datastates.lineage import Database
from datastates.lineage.query import names
from datastates.lineage.write import refs
from tests.lineage.conftest import Grow


def test_a_note_is_there_with_who_and_when_until_it_is_deleted(
    database: Database, grow: Grow
) -> None:
    state, other = grow(), grow()
    with database.write() as session:
        refs.branch(session, "main", other.uid)
        first = refs.write(session, "Diverges *here*.\n\n- größe", state=state.uid, author="ada")
        second = refs.write(session, "of the branch", branch="main", author=" ")

    with database.write() as session:
        assert names.notes(session) == [second, first]
        assert names.notes(session, state=state.uid) == [first]
        assert names.notes(session, branch="main") == [second]
        assert names.notes(session, state=other.uid) == []
        assert (first.state, first.branch, first.author, first.edited_at) == (
            state.uid,
            None,
            "ada",
            None,
        )
        assert (second.state, second.branch, second.author) == (None, "main", "unknown")
        edited = refs.edit(session, first.uid, "It did not.")
    with database.write() as session:
        assert names.get_note(session, first.uid) == edited
        assert edited.text == "It did not."
        assert edited.edited_at is not None
        assert edited.edited_at >= edited.created_at == first.created_at
        assert refs.remove(session, first.uid) == edited
    with database.read() as session:
        assert names.notes(session) == [second]
        with pytest.raises(NotFound, match=first.uid):
            names.get_note(session, first.uid)


def test_a_note_that_was_edited_meanwhile_is_neither_changed_nor_deleted(
    database: Database, grow: Grow
) -> None:
    state = grow()
    with database.write() as session:
        seen = refs.write(session, "first", state=state.uid, author="ada")
        now = refs.edit(session, seen.uid, "mine", seen=seen)
    with pytest.raises(Conflict, match="read it again"), database.write() as session:
        refs.edit(session, seen.uid, "theirs", seen=seen)
    with pytest.raises(Conflict, match="read it again"), database.write() as session:
        refs.remove(session, seen.uid, seen=seen)
    with database.write() as session:
        assert names.notes(session) == [now]
        assert refs.remove(session, seen.uid, seen=now) == now


def test_what_becomes_of_a_note_is_an_event(database: Database, grow: Grow) -> None:
    state = grow()
    with database.write() as session:
        refs.branch(session, "main", state.uid)
        note = refs.write(session, "x", branch="main", author="ada")
        refs.edit(session, note.uid, "y")
        refs.remove(session, note.uid)
        assert [event.reason for event in names.reflog(session, note.uid)] == [
            f"note on main {what}" for what in ("deleted", "edited", "written by ada")
        ]
        assert len(names.reflog(session, "main")) == 1, "a branch's own reflog has only its moves"


def test_notes_come_in_pages(database: Database, grow: Grow) -> None:
    state = grow()
    with database.write() as session:
        written = [
            refs.write(session, f"note {number}", state=state.uid, author="x")
            for number in range(5)
        ][::-1]
    with database.read() as session:
        assert names.notes(session, limit=2) == written[:2]
        assert names.notes(session, limit=9, after=written[1].uid) == written[2:]
        with pytest.raises(NotFound, match="go on after"):
            names.notes(session, after="0" * 24)


@pytest.mark.parametrize("text", ["", " \n ", "x" * (refs.TEXT + 1), "a\x00b", "\ud800"])
def test_what_is_no_note_is_refused(database: Database, grow: Grow, text: str) -> None:
    state = grow()
    with pytest.raises(InvalidInput), database.write() as session:
        refs.write(session, text, state=state.uid, author="x")
    with database.write() as session:
        note = refs.write(session, "y" * refs.TEXT, state=state.uid, author="x")
    with pytest.raises(InvalidInput), database.write() as session:
        refs.edit(session, note.uid, text)
    with database.read() as session:
        assert names.notes(session) == [note]


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
            refs.write(session, "x", author="x", **of)
    with pytest.raises(NotFound), database.write() as session:
        refs.edit(session, "0" * 24, "x")


def test_notes_do_not_pile_up_for_ever(
    database: Database, grow: Grow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refs, "NOTES", 3)
    state, other = grow(), grow()
    with database.write() as session:
        for number in range(3):
            refs.write(session, str(number), state=state.uid, author="x")
        refs.write(session, "elsewhere", state=other.uid, author="x")
        with pytest.raises(InvalidInput, match="3 notes"):
            refs.write(session, "one more", state=state.uid, author="x")


def test_a_branch_keeps_its_notes_by_its_name(database: Database, grow: Grow) -> None:
    state = grow()
    with database.write() as session:
        refs.branch(session, "try", state.uid)
        note = refs.write(session, "bad idea", branch="try", author="x")
        refs.delete_ref(session, "try")
        refs.branch(session, "try", state.uid)
    with database.read() as session:
        assert names.notes(session, branch="try") == [note]
