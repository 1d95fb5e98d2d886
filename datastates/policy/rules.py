"""The rules that say which states are worth keeping: each is small, and a pure function of facts.

The names are those of the field: Orbax's preservation policies (``LatestN``, ``BestN``, ``EveryNSteps``, ``EveryNSeconds``,
``LatestDuration``), restic's ``--keep-within``, and the logarithmic thinning of backups. A rule sees the states of one branch, oldest
first, and says which of them it keeps and why. Applied again to what it has kept, a rule keeps all of it. So it makes no difference how
often, or from how many processes, states are pruned.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, Protocol

from datastates import values
from datastates.errors import InvalidInput

__all__ = [
    "EACH",
    "All",
    "Best",
    "Every",
    "Fact",
    "Goal",
    "Interval",
    "Latest",
    "Rule",
    "Tagged",
    "Thin",
    "Within",
    "densities",
    "seconds_text",
]

Goal = Literal["min", "max"]
EACH = "*"  # as the metric of ``Best``: each metric whose name has a direction
_PLAIN_KEY = re.compile(r"[A-Za-z0-9_./@%+*-]+")
_UNITS_S = (("d", 86_400), ("h", 3600), ("m", 60), ("s", 1))
_NO_METRICS: Mapping[str, float] = {}


@dataclass(frozen=True, slots=True)
class Fact:
    """What a rule may know of a state whose bytes lie in a folder of packs.

    ``line`` says which states belong together; ``branch`` is the name of that line for people. ``index`` counts first parents from the
    root, so it rises along a branch, and a state's index never changes. ``created_at`` is in seconds. ``files`` are all the files that the
    state needs there, by name and size, including those that others need too. ``held`` is why the state stays whatever a policy says; None
    if a policy may decide.
    """

    uid: str
    line: int
    branch: str
    index: int
    step: int
    created_at: float
    files: tuple[tuple[str, int], ...] = ()
    metrics: Mapping[str, float] = field(default_factory=lambda: _NO_METRICS)
    held: str | None = None


class Rule(Protocol):
    """Keeps some states of a branch. ``rank`` says how valuable they are when a bound on bytes needs room: 0 is dropped first, 2 never."""

    rank: ClassVar[int]

    @property
    def text(self) -> str:
        """The rule as ``Retention.parse`` reads it."""

    def keep(self, states: Sequence[Fact], now: float) -> Iterator[tuple[Fact, str]]:
        """The states that the rule keeps, of a branch's states, oldest first; each with the reason in words."""


@dataclass(frozen=True, slots=True)
class All:
    """Keeps every state."""

    rank: ClassVar[int] = 0

    @property
    def text(self) -> str:
        """See ``Rule.text``."""
        return "all"

    def keep(self, states: Sequence[Fact], now: float) -> Iterator[tuple[Fact, str]]:
        """See ``Rule.keep``."""
        return ((fact, "everything is kept") for fact in states)


@dataclass(frozen=True, slots=True)
class Tagged:
    """Keeps nothing but the states that always stay: those that refs name, and states where branches forked."""

    rank: ClassVar[int] = 0

    @property
    def text(self) -> str:
        """See ``Rule.text``."""
        return "tagged"

    def keep(self, states: Sequence[Fact], now: float) -> Iterator[tuple[Fact, str]]:
        """See ``Rule.keep``."""
        return iter(())


@dataclass(frozen=True, slots=True)
class Latest:
    """Keeps the newest ``count`` states."""

    count: int
    rank: ClassVar[int] = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "count", values.positive(self.count, "latest, which counts states,"))

    @property
    def text(self) -> str:
        """See ``Rule.text``."""
        return f"latest:{self.count}"

    def keep(self, states: Sequence[Fact], now: float) -> Iterator[tuple[Fact, str]]:
        """See ``Rule.keep``."""
        return ((fact, f"one of the {self.count} latest of {_of(fact)}") for fact in states[-self.count :])


@dataclass(frozen=True, slots=True)
class Best:
    """Keeps the ``count`` states with the best values of a metric, the newest of equals. ``goal`` None: as the metric's name says.

    With ``EACH`` as ``key`` these are the best by each metric whose name has a direction.
    """

    key: str
    count: int = 1
    goal: Goal | None = None
    rank: ClassVar[int] = 2

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", values.key(self.key, "the metric of best"))
        object.__setattr__(self, "count", values.positive(self.count, "best, which counts states,"))
        goal: object = self.goal
        if goal is not None and (not isinstance(goal, str) or str.__str__(goal) not in ("min", "max")):
            raise InvalidInput(f"the goal of best {self.key!r} is {values.shown(self.goal)}: say 'min' or 'max'")

    @property
    def text(self) -> str:
        """See ``Rule.text``."""
        key = self.key if _PLAIN_KEY.fullmatch(self.key) else json.dumps(self.key, ensure_ascii=False)
        return f"best:{self.count}:{key}" + (f":{self.goal}" if self.goal else "")

    @property
    def is_max(self) -> bool:
        """Whether larger values are better."""
        if self.goal is not None:
            return self.goal == "max"
        from datastates.lineage.show.goals import Direction, direction_of  # code that only configures does not import the lineage

        return direction_of(self.key) is Direction.MAX

    def is_better(self, value: float, than: float | None) -> bool:
        """Whether a newer state with this value is the best, where the best so far has ``than``. NaN is never better."""
        if math.isnan(value):
            return False
        return than is None or (value >= than if self.is_max else value <= than)

    def keep(self, states: Sequence[Fact], now: float) -> Iterator[tuple[Fact, str]]:
        """See ``Rule.keep``."""
        if self.key == EACH:
            from datastates.lineage.show.goals import named_direction

            for key in sorted({key for fact in states for key in fact.metrics if named_direction(key) is not None}):
                yield from Best(key, self.count).keep(states, now)
            return
        sign = -1 if self.is_max else 1
        rated = [fact for fact in states if not math.isnan(fact.metrics.get(self.key, math.nan))]
        rated.sort(key=lambda fact: (sign * fact.metrics[self.key], -fact.index))
        for place, fact in enumerate(rated[: self.count], 1):
            nth = f", no. {place}" if self.count > 1 else ""
            yield fact, f"the best {self.key} of {_of(fact)}{nth}: {fact.metrics[self.key]:.6g}"


