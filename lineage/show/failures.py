"""How often processes of a repository died: how long they ran, and how many ended without saying so."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from sqlalchemy import bindparam, func, or_, select

from datastates.lineage.batches import batches
from datastates.lineage.change import runs
from datastates.lineage.schema import RunRow, StateRow, from_us, table
from datastates.lineage.states import DIED, Run

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

__all__ = ["Failures", "failures"]

_BATCH = 500


@dataclass(frozen=True, slots=True)
class Failures:
    """``processes`` trained for ``ran_s`` seconds in total; ``died`` of them were found dead by a process that opened the repository
    later."""

    processes: int
    died: int
    ran_s: float


def failures(session: Session) -> Failures:
    """The failures among all processes that captured here. One that died, or goes on, counts as running until its newest state."""
    ids = list(session.execute(_PROCESSES).scalars())
    found: list[Run] = []
    for some in batches(ids, _BATCH):
        found += runs.by_ids(session, some).values()
    died = [run for run in found if run.config.get(DIED) is True]
    ran_s = 0.0
    for run in found:
        ended = run.finished_at if run.config.get(DIED) is not True else None
        last = ended or _newest(session, run.uid) or run.started_at
        ran_s += max(0.0, (last - run.started_at).total_seconds())
    return Failures(len(found), len(died), ran_s)


def _newest(session: Session, uid: str) -> datetime | None:
    """When the newest state of a process was captured."""
    at = session.execute(_NEWEST, {"uid": uid}).scalar()
    return None if at is None else from_us(at)


_run, _state = table(RunRow), table(StateRow)
_training = _run.alias("training")
_PROCESSES = select(_run.c.id).where(_run.c.process.is_(None), _run.c.is_carried.is_(None)).order_by(_run.c.id)
_OF_PROCESS = select(_training.c.id).where(or_(_training.c.uid == bindparam("uid"), _training.c.process == bindparam("uid")))
_NEWEST = select(_state.c.created_at).where(
    _state.c.id == select(func.max(_state.c.id)).where(_state.c.run_id.in_(_OF_PROCESS)).scalar_subquery()
)
