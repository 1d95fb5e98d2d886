"""``Plan`` is a tree of variants to train from a start, as plain data.

The file also has its parts (``Split``, ``Variant``) and the checks of arguments that studies share.
"""

from __future__ import annotations

import hashlib
import math
import operator
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import chain, islice
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

import msgspec

from datastates import values
from datastates.errors import InvalidInput
from datastates.lineage.write.refs import check_name
from datastates.values import Value

if TYPE_CHECKING:
    from datastates.repository import Repository

MOST_VARIANTS = 1_000_000
"""The most variants that a plan made here may have, and the most subsets that its data may have."""

MOST_DEPTH = 20
MOST_SAMPLES = 100_000_000
_BITS = 2**63
_VERSION = 1


@dataclass(frozen=True, slots=True)
class Split:
    """The subsets that the variants of a plan use for training and validation. With ``train=None``,
    the train function chooses its data."""

    subsets: dict[str, tuple[int, ...]]
    train: tuple[str, ...] | None
    validation: tuple[str, ...]
    seen: tuple[str, ...]


def split(value: object, what: str) -> Split:
    """The data of a plan: some of ``subsets``, ``train``, ``validation`` and ``seen``, by name."""
    given = values.named(value, what)
    known = [each.name for each in fields(Split)]
    if unknown := sorted(set(given).difference(known)):
        raise InvalidInput(
            f"a plan takes no {unknown[0]!r}: its data are {', '.join(sorted(known))}"
        )
    train = None if given.get("train") is None else names(given["train"], "train")
    validation, seen = (names(given.get(name), name) for name in ("validation", "seen"))
    return Split(check_subsets(given.get("subsets", {}), "subsets"), train, validation, seen)


def repository(value: object, what: str) -> Repository:
    """A repository that ``datastates.open`` returned."""
    from datastates.repository import Repository  # plans do not need it

    if not isinstance(value, Repository):
        raise InvalidInput(f"{what} is {values.shown(value)}: give what datastates.open returned")
    return value


AnyRepository = Annotated["Repository", repository]


def samples(value: object, what: str) -> int:
    """A number of samples, at least 1."""
    return values.integer(value, what, least=1, most=MOST_SAMPLES)


Samples = Annotated[int, samples]


def check_subsets(value: object, what: str) -> dict[str, tuple[int, ...]]:
    """Parts of the data by name, each as indices: any integers from 0, in ranges, arrays or
    tensors."""
    found: dict[str, tuple[int, ...]] = {}
    left = MOST_SAMPLES
    for name, rows in values.named(value, what).items():
        found[name] = _indices(rows, f"subset {name!r}", left)
        left -= len(found[name])
    return found


def _indices(rows: Any, what: str, most: int) -> tuple[int, ...]:
    try:
        is_over = isinstance(rows, range) and bool(rows[most:])
        found = () if is_over else tuple(operator.index(row) for row in islice(rows, most + 1))
    except Exception as exc:
        raise InvalidInput(
            f"{what} holds what is no index ({exc}): give it integers from 0"
        ) from exc
    if is_over or len(found) > most:
        raise InvalidInput(
            f"with {what} there are over {MOST_SAMPLES:,} indices: a plan has at most that many"
        )
    if found and min(found) < 0:
        raise InvalidInput(f"{what} holds {values.shown(min(found))}: indices count from 0")
    if found and max(found) >= _BITS:
        raise InvalidInput(f"{what} holds {values.shown(max(found))}: an index has at most 63 bits")
    return found


def configuration(value: object, what: str) -> dict[str, Value]:
    """A configuration: plain, finite values by name."""
    return {
        values.string(key, f"a name in {what}"): _config_value(each, str(key), what)
        for key, each in values.named(value, what).items()
    }


Configuration = Annotated[Mapping[str, Value], configuration]


def _config_value(value: object, key: str, what: str) -> Value:
    """One value of a configuration ``what``."""
    try:
        found = values.string(value, key) if isinstance(value, str) else values.plain(value, key)
    except InvalidInput as exc:
        raise InvalidInput(
            f"{what} has {key}={values.shown(value)}: give a text, a number, a truth value or None"
            f" ({exc})"
        ) from None
    if isinstance(found, int) and found >= _BITS:
        raise InvalidInput(
            f"{what} has {key}={value}: whole numbers have 64 bits here. Write it as a text"
        )
    if isinstance(found, float) and not math.isfinite(found):
        raise InvalidInput(f"{what} has {key}={value}: give a finite number")
    return found


