"""A plan: a tree of variants to train from a start, as plain data."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field, fields
from itertools import chain
from typing import Any, Self

import msgspec

from datastates import values
from datastates.errors import InvalidInput
from datastates.lineage.change.refs import check_name
from datastates.lineage.states import Value

from . import arguments

__all__ = ["Plan", "Variant", "plan_of"]

_VERSION = 1


@dataclass(frozen=True, slots=True)
class Variant:
    """One training job that forks from ``parent``, another variant of the plan, or from the plan's start if that is None.

    ``config`` changes the configuration of the parent. ``train`` and ``validation`` name subsets of the plan; ``train=None`` leaves
    the choice of data to the train function.
    """

    name: str
    parent: str | None = None
    epochs: int = 1
    config: Mapping[str, Value] = field(default_factory=dict)
    train: tuple[str, ...] | None = None
    validation: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    """A tree of variants, parents before their children; the ``subsets`` of the data by name, as indices; the ones that the start has
    ``seen``.

    The plan copies what it is given. Any integers serve as indices: ranges, arrays, tensors.

    :raises InvalidInput: names, parents, epochs or data do not fit together, or a variant is validated on data that it or an ancestor of
        it was trained on.
    """

    variants: tuple[Variant, ...]
    subsets: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    seen: tuple[str, ...] = ()
    _by_name: dict[str, Variant] = field(init=False, repr=False, compare=False)
    _size: int = field(init=False, repr=False, compare=False)
    _hashes: dict[tuple[str, ...], str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        subsets = arguments.subsets(self.subsets, "subsets")
        self._set("variants", tuple(_taken(variant) for variant in values.several(lambda each, _: each)(self.variants, "variants")))
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
            raise InvalidInput(f"the plan has no variant {name!r}: it has {_some(self._by_name)}") from None

    @property
    def size(self) -> int:
        """How many samples the subsets hold together."""
        return self._size

    def samples(self, name: str) -> int:
        """How many samples an epoch of a variant has: all of the plan's if the plan leaves the data to the train function."""
        train = self[name].train
        return self.size if train is None else len(self._row_set(train))

    def path(self, name: str) -> tuple[Variant, ...]:
        """The ancestors of a variant from the start on, and the variant itself."""
        steps = [self[name]]
        while (parent := steps[-1].parent) is not None:
            steps.append(self[parent])
        return tuple(reversed(steps))

    def children(self, name: str | None) -> tuple[Variant, ...]:
        """The variants that fork from a variant; None: from the plan's start."""
        return tuple(variant for variant in self.variants if variant.parent == name)

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
        """The variants that are validated on subsets that the start has seen, with those subsets: their validation tells less."""
        known = self._row_set(self.seen)
        leaking = {name for name, rows in self.subsets.items() if not known.isdisjoint(rows)}
        found = {variant.name: tuple(name for name in variant.validation if name in leaking) for variant in self.variants}
        return {name: bad for name, bad in found.items() if bad}

    def digest(self, name: str, base: Mapping[str, Value] | None = None) -> str:
        """A hash of everything that decides a variant's outcome: the configuration, data and epochs of its path. 32 hex digits.

        The names of variants and subsets do not matter; nor does a change of the configuration that changes none of its values. A variant
        with a ``seed`` of its own is seeded where it forks, so repeating the inherited seed does change the digest.
        """
        config, path = dict(base or {}), []
        for step in self.path(name):
            config |= step.config
            path.append((step.epochs, dict(config), "seed" in step.config, self._hash(step.train), self._hash(step.validation)))
        return hashlib.sha256(msgspec.json.encode(path, order="sorted")).hexdigest()[:32]

    def to_dict(self) -> dict[str, Any]:
        """The plan as values that JSON can hold."""
        parts = {"version": _VERSION, "variants": self.variants, "subsets": self.subsets, "seen": self.seen}
        plain: dict[str, Any] = msgspec.to_builtins(parts)
        return plain

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Self:
        """The plan that ``to_dict`` made.

        :raises InvalidInput: it is not a plan; says where.
        """
        try:
            form = msgspec.convert(plain, _Form)
            for index, given in enumerate(plain["variants"]):
                _check_fields(index, given)
        except msgspec.ValidationError as exc:
            raise InvalidInput(f"not a plan: {exc}") from exc
        if form.version != _VERSION:
            raise InvalidInput(f"a plan of version {form.version}: this release reads version {_VERSION}; upgrade datastates")
        return cls(form.variants, form.subsets, form.seen)

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)  # frozen for everybody else

    def _row_set(self, names: Iterable[str]) -> set[int]:
        try:
            return set().union(*(self.subsets[name] for name in names))
        except KeyError as exc:
            raise InvalidInput(f"the plan has no subset {exc.args[0]!r}: it has {_some(self.subsets)}") from None

    def _hash(self, names: tuple[str, ...] | None) -> str | None:
        if names is None:
            return None
        if names not in self._hashes:
            self._hashes[names] = hashlib.sha256(msgspec.json.encode(self.rows(names))).hexdigest()
        return self._hashes[names]


