"""The scores of each sample, from states of the lineage.

``measure`` reads the samples under the states, ``scores_of`` combines the numbers, and
``select_all`` selects suspects. ``score_subsets`` scores subsets.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import normalize, one_hot

from datastates import values
from datastates.errors import Corrupt, InvalidInput, Unavailable
from datastates.lineage.states import State
from datastates.repository import Repository

from .outlier_data import ANOTHER, Batches, Floats, Indexed, Rows, Task
from .outlier_sources import OutlierCost, Skipped, Source
from .outlier_suspects import (
    Selection,
    by_another_class,
    by_distance,
    by_mixture,
    percentiles,
    ranked,
    robust,
    standardise,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

EARLY = 0.4
"""The share of a branch's states, from the second, that have learned most samples and have not
memorised wrong ones."""


class Score(StrEnum):
    """A score of each sample; higher is more suspicious. ``held-out`` ones need a study's plan."""

    LOSS = "loss"
    LAST_LOSS = "last loss"
    MARGIN = "margin"
    NORMALIZED_MARGIN = "normalized margin"
    HELD_OUT_LOSS = "held-out loss"
    HELD_OUT_MARGIN = "held-out margin"
    DISTANCE = "distance"
    NEIGHBOURS = "neighbours"


class Tally:
    """The mean of the values that were added for each sample, without keeping the values."""

    def __init__(self, count: int) -> None:
        self._total = np.zeros(count)
        self._times = np.zeros(count, dtype=np.int64)

    def add(self, rows: Rows, values: Floats) -> None:
        """Add one value for each of ``rows``, which are distinct."""
        self._total[rows] += values
        self._times[rows] += 1

    def mean(self) -> Floats:
        """The means; NaN where nothing was added."""
        found = np.full(len(self._total), np.nan)
        np.divide(self._total, self._times, out=found, where=self._times > 0)
        return found


class Spread:
    """How far the sources (branches, seeds, variants) disagree about where each sample ranks."""

    def __init__(self, count: int) -> None:
        self._sum = np.zeros(count)
        self._squares = np.zeros(count)
        self.sources = np.zeros(count, dtype=np.int64)

    def add(self, values: Floats) -> None:
        """Add one source's value of each sample. NaN means that the source has no value."""
        shares = percentiles(values)
        known = ~np.isnan(shares)
        self._sum[known] += shares[known]
        self._squares[known] += shares[known] ** 2
        self.sources[known] += 1

    def deviation(self) -> Floats:
        """The sample standard deviation, over the sources, of a sample's percentile (0 to 100);
        NaN with fewer than two."""
        times = np.maximum(self.sources, 1)
        variance = (
            np.maximum(self._squares / times - (self._sum / times) ** 2, 0.0)
            * times
            / np.maximum(times - 1, 1)
        )
        return np.where(self.sources >= 2, np.sqrt(variance), np.nan)


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """One array for each column, one element for each sample. Unknown values are NaN.

    ``columns`` has the strength of each chosen score, by name; the first decides the ranking.
    ``score`` is its percentile (0 to 100), and ``strength`` its standardised value. For the loss,
    both are the mean of two, if both losses are known. ``lineage`` is the mean loss under states
    that were, or may have been, trained on the sample. ``held_out`` is the mean loss under variants
    that held it out. ``spread`` is the standard deviation of the percentile of the sample's loss
    over the ``sources`` (branches, variants) with a loss for it.
    """

    score: Floats
    strength: Floats
    lineage: Floats
    held_out: Floats
    spread: Floats
    sources: Rows
    columns: dict[str, Floats]

    def order(self, by: str | None = None) -> Rows:
        """Indices, the most suspicious first by one of ``columns``. Samples without a score come
        last."""
        if by is not None and by != next(iter(self.columns)):
            return ranked(self.columns[by])
        keys = [np.nan_to_num(values, nan=-np.inf) for values in (self.strength, self.score)]
        return np.lexsort([-key for key in keys]).astype(np.int64)


