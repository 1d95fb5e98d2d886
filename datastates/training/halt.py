"""Halting a training: on a request from another process, it ends after a capture that is durable.
The conditions follow SCR's ``scr_halt``.

A request is stored with the unfinished runs of a branch, so it reaches every node. Rank 0 decides
after which capture the training ends, far enough ahead that every rank learns of it before.
"""

from __future__ import annotations

import logging
import math
import time
from typing import TYPE_CHECKING, Literal

import msgspec

from datastates.errors import DatastatesError
from datastates.lineage.states import OURS
from datastates.lineage.write import runs
from datastates.system.logs import event, say

if TYPE_CHECKING:
    from datastates.lineage.session import Session

    from .training import Training

_logger = logging.getLogger(__name__)

HALT = f"{OURS}halt"
"""The key in the record of a run for the request, and for the capture that ends it."""

AHEAD_S = 5.0
"""How far ahead rank 0 decides, in seconds: each rank looks once a second."""

BEFORE_S = 10.0
"""How long before its time a training with ``--before`` begins to end, in seconds, besides the
time of three captures."""


class Halt(msgspec.Struct, frozen=True):
    """A request: ``now``, ``after`` so many more captures, ``at`` a time, or so that the training
    has ended ``before`` a time, in seconds since the epoch.

    ``last`` is the number of captures after which the ranks end, once rank 0 has decided it."""

    kind: Literal["now", "after", "at", "before"]
    value: float = 0.0
    last: int | None = None

    @property
    def text(self) -> str:
        """As it is stored."""
        return msgspec.json.encode(self).decode()

    def describe(self) -> str:
        """The request in words."""
        match self.kind:
            case "now":
                return "after the next capture"
            case "after":
                return f"after {self.value:.0f} more captures"
            case "at":
                return time.strftime("after %Y-%m-%d %H:%M:%S", time.localtime(self.value))
        return time.strftime("before %Y-%m-%d %H:%M:%S", time.localtime(self.value))


class Halted(SystemExit):
    """Ends a training whose halt was requested, with exit status 0."""


def requested(session: Session, branch: str) -> Halt | None:
    """The request for the trainings of a branch, if there is one."""
    text = runs.noted(session, branch, HALT)
    return None if text is None else msgspec.json.decode(text, type=Halt)


def request(session: Session, branch: str, halt: Halt | None) -> int:
    """Store a request for the trainings of a branch, or take it back; returns how many unfinished
    runs it reached."""
    found = runs.unfinished(session, branch)
    for run in found:
        runs.note(session, run.uid, {HALT: None if halt is None else halt.text})
    return len(found)


class HaltWatch:
    """Looks for a request for one training. ``look`` runs on a background thread; the other methods
    run on the training thread."""

    def __init__(self, training: Training) -> None:
        self._database, self._branch = training.core.database, training.branch
        self._ranks, self._is_first = training.ranks.size, training.ranks.is_first
        self._captures, self._began = 0, time.monotonic()
        self._last: int | None = None
        self._seen: Halt | None = None
        self.is_over = False
        """Whether the state of the last capture is durable."""

    def look(self) -> None:
        """Once a second: read the request, and decide on rank 0."""
        try:
            with self._database.read() as session:
                halt = requested(session, self._branch)
            if halt is not None and halt.last is None and self._is_first:
                last = self._decide(halt)
                if last is not None:
                    halt = msgspec.structs.replace(halt, last=last)
                    with self._database.write() as session:
                        request(session, self._branch, halt)
            self._seen, self._last = halt, None if halt is None else halt.last
        except (DatastatesError, msgspec.MsgspecError) as exc:
            _logger.debug("no request to halt can be read: %s", exc)

    def _decide(self, halt: Halt) -> int | None:
        """The number of captures after which the training ends; None if that is not due."""
        each_s = (time.monotonic() - self._began) / max(1, self._captures)
        ahead = 1 if self._ranks == 1 else max(2, math.ceil(AHEAD_S / each_s))
        match halt.kind:
            case "now":
                return self._captures + ahead
            case "after":
                return self._captures + max(ahead, int(halt.value))
            case "at":
                due = halt.value
            case "before":
                due = halt.value - BEFORE_S - 3 * each_s
        return self._captures + ahead if time.time() >= due else None

    def count(self) -> bool:
        """Count a capture; returns whether it is the last one."""
        self._captures += 1
        return self._last is not None and self._captures >= self._last

    def end(self, step: int) -> None:
        """Note that the state of the last capture is durable."""
        self.is_over = True
        halted = event("training.halted", branch=self._branch, step=step)
        said = "" if self._seen is None else f", as requested ({self._seen.describe()})"
        say(f"branch {self._branch} ends at step {step}{said}", halted)

    def check(self) -> None:
        """End the training if it is halted.

        :raises Halted: it is.
        """
        if self.is_over:
            raise Halted(0)
