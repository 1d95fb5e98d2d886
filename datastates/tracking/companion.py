"""What goes along with a training: the run of another log, for example, that hears of each of its states."""

from __future__ import annotations

from typing import Protocol

from datastates.lineage.states import State

__all__ = ["Companion"]


class Companion(Protocol):
    """Given to ``Training.accompany``. It knows neither the tracker nor its objects, or these would outlive their last name."""

    def recorded(self, state: State, /) -> None:
        """The lineage knows of a state of this training, each once and in order. On any thread; it returns at once and raises nothing."""

    def ended(self, error: BaseException | None, /) -> None:
        """The training was closed, with the error that ended its block; every state was told. On the thread that closes; what this raises
        is logged."""
