"""A report says what was seen and no more; and the README says of GPUs what the reports say that
are kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from gpu.case import Outcome, Status
from gpu.goals import GOALS, Goal, Verdict, judged
from gpu.marked import counted
from gpu.report import PartReport, Report, headline, markdown, written
from gpu.trace import crossed, waits

ROOT = Path(__file__).parents[2]
DEVICE = Outcome("device", Status.PASSED, 0.1, found={"name": "A device"})


def report(kind: str, *cases: Outcome, **options: Any) -> Report:
    parts = [
        PartReport("environment", "Environment", 10, 1, "", [DEVICE] if kind == "cuda" else []),
        PartReport("capture", "Capture", 60, 5, "", [*cases]),
    ]
    return Report("2026-11-23T15:00:00", kind, False, "a machine", 540, parts=parts, **options)


def test_goals_are_judged_by_medians_and_on_accelerators_only() -> None:
    goals = [
        Goal("few", "capture", "a", "ms", 2.0),
        Goal("much", "capture", "a", "share", 0.9, is_most=False),
        Goal("none", "capture", "b", "ms", 1.0),
    ]
    outcomes = {
        "capture": [
            Outcome("a", Status.PASSED, found={"ms": [1.0, 1.9, 90.0], "share": 0.89}),
            Outcome("b", Status.FAILED, found={"ms": 0.5}),
        ]
    }
    assert [
        (found, verdict) for _, found, verdict in judged(goals, outcomes, is_accelerator=True)
    ] == [
        (1.9, Verdict.MET),
        (0.89, Verdict.MISSED),
        (None, Verdict.NOT_MEASURED),
    ]
    assert {verdict for _, _, verdict in judged(goals, outcomes, is_accelerator=False)} == {
        Verdict.NOT_JUDGED,
        Verdict.NOT_MEASURED,
    }


def test_what_was_skipped_is_counted_apart_from_what_passed() -> None:
    cases = [
        Outcome("x", Status.PASSED),
        Outcome("y", Status.SKIPPED, why="one device"),
        Outcome("z", Status.NOT_REACHED, why="interrupted"),
    ]
    assert (
        headline(report("cuda", *cases, is_whole=True))
        == "Ran on A device on 2026-11-23: 2 passed, 1 skipped, 1 not reached."
    )
    assert headline(report("cuda", *cases)).endswith("; it ended before its end.")


@pytest.mark.parametrize("kind", ["cpu", "late"])
def test_a_run_without_an_accelerator_says_first_that_it_proves_nothing(kind: str) -> None:
    said = markdown(
        report(kind, Outcome("blocked and copied", Status.PASSED, found={"blocked_ms": [0.5]}))
    )
    assert said.splitlines()[2].startswith("Nothing here was proven on an accelerator")
    assert "| not judged" in said
    assert "| met" not in said


def test_both_files_have_what_was_found(tmp_path: Path) -> None:
    made = report(
        "cuda",
        Outcome(
            "blocked | copied",
            Status.PASSED,
            1.5,
            found={"blocked_ms": [1.0, 2.0, 4.0], "is right": True},
        ),
    )
    path = written(made, tmp_path)
    assert sorted(each.name for each in tmp_path.iterdir()) == [
        "2026-11-23T15-00-cuda.json",
        "2026-11-23T15-00-cuda.md",
    ]
    assert "blocked \\| copied" in path.read_text()
    assert "blocked_ms 2.00 [1.00 .. 4.00], is right yes" in path.read_text()
    read = msgspec.json.decode(path.with_suffix(".json").read_bytes(), type=Report)
    assert msgspec.to_builtins(read) == msgspec.to_builtins(made)


def test_every_goal_of_the_table_is_bound_to_a_part() -> None:
    assert {goal.part for goal in GOALS} <= {"capture", "restore", "clone", "dcp"}


def test_tests_of_a_file_are_counted_by_how_they_ended() -> None:
    skipped = '<skipped message="no CUDA device"/>'
    failed, broke = (
        '<failure message="assert 1 == 2&#10;more">long</failure>',
        '<error message="broke"/>',
    )
    tests = {"a": "", "b": skipped, "c": skipped, "d": failed, "e": broke}
    listed = "".join(f'<testcase name="{name}">{how}</testcase>' for name, how in tests.items())
    xml = f"<testsuites><testsuite>{listed}</testsuite></testsuites>"
    found, failures, traces = counted(xml)
    assert found == {"passed": 1, "failed": 2, "skipped": 2, "reasons": ["2 times: no CUDA device"]}
    assert failures == ["d: assert 1 == 2", "e: broke"]
    assert traces == ["d:\nlong", "e:\n"]


def test_waits_and_bytes_are_read_from_a_trace() -> None:
    marked = {
        "ph": "X",
        "cat": "user_annotation",
        "name": "what is looked at",
        "tid": 7,
        "ts": 100.0,
        "dur": 50.0,
    }
    call = {"ph": "X", "cat": "cuda_runtime", "tid": 7, "dur": 1.0}
    copy = {"ph": "X", "cat": "gpu_memcpy", "tid": 3, "ts": 500.0}
    events: list[dict[str, Any]] = [
        marked,
        call | {"name": "cudaStreamSynchronize", "ts": 120.0},
        call | {"name": "cudaEventSynchronize", "ts": 120.0, "tid": 8},
        call | {"name": "cudaDeviceSynchronize", "ts": 160.0},
        call | {"name": "cudaMemcpyAsync", "ts": 121.0},
        copy | {"name": "Memcpy DtoH (Device -> Pinned)", "args": {"bytes": 30}},
        copy | {"name": "Memcpy DtoH (Device -> Pinned)", "args": {"bytes": 12}},
        copy | {"name": "Memcpy DtoH (Device -> Pageable)", "args": {"bytes": 5}},
        copy | {"name": "Memcpy HtoD (Pinned -> Device)", "args": {"bytes": 9}},
    ]
    assert waits(events) == ["cudaStreamSynchronize"]
    assert crossed(events) == {"pinned": 42, "pageable": 5}


def test_the_readme_says_of_gpus_what_the_kept_reports_say() -> None:
    kept = [
        msgspec.json.decode(path.read_bytes(), type=Report)
        for path in sorted((ROOT / "docs" / "gpu").glob("*.json"))
    ]
    on_a_gpu = [each for each in kept if each.is_accelerator]
    readme = (ROOT / "README.md").read_text()
    assert kept == on_a_gpu, "only runs on a GPU are kept in docs/gpu"
    if not on_a_gpu:
        assert "were never run on a GPU" in readme
        return
    newest = max(on_a_gpu, key=lambda each: each.began)
    assert "were never run on a GPU" not in readme
    assert newest.device in readme
    assert newest.began[:10] in readme