def put_together(
    lineage: Floats,
    held_out: Floats,
    spread: Spread,
    others: Mapping[str, Floats | None] | None = None,
) -> Scores:
    """Scores from the mean losses of both kinds, with equal weights, and from ``others`` by name.
    The place of the loss among them is None.

    Ranks are averaged rather than losses, because the size of a model's losses on samples that it
    was not trained on does not matter.
    """
    score = _mean_of_known(percentiles(lineage), percentiles(held_out))
    strength = _mean_of_known(standardise(lineage), standardise(held_out))
    columns = {
        name: strength if values is None else standardise(values)
        for name, values in (others or {Score.LOSS: None}).items()
    }
    first, values = next(iter((others or {Score.LOSS: None}).items()))
    if values is not None:
        score, strength = percentiles(values), columns[first]
    score[np.isinf(strength)] = 100.0  # a loss of it is not finite: it comes first
    return Scores(
        score, strength, lineage, held_out, spread.deviation(), spread.sources.copy(), columns
    )


def _mean_of_known(*parts: Floats) -> Floats:
    stacked = np.stack(parts)
    times = (~np.isnan(stacked)).sum(axis=0)
    found = np.full(stacked.shape[1], np.nan)
    np.divide(np.nansum(stacked, axis=0), times, out=found, where=times > 0)
    return found


# --- Numbers under states, restored one after another into one model ---

REFERENCES = 2000
"""The most samples whose features are kept, and to which distances are measured."""

NEIGHBOURS = 10
_RARE = 5
"""A class with fewer references has no center of its own."""


class Features:
    """Distances to the features of some samples under one state. The references are ``[m, d]``
    with ``labels`` ``[m]``; features that are not finite get NaN."""

    def __init__(self, features: Tensor, rows: Rows, labels: Rows) -> None:
        kept = features.isfinite().all(dim=1)
        found, labels = features[kept], labels[kept.numpy()]
        if not len(found):
            raise Unavailable("no features are finite under this state")
        self._rows = torch.from_numpy(rows)[kept]
        self._mean, self._unit = found.mean(dim=0), found.std(dim=0, correction=0) + 1e-6
        self._near = normalize((found - self._mean) / self._unit, dim=1)
        self._fit(found, labels)
        # the farthest tenth may be what belongs to no class: it must not widen the distribution
        near = self.distance(found)
        few = near <= np.quantile(near, 0.9)
        self._fit(found[torch.from_numpy(few)], labels[few])

    def _fit(self, found: Tensor, labels: Rows) -> None:
        counts = np.bincount(labels)
        centers, inverse = np.unique(
            np.where(counts[labels] < _RARE, -1, labels), return_inverse=True
        )
        groups = one_hot(torch.from_numpy(inverse), len(centers)).double()
        means = (groups.T @ found) / groups.sum(dim=0)[:, None]
        rest = found - groups @ means
        covariance = rest.T @ rest / len(rest)
        size = len(covariance)
        width = float(covariance.trace()) / size or 1.0
        shrunk = 0.9 * covariance + 0.1 * width * torch.eye(size, dtype=torch.float64)
        self._whiten = torch.linalg.inv(torch.linalg.cholesky(shrunk)).T
        self._centers = means @ self._whiten

    def distance(self, features: Tensor) -> Floats:
        """The Mahalanobis distance to the nearest class, whose covariance all classes share (Lee et
        al. 2018)."""
        near = torch.cdist(features @ self._whiten, self._centers).amin(dim=1)
        return near.numpy().astype(np.float64)

    def neighbours(self, features: Tensor, rows: Rows) -> Floats:
        """The mean cosine distance to the nearest references other than the sample itself."""
        alike = normalize((features - self._mean) / self._unit, dim=1) @ self._near.T
        alike[torch.from_numpy(rows)[:, None] == self._rows] = -1.0
        most = min(NEIGHBOURS, alike.shape[1])
        return (1 - alike.topk(most, dim=1).values.mean(dim=1)).numpy().astype(np.float64)


