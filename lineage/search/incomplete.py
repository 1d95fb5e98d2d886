"""States of several ranks that are not complete: those that wait for parts and those that were given up; and the part of each rank."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from sqlalchemy import bindparam, func, select

from datastates.lineage.change.awaited import WHYS, Waiting, waiting
from datastates.lineage.schema import FolderRow, PartRow, RunRow, from_us, table
from datastates.lineage.states import GivenUp, Why

from .holders import node_of

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

__all__ = ["GivenUpState", "Incomplete", "Part", "incomplete", "late", "parts_of", "why_none"]


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank captured of a state: its digest, its bytes, where the rank reported them to be, and the run that reported it.

    ``node`` is the host at that time; the replicas say where the part is now.
    """

    rank: int
    digest: str
    tier: str
    node: str
    bytes_total: int
    bytes_new: int
    run: str | None
    told_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenUpState(GivenUp):
    """A state that was given up, and when; and the branch and step that it would have had."""

    world_size: int
    branch: str | None
    step: int
    given_up_at: datetime

    def __str__(self) -> str:
        # super() without arguments knows no class that slots=True has created anew
        return f"state {self.uid} (branch {self.branch}, step {self.step}) was given up because of {GivenUp.__str__(self)}"


@dataclass(frozen=True, slots=True)
class Incomplete:
    """The states that wait for parts, the longest first; and those that were given up, the last first, out of ``total_given_up``."""

    waiting: tuple[Waiting, ...]
    given_up: tuple[GivenUpState, ...]
    total_given_up: int


def incomplete(session: Session, *, limit: int) -> Incomplete:
    """All states that wait, and at most ``limit`` of those that were given up."""
    found = sorted(waiting(session), key=lambda each: (each.since, each.uid))
    rows = session.execute(_GIVEN_UP, {"limit": limit}).all()
    total = int(session.execute(_COUNT).scalar_one())
    return Incomplete(tuple(found), tuple(_given_up(row) for row in rows), total)


def late(session: Session, uid: str) -> list[Waiting]:
    """The states that wait for parts in the training that captured this complete one, as far as its first two ranks reported theirs."""
    uids = list(session.execute(_LATE, {"uid": uid}).scalars())
    return sorted(waiting(session, uids), key=lambda each: (each.since, each.uid)) if uids else []


def parts_of(session: Session, uid: str) -> list[Part]:
    """The reported parts of a state, by rank; none for a state of one part."""
    return [
        Part(row.rank, row.digest, row.tier, node_of(row.place_name), row.bytes_total, row.bytes_new, row.run, from_us(row.told_at))
        for row in session.execute(_PARTS, {"uid": uid})
    ]


def why_none(session: Session, prefix: str) -> str | None:
    """Why there is no state for this prefix, if the only uid with it is one of several parts that waits or was given up."""
    low = prefix.lower()
    uids = session.execute(_BEGINNING, {"low": low, "high": low + "g"}).scalars().all()
    if len(uids) != 1:
        return None
    for each in waiting(session, uids):
        return str(each)
    row = session.execute(_THIS, {"uid": uids[0]}).first()
    return None if row is None else str(_given_up(row))


def _given_up(row: Any) -> GivenUpState:
    place = json.loads(row.place)
    return GivenUpState(
        row.state_uid,
        row.rank,
        Why(row.status),
        json.loads(row.said)["reason"],
        world_size=row.world_size,
        branch=place["branch"],
        step=place["step"],
        given_up_at=from_us(row.told_at),
    )


_part, _run, _folder = table(PartRow), table(RunRow), table(FolderRow)
_is_given_up = (_part.c.rank >= 0, _part.c.status.in_(WHYS))
_ENDED = select(_part).where(*_is_given_up)
_GIVEN_UP = _ENDED.order_by(_part.c.told_at.desc(), _part.c.state_uid).limit(bindparam("limit"))
_THIS = _ENDED.where(_part.c.state_uid == bindparam("uid"))
_COUNT = select(func.count()).select_from(_part).where(*_is_given_up)
_BEGINNING = (
    select(_part.c.state_uid).where(_part.c.state_uid >= bindparam("low"), _part.c.state_uid < bindparam("high")).distinct().limit(2)
)
_same = _part.alias("same")
_first_two = select(_same.c.run_id).where(_same.c.state_uid == bindparam("uid"), _same.c.rank.in_((0, 1)))
_LATE = select(_part.c.state_uid).where(_part.c.run_id.in_(_first_two), _part.c.place.is_not(None), _part.c.status.not_in(WHYS)).distinct()
_PARTS = (
    select(_part, _run.c.uid.label("run"), func.coalesce(_folder.c.host, _part.c.node).label("place_name"))
    .outerjoin_from(_part, _run, _run.c.id == _part.c.run_id)
    .outerjoin(_folder, _folder.c.uid == _part.c.node)
    .where(_part.c.state_uid == bindparam("uid"), _part.c.rank >= 0, _part.c.status.not_in(WHYS))
    .order_by(_part.c.rank)
)
