"""The cost of the first view at a million states on SQLite: a list of every branch, and curves of
long branches.

    python benchmarks/branches.py [--states N] [--branches N] [--long N] [--rounds N] [--folder DIR]
    [--json FILE]

One lineage has ``--branches`` of equal length, the other ``--long``; each is built once per size in
DIR and used again. ``cold`` is the first query of a new connection, ``warm`` the median of the
rounds after it. Recording is measured in a copy, in turns with states that no branch has: those
have no summaries.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from common import machine, out, table
from many_states import METRICS, make

from datastates.api.curves import Curves
from datastates.lineage import Database, NewState, StateFacts
from datastates.lineage.lookup import id_of
from datastates.lineage.query import names as names_query
from datastates.lineage.query.curves import curve
from datastates.lineage.views.branches import branches
from datastates.lineage.write import record

if TYPE_CHECKING:
    from datastates.lineage.session import Session

GOALS_MS = {
    "50 branches, newest first": 1500.0,
    "50 branches, best first": 1500.0,
    "curves of 8 long branches": 1500.0,
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--states", type=int, default=1_000_000)
    parser.add_argument("--branches", type=int, default=2000)
    parser.add_argument("--long", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--captures", type=int, default=300)
    parser.add_argument(
        "--folder", type=Path, default=Path(tempfile.gettempdir()) / "datastates-benchmark"
    )
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    out(machine())
    many = prepare(arguments.folder, arguments.states, arguments.branches)
    long = prepare(arguments.folder, arguments.states, arguments.long)
    times = asked(many, glances(), arguments.rounds) | asked(
        long, curves(arguments.long), arguments.rounds
    )
    out(report(times, arguments))
    recorded = recording(many, arguments.captures)
    out(
        "\nrecord, milliseconds p50 / p99:"
        f" {', '.join(f'{name} {both(values)}' for name, values in recorded.items())}"
    )
    if arguments.json:
        arguments.json.write_text(json.dumps({"asked": times, "recorded": recorded}))
    return 0


def prepare(folder: Path, count: int, branches: int) -> Path:
    """The file of a lineage, made now unless it is there."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"branches-{count}-{branches}.db"
    if not path.exists():
        began = time.monotonic()
        unfinished = folder / f"unfinished-{os.getpid()}.db"
        make(unfinished, count, branches)
        unfinished.rename(path)
        out(
            f"built {count:,} states on {branches:,} branches in {time.monotonic() - began:.0f} s,"
            f" {path.stat().st_size >> 20} MiB"
        )
    return path


def glances() -> dict[str, Callable[[Session], object]]:
    """The queries of the first view."""
    return {
        "50 branches, newest first": lambda s: branches(s, limit=50),
        "50 branches, best first": lambda s: branches(s, sort="best", limit=50),
        "50 branches, most bytes first": lambda s: branches(s, sort="bytes", limit=50),
        "50 branches, chosen by a metric": lambda s: branches(s, "metrics.loss < 0.5", limit=50),
        "all branches": lambda s: branches(s),
    }


def curves(long: int) -> dict[str, Callable[[Session], object]]:
    """Curves that are not cached, and one curve read state by state, as for short branches."""
    names = ["main", *(f"branch-{number}" for number in range(1, long))][:8]

    def summarised(session: Session) -> object:
        ids = [id_of(session, names_query.get(session, name).state) for name in names]
        return Curves().series(session, names, ids, ["loss"], 1000)

    return {
        "curves of 8 long branches": summarised,
        "one of them, state by state": lambda s: curve(
            s, id_of(s, names_query.get(s, names[-1]).state), "loss"
        ),
    }


def asked(
    path: Path, questions: dict[str, Callable[[Session], object]], rounds: int
) -> dict[str, list[float]]:
    """Seconds of each query, the cold one first. Queries take turns."""
    times: dict[str, list[float]] = {name: [] for name in questions}
    for name, question in questions.items():
        database = Database(f"sqlite:///{path}")
        times[name].append(seconds(database, question))
        database.close()
    database = Database(f"sqlite:///{path}")
    for _ in range(rounds):
        for name, question in questions.items():
            times[name].append(seconds(database, question))
    database.close()
    return times


def seconds(database: Database, question: Callable[[Session], object]) -> float:
    began = time.perf_counter()
    with database.read() as session:
        question(session)
    return time.perf_counter() - began


def recording(path: Path, captures: int) -> dict[str, list[float]]:
    """Seconds of each record on a branch, and of one without a branch."""
    times: dict[str, list[float]] = {"on a branch": [], "on none": []}
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        copy = Path(folder, "lineage.db")
        shutil.copy(path, copy)
        database = Database(f"sqlite:///{copy}")
        with database.read() as session:
            head = names_query.get(session, "main").state
        tips: dict[str, str] = dict.fromkeys(times, head)
        for step in range(captures):
            for name, took in times.items():
                metrics = dict.fromkeys((*METRICS, "rare"), 1 / (1 + step))
                branch = "main" if name == "on a branch" else None
                facts = StateFacts(
                    secrets.token_hex(12), tips[name], branch, None, step, metrics=metrics
                )
                began = time.perf_counter()
                with database.write() as session:
                    record.record(
                        session,
                        NewState(facts, secrets.token_hex(32), tier="memory", node="benchmark"),
                    )
                took.append(time.perf_counter() - began)
                tips[name] = facts.uid
        database.close()
    return times


def report(times: dict[str, list[float]], arguments: argparse.Namespace) -> str:
    rows = []
    for name, (cold, *warm) in times.items():
        goal = GOALS_MS.get(name)
        judged = "" if goal is None else f"{goal:g}: {'met' if cold * 1e3 <= goal else 'MISSED'}"
        rows.append(
            [
                name,
                f"{cold * 1e3:.0f}",
                f"{statistics.median(warm) * 1e3:.0f}",
                f"{max(warm) * 1e3:.0f}",
                judged,
            ]
        )
    said = (
        f"\n{arguments.states:,} states; {arguments.branches:,} branches, and {arguments.long} for"
        " the curves; milliseconds"
    )
    return f"{said}\n\n{table(['question', 'cold', 'warm p50', 'warm max', 'goal (cold)'], rows)}"


def both(values: list[float]) -> str:
    ordered = sorted(values)
    return (
        f"{statistics.median(values) * 1e3:.2f} /"
        f" {ordered[int(0.99 * (len(ordered) - 1))] * 1e3:.2f}"
    )


if __name__ == "__main__":
    sys.exit(main())
