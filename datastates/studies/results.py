"""Results of a study, read back from the lineage, and its display on a terminal.

``Exploration`` has one result for each variant. ``display_for`` shows progress, ``Work`` is the
cost compared with training each variant from scratch, and ``announce`` prints a plan.
"""

from __future__ import annotations

import logging
import math
import shutil
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from fractions import Fraction
from io import StringIO
from itertools import chain
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Protocol, Self

from rich.console import Console, Group, RenderableType
from rich.jupyter import JupyterMixin
from rich.live import Live
from rich.table import Table
from rich.text import Text

from datastates import values
from datastates.errors import InvalidInput, NotFound
from datastates.lineage.states import Revision, State
from datastates.lineage.write import attachments
from datastates.storage.pack import packs_of
from datastates.values import Value

from . import plan as arguments
from . import records
from .plan import Plan, Variant
from .records import (
    EPOCH,
    SAMPLES,
    SAMPLES_ALL,
    STUDY,
    VARIANT,
    branch_of,
    done_tag,
    refs_of,
    start_tag,
    states_of,
)

if TYPE_CHECKING:
    from datastates.repository import Repository

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Storage:
    """What a study takes on disk. ``states`` counts the states there, including the study's start;
    ``bytes_stored`` is the size of all packs that any of them needs.

    A pack that states share counts once. ``bytes_full_copies`` is the size of the states stored one
    by one.
    """

    states: int
    bytes_stored: int
    bytes_full_copies: int

    @property
    def ratio(self) -> float:
        """The ratio of what is stored to full copies; 1 if nothing is on disk."""
        return self.bytes_stored / self.bytes_full_copies if self.bytes_full_copies else 1.0

    def __str__(self) -> str:
        stored, full = self.bytes_stored / 2**20, self.bytes_full_copies / 2**20
        said = f"{self.states} states in {stored:,.1f} MiB on disk"
        if not self.states:
            return said
        if self.ratio > 0.99:
            # small states fill pages, and states that differ everywhere share nothing
            return f"{said}, as full copies would take"
        return f"{said}; full copies would take {full:,.1f} MiB ({self.ratio:.0%})"


@values.checked
def storage(repo: arguments.AnyRepository, study: str) -> Storage:
    """The bytes that a study's states and its start take on disk, read from the lineage.

    :raises NotFound: there is no such study.
    """
    states = {state.uid: state for state in (repo.state(start_tag(study)), *states_of(repo, study))}
    packs: dict[str, int] = {}
    count = full = 0
    for uid, state in states.items():
        needed = {pack.name: pack.size for pack in packs_of(repo.core.location.packs, uid)}
        if needed:
            packs |= needed
            count, full = count + 1, full + state.bytes_total
    return Storage(count, sum(packs.values()), full)


# --- Rich tables and groups that print and notebooks can show ---


class _Printed(JupyterMixin):
    """A renderable whose text is what a terminal would show, without colours."""

    __slots__ = ()

    def __str__(self) -> str:
        console = Console(
            file=StringIO(),
            width=max(80, shutil.get_terminal_size((120, 40)).columns),
            no_color=True,
        )
        with console.capture() as captured:
            console.print(self)
        return "\n".join(line.rstrip() for line in captured.get().splitlines())

    __repr__ = __str__


class PrintedTable(_Printed, Table):
    """A table."""


class PrintedGroup(_Printed, Group):
    """Parts, one below the other."""


# --- Results of variants ---


class Progress(StrEnum):
    """How far a variant has come. A begun variant will be continued. A skipped variant has an
    ancestor that failed. A dropped variant would continue one that was not among the best of its
    rung."""

    DONE = "done"
    BEGUN = "begun"
    FAILED = "failed"
    SKIPPED = "skipped"
    DROPPED = "dropped"
    WAITING = "waiting"


@dataclass(frozen=True, slots=True)
class Result:
    """One variant.

    ``state`` is its result, or until it has one the last state that it reported; ``error`` ends
    with the traceback."""

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
        """What the variant set in restored optimizers, such as ``lr 0.1 -> 0.01``; empty if
        nothing."""
        return "" if self.state is None else str(self.state.attributes.get(records.SET, ""))


