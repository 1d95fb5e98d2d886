"""What it costs to tell the parts of many ranks: the code of the lineage against a PostgreSQL server, driven by a few processes."""

from __future__ import annotations

import multiprocessing
import os
import random
import secrets
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from multiprocessing.connection import Connection
from pathlib import Path

import postgresql
from common import machine, out, short, spread, table

from datastates.lineage import Database, NewState, Run, StateFacts, Status
from datastates.lineage.change import runs
from datastates.lineage.change.parts import Telling, record_parts
from datastates.lineage.search.outcomes import outcomes

__all__ = ["main"]

_SESSIONS = 8
"""So many transactions of one process at once."""


@dataclass(frozen=True, slots=True)
class _Told:
    """One transaction: when it began and ended, on the clock of all processes, and whether the state was whole by it."""

    began: float
    ended: float
    is_whole: bool


def main(folder: Path, *, ranks: int, states: int, processes: int, batches: Sequence[int]) -> None:
    """Print a row for each size of batch: 1 is a rank that tells its own part, 8 a process of a node that tells those of eight."""
    out(machine())
    out(
        f"{ranks} ranks, {states} states, told by {processes} processes of {_SESSIONS} sessions; median [least .. greatest] of the states\n"
    )
    rows = []
    for batch in batches:
        with postgresql.serving(folder) as url:
            rows.append(_row(url, ranks, states, processes, batch))
    header = ("parts a transaction", "all at once: first to visible, s", "last part to visible, ms", "transactions a state")
    out(table((*header, "server's CPU a state, s", "a transaction alone, ms", "asking what became of it, ms"), rows))


def _row(url: str, ranks: int, states: int, processes: int, batch: int) -> list[str]:
    Database(url).close()
    pipes, workers = [], []
    for number in range(processes):
        here, there = multiprocessing.Pipe()
        share = list(range(number, -(-ranks // batch), processes))
        worker = multiprocessing.get_context("spawn").Process(target=_work, args=(there, url, ranks, batch, share), daemon=True)
        worker.start()
        pipes.append(here)
        workers.append(worker)
    try:
        for pipe in pipes:
            assert pipe.recv() == "ready"
        spans, lasts, cpus, parent = [], [], [], None
        for step in range(states):
            before, uid = _cpu_of_server(), secrets.token_hex(12)
            for pipe in pipes:
                pipe.send((uid, parent, step))
            told = [each for pipe in pipes for each in pipe.recv()]
            (whole,) = [each for each in told if each.is_whole]
            spans.append(whole.ended - min(each.began for each in told))
            lasts.append(1e3 * (whole.ended - max(each.began for each in told)))
            cpus.append(_cpu_of_server() - before)
            parent = uid
        alone, asked = _alone(url, ranks, batch, parent)
        for pipe in pipes:
            pipe.send(None)
        return [str(batch), spread(spans), spread(lasts), str(len(told)), spread(cpus), short(alone), short(asked)]
    finally:
        for worker in workers:
            worker.join(10)
            worker.kill()


def _work(pipe: Connection, url: str, ranks: int, batch: int, share: Sequence[int]) -> None:
    """Tell the parts of these batches of ranks of each state that comes, all at once and in any order."""
    run = Run(secrets.token_hex(12), "node", "user", os.getpid(), (), None, None, {}, {}, datetime.now(UTC))
    with closing(Database(url)) as database, ThreadPoolExecutor(_SESSIONS) as pool:
        with database.write() as session:
            runs.start(session, run)
        pipe.send("ready")
        while (asked := pipe.recv()) is not None:
            uid, parent, step = asked
            facts = StateFacts(uid, parent, "main", run.uid, step, metrics={"loss": 1.0, "lr": 0.1}, world_size=ranks)
            order = random.sample(share, len(share))
            pipe.send(list(pool.map(lambda number, facts=facts: _tell(database, facts, number, batch), order)))


def _tell(database: Database, facts: StateFacts, number: int, batch: int) -> _Told:
    mine = range(number * batch, min((number + 1) * batch, facts.world_size))
    told = [
        Telling(NewState(facts, secrets.token_hex(32), Status.CAPTURED, 1 << 30, 1 << 30, "memory", f"node {rank}"), rank) for rank in mine
    ]
    began = time.monotonic()
    with database.write() as session:
        record_parts(session, told)
        found, _ = outcomes(session, {facts.uid: mine[0]})
    return _Told(began, time.monotonic(), facts.uid in found)


def _alone(url: str, ranks: int, batch: int, parent: str | None) -> tuple[float, float]:
    """Milliseconds of a transaction that nobody is in the way of, and of one question, when half of the ranks have told theirs."""
    facts = StateFacts(secrets.token_hex(12), parent, "main", None, 10**6, world_size=ranks)
    took, asked = [], []
    with closing(Database(url)) as database:
        for number in range(min(200, ranks // batch - 1)):
            told = _tell(database, replace(facts), number, batch)
            took.append(1e3 * (told.ended - told.began))
            began = time.monotonic()
            with database.read() as session:
                outcomes(session, {facts.uid: number * batch})
            asked.append(1e3 * (time.monotonic() - began))
    return statistics.median(took), statistics.median(asked)


def _cpu_of_server() -> float:
    """Seconds of processor time of all processes of PostgreSQL here, those that have ended among them."""
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
