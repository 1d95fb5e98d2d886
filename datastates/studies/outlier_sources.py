"""The states that ``outliers`` reads, and what their training cost.

``gather`` finds the states of branches and of variants that held samples out. ``trained`` counts
the epochs of training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from datastates.errors import InvalidInput, NotFound
from datastates.lineage.states import RefKind, State
from datastates.repository import Repository

from .outlier_data import Rows
from .plan import Plan

FORWARD = 1 / 3
"""The cost of a forward pass, in epochs: a step also goes backward, which costs about twice as
much as going forward."""

# --- Cost in epochs over the whole data ---


@dataclass(frozen=True, slots=True)
class OutlierCost:
    """The cost of a report. ``training`` is the epochs that the lineage records, and ``unrecorded``
    names the branches that record none. ``passes`` counts the forward passes over the whole data
    that scoring took.
    """

    training: float
    passes: float
    unrecorded: tuple[str, ...] = ()

    @property
    def total(self) -> float:
        """The total in epochs; a lower bound if something is unrecorded."""
        return self.training + FORWARD * self.passes

    def __str__(self) -> str:
        least = "at least " if self.unrecorded else ""
        text = (
            f"{least}{self.total:.1f} epochs: {self.training:.1f} of training, and"
            f" {self.passes:.1f} forward passes at 1/3 epoch each"
        )
        return text + (
            f"; no epochs on record for {', '.join(self.unrecorded)}" if self.unrecorded else ""
        )


def trained(
    log: Sequence[State],
    known: dict[str, tuple[str | None, float]],
    count: int,
    steps_per_epoch: int | None,
) -> float | None:
    """The epochs over the whole data that one branch adds to those in ``known``; None if its own
    states record none.

    ``log`` is oldest first. ``known`` maps each state that was counted before to its variant and to
    that variant's epochs at the state. The states of this log are added to it. A state records its
    epochs as the attribute or metric ``epoch``. In a study they count from the variant's fork.
    ``samples`` and ``samples_all`` give the part of the data that was an epoch. A state without a
    record counts its steps over ``steps_per_epoch``.
    """
    total, variant, before = 0.0, None, 0.0
    is_new = is_recorded = False
    for state in log:
        if state.uid in known:
            variant, before = known[state.uid]
            continue
        is_new = True
        epoch, own = _epoch(state, steps_per_epoch), _variant(state)
        if own != variant:
            # a variant counts its epochs from its fork
            variant, before = (
                own,
                (before if _recorded(state) is None else 0.0),
            )
        if epoch is not None:
            is_recorded = True
            total += max(0.0, epoch - before) * _share(state, count)
            before = max(before, epoch)
        known[state.uid] = (variant, before)
    return total if is_recorded or not is_new else None


def _variant(state: State) -> str | None:
    study, variant = state.attributes.get("study"), state.attributes.get("variant")
    return None if study is None and variant is None else f"{study}/{variant}"


def _epoch(state: State, steps_per_epoch: int | None) -> float | None:
    recorded = _recorded(state)
    return (
        recorded
        if recorded is not None or steps_per_epoch is None
        else state.step / steps_per_epoch
    )


def _recorded(state: State) -> float | None:
    for value in (state.attributes.get("epoch"), state.metrics.get("epoch")):
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
    return None


def _share(state: State, count: int) -> float:
    samples, of = state.attributes.get("samples"), state.attributes.get("samples_all") or count
    return samples / of if isinstance(samples, int) and isinstance(of, int) and samples > 0 else 1.0


# --- States of branches and of variants that held samples out ---


@dataclass(frozen=True, slots=True)
class Source:
    """One branch: the states to read, oldest first, and the samples that it held out, if known.

    The branch has ``of`` own states. ``gone`` of them have lost their bytes.
    """

    name: str
    states: tuple[State, ...]
    held_out: Rows | None = None
    of: int = 0
    gone: int = 0


@dataclass(frozen=True, slots=True)
class Skipped:
    """Something that was not read, and why: a state of a branch, or the whole branch (``uid``
    None)."""

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
        """Add a branch, oldest state first.

        States that it shares with earlier branches count as theirs."""
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
                f"none of its {len(own)} states has its bytes any more"
                if own
                else "it has no state after step 0 that no other branch has"
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
    """The named branches (any revision), then the branch that the study's variants forked from,
    then each finished variant.

    :raises NotFound: there is no such branch or study.
    :raises InvalidInput: a plan is given without its study, or its subsets do not fit ``count``.
    """
    found = Gathered(count, states, steps_per_epoch)
    for branch in branches:
        found.add(branch, repo.log(branch)[::-1])
    if plan is not None:
        if study is None:
            raise InvalidInput(
                "a plan comes without its study: pass study=, the name that explore ran it under"
            )
        _check_rows(plan, count)
    if study is not None:
        _add_study(found, repo, study, plan)
    return found


def pick(states: Sequence[State], most: int, begin: int = 0) -> list[State]:
    """At most ``most`` of the states that have their bytes, spread evenly over the steps after
    ``begin``, and including the last one."""
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
    names = (
        [variant.name for variant in plan.variants]
        if plan is not None
        else _members(repo, refs, study)
    )
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
            found.add(
                branch,
                repo.log(done)[::-1],
                _held_out(plan, name, found.count) if plan is not None else None,
            )
        else:
            found.skipped.append(
                Skipped(branch, "not finished" if branch in refs else "never begun")
            )


def _members(repo: Repository, refs: Mapping[str, RefKind], study: str) -> list[str]:
    """The study's variants, finished ones with parents before children, because a child's log
    begins with its parent's."""
    names = [
        name.removeprefix(f"{study}/")
        for name, kind in refs.items()
        if kind is RefKind.BRANCH and name.startswith(f"{study}/")
    ]
    depths = {
        name: repo.state(done).generation
        for name in names
        if (done := f"done/{study}/{name}") in refs
    }
    return sorted(names, key=lambda name: (depths.get(name, 0), name))


def _held_out(plan: Plan, name: str, count: int) -> Rows | None:
    """The samples on which neither the variant nor an ancestor was trained, ascending. None if
    there are none, or the plan does not define them."""
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
            raise InvalidInput(
                f"subset {name!r} of the plan has sample {wrong}, but count is {count}: pass the"
                " count of all samples"
            )
