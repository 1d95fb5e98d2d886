"""A study of rates and seeds, recorded without a training: what curves of many branches are
tested and looked at with."""

from __future__ import annotations

import math
import random
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from datastates.lineage.states import Run, Status
from datastates.lineage.write import record, refs, runs
from datastates.values import Value
from tests.support.lineages import told

if TYPE_CHECKING:
    from datastates.lineage.session import Session
    from datastates.repository import Repository

RATES = (0.01, 0.03, 0.1, 0.3)
_FURTHER = ("acc", "val/acc", "grad/norm", "lr", "time/step", "val_loss")


def sow(repository: Repository, *, seeds: int, steps: int, metrics: int = 6) -> None:
    """``main`` for 20 steps; from its end ``lr-RATE/seed-N`` for each rate and seed; ``seed-0``
    of the highest rate diverges."""
    with repository.core.database.write() as session:
        rng = random.Random(0)
        keys = [*_FURTHER, *(f"layer-{number}/norm" for number in range(metrics - len(_FURTHER)))]
        began = datetime.now(UTC) - timedelta(hours=20)
        warm = _branch(session, rng, "main", 0.1, 0, None, (1, 20), began, keys[:6])
        refs.tag(session, "warm", warm, message="end of the shared prefix")
        for rate in RATES:
            for seed in range(seeds):
                began += timedelta(minutes=12)
                name = f"lr-{rate}/seed-{seed}"
                refs.branch(session, name, warm)
                _branch(session, rng, name, rate, seed, warm, (21, 20 + steps), began, keys)


def _branch(
    session: Session,
    rng: random.Random,
    name: str,
    rate: float,
    seed: int,
    parent: str | None,
    steps: tuple[int, int],
    began: datetime,
    keys: list[str],
) -> str:
    """Its states, and a run of its own; gives the newest."""
    config: dict[str, Value] = {"lr": rate, "seed": seed, "optimizer.name": "adamw"}
    run = Run(
        f"{rng.getrandbits(96):024x}", "node-1", "somebody", 1, ("train",), None, None, config, {}, began,
        began + timedelta(hours=1), branch=name,
    )  # fmt: skip
    runs.start(session, run)
    shift = rng.gauss(0, 0.04)
    for step in range(steps[0], steps[1] + 1):
        loss = (
            2.3 * math.exp(-step * (0.3 + rate * 3) / 60)
            + 0.2
            + abs(math.log10(rate) + 1) * 0.12
            + shift
            + rng.gauss(0, 0.03)
        )
        if rate == RATES[-1] and seed == 0 and step > 20 + (steps[1] - 20) // 2:
            loss = 10.0 ** min(6, step / 10)
        values = {key: rng.random() for key in keys} | {
            "val_loss": loss + 0.1,
            "val/acc": 1 / (1 + loss),
            "epoch": step / 20,
        }
        state = told(
            f"{rng.getrandbits(96):024x}", f"{rng.getrandbits(256):064x}", parent, name, run.uid, step,
            metrics={"loss": loss, **values}, attributes={"seed": seed}, created_at=began + timedelta(seconds=2 * step), config=config,
            status=Status.DURABLE if step == steps[1] else Status.EVICTED, bytes_total=41_943_040, bytes_new=12_000_000,
        )  # fmt: skip
        record.record(session, state)
        parent = state.uid
    return parent or ""
