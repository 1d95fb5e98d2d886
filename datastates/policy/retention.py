"""Which states keep their bytes on disk: combined rules and a bound on bytes, as a value and as a
text for terminals.

    latest:5 best:3:val_loss every:1000 at-most:50G

The order of words does not matter. They are separated by blanks or commas. A state stays if any of
the rules keeps it. Without a rule all stay.

    all                   every state
    latest:N              the newest N of each branch
    best:N:METRIC[:max]   the N best by a metric, of each branch; without ``:min`` or ``:max``, the
                          metric's name decides
    best:N:*              the N best by each metric whose name has a direction: losses fall,
                          accuracies rise
    every:K               the first at or after every K-th step
    interval:T            the first of every time span, such as 30m or 2h
    within:T              the states of the last time span, such as 7d
    thin:N                about N for each doubling of the distance from the newest
    tagged                nothing but the states that always stay
    at-most:SIZE          at most this many bytes: older states are thinned until they fit
    at-most:auto          20 GiB or eight states, whichever is more, and no more than half of the
                          free space

Metrics whose names contain other characters are written in double quotes.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import ClassVar, Literal, Protocol, Self

from datastates import values
from datastates.errors import InvalidInput

Goal = Literal["min", "max"]
EACH = "*"  # as the metric of ``Best``: each metric whose name has a direction
_PLAIN_KEY = re.compile(r"[A-Za-z0-9_./@%+*-]+")
_UNITS_S = (("d", 86_400), ("h", 3600), ("m", 60), ("s", 1))
_NO_METRICS: Mapping[str, float] = {}
_WORD = re.compile(r'(?:[^\s,"]|"(?:[^"\\]|\\.)*")+')
_PART = re.compile(r'"(?:[^"\\]|\\.)*"|[^:"]+')
_UNITS = (("T", 1 << 40), ("G", 1 << 30), ("M", 1 << 20), ("K", 1 << 10))
_AN_EXAMPLE = "such as 'latest:5 best:3:val_loss every:1000 at-most:50G'"
_NEVER = 2
"""From this rank on, a state is not dropped to free space."""

_HELD = 3


@dataclass(frozen=True, slots=True)
class Fact:
    """The facts about a state in a folder of packs that rules use.

    States with the same ``line`` belong together. ``branch`` is the name of that line for people.
    ``index`` counts first parents from the root. It rises along a branch, and a state's index never
    changes. ``created_at`` is in seconds. ``files`` are all the files that the state needs there,
    by name and size, including shared ones. ``held`` is why the state stays under any policy. It is
    None if a policy may decide.
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
    """Keeps some states of a branch.

    ``rank`` is how valuable they are under a bound on bytes: 0 is dropped first, 2 never.
    """

    rank: ClassVar[int]

    @property
    def text(self) -> str:
        """The rule as ``Retention.parse`` reads it."""

    def keep(self, states: Sequence[Fact], now: float) -> Iterator[tuple[Fact, str]]:
        """The states that the rule keeps, of a branch's states, oldest first; each with the
        reason in words."""


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
    """Keeps nothing but the states that always stay: those that refs name, and states where
    branches forked."""

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
        object.__setattr__(
            self, "count", values.positive(self.count, "latest, which counts states,")
        )

    @property
    def text(self) -> str:
        """See ``Rule.text``."""
        return f"latest:{self.count}"

    def keep(self, states: Sequence[Fact], now: float) -> Iterator[tuple[Fact, str]]:
        """See ``Rule.keep``."""
        return (
            (fact, f"one of the {self.count} latest of {_of(fact)}")
            for fact in states[-self.count :]
        )


