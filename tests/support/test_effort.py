"""The gate runs the same twelfth of the costly cases every time; twelve parts together cover all
of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.support import effort
from tests.support.effort import PARTS, ROOT, in_turn

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
        if key not in ("DATASTATES_SEED", "DATASTATES_PART", "DATASTATES_THOROUGH")
    }
    command = [sys.executable, "-c", TELL]
    done = subprocess.run(
        command, cwd=ROOT, env=inherited | environ, capture_output=True, text=True, check=True
    )
    seed, seeds, part, examples = json.loads(done.stdout)
    return seed, seeds, part, examples


def test_the_gate_runs_the_same_part_whatever_the_seed() -> None:
    assert (
        told(DATASTATES_SEED="713")[1:]
        == told(DATASTATES_SEED="714")[1:]
        == told(DATASTATES_PART="2")[1:]
    )


def test_twelve_parts_cover_every_seed() -> None:
    runs = [told(DATASTATES_PART=str(part)) for part in range(1, 1 + PARTS)]
    tried = [seed for _, seeds, _, _ in runs for seed in seeds]
    assert sorted(tried) == list(range(60))
    assert {len(seeds) for _, seeds, _, _ in runs} == {5}
    assert {case for _, _, part, _ in runs for case in part} == set("abc")
    assert {examples for _, _, _, examples in runs} == {9}


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


@pytest.mark.parametrize("first", [0, 3, 712])
def test_twelve_parts_cover_every_test_that_takes_turns(first: int) -> None:
    groups = (
        ["executors"] * 6 + [None] * 2 + ["examples", "of a file"] * 3 + ["kills"] * 23 + ["alone"]
    )
    runs = [in_turn(groups, turn) for turn in range(first, first + PARTS)]
    assert all(any(run[index] for run in runs) for index in range(len(groups)))
    assert all(run[6] and run[7] for run in runs)
    for run in runs:
        counts = {
            group: sum(kept for kept, each in zip(run, groups, strict=True) if each == group)
            for group in ("executors", "examples", "kills")
        }
        assert counts["executors"] == counts["examples"] == 1
        assert 1 <= counts["kills"] <= 2


def test_every_test_of_this_run_has_its_turn(request: pytest.FixtureRequest) -> None:
    groups = request.config.stash[effort.GROUPS]
    runs = [in_turn(groups, turn) for turn in range(PARTS)]
    assert all(any(run[index] for run in runs) for index in range(len(groups)))
