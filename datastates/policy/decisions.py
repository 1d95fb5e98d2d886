"""Deciding which states lose their bytes: a pure function of facts, policies and a bound."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from .retention import Retention, size_text
from .rules import Fact, Within, densities

__all__ = ["Decision", "Ledger", "Policies", "decide", "decide_gradually"]

_NEVER = 2
"""From this rank on, a state is not dropped to make room."""

_HELD = 3


@dataclass(frozen=True, slots=True)
class Policies:
    """The retention policy of each branch: the one under its name in ``own``, else ``default``, whose bound is on all states together.

    The bound of a policy in ``own`` is on its branch. A bound is a number here: ``auto`` was converted before.
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

    First the rules of each branch decide, then its own bound, then the bound on all states. To meet a bound, states that only the weakest
    rules keep are dropped first; among those, the ones that a logarithmic thinning would drop first, whatever their branch. States that are
    among the latest are dropped last, and the best never.
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
    return [Decision(fact, fact.uid in reasons, reasons.get(fact.uid) or dropped[fact.uid]) for fact in ordered]


def decide_gradually(facts: Sequence[Fact], policies: Policies, now: float, most: int) -> tuple[list[Decision], int]:
    """``decide`` as of an earlier time, if more than ``most`` states would go because of their age alone; and how many stay for that.

    A state goes because of its age alone if it would stay at some earlier time.
    """
    found = decide(facts, policies, now)
    going = [each.fact for each in found if not each.is_kept]
    stays = {each.fact.uid for each in decide(facts, policies, -math.inf) if each.is_kept} if going else set()
    expires = sorted(
        fact.created_at + max((rule.seconds for rule in policies.of(fact.branch).effective if isinstance(rule, Within)), default=0.0)
        for fact in going
        if fact.uid in stays
    )
    return (found, 0) if len(expires) <= most else (decide(facts, policies, expires[most]), len(expires) - most)


def _by_rules(line: Sequence[Fact], policy: Retention, now: float, dropped: dict[str, str]) -> list[_Kept]:
    kept: dict[str, _Kept] = {fact.uid: _Kept(fact, _HELD, fact.held) for fact in line if fact.held is not None}
    for rule in sorted(policy.effective, key=attrgetter("rank"), reverse=True):
        for fact, reason in rule.keep(line, now):
            kept.setdefault(fact.uid, _Kept(fact, rule.rank, reason))
    for fact in line:
        if fact.uid not in kept:
            dropped[fact.uid] = f"no rule of {policy.text!r} keeps it"
    return [kept[fact.uid] for fact in line if fact.uid in kept]


def _within(kept: list[_Kept], bound: object, what: str, dropped: dict[str, str]) -> list[_Kept]:
    """The states that are left when enough are dropped to meet the bound; the order is kept, oldest first on each branch."""
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
    """The states that may be dropped for room, in the order of dropping: by rank, then by the density that a thinning of the whole branch
    needs to keep them, then by age.
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
