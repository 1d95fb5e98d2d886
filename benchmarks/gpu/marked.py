"""The tests that are marked ``gpu``, file by file, with the numbers that passed, failed and were
skipped, and the reasons."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

from .case import TRACE_CHARACTERS, Case, Found, Skip
from .place import Place

ROOT = Path(__file__).parents[2]
MARK = re.compile(r"\bpytest\.mark\.gpu\b")


def cases(place: Place) -> Sequence[Case]:
    """A case for each file."""
    files = sorted(
        path for path in (ROOT / "tests").rglob("test_*.py") if MARK.search(path.read_text())
    )
    return [_case(path.relative_to(ROOT)) for path in files]


def _case(path: Path) -> Case:
    return Case(str(path), lambda place: _run(path, place), limit_s=90)


def _run(path: Path, place: Place) -> Found:
    """Another torch version may warn, so warnings are no errors here."""
    if place.is_quick and path.name != "test_rng.py":
        raise Skip("a quick run tries tests/state/test_rng.py only")
    with tempfile.TemporaryDirectory(prefix="datastates-gpu-") as folder:
        xml = Path(folder) / "report.xml"
        options = [
            "-m",
            "gpu",
            "-q",
            "-W",
            "default",
            "-p",
            "no:cacheprovider",
            f"--basetemp={folder}/tmp",
            f"--junitxml={xml}",
        ]
        unset = (
            "PYTEST_CURRENT_TEST",
            "PYTEST_XDIST_WORKER",
            "DATASTATES_REQUIRE_POSTGRESQL",
            "DATASTATES_REQUIRE_CHROMIUM",
        )
        environ = {name: value for name, value in os.environ.items() if name not in unset}
        command = [sys.executable, "-m", "pytest", str(path), *options]
        done = subprocess.run(
            command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False
        )
        if not xml.exists():
            raise RuntimeError(
                f"pytest ended with {done.returncode}: {(done.stdout + done.stderr).strip()[-600:]}"
            )
        found, failures, traces = counted(xml.read_text())
    if failures:
        wrong = AssertionError(
            f"{found['failed']} of {sum(map(int, _numbers(found)))} failed: {'; '.join(failures)}"[
                :1500
            ]
        )
        wrong.add_note("\n".join(traces)[-TRACE_CHARACTERS:])
        raise wrong
    if not found["passed"]:
        raise Skip(f"none ran: {'; '.join(found['reasons']) or 'none was found'}")
    return found


def counted(xml: str) -> tuple[Found, list[str], list[str]]:
    """The numbers of tests in a JUnit report that passed, failed and were skipped, with the
    reasons, and the failures in a line and in full."""
    counts, reasons, failures, traces = Counter[str](), Counter[str](), list[str](), list[str]()
    for test in ElementTree.fromstring(xml).iter("testcase"):  # pytest's own, of a moment ago
        broken = [*test.iter("failure"), *test.iter("error")]
        skipped = test.find("skipped")
        if broken:
            counts["failed"] += 1
            message = (broken[0].get("message") or "").strip().splitlines() or ["no message"]
            failures.append(f"{test.get('name')}: {message[0]}")
            traces.append(f"{test.get('name')}:\n{(broken[0].text or '')[-2000:]}")
        elif skipped is not None:
            counts["skipped"] += 1
            reasons[skipped.get("message") or "no reason given"] += 1
        else:
            counts["passed"] += 1
    said = [f"{count} times: {reason}" for reason, count in reasons.items()]
    return (
        {
            "passed": counts["passed"],
            "failed": counts["failed"],
            "skipped": counts["skipped"],
            "reasons": said,
        },
        failures,
        traces,
    )


def _numbers(found: Found) -> list[int]:
    return [found["passed"], found["failed"], found["skipped"]]