@dataclass(frozen=True, slots=True)
class Best:
    """Keeps the ``count`` states with the best values of a metric, the newest of equals. If
    ``goal`` is None, the metric's name decides.

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
        if goal is not None and (
            not isinstance(goal, str) or str.__str__(goal) not in ("min", "max")
        ):
            raise InvalidInput(
                f"the goal of best {self.key!r} is {values.shown(self.goal)}: say 'min' or 'max'"
            )

    @property
    def text(self) -> str:
        """See ``Rule.text``."""
        key = (
            self.key if _PLAIN_KEY.fullmatch(self.key) else json.dumps(self.key, ensure_ascii=False)
        )
        return f"best:{self.count}:{key}" + (f":{self.goal}" if self.goal else "")

    @property
    def is_max(self) -> bool:
        """Whether larger values are better."""
        if self.goal is not None:
            return self.goal == "max"
        # code that only configures does not import the lineage
        from datastates.lineage.views.text import (
            Direction,
            direction_of,
        )

        return direction_of(self.key) is Direction.MAX

    def is_better(self, value: float, than: float | None) -> bool:
        """Whether a newer state with this value is the best, where the best so far has ``than``.

        NaN and infinities are never better."""
        if not math.isfinite(value):
            return False
        return than is None or (value >= than if self.is_max else value <= than)

    def keep(self, states: Sequence[Fact], now: float) -> Iterator[tuple[Fact, str]]:
        """See ``Rule.keep``."""
        if self.key == EACH:
            from datastates.lineage.views.text import named_direction

            for key in sorted(
                {key for fact in states for key in fact.metrics if named_direction(key) is not None}
            ):
                yield from Best(key, self.count).keep(states, now)
            return
        sign = -1 if self.is_max else 1
        rated = [fact for fact in states if math.isfinite(fact.metrics.get(self.key, math.nan))]
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
        return (
            (fact, f"the first at or after step {place * self.steps} (every {self.steps})")
            for fact, place in _firsts(states, places)
        )


@dataclass(frozen=True, slots=True)
class Interval:
    """Keeps the first state of each time span of ``seconds``. The spans are aligned to the calendar
    in UTC."""

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
        return (
            (fact, f"the first of its {seconds_text(self.seconds)} (interval)")
            for fact, _ in _firsts(states, places)
        )


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
        return (
            (fact, f"younger than {seconds_text(self.seconds)}")
            for fact in states
            if now - fact.created_at <= self.seconds
        )


@dataclass(frozen=True, slots=True)
class Thin:
    """Keeps all of the newest states and ever fewer of the older ones: about ``count`` for each
    doubling of the distance from the newest.
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
    """The density that a logarithmic thinning of a branch needs to keep each state. There is one
    number for each state, oldest first.

    A thinning of density ``n`` puts the states at distances from ``n * 2**k`` to ``n * 2**(k+1)``
    from the newest into buckets of ``2**k`` indexes, and keeps the oldest of each. Buckets begin at
    multiples of their size. A bucket of a later time therefore consists of whole buckets of an
    earlier one, and states that are kept later were kept earlier. A state is the oldest of its
    bucket as long as the bucket does not reach back to the state before it. For that, ``2**k`` must
    be less than the highest bit in which their indexes differ.
    """
    if not states:
        return []
    # the oldest of a branch is the oldest of any bucket
    newest, found, before = (
        states[-1].index,
        [0.0],
        states[0].index,
    )
    for fact in states[1:]:
        found.append((newest - fact.index) / (1 << (fact.index ^ before).bit_length()))
        before = fact.index
    return found


def seconds_text(seconds: float) -> str:
    """A time span in the form in which rules give it: ``90s``, ``30m``, ``2h``, ``7d``."""
    unit, length = next(
        ((unit, length) for unit, length in _UNITS_S if seconds % length == 0), ("s", 1)
    )
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
        raise InvalidInput(
            f"{what} is {values.shown(value)}: give a time span such as '90s', '30m', '2h' or '7d'"
        )
    seconds = values.seconds(found, what)
    if not 0 < seconds < math.inf:
        raise InvalidInput(
            f"{what} is {values.shown(value)}: it must be more than 0 seconds, and end"
        )
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


# --- Retention ---


_RULES = (All, Best, Every, Interval, Latest, Tagged, Thin, Within)


