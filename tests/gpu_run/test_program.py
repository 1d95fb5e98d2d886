"""The program goes through every part without a GPU, in tiny sizes, and its report says what it
could not do."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
from gpu.case import Status
from gpu.parts import PARTS
from gpu.report import Report

ROOT = Path(__file__).parents[2]
ENDS_WITHOUT_A_GPU = {Status.PASSED, Status.SKIPPED, Status.NOT_BUILT}


@pytest.fixture
def program(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """The program on the CPU, begun."""
    with begun(tmp_path, "--device", "cpu") as process:
        yield process
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def begun(folder: Path, *options: str) -> subprocess.Popen[str]:
    command = [str(ROOT / "scripts" / "gpu"), "--quick", "--out", str(folder), *options]
    return subprocess.Popen(
        command,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def reported(folder: Path) -> Report:
    (path,) = folder.glob("*.json")
    return msgspec.json.decode(path.read_bytes(), type=Report)


@pytest.mark.long
def test_every_part_runs_on_a_cpu_and_nothing_is_said_to_be_proven(
    program: subprocess.Popen[str], tmp_path: Path
) -> None:
    out, err = program.communicate(timeout=280)
    assert program.returncode == 0, out + err
    found = reported(tmp_path)
    assert [part.name for part in found.parts] == [part.name for part in PARTS]
    assert found.is_whole
    odd = [
        f"{part.name}, {case.case}: {case.status} {case.why}"
        for part in found.parts
        for case in part.cases
        if case.status not in ENDS_WITHOUT_A_GPU
    ]
    assert not odd, odd
    assert all(
        case.why for part in found.parts for case in part.cases if case.status is not Status.PASSED
    )
    passed = {
        (part.name, case.case): case.found
        for part in found.parts
        for case in part.cases
        if case.status is Status.PASSED
    }
    assert {part for part, _ in passed} == {part.name for part in PARTS} - {"tests"}, (
        "all tests that are marked gpu are skipped"
    )
    assert passed["capture", "blocked and copied"]["blocked_ms"]
    assert passed["dcp", "torn states"]["torn_of_ours"] == 0
    assert "Nothing here was proven on an accelerator" in out


@pytest.mark.long
def test_every_step_is_checked_on_late_devices(tmp_path: Path) -> None:
    with begun(tmp_path, "--device", "late", "--part", "correctness") as process:
        out, err = process.communicate(timeout=200)
    assert process.returncode == 0, out + err
    (part,) = reported(tmp_path).parts
    tried = ["two devices", "AdamW-lr=0.01-foreach", "AdamW-lr=0.01-foreach, kept on the device"]
    assert [case.case for case in part.cases if case.status is Status.PASSED] == tried


def test_a_run_that_is_interrupted_leaves_what_was_done(
    program: subprocess.Popen[str], tmp_path: Path
) -> None:
    until = time.monotonic() + 100
    while not [*tmp_path.glob("*.json")] or not reported(tmp_path).parts[0].cases:
        assert program.poll() is None, program.communicate()
        assert time.monotonic() < until
        time.sleep(0.02)
    os.killpg(program.pid, signal.SIGINT)
    _, err = program.communicate(timeout=60)
    assert program.returncode == 130, err
    assert err.strip().endswith("interrupted: the report says what was done")
    found = reported(tmp_path)
    assert found.parts[0].cases[0].status is Status.PASSED
    assert not found.is_whole
    assert found.not_reached or any(part.note == "interrupted" for part in found.parts)


def test_without_a_gpu_nothing_is_begun_unless_that_is_said(tmp_path: Path) -> None:
    with begun(tmp_path, "--device", "cuda") as process:
        _, err = process.communicate(timeout=100)
    if process.returncode != 2:
        pytest.skip("there is a GPU here")
    assert "sees no CUDA device here: DEVICE=cpu goes through the same parts without one" in err
    assert not [*tmp_path.iterdir()]
