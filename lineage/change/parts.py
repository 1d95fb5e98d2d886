"""The parts of a state that several ranks capture: each rank tells its own, and the last one makes the state visible.

Until then a state waits: no list, search or count knows of it. Nobody waits for another rank, and no order is asked for. A state of
one part is recorded as always and has no row here.

A state whose part is gone can never be whole, and is removed: when the run that told it died, or ended while the part was in its memory
only (``runs``). A part that outlives its run stays: another rank may be later, or be run later, and nobody here can know that it will
not. ``waiting`` says of such a state that the runs that told its parts have ended.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import groupby
from typing import TYPE_CHECKING, Any

from sqlalchemy import bindparam, case, delete, func, insert, select, text, update

from datastates.content.root import root_digest
from datastates.errors import Conflict, InvalidInput, NotFound
from datastates.lineage.lookup import id_of, state
from datastates.lineage.schema import PartRow, RunRow, StateRow, from_us, table, to_us
from datastates.lineage.states import Edge, EdgeKind, NewState, State, StateFacts, Status

from .record import check, record
from .replicas import SAFETY, hold

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

__all__ = ["Waiting", "drop_waiting", "part_digests", "record_part", "waiting"]


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
        ranks = f"the parts of rank {', '.join(map(str, self.missing))} of {self.world_size}"
        if not self.has_ended:
            return f"{said} waits for {ranks}"
        return f"{said} is incomplete: it lacks {ranks}, and the runs that told the others have ended; run all its ranks again"


def record_part(session: Session, new: NewState, *, rank: int) -> State | None:
    """Record what one rank captured of a state. Return the state if it is whole by that, or was before, and None while it waits.

    ``new`` is what ``record`` takes, but for this part: its digest, its bytes and where they are; ``new.facts.world_size`` says how many
    parts there are. The parts agree on parents, branch and step. Metrics, attributes, message, time and run of the state are those of rank
    0. Its digest is ``content.root.root_digest`` of theirs. To tell a part again changes nothing. An error must leave the transaction;
    the part is then not told.

    :param rank: whose part it is, of ``range(new.facts.world_size)``.
    :raises Conflict: it contradicts a part that was told: another digest, number of parts, parent, branch or step. Or ``record`` does.
    :raises NotFound: there is no such run. Or the state would be whole, and its parent is not: tell the parts of that first.
    :raises InvalidInput: there is no such rank, or a value cannot be stored; names it.
    """
    _check(new, rank)
    _lock(session, new.uid)
    told: Any = session.execute(_TOLD, {"uid": new.uid, "rank": rank}).one()
    if told.digest is not None or told.whole is not None:
        return _told_again(session, new, rank, told)
    if told.count:
        _check_agrees(session, new, rank)
    size = new.facts.world_size
    if size == 1:
        return record(session, new)
    rows = session.execute(_PARTS_OF, {"uid": new.uid}).all() if told.count == size - 1 else []
    if len(rows) < size - 1:
        session.execute(_INSERT, _row(session, new, rank))
        return None
    parts = [_part_of(row) for row in rows]
    parts.insert(rank, new)
    return _complete(session, parts, _row(session, new, rank))


def waiting(session: Session) -> list[Waiting]:
    """The states that wait for parts, by uid."""
    found = []
    for uid, group in groupby(session.execute(_WAITING).all(), key=lambda row: row.state_uid):
        rows = list(group)
        place = json.loads(rows[0].place)
        ranks, since = tuple(row.rank for row in rows), from_us(min(row.told_at for row in rows))
        has_ended = all(row.run_id is None or row.finished_at is not None for row in rows)
        found.append(Waiting(uid, rows[0].world_size, ranks, place["branch"], place["step"], since, has_ended))
    return found


def drop_waiting(session: Session, runs: Sequence[str], *, tiers: Collection[str] | None = None) -> list[Waiting]:
    """Remove the states that wait and of which one of these runs, whose processes are gone, told a part; what they were.

    With ``tiers`` only those whose part is on one of these, which went with the process.
    """
    lost = {row.state_uid for row in session.execute(_WAITING_OF, {"runs": list(runs)}) if tiers is None or row.tier in tiers}
    dropped = [each for each in waiting(session) if each.uid in lost] if lost else []
    if lost:
        session.execute(_DROP, {"uids": sorted(lost)})
    return dropped


def part_digests(session: Session, uid: str) -> tuple[str, ...]:
    """The digests of a whole state's parts, by rank: of one part the state's own.

    :raises NotFound: there is no such state.
    """
    found = state(session, uid)
    told = tuple(session.execute(_DIGESTS, {"uid": uid}).scalars())
    return (found.digest,) if found.world_size == 1 else told


# The steps of record_part


def _check(new: NewState, rank: int) -> None:
    check(new)
    size = new.facts.world_size
    if not 0 <= rank < size:
        raise InvalidInput(f"state {new.uid} has {size} parts, and none of rank {rank}: ranks count from 0")
    if not new.status.is_restorable:
        raise InvalidInput(f"rank {rank} of {new.uid} is said to be {new.status}: a part is told once its bytes are somewhere")


def _lock(session: Session, uid: str) -> None:
    """Make parts of one state wait for each other: else each of two last ones takes the other's for missing. SQLite has one writer."""
    if session.get_bind().dialect.name == "postgresql":
        session.execute(_LOCK, {"key": int(uid[:16], 16) - (1 << 63)})


