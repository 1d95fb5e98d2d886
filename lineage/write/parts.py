"""The parts of a state that several ranks capture: each rank reports its own, and the last one
makes the state visible.

Until then a state waits: no list, search or count includes it. No rank waits for another, and parts
may come in any order. A state of one part is recorded as usual and has no row here.

Rules:
- A rank that has no part reports that instead (``skip_part``), and the state is *given up* for all
  ranks. One row stays, with the rank and the reason. The same happens to a state that no rank waits
  for any longer (``give_up``), and to a state that the lineage refuses.
- Every part names as its parent the state that its rank captured, or skipped, before. If that
  parent was given up, the parent's own parent takes its place, and so on; if it is still waiting,
  the state waits too. A row of rank -1 or below, under the uid of a state that waits, names a
  complete state that waits for it. The row of the lowest possible rank holds the number of
  reported parts, so that no query has to count them.
- A state whose part is gone is given up: when the run that reported the part died, or ended while
  the part was only in its memory (``runs``). A part that outlives its run stays: another rank may
  be later, or be run later. ``waiting`` reports that the runs behind such a state have ended.
- Reports of states of one branch take turns. Otherwise two ranks that report the last parts of a
  state, or of a state and of its parent, would each take the other's part for missing.
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sqlalchemy import (
    BindParameter,
    bindparam,
    delete,
    func,
    insert,
    literal,
    or_,
    select,
    text,
    update,
)
from sqlalchemy.dialects import postgresql, sqlite

from datastates.errors import Conflict, InvalidInput, NotFound
from datastates.lineage.lookup import id_of, state
from datastates.lineage.query.incomplete import WHYS, Waiting, waiting
from datastates.lineage.schema import PART, REPLICA, RUN, STATE, from_us, to_us
from datastates.lineage.states import Edge, EdgeKind, NewState, StateFacts, Status, Why
from datastates.state.manifest import root_digest

from .record import FIRST, Reduce, check, check_metrics, check_reduce, record, reduced
from .replicas import SAFETY, hold

if TYPE_CHECKING:
    from datastates.lineage.session import Session


_COUNTER = -(1 << 31)
"""The rank of the row whose ``world_size`` counts the parts that were reported."""

_AFTER = "@"
"""Between the form and the number of steps."""

_FAR = "wanted"
_NEAR = "near"
"""What the row of a part of a complete state says once its rank makes it durable: whether it
should go on to further tiers, or not."""


@dataclass(frozen=True, slots=True)
class PartReport:
    """What one rank captured of a state. ``new`` is what ``record`` takes, for this part only.
    ``reduce`` is the way in which metrics are combined.

    ``form`` is equal for parts that form one state together: they have the same tree, and divide
    its tensors alike. It may also contain after how many steps of the optimizers the part was
    captured (``form_after``). Empty: not stated.
    """

    new: NewState
    rank: int
    reduce: Reduce = FIRST
    form: str = ""


def form_after(form: str, updates: int) -> str:
    """The form of a part that was captured after so many steps of the optimizers."""
    return f"{form}{_AFTER}{updates}"


def record_parts(session: Session, told: Sequence[PartReport]) -> None:
    """Record what ranks captured of states. The last part of a state makes the state visible.

    The parts of a state agree on parents, branch and step. Attributes, message, time and run of the
    state come from rank 0. ``reduce`` decides the metrics. The state's digest is the
    ``root_digest`` of the parts' digests and its parents'. Reporting a part again changes nothing.
    An error must leave the transaction; the parts are then not reported.

    :raises Conflict: a part contradicts a reported one: another digest, number of parts, parent,
        branch or step.
    :raises NotFound: there is no such run.
    :raises InvalidInput: there is no such rank, or a value cannot be stored; the error names it.
    """
    for each in told:
        _check(each)
    _take_turns(session, {each.new.facts.branch for each in told})
    runs = _run_ids(session, {each.new.facts.run for each in told})
    _settle(session, [each.new.uid for each in told if _tell(session, each, runs)])


def skip_part(session: Session, facts: StateFacts, *, rank: int, why: Why, reason: str) -> None:
    """Report that a rank has no part of a state.

    That gives the state up, unless it was given up before; a complete state stays."""
    _take_turns(session, {facts.branch})
    _give_up(session, facts.uid, rank, why, reason, place=_place_of(facts), size=facts.world_size)


def give_up(
    session: Session, uids: Iterable[str], *, why: Why, reason: str, rank: int | None = None
) -> None:
    """Give up states that wait, because of ``rank``, or of the first one that reported no part.

    States that do not wait are left alone."""
    asked = sorted(set(uids))
    rows = session.execute(_PLACES, {"uids": asked}).all()
    _take_turns(session, {json.loads(row.place)["branch"] for row in rows})
    for row in session.execute(
        _PLACES, {"uids": asked}
    ).all():  # again, as it is now that it is our turn
        ranks = set(session.execute(_RANKS, {"uid": row.state_uid}).scalars())
        missing = next((each for each in range(row.world_size) if each not in ranks), 0)
        blamed = missing if rank is None else rank
        said = (
            reason
            if len(ranks) < row.world_size
            else f"the state before it was never told; {reason}"
        )
        _give_up(
            session,
            row.state_uid,
            blamed,
            why,
            said,
            place=json.loads(row.place),
            size=row.world_size,
        )


def drop_waiting(
    session: Session, runs: Sequence[str], *, tiers: Collection[str] | None = None
) -> list[Waiting]:
    """Give up the waiting states of which one of these runs, whose processes are gone, reported a
    part; returns these states.

    With ``tiers`` only those whose part is on one of these tiers, which went with the process.
    """
    lost: dict[str, int] = {}
    for row in session.execute(_WAITING_OF, {"runs": list(runs)}):
        if tiers is None or row.tier in tiers:
            lost.setdefault(row.state_uid, row.rank)
    dropped = waiting(session, sorted(lost)) if lost else []
    for each in dropped:
        rank = lost[each.uid]
        give_up(
            session,
            [each.uid],
            why=Why.GONE,
            rank=rank,
            reason="its part was in the memory of a process that ended",
        )
    return dropped


def abandon(session: Session) -> list[str]:
    """Give up the waiting states for which every run that reported a part has ended; returns
    their uids."""
    ended = [each.uid for each in waiting(session) if each.has_ended]
    give_up(
        session, ended, why=Why.GONE, reason="it told no part before the runs of the others ended"
    )
    return ended


def want_parts(
    session: Session, uids: Collection[str], *, rank: int, is_near: bool = False
) -> None:
    """Note that this rank makes its part of these complete states durable. The other ranks must
    too, since one part alone is worth nothing.

    ``is_near``: this rank keeps the part off further tiers. The other ranks do so too, until one
    rank wants the states without ``is_near``.
    """
    if uids:
        session.execute(
            _WANT, {"uids": sorted(uids), "of_rank": rank, "how": _NEAR if is_near else _FAR}
        )


def wanted_parts(session: Session, uids: Collection[str]) -> dict[str, bool]:
    """The complete states that some rank makes durable, and whether all such ranks keep them off
    further tiers."""
    found: dict[str, bool] = {}
    for row in session.execute(_WANTED, {"uids": sorted(uids)}) if uids else ():
        found[row.state_uid] = found.get(row.state_uid, True) and row.said == _NEAR
    return found


def arrive_parts(
    session: Session, uid: str, parts: Sequence[tuple[str, int]], *, tier: str, node: str
) -> None:
    """Note that all parts of a complete state came onto one tier: by rank each part's digest and
    bytes. What was known of the parts stays.

    :raises Conflict: a part is known with another digest.
    """
    state_id, row = id_of(session, uid), state(session, uid)
    known = dict(enumerate(session.execute(_DIGESTS, {"uid": uid}).scalars()))
    for rank, (digest, size) in enumerate(parts):
        if known.get(rank, digest) != digest:
            raise Conflict(
                f"rank {rank} of state {uid} is here with the digest {known[rank][:16]}, not"
                f" {digest[:16]}: one of them is forged"
            )
        hold(session, state_id, rank=rank, tier=tier, node=node, bytes=size)
    told = {
        **_EMPTY,
        "state_uid": uid,
        "world_size": len(parts),
        "status": row.status.value,
        "tier": tier,
        "node": node,
        "told_at": to_us(row.created_at),
    }
    rows = [
        {**told, "rank": rank, "digest": digest, "bytes_total": size, "bytes_new": size}
        for rank, (digest, size) in enumerate(parts)
    ]
    if not known:
        session.execute(_INSERT, rows)


# The steps of record_parts


def part_digest(session: Session, uid: str, rank: int) -> str | None:
    """The digest of one rank's part of a complete state, if it is known here."""
    found = session.execute(_DIGEST_OF_PART, {"uid": uid, "of_rank": rank}).scalar()
    return None if not found else str(found)