@dataclass(frozen=True, slots=True)
class Retention:
    """Decides which durable states keep their bytes. Rules apply to each branch. The bound is on
    all branches together.

    Give it, or its text, to ``Config`` or ``Repository.track`` as ``retention``, or to
    ``Repository.prune``.

        best = datastates.Retention.latest(5) | datastates.Retention.best("val_loss", 3)
        keep = best | datastates.Retention.at_most("50G")
        print(keep.text)

    Whatever the policy, these stay: states that a ref names, the newest durable state of each
    branch, and the states where branches forked.

    :raises InvalidInput: one of the rules is not a rule, or the bound is not a size.
    """

    rules: tuple[Rule, ...] = ()
    bound: int | Literal["auto"] | None = None

    def __post_init__(self) -> None:
        given: object = self.rules
        rules = tuple(given) if isinstance(given, tuple | list) else (given,)
        for rule in rules:
            if not isinstance(rule, _RULES):
                raise InvalidInput(
                    f"rules holds {values.shown(rule)}: combine what Retention.latest and its like"
                    " give, or give a text"
                )
        if self.bound is not None and not (
            isinstance(self.bound, str) and str.__str__(self.bound) == "auto"
        ):
            object.__setattr__(
                self, "bound", values.size(self.bound, "at_most, or 'auto',", least=1)
            )
        plain = tuple(dict.fromkeys(rules))
        object.__setattr__(self, "rules", plain if plain or self.bound is not None else (All(),))

    @classmethod
    def all(cls) -> Self:
        """Keeps every state."""
        return cls((All(),))

    @classmethod
    def latest(cls, count: int) -> Self:
        """Keeps the newest ``count`` states of each branch."""
        return cls((Latest(count),))

    @classmethod
    def best(cls, metric: str, count: int = 1, *, goal: Goal | None = None) -> Self:
        """Keeps the states of each branch with the best values of a metric. ``goal`` is ``min`` or
        ``max``. By default the metric's name decides."""
        return cls((Best(metric, count, goal),))

    @classmethod
    def every(cls, steps: int) -> Self:
        """Keeps the first state at or after every ``steps``-th step."""
        return cls((Every(steps),))

    @classmethod
    def interval(cls, seconds: float | str) -> Self:
        """Keeps the first state of every time span of this many seconds; also as ``"2h"``."""
        return cls((Interval(seconds),))  # type: ignore[arg-type]  # a text becomes seconds there

    @classmethod
    def within(cls, seconds: float | str) -> Self:
        """Keeps the states of the last ``seconds``; also as ``"2h"``."""
        return cls((Within(seconds),))  # type: ignore[arg-type]  # a text becomes seconds there

    @classmethod
    def thin(cls, count: int) -> Self:
        """Keeps about ``count`` states for each doubling of the distance from the newest one."""
        return cls((Thin(count),))

    @classmethod
    def tagged(cls) -> Self:
        """Keeps nothing but the states that always stay."""
        return cls((Tagged(),))

    @classmethod
    def at_most(cls, size: int | str) -> Self:
        """Bounds the bytes of all states, also as ``"50G"``. ``"auto"`` is 20 GiB or eight states,
        whichever is more.

        It is never more than half of the free space when a training begins.
        """
        return cls((), size)  # type: ignore[arg-type]  # a text becomes bytes there

    @classmethod
    def parse(cls, text: str) -> Self:
        """The policy for a text, as the terminal and the environment give it.

        :raises InvalidInput: a word has no meaning. The text names it.
        """
        words = _words(values.string(text, "a retention"))
        if not words:
            raise InvalidInput(f"a retention is empty: say what is kept, {_AN_EXAMPLE}, or 'all'")
        found = [_parsed(word) for word in words]
        rules = tuple(rule for retention in found for rule in retention[0])
        bounds = [bound for _, bound in found if bound is not None]
        if len(bounds) > 1:
            raise InvalidInput(f"{text!r} says at-most {len(bounds)} times: say it once")
        # a text becomes bytes there
        return cls(rules, bounds[0] if bounds else None)  # type: ignore[arg-type]

    @property
    def text(self) -> str:
        """The policy as ``parse`` reads it."""
        bound = (
            ()
            if self.bound is None
            else (
                f"at-most:{self.bound if isinstance(self.bound, str) else size_text(self.bound)}",
            )
        )
        return " ".join((*(rule.text for rule in self.rules), *bound))

    def __or__(self, other: Retention) -> Retention:
        """Keep what either keeps.

        The smaller of two bounds holds, and a number holds rather than ``auto``."""
        if not isinstance(other, Retention):
            return NotImplemented
        sizes = [each.bound for each in (self, other) if isinstance(each.bound, int)]
        return Retention(
            (*self.rules, *other.rules), min(sizes) if sizes else self.bound or other.bound
        )

    def __str__(self) -> str:
        return self.text

    @property
    def effective(self) -> tuple[Rule, ...]:
        """The rules that decide: if there are none, everything is kept, as far as the bound
        allows."""
        return self.rules or (All(),)

    @property
    def bests(self) -> tuple[Best, ...]:
        """The rules that depend on a named metric."""
        return tuple(rule for rule in self.rules if isinstance(rule, Best) and rule.key != EACH)

    def keeping_best(self, *bests: Best) -> Retention:
        """This policy, and the best by these metrics."""
        return Retention((*self.effective, *bests), self.bound) if bests else self

    def bounded(self, size: int | None) -> Retention:
        """This policy with another bound, or none."""
        return replace(self, rules=self.effective, bound=size)


