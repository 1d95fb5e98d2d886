"""Builders for the usual plans: grids and samples of configurations, ensembles, folds,
leave-out trees, and successive halving."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Annotated, Any, Literal, TypedDict, Unpack

from datastates import values
from datastates.errors import InvalidInput
from datastates.lineage.write.refs import check_name
from datastates.values import Value

from . import plan as arguments
from .plan import Halving, Plan, Variant

_NAME_LENGTH = 60


def distributions(value: object, what: str) -> dict[str, Distribution]:
    """The distributions to search, by their name in the configuration.

    :raises InvalidInput: one of them is not a distribution; names it.
    """
    found: dict[str, Any] = values.named(value, what)
    for key, each in found.items():
        if not isinstance(each, Uniform | LogUniform | Choice):
            raise InvalidInput(
                f"{key} is drawn from {values.shown(each)}: give a Uniform, a LogUniform or a"
                " Choice"
            )
    return found


def _schedule(value: object, what: str) -> Schedule:
    try:
        return values.choice(value, Schedule, what)
    except InvalidInput:
        raise InvalidInput(
            f"there is no schedule {values.shown(value)}: choose one of {', '.join(Schedule)}"
        ) from None


def _set_numbers(of: Uniform | LogUniform) -> None:
    for name in ("low", "high"):
        # frozen for everybody else
        object.__setattr__(
            of, name, values.number(getattr(of, name), f"{name} of {type(of).__name__}")
        )


class Data(TypedDict, total=False):
    """The data that every variant of a plan is trained and validated on; if not given, the train
    function chooses."""

    subsets: Mapping[str, Sequence[int]]
    train: Sequence[str]
    validation: Sequence[str]
    seen: Sequence[str]


@dataclass(frozen=True, slots=True)
class Uniform:
    """A distribution of numbers from ``low`` to ``high``, each as likely as the other."""

    low: float
    high: float

    def __post_init__(self) -> None:
        _set_numbers(self)
        if not -math.inf < self.low < self.high < math.inf:
            raise InvalidInput(
                f"Uniform from {self.low:g} to {self.high:g}: give a finite low below a finite high"
            )

    def draw(self, source: random.Random) -> Value:
        """Draw one value."""
        return source.uniform(self.low, self.high)


@dataclass(frozen=True, slots=True)
class LogUniform:
    """A distribution of numbers from ``low`` to ``high``, each order of magnitude as likely as
    the other."""

    low: float
    high: float

    def __post_init__(self) -> None:
        _set_numbers(self)
        if not 0 < self.low < self.high < math.inf:
            raise InvalidInput(
                f"LogUniform from {self.low:g} to {self.high:g}: give a low above 0, below a finite"
                " high"
            )

    def draw(self, source: random.Random) -> Value:
        """Draw one value."""
        drawn = math.exp(source.uniform(math.log(self.low), math.log(self.high)))
        return min(max(drawn, float(self.low)), float(self.high))  # exp and log round


@dataclass(frozen=True, slots=True)
class Choice:
    """A choice of one of ``values``; ``Choice(range(2, 9))`` draws a whole number."""

    values: Sequence[Value]

    def __post_init__(self) -> None:
        # frozen for everybody else
        object.__setattr__(self, "values", arguments.plain_values(self.values, "values of Choice"))
        if not self.values:
            raise InvalidInput("Choice of no values: give it one at least")

    def draw(self, source: random.Random) -> Value:
        """Draw one value."""
        return self.values[source.randrange(len(self.values))]


Distribution = Uniform | LogUniform | Choice


class Schedule(StrEnum):
    """How the number of epochs changes along the stages of a tree; these are the schedules of
    CANDLE's supervisor."""

    FLAT = "flat"
    LINEAR = "linear"
    LOG = "log"
    SQRT = "sqrt"