def _check(told: PartReport) -> None:
    new, rank, size = told.new, told.rank, told.new.facts.world_size
    check(new)
    check_metrics(new.facts.metrics, check_reduce(told.reduce), rank)
    if not 0 <= rank < size:
        raise InvalidInput(
            f"state {new.uid} has {size} parts, and none of rank {rank}: ranks count from 0"
        )
    if not new.status.is_restorable:
        raise InvalidInput(
            f"rank {rank} of {new.uid} has the status {new.status}: report a part once its bytes"
            " are in a tier"
        )


def _take_turns(session: Session, branches: Iterable[str | None]) -> None:
    """Wait for the turn of these branches. SQLite has only one writer anyway."""
    if session.dialect.name == "postgresql":
        hashed = (
            hashlib.blake2b(f"parts of {branch or ''}".encode(), digest_size=8).digest()
            for branch in branches
        )
        for key in sorted(int.from_bytes(each, signed=True) for each in hashed):
            # in one order, so that no two wait for each other
            session.execute(_LOCK, {"key": key})


def _tell(session: Session, told: PartReport, runs: Mapping[str | None, int | None]) -> bool:
    """Note a part; returns whether it completes its state."""
    new, size = told.new, told.new.facts.world_size
    found: Any = session.execute(_TOLD, {"uid": new.uid}).one()
    if found.first is not None or found.whole is not None:
        rows = session.execute(_THESE, {"uid": new.uid, "of_rank": told.rank}).all()
        if _was_told(told, {row.rank: row for row in rows}, found.whole):
            return False
    if found.first in WHYS or found.whole is not None:
        return False
    if size == 1:
        record(session, new)
        return False
    count = (found.count or 0) + 1
    made = [_row(told, runs)]
    if found.count is None:
        made.append(
            {
                **made[0],
                "rank": _COUNTER,
                "world_size": count,
                "digest": "",
                "place": None,
                "said": None,
            }
        )
    else:
        session.execute(_COUNT_ON, {"uid": new.uid, "count": count})
    session.execute(_INSERT, made)
    return count == size


