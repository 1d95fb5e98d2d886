"""The score of each sample, from its losses under states of the lineage.

In order of use: ``gather`` finds the states, ``measure`` computes the losses, and ``Scores``
combines them. ``select`` chooses the suspects, and ``score_subsets`` scores subsets. ``trained``
estimates the training cost in epochs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from datastates import values
from datastates.errors import Corrupt, InvalidInput, NotFound, Unavailable, Unsupported
from datastates.lineage.states import RefKind, State
from datastates.repository import Repository

from .plan import Plan

Floats = NDArray[np.float64]
Rows = NDArray[np.int64]
Flags = NDArray[np.bool_]
FORWARD = 1 / 3
"""The cost of a forward pass, in epochs: a step also goes backward, which costs about twice as
much as going forward."""

LossOf = Callable[[nn.Module, Tensor], Tensor]
"""A function that takes the model and int64 indices ``[n]`` on the CPU, and returns the loss of
each sample, ``[n]``."""


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

    ``score`` decides the ranking: the percentile (0 to 100) of the sample's loss, or the mean of
    two percentiles if both losses are known. ``strength`` is the mean of the standardised losses.
    ``lineage`` is the mean loss under states that were, or may have been, trained on the sample.
    ``held_out`` is the mean loss under variants that held it out. ``spread`` is the standard
    deviation of the sample's percentile over the ``sources`` (branches, variants) with a loss for
    it.
    """

    score: Floats
    strength: Floats
    lineage: Floats
    held_out: Floats
    spread: Floats
    sources: Rows

    def order(self) -> Rows:
        """Indices, the most suspicious first. Samples without a score come last."""
        keys = [np.nan_to_num(values, nan=-np.inf) for values in (self.strength, self.score)]
        return np.lexsort([-key for key in keys]).astype(np.int64)


def put_together(lineage: Floats, held_out: Floats, spread: Spread) -> Scores:
    """Scores from the mean losses of both kinds, with equal weights.

    Ranks are averaged rather than losses. On Fashion-MNIST that was never worse
    (docs/benchmarks.md), and the size of a model's losses on samples that it was not trained on
    does not matter.
    """
    score = _mean_of_known(percentiles(lineage), percentiles(held_out))
    strength = _mean_of_known(standardise(lineage), standardise(held_out))
    score[np.isinf(strength)] = 100.0  # a loss of it is not finite: it comes first
    return Scores(score, strength, lineage, held_out, spread.deviation(), spread.sources.copy())


def _mean_of_known(*parts: Floats) -> Floats:
    stacked = np.stack(parts)
    times = (~np.isnan(stacked)).sum(axis=0)
    found = np.full(stacked.shape[1], np.nan)
    np.divide(np.nansum(stacked, axis=0), times, out=found, where=times > 0)
    return found


def standardise(values: Floats) -> Floats:
    """The values with mean 0 and standard deviation 1 over those that are finite, once these are
    ``capped``; all 0 if all are equal."""
    known = capped(values)
    if known.size == 0:
        return values.copy()
    deviation = float(known.std())
    found: Floats = (values - known.mean()) / (deviation if deviation > 0 else 1.0)
    return found


def capped(values: Floats) -> Floats:
    """The finite values, those that are much too high set to a limit, so that a few gross errors do
    not decide the scale.

    The limit is 10 standard deviations, of all values but the highest 5 %, above the median.
    """
    known: Floats = np.sort(values[np.isfinite(values)])
    deviation = float(known[: math.ceil(0.95 * known.size) - 1].std()) if known.size > 1 else 0.0
    return np.minimum(known, np.median(known) + 10 * deviation) if deviation > 0 else known


def percentiles(values: Floats) -> Floats:
    """The share (0 to 100) of the other values that each value exceeds. Ties count half. NaN stays
    NaN."""
    found = np.full(len(values), np.nan)
    known = np.flatnonzero(~np.isnan(values))
    if known.size == 1:
        found[known] = 50.0
    elif known.size:
        _, inverse, counts = np.unique(values[known], return_inverse=True, return_counts=True)
        below = np.cumsum(counts) - counts
        found[known] = 100.0 * (below + (counts - 1) / 2)[inverse] / (known.size - 1)
    return found


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


# --- Losses under states, restored one after another into one model ---


