"""What trackers, merges and clones need of an engine: in this process (``runner.Runner``), later in
the agent of the node.

A host does no work on the training thread: it takes what was staged, and the rest happens
elsewhere. It reports how far a capture has come through its ``handle.Progress``, never the other
way round. ``Host`` is the whole interface, and is what ``Core`` gives out.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from datastates.config import BackPressure
from datastates.lineage.states import NewState, Run, State, StateFacts, Status, Why
from datastates.policy.contract import Policy
from datastates.policy.retention import Best
from datastates.system.telemetry import Recorder

from .commit import Coming
from .copy import CopyJob
from .device_copies import Snapshots
from .handle import Line, Staged

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

__all__ = ["Adopting", "Capturing", "Host", "Persisting", "Slots"]


class Slots(Protocol):
    """Room for states. Callable from any thread."""

    def acquire(
        self,
        lengths: Sequence[int],
        back_pressure: BackPressure,
        *,
        line: Line | None = None,
        within_s: float | None = None,
    ) -> list[int] | None:
        """Slots for the chunks of a state; None if there is no room and the caller must not wait.
        They belong to the caller until a state takes them or ``release`` gives them back.

        Blocks under ``wait`` and ``drop-oldest`` until memory is freed, for ``within_s`` at most. A
        capture names its ``line``. For a patient line, older states give way while nothing can be
        written; if none may, the result is None.

        :raises OverBudget: the state could never fit, or nothing that is in its way can be written
            and the line is not patient.
        """

    def release(self, slots: list[int]) -> None:
        """Give back the slots of a state that did not come about, and wake callers that wait for
        room, even if there are no slots."""

    @property
    def needed_bytes(self) -> int:
        """The memory that captures need to go on: for a state that is kept, one that is written
        and one that is captured."""


class Capturing(Protocol):
    """What a tracker needs. Any thread may call ``hurry``, ``close_line``, ``skip`` and
    ``missing``; the others belong to the training thread."""

    def open_line(self, line: Line, cadence: Policy, size_bytes: int) -> None:
        """Register a tracker whose states take about ``size_bytes``; memory for them is made
        warm in the background."""

    def know_best(self, line: Line, bests: Mapping[Best, tuple[float, str] | None]) -> None:
        """Set the best states by these rules up to where the line stands: from now on its best
        so far becomes durable, sooner or later."""

    def begin_run(self, run: Run) -> None:
        """Note that a training was recorded as a run, which captures name from now on."""

    def close_line(self, line: Line, *, is_failing: bool = False) -> None:
        """End a tracker: what it captured is recorded, and its head will become durable. Does
        nothing if it has captured nothing.

        If ``is_failing``, it waits for parts of other ranks for 3 s at most: the failure of one
        rank usually ends all ranks.
        """

    def line_of(self, uid: str) -> Line | None:
        """The line of a state in memory, from which another line starts."""

    def submit(self, staged: Staged, *, is_deferring: bool) -> CopyJob:
        """Begin the copy of a capture.

        Its slots belong to the host now, whatever happens; its ``progress`` reports the outcome."""

    def fence(self, job: CopyJob) -> None:
        """Wait until a copy reads nothing any more."""

    def hurry(self) -> None:
        """Finish the captures so far sooner, because a caller waits for them."""

    def settle(self, line: Line) -> None:
        """Wait until every capture of a line is recorded, was given up or has failed, or waits in
        memory because the database is away.

        :raises Unavailable: the database has been away for a minute.
        """

    def skip(self, line: Line, facts: StateFacts, why: Why, reason: str) -> None:
        """Tell the other ranks that this rank has no part of a state; does nothing for a line
        that captures no parts."""

    def missing(self, uid: str) -> str | None:
        """A text for people that says for which ranks a state waits; None if it waits for none."""

    def check_goal(self, goal: Status) -> None:
        """Check that states of this repository can reach a status.

        :raises InvalidInput: none of its tiers gives it, or a later one.
        """


class Adopting(Protocol):
    """What merges, clones and evictions need: states in memory that no tracker captured, or that
    are no longer needed. Callable from any thread."""

    def take_in(self, coming: Coming, record: Callable[[Session, NewState], State]) -> State:
        """Take in a merge or a clone: memory gets it, ``record`` tells the lineage, and it stays
        until it is durable; returns the result of ``record``.

        :raises Conflict: another state of this uid is here, or the branch has moved on.
        """

    def hand_on(self, state: State, branch: str | None) -> None:
        """Show the user's modules a state that was made here and taken in: a merge, not a clone."""

    def unwritten_clones(self) -> list[str]:
        """The states that were taken in and are not durable, the oldest first."""

    def check_withdrawal(self, uid: str) -> None:
        """Raise unless a state in memory may be dropped.

        :raises Conflict: a training stands there, or it is on its way into the lineage or to disk.
        """

    def withdraw(self, uid: str) -> int:
        """Drop a state from memory on which the lineage no longer relies; returns the bytes
        freed."""


class Persisting(Protocol):
    """Which states must become durable, and waiting for that. Callable from any thread."""

    def want(self, uid: str) -> None:
        """Make a state durable, as soon as it is recorded."""

    def asked(self) -> Collection[str]:
        """The states that a caller here asked to become durable, and whose handle it still has."""

    def withdrawn(self, uids: Iterable[str]) -> None:
        """Note that these are no longer on this node's disk.

        Those in memory are ``captured`` again, and may become durable again."""

    def when_durable(self, listener: Callable[[int], None]) -> None:
        """Call ``listener`` whenever a state became durable, with the bytes that it added, on any
        thread. It must return at once and raise nothing.

        It replaces the listener that was given before.
        """

    def when_full(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` whenever a state could not be written because the disk is full, on any
        thread. It must return at once and raise nothing.

        It replaces the listener that was given before.
        """

    def refs_changed(self) -> None:
        """Read the refs again after some were made, moved or deleted: what they name is
        protected, and written."""

    def flush(self) -> None:
        """Wait until every capture so far is recorded or has failed, or waits in memory because
        the database is away."""

    @property
    def trouble(self) -> str | None:
        """What keeps states from being written, since when, and what it has cost; None while
        writing works."""

    @property
    def pending_writes(self) -> int:
        """How many states are not yet recorded, written, copied or seen by modules at the
        moment."""

    def drain(self, on_wait: Callable[[int], None] | None = None) -> None:
        """Wait until every wanted state is durable or has failed; ``on_wait`` is told now and then
        how many are left.

        :raises Unavailable: the database has been away for a minute, or the disk for some seconds;
            says what is not durable.
        """


class Host(Slots, Capturing, Adopting, Persisting, Protocol):
    """An engine, in this process or another."""

    @property
    def recorder(self) -> Recorder:
        """The recorder that counts and times the work done here."""

    @property
    def snapshots(self) -> Snapshots:
        """The snapshots: the newest states, kept on the devices from which they come."""
