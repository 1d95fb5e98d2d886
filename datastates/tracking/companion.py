"""The companion of a training, for example the run of another log, which is told of each of its states."""

from __future__ import annotations

from typing import Protocol

from datastates.lineage.states import State

__all__ = ["Companion"]


class Companion(Protocol):
    """What ``Training.accompany`` takes. It must refer to neither the tracker nor its objects, or it would keep them alive."""

    def recorded(self, state: State, /) -> None:
        """Called once for each state of this training that is recorded, in order, on any thread. It returns at once and raises nothing."""

    def ended(self, error: BaseException | None, /) -> None:
        """Called when the training is closed, on the closing thread, with the error that ended its block, if any. ``recorded`` was called
        for every state before. An error that this raises is logged."""
