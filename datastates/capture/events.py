"""The events that the engine takes and the actions that it returns, as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from datastates.config import BackPressure
from datastates.policy.contract import CadenceChoice, Costs, Policy
from datastates.policy.rules import Best

from .pacing import Taken

__all__ = [
    "Action",
    "Adopted",
    "BestKnown",
    "Closing",
    "Event",
    "Evict",
    "GiveUp",
    "GiveWay",
    "LineOpened",
    "Paced",
    "PassOn",
    "Recorded",
    "RefsChanged",
    "Refuse",
    "Retry",
    "RoomNeeded",
    "Stalled",
    "Tick",
    "Wanted",
    "Withdrawn",
    "Write",
    "WriteFailed",
    "Written",
]

_UNTOLD = Taken()


@dataclass(frozen=True, slots=True)
class LineOpened:
    """A tracker begins on a branch. Its states have about ``size`` bytes.

    ``keeps_bests``: the best so far by each metric whose name has a direction becomes durable like those of ``BestKnown``.
    """

    line: str
    cadence: Policy
    branch: str = ""
    size: int = 0
    keeps_bests: bool = False


@dataclass(frozen=True, slots=True)
class Recorded:
    """A state of a line is in memory, digested and in the lineage; it is the line's head now. ``is_last``: no other state of its round
    follows, so writing may begin.
    """

    uid: str
    line: str
    now: float
    taken: Taken = _UNTOLD
    is_last: bool = True


@dataclass(frozen=True, slots=True)
class BestKnown:
    """The best state by each of these rules up to where a line stands now: its value and uid; None if there is none.

    The best so far by a rule stays in memory until it is durable, and becomes durable before any other state of its line does.
    """

    line: str
    bests: Mapping[Best, tuple[float, str] | None]


@dataclass(frozen=True, slots=True)
class Adopted:
    """A state that no line captured, such as a clone, is in memory and in the lineage."""

    uid: str


@dataclass(frozen=True, slots=True)
class Wanted:
    """A state must become durable because it was asked for; ``is_near``: and stay off further tiers."""

    uid: str
    is_near: bool = False


@dataclass(frozen=True, slots=True)
class RefsChanged:
    """The uids that tags name now, and the uid that each branch names."""

    tagged: frozenset[str]
    branches: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Written:
    """States that were written together are durable. ``began`` and ``ended`` are the times of the write, if policies should learn from it.
    ``further_s`` is how long it lately took to put a state onto the further tiers. ``size`` is how many bytes the write added to the disk,
    and ``cpu_s`` for how long it kept a processor busy.
    """

    uids: tuple[str, ...]
    began: float | None = None
    ended: float | None = None
    further_s: float | None = None
    size: int = 0
    cpu_s: float | None = None


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """A state is no longer on disk: a retention policy did not keep it."""

    uid: str


@dataclass(frozen=True, slots=True)
class WriteFailed:
    """Writing states failed. They are no longer wanted, unless the failure ``is_passing``."""

    uids: tuple[str, ...]
    now: float
    is_passing: bool = False


@dataclass(frozen=True, slots=True)
class Stalled:
    """The write under way makes no progress, or makes progress again."""

    is_stalled: bool


@dataclass(frozen=True, slots=True)
class Retry:
    """A caller waits: failed writes are tried again now."""


@dataclass(frozen=True, slots=True)
class RoomNeeded:
    """Room is needed for chunks of these ``lengths``. ``is_blocked``: a caller has waited for it ``since`` then, for a capture of ``line``
    if that is given.

    ``in_flight`` captures are not recorded yet. ``is_patient``: the training goes on when nothing can be written.
    """

    lengths: tuple[int, ...]
    is_blocked: bool
    back_pressure: BackPressure
    line: str | None = None
    in_flight: int = 0
    since: float = 0.0
    now: float = 0.0
    is_patient: bool = False


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""

    now: float


@dataclass(frozen=True, slots=True)
class Closing:
    """A line ends: its head is wanted. None: all lines end, and whatever a branch names is wanted."""

    line: str | None


Event = (
    LineOpened
    | BestKnown
    | Recorded
    | Adopted
    | Wanted
    | RefsChanged
    | Written
    | Withdrawn
    | WriteFailed
    | Stalled
    | Retry
    | RoomNeeded
    | Tick
    | Closing
)


@dataclass(frozen=True, slots=True)
class Write:
    """Write these states to the local tier together; those that are ``near`` stay off further tiers for now."""

    uids: tuple[str, ...]
    near: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Evict:
    """Drop these states from memory, in this order, until chunks of the lengths ``until`` fit; None: all of them."""

    uids: tuple[str, ...]
    until: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class GiveUp:
    """These wanted states will not become durable, and may be dropped for room."""

    uids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class GiveWay:
    """Drop these states unwritten, in this order, until chunks of the lengths ``until`` fit: they cannot be written, and the training must
    go on."""

    uids: tuple[str, ...]
    until: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Refuse:
    """Refuse the capture that waits for room: these states must be kept, and none of them could be written."""

    uids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Paced:
    """The costs so far of a line's captures and writes, and what its policy chose; ``has_changed``: the choice is new."""

    line: str
    costs: Costs
    choice: CadenceChoice | None
    has_changed: bool


@dataclass(frozen=True, slots=True)
class PassOn:
    """Put these durable states, which were kept near until now, onto the further tiers after all."""

    uids: tuple[str, ...]


Action = Write | Evict | GiveUp | GiveWay | Refuse | Paced | PassOn