DEFAULT = Retention((All(), Best(EACH)), "auto")
"""Keeps everything until states take 20 GiB (see ``at-most:auto``). Then the older ones are
thinned, and the best stay."""


def retention_of(value: object, what: str = "retention") -> Retention:
    """A policy, or its text.

    :raises InvalidInput: it is neither.
    """
    if isinstance(value, Retention):
        return value
    if not isinstance(value, str):
        raise InvalidInput(
            f"{what} is {values.shown(value)}: give a datastates.Retention, or a text {_AN_EXAMPLE}"
        )
    return Retention.parse(value)


def asked_for(configured: Retention, retention: object, keep_best: object) -> Retention | None:
    """The policy that a training requests for its branch. None if it requests no policy, and the
    configured one holds.

    :raises InvalidInput: one of them cannot be understood.
    """
    bests = [best_of(each) for each in _several(keep_best)]
    if retention is None and not bests:
        return None
    policy = configured.bounded(None) if retention is None else retention_of(retention)
    return policy.keeping_best(*bests)


def best_of(text: object) -> Best:
    """The metric whose best states are kept: ``val_loss``, or with the direction ``reward:max``.

    :raises InvalidInput: it is not one.
    """
    found = values.text(text, "keep_best")
    key, _, goal = found.rpartition(":")
    return (
        Best(key, 1, "max" if goal == "max" else "min")
        if key and goal in ("min", "max")
        else Best(found)
    )


def _several(keep_best: object) -> list[object]:
    if keep_best is None or isinstance(keep_best, str):
        return [] if keep_best is None else [keep_best]
    return list(values.several(values.text)(keep_best, "keep_best"))


def size_text(size: int) -> str:
    """A size in bytes as ``parse`` reads it: exact, in the largest unit that divides it."""
    return next(
        (f"{size // length}{unit}" for unit, length in _UNITS if size % length == 0), str(size)
    )


_Parsed = tuple[tuple[Rule, ...], object]


def _words(text: str) -> list[str]:
    words = _WORD.findall(text)
    rest = _WORD.sub("", text).replace(",", " ")
    if rest.strip():
        raise InvalidInput(f"{text!r} has a quote that does not end: say {_AN_EXAMPLE}")
    return words


def _parsed(word: str) -> _Parsed:
    try:
        name, *given = [json.loads(part) if part.startswith('"') else part for part in _parts(word)]
    except ValueError as exc:
        raise InvalidInput(
            f"{word!r} has a quote that is no text of JSON ({exc}): say {_AN_EXAMPLE}"
        ) from exc
    made = _MAKERS.get(name)
    if made is None or not made[0] <= len(given) <= made[1]:
        known = ", ".join(_FORMS)
        raise InvalidInput(f"{word!r} is none of {known}: say {_AN_EXAMPLE}")
    return made[2](given)


