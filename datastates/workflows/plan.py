"""What is to be trained from a start: a tree of variants, as plain data."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import msgspec

from datastates.errors import InvalidInput
from datastates.lineage.refs import check_name
from datastates.lineage.states import Value

__all__ = ["Plan", "Variant"]


@dataclass(frozen=True, slots=True)
class Variant:
    """One training job forked from ``parent``, another variant of the plan, or from the plan's start if that is None.

    ``config`` changes the configuration of the parent. ``train`` and ``validation`` name subsets of the plan's; ``train=None`` leaves
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
    """Variants, parents before their children; the ``subsets`` of the data by name, as indices; what the start has ``seen`` of them.

    :raises InvalidInput: names, parents, epochs or data do not fit together, or a variant is validated on what it or an ancestor of it
        was trained on.
    """

    variants: tuple[Variant, ...]
    subsets: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    seen: tuple[str, ...] = ()
    _by_name: dict[str, Variant] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_by_name", {variant.name: variant for variant in self.variants})
        _check(self)

    def __len__(self) -> int:
        return len(self.variants)

    def __getitem__(self, name: str) -> Variant:
        try:
            return self._by_name[name]
        except KeyError:
            raise InvalidInput(f"the plan has no variant {name!r}: it has {', '.join(self._by_name)}") from None

    def path(self, name: str) -> tuple[Variant, ...]:
        """A variant's ancestors from the start on, and itself."""
        variant = self[name]
        return (*self.path(variant.parent), variant) if variant.parent is not None else (variant,)

    def config(self, name: str, base: Mapping[str, Value] | None = None) -> dict[str, Value]:
        """``base`` with the changes of the variant's whole path."""
        merged = dict(base or {})
        for variant in self.path(name):
            merged.update(variant.config)
        return merged

    def rows(self, names: Sequence[str]) -> tuple[int, ...]:
        """The indices of some subsets, ascending."""
        return tuple(sorted({row for name in names for row in self.subsets[name]}))

    def leaks(self) -> dict[str, tuple[str, ...]]:
        """Variants that are validated on what the start has seen, and the subsets: their validation tells less."""
        known = set(self.rows(self.seen))
        found: dict[str, tuple[str, ...]] = {}
        for variant in self.variants:
            if bad := tuple(name for name in variant.validation if not known.isdisjoint(self.subsets[name])):
                found[variant.name] = bad
        return found

    def digest(self, name: str, base: Mapping[str, Value] | None = None) -> str:
        """What decides a variant's outcome, hashed: its path's configuration, data and epochs. 32 hex digits."""
        path = [(step.epochs, dict(step.config), self._data(step.train), self._data(step.validation)) for step in self.path(name)]
        return hashlib.sha256(msgspec.json.encode([dict(base or {}), path], order="sorted")).hexdigest()[:32]

    def to_dict(self) -> dict[str, Any]:
        """As JSON knows it."""
        plain: dict[str, Any] = msgspec.to_builtins({"variants": self.variants, "subsets": self.subsets, "seen": self.seen})
        return plain

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Self:
        """Back from ``to_dict``.

        :raises InvalidInput: it is no plan; says where.
        """
        try:
            variants = msgspec.convert(plain.get("variants", ()), tuple[Variant, ...])
            subsets = msgspec.convert(plain.get("subsets", {}), dict[str, tuple[int, ...]])
            return cls(variants, subsets, msgspec.convert(plain.get("seen", ()), tuple[str, ...]))
        except msgspec.ValidationError as exc:
            raise InvalidInput(f"not a plan: {exc}") from exc

    def _data(self, names: tuple[str, ...] | None) -> list[int] | None:
        return None if names is None else list(self.rows(names))


def _check(plan: Plan) -> None:
    if not plan.variants:
        raise InvalidInput("the plan has no variants: add one")
    if unknown := [name for name in plan.seen if name not in plan.subsets]:
        raise InvalidInput(f"seen names {', '.join(map(repr, unknown))}, which is no subset: there are {', '.join(plan.subsets) or 'none'}")
    trained: dict[str, set[int]] = {}
    for variant in plan.variants:
        _check_variant(plan, variant, trained)


def _check_variant(plan: Plan, variant: Variant, trained: dict[str, set[int]]) -> None:
    """``trained``: what each variant before this one was trained on, its ancestors' data included; this one is added."""
    check_name(variant.name)
    if variant.name in trained:
        raise InvalidInput(f"two variants are called {variant.name!r}: give each its own name")
    if variant.parent is not None and variant.parent not in trained:
        raise InvalidInput(f"variant {variant.name!r} comes from {variant.parent!r}, which is no variant before it")
    if variant.epochs < 1:
        raise InvalidInput(f"variant {variant.name!r} has {variant.epochs} epochs: give it at least 1")
    for key, value in variant.config.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise InvalidInput(f"variant {variant.name!r} has {key}={value}: give a finite number")
    for name in (*(variant.train or ()), *variant.validation):
        if name not in plan.subsets:
            raise InvalidInput(f"variant {variant.name!r} uses {name!r}, which is no subset: there are {', '.join(plan.subsets) or 'none'}")
    before = trained[variant.parent] if variant.parent is not None else set()
    known = before | set(plan.rows(variant.train or ()))
    if leaked := known & set(plan.rows(variant.validation)):
        raise InvalidInput(
            f"variant {variant.name!r} is validated on {len(leaked)} samples that it or an ancestor is trained on, {min(leaked)} among them"
        )
    trained[variant.name] = known
