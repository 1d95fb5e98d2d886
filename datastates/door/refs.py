"""The methods of a repository for names of states (tags and branches) and for the notes on them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, SupportsFloat

from datastates import values
from datastates.lineage.change import refs as lineage_refs
from datastates.lineage.change.annotate import annotate, measure
from datastates.lineage.states import Ref, RefEvent, State, Value
from datastates.opening.environment import user_name
from datastates.opening.life import check_idle
from datastates.upkeep.notes import Notes

from .opened import Opened

if TYPE_CHECKING:
    from datastates.upkeep.retention import Pruned

__all__ = ["Names"]


class Names(Opened):
    """Tags, branches and notes."""

    @values.takes(rev=values.revision, message=values.optional(values.message))
    def tag(self, name: str, rev: str | State | None, *, message: str | None = None) -> Ref:
        """Name a state for good, which makes it durable. A tag that names it already stays as it is, so that a script may be started again.

            repo.tag("baseline", "main", message="before the learning rate was changed")

        If the bytes of the state are gone, the tag is made, and a warning names the nearest state that has its bytes.

        :raises Conflict: the name is taken by another state.
        """
        with self._changing(rev) as (session, uid):
            made = lineage_refs.keep_tag(session, name, uid, message=message)
            lineage_refs.warn(session, made)
        return made

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
            moved = lineage_refs.move(session, name, uid, expected=old)
            lineage_refs.warn(session, moved)
        return moved

    @values.takes(name=values.text, new=values.text)
    def rename(self, name: str, new: str) -> Ref:
        """Give a branch or a tag another name. A branch keeps its history: its states, its notes and the retention of its trainings.

            repo.branch("third-try", "main")
            repo.rename("third-try", "final")

        The reflog of each name has a line about it.

        :raises Conflict: the new name is taken, or a training of the branch may be running.
        :raises NotFound: there is no such ref.
        """
        self._core.settle()
        with self._core.writing() as session:
            check_idle(session, name, self._core.home)
            return lineage_refs.rename(session, name, new)

    @values.takes(bytes=values.flag, dry_run=values.flag)
    def delete_ref(self, name: str, *, bytes: bool = False, dry_run: bool = False) -> Pruned | None:
        """Delete a name; its reflog stays, and so do the states.

            repo.branch("dead-end", "main")
            print(repo.delete_ref("dead-end", bytes=True).bytes_freed)

        :param bytes: also drop the bytes of the states that no other branch or tag leads to; they stay in the lineage as
            ``evicted``. Returns what was dropped, and why the others stay.
        :param dry_run: delete nothing, and report what ``bytes`` would drop.
        :raises NotFound: there is no such ref.
        :raises Conflict: with ``bytes``, a training of the branch may be running.
        """
        if bytes or dry_run:
            from datastates.upkeep.retention import drop_ref  # few ask for it

            return drop_ref(self.core, name, dry_run=dry_run)
        self._core.settle()
        with self._core.writing() as session:
            lineage_refs.delete(session, name)
        return None

    @values.takes(rev=values.revision, replace=values.flag, author=values.optional(values.text))
    def annotate(
        self,
        rev: str | State,
        *,
        metrics: Mapping[str, SupportsFloat] | None = None,
        attributes: Mapping[str, Value] | None = None,
        replace: bool = False,
        author: str | None = None,
    ) -> State:
        """Add metrics and attributes to a state that was captured before; returns the state as it is then. Its bytes and digest stay.

            state = repo.annotate("main", metrics={"test_loss": 0.31}, attributes={"reviewed": True})
            print(state.metrics["test_loss"], repo.reflog(state.uid)[0].reason)

        The log of metrics, with author, time and replaced values, is the reflog under the state's uid.

        :param rev: the state.
        :param metrics: numbers, by name, as for ``capture``.
        :param attributes: values, by name; None removes one.
        :param replace: change metrics that the state has already.
        :param author: who adds the metrics; None: the user and the host of this process.
        :raises Conflict: the state has another value of a metric, and ``replace`` is false.
        :raises NotFound: the revision names no state.
        """
        with self._changing(rev) as (session, uid):
            annotate(session, uid, values.attributes(attributes))
            return measure(
                session, uid, {} if metrics is None else metrics, author=author or f"{user_name()}@{self.node}", is_replacing=replace
            )

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