ScheduleName = Literal["flat", "linear", "log", "sqrt"]
Seed = Annotated[int, arguments.seed]
Seeds = Annotated[int | Sequence[int], arguments.counted(arguments.MOST_VARIANTS)]
Samples = Annotated[int | Sequence[int], arguments.counted(arguments.MOST_SAMPLES)]
Subsets = Annotated[Sequence[str], arguments.names]
Variants = Annotated[int, arguments.variants]
Whole = Annotated[int, arguments.whole]
AnySchedule = Annotated[Schedule | ScheduleName, _schedule]


def _depth(value: object, what: str) -> int:
    return values.integer(value, what, most=arguments.MOST_DEPTH)


@values.checked
def grid(
    config: Annotated[Mapping[str, Sequence[Value]], arguments.tried],
    *,
    epochs: arguments.Positive,
    **data: Unpack[Data],
) -> Plan:
    """A plan with a variant for each combination of the values of ``config``. The last key changes
    fastest.

        plan = grid({"lr": [1e-2, 1e-3], "dropout": [0.0, 0.1]}, epochs=3)

    :raises InvalidInput: a key has no values, or has a value twice, or the combinations are more
        than a million.
    """
    for key, some in config.items():
        if isinstance(some, range):
            continue
        if len({repr(value) for value in some}) < len(some):
            raise InvalidInput(f"{key} has a value twice: {', '.join(map(repr, some))}")
    if (count := math.prod(map(_length, config.values()))) > arguments.MOST_VARIANTS:
        raise InvalidInput(
            f"the grid has {count:,} variants: give values for at most {arguments.MOST_VARIANTS:,}"
        )
    combined = [
        dict(zip(config, some, strict=True)) for some in itertools.product(*config.values())
    ]
    return _flat(_names(combined), combined, epochs, data)


@values.checked
def sample(
    distributions: Annotated[Mapping[str, Distribution], distributions],
    count: Variants,
    seed: Seed,
    epochs: arguments.Positive,
    **data: Unpack[Data],
) -> Plan:
    """A plan of ``count`` variants with values drawn at random. The same seed gives the same plan.

    Each value depends only on the seed, its key and the variant's number. A larger count or another
    key changes no earlier value.

        drawn = {"lr": LogUniform(1e-4, 1e-1), "layers": Choice(range(2, 5))}
        plan = sample(drawn, count=8, seed=0, epochs=3)

    :param distributions: what is drawn, by its name in the configuration.
    :param count: how many variants.
    :param seed: the seed of the draws.
    :param epochs: the epochs of each variant.
    :param data: what every variant is trained and validated on, see ``grid``.
    """
    if count < 1:
        raise InvalidInput(f"a sample of {count} variants: draw at least 1")
    drawn = [
        {key: of.draw(random.Random(f"{seed}/{number}/{key}")) for key, of in distributions.items()}
        for number in range(1, count + 1)
    ]
    return _flat([f"sample-{number}" for number in range(1, count + 1)], drawn, epochs, data)


@values.checked
def ensemble(seeds: Seeds, epochs: arguments.Positive, **data: Unpack[Data]) -> Plan:
    """A plan with a variant for each seed, or for the seeds from 0 on; each is seeded with
    ``config["seed"]`` where it forks."""
    chosen = range(seeds) if isinstance(seeds, int) else seeds
    return _flat(
        [f"seed-{seed}" for seed in chosen], [{"seed": int(seed)} for seed in chosen], epochs, data
    )


