"""What a report on outliers reads: the states of branches, and of variants that held samples out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from datastates.errors import InvalidInput, NotFound
from datastates.lineage.states import RefKind, State
from datastates.repository import Repository
from datastates.workflows.plans.plan import Plan

from .cost import OutlierCost, trained
from .scores import Rows

__all__ = ["Gathered", "Skipped", "Source", "gather", "pick"]


@dataclass(frozen=True, slots=True)
class Source:
    """One branch: its states that are to be read, oldest first, and the samples that it held out, if those are known.

    The branch has ``of`` states of its own; ``gone`` of them have lost their bytes.
    """

    name: str
    states: tuple[State, ...]
    held_out: Rows | None = None
    of: int = 0
    gone: int = 0


@dataclass(frozen=True, slots=True)
class Skipped:
    """Something that was not read, and why: a state of a branch, or the whole branch (``uid`` None)."""

    branch: str
    reason: str
    uid: str | None = None
    step: int | None = None


@dataclass(slots=True)
class Gathered:
    """All sources. ``seen`` holds every state of the branches that were added."""

    count: int
    states: int
    steps_per_epoch: int | None = None
    sources: list[Source] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    unrecorded: list[str] = field(default_factory=list)
    training: float = 0.0
    seen: dict[str, tuple[str | None, float]] = field(default_factory=dict)

    def add(self, name: str, log: Sequence[State], held_out: Rows | None = None) -> None:
        """Add a branch, oldest state first. States that it shares with earlier branches count as theirs."""
        own = [state for state in log if state.uid not in self.seen]
        begin = max((state.step for state in log if state.uid in self.seen), default=0)
        epochs = trained(log, self.seen, self.count, self.steps_per_epoch)
        if epochs is None:
            self.unrecorded.append(name)
        self.training += epochs or 0.0
        own = [state for state in own if state.step > 0]  # nothing is learned before the first step
        gone = sum(not state.status.is_restorable for state in own)
        picked = pick(own, self.states, begin)
        if picked:
            self.sources.append(Source(name, tuple(picked), held_out, len(own), gone))
        else:
            why = (
                f"none of its {len(own)} states has its bytes any more" if own else "it has no state after step 0 that no other branch has"
            )
            self.skipped.append(Skipped(name, why))

    def cost(self, passes: float) -> OutlierCost:
        """The cost, given that scoring took ``passes`` forward passes over the whole data."""
        return OutlierCost(self.training, passes, tuple(self.unrecorded))


def gather(
    repo: Repository,
    branches: Sequence[str],
    *,
    study: str | None,
    plan: Plan | None,
    count: int,
    states: int,
    steps_per_epoch: int | None,
) -> Gathered:
    """The named branches (any revision), then the branch that the study's variants forked from, then each finished variant.

    :raises NotFound: there is no such branch or study.
    :raises InvalidInput: a plan is given without its study, or its subsets do not fit ``count``.
    """
    found = Gathered(count, states, steps_per_epoch)
    for branch in branches:
        found.add(branch, repo.log(branch)[::-1])
    if plan is not None:
        if study is None:
            raise InvalidInput("a plan comes without its study: pass study=, the name that explore ran it under")
        _check_rows(plan, count)
    if study is not None:
        _add_study(found, repo, study, plan)
    return found


def pick(states: Sequence[State], most: int, begin: int = 0) -> list[State]:
    """At most ``most`` of the states that have their bytes, spread evenly over the steps after ``begin``, and including the last one."""
    there = [state for state in states if state.status.is_restorable]
    if len(there) <= most:
        return there
    last = there[-1].step
    wanted = [begin + (last - begin) * (at + 1) / most for at in range(most)]
    steps = np.array([state.step for state in there])
    taken = {int(np.abs(steps - step).argmin()) for step in wanted}
    return [there[at] for at in sorted(taken)]


def _add_study(found: Gathered, repo: Repository, study: str, plan: Plan | None) -> None:
    refs = {ref.name: ref.kind for ref in repo.refs()}
    names = [variant.name for variant in plan.variants] if plan is not None else _members(repo, refs, study)
    if f"start/{study}" in refs:
        log = repo.log(f"start/{study}")[::-1]
        if any(state.uid not in found.seen and state.step > 0 for state in log):
            found.add(f"start/{study}", log)
    elif not any(f"{study}/{name}" in refs for name in names):
        known = sorted({name.partition("/")[2] for name in refs if name.startswith("start/")})
        raise NotFound(f"there is no study {study!r}: there are {', '.join(known) or 'none'}")
    for name in names:
        branch, done = f"{study}/{name}", f"done/{study}/{name}"
        if done in refs:
            found.add(branch, repo.log(done)[::-1], _held_out(plan, name, found.count) if plan is not None else None)
        else:
            found.skipped.append(Skipped(branch, "not finished" if branch in refs else "never begun"))


def _members(repo: Repository, refs: Mapping[str, RefKind], study: str) -> list[str]:
    """The study's variants, finished ones with parents before children, because a child's log begins with its parent's."""
    names = [name.removeprefix(f"{study}/") for name, kind in refs.items() if kind is RefKind.BRANCH and name.startswith(f"{study}/")]
    depths = {name: repo.state(done).generation for name in names if (done := f"done/{study}/{name}") in refs}
    return sorted(names, key=lambda name: (depths.get(name, 0), name))


def _held_out(plan: Plan, name: str, count: int) -> Rows | None:
    """The samples on which neither the variant nor an ancestor was trained, ascending; None if there are none, or the plan does not say."""
    path = plan.path(name)
    if any(variant.train is None for variant in path):
        return None
    trained_on = plan.rows([subset for variant in path for subset in variant.train or ()])
    rows = np.setdiff1d(np.arange(count, dtype=np.int64), np.array(trained_on, dtype=np.int64))
    return rows if rows.size else None


def _check_rows(plan: Plan, count: int) -> None:
    for name, rows in plan.subsets.items():
        if rows and not (min(rows) >= 0 and max(rows) < count):
            wrong = min(rows) if min(rows) < 0 else max(rows)
            raise InvalidInput(f"subset {name!r} of the plan has sample {wrong}, but count is {count}: pass the count of all samples")
