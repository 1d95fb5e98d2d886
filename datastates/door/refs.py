"""The methods of a repository for names of states (tags and branches) and for the notes on them."""

from __future__ import annotations

from datastates import values
from datastates.lineage.change import refs as lineage_refs
from datastates.lineage.states import Ref, RefEvent, State
from datastates.upkeep.notes import Notes

from .opened import Opened

__all__ = ["Names"]


class Names(Opened):
    """Tags, branches and notes."""

    @values.takes(rev=values.revision, message=values.optional(values.message))
    def tag(self, name: str, rev: str | State | None, *, message: str | None = None) -> Ref:
        """Name a state for good, which makes it durable. A tag that names it already stays as it is, so that a script may be started again.

            repo.tag("baseline", "main", message="before the learning rate was changed")

        :raises Conflict: the name is taken by another state.
        """
        with self._changing(rev) as (session, uid):
            return lineage_refs.keep_tag(session, name, uid, message=message)

    @values.takes(rev=values.revision)
    def branch(self, name: str, rev: str | State | None) -> Ref:
        """Make a branch at a state.

            repo.branch("second-try", "main~2")

        :raises Conflict: the name is taken.
        """
        with self._changing(rev) as (session, uid):
            return lineage_refs.branch(session, name, uid)

    @values.takes(rev=values.revision, expected=values.revision)
    def move(self, name: str, rev: str | State | None, *, expected: str | State) -> Ref:
        """Move a ref by compare-and-swap.

            repo.branch("best-so-far", "main~2")
            repo.move("best-so-far", "main", expected="main~2")

        :raises Conflict: the ref no longer points to ``expected``.
        """
        old = self._uid(expected)
        with self._changing(rev) as (session, uid):
            return lineage_refs.move(session, name, uid, expected=old)

    def delete_ref(self, name: str) -> None:
        """Delete a name; its reflog stays.

        :raises NotFound: there is no such ref.
        """
        self._core.settle()
        with self._core.writing() as session:
            lineage_refs.delete(session, name)

    def refs(self) -> list[Ref]:
        """Every branch and tag, by name."""
        with self.core.reading() as session:
            return lineage_refs.refs(session)

    @property
    def notes(self) -> Notes:
        """What people wrote about states and branches.

        repo.notes.write("Diverges *after* the warm-up.", state="main")
        """
        return Notes(self.core)

    def reflog(self, name: str) -> list[RefEvent]:
        """The moves of a ref, newest first. A ref that was deleted still has them."""
        with self.core.reading() as session:
            return lineage_refs.reflog(session, name)