def positive(value: object, what: str) -> int:
    """A whole number, at least 1."""
    return values.integer(value, what, least=1, most=_BITS - 1)


Positive = Annotated[int, positive]


def whole(value: object, what: str) -> int:
    """A whole number; the function itself checks anything beyond that."""
    return values.integer(value, what, most=_BITS - 1)


def variants(value: object, what: str) -> int:
    """A number of variants, or of subsets."""
    return values.integer(value, what, most=MOST_VARIANTS)


def seed(value: object, what: str) -> int:
    """A whole number that a state can hold."""
    return values.integer(value, what, least=-_BITS, most=_BITS - 1)


def counted(most: int) -> values.Check:
    """A check for whole numbers, given as numbers or as their count from 0 on."""

    def check(value: object, what: str) -> Sequence[int]:
        try:
            values.iterable(value, what)
        except InvalidInput:
            return range(values.integer(value, what, least=0, most=most))
        if isinstance(value, range) and value[most:]:
            raise InvalidInput(f"{what} has over {most:,} numbers: give at most that many")
        found: list[int] = values.several(seed)(value, what)
        return found

    return check


def names(value: object, what: str) -> tuple[str, ...]:
    """The names of subsets; a single text is one name."""
    return tuple(values.patterns(value, what) or ())


def plain_values(value: object, what: str) -> Sequence[Value]:
    """The plain values of a configuration; a range stays a range."""
    if isinstance(value, range):
        if value[_BITS - 1 :]:
            raise InvalidInput(f"{what} is a range of more than 64 bits: give a shorter one")
        return value
    found: list[Value] = values.several(
        lambda each, of: (
            values.string(each, of) if isinstance(each, str) else values.plain(each, of)
        )
    )(value, what)
    return tuple(found)


def tried(value: object, what: str) -> dict[str, Sequence[Value]]:
    """The values to try for each key of a configuration."""
    return {key: _some_values(key, each) for key, each in values.named(value, what).items()}


def _some_values(key: str, value: object) -> Sequence[Value]:
    try:
        found = plain_values(value, key)
    except InvalidInput as exc:
        raise InvalidInput(
            f"{key}={values.shown(value)}: give a sequence of values to try ({exc})"
        ) from None
    if not found:
        raise InvalidInput(f"{key}=[]: give a sequence of values to try")
    return found


def folds(value: object, what: str) -> int | dict[str, object]:
    """Subsets by name, or the number of subsets to make."""
    return values.named(value, what) if isinstance(value, Mapping) else variants(value, what)


# --- Plan ---


@dataclass(frozen=True, slots=True)
class Variant:
    """One training job that forks from ``parent``, another variant of the plan, or from the plan's
    start if that is None.

    ``config`` changes the configuration of the parent. ``train`` and ``validation`` name subsets of
    the plan; ``train=None`` leaves the choice of data to the train function.
    """

    name: str
    parent: str | None = None
    epochs: int = 1
    config: Mapping[str, Value] = field(default_factory=dict)
    train: tuple[str, ...] | None = None
    validation: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Halving:
    """The rule by which variants continue: after each rung, the share ``keep`` with the best values
    of ``metric``, at least one. Values that are not finite are never kept."""

    metric: str
    keep: float
    mode: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        keep = values.number(self.keep, "keep")
        if not 0 < keep < 1:
            raise InvalidInput(f"keep is {keep:g}: give a share between 0 and 1, such as 1/3")
        if self.mode not in ("min", "max"):
            raise InvalidInput(f"mode is {values.shown(self.mode)}: choose 'min' or 'max'")
        # frozen for everybody else
        object.__setattr__(self, "metric", values.key(self.metric, "the metric of halving"))
        object.__setattr__(self, "keep", keep)

    def value(self, name: str, metrics: Mapping[str, float]) -> float:
        """The metric of a variant's result.

        :raises InvalidInput: the variant did not report it.
        """
        if self.metric not in metrics:
            raise InvalidInput(
                f"halving compares {self.metric!r}, and variant {name!r} reported"
                f" {_some(sorted(metrics))}: report it, or explore again with halving by another"
                " metric. Finished variants are not repeated"
            )
        return metrics[self.metric]

    def best(self, found: Mapping[str, float], count: int) -> list[str]:
        """The variants that continue of ``count`` in a rung, given the values of the finished ones
        in the order of the plan. The earlier of two equal ones is better."""
        sign = 1 if self.mode == "min" else -1
        finite = [name for name, value in found.items() if math.isfinite(value)]
        # 1e-9: a third of nine is three
        most = max(1, math.floor(count * self.keep + 1e-9))
        return sorted(finite, key=lambda name: sign * found[name])[:most]