@dataclass(frozen=True, slots=True)
class Every:
    """Keeps the first state at or after every ``steps``-th step."""

    steps: int
    rank: ClassVar[int] = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "steps", values.positive(self.steps, "every, which counts steps,"))

    @property
    def text(self) -> str:
        """See ``Rule.text``."""
        return f"every:{self.steps}"

    def keep(self, states: Sequence[Fact], now: float) -> Iterator[tuple[Fact, str]]:
        """See ``Rule.keep``."""
        places = (fact.step // self.steps for fact in states)
        return ((fact, f"the first at or after step {place * self.steps} (every {self.steps})") for fact, place in _firsts(states, places))


@dataclass(frozen=True, slots=True)
class Interval:
    """Keeps the first state of each time span of ``seconds``; the spans lie on the calendar in UTC."""

    seconds: float
    rank: ClassVar[int] = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "seconds", _span(self.seconds, "interval"))

    @property
    def text(self) -> str:
        """See ``Rule.text``."""
        return f"interval:{seconds_text(self.seconds)}"

    def keep(self, states: Sequence[Fact], now: float) -> Iterator[tuple[Fact, str]]:
        """See ``Rule.keep``."""
        places = (int(fact.created_at // self.seconds) for fact in states)
        return ((fact, f"the first of its {seconds_text(self.seconds)} (interval)") for fact, _ in _firsts(states, places))


@dataclass(frozen=True, slots=True)
class Within:
    """Keeps the states of the last ``seconds``."""

    seconds: float
    rank: ClassVar[int] = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "seconds", _span(self.seconds, "within"))

    @property
    def text(self) -> str:
        """See ``Rule.text``."""
        return f"within:{seconds_text(self.seconds)}"

    def keep(self, states: Sequence[Fact], now: float) -> Iterator[tuple[Fact, str]]:
        """See ``Rule.keep``."""
        return ((fact, f"younger than {seconds_text(self.seconds)}") for fact in states if now - fact.created_at <= self.seconds)


@dataclass(frozen=True, slots=True)
class Thin:
    """Keeps all of the newest states and ever fewer of the older ones: about ``count`` for each doubling of the distance from the
    newest.
    """

    count: int
    rank: ClassVar[int] = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "count", values.positive(self.count, "thin, which counts states,"))

    @property
    def text(self) -> str:
        """See ``Rule.text``."""
        return f"thin:{self.count}"

    def keep(self, states: Sequence[Fact], now: float) -> Iterator[tuple[Fact, str]]:
        """See ``Rule.keep``."""
        for fact, density in zip(states, densities(states), strict=True):
            if density < self.count:
                yield fact, f"one of about {self.count} of its age on {_of(fact)} (thinned)"


def densities(states: Sequence[Fact]) -> list[float]:
    """How dense a logarithmic thinning of a branch must be to keep each state: oldest first, one number for each state.

    A thinning of density ``n`` puts the states at distances from ``n * 2**k`` to ``n * 2**(k+1)`` from the newest into buckets of ``2**k``
    indexes, and keeps the oldest of each. Buckets lie at multiples of their size, so a bucket of a later time consists of whole buckets of
    an earlier one, and states that are kept later were kept earlier. A state is the oldest of its bucket as long as the bucket does not
    reach back to the state before it: ``2**k`` must be less than the highest bit in which their indexes differ.
    """
    if not states:
        return []
    newest, found, before = states[-1].index, [0.0], states[0].index  # the oldest of a branch is the oldest of any bucket
    for fact in states[1:]:
        found.append((newest - fact.index) / (1 << (fact.index ^ before).bit_length()))
        before = fact.index
    return found


def seconds_text(seconds: float) -> str:
    """A time span in the form in which rules give it: ``90s``, ``30m``, ``2h``, ``7d``."""
    unit, length = next(((unit, length) for unit, length in _UNITS_S if seconds % length == 0), ("s", 1))
    number = seconds / length
    return f"{int(number) if number.is_integer() else repr(number)}{unit}"


def _span(value: object, what: str) -> float:
    """Seconds above 0, also as ``"30m"``.

    :raises InvalidInput: the value is not a time span.
    """
    found: object = value
    if isinstance(value, str):
        match = re.fullmatch(r"([0-9.e+-]+)([smhd]?)", value)
        try:
            found = float(match[1]) * dict(_UNITS_S)[match[2] or "s"] if match else None
        except ValueError:
            found = None
    if found is None:
        raise InvalidInput(f"{what} is {values.shown(value)}: give a time span such as '90s', '30m', '2h' or '7d'")
    seconds = values.seconds(found, what)
    if not 0 < seconds < math.inf:
        raise InvalidInput(f"{what} is {values.shown(value)}: it must be more than 0 seconds, and end")
    return seconds


def _firsts(states: Sequence[Fact], places: Iterable[int]) -> Iterator[tuple[Fact, int]]:
    """The oldest state of each place."""
    seen: set[int] = set()
    for fact, place in zip(states, places, strict=True):
        if place not in seen:
            seen.add(place)
            yield fact, place


def _of(fact: Fact) -> str:
    return f"branch {fact.branch}" if fact.branch else "what no branch has"
