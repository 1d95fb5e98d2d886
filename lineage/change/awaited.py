"""The states that still wait for the parts of some of their ranks."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from datetime import datetime
from itertools import groupby
from typing import TYPE_CHECKING

from sqlalchemy import bindparam, select

from datastates.lineage.schema import PartRow, RunRow, from_us, table
from datastates.lineage.states import Why

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

__all__ = ["WHYS", "Waiting", "ranks_text", "waiting"]

WHYS = [why.value for why in Why]
"""The status of the one row that is kept of a state that was given up."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """A state that is not complete yet: which ranks of ``world_size`` are missing, and since when the first reported part has waited.

    ``has_ended``: every run that reported a part has ended, so the state stays incomplete unless the missing ranks are run again.
    """

    uid: str
    world_size: int
    missing: tuple[int, ...]
    branch: str | None
    step: int
    since: datetime
    has_ended: bool = False

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that reported their part."""
        return tuple(sorted(set(range(self.world_size)).difference(self.missing)))

    def __str__(self) -> str:
        said = f"state {self.uid} (branch {self.branch}, step {self.step})"
        if not self.missing:
            return f"{said} has all its {self.world_size} parts, and waits for the state before it"
        ranks = f"the parts of rank {ranks_text(self.missing)} of {self.world_size}"
        if not self.has_ended:
            return f"{said} waits for {ranks}"
        return f"{said} is incomplete: it lacks {ranks}, and the runs that told the others have ended; run all its ranks again"


def waiting(session: Session, uids: Collection[str] | None = None) -> list[Waiting]:
    """The states that wait for parts, by uid: those among ``uids``, or all."""
    found = []
    rows_of = session.execute(_WAITING).all() if uids is None else session.execute(_THESE, {"uids": list(uids)}).all()
    for uid, group in groupby(rows_of, key=lambda row: row.state_uid):
        rows = list(group)
        place = json.loads(rows[0].place)
        missing = tuple(sorted(set(range(rows[0].world_size)).difference(row.rank for row in rows)))
        since = from_us(min(row.told_at for row in rows))
        has_ended = all(row.run_id is None or row.finished_at is not None for row in rows)
        found.append(Waiting(uid, rows[0].world_size, missing, place["branch"], place["step"], since, has_ended))
    return found


def ranks_text(ranks: Iterable[int]) -> str:
    """Ascending ranks as people write them: ``0-3, 7``."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    ends = ((str(low), str(high)) for low, high in spans)
    return ", ".join(low if low == high else f"{low}-{high}" for low, high in ends)


_part, _run = table(PartRow), table(RunRow)
_WAITING = (
    select(_part, _run.c.finished_at)
    .outerjoin_from(_part, _run, _run.c.id == _part.c.run_id)
    .where(_part.c.place.is_not(None), _part.c.status.not_in(WHYS))
    .order_by(_part.c.state_uid, _part.c.rank)
)
_THESE = _WAITING.where(_part.c.state_uid.in_(bindparam("uids", expanding=True)))
