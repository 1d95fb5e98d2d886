"""The states that wait for parts of some of their ranks."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime
from itertools import groupby
from typing import TYPE_CHECKING

from sqlalchemy import bindparam, select

from datastates.lineage.schema import PartRow, RunRow, from_us, table
from datastates.lineage.states import Why

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

__all__ = ["WHYS", "Waiting", "waiting"]

WHYS = [why.value for why in Why]
"""The status of the row that stays of a state that was given up."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """A state that is not whole yet: the ranks that told their part, of ``world_size``, and since when the first of them waits.

    ``has_ended``: no run that told a part of it goes on, so that the state stays incomplete unless the missing ranks are run again.
    """

    uid: str
    world_size: int
    ranks: tuple[int, ...]
    branch: str | None
    step: int
    since: datetime
    has_ended: bool = False

    @property
    def missing(self) -> tuple[int, ...]:
        """The ranks that told no part."""
        return tuple(sorted(set(range(self.world_size)).difference(self.ranks)))

    def __str__(self) -> str:
        said = f"state {self.uid} (branch {self.branch}, step {self.step})"
        if not self.missing:
            return f"{said} has all its {self.world_size} parts, and waits for the state before it"
        ranks = f"the parts of rank {', '.join(map(str, self.missing))} of {self.world_size}"
        if not self.has_ended:
            return f"{said} waits for {ranks}"
        return f"{said} is incomplete: it lacks {ranks}, and the runs that told the others have ended; run all its ranks again"


def waiting(session: Session, uids: Collection[str] | None = None) -> list[Waiting]:
    """The states that wait for parts, by uid; of these, or all."""
    found = []
    rows_of = session.execute(_WAITING).all() if uids is None else session.execute(_THESE, {"uids": list(uids)}).all()
    for uid, group in groupby(rows_of, key=lambda row: row.state_uid):
        rows = list(group)
        place = json.loads(rows[0].place)
        ranks, since = tuple(row.rank for row in rows), from_us(min(row.told_at for row in rows))
        has_ended = all(row.run_id is None or row.finished_at is not None for row in rows)
        found.append(Waiting(uid, rows[0].world_size, ranks, place["branch"], place["step"], since, has_ended))
    return found


_part, _run = table(PartRow), table(RunRow)
_WAITING = (
    select(_part, _run.c.finished_at)
    .outerjoin_from(_part, _run, _run.c.id == _part.c.run_id)
    .where(_part.c.place.is_not(None), _part.c.status.not_in(WHYS))
    .order_by(_part.c.state_uid, _part.c.rank)
)
_THESE = _WAITING.where(_part.c.state_uid.in_(bindparam("uids", expanding=True)))
