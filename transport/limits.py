"""The limits of what peers may cost a server, and the budgets that they share."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Final

SILENT_TIMEOUTS: Final = 6
"""For how many timeouts an answer may be silent.

Only a complete part of it counts as a sign of life, not a byte."""

ANSWER_TIMEOUTS: Final = 20
"""After how many timeouts an answer must be complete."""

LISTING_TIMEOUTS: Final = 20
"""After how many timeouts all pages of a log, or of a search, must be there."""

PAGE_BYTES: Final = 8 << 20
"""The most bytes of a page of states.

A longer page is sent with fewer states, but with one at least."""

LISTED_BYTES: Final = 1 << 30
"""The most memory that the states which a peer lists may take (see ``weigh``)."""

# By the first byte of an item of MessagePack, from 0x00 on: the bytes of its head, plus
# its content if the head alone determines the size.
_HEADS = (
    *[1] * 160,
    *range(1, 33),
    *[1] * 4,
    *(2, 3, 5, 3, 4, 6),
    *(5, 9),
    *(2, 3, 5, 9) * 2,
    *(3, 4, 6, 10, 18),
    *(2, 3, 5, 3, 5, 3, 5),
    *[1] * 32,
)

# The memory of an item in CPython, in addition to these bytes. Texts count with an entry in a dict,
# containers when they are empty.
_WEIGHTS = (
    *[8] * 128,
    *[80] * 32,
    *[100] * 32,
    *[8] * 4,
    *[100] * 6,
    *[40] * 15,
    *[100] * 7,
    *[40] * 32,
)

# The bytes of the length behind the first byte: of bytes, extensions, texts, arrays and maps.
_LENGTHS = dict(
    zip(
        (*range(0xC4, 0xCA), *range(0xD9, 0xE0)),
        (1, 2, 4, 1, 2, 4, 1, 2, 4, 2, 4, 2, 4),
        strict=True,
    )
)


def weigh(body: bytes | bytearray | memoryview, most: int) -> int:
    """About how many bytes of memory MessagePack takes once it is decoded: in most cases more than
    the true number.

    No item is decoded. It returns as soon as the number is above ``most``, and takes about 0.2 us
    an item. Every 1,024 items it sleeps, so that a training does not wait for the interpreter's
    lock (5 ms each time).
    """
    weight = at = items = 0
    while at < len(body) and weight <= most:
        if not (items := items + 1) % 1024:
            time.sleep(50e-6)
        kind, start = body[at], at + 1
        at += _HEADS[kind]
        weight += _WEIGHTS[kind] + _HEADS[kind]
        if kind in _LENGTHS:
            size = int.from_bytes(body[start : start + _LENGTHS[kind]], "big")
            if kind >= 0xDC:  # an array or a map
                weight += 8 * size
            else:  # one character can make each character of a text take 4 bytes
                is_wide = kind >= 0xD9 and not bytes(body[at : at + size]).isascii()
                weight, at = weight + (4 * size if is_wide else size), at + size
    return weight


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of one server for all of its peers together.

    ``sessions`` counts peers that have proved the token. ``offer_bytes`` is for the
    descriptions of states that they push (manifests and ancestry), encoded and decoded. One peer
    may use at most half of it.
    """

    sessions: int = 64
    offer_bytes: int = 160 << 20


class Budget:
    """A budget that all users share; each gets at most half of it. Belongs to one thread."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.taken = 0


class Share:
    """One user's share of a budget: what it has taken, of at most half."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self.limit = budget.limit // 2
        self.taken = 0

    def take(self, amount: int) -> bool:
        """Take this much more; returns whether it was available."""
        if self.taken + amount > self.limit or self._budget.taken + amount > self._budget.limit:
            return False
        self.taken += amount
        self._budget.taken += amount
        return True

    def give(self, amount: int) -> None:
        """Give this much back."""
        amount = min(amount, self.taken)
        self.taken -= amount
        self._budget.taken -= amount