@dataclass(slots=True)
class Losses:
    """The measured losses, as sums only, so that memory does not grow with the number of states.

    ``sources`` are those that were read."""

    count: int
    lineage: Tally = field(init=False)
    held_out: Tally = field(init=False)
    spread: Spread = field(init=False)
    sources: list[Source] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    passes: float = 0.0

    def __post_init__(self) -> None:
        self.lineage, self.held_out, self.spread = (
            Tally(self.count),
            Tally(self.count),
            Spread(self.count),
        )


class Meter:
    """Measures losses under states.

    ``name`` is the name under which the model was tracked; ``batch`` samples go through it at a
    time."""

    def __init__(
        self,
        repo: Repository,
        model: nn.Module,
        loss: LossOf,
        *,
        name: str = "model",
        batch: int = 1024,
    ) -> None:
        if batch < 1:
            raise InvalidInput(
                f"batch is {batch}: it counts the samples that go through the model at a time,"
                " from 1"
            )
        self._repo, self._model, self._loss, self._name, self._batch = (
            repo,
            model,
            loss,
            name,
            batch,
        )

    def restore(self, state: State) -> None:
        """Restore the state into the model.

        :raises Unavailable: the state's bytes are gone.
        :raises Corrupt: the bytes are damaged.
        :raises InvalidInput: the model does not fit the state.
        """
        self._repo.restore(state.uid, objects={self._name: self._model}, only=self._name)

    def losses(self, rows: Rows) -> Floats:
        """One loss for each sample, in evaluation mode and without gradients.

        :raises InvalidInput: the loss is not one number for each sample.
        """
        indices = torch.from_numpy(rows)
        with _evaluating(self._model):
            return np.concatenate([self._part(part) for part in indices.split(self._batch)])

    def _part(self, indices: Tensor) -> Floats:
        # what the user's function actually returned
        found: object = self._loss(self._model, indices)
        if not isinstance(found, Tensor) or tuple(found.shape) != (len(indices),):
            what = (
                f"a tensor of shape {tuple(found.shape)}"
                if isinstance(found, Tensor)
                else f"a {type(found).__name__}"
            )
            raise InvalidInput(
                f"loss(model, indices) gave {what} for {len(indices)} indices: give one loss a"
                " sample, with reduction='none'"
            )
        plain: Floats = found.detach().to("cpu", torch.float64).numpy()
        return plain


def measure(
    meter: Meter, sources: Sequence[Source], count: int, on_progress: Callable[[int, int], None]
) -> Losses:
    """The losses of every source.

    A state is skipped if it cannot be restored, or if most of its losses are not finite. Any other
    loss that is not finite counts as infinite.

    :raises Unavailable: not one state could be read.
    """
    found, done, total = Losses(count), 0, sum(len(source.states) for source in sources)
    for source in sources:
        rows = np.arange(count, dtype=np.int64) if source.held_out is None else source.held_out
        tally, read = Tally(count), []
        for state in source.states:
            losses = _read(meter, source, state, rows, found)
            if losses is not None:
                (found.lineage if source.held_out is None else found.held_out).add(rows, losses)
                tally.add(rows, losses)
                read.append(state)
            done += 1
            on_progress(done, total)
        if read:
            found.spread.add(tally.mean())
            found.sources.append(replace(source, states=tuple(read)))
    if not found.sources:
        raise Unavailable(
            f"none of {total} states could be read:"
            f" {'; '.join(skipped.reason for skipped in found.skipped[:3]) or 'there are none'}"
        )
    return found


def _read(meter: Meter, source: Source, state: State, rows: Rows, found: Losses) -> Floats | None:
    try:
        meter.restore(state)
    except (Corrupt, InvalidInput, Unavailable) as exc:
        found.skipped.append(Skipped(source.name, str(exc), state.uid, state.step))
        return None
    losses = meter.losses(rows)
    found.passes += len(rows) / found.count
    wrong = ~np.isfinite(losses)
    if 2 * wrong.sum() > len(rows):
        found.skipped.append(
            Skipped(
                source.name,
                f"{wrong.sum()} of its {len(rows)} losses are not finite",
                state.uid,
                state.step,
            )
        )
        return None
    return np.where(wrong, np.inf, losses)


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


# --- Suspects: the samples with the highest scores ---


