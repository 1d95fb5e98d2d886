"""What is carried to a machine without a network: all that torch does not bring, in the versions
of the gate."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def listed(*options: str) -> dict[str, str]:
    command = [sys.executable, str(ROOT / "scripts" / "gpu-wheels"), "nowhere", "--list", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return dict(line.split("==") for line in done.stdout.splitlines())


def test_what_the_project_and_the_marked_tests_import_is_carried_but_nothing_of_torch() -> None:
    found = listed()
    assert found.keys() >= {
        "msgspec",
        "sqlalchemy",
        "xxhash",
        "pytest",
        "pytest-timeout",
        "hypothesis",
        "torchdata",
        "pip",
        "setuptools",
    }
    assert found.keys() >= {"pydantic-core", "sortedcontainers"}, "and what these ask for"
    assert not found.keys() & {"torch", "triton", "sympy", "filelock"}
    pinned = dict(
        re.findall(r"^([\w.-]+)==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    )
    assert {name: version for name, version in found.items() if name in pinned} == {
        name: pinned[name] for name in found if name in pinned
    }
    assert "msgspec" in pinned


def test_what_the_machine_has_is_left_out_with_what_only_it_asks_for() -> None:
    found = listed("--there", "numpy", "scikit-learn", "Hypothesis")
    assert not found.keys() & {
        "numpy",
        "scikit-learn",
        "scipy",
        "joblib",
        "hypothesis",
        "sortedcontainers",
    }
    assert {"numpy", "scipy"} <= listed().keys()


def test_a_folder_that_was_not_filled_is_refused(tmp_path: Path) -> None:
    done = subprocess.run(
        [str(ROOT / "scripts" / "gpu")],
        env=os.environ | {"WHEELS": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert (
        f"there is no pip in {tmp_path}: fill it with scripts/gpu-wheels {tmp_path}" in done.stderr
    )