def _parts(word: str) -> list[str]:
    parts = _PART.findall(word)
    if ":".join(parts) != word:
        raise InvalidInput(f"{word!r} has an empty part, or text beside a quote: say {_AN_EXAMPLE}")
    return parts


def _number(text: str, what: str) -> int:
    if not re.fullmatch(r"[0-9]{1,18}", text):
        raise InvalidInput(f"{what} is {text!r}: give a whole number")
    return int(text)


def _best(given: Sequence[str]) -> _Parsed:
    goal = given[2] if len(given) > 2 else None
    # it checks
    return (
        Best(given[1], _number(given[0], "the first part of best, which counts states,"), goal),  # type: ignore[arg-type]
    ), None


_MAKERS: dict[str, tuple[int, int, Callable[[Sequence[str]], _Parsed]]] = {
    "all": (0, 0, lambda given: ((All(),), None)),
    "latest": (1, 1, lambda given: ((Latest(_number(given[0], "latest")),), None)),
    "best": (2, 3, _best),
    "every": (1, 1, lambda given: ((Every(_number(given[0], "every")),), None)),
    # a text becomes seconds there
    "interval": (1, 1, lambda given: ((Interval(given[0]),), None)),  # type: ignore[arg-type]
    # a text becomes seconds there
    "within": (1, 1, lambda given: ((Within(given[0]),), None)),  # type: ignore[arg-type]
    "thin": (1, 1, lambda given: ((Thin(_number(given[0], "thin")),), None)),
    "tagged": (0, 0, lambda given: ((Tagged(),), None)),
    "at-most": (1, 1, lambda given: ((), given[0])),
}
_FORMS = (
    "all",
    "latest:N",
    "best:N:METRIC",
    "every:K",
    "interval:T",
    "within:T",
    "thin:N",
    "tagged",
    "at-most:SIZE",
)


# --- The decision: a pure function of facts, policies and a bound ---


@dataclass(frozen=True, slots=True)
class Policies:
    """The retention policy of each branch: the one under its name in ``own``, else ``default``,
    whose bound is on all states together.

    The bound of a policy in ``own`` is on its branch. A bound is a number here: ``auto`` was
    converted before.
    """

    default: Retention
    own: Mapping[str, Retention] = field(default_factory=dict)

    def of(self, branch: str) -> Retention:
        """The policy of a branch."""
        return self.own.get(branch, self.default)


@dataclass(frozen=True, slots=True)
class Decision:
    """Whether a state keeps its bytes, and why, in words."""

    fact: Fact
    is_kept: bool
    reason: str


class Ledger:
    """The files that some states share. A file exists as long as one of the states needs it."""

    def __init__(self, facts: Iterable[Fact] = ()) -> None:
        self._users: Counter[str] = Counter()
        self.bytes = 0
        for fact in facts:
            self.add(fact)

    def add(self, fact: Fact) -> None:
        """Add a state."""
        for name, size in fact.files:
            self.bytes += 0 if self._users[name] else size
            self._users[name] += 1

    def drop(self, fact: Fact) -> int:
        """Remove a state; returns the bytes that no state needs any more."""
        freed = 0
        for name, size in fact.files:
            self._users[name] -= 1
            if not self._users[name]:
                del self._users[name]
                freed += size
        self.bytes -= freed
        return freed

    def own_bytes(self, fact: Fact) -> int:
        """The bytes that dropping this state alone would free."""
        return sum(size for name, size in fact.files if self._users[name] == 1)


@dataclass(slots=True)
class _Kept:
    fact: Fact
    rank: int
    reason: str


