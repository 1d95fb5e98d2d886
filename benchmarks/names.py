"""What operations cost with many names: two repositories, the second with a hundred times as many
branches, tags and states.

    python benchmarks/names.py [--branches N N …] [--rounds N] [--limit-s S] [--postgresql]
    [--folder DIR] [--json FILE]

For N branches there are 5 N tags and 30 N states. Two thirds of the states are on ``main``, and the
other branches fork from it at random. The first hundredth of the states is on disk. All later
states are evicted, which makes walks to the nearest state on disk long. ``--branches 100`` alone
takes seconds. Each operation runs in a separate process, which is ended after ``--limit-s``
seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch
from common import machine, out, short, table
from many_states import states, summarise
from postgresql import serving
from sqlalchemy import delete, func, insert, select, text, update

import datastates
from datastates.lineage import Database
from datastates.lineage.schema import METRIC, REF, SEGMENT, STATE, STRETCH
from datastates.lineage.views.branches import branches
from datastates.maintenance.retention_pass import usage
from datastates.repository import Repository

GOAL = {
    "prune, dry run": 150,
    "prune best, dry run": 150,
    "prune": 150,
    "du": 150,
    "track": 2,
    "capture": 2,
    "tag in the terminal": 2,
}
"""The greatest ratio of the times, for a hundred times as many names."""

CONFIG = datastates.Config(
    memory_bytes=64 << 20, durable_every=1, durable_interval_s=None, retention="all"
)

REV = "main@step:3"
"""A state on disk: for a tag of an evicted state, the nearest state on disk is looked for, which
depends on the distance."""

EVERY = 10
"""Every tenth state has a loss."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--branches", type=int, nargs="+", default=[100, 10_000])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--limit-s", type=float, default=700.0)
    parser.add_argument("--postgresql", action="store_true")
    parser.add_argument(
        "--folder", type=Path, default=Path(tempfile.gettempdir()) / "datastates-benchmark"
    )
    parser.add_argument("--only", nargs="+", choices=OPERATIONS, default=list(OPERATIONS))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--run", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run:
        operation, url, packs = arguments.run
        out(json.dumps(OPERATIONS[operation](url, Path(packs))))
        return 0
    out(machine())
    arguments.folder.mkdir(parents=True, exist_ok=True)
    times = {count: measure(arguments, count) for count in arguments.branches}
    out(report(times, arguments))
    if arguments.json:
        arguments.json.write_text(json.dumps(times))
    return 0


def measure(arguments: argparse.Namespace, count: int) -> dict[str, float | None]:
    """The median seconds of each operation; None if it was ended."""
    found: dict[str, float | None] = {}
    server_of = serving(arguments.folder) if arguments.postgresql else nullcontext()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder, server_of as server:
        url, packs = server or f"{folder}/runs", Path(folder, "runs", "packs")
        began = time.monotonic()
        make(url, packs, count)
        out(f"built {count:,} branches in {time.monotonic() - began:.0f} s")
        for name in arguments.only:
            times = [
                timed(name, url, packs, arguments.limit_s)
                for _ in range(1 if name == "prune" else arguments.rounds)
            ]
            known = [each for each in times if each is not None]
            found[name] = statistics.median(known) if len(known) == len(times) else None
            out(
                f"  {name}:"
                f" {'ended' if found[name] is None else short(1e3 * (found[name] or 0)) + ' ms'}"
            )
    return found


def timed(name: str, url: str, packs: Path, limit_s: float) -> float | None:
    command = [sys.executable, __file__, "--run", name, url, str(packs)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=limit_s)
    except subprocess.TimeoutExpired:
        return None
    return float(done.stdout.splitlines()[-1])