@values.checked
def kfold(
    folds: Annotated[int | Mapping[str, Sequence[int]], arguments.folds],
    *,
    epochs: arguments.Positive,
    samples: Samples | None = None,
    seed: Seed = 0,
    seen: Subsets = (),
) -> Plan:
    """A plan with a variant for each fold, validated on that fold and trained on the other folds.

        plan = kfold(5, samples=1000, epochs=3)

    :param folds: subsets by name, or how many to cut ``samples`` into.
    :param epochs: the epochs of each variant.
    :param samples: indices, or how many there are.
    :param seed: the seed of the cut.
    :param seen: subsets that the start was trained on.
    :raises InvalidInput: there are fewer than 2 folds, or samples are missing, or are given
        together with subsets.
    """
    if isinstance(folds, Mapping):
        if samples is not None:
            raise InvalidInput(
                "kfold was given both subsets and samples: cut the samples, or leave them out"
            )
        subsets = folds
    elif samples is None:
        raise InvalidInput(
            f"kfold is to make {folds} folds of nothing: give samples, indices or how many"
            " there are"
        )
    else:
        subsets = cut(samples, folds, seed=seed)
    if len(subsets) < 2:
        raise InvalidInput(f"kfold was given {len(subsets)} folds: give it at least 2")
    names = [f"without-{name}" for name in subsets]
    variants = [
        Variant(name, None, epochs, {}, _without(subsets, (out,)), (out,))
        for name, out in zip(names, subsets, strict=True)
    ]
    return _plan(variants, subsets, seen)


@values.checked
def leave_out(
    subsets: Mapping[str, Sequence[int]],
    *,
    depth: Annotated[int, _depth],
    epochs: arguments.Positive,
    fan_out: Variants = 2,
    schedule: AnySchedule = "flat",
    seen: Subsets = (),
    always: Subsets = (),
) -> Plan:
    """A tree of variants. Each leaves out a part of what its parent left out, and is validated on
    it.

    Variant ``2`` leaves out the second of ``fan_out`` groups of subsets, and its child ``2.1`` the
    first ``fan_out``-th of that group. The child is trained on all other subsets, including the
    part that ``2`` left out and the child does not. No variant is validated on data that an
    ancestor was trained on. This is the leave-out tree of CANDLE's challenge problem. Groups that
    cannot be cut evenly differ by one subset.

        plan = leave_out(cut(range(1000), 8), depth=3, epochs=6, schedule="sqrt")

    :param subsets: indices by name.
    :param depth: how many stages the tree has.
    :param epochs: the epochs of the first stage. ``epochs_at`` describes the later stages.
    :param fan_out: how many children each variant has.
    :param schedule: how the epochs fall from stage to stage.
    :param seen: subsets that the start was trained on.
    :param always: subsets that are never left out. Pass those that the start was trained on, if no
        variant should be validated on data that it has ``seen``.
    :raises InvalidInput: there are fewer subsets to leave out than leaves.
    """
    if depth < 1 or fan_out < 2:
        raise InvalidInput(
            f"a tree of depth {depth} and fan-out {fan_out}: give it a depth of at least 1, a"
            " fan-out of at least 2"
        )
    if unknown := sorted(set(always) - set(subsets)):
        raise InvalidInput(
            f"always names {unknown[0]!r}, which is no subset: there are"
            f" {', '.join(map(repr, subsets))}"
        )
    parted = _without(subsets, always)
    if len(parted) < fan_out**depth:
        raise InvalidInput(
            f"{len(parted)} subsets to leave out, for {fan_out**depth} leaves: cut the data into at"
            " least as many, see cut()"
        )
    variants = []
    for name, held in _parts(parted, fan_out, depth):
        stage = name.count(".") + 1
        parent = name.rpartition(".")[0] or None
        variants.append(
            Variant(
                name,
                parent,
                epochs_at(schedule, epochs, stage, depth),
                {},
                _without(subsets, held),
                held,
            )
        )
    return _plan(variants, subsets, seen)


