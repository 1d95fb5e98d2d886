"""States of several ranks that are not complete: they wait for parts, or were given up. Also the
part of each rank."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import groupby
from typing import TYPE_CHECKING, Any

from sqlalchemy import BindParameter, bindparam, func, select

from datastates.lineage.lookup import batches, rows_in_batches, states
from datastates.lineage.schema import FOLDER, PART, RUN, STATE, from_us
from datastates.lineage.states import GivenUp, State, Status, Why

from .names import node_of

if TYPE_CHECKING:
    from datastates.lineage.session import Session


WHYS = [why.value for why in Why]
"""The status of the one row that is kept of a state that was given up."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """A state that is not complete yet: which ranks of ``world_size`` are missing, and since when
    the first reported part has waited.

    ``has_ended``: every run that reported a part has ended, so the state stays incomplete unless
      the missing ranks are run again.
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
        return (
            f"{said} is incomplete: it lacks {ranks}, and the runs that told the others have ended;"
            " run all its ranks again"
        )


def waiting(session: Session, uids: Collection[str] | None = None) -> list[Waiting]:
    """The states that wait for parts, by uid: those among ``uids``, or all."""
    found = []
    query = _WAITING if uids is None else _WAITING.where(PART.c.state_uid.in_(uids))
    for uid, group in groupby(session.execute(query), key=lambda row: row.state_uid):
        rows = list(group)
        place = json.loads(rows[0].place)
        missing = tuple(sorted(set(range(rows[0].world_size)).difference(row.rank for row in rows)))
        since = from_us(min(row.told_at for row in rows))
        has_ended = all(row.run_id is None or row.finished_at is not None for row in rows)
        found.append(
            Waiting(
                uid, rows[0].world_size, missing, place["branch"], place["step"], since, has_ended
            )
        )
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


_WAITING = (
    select(PART, RUN.c.finished_at)
    .outerjoin_from(PART, RUN, RUN.c.id == PART.c.run_id)
    .where(PART.c.place.is_not(None), PART.c.status.not_in(WHYS))
    .order_by(PART.c.state_uid, PART.c.rank)
)


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank captured of a state: its digest, its bytes, where the rank reported them to be,
    and the run that reported it.

    ``node`` is the host at that time. The replicas have the present place of the part.
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
        # super() without arguments does not work in a class that slots=True creates again
        return (
            f"state {self.uid} (branch {self.branch}, step {self.step}) was given up because of"
            f" {GivenUp.__str__(self)}"
        )


@dataclass(frozen=True, slots=True)
class Incomplete:
    """The states that wait for parts, the longest first; and those that were given up, the last
    first, out of ``total_given_up``."""

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
    """The states that wait for parts in the training that captured this complete one, as far as
    its first two ranks reported theirs."""
    uids = list(session.execute(_LATE, {"uid": uid}).scalars())
    return sorted(waiting(session, uids), key=lambda each: (each.since, each.uid)) if uids else []


def parts_of(session: Session, uid: str) -> list[Part]:
    """The reported parts of a state, by rank; none for a state of one part."""
    return [
        Part(
            row.rank,
            row.digest,
            row.tier,
            node_of(row.place_name),
            row.bytes_total,
            row.bytes_new,
            row.run,
            from_us(row.told_at),
        )
        for row in session.execute(_PARTS, {"uid": uid})
    ]


def why_none(session: Session, prefix: str) -> str | None:
    """Why there is no state for this prefix, if the only uid with it is one of several parts
    that waits or was given up."""
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


