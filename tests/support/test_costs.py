"""Costly tests take turns, by a list that runs of the gate made."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.support import costs
from tests.support.effort import ROOT


def test_every_listed_test_is_there() -> None:
    known = {
        f"{path.relative_to(ROOT)}::{name}"
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(
            r"^(?:(?:async )?def |class |)([tT]est\w+)", path.read_text(), re.MULTILINE
        )
    }
    # what a class inherits stands elsewhere: the class itself is looked for
    listed = {"::".join(name.split("::")[:2]) for name in costs.listed()}
    assert listed
    assert listed - known == set(), "renamed or gone: take them out of tests/costly.txt"


def test_a_run_notes_what_its_tests_take(tmp_path: Path) -> None:
    (tmp_path / "test_two.py").write_text(
        "import time\ndef test_waits():\n    time.sleep(0.3)\ndef test_works():\n    begun ="
        " time.process_time()\n    while time.process_time() < begun + 0.3: pass\n"
    )
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "tests.support.costs",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(tmp_path),
    ]
    environ = {
        **os.environ,
        "DATASTATES_COSTS": str(tmp_path / "costs"),
        "PYTHONPATH": os.pathsep.join(["", str(ROOT), *sys.path]),
    }
    subprocess.run(
        [*command, str(tmp_path / "test_two.py")],
        env=environ,
        cwd=tmp_path,
        check=True,
        stdout=subprocess.DEVNULL,
    )

    found = costs.noted(tmp_path / "costs")
    assert set(found) == {"test_two.py::test_waits", "test_two.py::test_works"}
    assert costs.updated(frozenset(), found) == ["test_two.py::test_works"]


def test_the_list_keeps_what_did_not_run_and_loses_what_became_cheap() -> None:
    before = frozenset({"tests/a.py::test_asleep", "tests/a.py::test_mended"})
    found = {
        "tests/a.py::test_mended": 0.03,
        "tests/a.py::test_new": 2.0,
        "tests/test_house.py::test_slow": 3.0,
    }
    assert costs.updated(before, found) == ["tests/a.py::test_asleep", "tests/a.py::test_new"]