@values.checked
def epochs_at(schedule: AnySchedule, epochs: Whole, stage: Whole, stages: Whole) -> int:
    """The epochs of a stage of a tree; never less than 1.

    For E epochs of the first stage, at stage s of S:

    - ``flat``: E
    - ``linear``: E (S - s + 1) // S
    - ``log``: E // 2^(s - 1)
    - ``sqrt``: round(E / sqrt(s))

    :param schedule: one of these.
    :param epochs: E.
    :param stage: s, from 1.
    :param stages: S.
    """
    if epochs < 1 or not 1 <= stage <= stages:
        raise InvalidInput(
            f"{epochs} epochs at stage {stage} of {stages}: epochs and stages count from 1"
        )
    match schedule:
        case Schedule.FLAT:
            return epochs
        case Schedule.LINEAR:
            return max(epochs * (stages - stage + 1) // stages, 1)
        case Schedule.LOG:
            return max(epochs >> (stage - 1), 1)
        case Schedule.SQRT:
            return max(round(epochs / math.sqrt(stage)), 1)
    raise InvalidInput(f"there is no schedule {schedule!r}: choose one of {', '.join(Schedule)}")


@values.checked
def repeat(plan: Plan, seeds: Seeds) -> Plan:
    """The whole plan once for each seed. The seed applies to the plan's first variants. Variant
    ``1.2`` becomes ``seed-0/1.2``.

    :raises InvalidInput: a first variant of the plan has its own seed.
    """
    chosen = range(seeds) if isinstance(seeds, int) else seeds
    if plan.halving is not None:
        raise InvalidInput("halving comes last: halving(repeat(plan, seeds), ...)")
    if taken := [variant.name for variant in plan.children(None) if "seed" in variant.config]:
        raise InvalidInput(
            f"variant {taken[0]!r} has a seed of its own: repeat a plan whose variants have none"
        )
    if len(chosen) * len(plan) > arguments.MOST_VARIANTS:
        raise InvalidInput(
            f"{len(plan)} variants for {len(chosen)} seeds: give at most"
            f" {arguments.MOST_VARIANTS:,} together"
        )
    return replace(
        plan,
        variants=tuple(_seeded(variant, int(seed)) for seed in chosen for variant in plan.variants),
    )


@values.checked
def halving(
    plan: Plan,
    metric: str,
    *,
    every: arguments.Positive,
    keep: float = 1 / 3,
    mode: Literal["min", "max"] = "min",
) -> Plan:
    """A plan of the same variants in rungs of ``every`` epochs. After each rung, the best continue
    from their own states, and all other variants are dropped.

    This is successive halving (Jamieson and Talwalkar, 2016) with rungs of equal length. Variant
    ``lr=0.1`` becomes ``rung-1/lr=0.1``, and ``rung-2/lr=0.1`` continues it. A failed variant is
    dropped. The next rung begins when all variants of the rung are finished or failed.
    ``Job.epochs`` counts from 0 in each rung.

        rates = sample({"lr": LogUniform(1e-4, 1.0)}, count=27, seed=0, epochs=9)
        plan = halving(rates, "val_loss", every=3)  # 27, then 9, then 3 variants

    :param plan: variants that all fork from the start, with equal epochs.
    :param metric: what variants report and are compared by. NaN and infinity are never kept.
    :param every: the epochs of a rung. The last rung may be shorter.
    :param keep: the share of a rung that continues, rounded down, at least one variant.
    :param mode: ``"min"`` if the lowest value is the best, else ``"max"``.
    :raises InvalidInput: the plan is a tree, its epochs differ, or there is only one rung.
    """
    epochs = plan.variants[0].epochs
    if plan.halving is not None or any(
        variant.parent is not None or variant.epochs != epochs for variant in plan.variants
    ):
        raise InvalidInput(
            "halving needs variants that fork from the start and have equal epochs, as from grid()"
            " or sample(): give it such a plan"
        )
    if every >= epochs:
        raise InvalidInput(
            f"every is {every}, and the variants have {epochs} epochs, so nothing would be dropped:"
            f" give at most {epochs - 1}, or leave halving out"
        )
    lengths = [min(every, epochs - begin) for begin in range(0, epochs, every)]
    if len(lengths) * len(plan) > arguments.MOST_VARIANTS:
        raise InvalidInput(
            f"{len(plan)} variants in {len(lengths)} rungs: give at most"
            f" {arguments.MOST_VARIANTS:,} together"
        )
    variants = [
        replace(
            variant,
            name=f"rung-{rung}/{variant.name}",
            parent=f"rung-{rung - 1}/{variant.name}" if rung > 1 else None,
            epochs=length,
            config={} if rung > 1 else variant.config,
        )
        for rung, length in enumerate(lengths, 1)
        for variant in plan.variants
    ]
    return replace(plan, variants=tuple(variants), halving=Halving(metric, keep, mode))


@values.checked
def cut(samples: Samples, count: int, *, seed: Seed = 0) -> dict[str, tuple[int, ...]]:
    """Indices (or ``range(samples)``) in random order, cut into ``count`` subsets whose sizes
    differ by one at most.

    The subsets are named by their numbers, ``01`` to ``16``. The same seed gives the same cut.

    :raises InvalidInput: there are fewer samples than subsets.
    """
    indices = [int(index) for index in (range(samples) if isinstance(samples, int) else samples)]
    if not 1 <= count <= len(indices):
        raise InvalidInput(
            f"{len(indices)} samples cannot be cut into {count} subsets: give from 1 to"
            f" {len(indices)}"
        )
    random.Random(seed).shuffle(indices)
    width = len(str(count))
    return {
        f"{number:0{width}}": tuple(sorted(part))
        for number, part in enumerate(_cut(indices, count), 1)
    }


def _cut(items: Sequence[int], count: int) -> list[Sequence[int]]:
    """``count`` stretches of ``items``, with the longer ones spread evenly."""
    ends = [len(items) * number // count for number in range(count + 1)]
    return [items[begin:end] for begin, end in itertools.pairwise(ends)]


def _parts(
    held: tuple[str, ...], fan_out: int, depth: int, parent: str = ""
) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The variants below a parent that holds out ``held``, parents first, each with the subsets
    that it holds out."""
    if depth == 0:
        return
    for number, part in enumerate(_cut(range(len(held)), fan_out), 1):
        name, names = f"{parent}{number}", tuple(held[index] for index in part)
        yield name, names
        yield from _parts(names, fan_out, depth - 1, f"{name}.")


def _without(subsets: Mapping[str, object], held: Sequence[str]) -> tuple[str, ...]:
    out = frozenset(held)
    return tuple(name for name in subsets if name not in out)


def _seeded(variant: Variant, seed: int) -> Variant:
    prefix = f"seed-{seed}/"
    if variant.parent is None:
        return replace(variant, name=prefix + variant.name, config={"seed": seed, **variant.config})
    return replace(variant, name=prefix + variant.name, parent=prefix + variant.parent)


def _flat(
    names: Sequence[str], configs: Sequence[Mapping[str, Value]], epochs: int, data: Data
) -> Plan:
    """Variants that all fork from the start, on the same data."""
    split = arguments.split(data, "the data")
    variants = [
        Variant(name, None, epochs, config, split.train, split.validation)
        for name, config in zip(names, configs, strict=True)
    ]
    return Plan(tuple(variants), split.subsets, split.seen)


def _plan(
    variants: Sequence[Variant], subsets: Mapping[str, Sequence[int]], seen: Sequence[str]
) -> Plan:
    split = arguments.split({"subsets": subsets, "seen": seen}, "the data")
    return Plan(tuple(variants), split.subsets, split.seen)


def _names(configs: Sequence[Mapping[str, Value]]) -> list[str]:
    """Names such as ``lr=0.1,width=32`` if all of them are valid names; otherwise numbers."""
    told = [",".join(f"{key}={value}" for key, value in config.items()) for config in configs]
    if len(set(told)) == len(told) and all(_may_name(name) for name in told):
        return told
    return [f"grid-{number}" for number in range(1, len(configs) + 1)]


def _length(values: Sequence[Value]) -> int:
    """The length, even of a range that ``len`` cannot count."""
    return (
        len(values)
        if not isinstance(values, range)
        else max(0, -((values.start - values.stop) // values.step))
    )


def _may_name(name: str) -> bool:
    try:
        return len(check_name(name)) <= _NAME_LENGTH
    except InvalidInput:
        return False
