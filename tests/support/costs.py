"""What tests cost in processor time. Those that take more than a tenth of a second, listed in
``tests/costly.txt``, take turns in the gate.

    DATASTATES_COSTS=/tmp/costs make test                       # notes in that folder what each
    test takes .venv/bin/python -m tests.support.costs /tmp/costs          # brings the list up to
    date

A test that did not run stays as it was listed. Wall time would list what waits, and whatever ran
beside a busy neighbour.
"""

from __future__ import annotations

import functools
import os
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.effort import ROOT

COSTLY_S = 0.1
"""Processor time of a test, with its fixtures and the processes that it waited for."""

_ALWAYS = (
    "tests/test_house.py",
    "tests/formats/",
    "tests/demo/",
    "tests/test_documents.py::test_example_of_the_readme",
)
"""What is asked of the whole source, files of earlier versions, and what a newcomer runs first:
these run every time."""

_LIST = ROOT / "tests" / "costly.txt"


@functools.cache
def listed() -> frozenset[str]:
    """The functions of the tests that are costly, such as
    ``tests/storage/test_arena.py::test_memory_is_shared``."""
    return frozenset(_LIST.read_text().splitlines())


def is_costly(item: pytest.Item) -> bool:
    """Whether the list has it."""
    return item.nodeid.partition("[")[0] in listed()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Note what the test takes, where that was asked for."""
    folder = os.environ.get("DATASTATES_COSTS")
    before = _processor_s()
    try:
        return (yield)
    finally:
        if folder:
            Path(folder).mkdir(parents=True, exist_ok=True)
            with (Path(folder) / f"{os.getpid()}.tsv").open("a") as notes:
                notes.write(f"{item.nodeid}\t{_processor_s() - before:.3f}\n")


def noted(folder: Path) -> dict[str, float]:
    """What the costliest case of each function took, in seconds."""
    found: dict[str, float] = {}
    for notes in folder.glob("*.tsv"):
        for line in notes.read_text().splitlines():
            name, _, taken = line.rpartition("\t")
            function = name.partition("[")[0]
            found[function] = max(found.get(function, 0.0), float(taken))
    return found


def updated(before: frozenset[str], found: dict[str, float]) -> list[str]:
    """The list after a run: what was costly in it, and what did not run in it and was listed
    before."""
    costly = {
        name for name, taken in found.items() if taken > COSTLY_S and not name.startswith(_ALWAYS)
    }
    return sorted(costly | (before - found.keys()))


def _processor_s() -> float:
    kinds = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return sum(usage.ru_utime + usage.ru_stime for usage in map(resource.getrusage, kinds))


if __name__ == "__main__":
    _LIST.write_text("".join(f"{name}\n" for name in updated(listed(), noted(Path(sys.argv[1])))))