def make(url: str, packs: Path, count: int) -> None:
    """A repository whose first states were captured, and whose other rows were written into the
    tables at once."""
    total, held = 30 * count, max(3, 30 * count // 100)
    with (
        datastates.open(url, packs=packs, config=CONFIG) as repo,
        repo.track(x=torch.zeros(4), rng=False) as run,
    ):
        for _ in range(held):
            run.capture(metrics={"loss": 1.0}).wait()
        run.capture().wait("durable")
        held += 1
    rng, database = (
        random.Random(2),
        Database(url if "://" in url else f"sqlite:///{url}/lineage.db"),
    )
    main, length = 2 * total // 3, total // 3 // count
    rows = list(states(total, count, main=main))
    fixed = {
        "micro_step": 0,
        "status": "evicted",
        "bytes_total": 0,
        "bytes_new": 0,
        "world_size": 1,
    }
    columns = (
        "id",
        "uid",
        "digest",
        "parent_id",
        "generation",
        "jump_id",
        "jump_step",
        "step",
        "created_at",
    )
    heads = [(f"branch-{number}", "branch", main + number * length) for number in range(1, count)]
    tags = [
        (f"tag-{number}", "tag", rng.randrange(1, len(rows) + 1)) for number in range(5 * count)
    ]
    with database.write() as session:
        session.execute(
            insert(STATE), [dict(zip(columns, row, strict=True)) | fixed for row in rows[held:]]
        )
        session.execute(
            insert(METRIC),
            [
                {"state_id": at, "key": "loss", "value": rng.random()}
                for at in range(held + 1, len(rows), EVERY)
            ],
        )
        session.execute(
            insert(REF),
            [
                {"name": name, "kind": kind, "state_id": at, "version": 1}
                for name, kind, at in heads + tags
            ],
        )
        session.execute(update(REF).where(REF.c.name == "main").values(state_id=main))
        for each in (STRETCH, SEGMENT):
            session.execute(delete(each))
        session.execute(update(STATE).values(segment_id=None))
        summarise(session)
        if session.dialect.name == "postgresql":
            last = select(func.max(STATE.c.id)).scalar_subquery()
            session.execute(select(func.setval(func.pg_get_serial_sequence("state", "id"), last)))
    if url.startswith("postgresql"):
        with database.write() as session:
            session.execute(text("ANALYZE"))
    database.close()


# The operations: each opens the repository, and returns the seconds of what it is named for


def opened(act: Callable[[Repository], float]) -> Callable[[str, Path], float]:
    def run(url: str, packs: Path) -> float:
        with datastates.open(url, packs=packs, config=CONFIG) as repo:
            return act(repo)

    return run


def seconds(act: Callable[[], object]) -> float:
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def opening(url: str, packs: Path) -> float:
    return seconds(lambda: datastates.open(url, packs=packs).close())


def track(repo: Repository) -> float:
    began = time.perf_counter()
    with repo.track(x=torch.zeros(4), rng=False, branch=f"new-{time.time_ns()}"):
        return time.perf_counter() - began


def capture(repo: Repository) -> float:
    with repo.track(x=torch.zeros(4), rng=False, branch=f"new-{time.time_ns()}") as run:
        run.capture().wait()
        return statistics.median(seconds(lambda: run.capture().wait()) for _ in range(9))


def tag(url: str, packs: Path) -> float:
    command = [
        sys.executable,
        "-m",
        "datastates",
        "tag",
        f"mark-{time.time_ns()}",
        REV,
        "--repo",
        url,
    ]
    return seconds(
        lambda: subprocess.run(
            command,
            capture_output=True,
            check=False,
            env={**os.environ, "DATASTATES_PACKS": str(packs)},
        )
    )


def glance(repo: Repository) -> float:
    def act() -> None:
        with repo.core.database.read() as session:
            branches(session, limit=50)

    return seconds(act)


OPERATIONS: dict[str, Callable[[str, Path], float]] = {
    "open": opening,
    "track": opened(track),
    "capture": opened(capture),
    "tag": opened(lambda repo: seconds(lambda: repo.tag(f"mark-{time.time_ns()}", REV))),
    "tag in the terminal": tag,
    "branches": opened(glance),
    "prune, dry run": opened(lambda repo: seconds(lambda: repo.prune("latest:1", dry_run=True))),
    "prune best, dry run": opened(
        lambda repo: seconds(lambda: repo.prune("latest:1 best:1:loss", dry_run=True))
    ),
    "du": opened(lambda repo: seconds(lambda: usage(repo.core))),
    "gc": opened(lambda repo: seconds(lambda: repo.gc(dry_run=True))),
    "prune": opened(lambda repo: seconds(lambda: repo.prune("latest:1"))),
}


def report(times: dict[int, dict[str, float | None]], arguments: argparse.Namespace) -> str:
    counts, rows = list(times), []
    for name in arguments.only:
        first, last = times[counts[0]][name], times[counts[-1]][name]
        ratio = None if first is None or last is None else last / first
        goal = GOAL.get(name)
        judged = (
            ""
            if goal is None or len(counts) < 2
            else f"{goal}: {'met' if ratio is not None and ratio <= goal else 'MISSED'}"
        )
        shown = [
            f"over {1e3 * arguments.limit_s:.0f}" if each is None else short(1e3 * each)
            for each in (times[count][name] for count in counts)
        ]
        rows.append([name, *shown, "" if ratio is None else short(ratio), judged])
    head = ["operation", *(f"{count:,} branches" for count in counts), "ratio", "goal (ratio)"]
    return f"\nmilliseconds\n\n{table(head, rows)}"


if __name__ == "__main__":
    sys.exit(main())
