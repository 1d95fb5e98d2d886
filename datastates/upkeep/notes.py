"""The door to a repository's notes: what people write about its states and branches."""

from __future__ import annotations

from collections.abc import Iterator

from datastates import values
from datastates.errors import InvalidInput
from datastates.lineage.change import notes
from datastates.lineage.states import Note, State
from datastates.opening.core import Core
from datastates.opening.environment import user_name

__all__ = ["Notes"]


class Notes:
    """The notes of a repository, ``repo.notes``.

        note = repo.notes.write("Diverges *after* the warm-up.", state="main")
        repo.notes.edit(note, "Diverges after step 400.")
        print([note.text for note in repo.notes])

    Iterating yields all of them, newest first.
    """

    def __init__(self, core: Core) -> None:
        self._core = core

    @values.takes(text=values.text, branch=values.optional(values.text), author=values.optional(values.text))
    def write(self, text: str, *, state: str | State | None = None, branch: str | None = None, author: str | None = None) -> Note:
        """Write a note about a state or a branch, in Markdown.

        :param text: at most 16,384 characters.
        :param state: a revision; the note stays with that state, wherever a branch moves.
        :param branch: a branch; its notes are kept under its name.
        :param author: who wrote it; None: the user that this process runs as.
        :raises NotFound: there is no such state, or no such branch.
        """
        uid = None if state is None else self._core.state(values.revision(state)).uid
        with self._core.writing() as session:
            return notes.write(session, text, state=uid, branch=branch, author=user_name() if author is None else author)

    def of(self, state: str | State | None = None, *, branch: str | None = None) -> list[Note]:
        """The notes on a state or on a branch, newest first."""
        if (state is None) == (branch is None):
            raise InvalidInput("notes are of a state or of a branch: name one of the two")
        uid = None if state is None else self._core.state(values.revision(state)).uid
        with self._core.reading() as session:
            return notes.notes(session, state=uid, branch=branch)

    @values.takes(text=values.text)
    def edit(self, note: Note | str, text: str) -> Note:
        """Change the text of a note. A note that is named by its uid is changed whatever it reads.

        :raises NotFound: there is no such note.
        :raises Conflict: somebody edited the note since it was read.
        """
        uid, seen = _named(note)
        with self._core.writing() as session:
            return notes.edit(session, uid, text, seen=seen)

    def delete(self, note: Note | str) -> Note:
        """Delete a note for good; returns the note. A note that is named by its uid is deleted whatever it reads.

        :raises NotFound: there is no such note.
        :raises Conflict: somebody edited the note since it was read.
        """
        uid, seen = _named(note)
        with self._core.writing() as session:
            return notes.remove(session, uid, seen=seen)

    def __iter__(self) -> Iterator[Note]:
        with self._core.reading() as session:
            return iter(notes.notes(session))

    def __repr__(self) -> str:
        return f"<Notes of {self._core.location}>"


def _named(note: Note | str) -> tuple[str, Note | None]:
    return (note.uid, note) if isinstance(note, Note) else (values.text(note, "the note"), None)
