"""Reports what the policies of lines chose: to the training, the log and the lineage."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping

from datastates.lineage.change import runs
from datastates.lineage.database import Database
from datastates.lineage.states import Value
from datastates.policy.auto import KEPT
from datastates.policy.history import noted
from datastates.system.interrupts import undisturbed
from datastates.system.logs import event

from .events import Paced
from .line import Line

__all__ = ["Paces", "facts_of"]

_logger = logging.getLogger(__name__)

_LASTING_S = 30.0  # a choice that is not the first is logged once it has lasted so long


class Paces:
    """``take`` runs under the runner's lock, ``say`` and ``note`` without it; ``begin`` and ``end`` belong to the training thread."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._lines: dict[str, Line] = {}
        self._unsaid: dict[str, tuple[Line, str, float]] = {}
        self._said: dict[str, str] = {}
        self._unnoted: dict[str, Line] = {}

    def begin(self, line: Line) -> None:
        """Register a training that begins."""
        self._lines[line.name] = line

    def end(self, line: Line) -> None:
        """Remove a training that ends; the code that finishes its run notes its last costs."""
        for known in (self._lines, self._unsaid, self._said):
            known.pop(line.name, None)

    def take(self, paced: Paced) -> None:
        """Take the new costs of a line's writes, or its policy's new choice."""
        line = self._lines.get(paced.line)
        if line is None:
            return
        is_first = line.costs is None
        line.costs, line.choice = paced.costs, paced.choice or line.choice
        if paced.has_changed and paced.choice is not None:
            since = time.monotonic() if line.name in self._said else -math.inf
            self._unsaid[line.name] = (line, paced.choice.why, since)
        if is_first or paced.has_changed:
            self._unnoted[line.name] = line

    def say(self) -> None:
        """Log each choice that has lasted, in one line."""
        for name, (line, why, since) in list(self._unsaid.items()) if self._unsaid else ():
            if time.monotonic() - since < _LASTING_S or self._unsaid.pop(name, None) is None or self._said.get(name) == why:
                continue
            self._said[name] = why
            with undisturbed():  # an interrupt could leave the locks of logging taken
                chosen = event("cadence.chosen", branch=line.branch, reason=str(why))
                what = f"{why}{line.bound}" if KEPT in why else f"states become durable {why}"
                _logger.info("branch %s: %s", line.branch, what, extra=chosen)

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