@dataclass(slots=True)
class Numbers:
    """What was measured, as sums only, so that memory does not grow with the number of states.

    ``early`` are the states of each branch that have not memorised wrong samples.
    ``predicted`` is the class under the last of these, or under a variant that held the sample out;
    -1 if there is none. ``curve`` has the losses under each state of the first branch. ``sources``
    are those that were read.
    """

    count: int
    lineage: dict[str, Tally] = field(default_factory=dict)
    early: dict[str, Tally] = field(default_factory=dict)
    held_out: dict[str, Tally] = field(default_factory=dict)
    distances: dict[str, Floats] = field(default_factory=dict)
    spread: Spread = field(init=False)
    predicted: Rows = field(init=False)
    curve: list[NDArray[np.float32]] = field(default_factory=list)
    sources: list[Source] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    passes: float = 0.0

    def __post_init__(self) -> None:
        self.spread, self.predicted = Spread(self.count), np.full(self.count, -1)

    def mean(self, kind: str, name: str) -> Floats:
        """The means of ``lineage``, ``early`` or ``held_out``; NaN where nothing was read."""
        tallies: dict[str, Tally] = getattr(self, kind)
        return tallies[name].mean() if name in tallies else np.full(self.count, np.nan)


class Meter:
    """Reads samples under states. ``name`` is the name under which the model was tracked.
    ``distances`` is False if no features are needed."""

    def __init__(
        self,
        repo: Repository,
        model: nn.Module,
        samples: Indexed | Batches,
        *,
        name: str = "model",
        distances: bool = False,
    ) -> None:
        self._repo, self._model, self._name = repo, model, name
        self.samples, self.distances = samples, distances

    def restore(self, state: State) -> None:
        """Restore the state into the model.

        :raises Unavailable: the state's bytes are gone.
        :raises Corrupt: the bytes are damaged.
        :raises InvalidInput: the model does not fit the state.
        """
        self._repo.restore(state.uid, objects={self._name: self._model}, only=self._name)

    def read(self, rows: Rows, features: Features | None = None) -> dict[str, Floats]:
        """The numbers of the samples, in evaluation mode and without gradients.

        :raises InvalidInput: the samples cannot be read, or the model does not fit them.
        """
        found: list[dict[str, Floats]] = []
        with _evaluating(self._model):
            for part in self.samples.parts(self._model, rows):
                numbers = part.numbers
                if features is not None:
                    numbers[Score.DISTANCE] = features.distance(part.features)
                    numbers[Score.NEIGHBOURS] = features.neighbours(part.features, part.rows)
                found.append(numbers)
        return {key: np.concatenate([each[key] for each in found]) for key in found[0]}

    def features(self) -> tuple[Features, float]:
        """Features of evenly spaced samples, and what share of a pass they took."""
        count, targets = self.samples.count, self.samples.targets
        rows = np.unique(np.linspace(0, count - 1, min(REFERENCES, count)).astype(np.int64))
        with _evaluating(self._model):
            found = [part.features for part in self.samples.parts(self._model, rows)]
        labels = np.zeros(len(rows), dtype=np.int64)
        if self.samples.task is Task.CLASSIFICATION and targets is not None:
            labels = targets[rows].astype(np.int64)
        return Features(torch.cat(found), rows, labels), len(rows) / count


