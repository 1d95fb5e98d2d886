"""A lineage of the size that people have after some months: 10,000 states on 40 branches, of 200
runs, with 30 metrics.

``populate`` leaves one branch and one run to whoever trains on.
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from datastates.lineage import NewState, Status
from datastates.lineage.states import Run
from datastates.lineage.write import record, refs, runs
from datastates.values import Value
from tests.support.lineages import told

if TYPE_CHECKING:
    from datastates.repository import Repository

STATES, BRANCHES, RUNS = 10_000, 40, 200
METRICS = (
    "loss",
    "val_loss",
    "val/accuracy",
    *(f"layer{number}/grad_norm" for number in range(27)),
)

_TRUNK = 650
_EACH = (STATES - _TRUNK) // (BRANCHES - 2)
_PIECES = RUNS // BRANCHES  # runs of each branch but the trunk, which has the others
_OPTIMIZERS = ("adamw", "sgd", "lion")
_BYTES = 40 << 20


@dataclass(frozen=True, slots=True)
class _Planned:
    """A branch to be: the branch and the step that it forks from, and what is chosen for it."""

    name: str
    length: int
    parent: str | None
    fork: int
    config: dict[str, Value]


def populate(repository: Repository, *, seed: int = 7) -> None:
    """Record it all by the lineage's own recorder, as trainings long ago would have: nobody has
    the bytes of most states."""
    rng, steps = random.Random(seed), dict[tuple[str, int], str]()
    began = datetime.now(UTC) - timedelta(days=30)
    for number, planned in enumerate(_plan(rng)):
        with repository.core.database.write() as session:
            if planned.parent is not None:
                refs.branch(session, planned.name, steps[planned.parent, planned.fork])
            pieces = _PIECES if planned.parent else RUNS - 1 - _PIECES * (BRANCHES - 2)
            owners = [
                _run(rng, planned, began + timedelta(hours=12 * number + 2 * piece))
                for piece in range(pieces)
            ]
            for run in owners:
                runs.start(session, run)
            folder = repository.core.home.uid or ""
            new = list(_states(rng, planned, owners, steps, folder))
            for start in range(0, len(new), 500):
                record.record_all(session, new[start : start + 500])


def _plan(rng: random.Random) -> Iterator[_Planned]:
    """The trunk, branches that fork from it, and every fourth from another branch."""
    base: dict[str, Value] = {
        "lr": 0.1,
        "wd": 0.0,
        "optimizer": "adamw",
        "batch_size": 64,
        "warmup": 100,
    }
    made = [_Planned("main", _TRUNK, None, 0, base)]
    yield made[0]
    for number in range(1, BRANCHES - 1):
        parent = made[rng.randrange(1, number)] if number % 4 == 0 else made[0]
        fork = parent.fork + rng.randrange(parent.length // 4, parent.length)
        config = parent.config | {"lr": round(10 ** rng.uniform(-4, -0.5), 5)}
        if number % 3 == 0:
            config["optimizer"] = _OPTIMIZERS[number // 3 % len(_OPTIMIZERS)]
        made.append(_Planned(f"study/variant-{number:02}", _EACH, parent.name, fork, config))
        yield made[-1]


def _run(rng: random.Random, planned: _Planned, began: datetime) -> Run:
    ended = began + timedelta(hours=2)
    host, branch = f"node{rng.randrange(4)}", planned.name
    argv = ("train.py", "--branch", branch)
    return Run(
        f"{rng.getrandbits(96):024x}",
        host,
        "ann",
        os.getpid(),
        argv,
        None,
        None,
        planned.config,
        {},
        began,
        ended,
        None,
        branch,
    )


def _states(
    rng: random.Random,
    planned: _Planned,
    owners: Sequence[Run],
    steps: dict[tuple[str, int], str],
    folder: str,
) -> Iterator[NewState]:
    parent = None if planned.parent is None else steps[planned.parent, planned.fork]
    drift = rng.uniform(-0.15, 0.25)
    for place in range(planned.length):
        step, piece = planned.fork + place + 1, place * len(owners) // planned.length
        run = owners[piece]
        is_kept = place % 40 == 39 or place == planned.length - 1
        created = run.started_at + timedelta(
            seconds=10 * (place - piece * planned.length // len(owners))
        )
        new = told(
            f"{rng.getrandbits(96):024x}", f"{rng.getrandbits(256):064x}", parent, planned.name, run.uid, step,
            metrics=_metrics(rng, step, place, drift), attributes={"study": "lr"} if planned.parent else {}, created_at=created,
            status=Status.DURABLE if is_kept else Status.EVICTED, bytes_total=_BYTES, bytes_new=rng.randrange(_BYTES // 8, _BYTES),
            tier="local", node=folder,
        )  # fmt: skip
        steps[planned.name, step] = parent = new.uid
        yield new


def _metrics(rng: random.Random, step: int, place: int, drift: float) -> dict[str, float]:
    """The loss of each state; what validation says of every tenth, and the norms of every
    twentieth."""
    loss = 0.4 + 2.2 * math.exp(-step / 160) + drift * place / (_EACH + place) + rng.gauss(0, 0.02)
    found = {"loss": loss}
    if place % 10 == 9:
        found |= {
            "val_loss": loss + 0.05 + abs(rng.gauss(0, 0.02)),
            "val/accuracy": max(0.0, 1 - loss / 3),
        }
    if place % 20 == 19:
        found |= {key: abs(rng.gauss(1, 0.3)) for key in METRICS[3:]}
    return found
