"""The gate runs the same part of the tests and cases every time."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING

from tests.support import effort
from tests.support.effort import ROOT, SHARE, in_gate

if TYPE_CHECKING:
    import pytest

TELL = """
import json
from tests.support import effort
print(json.dumps([effort.SEED, effort.seeds(60), effort.part("abc"), effort.examples(100)]))
"""


def told(**environ: str) -> tuple[int, list[int], list[str], int]:
    """What a run of its own would try."""
    inherited = {
        key: value
        for key, value in os.environ.items()
        if key not in ("DATASTATES_SEED", "DATASTATES_THOROUGH")
    }
    command = [sys.executable, "-c", TELL]
    done = subprocess.run(
        command, cwd=ROOT, env=inherited | environ, capture_output=True, text=True, check=True
    )
    seed, seeds, part, examples = json.loads(done.stdout)
    return seed, seeds, part, examples


def test_the_gate_runs_the_same_part_whatever_the_seed() -> None:
    assert told(DATASTATES_SEED="713")[1:] == told(DATASTATES_SEED="714")[1:]
    assert told() == (0, [1, 13, 25, 37, 49], ["b"], 9)


def test_a_thorough_run_tries_every_seed_and_random_ones_which_its_own_seed_repeats() -> None:
    (drawn, seeds, part, examples), again = (
        told(DATASTATES_THOROUGH="1"),
        told(DATASTATES_THOROUGH="1"),
    )
    assert seeds[:60] == again[1][:60] == list(range(60))
    assert len(set(seeds[60:]) - set(again[1])) == 5
    assert (part, examples) == (list("abc"), 100)
    assert told(DATASTATES_THOROUGH="1", DATASTATES_SEED=str(drawn)) == (
        drawn,
        seeds,
        part,
        examples,
    )


def test_slow_tests_are_left_out_of_the_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(effort, "IS_THOROUGH", False)
    monkeypatch.setattr(effort, "slow", lambda: {"a.py::slow", "a.py::many 1/12"})
    many = [f"a.py::many[{case}]" for case in range(24)]
    names = ["a.py::quick[0]", "a.py::quick[1]", "a.py::slow", "a.py::slow[0]", *many]
    assert in_gate(names) == {*names[:2], many[1], many[13]}


def test_every_slow_test_that_is_listed_exists() -> None:
    stale = []
    for line in effort.slow():
        path, name = line.removesuffix(f" 1/{SHARE}").split("::")[:2]  # a function or a class
        source = (ROOT / path).read_text() if (ROOT / path).exists() else ""
        if not re.search(rf"^(async )?(def|class) {name}\b|^{name}\b.* = ", source, re.MULTILINE):
            stale.append(line)
    assert stale == [], "remove them from tests/slow.txt"
