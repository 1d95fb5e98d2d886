"""A lineage of a job of several ranks: whole states, one that waits for a rank, one that was
given up. Nobody has the bytes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from hashlib import blake2b

from datastates.lineage import Database, NewState, Run
from datastates.lineage.states import Why
from datastates.lineage.write import runs
from datastates.lineage.write.parts import skip_part
from tests.support.lineages import told
from tests.support.records import record_part

BRANCH = "ddp"
BEGAN = datetime(2026, 1, 3, tzinfo=UTC)


@dataclass(frozen=True)
class Job:
    """Uids: of the whole states, oldest first; of the one that waits for its last rank; and of
    the one that rank 1 had no room for."""

    whole: list[str]
    waits: str
    given_up: str
    runs: list[str]


def run_job(
    database: Database,
    *,
    size: int = 3,
    steps: int = 4,
    ended: bool = False,
    of_one_job: bool = False,
) -> Job:
    """Ranks 0 and 1 are on ``host0``, the others on ``host1``; each has a loss of its own, recorded
    by rank.

    ``of_one_job``: their runs say that they belong together, as those of a job do.
    """
    names = [_uid(f"run {rank}") for rank in range(size)]
    for rank, name in enumerate(names):
        with database.write() as session:
            said = runs.of_job("j" * 24, rank, size) if of_one_job else {}
            runs.start(
                session,
                Run(
                    name, _host(rank), "ann", 100 + rank, ("train.py",), None, None, said, {}, BEGAN
                ),
            )
    whole: list[str] = []
    for step in range(1, steps + 1):
        whole.append(_tell(database, names, step, whole[-1] if whole else None, range(size)))
    given_up = _tell(database, names, steps + 1, whole[-1], range(1))
    with database.write() as session:
        new = _part(names, 1, steps + 1, whole[-1])
        skip_part(session, new.facts, rank=1, why=Why.SKIPPED, reason="there was no room in memory")
    waits = _tell(database, names, steps + 2, given_up, range(size - 1))
    if ended:
        for name in names:
            with database.write() as session:
                runs.finish(session, name)
    return Job(whole, waits, given_up, names)


def _tell(database: Database, names: list[str], step: int, parent: str | None, ranks: range) -> str:
    for rank in ranks:
        with database.write() as session:
            record_part(
                session, _part(names, rank, step, parent), rank=rank, reduce={"loss": "each"}
            )
    return _uid(f"step {step}")


def _part(names: list[str], rank: int, step: int, parent: str | None) -> NewState:
    loss = 2 / math.sqrt(step) + (rank - (len(names) - 1) / 2) * 0.2
    return told(
        _uid(f"step {step}"),
        blake2b(f"{step} {rank}".encode(), digest_size=32).hexdigest(),
        parent,
        BRANCH,
        names[rank],
        step,
        world_size=len(names),
        metrics={"loss": loss},
        created_at=BEGAN + timedelta(seconds=step),
        bytes_total=(rank + 1) << 20,
        bytes_new=(rank + 1) << 10,
        node=_host(rank),
    )


def _host(rank: int) -> str:
    return f"host{rank // 2}"


def _uid(word: str) -> str:
    return blake2b(word.encode(), digest_size=12).hexdigest()
