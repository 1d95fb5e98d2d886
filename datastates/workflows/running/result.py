"""The result of a study: one result for each variant, read back from the lineage."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from datastates import values
from datastates.errors import InvalidInput, NotFound
from datastates.lineage.states import State, Value
from datastates.workflows.plans import arguments
from datastates.workflows.plans.plan import Plan, plan_of
from datastates.workflows.printed import PrintedTable

from . import record
from .storage import Storage

if TYPE_CHECKING:
    from datastates.repository import Repository

__all__ = ["Exploration", "Progress", "Result", "read_study", "say_alike"]


class Progress(StrEnum):
    """How far a variant has come: done; begun, and to be continued; failed; skipped because an ancestor failed; not begun."""

    DONE = "done"
    BEGUN = "begun"
    FAILED = "failed"
    SKIPPED = "skipped"
    WAITING = "waiting"


@dataclass(frozen=True, slots=True)
class Result:
    """One variant. ``state`` is its result, or until it has one the last state that it reported; ``error`` ends with the traceback."""

    variant: str
    progress: Progress
    state: State | None
    epochs: int
    error: str | None = None
    is_reused: bool = False

    @property
    def metrics(self) -> Mapping[str, float]:
        """The metrics of ``state``."""
        return {} if self.state is None else self.state.metrics

    @property
    def set(self) -> str:
        """What the variant set in restored optimizers, such as ``lr 0.1 -> 0.01``; empty if nothing."""
        return "" if self.state is None else str(self.state.attributes.get(record.SET, ""))


@dataclass(frozen=True, slots=True)
class Exploration:
    """A study as the lineage has it; ``results`` are in the order of the plan. It is true when all variants are done.

    ``storage`` says what the study's states take on disk, if ``explore`` made the result.
    """

    study: str
    start: State
    plan: Plan
    results: Mapping[str, Result]
    config: Mapping[str, Value] = field(default_factory=dict)
    storage: Storage | None = None

    def __bool__(self) -> bool:
        return all(result.progress is Progress.DONE for result in self.results.values())

    def __getitem__(self, variant: str) -> Result:
        return self.results[self.plan[variant].name]

    def __iter__(self) -> Iterator[Result]:
        return iter(self.results.values())

    def __len__(self) -> int:
        return len(self.results)

    @property
    def done(self) -> dict[str, State]:
        """The results of the finished variants."""
        return {each.variant: each.state for each in self if each.progress is Progress.DONE and each.state is not None}

    @property
    def alike(self) -> list[tuple[str, ...]]:
        """The finished variants that ended with the same bytes, if there are any: the differences in their configurations had no effect."""
        names: dict[str, list[str]] = {}
        for name, state in self.done.items():
            names.setdefault(state.digest, []).append(name)
        return [tuple(each) for each in names.values() if len(each) > 1]

    @property
    def errors(self) -> dict[str, str]:
        """The errors, by variant."""
        return {each.variant: each.error for each in self if each.error is not None}

    def best(self, metric: str, *, mode: str = "min") -> Result:
        """The finished variant with the lowest value of a metric (``mode="max"``: the highest). NaN, as of a variant that diverged, is no
        value.

        :raises InvalidInput: the mode is neither.
        :raises NotFound: no finished variant has a value of it.
        """
        better = {"min": min, "max": max}.get(mode)
        if better is None:
            raise InvalidInput(f"mode is {values.shown(mode)}: choose 'min' or 'max'")
        have = [self.results[name] for name, state in self.done.items() if metric in state.metrics]
        if not have:
            known = sorted({key for each in self for key in each.metrics})
            raise NotFound(f"no finished variant of study {self.study!r} has the metric {metric!r}: there are {', '.join(known) or 'none'}")
        numbers = [each for each in have if not math.isnan(each.metrics[metric])]
        if not numbers:
            raise NotFound(f"{metric} is NaN in every finished variant of study {self.study!r}: none is the best")
        return better(numbers, key=lambda each: each.metrics[metric])

    def table(self) -> PrintedTable:
        """A table for a terminal, ``print`` or a notebook."""
        table = PrintedTable("variant", "from", "progress", "epochs", "state", title=f"study {self.study}", title_justify="left")
        table.caption = "\n".join([*map(say_alike, self.alike), *([] if self.storage is None else [str(self.storage)])]) or None
        is_set = any(each.set for each in self)
        if is_set:
            table.add_column("set", overflow="fold")
        names = sorted({key for each in self for key in each.metrics})
        for name in names:
            table.add_column(name, justify="right")
        for each in self:
            variant = self.plan[each.variant]
            state = "" if each.state is None else each.state.uid[:10]
            metrics = [f"{each.metrics[name]:.4g}" if name in each.metrics else "" for name in names]
            facts = [each.variant, variant.parent or "start", str(each.progress), f"{each.epochs}/{variant.epochs}", state]
            table.add_row(*facts, *[each.set] * is_set, *metrics)
        return table


def say_alike(variants: Sequence[str]) -> str:
    """A line about variants that ended alike."""
    some = ", ".join(variants[:5]) + (f" and {len(variants) - 5} more" if len(variants) > 5 else "")
    return f"{some} ended with the same bytes: what their configurations differ in reached nothing that trains"


def _errors(value: object, what: str) -> dict[str, str]:
    return {name: values.string(each, f"the error of {name!r}") for name, each in values.named(value, what).items()}


@values.takes(
    repository=arguments.repository,
    study=values.string,
    plan=plan_of,
    config=values.optional(arguments.configuration),
    errors=values.optional(_errors),
    reused=values.several(values.string),
)
def read_study(
    repository: Repository,
    study: str,
    plan: Plan,
    *,
    config: Mapping[str, Value] | None = None,
    errors: Mapping[str, str] | None = None,
    reused: Collection[str] = (),
) -> Exploration:
    """What the lineage knows of a study.

    :param repository: the repository that holds the study.
    :param study: the study's name.
    :param plan: the plan that it trains.
    :param config: the configuration that the variants' configurations change.
    :param errors: the errors of this run, by variant.
    :param reused: the variants that this run found finished.
    :raises NotFound: the study has not begun.
    :raises Conflict: a variant was trained by another plan.
    """
    refs = record.refs_of(repository)
    if record.start_tag(study) not in refs:
        raise NotFound(f"there is no study {study!r} in this repository: explore it first")
    start = repository.state(record.start_tag(study))
    results: dict[str, Result] = {}
    for variant in plan.variants:
        name, digest = variant.name, plan.digest(variant.name, config)
        error = (errors or {}).get(name)
        parent = None if variant.parent is None else results[variant.parent]
        if parent is not None and parent.progress is not Progress.DONE:
            is_lost = parent.progress in (Progress.FAILED, Progress.SKIPPED)
            results[name] = Result(name, Progress.SKIPPED if is_lost else Progress.WAITING, None, 0)
            continue
        origin = start if parent is None else parent.state
        assert origin is not None, "a variant that is done has a state"
        state = record.finished(repository, study, name, digest, refs)
        reported = record.reports(repository, study, name, origin, refs)
        if state is None and reported:
            record.check_digest(reported[-1], study, name, digest)
        last = state or (reported[-1] if reported else None)
        epochs = 0 if last is None else int(last.attributes.get(record.EPOCH) or 0)
        if state is not None:
            progress = Progress.DONE
        elif error is not None:
            progress = Progress.FAILED
        else:
            progress = Progress.BEGUN if reported else Progress.WAITING
        results[name] = Result(name, progress, last, epochs, error if state is None else None, name in reused)
    return Exploration(study, start, plan, results, dict(config or {}))
