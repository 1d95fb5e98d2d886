"""The cost of lineage operations at a million states and five million metrics, on SQLite or on
PostgreSQL.

    python benchmarks/lineage.py [--states N] [--folder DIR] [--rounds N] [--postgresql]
    [--mlflow-python PATH] [--json FILE]

The database is built once per size in DIR and used again; appended states stay in it. Operations
take turns, round after round. ``--postgresql`` starts a separate server with PostgreSQL's default
settings, including fsync. It fills a database there, which is deleted afterwards. MLflow is
measured at 2,000 runs if PATH names a Python that has it.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from common import machine, out, table
from many_states import BRANCHES, METRICS, RARE, make, make_at
from postgresql import serving

from datastates.lineage import Database, NewState, StateFacts
from datastates.lineage.query import pages, revision, walk
from datastates.lineage.write import record

if TYPE_CHECKING:
    from datastates.lineage.session import Session

FILTER_AND_SORT = "metrics.loss < 0.1 and metrics.acc > 0.5 order by metrics.loss limit 20"

GOALS_MS = {
    "append, fsynced": 2.0,
    "rare metric filter": 10.0,
    "two metrics, sorted, first 20": 50.0,
    "10,000 ancestors (ids)": 50.0,
    "main~9999": 1.0,
    "log, first page of 50": 500.0,
}

MLFLOW = """
import json, sys, tempfile, time, random
from mlflow import MlflowClient
from mlflow.entities import Metric
client = MlflowClient("sqlite:///" + tempfile.mkdtemp(dir=sys.argv[1]) + "/mlflow.db")
experiment = client.create_experiment("benchmark")
rng, appended = random.Random(0), []
for index in range(2000):
    began = time.perf_counter()
    run = client.create_run(experiment)
    client.log_batch(run.info.run_id, [Metric(k, rng.random(), 0, index) for k in ("loss", "val_loss", "acc", "grad_norm", "rare")])
    appended.append(time.perf_counter() - began)
def timed(**query):
    times = []
    for _ in range(10):
        began = time.perf_counter()
        client.search_runs([experiment], **query)
        times.append(time.perf_counter() - began)
    return times
print(json.dumps({
    "append, fsynced": appended[-300:],
    "rare metric filter": timed(filter_string="metrics.rare > 0.998"),
    "two metrics, sorted, first 20": timed(
        filter_string="metrics.loss < 0.1 and metrics.acc > 0.5", order_by=["metrics.loss ASC"], max_results=20
    ),
    "log, first page of 50": timed(max_results=50),
}))
"""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--states", type=int, default=1_000_000)
    parser.add_argument(
        "--folder", type=Path, default=Path(tempfile.gettempdir()) / "datastates-benchmark"
    )
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--postgresql", action="store_true")
    parser.add_argument("--mlflow-python", default=sys.executable)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.states < BRANCHES * 11_000:
        parser.error(
            f"--states is {arguments.states}: chains of 10,000 ancestors need at least"
            f" {BRANCHES * 11_000}"
        )
    out(machine())
    if arguments.postgresql:
        with serving(arguments.folder) as url:
            began = time.monotonic()
            make_at(url, arguments.states)
            out(
                f"built {arguments.states:,} states on PostgreSQL in"
                f" {time.monotonic() - began:.0f} s"
            )
            ours = measure(url, arguments.rounds)
    else:
        ours = measure(prepare(arguments.folder, arguments.states), arguments.rounds)
    peer, why = mlflow(arguments.mlflow_python, arguments.folder)
    out(report(ours, peer, arguments.states))
    if why:
        out(f"MLflow was not measured: {why}")
    if arguments.json:
        arguments.json.write_text(json.dumps({"datastates": ours, "mlflow": peer}))
    return 0


def prepare(folder: Path, count: int) -> str:
    """The URL of a lineage of ``count`` states, which is made unless it exists."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"lineage-{count}.db"
    url = f"sqlite:///{path}"
    if not path.exists():
        began = time.monotonic()
        unfinished = folder / f"unfinished-{os.getpid()}.db"
        make(unfinished, count)
        unfinished.rename(path)
        out(
            f"built {count:,} states in {time.monotonic() - began:.0f} s,"
            f" {path.stat().st_size >> 20} MiB"
        )
    return url