@dataclass(frozen=True, slots=True)
class Exploration:
    """A study as the lineage has it. ``results`` are in the order of the plan. It is true when all
    variants are done, or were dropped by halving.

    ``storage`` is what the study's states take on disk, if ``explore`` made the result.
    """

    study: str
    start: State
    plan: Plan
    results: Mapping[str, Result]
    config: Mapping[str, Value] = field(default_factory=dict)
    storage: Storage | None = None

    def __bool__(self) -> bool:
        over = (Progress.DONE, Progress.DROPPED)
        return all(result.progress in over for result in self.results.values())

    def __getitem__(self, variant: str) -> Result:
        return self.results[self.plan[variant].name]

    def __iter__(self) -> Iterator[Result]:
        return iter(self.results.values())

    def __len__(self) -> int:
        return len(self.results)

    @property
    def done(self) -> dict[str, State]:
        """The results of the finished variants."""
        return {
            each.variant: each.state
            for each in self
            if each.progress is Progress.DONE and each.state is not None
        }

    @property
    def work(self) -> Work:
        """The epochs trained so far, next to the cost of training each variant to its end. With
        halving, ``saving`` compares with training all variants through all rungs. Excludes the
        prefix."""
        return _compared(self.plan, 0.0, {each.variant: each.epochs for each in self})

    @property
    def alike(self) -> list[tuple[str, ...]]:
        """The finished variants that ended with the same bytes, if there are any: the
        differences in their configurations had no effect."""
        names: dict[str, list[str]] = {}
        for name, state in self.done.items():
            names.setdefault(state.digest, []).append(name)
        return [tuple(each) for each in names.values() if len(each) > 1]

    @property
    def errors(self) -> dict[str, str]:
        """The errors, by variant."""
        return {each.variant: each.error for each in self if each.error is not None}

    def best(self, metric: str, *, mode: str = "min") -> Result:
        """The finished variant with the lowest value of a metric, or with the highest if ``mode``
        is ``"max"``. NaN counts as no value.

        :raises InvalidInput: the mode is neither.
        :raises NotFound: no finished variant has a value of it.
        """
        better = {"min": min, "max": max}.get(mode)
        if better is None:
            raise InvalidInput(f"mode is {values.shown(mode)}: choose 'min' or 'max'")
        have = [self.results[name] for name, state in self.done.items() if metric in state.metrics]
        if not have:
            known = sorted({key for each in self for key in each.metrics})
            raise NotFound(
                f"no finished variant of study {self.study!r} has the metric {metric!r}: there are"
                f" {', '.join(known) or 'none'}"
            )
        numbers = [each for each in have if math.isfinite(each.metrics[metric])]
        if not numbers:
            raise NotFound(
                f"{metric} is NaN or infinite in every finished variant of study {self.study!r}:"
                " none is the best"
            )
        return better(numbers, key=lambda each: each.metrics[metric])

    def table(self) -> PrintedTable:
        """A table for a terminal, ``print`` or a notebook."""
        table = PrintedTable(
            "variant",
            "from",
            "progress",
            "epochs",
            "state",
            title=f"study {self.study}",
            title_justify="left",
        )
        table.caption = (
            "\n".join(
                [
                    *map(say_alike, self.alike),
                    *([] if self.plan.halving is None else [_halved(self.plan, self.work)]),
                    *([] if self.storage is None else [str(self.storage)]),
                ]
            )
            or None
        )
        is_set = any(each.set for each in self)
        if is_set:
            table.add_column("set", overflow="fold")
        names = sorted({key for each in self for key in each.metrics})
        for name in names:
            table.add_column(name, justify="right")
        for each in self:
            variant = self.plan[each.variant]
            state = "" if each.state is None else each.state.uid[:10]
            metrics = [
                f"{each.metrics[name]:.4g}" if name in each.metrics else "" for name in names
            ]
            facts = [
                each.variant,
                variant.parent or "start",
                str(each.progress),
                f"{each.epochs}/{variant.epochs}",
                state,
            ]
            table.add_row(*facts, *[each.set] * is_set, *metrics)
        return table


def say_alike(variants: Sequence[str]) -> str:
    """A line about variants that ended alike."""
    some = ", ".join(variants[:5]) + (f" and {len(variants) - 5} more" if len(variants) > 5 else "")
    return (
        f"{some} ended with the same bytes: what their configurations differ in reached nothing"
        " that trains"
    )