def measure(
    meter: Meter, sources: Sequence[Source], on_progress: Callable[[int, int], None]
) -> Numbers:
    """The numbers of every source.

    A state is skipped if it cannot be restored, or if most of its losses are not finite. Any other
    loss that is not finite counts as infinite.

    :raises Unavailable: not one state could be read.
    """
    count = meter.samples.count
    found, done, total = Numbers(count), 0, sum(len(source.states) for source in sources)
    first = next((source for source in sources if source.held_out is None), None)
    for source in sources:
        rows = np.arange(count, dtype=np.int64) if source.held_out is None else source.held_out
        is_held, tally = source.held_out is not None, Tally(count)
        read, last = list[State](), np.empty(0)
        ends = (source.states[0], source.states[-1]) if source is first and meter.distances else ()
        for place, state in enumerate(source.states):
            numbers = _read(meter, source, state, rows, found, state in ends)
            done += 1
            on_progress(done, total)
            if numbers is None:
                continue
            early = place - min(1, len(source.states) - 1)
            is_early = is_held or 0 <= early < max(1, round(EARLY * len(source.states)))
            predicted = numbers.pop("predicted", None)
            for name, column in numbers.items():
                kinds = [found.held_out if is_held else found.lineage]
                for tallies in [*kinds, *([found.early] if is_early and not is_held else [])]:
                    tallies.setdefault(name, Tally(count)).add(rows, column)
            if is_early and predicted is not None:
                found.predicted[rows] = predicted.astype(np.int64)
            if source is first:
                found.curve.append(numbers["loss"].astype(np.float32))
            tally.add(rows, numbers["loss"])
            last = numbers["loss"]
            read.append(state)
        if read:
            if not is_held:
                found.lineage.setdefault(Score.LAST_LOSS, Tally(count)).add(rows, last)
            found.spread.add(tally.mean())
            found.sources.append(replace(source, states=tuple(read)))
    if meter.samples.task is Task.UNKNOWN_INPUTS:  # it has no losses
        for kept in (found.lineage, found.early, found.held_out, found.curve):
            kept.clear()
        found.spread = Spread(count)
    if not found.sources:
        raise Unavailable(
            f"none of {total} states could be read:"
            f" {'; '.join(skipped.reason for skipped in found.skipped[:3]) or 'there are none'}"
        )
    return found


def _read(
    meter: Meter, source: Source, state: State, rows: Rows, found: Numbers, measures_distance: bool
) -> dict[str, Floats] | None:
    try:
        meter.restore(state)
    except (Corrupt, InvalidInput, Unavailable) as exc:
        found.skipped.append(Skipped(source.name, str(exc), state.uid, state.step))
        return None
    features = None
    if measures_distance:
        features, passes = meter.features()
        found.passes += passes
    numbers = meter.read(rows, features)
    found.passes += len(rows) / found.count
    wrong = ~np.isfinite(numbers["loss"])
    if 2 * wrong.sum() > len(rows):
        reason = f"{wrong.sum()} of its {len(rows)} losses are not finite"
        found.skipped.append(Skipped(source.name, reason, state.uid, state.step))
        return None
    for name in (Score.DISTANCE, Score.NEIGHBOURS):
        if name in numbers:
            log = np.log(np.maximum(numbers.pop(name), 1e-12))
            found.distances[name] = found.distances.get(name, 0.0) + robust(log)
    unknown = {"predicted": -1.0}
    return {
        name: column if ANOTHER in name else np.where(wrong, unknown.get(name, np.inf), column)
        for name, column in numbers.items()
    }


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Put every part of the model into evaluation mode, and afterwards back into the mode that
    it had."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode


# --- The scores of a report ---

DEFAULTS: dict[Task | None, tuple[Score, ...]] = {
    Task.CLASSIFICATION: (
        Score.MARGIN,
        Score.NORMALIZED_MARGIN,
        Score.LOSS,
        Score.HELD_OUT_LOSS,
        Score.HELD_OUT_MARGIN,
        Score.DISTANCE,
        Score.NEIGHBOURS,
    ),
    Task.REGRESSION: (Score.LOSS, Score.LAST_LOSS, Score.HELD_OUT_LOSS, Score.DISTANCE),
    Task.UNKNOWN_INPUTS: (Score.DISTANCE, Score.NEIGHBOURS),
    None: (Score.LOSS,),
}
"""The scores by default, chosen by ``benchmarks/outliers.py``. Held-out ones are left out without a
study."""

_NUMBER: dict[str, str] = {
    Score.HELD_OUT_LOSS: Score.LOSS,
    Score.HELD_OUT_MARGIN: Score.NORMALIZED_MARGIN,
    Score.LAST_LOSS: Score.LOSS,
}