def _told_again(session: Session, new: NewState, rank: int, told: Any) -> State | None:
    _check_agrees(session, new, rank)
    known = told.whole if new.facts.world_size == 1 else told.digest
    if known is None:
        raise Conflict(f"there is a state {new.uid} already, which has no such parts: every capture needs a uid of its own")
    if known != new.digest:
        raise Conflict(
            f"rank {rank} of state {new.uid} was told with the digest {known[:16]}, and now with {new.digest[:16]}: "
            "every capture needs a uid of its own"
        )
    return None if told.whole is None else state(session, new.uid)


def _check_agrees(session: Session, new: NewState, rank: int) -> None:
    """Raise unless the part says of the state what another says, as far as that is kept: of a whole state it is not."""
    other = session.execute(_ANY_OF, {"uid": new.uid}).first()
    if other is None:
        return
    ours = _place_of(new.facts)
    theirs = ours if other.place is None else json.loads(other.place)
    pairs = [("world_size", new.facts.world_size, other.world_size), *((key, ours[key], theirs[key]) for key in ours)]
    wrong = [f"{key} {here!r} and not {there!r}" for key, here, there in pairs if here != there]
    if wrong:
        raise Conflict(f"rank {rank} of state {new.uid} says {', '.join(wrong)}, which rank {other.rank} says: ranks must capture as one")


def _complete(session: Session, parts: list[NewState], last: dict[str, object]) -> State:
    """Record the state of these parts, by rank; ``last`` is the row of the one that was told now."""
    first = parts[0]
    whole = replace(
        first,
        digest=root_digest([part.digest for part in parts]),
        status=min((part.status for part in parts), key=SAFETY.__getitem__),
        bytes_total=sum(part.bytes_total for part in parts),
        bytes_new=sum(part.bytes_new for part in parts),
    )
    made = record(session, whole)
    id_ = id_of(session, first.uid)
    for rank, part in enumerate(parts):
        hold(session, id_, rank=rank, tier=part.tier, node=part.node, bytes=part.bytes_new)
    session.execute(_SETTLE, {"uid": first.uid})
    session.execute(_INSERT, {**last, "place": None, "said": None})
    return made


# Rows


def _row(session: Session, new: NewState, rank: int) -> dict[str, object]:
    facts = new.facts
    said = {
        "run": facts.run,
        "metrics": facts.metrics,
        "attributes": facts.attributes,
        "message": facts.message,
        "created_at": to_us(facts.created_at),
    }
    return {
        "state_uid": facts.uid,
        "rank": rank,
        "world_size": facts.world_size,
        "digest": new.digest,
        "run_id": _run_id(session, facts.run),
        "status": new.status.value,
        "tier": new.tier,
        "node": new.node,
        "bytes_total": new.bytes_total,
        "bytes_new": new.bytes_new,
        "told_at": to_us(None),
        "place": json.dumps(_place_of(facts)),
        "said": json.dumps(said),  # not the database's JSON, which knows neither NaN nor whole numbers of any size
    }


def _run_id(session: Session, uid: str | None) -> int | None:
    if uid is None:
        return None
    found = session.execute(_RUN, {"run": uid}).scalar()
    if found is None:
        raise NotFound(f"there is no run {uid!r}: start it before it records parts")
    return int(found)


def _place_of(facts: StateFacts) -> dict[str, Any]:
    """What all parts of a state say alike."""
    edges = [[edge.parent, edge.kind.value, edge.weight] for edge in facts.edges]
    return {"parent": facts.parent, "branch": facts.branch, "step": facts.step, "micro_step": facts.micro_step, "edges": edges}


def _part_of(row: Any) -> NewState:
    place, said = json.loads(row.place), json.loads(row.said)
    edges = tuple(Edge(parent, EdgeKind(kind), weight) for parent, kind, weight in place.pop("edges"))
    created_at = from_us(said.pop("created_at"))
    facts = StateFacts(uid=row.state_uid, **place, **said, created_at=created_at, edges=edges, world_size=row.world_size)
    return NewState(facts, row.digest, Status(row.status), row.bytes_total, row.bytes_new, row.tier, row.node)


# The statements

_part, _state, _run = table(PartRow), table(StateRow), table(RunRow)
_of_uid = _part.c.state_uid == bindparam("uid")
_LOCK = text("SELECT pg_advisory_xact_lock(:key)")
_TOLD = select(
    func.count().label("count"),
    func.max(case((_part.c.rank == bindparam("rank"), _part.c.digest))).label("digest"),
    select(_state.c.digest).where(_state.c.uid == bindparam("uid")).scalar_subquery().label("whole"),
).where(_of_uid)
_ANY_OF = select(_part.c.rank, _part.c.world_size, _part.c.place).where(_of_uid).order_by(_part.c.rank).limit(1)
_PARTS_OF = select(_part).where(_of_uid).order_by(_part.c.rank).with_for_update()  # recovery may be removing them
_DIGESTS = select(_part.c.digest).where(_of_uid).order_by(_part.c.rank)
_RUN = select(_run.c.id).where(_run.c.uid == bindparam("run"))
_INSERT = insert(_part)
_SETTLE = update(_part).where(_of_uid).values(place=None, said=None)
_WAITING = (
    select(_part, _run.c.finished_at)
    .outerjoin_from(_part, _run, _run.c.id == _part.c.run_id)
    .where(_part.c.place.is_not(None))
    .order_by(_part.c.state_uid, _part.c.rank)
)
_WAITING_OF = (
    select(_part.c.state_uid, _part.c.tier)
    .join_from(_part, _run, _run.c.id == _part.c.run_id)
    .where(_run.c.uid.in_(bindparam("runs", expanding=True)), _part.c.place.is_not(None))
)
_DROP = delete(_part).where(_part.c.state_uid.in_(bindparam("uids", expanding=True)), _part.c.place.is_not(None))
