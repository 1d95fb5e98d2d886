"""The processes that are tracking now, as far as can be known, and what their trainings captured last."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sqlalchemy import bindparam, select

from datastates.lineage.batches import batches
from datastates.lineage.change import runs
from datastates.lineage.schema import RunRow, table
from datastates.lineage.states import Run

from .branches import Branch, Life, Living
from .overview import branches

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

__all__ = ["Process", "processes"]

_BATCH = 500


@dataclass(frozen=True, slots=True)
class Process:
    """A process that did not finish: its run, whether it is alive, and its trainings that go on.

    ``branches`` are, by the uid of a training, those whose newest state it captured.
    """

    run: Run
    life: Life
    trainings: tuple[Run, ...]
    branches: dict[str, Branch]


def processes(session: Session, living: Living, *, metric: str | None = None) -> tuple[list[Process], str | None]:
    """Every process that is alive or may be, the last begun first; and the metric whose values are given for their branches."""
    lives = [(run, life) for run in reversed(runs.unfinished(session)) if (life := living(run)) is not Life.ENDED]
    trainings = _trainings(session, [run.uid for run, _ in lives])
    names = {each.branch for found in trainings.values() for each in found if each.branch is not None}
    found = branches(session, names=names, metric=metric, living=living)
    captured = {(branch.run, branch.name): branch for branch in found}
    made = []
    for run, life in lives:
        own = tuple(trainings.get(run.uid, ()))
        known = {each.uid: captured[key] for each in own if (key := (each.uid, each.branch or "")) in captured}
        made.append(Process(run, life, own, known))
    return made, found.metric


def _trainings(session: Session, uids: Sequence[str]) -> dict[str, list[Run]]:
    """The trainings that go on in some processes, by the uid of the process, the first begun first."""
    found: defaultdict[str, list[Run]] = defaultdict(list)
    for some in batches(uids, _BATCH):
        ids = list(session.execute(_TRAININGS, {"uids": some}).scalars())
        for run in sorted(runs.by_ids(session, ids).values(), key=lambda one: one.started_at):
            found[run.process or ""].append(run)
    return found


_run = table(RunRow)
_TRAININGS = select(_run.c.id).where(_run.c.process.in_(bindparam("uids", expanding=True)), _run.c.finished_at.is_(None))
