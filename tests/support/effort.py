"""How many cases run: the gate runs a fixed twelfth of the costly ones, and
``DATASTATES_THOROUGH=1`` runs all of them.

``SEED`` decides what is drawn at random. In the gate it is 0, and in a thorough run it is random.
Every run prints it, and ``DATASTATES_SEED`` sets it. ``DATASTATES_PART`` (1 to 12) selects another
twelfth.
"""

from __future__ import annotations

import os
import random
import secrets
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TypeVar

import pytest

T = TypeVar("T")

ROOT = Path(__file__).parents[2]
IS_THOROUGH = os.environ.get("DATASTATES_THOROUGH") == "1"
PARTS = 12
FIRST_RANDOM_SEED = 1_000_000
GROUPS = pytest.StashKey[list[str | None]]()
"""Of every test of this run, the group within which it takes turns; of those too that wait for
theirs."""


def _seed() -> int:
    """The processes of a run ask in turn: the first decides for all of them."""
    if "DATASTATES_SEED" not in os.environ:
        os.environ["DATASTATES_SEED"] = str(secrets.randbelow(1 << 31) if IS_THOROUGH else 0)
    return int(os.environ["DATASTATES_SEED"])


SEED = _seed()
TURN = int(os.environ.get("DATASTATES_PART", "2")) - 1


def effort(thorough: int, gate: int) -> int:
    """So many processes, captures or steps."""
    return thorough if IS_THOROUGH else gate


def examples(count: int) -> int:
    """So many examples of Hypothesis, of ``count`` in a thorough run."""
    return count if IS_THOROUGH else -(-count // PARTS)


def is_in_turn(index: int, count: int, turn: int = TURN) -> bool:
    """Whether the gate tries this one of so many cases: one in twelve, and one of fewer."""
    parts = max(1, min(PARTS, count))
    return index % parts == turn % parts


def part(cases: Iterable[T]) -> list[T]:
    """Of these cases those that this run tries."""
    listed = list(cases)
    return (
        listed
        if IS_THOROUGH
        else [case for index, case in enumerate(listed) if is_in_turn(index, len(listed))]
    )


def in_turn(groups: Sequence[str | None], turn: int = TURN) -> list[bool]:
    """Which tests the gate runs, by the groups within which they take turns; None for a test
    that runs always."""
    counts, seen = Counter(groups), Counter[str | None]()
    chosen = []
    for group in groups:
        chosen.append(group is None or is_in_turn(seen[group], counts[group], turn))
        seen[group] += 1
    return chosen


def seeds(count: int, more: int | None = None) -> Sequence[int]:
    """Of ``range(count)`` those that this run tries; in a thorough run all, and so many that
    nobody has tried (a twelfth of them)."""
    if not IS_THOROUGH:
        return part(range(count))
    choose = random.Random(SEED)
    return [
        *range(count),
        *(
            choose.randrange(FIRST_RANDOM_SEED, 1 << 31)
            for _ in range(-(-count // PARTS) if more is None else more)
        ),
    ]


def said() -> str:
    """What whoever reads the report needs in order to repeat the run."""
    if IS_THOROUGH:
        return (
            "all cases, and random ones besides; again with DATASTATES_THOROUGH=1"
            f" DATASTATES_SEED={SEED}"
        )
    again = f"DATASTATES_SEED={SEED} DATASTATES_PART={TURN + 1}"
    return (
        f"part {TURN + 1} of {PARTS} of the cases; again with {again}, all of them with"
        " DATASTATES_THOROUGH=1"
    )
