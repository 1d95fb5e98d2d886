"""What it costs to tell the parts of many ranks: the code of the ranks against a PostgreSQL server, driven by a few processes.

A node of one rank tells by itself. Of a larger one each rank hands its part in at the desk of the first, as in a job (``modules/telling``).
"""

from __future__ import annotations

import multiprocessing
import os
import random
import secrets
import statistics
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from multiprocessing.connection import Connection
from pathlib import Path

import postgresql
from common import machine, out, short, spread, table

from datastates.lineage import Database, NewState, Run, StateFacts, Status
from datastates.lineage.change import runs
from datastates.lineage.change.parts import Telling
from datastates.modules.telling import Said, Teller
from datastates.transport.session.desk import Place

__all__ = ["main"]

_SESSIONS = 8
"""So many nodes of one process at once."""

_HEADER = (
    *("ranks a node", "all at once: first to visible, s", "last part to visible, ms", "transactions a state"),
    *("server's CPU a state, s", "all processes' CPU, s", "a node alone, ms", "asking what became of it, ms"),
)


@dataclass(frozen=True, slots=True)
class _Told:
    """What one process did for a state: when it began, on the clock of all processes; when the first of its ranks heard that the state is
    whole, if one did, and how long that rank had taken; its transactions and its processor time."""

    began: float
    whole: tuple[float, float] | None
    transactions: int
    cpu_s: float


def main(folder: Path, *, ranks: int, states: int, processes: int, nodes: Sequence[int]) -> None:
    """Print a row for each size of node, which take turns at each state."""
    out(machine())
    out(f"load {os.getloadavg()[0]:.1f} at the beginning")
    out(f"{ranks} ranks, {states} states, told by {processes} processes of {_SESSIONS} nodes; median [least .. greatest] of the states\n")
    with postgresql.serving(folder) as url:
        Database(url).close()
        rows = _rows(url, ranks, states, processes, nodes)
    out(table(_HEADER, rows))
    out(f"load {os.getloadavg()[0]:.1f} at the end")


def _rows(url: str, ranks: int, states: int, processes: int, nodes: Sequence[int]) -> list[list[str]]:
    pipes, workers = [], []
    for number in range(processes):
        here, there = multiprocessing.Pipe()
        worker = multiprocessing.get_context("spawn").Process(target=_work, args=(there, url, ranks, number, processes, nodes), daemon=True)
        worker.start()
        pipes.append(here)
        workers.append(worker)
    try:
        for pipe in pipes:
            assert pipe.recv() == "ready"
        found: dict[int, list[list[float]]] = {size: [] for size in nodes}
        parents: dict[int, str | None] = dict.fromkeys(nodes)
        for step in range(states):
            for size in nodes:
                parents[size], measured = _state(pipes, size, parents[size], step)
                found[size].append(measured)
        alone = {size: _alone(url, ranks, size, parents[size]) for size in nodes}
        for pipe in pipes:
            pipe.send(None)
        return [[str(size), *(spread(list(each)) for each in zip(*found[size], strict=True)), *map(short, alone[size])] for size in nodes]
    finally:
        for worker in workers:
            worker.join(10)
            worker.kill()


def _state(pipes: Sequence[Connection], size: int, parent: str | None, step: int) -> tuple[str, list[float]]:
    """All ranks tell their part of one state: its uid, and what is measured of that."""
    cpu, uid = _cpu_of_server(), secrets.token_hex(12)
    for pipe in pipes:
        pipe.send((size, uid, parent, step))
    told: list[_Told] = [pipe.recv() for pipe in pipes]
    ended, took = min(each.whole for each in told if each.whole is not None)
    span = ended - min(each.began for each in told)
    transactions = sum(each.transactions for each in told)
    used = _cpu_of_server() - cpu
    return uid, [span, 1e3 * took, transactions, used, used + sum(each.cpu_s for each in told)]