@dataclass(frozen=True, slots=True)
class Plan:
    """A tree of variants, parents before their children.

    ``subsets`` are indices of the data by name. The start was trained on those in ``seen``. With
    ``halving``, a variant continues the training of its parent, and only if the parent was among
    the best of its rung.

    The plan copies its arguments. Indices can be ranges, arrays or tensors of integers.

    :raises InvalidInput: names, parents, epochs or data do not fit together, or a variant is
        validated on data that it or an ancestor of it was trained on.
    """

    variants: tuple[Variant, ...]
    subsets: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    seen: tuple[str, ...] = ()
    halving: Halving | None = None
    _by_name: dict[str, Variant] = field(init=False, repr=False, compare=False)
    _size: int = field(init=False, repr=False, compare=False)
    _hashes: dict[tuple[str, ...], str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        subsets = check_subsets(self.subsets, "subsets")
        self._set(
            "variants",
            tuple(
                _taken(variant)
                for variant in values.several(lambda each, _: each)(self.variants, "variants")
            ),
        )
        self._set("subsets", subsets)
        self._set("seen", tuple(values.patterns(self.seen, "seen") or ()))
        self._set("_by_name", {variant.name: variant for variant in self.variants})
        self._set("_size", len(set().union(*subsets.values())))
        self._set("_hashes", {})
        _check(self)

    def __len__(self) -> int:
        return len(self.variants)

    def __getitem__(self, name: str) -> Variant:
        try:
            return self._by_name[name]
        except KeyError:
            raise InvalidInput(
                f"the plan has no variant {name!r}: it has {_some(self._by_name)}"
            ) from None

    @property
    def size(self) -> int:
        """How many samples the subsets hold together."""
        return self._size

    def samples(self, name: str) -> int:
        """How many samples an epoch of a variant has: all of the plan's if the plan leaves the
        data to the train function."""
        train = self[name].train
        return self.size if train is None else len(self._row_set(train))

    def path(self, name: str) -> tuple[Variant, ...]:
        """The ancestors of a variant from the start on, and the variant itself."""
        steps = [self[name]]
        while (parent := steps[-1].parent) is not None:
            steps.append(self[parent])
        return tuple(reversed(steps))

    def children(self, name: str | None) -> tuple[Variant, ...]:
        """The variants that fork from a variant, or from the plan's start if ``name`` is None."""
        return tuple(variant for variant in self.variants if variant.parent == name)

    def rungs(self) -> list[list[str]]:
        """The names of the variants by the number of their ancestors, each in the order of the
        plan."""
        found: list[list[str]] = []
        rung_of: dict[str | None, int] = {None: -1}
        for variant in self.variants:
            rung_of[variant.name] = number = rung_of[variant.parent] + 1
            if number == len(found):
                found.append([])
            found[number].append(variant.name)
        return found

    def decided(
        self,
        recorded: Container[str],
        done: Mapping[str, Mapping[str, float]],
        lost: Container[str],
    ) -> list[list[str]]:
        """The variants that are trained of each rung, up to the last rung for which that is known.
        Without halving, one rung with all variants.

        :param recorded: the variants of rungs that were decided before. They stay decided.
        :param done: the metrics of the finished variants.
        :param lost: the variants that have failed.
        :raises InvalidInput: a finished variant has not the metric.
        """
        if self.halving is None:
            return [list(self._by_name)]
        first, *later = self.rungs()
        chosen = [first]
        for rung in later:
            before = chosen[-1]
            found = {name: self.halving.value(name, done[name]) for name in before if name in done}
            names = [name for name in rung if name in recorded]
            if not names:
                if any(name not in done and name not in lost for name in before):
                    break
                best = set(self.halving.best(found, len(before)))
                names = [name for name in rung if self._by_name[name].parent in best]
            chosen.append(names)
        return chosen

    def expected(self) -> list[str]:
        """As many variants of each rung as will be trained, or all without halving."""
        metric = self.halving.metric if self.halving else ""
        return list(chain(*self.decided((), {name: {metric: 0.0} for name in self._by_name}, ())))

    def config(self, name: str, base: Mapping[str, Value] | None = None) -> dict[str, Value]:
        """``base`` with the changes of the variant's whole path."""
        merged = dict(base or {})
        for variant in self.path(name):
            merged.update(variant.config)
        return merged

    def rows(self, names: Iterable[str]) -> tuple[int, ...]:
        """The indices of some subsets, ascending.

        :raises InvalidInput: there is no such subset.
        """
        return tuple(sorted(self._row_set(names)))

    def leaks(self) -> dict[str, tuple[str, ...]]:
        """The variants that are validated on subsets that the start has seen, with those subsets.

        The validation of these variants is less meaningful.
        """
        known = self._row_set(self.seen)
        leaking = {name for name, rows in self.subsets.items() if not known.isdisjoint(rows)}
        found = {
            variant.name: tuple(name for name in variant.validation if name in leaking)
            for variant in self.variants
        }
        return {name: bad for name, bad in found.items() if bad}

    def digest(self, name: str, base: Mapping[str, Value] | None = None) -> str:
        """A hash of everything that decides a variant's outcome: the configuration, data and epochs
        of its path. 32 hex digits.

        Names of variants and subsets have no effect. A change of the configuration has an effect
        only if it changes a value. A variant with its own ``seed`` is seeded at its fork, so a
        repeated seed changes the digest.
        """
        config, path = dict(base or {}), []
        for step in self.path(name):
            config |= step.config
            path.append(
                (
                    step.epochs,
                    dict(config),
                    "seed" in step.config,
                    self._hash(step.train),
                    self._hash(step.validation),
                )
            )
        return hashlib.sha256(msgspec.json.encode(path, order="sorted")).hexdigest()[:32]

    def to_dict(self) -> dict[str, Any]:
        """The plan as values that JSON can hold."""
        parts = {
            "version": _VERSION,
            "variants": self.variants,
            "subsets": self.subsets,
            "seen": self.seen,
            **({} if self.halving is None else {"halving": self.halving}),
        }
        plain: dict[str, Any] = msgspec.to_builtins(parts)
        return plain

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Self:
        """The plan that ``to_dict`` made.

        :raises InvalidInput: it is not a plan. The text names the place.
        """
        try:
            form = msgspec.convert(plain, _Form)
            for index, given in enumerate(plain["variants"]):
                _check_fields(index, given)
        except msgspec.ValidationError as exc:
            raise InvalidInput(f"not a plan: {exc}") from exc
        if form.version != _VERSION:
            raise InvalidInput(
                f"a plan of version {form.version}: this release reads version {_VERSION}; upgrade"
                " datastates"
            )
        return cls(form.variants, form.subsets, form.seen, form.halving)

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)  # frozen for everybody else

    def _row_set(self, names: Iterable[str]) -> set[int]:
        try:
            return set().union(*(self.subsets[name] for name in names))
        except KeyError as exc:
            raise InvalidInput(
                f"the plan has no subset {exc.args[0]!r}: it has {_some(self.subsets)}"
            ) from None

    def _hash(self, names: tuple[str, ...] | None) -> str | None:
        if names is None:
            return None
        if names not in self._hashes:
            self._hashes[names] = hashlib.sha256(msgspec.json.encode(self.rows(names))).hexdigest()
        return self._hashes[names]


