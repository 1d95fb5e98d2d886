"""What the makers of plans take, as plain values within bounds that a study may have; or a refusal that says what would do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from datastates import values
from datastates.errors import InvalidInput
from datastates.lineage.states import Value

__all__ = [
    "MOST_DEPTH",
    "MOST_SAMPLES",
    "MOST_VARIANTS",
    "counted",
    "folds",
    "names",
    "plain_values",
    "positive",
    "seed",
    "tried",
    "variants",
    "whole",
]

MOST_VARIANTS = 1_000_000
"""So many may a plan made here have; its data may have so many subsets."""
MOST_DEPTH = 20
MOST_SAMPLES = 100_000_000
_BITS = 2**63


def positive(value: object, what: str) -> int:
    """A whole number from 1."""
    return values.integer(value, what, least=1, most=_BITS - 1)


def whole(value: object, what: str) -> int:
    """A whole number; what it must be beyond that, the function itself says."""
    return values.integer(value, what, most=_BITS - 1)


def variants(value: object, what: str) -> int:
    """So many variants, or subsets."""
    return values.integer(value, what, most=MOST_VARIANTS)


def seed(value: object, what: str) -> int:
    """A whole number that a state can hold."""
    return values.integer(value, what, least=-_BITS, most=_BITS - 1)


def counted(most: int) -> values.Check:
    """Whole numbers, or how many there are from 0 on."""

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
    """The names of subsets; a text is one."""
    return tuple(values.patterns(value, what) or ())


def plain_values(value: object, what: str) -> Sequence[Value]:
    """Of a configuration, as plain ones; a range stays what it is."""
    if isinstance(value, range):
        if value[_BITS - 1 :]:
            raise InvalidInput(f"{what} is a range of more than 64 bits: give a shorter one")
        return value
    found: list[Value] = values.several(lambda each, of: values.string(each, of) if isinstance(each, str) else values.plain(each, of))(
        value, what
    )
    return tuple(found)


def tried(value: object, what: str) -> dict[str, Sequence[Value]]:
    """The values to try of each key of a configuration."""
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
    """Subsets by name, or how many to make."""
    return values.named(value, what) if isinstance(value, Mapping) else variants(value, what)
