"""Many processes write one repository at once."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from datastates.lineage import Database
from datastates.lineage.query import names, walk
from tests.support import warm
from tests.support.effort import effort

PROCESSES, OWN, SHARED = effort(8, 4), effort(180, 90), effort(20, 10)


def test_nothing_is_lost_when_many_processes_record(
    empty_url: str, record_property: Callable[[str, object], None]
) -> None:
    reports = run_recorders(empty_url)
    database = Database(empty_url, create=False)
    with database.read() as session:
        for name, report in reports.items():
            head = names.get(session, name).state
            assert [state.uid for state in walk.log(session, head)] == report["recorded"][name][
                ::-1
            ]
        shared = walk.log(session, names.get(session, "shared").state)
        events = names.reflog(session, "shared")
    database.close()
    assert len(shared) == PROCESSES * SHARED
    assert {state.uid for state in shared} == {
        uid for report in reports.values() for uid in report["recorded"]["shared"]
    }
    assert [event.new for event in events] == [state.uid for state in shared]
    assert [event.old for event in events[:-1]] == [state.uid for state in shared[1:]]
    tell(empty_url, reports, record_property)


def run_recorders(url: str) -> dict[str, Any]:
    """What each process reports, once all of them have ended; they begin together, on a lineage
    that is not there yet."""
    program = Path(__file__).with_name("recorder.py")
    children = {}
    for number in range(PROCESSES):
        name = f"process-{number}"
        command = [sys.executable, str(program), url, name, str(OWN), str(SHARED)]
        children[name] = warm.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
    for child in children.values():
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
    for child in children.values():
        assert child.stdin is not None
        child.stdin.write("go\n")
        child.stdin.flush()
    outs = {name: child.communicate()[0] for name, child in children.items()}
    assert [child.returncode for child in children.values()] == [0] * PROCESSES
    return {name: json.loads(out) for name, out in outs.items()}


def tell(url: str, reports: dict[str, Any], record_property: Callable[[str, object], None]) -> None:
    """The latency of ``record``, for whoever reads the report of the tests."""
    took = sorted(each for report in reports.values() for each in report["took"])
    conflicts = sum(report["conflicts"] for report in reports.values())
    figures = {
        "p50_ms": statistics.median(took) * 1e3,
        "p99_ms": took[len(took) * 99 // 100] * 1e3,
        "max_ms": took[-1] * 1e3,
    }
    for name, value in figures.items():
        record_property(name, round(value, 2))
    shown = ", ".join(f"{name} {value:.1f}" for name, value in figures.items())
    sys.stdout.write(
        f"\n{PROCESSES} x {OWN + SHARED} records, {url.split(':')[0]}: {shown}, {conflicts}"
        " conflicts retried\n"
    )
