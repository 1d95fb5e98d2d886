"""How much each branch and each state takes on disk: what dropping it would free, and what it shares with others."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from datastates.opening.core import Core
from datastates.policy.decisions import Ledger, Policies
from datastates.policy.retention import Retention
from datastates.policy.rules import Fact

from .retention import Grounds, survey, untold

__all__ = ["BranchUse", "StateUse", "Usage", "usage"]


@dataclass(frozen=True, slots=True)
class StateUse:
    """A state on disk. Dropping it alone would free ``own_bytes``; it needs ``shared_bytes``, and others do too. ``stays`` says why
    ``prune`` would keep it whatever the policy; None if that is up to the policy.
    """

    uid: str
    branch: str
    step: int
    own_bytes: int
    shared_bytes: int
    stays: str | None


@dataclass(frozen=True, slots=True)
class BranchUse:
    """The states on disk that only this branch has. Dropping all of them would free ``own_bytes``; they need ``shared_bytes``, and states
    of other branches do too. ``branch`` is empty for states that no branch has.
    """

    branch: str
    states: int
    own_bytes: int
    shared_bytes: int


@dataclass(frozen=True, slots=True)
class Usage:
    """What lies in the folder of packs: all ``bytes`` that states need, the branches that take most first, and the ``states`` of one
    branch.
    """

    bytes: int
    branches: tuple[BranchUse, ...]
    states: tuple[StateUse, ...]


def usage(core: Core, *, on_progress: Callable[[int, int], None] = untold) -> Usage:
    """How much each branch takes of the folder of packs, by the lineage and the manifests.

    ``on_progress`` is called with the number of states that were read, and about how many there are.
    """
    core.check_open()
    core.settle()
    facts = survey(Grounds.of(core), Policies(Retention.all()), tell=on_progress).facts
    everything = Ledger(facts)
    by_branch: defaultdict[str, list[Fact]] = defaultdict(list)
    for fact in facts:
        by_branch[fact.branch].append(fact)
    branches = sorted((_of_branch(name, theirs, everything) for name, theirs in by_branch.items()), key=lambda use: -use.own_bytes)
    return Usage(everything.bytes, tuple(branches), tuple(_of_state(fact, everything) for fact in facts))


def _of_state(fact: Fact, everything: Ledger) -> StateUse:
    own = everything.own_bytes(fact)
    return StateUse(fact.uid, fact.branch, fact.step, own, sum(size for _, size in fact.files) - own, fact.held)


def _of_branch(name: str, theirs: Sequence[Fact], everything: Ledger) -> BranchUse:
    own = sum(everything.drop(fact) for fact in theirs)
    for fact in theirs:
        everything.add(fact)
    return BranchUse(name, len(theirs), own, Ledger(theirs).bytes - own)
