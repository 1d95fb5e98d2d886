"""The start time of a command, compared with Python, and with Python that imports SQLAlchemy.

    python benchmarks/cli_start.py [--rounds N] [--json FILE]

Each command is a separate process. All take turns, round after round. ``ratio`` is relative to
SQLAlchemy's import of the same round.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import machine, out, short, spread, table
from many_states import make

FLOOR = 'python -c "import sqlalchemy"'
GOAL_S = 0.35


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    out(machine())
    with tempfile.TemporaryDirectory() as folder:
        make(Path(folder, "lineage.db"), 1000, 10)
        times = measure(Path(folder), arguments.rounds)
    out(f"\nseconds, median [min .. max] of {arguments.rounds} rounds\n\n{report(times)}")
    if arguments.json:
        arguments.json.write_text(json.dumps(times))
    return 0


def commands() -> dict[str, list[str]]:
    """What is started, and how."""
    ours = [sys.executable, "-m", "datastates"]
    return {
        "python -c pass": [sys.executable, "-c", "pass"],
        FLOOR: [sys.executable, "-c", "import sqlalchemy"],
        "datastates log": [*ours, "log"],
        "datastates find": [*ours, "find", "metrics.loss < 0.01"],
        "datastates branches": [*ours, "branches"],
        "datastates --help": [*ours, "--help"],
    }


def measure(root: Path, rounds: int) -> dict[str, list[float]]:
    """Seconds of each, in turns; the first round fills the caches and does not count."""
    environ = {key: value for key, value in os.environ.items() if not key.startswith("DATASTATES_")}
    times: dict[str, list[float]] = {name: [] for name in commands()}
    for number in range(rounds + 1):
        for name, command in commands().items():
            began = time.perf_counter()
            subprocess.run(command, cwd=root, env=environ, stdout=subprocess.DEVNULL, check=True)
            if number:
                times[name].append(time.perf_counter() - began)
    return times


def report(times: dict[str, list[float]]) -> str:
    rows = []
    for name, took in times.items():
        ratios = [one / other for one, other in zip(took, times[FLOOR], strict=True)]
        goal = (
            f"{GOAL_S:g}: {'met' if statistics.median(took) <= GOAL_S else 'MISSED'}"
            if name == "datastates log"
            else ""
        )
        rows.append([name, spread(took), short(statistics.median(ratios)), goal])
    return table(["command", "seconds", "ratio", "goal"], rows)


if __name__ == "__main__":
    sys.exit(main())