def _errors(value: object, what: str) -> dict[str, str]:
    return {
        name: values.string(each, f"the error of {name!r}")
        for name, each in values.named(value, what).items()
    }


@values.checked
def read_study(
    repository: arguments.AnyRepository,
    study: str,
    plan: Plan,
    *,
    config: arguments.Configuration | None = None,
    errors: Annotated[Mapping[str, str], _errors] | None = None,
    reused: Collection[str] = (),
) -> Exploration:
    """The progress and results of a study, from the lineage.

    :param repository: the repository that holds the study.
    :param study: the study's name.
    :param plan: the plan that it trains.
    :param config: the configuration that the variants' configurations change.
    :param errors: the errors of this run, by variant.
    :param reused: the variants that this run found finished.
    :raises NotFound: the study has not begun.
    :raises Conflict: a variant was trained by another plan.
    """
    refs = records.refs_of(repository)
    if records.start_tag(study) not in refs:
        raise NotFound(f"there is no study {study!r} in this repository: explore it first")
    start = repository.state(records.start_tag(study))
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
        state = records.finished(repository, study, name, digest, refs)
        reported = records.reports(repository, study, name, origin, refs)
        if state is None and reported:
            records.check_digest(reported[-1], study, name, digest)
        last = state or (reported[-1] if reported else None)
        epochs = 0 if last is None else int(last.attributes.get(records.EPOCH) or 0)
        if state is not None:
            progress = Progress.DONE
        elif error is not None:
            progress = Progress.FAILED
        else:
            progress = Progress.BEGUN if reported else Progress.WAITING
        results[name] = Result(
            name, progress, last, epochs, error if state is None else None, name in reused
        )
    if plan.halving is not None:
        with repository.core.reading() as session:
            _halve(plan, results, attachments.planned(session, study))
    return Exploration(study, start, plan, results, dict(config or {}))


def _halve(plan: Plan, results: dict[str, Result], recorded: Mapping[str, str | None]) -> None:
    """Find the variants that were dropped, and those that failed in a rung that is over."""
    done = {name: one.metrics for name, one in results.items() if one.progress is Progress.DONE}
    lost = [name for name, one in results.items() if one.progress is Progress.FAILED]
    *over, now = plan.decided(recorded, done, lost)
    trained = {*now, *chain.from_iterable(over)}
    for rung, names in enumerate(plan.rungs()):
        for name in names:
            one, parent = results[name], results.get(plan[name].parent or "")
            above = parent.progress if parent is not None else Progress.DONE
            progress = one.progress
            if progress in (Progress.DONE, Progress.FAILED):
                continue
            if above in (Progress.FAILED, Progress.SKIPPED):
                progress = Progress.SKIPPED
            elif above is Progress.DROPPED or (rung <= len(over) and name not in trained):
                progress = Progress.DROPPED
            elif rung < len(over):
                progress = Progress.FAILED
            error = recorded.get(name) if progress is Progress.FAILED else None
            results[name] = replace(one, progress=progress, error=error)


# --- Progress: a table on a terminal, lines of the log elsewhere ---


class Display(Protocol):
    """Shows a study's progress. All methods run on the explorer's thread."""

    def begun(self, variant: str, attempt: int) -> None:
        """A variant was given to the executor."""

    def reported(self, variant: str, state: State) -> None:
        """A state of the variant is in the lineage."""

    def ended(self, variant: str, how: str) -> None:
        """The variant is done, reused, failed, or to be tried again."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


class Quiet:
    """A display that shows nothing."""

    def begun(self, variant: str, attempt: int) -> None:
        """Do nothing."""

    def reported(self, variant: str, state: State) -> None:
        """Do nothing."""

    def ended(self, variant: str, how: str) -> None:
        """Do nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        pass


class Lines(Quiet):
    """A display that writes one line of the log for each event."""

    def __init__(self, study: str, plan: Plan) -> None:
        self._study, self._plan = study, plan

    def begun(self, variant: str, attempt: int) -> None:
        """Log that the variant begins."""
        _logger.info(
            "study %s: %s begins%s",
            self._study,
            variant,
            f", attempt {attempt}" if attempt > 1 else "",
        )

    def reported(self, variant: str, state: State) -> None:
        """Log the epoch and the metrics."""
        epoch, epochs = state.attributes.get(records.EPOCH), self._plan[variant].epochs
        _logger.info(
            "study %s: %s epoch %s/%s: %s", self._study, variant, epoch, epochs, _metrics(state)
        )

    def ended(self, variant: str, how: str) -> None:
        """Log how the variant ended."""
        _logger.info("study %s: %s %s", self._study, variant, how)