def _was_told(told: PartReport, known: Mapping[int, Any], whole: str | None) -> bool:
    """Whether a part was reported before.

    :raises Conflict: a different one was, or its facts about the state contradict the recorded
        facts of another part.
    """
    new, rank, size = told.new, told.rank, told.new.facts.world_size
    for other in known.values():
        place = {} if other.place is None else json.loads(other.place)
        _check_alike(told, other.rank, place | {"world_size": other.world_size})
    digest = whole if size == 1 else known[rank].digest if rank in known else None
    if digest is None and whole is not None:
        raise Conflict(
            f"there is a state {new.uid} already, which has no such parts: every capture needs a"
            " new uid"
        )
    if digest and digest != new.digest:
        raise Conflict(
            f"rank {rank} of state {new.uid} was told with the digest {digest[:16]}, and now"
            f" with {new.digest[:16]}: every capture needs a new uid"
        )
    return digest is not None


def _check_alike(told: PartReport, other: int, theirs: Mapping[str, Any]) -> None:
    """Raise unless a part agrees about its state with the part of the rank ``other``, as far as
    that is stored.

    :raises Conflict: it does not; the error names the difference.
    """
    ours = _common(told)
    wrong = [key for key in ours if key in theirs and ours[key] != theirs[key]]
    if wrong == ["form"]:
        (form, _, updates), (their_form, _, their_updates) = (
            told.form.partition(_AFTER),
            theirs["form"].partition(_AFTER),
        )
        if form == their_form:
            raise Conflict(
                f"rank {told.rank} of state {told.new.uid} was captured after"
                f" {updates or 'uncounted'} steps of the optimizer, and rank {other} after"
                f" {their_updates or 'uncounted'}: let all ranks capture at the same places, or"
                " give each capture its step"
            )
        raise Conflict(
            f"rank {told.rank} of state {told.new.uid} has another tree than rank {other}, or"
            " divides its tensors otherwise: let all ranks change what they track before the same"
            " capture"
        )
    if wrong:
        said = ", ".join(f"{key} {ours[key]!r} and not {theirs[key]!r}" for key in wrong)
        raise Conflict(
            f"rank {told.rank} of state {told.new.uid} says {said}, which rank {other} says: ranks"
            " must capture as one"
        )


