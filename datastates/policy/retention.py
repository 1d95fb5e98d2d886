"""Which states keep their bytes on disk: combined rules and a bound on bytes, as a value and as a text for terminals.

    latest:5 best:3:val_loss every:1000 at-most:50G

Words may stand in any order, separated by blanks or commas. A state stays if any of the rules keeps it; without a rule all stay.

    all                     every state
    latest:N                the newest N of each branch
    best:N:METRIC[:max]     the N best by a metric, of each branch; without ``:min`` or ``:max`` as the metric's name says
    best:N:*                the N best by each metric whose name has a direction: losses fall, accuracies rise
    every:K                 the first at or after every K-th step
    interval:T              the first of every time span, such as 30m or 2h
    within:T                the states of the last time span, such as 7d
    thin:N                  about N for each doubling of the distance from the newest
    tagged                  nothing but the states that always stay
    at-most:SIZE            at most this many bytes: older states are thinned until they fit
    at-most:auto            20 GiB or eight states, whichever is more, and no more than half of what the disk has room for

A metric whose name has characters that words do not have goes in double quotes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Self

from datastates import values
from datastates.errors import InvalidInput

from .rules import EACH, All, Best, Every, Goal, Interval, Latest, Rule, Tagged, Thin, Within

__all__ = ["DEFAULT", "Retention", "asked_for", "best_of", "retention_of", "size_text"]

_RULES = (All, Best, Every, Interval, Latest, Tagged, Thin, Within)
_WORD = re.compile(r'(?:[^\s,"]|"(?:[^"\\]|\\.)*")+')
_PART = re.compile(r'"(?:[^"\\]|\\.)*"|[^:"]+')
_UNITS = (("T", 1 << 40), ("G", 1 << 30), ("M", 1 << 20), ("K", 1 << 10))
_AN_EXAMPLE = "such as 'latest:5 best:3:val_loss every:1000 at-most:50G'"


@dataclass(frozen=True, slots=True)
class Retention:
    """Decides which durable states keep their bytes. Rules apply to each branch; the bound is on all branches together.

    Give it, or its text, to ``Config`` or ``Repository.track`` as ``retention``, or to ``Repository.prune``.

        keep = datastates.Retention.latest(5) | datastates.Retention.best("val_loss", 3) | datastates.Retention.at_most("50G")
        print(keep.text)

    Whatever the policy, these stay: states that a ref names, the newest durable state of each branch, and the states where branches forked.

    :raises InvalidInput: one of the rules is not a rule, or the bound is not a size.
    """

    rules: tuple[Rule, ...] = ()
    bound: int | Literal["auto"] | None = None

    def __post_init__(self) -> None:
        given: object = self.rules
        rules = tuple(given) if isinstance(given, tuple | list) else (given,)
        for rule in rules:
            if not isinstance(rule, _RULES):
                raise InvalidInput(f"rules holds {values.shown(rule)}: combine what Retention.latest and its like give, or give a text")
        if self.bound is not None and not (isinstance(self.bound, str) and str.__str__(self.bound) == "auto"):
            object.__setattr__(self, "bound", values.size(self.bound, "at_most, or 'auto',", least=1))
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
        """Keeps the states of each branch with the best values of a metric; ``goal`` is ``min`` or ``max``; None: as the metric's name
        says.
        """
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
        """Bounds the bytes of all states, also as ``"50G"``; ``"auto"`` is 20 GiB or eight states, whichever is more.

        It is never more than half of what the disk has room for when a training begins.
        """
        return cls((), size)  # type: ignore[arg-type]  # a text becomes bytes there

    @classmethod
    def parse(cls, text: str) -> Self:
        """The policy for a text, as the terminal and the environment give it.

        :raises InvalidInput: a word has no meaning; names it.
        """
        words = _words(values.string(text, "a retention"))
        if not words:
            raise InvalidInput(f"a retention is empty: say what is kept, {_AN_EXAMPLE}, or 'all'")
        found = [_parsed(word) for word in words]
        rules = tuple(rule for retention in found for rule in retention[0])
        bounds = [bound for _, bound in found if bound is not None]
        if len(bounds) > 1:
            raise InvalidInput(f"{text!r} says at-most {len(bounds)} times: say it once")
        return cls(rules, bounds[0] if bounds else None)  # type: ignore[arg-type]  # a text becomes bytes there

    @property
    def text(self) -> str:
        """The policy as ``parse`` reads it."""
        bound = () if self.bound is None else (f"at-most:{self.bound if isinstance(self.bound, str) else size_text(self.bound)}",)
        return " ".join((*(rule.text for rule in self.rules), *bound))

    def __or__(self, other: Retention) -> Retention:
        """Keep what either keeps. The smaller of two bounds holds, and a number holds rather than ``auto``."""
        if not isinstance(other, Retention):
            return NotImplemented
        sizes = [each.bound for each in (self, other) if isinstance(each.bound, int)]
        return Retention((*self.rules, *other.rules), min(sizes) if sizes else self.bound or other.bound)

    def __str__(self) -> str:
        return self.text

    @property
    def effective(self) -> tuple[Rule, ...]:
        """The rules that decide: if there are none, everything is kept, as far as the bound allows."""
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
"""Keeps everything until states take 20 GiB (see ``at-most:auto``); then the older ones are thinned, and the best stay."""


def retention_of(value: object, what: str = "retention") -> Retention:
    """A policy, or its text.

    :raises InvalidInput: it is neither.
    """
    if isinstance(value, Retention):
        return value
    if not isinstance(value, str):
        raise InvalidInput(f"{what} is {values.shown(value)}: give a datastates.Retention, or a text {_AN_EXAMPLE}")
    return Retention.parse(value)


def asked_for(configured: Retention, retention: object, keep_best: object) -> Retention | None:
    """The policy that a training asks for, for its branch; None if it asks for none, and the configured one holds.

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
    return Best(key, 1, "max" if goal == "max" else "min") if key and goal in ("min", "max") else Best(found)