@dataclass(slots=True)
class _Row:
    epochs: int
    how: str = "waiting"
    epoch: int = 0
    metrics: str = ""
    began: float | None = None
    began_at: int | None = None
    seen: dict[int, float] = field(default_factory=dict)

    def left_s(self) -> float | None:
        """The seconds that are left, by the pace of the epochs seen since this run began."""
        if self.began is None or len(self.seen) < 1 or self.how != "training":
            return None
        newest = max(self.seen)
        done = newest - (self.began_at or 0)
        return (
            (self.epochs - newest) * (self.seen[newest] - self.began) / done if done > 0 else None
        )


class Screen:
    """A table that is kept up to date; ``clock`` counts seconds."""

    def __init__(
        self, study: str, plan: Plan, console: Console, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._study, self._rows = (
            study,
            {variant.name: _Row(variant.epochs) for variant in plan.variants},
        )
        self._live = Live(self._table(), console=console, refresh_per_second=4)

    def begun(self, variant: str, attempt: int) -> None:
        """Start the variant's clock."""
        row = self._rows[variant]
        row.how, row.began, row.began_at = "training", self._clock(), row.epoch
        row.seen.clear()
        self._live.update(self._table())

    def reported(self, variant: str, state: State) -> None:
        """Show the epoch and metrics, and so what is left."""
        row = self._rows[variant]
        row.epoch, row.metrics = int(state.attributes.get(records.EPOCH) or 0), _metrics(state)
        row.seen[row.epoch] = self._clock()
        self._live.update(self._table())

    def ended(self, variant: str, how: str) -> None:
        """Stop the variant's clock."""
        self._rows[variant].how = how
        self._live.update(self._table())

    def __enter__(self) -> Self:
        self._live.start(refresh=True)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._live.update(self._table(), refresh=True)
        self._live.stop()

    def _table(self) -> Table:
        done = sum(row.how in ("done", "reused") for row in self._rows.values())
        table = Table(
            "variant",
            "",
            "epoch",
            "metrics",
            "left",
            title=f"study {self._study}: {done} of {len(self._rows)} done",
        )
        for name, row in self._rows.items():
            left = row.left_s()
            table.add_row(
                name,
                row.how,
                f"{row.epoch}/{row.epochs}",
                row.metrics,
                "" if left is None else f"{left:.0f} s",
            )
        return table


def display_for(
    study: str, plan: Plan, *, progress: bool, console: Console | None = None
) -> Display:
    """The display that suits where standard error goes."""
    if not progress:
        return Quiet()
    console = console or Console(stderr=True)
    return Screen(study, plan, console) if console.is_terminal else Lines(study, plan)


def _metrics(state: State) -> str:
    return " ".join(f"{key}={value:.4g}" for key, value in sorted(state.metrics.items()))


# --- Cost in epochs over the full data ---


@dataclass(frozen=True, slots=True)
class Work:
    """Epochs over the full data. ``tree_epochs`` is W_D and ``scratch_epochs`` is W_N. Both include
    the prefix."""

    tree_epochs: float
    scratch_epochs: float
    prefix_epochs: float = 0.0

    @property
    def saving(self) -> float:
        """W_N / W_D: how many times as much training from scratch costs as the tree."""
        return self.scratch_epochs / self.tree_epochs if self.tree_epochs else 1.0


@dataclass(frozen=True, slots=True)
class _Part:
    """The work of one variant alone."""

    epochs: Fraction
    share: Fraction


@values.checked
def work(plan: Plan, *, prefix_epochs: float = 0.0) -> Work:
    """The cost of a plan. ``prefix_epochs`` is the cost of its start.

    With halving, ``tree_epochs`` counts as many variants of each rung as will be trained, and
    ``scratch_epochs`` all variants, each through all rungs.

    :raises InvalidInput: ``prefix_epochs`` is negative, or not finite.
    """
    if not 0 <= prefix_epochs < math.inf:
        raise InvalidInput(
            f"prefix_epochs is {prefix_epochs}: give the epochs that the start took, 0 or more"
        )
    return _compared(plan, prefix_epochs, {name: plan[name].epochs for name in plan.expected()})


def _compared(plan: Plan, prefix_epochs: float, trained: Mapping[str, int]) -> Work:
    """The cost of the epochs that were trained of each variant, next to the whole plan's."""
    parts = {
        variant.name: _Part(Fraction(variant.epochs), _share(plan.samples(variant.name), plan.size))
        for variant in plan.variants
    }
    ends = parts if plan.halving is None else plan.rungs()[-1]
    paths = {name: [step.name for step in plan.path(name)] for name in ends}
    of = {name: replace(parts[name], epochs=Fraction(each)) for name, each in trained.items()}
    return _sum(Fraction(prefix_epochs), parts, paths, of)


@values.checked
def work_done(repo: arguments.AnyRepository, study: str) -> Work:
    """The work of a study so far, from the states above each variant's branch or ``done`` tag.

    Training that was lost with a dead process is on no path, and does not count. Each rung of a
    variant counts as a variant: ``Exploration.work`` compares halving with training all variants.

    :raises NotFound: there is no such study.
    """
    start = repo.state(start_tag(study))
    parts: dict[str, _Part] = {}
    paths: dict[str, list[str]] = {}
    for name, tip in _tips(repo, study).items():
        path = _path(repo, study, start, tip)
        if name in path:  # else the variant is still at its fork
            paths[name] = list(path)
            parts |= {step: _part(state) for step, state in path.items()}
    return _sum(Fraction(prefix_epochs(repo, start.uid)), parts, paths, parts)


@values.checked
def prefix_epochs(repo: arguments.AnyRepository, rev: Revision) -> float:
    """The cost of a state, in epochs over the full data, as far as it and its ancestors record it;
    0 if none does.

    It counts the newest ``epoch`` of the states that belong to no study, and the epochs of each
    study's variants among the ancestors.
    """
    state = repo.state(rev)
    newest: dict[object, State] = {}
    for found in (state, *repo.find(f'attr.{EPOCH} exists and ancestor_of("{state.uid}")')):
        key = (found.attributes.get(STUDY), found.attributes.get(VARIANT))
        if _is_number(found.attributes.get(EPOCH)) and (
            key not in newest or newest[key].generation < found.generation
        ):
            newest[key] = found
    parts = map(_part, newest.values())
    return float(sum((part.epochs * part.share for part in parts), Fraction(0)))


def _sum(
    prefix: Fraction,
    parts: Mapping[str, _Part],
    paths: Mapping[str, Iterable[str]],
    trained: Mapping[str, _Part],
) -> Work:
    tree = prefix + sum(part.epochs * part.share for part in trained.values())
    whole = {
        name: prefix + sum(parts[step].epochs for step in path) for name, path in paths.items()
    }
    scratch = sum((whole[name] * parts[name].share for name in paths), Fraction(0))
    return Work(float(tree), float(scratch), float(prefix))


def _tips(repo: Repository, study: str) -> dict[str, str]:
    """The newest state of each variant that has reported anything, by the variant's name."""
    refs = refs_of(repo)
    names = {state.attributes.get(VARIANT) for state in states_of(repo, study)}
    tips = {
        name: refs.get(done_tag(study, name)) or refs.get(branch_of(study, name))
        for name in names
        if isinstance(name, str)
    }
    return {name: ref.state for name, ref in sorted(tips.items()) if ref is not None}


def _path(repo: Repository, study: str, start: State, tip: str) -> dict[str, State]:
    """The last report of each variant from the study's start to ``tip``."""
    head = repo.state(tip)
    path: dict[str, State] = {}
    for state in repo.log(head, limit=max(head.generation - start.generation, 1)):
        variant = state.attributes.get(VARIANT)
        if (
            state.attributes.get(STUDY) == study
            and isinstance(variant, str)
            and _is_number(state.attributes.get(EPOCH))
        ):
            path.setdefault(variant, state)
    return path


def _part(state: State) -> _Part:
    epoch, samples, size = (state.attributes.get(key, 0) for key in (EPOCH, SAMPLES, SAMPLES_ALL))
    assert isinstance(epoch, int | float)
    return _Part(Fraction(epoch), _share(samples, size))


def _share(samples: object, size: object) -> Fraction:
    """The share of the data. All of it if the number of samples is unknown."""
    return (
        Fraction(samples, size)
        if isinstance(samples, int) and isinstance(size, int) and size > 0
        else Fraction(1)
    )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


# --- A plan on a terminal ---


def announce(study: str, plan: Plan, work: Work, console: Console | None = None) -> None:
    """Show what is about to run: all of it on a terminal, one line in the log elsewhere."""
    console = console or Console(stderr=True)
    if console.is_terminal:
        console.print(Text(f"study {study}: ", style="bold"), end="")
        console.print(describe(plan, work))
        return
    _logger.info("study %s: %s; %s", study, _headline(plan), _cost(work))
    if leaks := plan.leaks():
        _logger.warning("study %s: %s", study, _warning(plan, leaks))


@values.checked
def describe(plan: Plan, work: Work, *, limit: values.Count = 40) -> PrintedGroup:
    """A plan's variants as a tree with their data and cost, the epochs that it saves, and the
    limits of its validation.

    At most ``limit`` variants are shown.
    """
    hidden = len(plan) - limit
    parts: list[RenderableType] = [Text(_headline(plan), style="bold"), _table(plan, limit)]
    if hidden > 0:
        parts.append(Text(f"and {_count(hidden, 'variant')} more", style="dim"))
    parts.append(Text(_cost(work)))
    if leaks := plan.leaks():
        parts.append(Text(_warning(plan, leaks), style="yellow"))
    return PrintedGroup(*parts)


def _headline(plan: Plan) -> str:
    stages = len(plan.rungs())
    data = f", {plan.size:,} samples in {len(plan.subsets)} subsets" if plan.subsets else ""
    if (rule := plan.halving) is not None:
        return (
            f"{_count(len(plan.children(None)), 'variant')} in {stages} rungs{data}; the best"
            f" {rule.keep:.0%} of a rung by {rule.metric} ({rule.mode}) continue"
        )
    return f"{_count(len(plan), 'variant')} in {_count(stages, 'stage')}{data}"


def _table(plan: Plan, limit: int) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for title in ("variant", "changes", "trained on", "validated on", "epochs", "full epochs"):
        table.add_column(
            title, justify="left" if title in ("variant", "changes") else "right", overflow="fold"
        )
    depths = _depths(plan)
    for variant in plan.variants[:limit]:
        table.add_row(*map(Text, _cells(plan, variant, depths[variant.name])))
    return table


def _cells(plan: Plan, variant: Variant, depth: int) -> tuple[str, ...]:
    share = plan.samples(variant.name) / plan.size if plan.size else 1.0
    trained = (
        "as it chooses"
        if variant.train is None
        else f"{plan.samples(variant.name):,} ({share:.0%})"
    )
    validated = f"{len(plan.rows(variant.validation)):,}" if variant.validation else "-"
    changes = ", ".join(f"{key}={value}" for key, value in variant.config.items())
    return (
        "  " * depth + variant.name,
        changes,
        trained,
        validated,
        str(variant.epochs),
        f"{variant.epochs * share:.1f}",
    )


def _halved(plan: Plan, done: Work) -> str:
    return (
        f"trained {done.tree_epochs:g} epochs over the full data; all"
        f" {_count(len(plan.children(None)), 'variant')} to the end would take"
        f" {done.scratch_epochs:g}"
    )


def _cost(work: Work) -> str:
    prefix = f", the prefix's {work.prefix_epochs:g} in it" if work.prefix_epochs else ""
    return (
        f"costs {work.tree_epochs:.1f} epochs over the full data{prefix}; each variant from scratch"
        f" would cost {work.scratch_epochs:.1f}: W_N/W_D = {work.saving:.2f}"
    )


def _warning(plan: Plan, leaks: dict[str, tuple[str, ...]]) -> str:
    names = list(leaks)
    some = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    return (
        f"the start was trained on what {_count(len(names), 'variant')} of {len(plan)}"
        f" {'is' if len(names) == 1 else 'are'} validated on ({some}): their validation shows what"
        " they forgot, not what they never saw"
    )


def _depths(plan: Plan) -> dict[str, int]:
    depths: dict[str, int] = {}
    for variant in plan.variants:
        depths[variant.name] = 0 if variant.parent is None else depths[variant.parent] + 1
    return depths


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