def _work(pipe: Connection, url: str, ranks: int, number: int, processes: int, sizes: Sequence[int]) -> None:
    """Tell the parts of every so manieth node of each state that comes, all at once and in any order."""
    run = Run(secrets.token_hex(12), "node", "user", os.getpid(), (), None, None, {}, {}, datetime.now(UTC))
    with closing(Database(url)) as database, ExitStack() as stack:
        with database.write() as session:
            runs.start(session, run)
        desks = {size: [stack.enter_context(_node(database, size)) for _ in range(_SESSIONS)] for size in sizes}
        pools = {size: stack.enter_context(ThreadPoolExecutor(_SESSIONS * size)) for size in sizes}
        outer = stack.enter_context(ThreadPoolExecutor(_SESSIONS))
        pipe.send("ready")
        while (asked := pipe.recv()) is not None:
            size, uid, parent, step = asked
            facts = StateFacts(uid, parent, f"main-{size}", run.uid, step, metrics={"loss": 1.0, "lr": 0.1}, world_size=ranks)
            mine = list(range(number, -(-ranks // size), processes))
            random.shuffle(mine)
            before, cpu = sum(node.transactions for node in desks[size]), time.process_time()
            began = time.monotonic()
            slots = [outer.submit(_tell_nodes, node, pools[size], facts, mine[slot::_SESSIONS]) for slot, node in enumerate(desks[size])]
            heard = [each for slot in slots for each in slot.result()]
            told = sum(node.transactions for node in desks[size]) - before
            pipe.send(_Told(began, min(heard, default=None), told, time.process_time() - cpu))


class _Counting(Teller):
    """Counts its transactions."""

    def __init__(self, database: Database) -> None:
        super().__init__(database)
        self.transactions = 0

    def _transact(self, *given: object) -> list[object]:  # type: ignore[override]  # passed through
        self.transactions += 1
        return super()._transact(*given)  # type: ignore[arg-type,return-value]  # likewise


class _Node:
    """The ranks of one node after the other: each has a teller of its own."""

    def __init__(self, database: Database, size: int) -> None:
        self._tellers = [_Counting(database) for _ in range(size)]
        place = Place.drawn()
        for rank, teller in enumerate(self._tellers if size > 1 else ()):
            teller.join(place, seats=size, is_first=rank == 0)

    @property
    def transactions(self) -> int:
        """How many there were, of all ranks."""
        return sum(teller.transactions for teller in self._tellers)

    def tell(self, pool: ThreadPoolExecutor, facts: StateFacts, number: int) -> list[tuple[float, float]]:
        """Each rank of node ``number`` tells its part; when those ended that heard that the state is whole, and how long they took."""
        size = len(self._tellers)
        ranks = range(number * size, min((number + 1) * size, facts.world_size))
        told = [pool.submit(_tell, teller, facts, rank) for teller, rank in zip(self._tellers, ranks, strict=False)]
        return [found for each in told if (found := each.result()) is not None]

    def close(self) -> None:
        """Let go."""
        for teller in reversed(self._tellers):
            teller.leave()


@contextmanager
def _node(database: Database, size: int) -> Iterator[_Node]:
    node = _Node(database, size)
    yield node
    node.close()


def _tell_nodes(node: _Node, pool: ThreadPoolExecutor, facts: StateFacts, numbers: Sequence[int]) -> list[tuple[float, float]]:
    return [found for number in numbers for found in node.tell(pool, facts, number)]


def _tell(teller: Teller, facts: StateFacts, rank: int) -> tuple[float, float] | None:
    new = NewState(facts, secrets.token_hex(32), Status.CAPTURED, 1 << 30, 1 << 30, "memory", f"node {rank}")
    began = time.monotonic()
    heard = teller.tell(Said(parts=(Telling(new, rank),), asked={facts.uid: rank}))
    ended = time.monotonic()
    return (ended, ended - began) if facts.uid in heard.outcomes else None


def _alone(url: str, ranks: int, size: int, parent: str | None) -> tuple[float, float]:
    """Milliseconds that the parts of a node take that nobody is in the way of, and one question."""
    facts = StateFacts(secrets.token_hex(12), parent, f"main-{size}", None, 10**6, world_size=ranks)
    took, asked = [], []
    with closing(Database(url)) as database, _node(database, size) as node, ThreadPoolExecutor(size) as pool:
        for number in range(min(200, max(1, ranks // size - 1))):
            began = time.monotonic()
            node.tell(pool, facts, number)
            took.append(1e3 * (time.monotonic() - began))
            began = time.monotonic()
            Teller(database).tell(Said(asked={facts.uid: number * size}))
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