def _settle(session: Session, uids: Iterable[str]) -> None:
    """Complete these states, where nothing is missing any more, and then those that wait for
    them."""
    todo = deque(uids)
    while todo:
        uid = todo.popleft()
        if _complete(session, uid):
            todo += _those_after(session, uid)


def _complete(session: Session, uid: str) -> bool:
    """Record a state all of whose parts are there, unless it must wait for its parent; returns
    whether it no longer waits."""
    first = session.execute(_FIRST, {"uid": uid}).one()
    place, size = json.loads(first.place), first.world_size
    place.pop("form", None)
    parent, awaited = _standing(session, place["parent"])
    if awaited is not None:
        _wait_for(session, awaited, uid)
        return False
    try:
        with session.begin_nested():
            _record_whole(session, first, {**place, "parent": parent})
    except (Conflict, NotFound, InvalidInput) as error:
        _drop(session, uid, 0, Why.REFUSED, str(error), place=place, size=size)
    return True


def _standing(session: Session, uid: str | None) -> tuple[str | None, str | None]:
    """The effective parent of a state that names this one as its parent; or the uid of the state
    that must be waited for."""
    while uid is not None:
        found = session.execute(_STANDING, {"uid": uid}).one()
        if found.whole is not None:
            return uid, None
        if found.place is None:
            return None, uid
        uid = json.loads(found.place)["parent"]
    return None, None


def _record_whole(session: Session, first: Any, place: Mapping[str, Any]) -> None:
    uid, size, said = first.state_uid, first.world_size, json.loads(first.said)
    reduce = said.pop("reduce", FIRST)
    if reduce != FIRST:
        every = [
            json.loads(other)["metrics"] for other in session.execute(_SAID, {"uid": uid}).scalars()
        ]
        said["metrics"] = reduced(every, reduce)
    edges = tuple(Edge(parent, EdgeKind(kind), weight) for parent, kind, weight in place["edges"])
    created_at = from_us(said.pop("created_at"))
    facts = StateFacts(
        **{
            "uid": uid,
            **place,
            **said,
            "created_at": created_at,
            "edges": edges,
            "world_size": size,
        }
    )
    sums = session.execute(_SUMS, {"uid": uid}).all()
    whole = NewState(
        facts,
        digest=root_digest(
            session.execute(_DIGESTS, {"uid": uid}).scalars().all(),
            digests_of(session, facts.parents),
        ),
        status=min((Status(each.status) for each in sums), key=SAFETY.__getitem__),
        bytes_total=int(sum(each.bytes_total for each in sums)),
        bytes_new=int(sum(each.bytes_new for each in sums)),
        tier=first.tier,
        node=first.node,
    )
    record(session, whole)
    dialect = session.dialect.name
    session.execute(_HOLD_ALL[dialect], {"uid": uid, "id": id_of(session, uid)})
    session.execute(_SETTLED, {"uid": uid})
    session.execute(_FORGET_COUNT, {"uid": uid})


def digests_of(session: Session, uids: Sequence[str]) -> tuple[str, ...]:
    """The digests of states, in this order.

    :raises NotFound: one of them is unknown.
    """
    if not uids:
        return ()
    found = {row.uid: row.digest for row in session.execute(_DIGESTS_OF, {"uids": list(uids)})}
    missing = [uid for uid in uids if uid not in found]
    if missing:
        raise NotFound(f"there is no state {missing[0]!r} to be a parent: record it first")
    return tuple(found[uid] for uid in uids)


# Giving up


def _give_up(
    session: Session,
    uid: str,
    rank: int,
    why: Why,
    reason: str,
    *,
    place: Mapping[str, Any],
    size: int,
) -> None:
    found: Any = session.execute(_TOLD, {"uid": uid}).one()
    if found.whole is None and found.first not in WHYS:
        _drop(session, uid, rank, why, reason, place=place, size=size)
        _settle(session, _those_after(session, uid))


