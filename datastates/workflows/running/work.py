"""What a study costs, in epochs over the full data, compared with training each variant from scratch.

The prefix has P epochs. Variant v has its own epochs e_v, the sum E_v of the epochs of its whole path, and the share f_v of the data
on which it is trained:

    W_D = P + sum of e_v f_v           a tree: the prefix once, each variant's own epochs once
    W_N = sum of (P + E_v) f_v         from scratch: each variant alone, on its own data, for as long as its path took

For a leave-out tree of fan-out n in parts of one size, with e_s epochs at stage s, that is

    W_D = P + sum of (n^s - 1) e_s
    W_N = sum of (n^s - 1) (P + e_1 + ... + e_s)

Sums are exact, so that the order in which variants were trained changes no bit of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

from datastates import values
from datastates.errors import InvalidInput
from datastates.lineage.states import State
from datastates.workflows.plans import arguments
from datastates.workflows.plans.plan import Plan, plan_of

from .record import EPOCH, SAMPLES, SAMPLES_ALL, STUDY, VARIANT, branch_of, done_tag, refs_of, start_tag, states_of

if TYPE_CHECKING:
    from datastates.repository import Repository

__all__ = ["Work", "prefix_epochs", "work", "work_done"]


@dataclass(frozen=True, slots=True)
class Work:
    """Epochs over the full data: ``tree_epochs`` is W_D and ``scratch_epochs`` is W_N; the prefix is in both."""

    tree_epochs: float
    scratch_epochs: float
    prefix_epochs: float = 0.0

    @property
    def saving(self) -> float:
        """W_N / W_D: how many times as much training from scratch costs as the tree."""
        return self.scratch_epochs / self.tree_epochs if self.tree_epochs else 1.0


@dataclass(frozen=True, slots=True)
class _Part:
    """The work of one variant by itself."""

    epochs: Fraction
    share: Fraction


@values.takes(plan=plan_of, prefix_epochs=values.number)
def work(plan: Plan, *, prefix_epochs: float = 0.0) -> Work:
    """The cost of a plan. ``prefix_epochs`` is the cost of its start.

    :raises InvalidInput: ``prefix_epochs`` is negative, or not finite.
    """
    if not 0 <= prefix_epochs < math.inf:
        raise InvalidInput(f"prefix_epochs is {prefix_epochs}: give the epochs that the start took, 0 or more")
    shares = {variant.name: _share(plan.samples(variant.name), plan.size) for variant in plan.variants}
    parts = {variant.name: _Part(Fraction(variant.epochs), shares[variant.name]) for variant in plan.variants}
    return _sum(Fraction(prefix_epochs), parts, {name: [step.name for step in plan.path(name)] for name in parts})


@values.takes(repo=arguments.repository, study=values.string)
def work_done(repo: Repository, study: str) -> Work:
    """The work of a study so far, read from the lineage alone: from the states above each variant's branch, or its ``done`` tag.

    Training that was lost with a process that died is on no path, and does not count.

    :raises NotFound: there is no such study.
    """
    start = repo.state(start_tag(study))
    parts: dict[str, _Part] = {}
    paths: dict[str, list[str]] = {}
    for name, tip in _tips(repo, study).items():
        path = _path(repo, study, start, tip)
        if name in path:  # else the variant stands where it forked
            paths[name] = list(path)
            parts |= {step: _part(state) for step, state in path.items()}
    return _sum(Fraction(prefix_epochs(repo, start.uid)), parts, paths)


@values.takes(repo=arguments.repository, rev=values.revision)
def prefix_epochs(repo: Repository, rev: str | State) -> float:
    """The cost of a state, in epochs over the full data, as far as it and its ancestors record it; 0 if none does.

    It counts the newest ``epoch`` of the states that belong to no study, and the epochs of each study's variants among the ancestors.
    """
    state = repo.state(rev)
    newest: dict[object, State] = {}
    for found in (state, *repo.find(f'attr.{EPOCH} exists and ancestor_of("{state.uid}")')):
        key = (found.attributes.get(STUDY), found.attributes.get(VARIANT))
        if _is_number(found.attributes.get(EPOCH)) and (key not in newest or newest[key].generation < found.generation):
            newest[key] = found
    parts = map(_part, newest.values())
    return float(sum((part.epochs * part.share for part in parts), Fraction(0)))


def _sum(prefix: Fraction, parts: Mapping[str, _Part], paths: Mapping[str, Iterable[str]]) -> Work:
    tree = prefix + sum(part.epochs * part.share for part in parts.values())
    whole = {name: prefix + sum(parts[step].epochs for step in path) for name, path in paths.items()}
    scratch = sum((whole[name] * parts[name].share for name in paths), Fraction(0))
    return Work(float(tree), float(scratch), float(prefix))


def _tips(repo: Repository, study: str) -> dict[str, str]:
    """The newest state of each variant that has reported anything, by the variant's name."""
    refs = refs_of(repo)
    names = {state.attributes.get(VARIANT) for state in states_of(repo, study)}
    tips = {name: refs.get(done_tag(study, name)) or refs.get(branch_of(study, name)) for name in names if isinstance(name, str)}
    return {name: ref.state for name, ref in sorted(tips.items()) if ref is not None}


def _path(repo: Repository, study: str, start: State, tip: str) -> dict[str, State]:
    """The last report of each variant from the study's start to ``tip``."""
    head = repo.state(tip)
    path: dict[str, State] = {}
    for state in repo.log(head, limit=max(head.generation - start.generation, 1)):
        variant = state.attributes.get(VARIANT)
        if state.attributes.get(STUDY) == study and isinstance(variant, str) and _is_number(state.attributes.get(EPOCH)):
            path.setdefault(variant, state)
    return path


def _part(state: State) -> _Part:
    epoch, samples, size = (state.attributes.get(key, 0) for key in (EPOCH, SAMPLES, SAMPLES_ALL))
    assert isinstance(epoch, int | float)
    return _Part(Fraction(epoch), _share(samples, size))


def _share(samples: object, size: object) -> Fraction:
    """The share of the data; all of it if nothing says how many samples there are."""
    return Fraction(samples, size) if isinstance(samples, int) and isinstance(size, int) and size > 0 else Fraction(1)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
