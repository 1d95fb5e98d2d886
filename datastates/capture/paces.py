"""Reports what the policies of lines chose: to the training, the log and the lineage."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping

from datastates.lineage.change import runs
from datastates.lineage.database import Database
from datastates.lineage.states import Value
from datastates.policy.history import noted
from datastates.system.interrupts import undisturbed
from datastates.system.logs import event

from .events import Paced
from .line import Line

__all__ = ["Paces", "facts_of"]

_logger = logging.getLogger(__name__)


class Paces:
    """``take`` runs under the runner's lock, ``say`` and ``note`` without it; ``begin`` and ``end`` belong to the training thread."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._lines: dict[str, Line] = {}
        self._unsaid: deque[tuple[Line, str]] = deque()
        self._unnoted: dict[str, Line] = {}

    def begin(self, line: Line) -> None:
        """Register a training that begins."""
        self._lines[line.name] = line

    def end(self, line: Line) -> None:
        """Remove a training that ends; the code that finishes its run notes its last costs."""
        self._lines.pop(line.name, None)

    def take(self, paced: Paced) -> None:
        """Take the new costs of a line's writes, or its policy's new choice."""
        line = self._lines.get(paced.line)
        if line is None:
            return
        is_first = line.costs is None
        line.costs, line.choice = paced.costs, paced.choice or line.choice
        if paced.has_changed and paced.choice is not None:
            self._unsaid.append((line, paced.choice.why))
        if is_first or paced.has_changed:
            self._unnoted[line.name] = line

    def say(self) -> None:
        """Log each choice, in one line."""
        while self._unsaid:
            line, why = self._unsaid.popleft()
            with undisturbed():  # an interrupt could leave the locks of logging taken
                chosen = event("cadence.chosen", branch=line.branch, reason=str(why))
                _logger.info("branch %s: states become durable %s", line.branch, why, extra=chosen)

    def note(self) -> None:
        """Tell the lineage what was chosen since the last call, and at what costs. What it does not take now is told later.

        :raises Unavailable: the database does not answer.
        """
        while self._unnoted:
            name, line = next(iter(self._unnoted.items()))
            if line.run is not None:
                with self._database.write() as session:
                    runs.note(session, line.run.uid, facts_of(line))
            self._unnoted.pop(name, None)


def facts_of(line: Line) -> Mapping[str, Value]:
    """The facts about a line's costs and choice that are recorded with its run."""
    return {} if line.costs is None else noted(line.costs, line.choice)
