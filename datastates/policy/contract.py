"""The contract of policies, which decide when a state is written to disk: the facts that they get, and the answer that they give.

The engine knows a line (one training on one branch) and asks its ``Policy``; a policy knows neither clock nor thread. ``|`` joins policies.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from datastates import values
from datastates.errors import InvalidInput

__all__ = ["AnyOf", "CadenceChoice", "Costs", "Moment", "Policy", "span"]


@dataclass(frozen=True, slots=True)
class Costs:
    """What captures and writes of a training cost, in seconds, as measured; see ``policy.measures``.

    ``interval_s`` passes from one capture to the next while nothing is written. A write takes ``write_s``, and delays the training by
    ``overhead_s`` in all; the time that merely overlaps with training is not lost. A capture holds the training for ``held_s``, written or
    not. ``captures`` and ``writes`` say from how many this was learnt. ``further_s`` is how long it takes to put a state onto the further
    tiers; None: no such tier took one.

    ``pace_s`` passes between two captures, written or not. ``sure_s`` is a delay that a write causes almost certainly, and ``error_s``
    is the standard error of that. Writing a state takes ``cpu_s`` of the processor's time (None: not measured), and adds ``size`` bytes
    to the disk. ``debt`` is how many bytes of what was written the policy's ``bytes_per_s`` has not paid for yet. Lately up to
    ``waiting`` states waited for the disk at once; inf: a capture had to wait, since memory was full.
    """

    interval_s: float
    write_s: float
    overhead_s: float
    held_s: float
    captures: int
    writes: int
    further_s: float | None = None
    pace_s: float = 0.0
    sure_s: float = 0.0
    error_s: float = 0.0
    cpu_s: float | None = None
    size: float = 0.0
    debt: float = 0.0
    waiting: float = 0


@dataclass(frozen=True, slots=True)
class CadenceChoice:
    """How often states of a training become durable by themselves, and ``why``; ``run.cadence`` returns it.

    ``cadence`` is the policy as text. ``every`` (captures) and ``interval_s`` are its values, as they were given or computed; None if it
    does not use them. ``further_every`` is the number of durable states for each one that goes on to further tiers. ``costs`` are those
    used in the computation; None if nothing was computed.
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

    ``index`` is the number of the capture in its line, from 0; None if there was no new capture, and only time passed or a write ended.
    ``step`` and ``metrics`` are the state's. ``last_write``, ``last_index`` and ``last_step`` are those of the newest state that the policy
    picked; None before the first. ``extremes`` are the least and the greatest value of each metric so far. ``count`` captures were made so
    far, ``idle`` of them since the last write ended. ``waiting`` states are being written, or wait for that. ``choice`` is the policy's
    last choice. ``size`` and ``debt`` are in bytes, as in ``Costs``.
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
    waiting: int = 0
    choice: CadenceChoice | None = None
    size: float = 0.0
    debt: float = 0.0

    @property
    def is_writing(self) -> bool:
        """Whether a write is under way or waits."""
        return self.waiting > 0

    @property
    def since(self) -> int:
        """How many captures there were since the one that was picked last, or since the start."""
        return self.count - 1 - self.last_index if self.last_index is not None else self.count


class Policy(ABC):
    """Decides which captures become durable by themselves; tagged states and branch heads at exit always do.

    Give one, or several joined by ``|``, to ``Config`` or ``Repository.track`` as ``cadence``; ``str`` gives the text that
    ``DATASTATES_CADENCE`` takes. Every method is a pure function: it takes facts and returns a decision.
    """

    __slots__ = ()

    is_computed = False
    """Whether ``choose`` ever chooses anything."""
    asks_mtbf = False
    """Whether ``informed`` should tell it how often processes fail."""
    bytes_per_s: float | None = None
    """The rate, in bytes a second, that ``Moment.debt`` is paid off with; None: the policy does not ask for it."""

    @abstractmethod
    def is_due(self, moment: Moment, /) -> bool:
        """Whether to write a state now."""

    @abstractmethod
    def next_due(self, moment: Moment, /) -> float | None:
        """The time at which the newest state is due by itself; None: never, or at the next capture."""

    @abstractmethod
    def told(self) -> CadenceChoice:
        """What is known of the policy before anything is measured."""

    def choose(self, costs: Costs, current: CadenceChoice | None, /) -> CadenceChoice | None:
        """The choice at these costs, or ``current`` itself if that still holds; None: the policy does not depend on costs."""
        return None

    def informed(self, mtbf_s: float, /) -> Policy:
        """The same policy, told that processes of this repository fail every ``mtbf_s`` seconds; what the user gave stays."""
        return self

    def counted(self) -> Policy | None:
        """The part of the policy that depends only on a capture's number and metrics, which every rank of a group can decide by itself.

        None: there is no such part, because the policy depends on clocks, costs or earlier picks.
        """
        return None

    @abstractmethod
    def __str__(self) -> str:
        """The policy as text."""

    def __or__(self, other: object) -> Policy:
        """A policy that writes what either would write."""
        if not isinstance(other, Policy):
            raise InvalidInput(f"a cadence is joined by | with {values.shown(other)}: join it with another, such as OnImprovement('loss')")
        return AnyOf((*_members(self), *_members(other)))


@dataclass(frozen=True, slots=True)
class AnyOf(Policy):
    """Several policies, any of which may pick a state. Made by ``|``; at most one of them computes anything."""

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

    @property
    def bytes_per_s(self) -> float | None:  # type: ignore[override]  # a constant of other policies
        """See ``Policy``."""
        return next((one.bytes_per_s for one in self.members if one.bytes_per_s is not None), None)

    def is_due(self, moment: Moment, /) -> bool:
        """See ``Policy``."""
        return any(one.is_due(moment) for one in self.members)

    def next_due(self, moment: Moment, /) -> float | None:
        """See ``Policy``."""
        return min((at for one in self.members if (at := one.next_due(moment)) is not None), default=None)

    def told(self) -> CadenceChoice:
        """See ``Policy``."""
        return self._together([one.told() for one in self.members])

    def choose(self, costs: Costs, current: CadenceChoice | None, /) -> CadenceChoice | None:
        """See ``Policy``."""
        for one in self.members:
            if one.is_computed:
                own = None if current is None else replace(current, cadence=str(one), why=current.why.partition("; or ")[0])
                chosen = one.choose(costs, own)
                if chosen is None or (own is not None and chosen is own):
                    return current
                return self._together([chosen if other is one else other.told() for other in self.members], chosen)
        return None

    def informed(self, mtbf_s: float, /) -> Policy:
        """See ``Policy``."""
        return AnyOf(tuple(one.informed(mtbf_s) for one in self.members))

    def counted(self) -> Policy | None:
        """See ``Policy``; None if a part is computed, because that part also decides what goes on to further tiers."""
        found = [] if self.is_computed else [own for one in self.members if (own := one.counted()) is not None]
        return AnyOf(tuple(found)) if found else None

    def _together(self, said: Sequence[CadenceChoice], chosen: CadenceChoice | None = None) -> CadenceChoice:
        """One choice that describes them all, of what each member said; a computed one comes first."""
        first = chosen or next((each for one, each in zip(self.members, said, strict=True) if one.is_computed), said[0])
        why = "; or ".join(dict.fromkeys([first.why, *(each.why for each in said)]))
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