_is_given_up = (PART.c.rank >= 0, PART.c.status.in_(WHYS))
_ENDED = select(PART).where(*_is_given_up)
_GIVEN_UP = _ENDED.order_by(PART.c.told_at.desc(), PART.c.state_uid).limit(bindparam("limit"))
_THIS = _ENDED.where(PART.c.state_uid == bindparam("uid"))
_COUNT = select(func.count()).select_from(PART).where(*_is_given_up)
_BEGINNING = (
    select(PART.c.state_uid)
    .where(PART.c.state_uid >= bindparam("low"), PART.c.state_uid < bindparam("high"))
    .distinct()
    .limit(2)
)
_same = PART.alias("same")
_first_two = select(_same.c.run_id).where(
    _same.c.state_uid == bindparam("uid"), _same.c.rank.in_((0, 1))
)
_LATE = (
    select(PART.c.state_uid)
    .where(PART.c.run_id.in_(_first_two), PART.c.place.is_not(None), PART.c.status.not_in(WHYS))
    .distinct()
)
_PARTS = (
    select(
        PART,
        RUN.c.uid.label("run"),
        func.coalesce(FOLDER.c.host, PART.c.node).label("place_name"),
    )
    .outerjoin_from(PART, RUN, RUN.c.id == PART.c.run_id)
    .outerjoin(FOLDER, FOLDER.c.uid == PART.c.node)
    .where(PART.c.state_uid == bindparam("uid"), PART.c.rank >= 0, PART.c.status.not_in(WHYS))
    .order_by(PART.c.rank)
)


# The outcome of states of several parts: complete, given up, or neither yet.


_BATCH = 500  # uids in one IN list


@dataclass(frozen=True, slots=True)
class Outcome:
    """A state that no longer waits: the complete state, with the digests of its parents, or the
    reason why there is none."""

    uid: str
    state: State | None = None
    parent_digests: tuple[str, ...] = ()
    given_up: GivenUp | None = None


def outcomes(session: Session, asked: Mapping[str, int]) -> tuple[dict[str, Outcome], list[str]]:
    """The outcomes of these states, by uid in the order of ``asked``. The second value has the uids
    for which the lineage does not have this rank's part.

    States that still wait for parts are in neither.
    """
    found: dict[str, Outcome] = {}
    forgotten: list[str] = []
    for batch in batches(list(asked), _BATCH):
        ids = {row.uid: row.id for row in session.execute(_IDS, {"uids": batch})}
        whole = dict(zip(ids, states(session, list(ids.values())), strict=True)) if ids else {}
        parents = {parent for each in whole.values() for parent in each.parents}
        rows = rows_in_batches(session, _DIGESTS, parents, "uids")
        digests = {row.uid: row.digest for row in rows}
        rest, ranks = [uid for uid in batch if uid not in ids], [asked[uid] for uid in batch]
        told = {
            row.state_uid
            for row in rows_in_batches(session, _OWN, rest, "uids", ranks=ranks)
            if row.status not in WHYS and row.rank == asked[row.state_uid]
        }
        untold = [uid for uid in rest if uid not in told]
        ends = {row.state_uid: row for row in rows_in_batches(session, _ENDS, untold, "uids")}
        for uid in batch:
            ended = ends.get(uid)
            if uid in whole:
                state = whole[uid]
                found[uid] = Outcome(uid, state, tuple(digests[parent] for parent in state.parents))
            elif ended is not None:
                reason = json.loads(ended.said)["reason"]
                found[uid] = Outcome(
                    uid, given_up=GivenUp(uid, ended.rank, Why(ended.status), reason)
                )
            elif uid not in told:
                forgotten.append(uid)
    return found, forgotten


def statuses_of(session: Session, uids: Sequence[str]) -> dict[str, Status]:
    """The status of each of these states that exists."""
    rows = rows_in_batches(session, _STATUSES, uids, "uids")
    return {row.uid: Status(row.status) for row in rows}


_uids: BindParameter[Any] = bindparam("uids", expanding=True)
_IDS = select(STATE.c.uid, STATE.c.id).where(STATE.c.uid.in_(_uids))
_STATUSES = select(STATE.c.uid, STATE.c.status).where(STATE.c.uid.in_(_uids))
_DIGESTS = select(STATE.c.uid, STATE.c.digest).where(STATE.c.uid.in_(_uids))
_rows_of = select(PART.c.state_uid, PART.c.rank, PART.c.status, PART.c.said).where(
    PART.c.state_uid.in_(_uids)
)
_OWN = _rows_of.where(PART.c.rank.in_(bindparam("ranks", expanding=True)))
# only this row is left of a state that was given up
_ENDS = _rows_of.where(PART.c.rank >= 0, PART.c.status.in_(WHYS))
