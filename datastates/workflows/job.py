"""What a train function is given: its configuration, its data, the epochs that are left, and a tracker on its branch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

from datastates.capture.handle import Capture
from datastates.lineage.states import Value
from datastates.tracker import Tracker

from .plan import Variant

__all__ = ["Job"]


class Job(Protocol):
    """One variant in the process that trains it. A train function calls ``track`` once, then loops over ``epochs``."""

    @property
    def variant(self) -> Variant:
        """What the plan says."""

    @property
    def config(self) -> Mapping[str, Value]:
        """The study's configuration with the changes of the variant and of its ancestors."""

    @property
    def train(self) -> tuple[int, ...]:
        """Indices to train on, ascending; empty when the plan leaves that to the train function."""

    @property
    def validation(self) -> tuple[int, ...]:
        """Indices that neither this variant nor an ancestor of it trains on, ascending."""

    def track(self, **objects: object) -> Tracker:
        """Track on the variant's branch: restored from its newest state, or else from where it forks."""

    def epochs(self) -> Iterator[int]:
        """The epochs that are left, from 0 in the variant; ends early when the study's stop rule says so."""

    def report(self, **metrics: float) -> Capture:
        """The epoch is over: capture the state with its metrics. The last one reported is the variant's result."""