class _Form(msgspec.Struct, forbid_unknown_fields=True):
    """The form that JSON must have."""

    variants: tuple[Variant, ...]
    version: int = _VERSION
    subsets: dict[str, tuple[int, ...]] = {}
    seen: tuple[str, ...] = ()
    halving: Halving | None = None


def _check_fields(index: int, given: Mapping[str, Any]) -> None:
    """Refuse unknown fields: a misspelt one would silently have its default."""
    known = [each.name for each in fields(Variant)]
    if unknown := sorted(set(given).difference(known)):
        raise InvalidInput(
            f"not a plan: variants[{index}] has {_some(unknown)}; a variant has {_some(known)}"
        )


def _taken(variant: object) -> Variant:
    """The variant with exact plain values, which a plan's file and the lineage can hold."""
    if not isinstance(variant, Variant):
        raise InvalidInput(
            f"the plan has {values.shown(variant)} among its variants: make a Variant of it"
        )
    name = values.string(variant.name, "the name of a variant")
    config = configuration(variant.config, f"the configuration of variant {name!r}")
    try:
        epochs = values.integer(variant.epochs, "epochs", least=1)
    except InvalidInput:
        raise InvalidInput(
            f"variant {name!r} has {values.shown(variant.epochs)} epochs: give it a whole number,"
            " at least 1"
        ) from None
    train = values.patterns(variant.train, f"what variant {name!r} is trained on")
    validation = values.patterns(variant.validation, f"what variant {name!r} is validated on")
    parent = (
        None
        if variant.parent is None
        else values.string(variant.parent, f"the parent of variant {name!r}")
    )
    return Variant(
        name,
        parent,
        epochs,
        config,
        None if train is None else tuple(train),
        tuple(validation or ()),
    )