def _several(keep_best: object) -> list[object]:
    if keep_best is None or isinstance(keep_best, str):
        return [] if keep_best is None else [keep_best]
    return list(values.several(values.text)(keep_best, "keep_best"))


def size_text(size: int) -> str:
    """A size in bytes as ``parse`` reads it: exact, in the largest unit that divides it."""
    return next((f"{size // length}{unit}" for unit, length in _UNITS if size % length == 0), str(size))


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
        raise InvalidInput(f"{word!r} has a quote that is no text of JSON ({exc}): say {_AN_EXAMPLE}") from exc
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
    return (Best(given[1], _number(given[0], "the first part of best, which counts states,"), goal),), None  # type: ignore[arg-type]  # it checks


_MAKERS: dict[str, tuple[int, int, Callable[[Sequence[str]], _Parsed]]] = {
    "all": (0, 0, lambda given: ((All(),), None)),
    "latest": (1, 1, lambda given: ((Latest(_number(given[0], "latest")),), None)),
    "best": (2, 3, _best),
    "every": (1, 1, lambda given: ((Every(_number(given[0], "every")),), None)),
    "interval": (1, 1, lambda given: ((Interval(given[0]),), None)),  # type: ignore[arg-type]  # a text becomes seconds there
    "within": (1, 1, lambda given: ((Within(given[0]),), None)),  # type: ignore[arg-type]  # a text becomes seconds there
    "thin": (1, 1, lambda given: ((Thin(_number(given[0], "thin")),), None)),
    "tagged": (0, 0, lambda given: ((Tagged(),), None)),
    "at-most": (1, 1, lambda given: ((), given[0])),
}
_FORMS = ("all", "latest:N", "best:N:METRIC", "every:K", "interval:T", "within:T", "thin:N", "tagged", "at-most:SIZE")