def decide(facts: Iterable[Fact], policies: Policies, now: float) -> list[Decision]:
    """A decision on each state, in the order of branches and indexes.

    First the rules of each branch decide, then its own bound, then the bound on all states. To meet
    a bound, states that only the weakest rules keep are dropped first; among those, the ones that a
    logarithmic thinning would drop first, whatever their branch. States that are among the latest
    are dropped last, and the best never.
    """
    lines: defaultdict[int, list[Fact]] = defaultdict(list)
    for fact in facts:
        lines[fact.line].append(fact)
    kept, dropped = list[_Kept](), dict[str, str]()
    for line in lines.values():
        line.sort(key=lambda fact: (fact.index, fact.uid))
        policy = policies.of(line[0].branch)
        found = _by_rules(line, policy, now, dropped)
        if line[0].branch in policies.own:
            found = _within(found, policy.bound, f"branch {line[0].branch}", dropped)
        kept += found
    kept = _within(kept, policies.default.bound, "all states together", dropped)
    reasons = {each.fact.uid: each.reason for each in kept}
    ordered = (fact for line in lines.values() for fact in line)
    return [
        Decision(fact, fact.uid in reasons, reasons.get(fact.uid) or dropped[fact.uid])
        for fact in ordered
    ]


def decide_gradually(
    facts: Sequence[Fact], policies: Policies, now: float, most: int
) -> tuple[list[Decision], int]:
    """``decide`` as of an earlier time, if more than ``most`` states would go because of their age
    alone; and how many stay for that.

    A state goes because of its age alone if it would stay at some earlier time.
    """
    found = decide(facts, policies, now)
    going = [each.fact for each in found if not each.is_kept]
    stays = (
        {each.fact.uid for each in decide(facts, policies, -math.inf) if each.is_kept}
        if going
        else set()
    )
    expires = sorted(
        fact.created_at
        + max(
            (
                rule.seconds
                for rule in policies.of(fact.branch).effective
                if isinstance(rule, Within)
            ),
            default=0.0,
        )
        for fact in going
        if fact.uid in stays
    )
    return (
        (found, 0)
        if len(expires) <= most
        else (decide(facts, policies, expires[most]), len(expires) - most)
    )


def _by_rules(
    line: Sequence[Fact], policy: Retention, now: float, dropped: dict[str, str]
) -> list[_Kept]:
    kept: dict[str, _Kept] = {
        fact.uid: _Kept(fact, _HELD, fact.held) for fact in line if fact.held is not None
    }
    for rule in sorted(policy.effective, key=attrgetter("rank"), reverse=True):
        for fact, reason in rule.keep(line, now):
            kept.setdefault(fact.uid, _Kept(fact, rule.rank, reason))
    for fact in line:
        if fact.uid not in kept:
            dropped[fact.uid] = f"no rule of {policy.text!r} keeps it"
    return [kept[fact.uid] for fact in line if fact.uid in kept]


def _within(kept: list[_Kept], bound: object, what: str, dropped: dict[str, str]) -> list[_Kept]:
    """The states that are left when enough are dropped to meet the bound; the order is kept,
    oldest first on each branch."""
    if not isinstance(bound, int):
        return kept
    ledger = Ledger(each.fact for each in kept)
    if ledger.bytes <= bound:
        return kept
    gone: set[str] = set()
    for each in _in_order(kept):
        if ledger.bytes <= bound:
            break
        ledger.drop(each.fact)
        gone.add(each.fact.uid)
        dropped[each.fact.uid] = f"thinned: {what} may take {size_text(bound)}"
    return [each for each in kept if each.fact.uid not in gone]


def _in_order(kept: Sequence[_Kept]) -> list[_Kept]:
    """The states that may be dropped to free space, in the order of dropping.

    They are ordered by rank, then by density, then by age. The density is what a thinning of the
    whole branch needs to keep the state.
    """
    lines: defaultdict[int, list[_Kept]] = defaultdict(list)
    for each in kept:
        lines[each.fact.line].append(each)
    rated = [
        (each, density)
        for line in lines.values()
        for each, density in zip(line, densities([each.fact for each in line]), strict=True)
        if each.rank < _NEVER
    ]
    rated.sort(key=lambda pair: (pair[0].rank, -pair[1], pair[0].fact.index))
    return [each for each, _ in rated]
