"""What fails, hangs or dies in a part stops nothing else, and is told as what it is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from gpu.division import KEPT_S, limit_s

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def left_behind(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a case that hangs writes the process that it started."""
    return tmp_path_factory.mktemp("trouble") / "pid"


@pytest.fixture(scope="module")
def found(left_behind: Path) -> dict[str, Any]:
    """What ``trouble`` tells of its run."""
    environ = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "benchmarks")]),
        "LEFT_BEHIND": str(left_behind),
    }
    command = [sys.executable, "-m", "tests.gpu_run.trouble"]
    done = subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told: dict[str, Any] = json.loads(done.stdout)
    return told | {part["part"]: part for part in told["parts"]}


def test_each_case_ends_as_it_ended_and_the_others_go_on(
    found: dict[str, Any], left_behind: Path
) -> None:
    trouble = found["trouble"]
    ends = {case["case"]: case for case in trouble["cases"]}
    assert {name: case["status"] for name, case in ends.items()} == {
        "works": "passed",
        "fails": "failed",
        "still works": "passed",
        "hangs": "timed out",
        "dies": "failed",
        "is skipped": "skipped",
        "is not built": "not built",
        "prints": "passed",
        "works at the end": "passed",
    }
    assert [case["case"] for case in trouble["cases"]] == [*ends]
    assert ends["fails"]["why"].startswith("ValueError: what is wrong (trouble.py:")
    assert ends["hangs"]["why"].startswith("the time of its own was spent")
    assert ends["dies"]["why"] == "its process ended with -9: out of something"
    assert "in _fails" in ends["fails"]["trace"]
    assert "in _hangs" in ends["hangs"]["trace"]
    assert ends["dies"]["trace"] == "out of something"
    assert not ends["works"]["trace"]
    assert ends["is skipped"]["why"] == "says nothing here"
    assert trouble["note"] == ""
    processes = [
        ends[name]["found"]["process"] for name in ("works", "still works", "works at the end")
    ]
    assert len(set(processes)) == 3, "a case behind one that failed has a process of its own"
    assert not Path(f"/proc/{left_behind.read_text()}").exists(), "what a case started goes with it"
    assert found["told"].count("trouble") == len(ends) + 1


def test_a_part_that_cannot_begin_says_why(found: dict[str, Any]) -> None:
    (start,) = found["lost"]["cases"]
    assert (start["case"], start["status"]) == ("(start)", "failed")
    assert "No module named 'tests.gpu_run.nowhere'" in start["why"]


def test_where_the_time_ends_what_was_not_reached_is_named(found: dict[str, Any]) -> None:
    cut = found["cut"]
    assert [(case["case"], case["status"]) for case in cut["cases"]] == [
        ("works", "passed"),
        ("takes long", "timed out"),
        ("comes too late", "not reached"),
    ]
    assert cut["cases"][1]["why"].startswith("the time of its part was spent")
    assert cut["note"] == cut["cases"][2]["why"] == "its time was spent"


def test_a_process_whose_caller_was_interrupted_meanwhile_ends_without_a_word(
    tmp_path: Path,
) -> None:
    script = (
        "import sys; from pathlib import Path; from gpu.worker import work; work(None, None, [],"
        " None, Path(sys.argv[1]))"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "gone" / "log")]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        command, env=environ, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_what_a_part_leaves_of_its_time_the_later_ones_have() -> None:
    assert limit_s(103, [1, 3]) == 25
    assert limit_s(103 - 5, [3]) == 95
    assert limit_s(KEPT_S - 1, [3, 4]) == 0