def choose(
    scores: Sequence[str] | None, task: Task | None, sources: Sequence[Source]
) -> list[Score]:
    """The scores that were asked for, or the defaults that these sources have.

    :raises InvalidInput: a score cannot be computed from this task and these sources.
    """
    has_held_out = any(source.held_out is not None for source in sources)
    has_lineage = any(source.held_out is None for source in sources)

    def missing(score: Score) -> str | None:
        if "margin" in score and task is not Task.CLASSIFICATION:
            return "data= whose targets are classes"
        if "loss" in score and task is Task.UNKNOWN_INPUTS:
            return "data= with targets, or loss="
        if score.startswith("held-out") and not has_held_out:
            return "study= and plan=, whose variants hold samples out"
        if score in (Score.LAST_LOSS, Score.DISTANCE, Score.NEIGHBOURS) and not has_lineage:
            return "branches, whose states are read for all samples"
        return None

    if scores is None:
        scores = [score for score in DEFAULTS[task] if missing(score) is None]
    found = [values.choice(score, Score, "a score") for score in scores]
    for score in found or DEFAULTS[task]:
        if (why := missing(score)) is not None:
            raise InvalidInput(f"the score {score.value!r} needs {why}")
    return list(dict.fromkeys(found or DEFAULTS[task]))


def scores_of(numbers: Numbers, chosen: Sequence[Score]) -> Scores:
    """The chosen scores. If there is no lineage, variants that held samples out give its scores."""
    kind = "lineage" if numbers.lineage else "held_out"
    columns: dict[str, Floats | None] = {}
    for score in chosen:
        if score is Score.LOSS:
            columns[score] = None
        elif score in (Score.DISTANCE, Score.NEIGHBOURS):
            columns[score] = numbers.distances.get(score, np.full(numbers.count, np.nan))
        elif score.startswith("held-out"):
            columns[score] = numbers.mean("held_out", _NUMBER[score])
        else:
            columns[score] = numbers.mean(kind, score)
    return put_together(
        numbers.mean("lineage", "loss"), numbers.mean("held_out", "loss"), numbers.spread, columns
    )


def select_all(
    numbers: Numbers, scores: Scores, task: Task | None, noise_rate: float | None
) -> dict[str, Selection]:
    """The suspects by each score. ``noise_rate`` is the share of wrong targets, if it is known."""
    found = {}
    for name, column in scores.columns.items():
        order = scores.order(name)
        is_held = name.startswith("held-out") or not numbers.early
        kind, number = "held_out" if is_held else "early", _NUMBER.get(Score(name), name)
        if name in (Score.DISTANCE, Score.NEIGHBOURS):
            found[name] = by_distance(robust(column))
        elif task is Task.CLASSIFICATION:
            given, another = numbers.mean(kind, number), numbers.mean(kind, number + ANOTHER)
            found[name] = by_another_class(given, another, noise_rate, order)
        else:
            # the root of a squared error: its two groups are closer to normal distributions
            error = column - np.nanmin(column) if task is Task.REGRESSION else column
            strength = standardise(np.sqrt(error)) if task is Task.REGRESSION else column
            found[name] = by_mixture(strength, noise_rate, order)
    return found


# --- Scores of subsets ---


@dataclass(frozen=True, slots=True)
class SubsetScore:
    """The score of one subset.

    ``score`` is the mean of the samples' percentiles (50: like all the data), ``error`` its
    standard error."""

    name: str
    samples: int
    score: float
    error: float
    suspects: int


def check_subsets(subsets: Mapping[str, Sequence[int]], count: int) -> None:
    """Raise unless every sample of the subsets is one of ``count``.

    :raises InvalidInput: a sample is not.
    """
    for name, indices in subsets.items():
        wrong = next((index for index in indices if not 0 <= index < count), None)
        if wrong is not None:
            raise InvalidInput(
                f"subset {name!r} has sample {wrong}, but count is {count}: pass the count of all"
                " samples"
            )


def score_subsets(
    scores: Scores, selection: Selection, subsets: Mapping[str, Sequence[int]]
) -> tuple[SubsetScore, ...]:
    """The subsets, the most suspicious first; a subset without a scored sample is left out.

    :raises InvalidInput: a subset has a sample that does not exist.
    """
    check_subsets(subsets, len(scores.score))
    found = []
    for name, indices in subsets.items():
        rows = np.unique(np.asarray(indices, dtype=np.int64))
        values = scores.score[rows]
        values = values[~np.isnan(values)]
        if values.size:
            error = (
                float(values.std(ddof=1)) / math.sqrt(values.size) if values.size > 1 else math.nan
            )
            found.append(
                SubsetScore(
                    name,
                    int(values.size),
                    float(values.mean()),
                    error,
                    int(selection.suspects[rows].sum()),
                )
            )
    return tuple(sorted(found, key=lambda subset: -subset.score))