@dataclass(frozen=True, slots=True, eq=False)
class Selection:
    """The suspects: ``suspects`` is True for the ``noise_rate`` highest scores.
    ``is_estimated``: the rate was estimated, not given."""

    noise_rate: float
    is_estimated: bool
    suspects: Flags


def check_rate(value: object, what: str = "noise_rate") -> float:
    """A noise rate, taken as an argument.

    :raises InvalidInput: it is not from 0 to 1.
    """
    rate = values.number(value, what)
    if not 0 <= rate <= 1:
        raise InvalidInput(
            f"{what} is {rate:g}: it is a share of the samples, from 0 to 1, or None to estimate it"
        )
    return rate


def select(scores: Scores, noise_rate: float | None = None) -> Selection:
    """The suspects at a noise rate, by default at the estimated one.

    :raises InvalidInput: the rate is not from 0 to 1.
    :raises Unsupported: the rate has to be estimated, and scikit-learn is not installed.
    """
    if noise_rate is not None:
        check_rate(noise_rate)
    known = ~np.isnan(scores.score)
    rate = estimate(scores.strength[known]) if noise_rate is None else noise_rate
    chosen = np.zeros(len(known), dtype=np.bool_)
    chosen[scores.order()[: min(round(rate * int(known.sum())), int(known.sum()))]] = True
    return Selection(rate, noise_rate is None, chosen)


def estimate(strength: Floats) -> float:
    """The share of samples that a mixture of two normal distributions assigns to the higher one,
    and of those that are not finite.

    The values are ``capped`` first: otherwise one gross error would be the higher group alone.

    Both distributions have one variance. With separate variances the higher one also takes samples
    that are merely hard (Fashion-MNIST with 10 % of labels flipped: 30 % instead of 10 %). The
    mixture finds two groups even where there is one: clean data gives a few per cent. The estimate
    is never more than half, because what most samples are is not an outlier.
    """
    finite = capped(strength)
    wrong = strength.size - finite.size
    if finite.size < 10 or math.isclose(float(np.ptp(finite)), 0.0):
        return min(0.5, wrong / max(1, strength.size))
    try:
        # takes a second to import, and is only needed here
        from sklearn.mixture import (
            GaussianMixture,
        )
    except ImportError as exc:
        raise Unsupported(
            "the noise rate is estimated with scikit-learn: pip install 'datastates[workflows]', or"
            " pass noise_rate="
        ) from exc
    column = finite.reshape(-1, 1)
    mixture = GaussianMixture(2, covariance_type="tied", n_init=2, random_state=0).fit(column)
    high = int(mixture.means_[:, 0].argmax())
    return min(0.5, (wrong + float(mixture.predict_proba(column)[:, high].sum())) / strength.size)


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
    """One sample; ``rank`` 1 is the most suspicious. None means not known. The other fields are
    as in ``Scores``."""

    index: int
    rank: int
    score: float | None
    strength: float | None
    lineage_loss: float | None
    held_out_loss: float | None
    spread: float | None
    sources: int
    is_suspect: bool


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Ranking:
    """All samples, ranked.

    ``sources`` are the branches that were read, ``skipped`` those that could not be."""

    scores: Scores
    selection: Selection
    subsets: tuple[SubsetScore, ...]
    sources: tuple[Source, ...]
    skipped: tuple[Skipped, ...]
    cost: OutlierCost

    def __len__(self) -> int:
        return len(self.scores.score)

    def samples(self) -> Iterator[SampleScore]:
        """Every sample, the most suspicious first."""
        scores, suspects = self.scores, self.selection.suspects
        for rank, index in enumerate(scores.order().tolist(), 1):
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
            )

    def suspects(self) -> list[SampleScore]:
        """The samples that the noise rate selects, the most suspicious first."""
        count = int(self.selection.suspects.sum())
        return [sample for sample, _ in zip(self.samples(), range(count), strict=False)]

    def top(self, most: int) -> list[SampleScore]:
        """The ``most`` highest ranked samples, suspects or not."""
        return [sample for sample, _ in zip(self.samples(), range(most), strict=False)]


def known(value: Any) -> Any:
    """None for what is not finite; a plain number for a NumPy number."""
    if not isinstance(value, float):
        return value
    return float(value) if math.isfinite(value) else None