def _check(plan: Plan) -> None:
    if not plan.variants:
        raise InvalidInput("the plan has no variants: add one")
    if unknown := [name for name in plan.seen if name not in plan.subsets]:
        raise InvalidInput(
            f"seen names {_some(unknown)}, which is no subset: there are {_some(plan.subsets)}"
        )
    _check_halving(plan)
    sharing = _sharing(plan.subsets)
    trained: dict[str, frozenset[str]] = {}
    for variant in plan.variants:
        check_name(variant.name)
        _check_names(plan, variant, trained)
        _check_data(plan, variant, trained, sharing)


def _check_halving(plan: Plan) -> None:
    if plan.halving is None:
        return
    if not isinstance(plan.halving, Halving):
        raise InvalidInput(
            f"halving is {values.shown(plan.halving)}: make the plan with halving(plan, ...)"
        )
    parents = Counter(variant.parent for variant in plan.variants if variant.parent is not None)
    if several := [parent for parent, count in parents.items() if count > 1]:
        raise InvalidInput(
            f"variant {several[0]!r} is continued by several variants: with halving, a variant"
            " has one continuation"
        )


def _check_names(plan: Plan, variant: Variant, before: Container[str]) -> None:
    if variant.name in before:
        raise InvalidInput(f"two variants are called {variant.name!r}: give each its own name")
    if variant.parent is not None and variant.parent not in before:
        raise InvalidInput(
            f"variant {variant.name!r} comes from {variant.parent!r}, which is no variant before it"
        )
    if unknown := [
        name for name in (*(variant.train or ()), *variant.validation) if name not in plan.subsets
    ]:
        raise InvalidInput(
            f"variant {variant.name!r} uses {_some(unknown)}, which is no subset: there are"
            f" {_some(plan.subsets)}"
        )
    if variant.train is not None and not any(plan.subsets[name] for name in variant.train):
        raise InvalidInput(
            f"variant {variant.name!r} is trained on nothing: name subsets that hold samples, or"
            " leave train None"
        )


def _check_data(
    plan: Plan,
    variant: Variant,
    trained: dict[str, frozenset[str]],
    sharing: Mapping[str, frozenset[str]],
) -> None:
    """Check the data of one variant. ``trained`` maps each earlier variant to the subsets that it
    and its ancestors were trained on; this one's are added.
    """
    known = frozenset(variant.train or ())
    if variant.parent is not None:
        known |= trained[variant.parent]
    if not known.isdisjoint(chain.from_iterable(sharing[name] for name in variant.validation)):
        leaked = plan._row_set(known) & plan._row_set(variant.validation)
        raise InvalidInput(
            f"variant {variant.name!r} is validated on {len(leaked)} samples that it or an ancestor"
            f" is trained on, {min(leaked)} among them"
        )
    trained[variant.name] = known


def _sharing(subsets: Mapping[str, tuple[int, ...]]) -> dict[str, frozenset[str]]:
    """For each subset, the subsets that share a sample with it (itself included, if it is not
    empty)."""
    holders: dict[int, list[str]] = {}
    counts = Counter(row for rows in subsets.values() for row in set(rows))
    for name, rows in subsets.items():
        for row in rows:
            if counts[row] > 1:
                holders.setdefault(row, []).append(name)
    found = {name: {name} if rows else set() for name, rows in subsets.items()}
    for names in {tuple(each) for each in holders.values()}:
        for name in names:
            found[name].update(names)
    return {name: frozenset(names) for name, names in found.items()}


def _some(names: Iterable[str]) -> str:
    """The first few names, for messages."""
    listed = [repr(name) for name in names]
    return (
        ", ".join(listed[:8]) + (f" and {len(listed) - 8} more" if len(listed) > 8 else "")
        or "none"
    )
