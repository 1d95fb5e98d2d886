"""The arguments of studies and of the builders of plans, taken as plain values within the bounds of a study, or refused with a message that
says what is accepted.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import islice
from typing import TYPE_CHECKING, Any

from datastates import values
from datastates.errors import InvalidInput
from datastates.lineage.states import Value

if TYPE_CHECKING:
    from datastates.repository import Repository

__all__ = [
    "MOST_DEPTH",
    "MOST_SAMPLES",
    "MOST_VARIANTS",
    "Split",
    "configuration",
    "counted",
    "folds",
    "names",
    "plain_values",
    "positive",
    "repository",
    "samples",
    "seed",
    "split",
    "subsets",
    "tried",
    "variants",
    "whole",
]

MOST_VARIANTS = 1_000_000
"""The most variants that a plan made here may have, and the most subsets that its data may have."""
MOST_DEPTH = 20
MOST_SAMPLES = 100_000_000
_BITS = 2**63


@dataclass(frozen=True, slots=True)
class Split:
    """What the variants of a plan are trained and validated on; ``train=None`` leaves that to the train function."""

    subsets: dict[str, tuple[int, ...]]
    train: tuple[str, ...] | None
    validation: tuple[str, ...]
    seen: tuple[str, ...]


def split(value: object, what: str) -> Split:
    """The data of a plan: some of ``subsets``, ``train``, ``validation`` and ``seen``, by name."""
    given = values.named(value, what)
    known = [each.name for each in fields(Split)]
    if unknown := sorted(set(given).difference(known)):
        raise InvalidInput(f"a plan takes no {unknown[0]!r}: its data are {', '.join(sorted(known))}")
    train = None if given.get("train") is None else names(given["train"], "train")
    validation, seen = (names(given.get(name), name) for name in ("validation", "seen"))
    return Split(subsets(given.get("subsets", {}), "subsets"), train, validation, seen)


def repository(value: object, what: str) -> Repository:
    """A repository that ``datastates.open`` returned."""
    from datastates.repository import Repository  # plans do not need it

    if not isinstance(value, Repository):
        raise InvalidInput(f"{what} is {values.shown(value)}: give what datastates.open returned")
    return value


def samples(value: object, what: str) -> int:
    """A number of samples, at least 1."""
    return values.integer(value, what, least=1, most=MOST_SAMPLES)


def subsets(value: object, what: str) -> dict[str, tuple[int, ...]]:
    """Parts of the data by name, each as indices: any integers from 0, in ranges, arrays or tensors."""
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
        raise InvalidInput(f"{what} holds what is no index ({exc}): give it integers from 0") from exc
    if is_over or len(found) > most:
        raise InvalidInput(f"with {what} there are over {MOST_SAMPLES:,} indices: a plan has at most that many")
    if found and min(found) < 0:
        raise InvalidInput(f"{what} holds {values.shown(min(found))}: indices count from 0")
    if found and max(found) >= _BITS:
        raise InvalidInput(f"{what} holds {values.shown(max(found))}: an index has at most 63 bits")
    return found


def configuration(value: object, what: str) -> dict[str, Value]:
    """A configuration: plain, finite values by name."""
    return {values.string(key, f"a name in {what}"): _config_value(each, str(key), what) for key, each in values.named(value, what).items()}


def _config_value(value: object, key: str, what: str) -> Value:
    """One value of a configuration ``what``."""
    try:
        found = values.string(value, key) if isinstance(value, str) else values.plain(value, key)
    except InvalidInput as exc:
        raise InvalidInput(f"{what} has {key}={values.shown(value)}: give a text, a number, a truth value or None ({exc})") from None
    if isinstance(found, int) and found >= _BITS:
        raise InvalidInput(f"{what} has {key}={value}: whole numbers have 64 bits here; write it as a text")
    if isinstance(found, float) and not math.isfinite(found):
        raise InvalidInput(f"{what} has {key}={value}: give a finite number")
    return found


def positive(value: object, what: str) -> int:
    """A whole number, at least 1."""
    return values.integer(value, what, least=1, most=_BITS - 1)


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
    found: list[Value] = values.several(lambda each, of: values.string(each, of) if isinstance(each, str) else values.plain(each, of))(
        value, what
    )
    return tuple(found)


def tried(value: object, what: str) -> dict[str, Sequence[Value]]:
    """The values to try for each key of a configuration."""
    return {key: _some_values(key, each) for key, each in values.named(value, what).items()}


def _some_values(key: str, value: object) -> Sequence[Value]:
    try:
        found = plain_values(value, key)
    except InvalidInput as exc:
        raise InvalidInput(f"{key}={values.shown(value)}: give a sequence of values to try ({exc})") from None
    if not found:
        raise InvalidInput(f"{key}=[]: give a sequence of values to try")
    return found


def folds(value: object, what: str) -> int | dict[str, object]:
    """Subsets by name, or the number of subsets to make."""
    return values.named(value, what) if isinstance(value, Mapping) else variants(value, what)
