"""Deciding when a recorded state is written to disk: a pure function of counts and times."""

from __future__ import annotations

from dataclasses import dataclass

from datastates import values

__all__ = ["INTERVAL_S", "Cadence"]

INTERVAL_S = 30.0
"""The seconds between two writes of the newest state, unless somebody says otherwise."""


@dataclass(frozen=True, slots=True)
class Cadence:
    """Which captures become durable by themselves; tagged states and branch heads at exit always do.

    ``every`` counts captures (1: each of them), ``interval_s`` is the least time between two writes of the newest
    state. Both may be None; then only tags, the exit and ``capture.wait("durable")`` make states durable. Give one to
    ``Config`` or ``Repository.track`` as ``cadence``, or its parts as ``durable_every`` and ``durable_interval_s``.

        repo.track(model=model, cadence=datastates.Cadence(every=10, interval_s=None))

    :raises InvalidInput: one of them is none of these.
    """

    every: int | None = None
    interval_s: float | None = INTERVAL_S

    def __post_init__(self) -> None:
        if self.every is not None:
            object.__setattr__(self, "every", values.integer(self.every, "durable_every, which counts captures,", least=1))
        if self.interval_s is not None:
            object.__setattr__(self, "interval_s", values.seconds(self.interval_s, "durable_interval_s"))

    def is_due(self, *, index: int | None, now: float, last_write: float | None, is_newest: bool) -> bool:
        """Whether a state of a branch is to be written now.

        :param index: which capture of the branch it is, from 0; None when no capture came, and only time went by.
        :param now: the time.
        :param last_write: when a write last began on this branch, on the same clock; None: never.
        :param is_newest: whether it is the newest state of the branch.
        """
        if self.every is not None and index is not None and index % self.every == 0:
            return True
        if self.interval_s is None or not is_newest:
            return False
        return last_write is None or now - last_write >= self.interval_s

    def next_due(self, last_write: float | None) -> float | None:
        """The time at which the newest state is next due; None: never, or at the next capture."""
        if self.interval_s is None or last_write is None:
            return None
        return last_write + self.interval_s
