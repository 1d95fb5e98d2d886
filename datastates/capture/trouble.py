"""Keeps track of trouble, when nothing can be written for now: its reason, since when it lasts, and what it has cost.

It is logged when it begins, every ``_SAY_AGAIN_S`` while it lasts, and when it is over; ``describe`` tells callers that ask.
"""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from datastates.lineage.show.texts import plural
from datastates.system.logs import event

__all__ = ["CLOSING_S", "Trouble", "is_full"]

_logger = logging.getLogger(__name__)

CLOSING_S = 5.0
"""How long closing a training or a repository waits for a disk in trouble: many schedulers give ten seconds for the whole end."""

_SAY_AGAIN_S = 600.0


def is_full(error: BaseException) -> bool:
    """Whether a write failed because there was no room."""
    cause = error.__cause__
    return isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT)


@dataclass(slots=True)
class Trouble:
    """The trouble of one runner, used under its lock. ``failures`` counts all so far; ``why`` is None while there is no trouble."""

    clock: Callable[[], float] = time.monotonic
    failures: int = 0
    why: str | None = None
    since: float = 0.0
    closing_since: float | None = None
    """When a caller that closes began to wait for the end of the trouble."""
    _given_way: int = 0
    _skipped: int = 0
    _said_at: float = field(default=0.0, repr=False)

    def begin(self, why: str) -> None:
        """Note that writing failed, or has stalled."""
        is_new, self.why = self.why is None, why
        if is_new:
            self.since = self._said_at = self.clock()
            _logger.warning(
                "states cannot be written for now; the training goes on, and they wait in memory: %s",
                why,
                extra=event("writes.paused", reason=why),
            )

    def note_left(self, count: int) -> None:
        """Note that states have left memory unwritten."""
        self._given_way += count

    def note_skipped(self) -> None:
        """Note that a capture was not taken."""
        self._skipped += 1

    def remind(self, waiting: int) -> None:
        """Log that the trouble lasts, if that was not logged for a while."""
        if self.why is not None and self.clock() - self._said_at >= _SAY_AGAIN_S:
            self._said_at = self.clock()
            lasting = event("writes.still_paused", seconds=self._said_at - self.since, waiting=waiting, reason=self.why)
            _logger.warning("still %s", self.describe(waiting), extra=lasting)

    def end(self, waiting: int) -> None:
        """Note that a state was written, which ends the trouble; ``waiting`` states are still to be written."""
        if self.why is None:
            return
        after = self.clock() - self.since
        over = event("writes.resumed", seconds=after, waiting=waiting, left=self._given_way, skipped=self._skipped)
        _logger.warning("states are written again, after %.0f s; %d more to write%s", after, waiting, self._cost(), extra=over)
        self.why = self.closing_since = None
        self._given_way = self._skipped = 0

    def describe(self, waiting: int) -> str | None:
        """What the trouble is; None while there is none."""
        if self.why is None:
            return None
        states = "1 state waits" if waiting == 1 else f"{waiting} states wait"
        return f"nothing can be written since {self.clock() - self.since:.0f} s, and {states} in memory{self._cost()}: {self.why}"

    def describe_lost(self, names: Sequence[str]) -> str:
        """What is lost with this process, and why: names of at least one state."""
        said = f"{names[0]} is in memory only, and is lost with this process"
        if len(names) > 1:
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            said = f"{len(names)} states are in memory only, and are lost with this process: {', '.join(names[:5])}{more}"
        return f"{said}; {self.why}"

    def _cost(self) -> str:
        left = f", {self._given_way} left it unwritten as it was full" if self._given_way else ""
        return left + (f", {plural(self._skipped, 'capture')} skipped" if self._skipped else "")
