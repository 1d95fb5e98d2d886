"""What decides when a state is written to disk: the facts that are asked with, the answer, and the contract between them.

The engine knows a line (one training on one branch) and asks its ``Policy``; a policy knows neither clock nor thread. ``|`` joins policies.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from datastates import values
from datastates.errors import InvalidInput

__all__ = ["AnyOf", "CadenceChoice", "Costs", "Moment", "Policy", "span"]


@dataclass(frozen=True, slots=True)
class Costs:
    """What captures and writes of a training cost, in seconds, as measured; see ``policy.measures``.

    ``interval_s`` goes by from one capture to the next while nothing is written. A write takes ``write_s``, and delays the training by
    ``overhead_s`` in all: what it overlaps with is not lost. A capture holds the training for ``held_s``, written or not. ``captures`` and
    ``writes`` say of how many this was learnt. ``further_s`` is how long it takes to put a state onto the further tiers; None: no such
    tier took one.
    """

    interval_s: float
    write_s: float
    overhead_s: float
    held_s: float
    captures: int
    writes: int
    further_s: float | None = None


@dataclass(frozen=True, slots=True)
class CadenceChoice:
    """How often states of a training become durable by themselves, and ``why``: what ``run.cadence`` says.

    ``cadence`` is the policy as text. ``every`` (captures) and ``interval_s`` are what it came to: as they were given, or as they were
    computed; None where it does not go by them. ``further_every`` is how many durable states there are to one that goes on to further
    tiers. ``costs`` are those that were reckoned with; None where nothing was computed.
    """

    cadence: str
    why: str
    every: int | None = None
    interval_s: float | None = None
    further_every: int = 1
    costs: Costs | None = None


@dataclass(frozen=True, slots=True)
class Moment:
    """What is known of a line when its policy is asked about one of its states.

    ``index`` says which capture of the line it is, from 0; None where no capture came, and only time went by or a write ended. ``step`` and
    ``metrics`` are the state's. ``last_write``, ``last_index`` and ``last_step`` are those of the newest state that the policy picked; None
    before the first. ``extremes`` are the least and the greatest value of each metric so far. ``count`` captures were made so far,
    ``idle`` of them since the last write ended. ``is_writing``: a write of the line is under way or waits. ``choice`` is what the policy
    chose last.
    """

    now: float
    index: int | None = None
    last_write: float | None = None
    is_newest: bool = True
    step: int = 0
    last_index: int | None = None
    last_step: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    extremes: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    count: int = 0
    idle: int = 0
    is_writing: bool = False
    choice: CadenceChoice | None = None

    @property
    def since(self) -> int:
        """How many captures there were since the one that was picked last, or ever."""
        return self.count - 1 - self.last_index if self.last_index is not None else self.count


class Policy(ABC):
    """Says which captures become durable by themselves; tagged states and branch heads at exit always do.

    Give one, or several joined by ``|``, to ``Config`` or ``Repository.track`` as ``cadence``; ``str`` gives the text that
    ``DATASTATES_CADENCE`` takes. Everything here is a pure function: facts in, a decision out.
    """

    __slots__ = ()

    is_computed = False
    """Whether ``choose`` ever chooses anything."""
    asks_mtbf = False
    """Whether it wants to be told by ``informed`` how often processes fail."""

    @abstractmethod
    def is_due(self, moment: Moment, /) -> bool:
        """Whether a state is to be written now."""

    @abstractmethod
    def next_due(self, moment: Moment, /) -> float | None:
        """The time at which the newest state is due by itself; None: never, or at the next capture."""

    @abstractmethod
    def told(self) -> CadenceChoice:
        """What is known of it before anything was measured."""

    def choose(self, costs: Costs, current: CadenceChoice | None, /) -> CadenceChoice | None:
        """What to do at these costs, ``current`` itself where that still holds; None: it goes by no costs."""
        return None

    def informed(self, mtbf_s: float, /) -> Policy:
        """The same, told that processes of this repository fail every ``mtbf_s`` seconds; what a user said of it stays."""
        return self

    def counted(self) -> Policy | None:
        """What of it goes by the number of a capture and its metrics alone, so that every rank of a group comes to it by itself.

        None: nothing, as it goes by clocks or costs, or by what was picked before.
        """
        return None

    @abstractmethod
    def __str__(self) -> str:
        """The text that means it."""

    def __or__(self, other: object) -> Policy:
        """Writes what either of them would write."""
        if not isinstance(other, Policy):
            raise InvalidInput(f"a cadence is joined by | with {values.shown(other)}: join it with another, such as OnImprovement('loss')")
        return AnyOf((*_members(self), *_members(other)))


@dataclass(frozen=True, slots=True)
class AnyOf(Policy):
    """Several policies, each of which may pick a state. Made by ``|``; at most one of them computes anything."""

    members: tuple[Policy, ...]

    def __post_init__(self) -> None:
        computed = [str(one) for one in self.members if one.is_computed]
        if len(computed) > 1:
            raise InvalidInput(f"{' and '.join(computed)} each compute a cadence: choose one of them")

    @property
    def is_computed(self) -> bool:  # type: ignore[override]  # a constant of other policies
        """See ``Policy``."""
        return any(one.is_computed for one in self.members)

    @property
    def asks_mtbf(self) -> bool:  # type: ignore[override]  # a constant of other policies
        """See ``Policy``."""
        return any(one.asks_mtbf for one in self.members)

    def is_due(self, moment: Moment, /) -> bool:
        """See ``Policy``."""
        return any(one.is_due(moment) for one in self.members)

    def next_due(self, moment: Moment, /) -> float | None:
        """See ``Policy``."""
        return min((at for one in self.members if (at := one.next_due(moment)) is not None), default=None)

    def told(self) -> CadenceChoice:
        """See ``Policy``."""
        return self._together({one: one.told() for one in self.members})

    def choose(self, costs: Costs, current: CadenceChoice | None, /) -> CadenceChoice | None:
        """See ``Policy``."""
        for one in self.members:
            if one.is_computed:
                own = None if current is None else replace(current, cadence=str(one), why=current.why.partition("; or ")[0])
                chosen = one.choose(costs, own)
                if chosen is None or (own is not None and chosen is own):
                    return current
                return self._together({other: chosen if other is one else other.told() for other in self.members}, chosen)
        return None

    def informed(self, mtbf_s: float, /) -> Policy:
        """See ``Policy``."""
        return AnyOf(tuple(one.informed(mtbf_s) for one in self.members))

    def counted(self) -> Policy | None:
        """See ``Policy``; nothing where something is computed, which also says what goes on to further tiers."""
        found = [] if self.is_computed else [own for one in self.members if (own := one.counted()) is not None]
        return AnyOf(tuple(found)) if found else None

    def _together(self, each: Mapping[Policy, CadenceChoice], chosen: CadenceChoice | None = None) -> CadenceChoice:
        """One choice that says them all; what was computed comes first."""
        first = chosen or next((said for one, said in each.items() if one.is_computed), next(iter(each.values())))
        why = "; or ".join(dict.fromkeys([first.why, *(said.why for said in each.values())]))
        return replace(first, cadence=str(self), why=why)

    def __str__(self) -> str:
        return "|".join(map(str, self.members))


def _members(policy: Policy) -> tuple[Policy, ...]:
    return policy.members if isinstance(policy, AnyOf) else (policy,)


def span(seconds: float) -> str:
    """A time span for people: ``0.35 s``, ``12 s``, ``3.4 min``, ``2.0 h``, ``1.2 d``."""
    for unit, scale, most in (("ms", 1e-3, 0.1), ("s", 1.0, 120.0), ("min", 60.0, 7200.0), ("h", 3600.0, 172800.0)):
        if seconds < most:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds / 86400:.3g} d"
