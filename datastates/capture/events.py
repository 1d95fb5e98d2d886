"""What the engine is told and what it answers: events and actions, as plain values."""

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
    """A tracker begins on a branch."""

    line: str
    cadence: Policy
    branch: str = ""


@dataclass(frozen=True, slots=True)
class Recorded:
    """A state of a line is in memory, digested and in the lineage; it is the line's head now."""

    uid: str
    line: str
    now: float
    taken: Taken = _UNTOLD


@dataclass(frozen=True, slots=True)
class BestKnown:
    """The best states, by each of these rules, of where a line stands now: value and uid; None where there is none.

    The best so far by a rule stays in memory until it is durable, and becomes so before any other state of its line does.
    """

    line: str
    bests: Mapping[Best, tuple[float, str] | None]


@dataclass(frozen=True, slots=True)
class Adopted:
    """A state that no line captured is in memory and in the lineage: a clone."""

    uid: str


@dataclass(frozen=True, slots=True)
class Wanted:
    """Somebody asked for a state to become durable; ``is_near``: and to stay off further tiers."""

    uid: str
    is_near: bool = False


@dataclass(frozen=True, slots=True)
class RefsChanged:
    """The uids that tags name now, and the uid that each branch names."""

    tagged: frozenset[str]
    branches: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Written:
    """A state is durable; ``began`` and ``ended`` are when it was written, if that is to be learnt from, ``further_s`` how long it took
    lately to put one onto the further tiers.
    """

    uid: str
    began: float | None = None
    ended: float | None = None
    further_s: float | None = None


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """A state is not on disk any more: a policy of retention did not keep it there."""

    uid: str


@dataclass(frozen=True, slots=True)
class WriteFailed:
    """Writing a state failed; it is wanted no longer, unless that ``is_passing``."""

    uid: str
    now: float
    is_passing: bool = False


@dataclass(frozen=True, slots=True)
class Stalled:
    """The write that is under way makes no progress, or does so again."""

    is_stalled: bool


@dataclass(frozen=True, slots=True)
class Retry:
    """Somebody waits: what failed is tried now."""


@dataclass(frozen=True, slots=True)
class RoomNeeded:
    """``slots`` slots are to be free. ``is_blocked``: somebody has waited for them ``since`` then; a capture of ``line``, if it names one.

    ``in_flight`` captures are not recorded yet. ``is_patient``: the training goes on when nothing can be written.
    """

    slots: int
    is_blocked: bool
    back_pressure: BackPressure
    line: str | None = None
    in_flight: int = 0
    since: float = 0.0
    now: float = 0.0
    is_patient: bool = False


@dataclass(frozen=True, slots=True)
class Tick:
    """Time went by."""

    now: float


@dataclass(frozen=True, slots=True)
class Closing:
    """A line ends: its head is wanted. None: all of them, and whatever a branch names."""

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
    """Write this state to the local tier; ``is_near``: it stays off further ones, as things stand."""

    uid: str
    is_near: bool = False


@dataclass(frozen=True, slots=True)
class Evict:
    """Drop these states from memory, in this order, until ``until`` slots are free; None: all of them."""

    uids: tuple[str, ...]
    until: int | None


@dataclass(frozen=True, slots=True)
class GiveUp:
    """These wanted states will not become durable: they may be dropped for room."""

    uids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class GiveWay:
    """Drop these states unwritten, in this order, until ``until`` slots are free: they cannot be written, and the training goes on."""

    uids: tuple[str, ...]
    until: int


@dataclass(frozen=True, slots=True)
class Refuse:
    """There is no room to wait for: these states are to be kept, and none of them could be written."""

    uids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Paced:
    """What captures and writes of a line cost by now, and what its policy chose; ``has_changed``: it chose anew."""

    line: str
    costs: Costs
    choice: CadenceChoice | None
    has_changed: bool


@dataclass(frozen=True, slots=True)
class PassOn:
    """Put these durable states, which were kept near, onto the further tiers after all."""

    uids: tuple[str, ...]


Action = Write | Evict | GiveUp | GiveWay | Refuse | Paced | PassOn