def _drop(
    session: Session,
    uid: str,
    rank: int,
    why: Why,
    reason: str,
    *,
    place: Mapping[str, Any],
    size: int,
) -> None:
    """Replace all parts of a state by one row."""
    session.execute(_DROP, {"uid": uid})
    session.execute(_FORGET_COUNT, {"uid": uid})
    row = {"state_uid": uid, "rank": rank, "world_size": size, "status": why.value}
    texts = {"place": json.dumps(place), "said": json.dumps({"reason": reason})}
    session.execute(_INSERT, {**_EMPTY, **row, **texts, "told_at": to_us(None)})


def _wait_for(session: Session, awaited: str, uid: str) -> None:
    """Note that a state with all its parts waits for another one."""
    found = session.execute(_CHILDREN, {"uid": awaited}).all()
    if uid not in {row.said for row in found}:
        row = {"state_uid": awaited, "rank": -1 - len(found), "said": uid}
        session.execute(_INSERT, {**_EMPTY, **row, "told_at": to_us(None)})


def _those_after(session: Session, uid: str) -> list[str]:
    """The states with all their parts that waited for this one; they do so no longer."""
    found = [str(row.said) for row in session.execute(_CHILDREN, {"uid": uid})]
    if found:
        session.execute(_FORGET_CHILDREN, {"uid": uid})
    return found


# Rows

_EMPTY: Mapping[str, Any] = {
    "world_size": 0,
    "digest": "",
    "run_id": None,
    "status": "",
    "tier": "",
    "node": "",
    "bytes_total": 0,
    "bytes_new": 0,
    "place": None,
    "said": None,
}
"""The columns of a row that stands for no part's bytes."""


def _row(told: PartReport, runs: Mapping[str | None, int | None]) -> dict[str, object]:
    new, facts = told.new, told.new.facts
    said: dict[str, object] = {
        "run": facts.run,
        "metrics": facts.metrics,
        "attributes": facts.attributes,
        "message": facts.message,
        "created_at": to_us(facts.created_at),
    }
    if told.reduce != FIRST:
        said["reduce"] = told.reduce if isinstance(told.reduce, str) else dict(told.reduce)
    return {
        "state_uid": facts.uid,
        "rank": told.rank,
        "world_size": facts.world_size,
        "digest": new.digest,
        "run_id": runs[facts.run],
        "status": new.status.value,
        "tier": new.tier,
        "node": new.node,
        "bytes_total": new.bytes_total,
        "bytes_new": new.bytes_new,
        "told_at": to_us(None),
        "place": json.dumps(
            {key: value for key, value in _common(told).items() if key != "world_size"}
        ),
        "said": json.dumps(
            said
        ),  # not the database's JSON, which supports neither NaN nor integers of any size
    }


def _run_ids(session: Session, uids: Collection[str | None]) -> dict[str | None, int | None]:
    found: dict[str | None, int | None] = {None: None}
    named = sorted(uid for uid in uids if uid is not None)
    if named:
        found |= {row.uid: row.id for row in session.execute(_RUNS, {"runs": named})}
    for uid in named:
        if uid not in found:
            raise NotFound(f"there is no run {uid!r}: start it before it records parts")
    return found


def _common(told: PartReport) -> dict[str, Any]:
    """The facts about its state on which a part must agree with every other part. The form is
    included only if it is stated."""
    common = {"world_size": told.new.facts.world_size, **_place_of(told.new.facts)}
    return common | ({"form": told.form} if told.form else {})


def _place_of(facts: StateFacts) -> dict[str, Any]:
    """The facts that are equal in all parts of a state."""
    edges = [[edge.parent, edge.kind.value, edge.weight] for edge in facts.edges]
    return {
        "parent": facts.parent,
        "branch": facts.branch,
        "step": facts.step,
        "micro_step": facts.micro_step,
        "edges": edges,
    }


# The statements