# --- The ranking and its sources ---


@dataclass(frozen=True, slots=True)
class SampleScore:
    """One sample; ``rank`` 1 is the most suspicious. None means not known.

    ``predicted`` is the class under a variant that held the sample out, or else under an early
    state. ``curve`` is the loss under each state of the first branch. ``scores`` and the other
    fields are as in ``Scores``."""

    index: int
    rank: int
    score: float | None
    strength: float | None
    lineage_loss: float | None
    held_out_loss: float | None
    spread: float | None
    sources: int
    is_suspect: bool
    name: str = ""
    given: str | None = None
    predicted: str | None = None
    scores: dict[str, float | None] = field(default_factory=dict)
    curve: tuple[float | None, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Described:
    """The facts about each sample, next to its scores. ``curve`` has the losses ``[n]`` under each
    state of the first branch."""

    names: Sequence[str] | Callable[[int], str] | None = None
    classes: Sequence[str] | None = None
    targets: Floats | None = None
    predicted: Rows | None = None
    curve: Sequence[NDArray[np.float32]] = ()

    def name(self, index: int) -> str:
        names = self.names
        return "" if names is None else str(names(index) if callable(names) else names[index])

    def class_of(self, values: Floats | Rows | None, index: int) -> str | None:
        """A class by name, or a value of a regression; None if it is not known."""
        if values is None or values.ndim > 1:
            return None
        value = values[index].item()
        if isinstance(value, int) and value < 0:  # no prediction
            return None
        is_named = self.classes is not None and 0 <= value < len(self.classes)
        return str(self.classes[int(value)]) if self.classes and is_named else f"{value:g}"


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Ranking:
    """All samples, ranked.

    ``sources`` are the branches that were read, ``skipped`` those that could not be.
    ``selections`` has the suspects by each score; ``selection`` those by the first.
    """

    scores: Scores
    selection: Selection
    subsets: tuple[SubsetScore, ...]
    sources: tuple[Source, ...]
    skipped: tuple[Skipped, ...]
    cost: OutlierCost
    selections: dict[str, Selection] = field(default_factory=dict)
    described: Described = field(default_factory=Described)

    def __len__(self) -> int:
        return len(self.scores.score)

    def samples(self, by: str | None = None) -> Iterator[SampleScore]:
        """Every sample, the most suspicious first, by one of the scores that were chosen.

        :raises InvalidInput: the report does not have this score.
        """
        scores, told = self.scores, self.described
        if by is not None and by not in scores.columns:
            raise InvalidInput(f"the report has no {by!r}: it has {', '.join(scores.columns)}")
        suspects = self.selections.get(by or "", self.selection).suspects
        for rank, index in enumerate(scores.order(by).tolist(), 1):
            yield SampleScore(
                index=index,
                rank=rank,
                score=known(scores.score[index]),
                strength=known(scores.strength[index]),
                lineage_loss=known(scores.lineage[index]),
                held_out_loss=known(scores.held_out[index]),
                spread=known(scores.spread[index]),
                sources=int(scores.sources[index]),
                is_suspect=bool(suspects[index]),
                name=told.name(index),
                given=told.class_of(told.targets, index),
                predicted=told.class_of(told.predicted, index),
                scores={name: known(column[index]) for name, column in scores.columns.items()},
                curve=tuple(known(float(losses[index])) for losses in told.curve),
            )

    def suspects(self, by: str | None = None) -> list[SampleScore]:
        """The samples that were selected by a score, the most suspicious first."""
        found = self.selections.get(by or "", self.selection)
        return self.top(int(found.suspects.sum()), by)

    def top(self, most: int, by: str | None = None) -> list[SampleScore]:
        """The ``most`` highest ranked samples, suspects or not."""
        return [sample for sample, _ in zip(self.samples(by), range(most), strict=False)]


def known(value: Any) -> Any:
    """None for what is not finite; a plain number for a NumPy number."""
    if not isinstance(value, float):
        return value
    return float(value) if math.isfinite(value) else None
