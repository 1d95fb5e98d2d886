"""Runs and what became of their processes, for the API and for ``datastates runs``; and the processes that are tracking now."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING

from datastates.lineage.change import runs
from datastates.lineage.endings import ending_of
from datastates.lineage.show.branches import Branch, Life
from datastates.lineage.show.processes import processes
from datastates.lineage.states import Run
from datastates.opening.home import Home
from datastates.opening.lease import beat_at
from datastates.opening.life import life_of

from .models import Processes, ProcessInfo, RunInfo, TrainingInfo

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

__all__ = ["infos", "now"]


def infos(session: Session, found: Sequence[Run], home: Home) -> list[RunInfo]:
    """These runs, in their order; ``home`` is the folder in which leases are looked for."""
    heads = runs.branches_of(session, [run.uid for run in found])
    died = runs.died(session, {run.process for run in found if run.process is not None})
    made = []
    for run in found:
        life = life_of(run, home)
        made.append(
            RunInfo(
                **{field.name: getattr(run, field.name) for field in fields(Run)},
                life=life,
                branches=tuple(heads.get(run.uid, ())),
                ending=ending_of(run, died, is_over=life is Life.ENDED),
            )
        )
    return made


def now(session: Session, home: Home, *, metric: str | None = None, limit: int) -> Processes:
    """The processes that are tracking now, at most ``limit``; ``home`` is the folder in which leases are looked for."""
    found, metric = processes(session, partial(life_of, home=home), metric=metric)
    items = tuple(
        ProcessInfo(
            uid=each.run.uid,
            host=each.run.host,
            pid=each.run.pid,
            user=each.run.user,
            argv=each.run.argv,
            started_at=each.run.started_at,
            life=each.life,
            beat_at=beat_at(home.path, each.run.uid),
            trainings=tuple(_training(run, each.branches.get(run.uid)) for run in each.trainings),
        )
        for each in found[:limit]
    )
    return Processes(items, len(found), metric)


def _training(run: Run, branch: Branch | None) -> TrainingInfo:
    """A training that is going on. ``branch`` is the one whose newest state it captured."""
    return TrainingInfo(
        uid=run.uid,
        branch=run.branch,
        started_at=run.started_at,
        state=None if branch is None else branch.head,
        step=None if branch is None else branch.step,
        status=None if branch is None else branch.status,
        captured_at=None if branch is None else branch.changed_at,
        steps_per_s=None if branch is None else branch.steps_per_s,
        last=None if branch is None or branch.last is None else branch.last.value,
    )