_uids: BindParameter[Any] = bindparam("uids", expanding=True)
_of_uid = PART.c.state_uid == bindparam("uid")
_is_part = PART.c.rank >= 0
_is_given_up = PART.c.status.in_(WHYS)
_parts_of_it = (_of_uid, _is_part)
_LOCK = text("SELECT pg_advisory_xact_lock(:key)")
_whole = select(STATE.c.digest).where(STATE.c.uid == bindparam("uid")).scalar_subquery()
_is_counter = (_of_uid, PART.c.rank == _COUNTER)
_TOLD = select(
    select(PART.c.world_size).where(*_is_counter).scalar_subquery().label("count"),
    select(PART.c.status)
    .where(*_parts_of_it)
    .order_by(PART.c.rank)
    .limit(1)
    .scalar_subquery()
    .label("first"),
    _whole.label("whole"),
)
_COUNT_ON = update(PART).where(*_is_counter).values(world_size=bindparam("count"))
_FORGET_COUNT = delete(PART).where(*_is_counter)
_first_rank = select(func.min(PART.c.rank)).where(*_parts_of_it).scalar_subquery()
_THESE = (
    select(PART.c.rank, PART.c.world_size, PART.c.digest, PART.c.place)
    .where(*_parts_of_it, or_(PART.c.rank == bindparam("of_rank"), PART.c.rank == _first_rank))
    .order_by(PART.c.rank)
)
_FIRST = select(PART).where(*_parts_of_it, PART.c.rank == 0)
_SAID = select(PART.c.said).where(*_parts_of_it).order_by(PART.c.rank)
_RANKS = select(PART.c.rank).where(*_parts_of_it)
_SUMS = (
    select(
        PART.c.status,
        func.sum(PART.c.bytes_total).label("bytes_total"),
        func.sum(PART.c.bytes_new).label("bytes_new"),
    )
    .where(*_parts_of_it)
    .group_by(PART.c.status)
)
_DIGESTS = select(PART.c.digest).where(*_parts_of_it).order_by(PART.c.rank)
_DIGEST_OF_PART = select(PART.c.digest).where(
    _of_uid, PART.c.rank == bindparam("of_rank"), PART.c.place.is_(None)
)
_DIGESTS_OF = select(STATE.c.uid, STATE.c.digest).where(STATE.c.uid.in_(_uids))
_STANDING = select(
    _whole.label("whole"),
    select(PART.c.place)
    .where(*_parts_of_it, _is_given_up)
    .limit(1)
    .scalar_subquery()
    .label("place"),
)
_PLACES = (
    select(PART.c.state_uid, PART.c.world_size, func.min(PART.c.place).label("place"))
    .where(PART.c.state_uid.in_(_uids), _is_part, PART.c.place.is_not(None), ~_is_given_up)
    .group_by(PART.c.state_uid, PART.c.world_size)
)
_RUNS = select(RUN.c.uid, RUN.c.id).where(RUN.c.uid.in_(bindparam("runs", expanding=True)))
_INSERT = insert(PART)
_SETTLED = update(PART).where(*_parts_of_it).values(place=None, said=None)
_is_whole = (_is_part, PART.c.place.is_(None), PART.c.state_uid.in_(_uids))
_WANT = (
    update(PART)
    .where(*_is_whole, PART.c.rank == bindparam("of_rank"))
    .values(said=bindparam("how"))
)
_WANTED = (
    select(PART.c.state_uid, PART.c.said).where(*_is_whole, PART.c.said.is_not(None)).distinct()
)
_DROP = delete(PART).where(*_parts_of_it)
_is_child = (_of_uid, PART.c.rank < 0, PART.c.rank > _COUNTER)
_CHILDREN = select(PART.c.said).where(*_is_child).order_by(PART.c.rank.desc())
_FORGET_CHILDREN = delete(PART).where(*_is_child)
_WAITING_OF = (
    select(PART.c.state_uid, PART.c.tier, PART.c.rank)
    .join_from(PART, RUN, RUN.c.id == PART.c.run_id)
    .where(RUN.c.uid.in_(bindparam("runs", expanding=True)), PART.c.place.is_not(None))
    .order_by(PART.c.state_uid, PART.c.rank)
)
_held = ["state_id", "rank", "tier", "node", "status", "bytes"]
_all_held = select(
    bindparam("id", type_=REPLICA.c.state_id.type),
    PART.c.rank,
    PART.c.tier,
    PART.c.node,
    literal("ok"),
    PART.c.bytes_new,
)
_HOLD_ALL = {
    name: upsert.on_conflict_do_update(
        index_elements=_held[:4],
        set_={"status": upsert.excluded.status, "bytes": upsert.excluded.bytes},
    )
    for name, upsert in (
        ("sqlite", sqlite.insert(REPLICA).from_select(_held, _all_held.where(*_parts_of_it))),
        (
            "postgresql",
            postgresql.insert(REPLICA).from_select(_held, _all_held.where(*_parts_of_it)),
        ),
    )
}
