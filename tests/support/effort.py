"""How much a run tries. ``make test`` runs the same tests every time. ``make test-all`` sets
``DATASTATES_THOROUGH=1`` and runs all of them.

``tests/slow.txt`` lists the tests that only a thorough run runs, one a line. After ``1/12`` in a
line, the gate runs a twelfth of the test's cases.

``SEED`` decides what is drawn at random. In the gate it is 0, and in a thorough run it is random.
Every run prints it, and ``DATASTATES_SEED`` sets it.
"""

from __future__ import annotations

import functools
import os
import random
import secrets
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

ROOT = Path(__file__).parents[2]
IS_THOROUGH = os.environ.get("DATASTATES_THOROUGH") == "1"
SHARE = 12
"""The gate tries one in so many generated cases."""

FIRST_RANDOM_SEED = 1_000_000


def _seed() -> int:
    """The seed of this run. The first process of a run chooses it for all others."""
    if "DATASTATES_SEED" not in os.environ:
        os.environ["DATASTATES_SEED"] = str(secrets.randbelow(1 << 31) if IS_THOROUGH else 0)
    return int(os.environ["DATASTATES_SEED"])


SEED = _seed()


def effort(thorough: int, gate: int) -> int:
    """A number of processes, captures or steps."""
    return thorough if IS_THOROUGH else gate


def examples(count: int) -> int:
    """A number of Hypothesis's examples: ``count`` in a thorough run, else a twelfth."""
    return count if IS_THOROUGH else -(-count // SHARE)


def part(cases: Iterable[T]) -> list[T]:
    """The cases that this run tries: all in a thorough run, else a fixed twelfth and at least
    one."""
    listed = list(cases)
    share = min(SHARE, len(listed))
    return listed if IS_THOROUGH else listed[1 % share :: share] if listed else []


def seeds(count: int, more: int | None = None) -> Sequence[int]:
    """The part of ``range(count)`` that this run tries. A thorough run tries all, and ``more``
    random ones, by default a twelfth as many."""
    if not IS_THOROUGH:
        return part(range(count))
    choose = random.Random(SEED)
    return [
        *range(count),
        *(
            choose.randrange(FIRST_RANDOM_SEED, 1 << 31)
            for _ in range(-(-count // SHARE) if more is None else more)
        ),
    ]


@functools.cache
def slow() -> frozenset[str]:
    """The lines of ``tests/slow.txt``, such as
    ``tests/storage/test_arena.py::test_memory_is_shared``."""
    return frozenset((ROOT / "tests" / "slow.txt").read_text().splitlines())


def in_gate(names: Sequence[str]) -> set[str]:
    """Which of these cases of tests the gate runs."""
    cases: dict[str, list[str]] = {}
    for name in names:
        cases.setdefault(name.partition("[")[0], []).append(name)
    return {
        name
        for test, all_of_it in cases.items()
        if test not in slow()
        for name in (part(all_of_it) if f"{test} 1/{SHARE}" in slow() else all_of_it)
    }


def said() -> str:
    """What a reader of the report needs in order to repeat the run."""
    if IS_THOROUGH:
        return (
            "all tests, and random cases too; again with DATASTATES_THOROUGH=1"
            f" DATASTATES_SEED={SEED}"
        )
    return (
        f"the tests of the gate; again with DATASTATES_SEED={SEED}, all of them with"
        " DATASTATES_THOROUGH=1"
    )
