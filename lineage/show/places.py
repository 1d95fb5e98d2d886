"""The order in which branches are listed, and cursors: a place in that order, sealed with the request to which it belongs."""

from __future__ import annotations

import base64
import binascii
import hashlib
import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Self

import msgspec

from datastates.errors import InvalidInput
from datastates.lineage.states import Value

from .goals import Direction
from .rows import Row

__all__ = ["COUNTED", "SORTS", "Cursors", "Order", "Place", "Sort", "place_of_group", "sort_of"]

Place = tuple[tuple[int, float, str], int, float, tuple[int, ...]]
"""A branch's group, whether it lacks the value, the value, its name."""

_SEAL_BYTES = 8


class Sort(StrEnum):
    """What branches are sorted by."""

    CHANGED = "changed"
    NAME = "name"
    BEGAN = "began"
    BEST = "best"
    LAST = "last"
    STEP = "step"
    STATES = "states"
    RESTORABLE = "restorable"
    DURABLE = "durable"
    BYTES = "bytes"
    TOOK = "took"


SORTS = tuple(sort.value for sort in Sort)
_FALLING = {Sort.CHANGED, Sort.BEGAN, Sort.STEP, Sort.STATES, Sort.RESTORABLE, Sort.DURABLE, Sort.BYTES, Sort.TOOK}
"""The sorts that put the largest first, unless they are reversed."""
COUNTED = {Sort.RESTORABLE, Sort.DURABLE, Sort.BYTES}
"""The sorts for which ``rows.count_states`` must run first."""
_ATTRIBUTES = {Sort.CHANGED: "changed_us", Sort.BEGAN: "began_us", Sort.TOOK: "took_us"}
"""The attribute of a ``Row`` for a sort, where the names differ."""


def sort_of(text: str) -> tuple[Sort, bool]:
    """The sort in a text, and whether it is reversed."""
    try:
        return Sort(text.removeprefix("-")), text.startswith("-")
    except ValueError:
        raise InvalidInput(f"branches cannot be sorted by {text!r}: choose among {', '.join(SORTS)}, with '-' for the other way") from None


@dataclass(frozen=True, slots=True)
class Order:
    """What comes first: the best, newest, longest; or the opposite if it is ``turned``."""

    sort: Sort
    sign: int

    @classmethod
    def of(cls, sort: Sort, direction: Direction, *, turned: bool) -> Self:
        """The order for a sort. ``direction`` says which values are better."""
        is_falling = sort in _FALLING or (sort in (Sort.BEST, Sort.LAST) and direction is Direction.MAX)
        return cls(sort, -1 if is_falling != turned else 1)

    def place(self, row: Row) -> Place:
        """The place of a branch: by group, then whether it has the value at all, then by value, then by name."""
        name, group = tuple(map(ord, row.name)), place_of_group(row.group)
        if self.sort is Sort.NAME:
            return group, 0, 0.0, name if self.sign > 0 else (*(-each for each in name), 1)
        value: float | None = getattr(row, _ATTRIBUTES.get(self.sort, self.sort.value))
        lacks = value is None or math.isnan(value)
        return group, int(lacks), 0.0 if lacks or value is None else self.sign * float(value), name


def place_of_group(value: Value) -> tuple[int, float, str]:
    """The place of a group's value: numbers before texts, and a missing value last."""
    match value:
        case None:
            return 2, 0.0, ""
        case str():
            return 1, 0.0, value
    return 0, float(value) if value == value else math.inf, ""


@dataclass(frozen=True, slots=True)
class Cursors:
    """Cursors of one request; those of another are refused."""

    seal: bytes

    @classmethod
    def of(cls, *asked: object) -> Self:
        """The cursors for a request with these parameters, except the page."""
        return cls(hashlib.blake2b(msgspec.msgpack.encode(asked), digest_size=_SEAL_BYTES, person=b"ds.branches").digest())

    def write(self, place: Place) -> str:
        """A cursor for what comes after a place."""
        return base64.urlsafe_b64encode(self.seal + msgspec.msgpack.encode(place)).decode().rstrip("=")

    def read(self, token: str) -> Place:
        """The place that a cursor names.

        :raises InvalidInput: it is not a cursor, or one of another request.
        """
        try:
            raw = base64.b64decode(token + "=" * (-len(token) % 4), altchars=b"-_", validate=True)
            place: Place = msgspec.msgpack.decode(raw[_SEAL_BYTES:], type=Place)
        except (binascii.Error, ValueError, msgspec.MsgspecError) as error:
            raise InvalidInput(f"{token[:40]!r} is no cursor of branches: pass what 'next' of the same question gave") from error
        if raw[:_SEAL_BYTES] != self.seal:
            raise InvalidInput(f"the cursor {token[:40]!r} is of another question: pass what 'next' of this one gave")
        return place
