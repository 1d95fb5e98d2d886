"""What trackers, merges and clones need of an engine: in this process (``runner.Runner``), later in the agent of the node.

No method of a host does the training thread's work: it takes what was staged, and the rest happens elsewhere. What a capture has come to is
told through its ``handle.Progress``, never the other way round. ``Host`` is all of it, and is what ``Core`` gives out.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Protocol

from datastates.config import BackPressure
from datastates.lineage.states import NewState, Run, State, StateFacts, Why
from datastates.policy.contract import Policy
from datastates.policy.rules import Best
from datastates.system.recorder import Recorder
from datastates.transport.session.desk import Place

from .commit import Coming
from .line import Line, Staged
from .snapshots import Snapshots
from .stage import CopyJob

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

__all__ = ["Adopting", "Capturing", "Host", "Persisting", "Slots"]


class Slots(Protocol):
    """Room for states. Any thread."""

    def acquire(
        self, count: int, back_pressure: BackPressure, *, line: Line | None = None, within_s: float | None = None
    ) -> list[int] | None:
        """Slots for a state, the caller's until a state takes them or ``release``; None where there is no room, and nobody was to wait.

        Blocks under ``wait`` and ``drop-oldest`` until memory is let go, at most ``within_s``. A capture names its ``line``. For a patient
        line older states give way while nothing can be written; where none may, None.

        :raises OverBudget: the state could never fit, or nothing that is in its way can be written and the line is not patient.
        """

    def release(self, slots: list[int]) -> None:
        """Give back slots of a state that did not come about; whoever waits for room hears of it, also where there are none."""

    @property
    def needed_slots(self) -> int:
        """Slots that captures need to go on: for a state that is kept, one that is written and one that is captured."""


class Capturing(Protocol):
    """What a tracker needs. Any thread may call ``hurry`` and ``close_line``; the others belong to the training thread."""

    def open_line(self, line: Line, cadence: Policy, size_bytes: int) -> None:
        """A tracker begins, whose states take about so many bytes: memory for them is made warm meanwhile."""

    def know_best(self, line: Line, bests: Mapping[Best, tuple[float, str] | None]) -> None:
        """The best states by these rules of where the line stands: from now on its best so far becomes durable, sooner or later."""

    def begin_run(self, run: Run) -> None:
        """A training was recorded as a run, which captures name from now on."""

    def close_line(self, line: Line) -> None:
        """A tracker ends: what it captured is recorded, and its head is to become durable. Nothing where it has captured nothing."""

    def line_of(self, uid: str) -> Line | None:
        """The line of a state in memory, from which another sets out."""

    def submit(self, staged: Staged, *, is_deferring: bool) -> CopyJob:
        """Begin the copy of a capture. Its slots are the host's, whatever happens; its ``progress`` says what becomes of it."""

    def fence(self, job: CopyJob) -> None:
        """Wait until a copy reads nothing any more."""

    def hurry(self) -> None:
        """Somebody waits for the captures so far."""

    def settle(self, line: Line) -> None:
        """Wait until every capture of a line is recorded, given up, or has failed; or waits in memory, as the database is away.

        :raises Unavailable: the database has been away for a minute.
        """

    def skip(self, line: Line, facts: StateFacts, why: Why, reason: str) -> None:
        """This rank has no part of a state, which the other ranks are to hear; nothing for a line that is no part. Any thread."""

    def join(self, place: Place, *, seats: int, is_first: bool) -> None:
        """Parts are told together with the other processes of this node from now on, ``seats`` of them: by the one that ``is_first``."""

    def missing(self, uid: str) -> str | None:
        """Which ranks a state waits for, for people; None where it waits for none."""


class Adopting(Protocol):
    """What states in memory need that no tracker captured, or that nobody needs any more: merges, clones, evictions. Any thread."""

    def take_in(self, coming: Coming, record: Callable[[Session, NewState], State]) -> State:
        """Let a merge or a clone in: memory has it, ``record`` tells the lineage, and it stays until it is durable; what that returns.

        :raises Conflict: another state of this uid is here, or the branch has moved on.
        """

    def hand_on(self, state: State, branch: str | None) -> None:
        """The user's modules are to see a state that was made here and taken in: a merge, not a clone."""

    def unwritten_clones(self) -> list[str]:
        """What was taken in and is not durable, the oldest first."""

    def check_withdrawal(self, uid: str) -> None:
        """Refuse to let go of a state in memory.

        :raises Conflict: a training stands there, or it is on its way into the lineage or to disk.
        """

    def withdraw(self, uid: str) -> int:
        """Let go of a state in memory that the lineage does not count on any more; the bytes set free."""


class Persisting(Protocol):
    """What is to become durable, and waiting for it. Any thread."""

    def want(self, uid: str) -> None:
        """A state is to become durable, as soon as it is recorded."""

    def asked(self) -> Collection[str]:
        """The states that somebody here waited for to become durable, and still has the handle of."""

    def withdrawn(self, uids: Iterable[str]) -> None:
        """These are not on this node's disk any more; those in memory are captured again, and may become durable again."""

    def when_durable(self, listener: Callable[[int], None]) -> None:
        """Call this whenever a state became durable, with the bytes that it added, on any thread; it returns at once and raises nothing.

        The one that was given before is called no longer.
        """

    def when_full(self, listener: Callable[[], None]) -> None:
        """Call this whenever a state could not be written because the disk is full, on any thread; it returns at once and raises nothing.

        The one that was given before is called no longer.
        """

    def refs_changed(self) -> None:
        """Refs were made, moved or deleted: what they name is protected, and written."""

    def flush(self) -> None:
        """Wait until every capture so far is recorded or has failed; or waits in memory, as the database is away."""

    @property
    def trouble(self) -> str | None:
        """What keeps states from being written, since when, and what it has cost; None while all is well."""

    @property
    def pending_writes(self) -> int:
        """What is not recorded, written, copied or seen by modules yet, as it stands."""

    def drain(self, on_wait: Callable[[int], None] | None = None) -> None:
        """Wait until all that is wanted is durable, or has failed; ``on_wait`` is told now and then how many are left.

        :raises Unavailable: the database has been away for a minute, or the disk for some seconds; says what is not durable.
        """


class Host(Slots, Capturing, Adopting, Persisting, Protocol):
    """An engine, in this process or another."""

    @property
    def recorder(self) -> Recorder:
        """What counts and times what is done here."""

    @property
    def snapshots(self) -> Snapshots:
        """The newest states on the devices that they come from."""
