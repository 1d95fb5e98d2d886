"""Deciding when a recorded state is written to disk: a pure function of counts and times."""

from __future__ import annotations

from dataclasses import dataclass

from datastates.errors import InvalidInput

__all__ = ["Cadence"]


@dataclass(frozen=True, slots=True)
class Cadence:
    """Which captures become durable by themselves; tagged states and branch heads at exit always do.

    ``every`` counts captures (1: each of them), ``interval_s`` is the least time between two writes of the newest
    state. Both may be None; then only tags, the exit and ``capture.wait("durable")`` make states durable.
    """

    every: int | None = None
    interval_s: float | None = 30.0

    def __post_init__(self) -> None:
        if self.every is not None and self.every < 1:
            raise InvalidInput(f"durable_every is {self.every}: it counts captures, from 1")
        if self.interval_s is not None and not self.interval_s >= 0:
            raise InvalidInput(f"durable_interval_s is {self.interval_s}: it must be 0 or more seconds, or None")

    def is_due(self, *, index: int, now: float, last_write: float | None, is_newest: bool) -> bool:
        """Whether the ``index``-th capture (from 0) of a branch is to be written now.

        ``last_write`` is when a write last began on this branch, on the same clock as ``now``; None: never.
        """
        if self.every is not None and index % self.every == 0:
            return True
        if self.interval_s is None or not is_newest:
            return False
        return last_write is None or now - last_write >= self.interval_s

    def next_due(self, last_write: float | None) -> float | None:
        """The time at which the newest state is next due; None: never, or at the next capture."""
        if self.interval_s is None or last_write is None:
            return None
        return last_write + self.interval_s
