"""The cost of reporting the parts of many ranks: the ranks' code with a PostgreSQL server, driven
by a few processes."""

from __future__ import annotations

import multiprocessing
import os
import random
import secrets
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import postgresql
from common import machine, out, short, spread, table

from datastates.engine.node_reports import NodeReports
from datastates.engine.rank_reports import Reply, Report, report
from datastates.errors import Unavailable
from datastates.lineage import Database, NewState, Run, StateFacts, Status
from datastates.lineage.write import runs
from datastates.lineage.write.parts import PartReport

_SESSIONS = 8
"""The number of ranks that run in one process at once."""

_WAYS = ("each rank", "one process")
"""Which process writes to the database: that of each rank, or one for all of them, as with
``Config(agent="process")``."""

Tell = Callable[[Report], Reply]

_HEADER = (
    *(
        "ranks",
        "written by",
        "all at once: first to visible, s",
        "last part to visible, ms",
        "server's CPU a state, s",
    ),
    *("all processes' CPU, s", "a rank alone, ms", "asking what became of it, ms"),
)


@dataclass(frozen=True, slots=True)
class _Told:
    """The measurements of one process for a state: its begin, the time at which the first of its
    ranks read that the state is complete, if one did, how long that rank took, and its CPU time.
    All times are on the clock of all processes."""

    began: float
    whole: tuple[float, float] | None
    cpu_s: float


def main(folder: Path, *, ranks: int, states: int, processes: int) -> None:
    """Print one row: the cost of a state whose ranks all report their parts at once, and the cost
    of one rank."""
    out(machine())
    out(f"load {os.getloadavg()[0]:.1f} at the beginning")
    out(
        f"{ranks} ranks, {states} states, told by {processes} processes of {_SESSIONS} ranks;"
        " median [least .. greatest] of the states\n"
    )
    with postgresql.serving(folder) as url:
        Database(url).close()
        rows = [_row(url, ranks, states, processes, way) for way in _WAYS]
    out(table(_HEADER, rows))
    out(f"load {os.getloadavg()[0]:.1f} at the end")


def _row(url: str, ranks: int, states: int, processes: int, way: str) -> list[str]:
    pipes, workers = [], []
    for number in range(processes):
        here, there = multiprocessing.Pipe()
        worker = multiprocessing.get_context("spawn").Process(
            target=_work, args=(there, url, ranks, number, processes, way), daemon=True
        )
        worker.start()
        pipes.append(here)
        workers.append(worker)
    try:
        for pipe in pipes:
            assert pipe.recv() == "ready"
        found: list[list[float]] = []
        parent: str | None = None
        branch = way.replace(" ", "-")
        for step in range(states):
            parent, measured = _state(pipes, parent, step, branch)
            found.append(measured)
        alone = _alone(url, ranks, parent, branch)
        for pipe in pipes:
            pipe.send(None)
        return [
            str(ranks),
            way,
            *(spread(list(each)) for each in zip(*found, strict=True)),
            *map(short, alone),
        ]
    finally:
        for worker in workers:
            worker.join(10)
            worker.kill()


def _state(
    pipes: Sequence[Connection], parent: str | None, step: int, branch: str
) -> tuple[str, list[float]]:
    """Report the parts of all ranks of one state. Returns its uid and the measurements."""
    cpu, uid = _cpu_of_server(), secrets.token_hex(12)
    for pipe in pipes:
        pipe.send((uid, parent, step, branch))
    told: list[_Told] = [pipe.recv() for pipe in pipes]
    ended, took = min(each.whole for each in told if each.whole is not None)
    span = ended - min(each.began for each in told)
    used = _cpu_of_server() - cpu
    return uid, [span, 1e3 * took, used, used + sum(each.cpu_s for each in told)]


def _work(pipe: Connection, url: str, ranks: int, number: int, processes: int, way: str) -> None:
    """Report every n-th rank's part of each state, all at once and in any order."""
    run = Run(
        secrets.token_hex(12),
        "node",
        "user",
        os.getpid(),
        (),
        None,
        None,
        {},
        {},
        datetime.now(UTC),
    )
    with closing(Database(url)) as database, ThreadPoolExecutor(_SESSIONS) as pool:
        with database.write() as session:
            runs.start(session, run)
        reports = [NodeReports(database) for _ in range(_SESSIONS)]
        for each in reports if way == _WAYS[1] else ():
            while not _is_connected(each):
                time.sleep(0.1)
        pipe.send("ready")
        while (asked := pipe.recv()) is not None:
            uid, parent, step, branch = asked
            facts = StateFacts(
                uid,
                parent,
                branch,
                run.uid,
                step,
                metrics={"loss": 1.0, "lr": 0.1},
                world_size=ranks,
            )
            mine = list(range(number, ranks, processes))
            random.shuffle(mine)
            began, cpu = time.monotonic(), time.process_time()
            told = partial(report, database)
            tells = [each.report if way == _WAYS[1] else told for each in reports]
            calls = [
                pool.submit(_tell_all, tells[i], facts, mine[i::_SESSIONS])
                for i in range(_SESSIONS)
            ]
            heard = [each for call in calls for each in call.result()]
            pipe.send(_Told(began, min(heard, default=None), time.process_time() - cpu))


def _is_connected(reports: NodeReports) -> bool:
    try:
        reports._connection = reports._connect()
    except Unavailable:
        return False
    return True


def _tell_all(tell: Tell, facts: StateFacts, ranks: Sequence[int]) -> list[tuple[float, float]]:
    return [found for rank in ranks if (found := _tell(tell, facts, rank)) is not None]


def _tell(tell: Tell, facts: StateFacts, rank: int) -> tuple[float, float] | None:
    """Report a rank's part. If the rank reads that the state is complete, returns when this was,
    and how long it took."""
    new = NewState(
        facts, secrets.token_hex(32), Status.CAPTURED, 1 << 30, 1 << 30, "memory", f"node {rank}"
    )
    began = time.monotonic()
    heard = tell(Report(parts=(PartReport(new, rank),), asked={facts.uid: rank}))
    ended = time.monotonic()
    return (ended, ended - began) if facts.uid in heard.outcomes else None


def _alone(url: str, ranks: int, parent: str | None, branch: str) -> tuple[float, float]:
    """Milliseconds of one rank's report while no other rank reports, and of one query."""
    facts = StateFacts(secrets.token_hex(12), parent, branch, None, 10**6, world_size=ranks)
    took, asked = [], []
    with closing(Database(url)) as database:
        for rank in range(min(200, max(1, ranks - 1))):
            began = time.monotonic()
            _tell(partial(report, database), facts, rank)
            took.append(1e3 * (time.monotonic() - began))
            began = time.monotonic()
            report(database, Report(asked={facts.uid: rank}))
            asked.append(1e3 * (time.monotonic() - began))
    return statistics.median(took), statistics.median(asked)


def _cpu_of_server() -> float:
    """CPU seconds of all PostgreSQL processes here, including ended ones."""
    ticks = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, fields = path.read_text().partition(" (")[2].rpartition(") ")
        except OSError:
            continue
        if name == "postgres":
            each = fields.split()
            ticks += int(each[11]) + int(each[12])
    return ticks / os.sysconf("SC_CLK_TCK")