def plan_of(value: object, what: str) -> Plan:
    """A plan, taken as an argument.

    :raises InvalidInput: it is not one.
    """
    if not isinstance(value, Plan):
        raise InvalidInput(f"{what} is {values.shown(value)}: give a Plan")
    return value


class _Form(msgspec.Struct, forbid_unknown_fields=True):
    """The form that JSON must have."""

    variants: tuple[Variant, ...]
    version: int = _VERSION
    subsets: dict[str, tuple[int, ...]] = {}
    seen: tuple[str, ...] = ()


def _check_fields(index: int, given: Mapping[str, Any]) -> None:
    """Refuse unknown fields: a misspelt one would silently have its default."""
    known = [each.name for each in fields(Variant)]
    if unknown := sorted(set(given).difference(known)):
        raise InvalidInput(f"not a plan: variants[{index}] has {_some(unknown)}; a variant has {_some(known)}")


def _taken(variant: object) -> Variant:
    """The variant with exact plain values, which a plan's file and the lineage can hold."""
    if not isinstance(variant, Variant):
        raise InvalidInput(f"the plan has {values.shown(variant)} among its variants: make a Variant of it")
    name = values.string(variant.name, "the name of a variant")
    config = arguments.configuration(variant.config, f"the configuration of variant {name!r}")
    try:
        epochs = values.integer(variant.epochs, "epochs", least=1)
    except InvalidInput:
        raise InvalidInput(f"variant {name!r} has {values.shown(variant.epochs)} epochs: give it a whole number, at least 1") from None
    train = values.patterns(variant.train, f"what variant {name!r} is trained on")
    validation = values.patterns(variant.validation, f"what variant {name!r} is validated on")
    parent = None if variant.parent is None else values.string(variant.parent, f"the parent of variant {name!r}")
    return Variant(name, parent, epochs, config, None if train is None else tuple(train), tuple(validation or ()))


def _check(plan: Plan) -> None:
    if not plan.variants:
        raise InvalidInput("the plan has no variants: add one")
    if unknown := [name for name in plan.seen if name not in plan.subsets]:
        raise InvalidInput(f"seen names {_some(unknown)}, which is no subset: there are {_some(plan.subsets)}")
    sharing = _sharing(plan.subsets)
    trained: dict[str, frozenset[str]] = {}
    for variant in plan.variants:
        check_name(variant.name)
        _check_names(plan, variant, trained)
        _check_data(plan, variant, trained, sharing)


def _check_names(plan: Plan, variant: Variant, before: Container[str]) -> None:
    if variant.name in before:
        raise InvalidInput(f"two variants are called {variant.name!r}: give each its own name")
    if variant.parent is not None and variant.parent not in before:
        raise InvalidInput(f"variant {variant.name!r} comes from {variant.parent!r}, which is no variant before it")
    if unknown := [name for name in (*(variant.train or ()), *variant.validation) if name not in plan.subsets]:
        raise InvalidInput(f"variant {variant.name!r} uses {_some(unknown)}, which is no subset: there are {_some(plan.subsets)}")
    if variant.train is not None and not any(plan.subsets[name] for name in variant.train):
        raise InvalidInput(f"variant {variant.name!r} is trained on nothing: name subsets that hold samples, or leave train None")


def _check_data(plan: Plan, variant: Variant, trained: dict[str, frozenset[str]], sharing: Mapping[str, frozenset[str]]) -> None:
    """Check the data of one variant. ``trained`` maps each earlier variant to the subsets that it and its ancestors were trained on; this
    one's are added.
    """
    known = frozenset(variant.train or ())
    if variant.parent is not None:
        known |= trained[variant.parent]
    if not known.isdisjoint(chain.from_iterable(sharing[name] for name in variant.validation)):
        leaked = plan._row_set(known) & plan._row_set(variant.validation)
        raise InvalidInput(
            f"variant {variant.name!r} is validated on {len(leaked)} samples that it or an ancestor is trained on, {min(leaked)} among them"
        )
    trained[variant.name] = known


def _sharing(subsets: Mapping[str, tuple[int, ...]]) -> dict[str, frozenset[str]]:
    """For each subset, the subsets that share a sample with it (itself included, if it is not empty)."""
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
    return ", ".join(listed[:8]) + (f" and {len(listed) - 8} more" if len(listed) > 8 else "") or "none"
