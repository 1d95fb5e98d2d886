"""What a tracker, a merge and a clone need of an engine: in this process (``runner.Runner``), later in the agent of the node.

No method of a host does the training thread's work: it takes what was staged, and the rest happens elsewhere. What a capture has come to is
told through its ``handle.Progress``, never the other way round.
"""

from __future__ import annotations

from typing import Protocol

from datastates.config import BackPressure
from datastates.content.manifest import Manifest
from datastates.lineage.states import State
from datastates.policy.cadence import Cadence

from .line import Line, Staged
from .stage import CopyJob

__all__ = ["Adopting", "Host"]


class Host(Protocol):
    """What captures need. Any thread may call ``want``, ``hurry`` and ``close_line``; the others belong to the training thread."""

    def open_line(self, line: Line, cadence: Cadence, size_bytes: int) -> None:
        """A tracker begins, whose states take about so many bytes: memory for them is made warm meanwhile."""

    def close_line(self, line: Line) -> None:
        """A tracker ends: what it captured is recorded, and its head is to become durable. Nothing where it has captured nothing."""

    def acquire(
        self, count: int, back_pressure: BackPressure, *, line: Line | None = None, within_s: float | None = None
    ) -> list[int] | None:
        """Slots for a state, the caller's until ``submit`` or ``release``; None where there is no room, and the caller was not to wait.

        Blocks under ``wait`` and ``drop-oldest`` until memory is let go, at most ``within_s``. A capture names its ``line``.

        :raises OverBudget: the state could never fit, or nothing that is in its way can be written.
        """

    def release(self, slots: list[int]) -> None:
        """Give back slots of a state that did not come about."""

    def submit(self, staged: Staged, *, is_deferring: bool) -> CopyJob:
        """Begin the copy of a capture. Its slots are the host's, whatever happens; its ``progress`` says what becomes of it."""

    def fence(self, job: CopyJob) -> None:
        """Wait until a copy reads nothing any more."""

    def want(self, uid: str) -> None:
        """A state is to become durable, as soon as it is recorded."""

    def hurry(self) -> None:
        """Somebody waits for the captures so far."""

    def flush(self) -> None:
        """Wait until every capture so far is recorded or has failed; or waits in memory, as the database is away."""


class Adopting(Protocol):
    """What states that no tracker captured need, merges and clones."""

    def acquire(
        self, count: int, back_pressure: BackPressure, *, line: Line | None = None, within_s: float | None = None
    ) -> list[int] | None:
        """As ``Host.acquire``."""

    def release(self, slots: list[int]) -> None:
        """As ``Host.release``."""

    def adopt(self, uid: str, base: Manifest | None = None) -> None:
        """A state is in memory and in the lineage; it stays in memory until it is durable. ``base`` is a relative's manifest on disk."""

    def hand_on(self, state: State, branch: str | None) -> None:
        """The user's modules are to see a state that was made here and adopted: a merge, not a clone."""

    def refs_changed(self) -> None:
        """Refs were made, moved or deleted: what they name is protected, and written."""
