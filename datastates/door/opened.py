"""The base of every part of the door: the repository that was opened, and how a revision is read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from datastates import values
from datastates.config import Config
from datastates.lineage.states import State
from datastates.opening.core import Core
from datastates.opening.location import Location

if TYPE_CHECKING:
    from sqlalchemy.orm import Session


__all__ = ["Opened"]


class Opened:
    """A repository that was opened."""

    def __init__(self, location: Location, config: Config) -> None:
        self._core = core = Core(location, config)
        self.location, self.config, self.node, self.recovered = core.location, core.config, core.node, core.recovered

    @property
    def core(self) -> Core:
        """The core, for the rest of this package; it is no part of the public interface."""
        return self._core

    @values.takes(rev=values.revision)
    def state(self, rev: str | State) -> State:
        """The state that a revision names.

            print(repo.state("main@best:loss").step)

        :raises NotFound: it names none; lists close names.
        :raises SyntaxProblem: it does not parse; points at the column.
        """
        return self.core.state(rev)

    @contextmanager
    def _changing(self, rev: str | State | None) -> Iterator[tuple[Session, str]]:
        uid = self._uid(rev)
        with self.core.writing() as session:
            yield session, uid

    def _uid(self, rev: str | State | None) -> str:
        return self.core.state(values.revision(rev)).uid