def measure(url: str, rounds: int) -> dict[str, list[float]]:
    """Seconds of each operation, in turns."""
    database = Database(url)
    times: dict[str, list[float]] = {name: [] for name in GOALS_MS}
    with database.read() as session:
        head = revision.resolve(session, "main")
    reads: dict[str, Callable[[Session], object]] = {
        "rare metric filter": lambda s: pages.find(s, "metrics.rare > 0.5"),
        "two metrics, sorted, first 20": lambda s: pages.find(
            s, "metrics.loss < 0.1 and metrics.acc > 0.5 order by metrics.loss limit 20"
        ),
        "10,000 ancestors (ids)": lambda s: walk.ancestor_ids(s, head.uid, limit=10_000),
        "main~9999": lambda s: revision.resolve(s, "main~9999"),
        "log, first page of 50": lambda s: walk.log(s, head.uid, limit=50),
    }
    tip = head.uid
    with database.read() as session:
        for read in reads.values():
            read(session)
        found = len(pages.find(session, "metrics.rare > 0.5").states)
        if found != RARE:
            raise SystemExit(
                f"the rare filter found {found} states instead of {RARE}: take the database away"
                " and build it again"
            )
    for _ in range(rounds):
        for name, read in reads.items():
            began = time.perf_counter()
            with database.read() as session:
                read(session)
            times[name].append(time.perf_counter() - began)
        for _ in range(15):
            metrics = dict.fromkeys((*METRICS, "rare"), 0.3)
            facts = StateFacts(
                secrets.token_hex(12), tip, "main", None, head.step + 1, metrics=metrics
            )
            new = NewState(facts, secrets.token_hex(32), tier="memory", node="benchmark")
            began = time.perf_counter()
            with database.write(durable=True) as session:
                record.record(session, new)
            times["append, fsynced"].append(time.perf_counter() - began)
            tip = new.uid
    database.close()
    return times


def mlflow(python: str, folder: Path) -> tuple[dict[str, list[float]], str | None]:
    """MLflow's times for its equivalent operations, or the reason why there are none."""
    done = subprocess.run(
        [python, "-c", MLFLOW, str(folder)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        return {}, (done.stderr.strip().splitlines() or ["it ended without a word"])[-1]
    found: dict[str, list[float]] = json.loads(done.stdout.splitlines()[-1])
    return found, None


def report(ours: dict[str, list[float]], peer: dict[str, list[float]], count: int) -> str:
    """The table of all operations, in milliseconds."""
    rows = []
    for name, goal in GOALS_MS.items():
        p50, least, p99 = (
            value * 1e3
            for value in (
                statistics.median(ours[name]),
                min(ours[name]),
                percentile(ours[name], 0.99),
            )
        )
        theirs = f"{statistics.median(peer[name]) * 1e3:.1f}" if name in peer else "-"
        rows.append(
            [
                name,
                f"{p50:.2f}",
                f"{least:.2f}",
                f"{p99:.2f}",
                f"{goal:g}",
                "met" if p50 <= goal else "MISSED",
                theirs,
            ]
        )
    head = ["operation", "p50", "min", "p99", "goal", "", "MLflow p50, 2,000 runs"]
    return f"\n{count:,} states, {5 * count:,} metrics; milliseconds\n\n{table(head, rows)}"


def percentile(samples: list[float], share: float) -> float:
    return sorted(samples)[min(len(samples) - 1, int(share * len(samples)))]


if __name__ == "__main__":
    sys.exit(main())
