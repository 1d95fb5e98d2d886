"""Replicas on tiers: a state gets safer with every replica, and is evicted when the last one
goes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    and_,
    bindparam,
    delete,
    exists,
    func,
    or_,
    select,
    text,
    update,
)
from sqlalchemy.dialects import postgresql, sqlite

from datastates.errors import Conflict, InvalidInput, Unsupported
from datastates.lineage.lookup import batches, id_of, ids_of, rows_in_batches, state, unknown
from datastates.lineage.query.retained import held_by_others, leading, refs_leading_to
from datastates.lineage.query.walk import nearest_restorable
from datastates.lineage.schema import PART, REPLICA, STATE
from datastates.lineage.states import GONE, RefKind, State, Status

if TYPE_CHECKING:
    from datastates.lineage.session import Session


SAFETY = {
    Status.LOST: 0,
    Status.EVICTED: 0,
    Status.CAPTURED: 1,
    Status.DURABLE: 2,
    Status.REPLICATED: 3,
    Status.EXTERNAL: 4,
}
_BATCH = 1000  # ids in one IN list


def mark(
    session: Session,
    uid: str,
    status: Status,
    *,
    tier: str,
    node: str,
    rank: int = 0,
    bytes: int | None = None,
    is_near: bool = False,
) -> Status:
    """Note that a tier now holds the state; returns the status that the state has then.

    The status rises to ``status`` or stays. A state of several parts rises once the tier holds all
    of them; an evicted or lost state whose bytes are here again rises too. If the state still waits
    for parts, only the part of ``rank`` gets safer. ``bytes`` are those that the state added to
    that tier. With ``durable`` they become its ``bytes_new``, except for a state of several parts,
    where they are the bytes of ``rank`` alone. ``is_near``: see ``Mark``.

    :raises NotFound: there is no such state.
    :raises InvalidInput: ``status`` is one without bytes.
    """
    if not status.is_restorable:
        raise InvalidInput(
            f"{uid} cannot be marked {status}: states become so when their replicas go, by evict or"
            " recovery"
        )
    row = session.execute(_LOCK_STATE, {"uid": uid}).first()
    if row is None:
        part = _mark_part(session, uid, status, tier=tier, node=node, rank=rank, bytes=bytes)
        if part is not None:
            return part
        row = session.execute(
            _LOCK_STATE, {"uid": uid}
        ).first()  # its last part may have been reported meanwhile
    if row is None:
        raise unknown(uid)
    now = Status(row.status)
    replica = _replica_of(row.id, rank, tier, node, bytes or 0, is_near=is_near)
    if row.world_size > 1:
        session.execute(_UPSERT_REPLICA[session.dialect.name], replica)
        if (
            session.execute(_RANKS_ON, {"state": row.id, "on_tier": tier}).scalar()
            != row.world_size
        ):
            return now
    if SAFETY[status] > SAFETY[now]:
        is_told = status is Status.DURABLE and bytes is not None and row.world_size == 1
        values = {"state": row.id, "new_status": status.value}
        session.execute(
            _SET_DURABLE if is_told else _SET_STATUS,
            {**values, "added": bytes} if is_told else values,
        )
        now = status
    if row.world_size == 1:
        session.execute(_UPSERT_REPLICA[session.dialect.name], replica)
    return now


@dataclass(frozen=True, slots=True)
class Mark:
    """The fact that a tier of a node holds this rank's part of a state, and how many bytes that
    added. ``is_near``: a policy keeps the state off further tiers."""

    uid: str
    status: Status
    tier: str
    node: str
    rank: int
    bytes: int
    is_near: bool = False


def mark_all(session: Session, marks: Sequence[Mark]) -> dict[tuple[str, int], Status]:
    """``mark`` for several states, with few statements for states of one part; returns the statuses
    by uid and rank.

    :raises DatastatesError: as ``mark``, for one of them.
    """
    uids = sorted({one.uid for one in marks})
    found = {row.uid: row for row in rows_in_batches(session, _LOCK_NAMED, uids, "uids")}
    statuses, updates, replicas = (
        dict[tuple[str, int], Status](),
        list[dict[str, object]](),
        list[dict[str, object]](),
    )
    for one in sorted(marks, key=lambda one: one.uid):  # in one order, as everyone locks them
        row = found.get(one.uid)
        if row is None or row.world_size > 1 or one.status is not Status.DURABLE:
            now = mark(
                session,
                one.uid,
                one.status,
                tier=one.tier,
                node=one.node,
                rank=one.rank,
                bytes=one.bytes,
                is_near=one.is_near,
            )
        else:
            now = Status(row.status)
            if SAFETY[one.status] > SAFETY[now]:
                now = one.status
                updates.append({"state": row.id, "new_status": now.value, "added": one.bytes})
            replicas.append(
                _replica_of(row.id, one.rank, one.tier, one.node, one.bytes, is_near=one.is_near)
            )
        statuses[one.uid, one.rank] = now
    if updates:
        session.execute(_SET_DURABLE, updates)
    if replicas:
        session.execute(_UPSERT_REPLICA[session.dialect.name], replicas)
    return statuses


def _mark_part(
    session: Session,
    uid: str,
    status: Status,
    *,
    tier: str,
    node: str,
    rank: int,
    bytes: int | None,
) -> Status | None:
    """Mark a part of a waiting state; returns its status, or None if there is no such part."""
    part = {"uid": uid, "of_rank": rank}
    row = session.execute(_LOCK_PART, part).first()
    if row is None:
        return None
    if SAFETY[status] <= SAFETY[Status(row.status)]:
        return Status(row.status)
    added = row.bytes_new if bytes is None else bytes
    session.execute(
        _MARK_PART,
        {**part, "new_status": status.value, "on_tier": tier, "on_node": node, "added": added},
    )
    return status


def hold(session: Session, state_id: int, *, rank: int, tier: str, node: str, bytes: int) -> None:
    """Note that a tier of a node holds one rank's part; ``bytes`` are those that it added there."""
    session.execute(
        _UPSERT_REPLICA[session.dialect.name],
        _replica_of(state_id, rank, tier, node, bytes),
    )


def _replica_of(
    state_id: int, rank: int, tier: str, node: str, bytes: int, *, is_near: bool = False
) -> dict[str, object]:
    return {
        "state_id": state_id,
        "rank": rank,
        "tier": tier,
        "node": node,
        "status": "ok",
        "bytes": bytes,
        "is_near": is_near,
    }


def unheld() -> ColumnElement[bool]:
    """The condition that no tier holds the bytes of a state or, if it has several parts, of one
    part."""
    its = REPLICA.c.state_id == STATE.c.id
    ranks = select(func.count(REPLICA.c.rank.distinct())).where(its).scalar_subquery()
    return or_(~exists().where(its), and_(STATE.c.world_size > 1, ranks < STATE.c.world_size))


def evict(session: Session, uids: Iterable[str], *, tier: str, node: str) -> list[str]:
    """Note that a tier of a node dropped these states; returns the uids of those that no tier holds
    any more, which are now ``evicted``.

    :raises NotFound: one of them is unknown.
    """
    evicted: list[str] = []
    ids = sorted(set(ids_of(session, list(uids))))
    for some in batches(ids, _BATCH):
        batch = {"ids": some}
        session.execute(_LOCK_STATES, batch)  # in id order, as every writer does
        session.execute(_DROP_REPLICAS, {**batch, "on_tier": tier, "on_node": node})
        gone = session.execute(_EVICT_UNHELD, batch).all()
        evicted += [row.uid for row in sorted(gone, key=lambda row: int(row.id))]
    return evicted


def held(session: Session, uids: Iterable[str], *, tier: str, node: str) -> set[str]:
    """The states that a tier of a node holds, as far as the lineage has recorded it."""
    return set(
        session.execute(_HELD, {"uids": list(uids), "on_tier": tier, "on_node": node}).scalars()
    )


# The statements

_ids = bindparam("ids", type_=BigInteger, expanding=True)

# Not FOR UPDATE: that would wait for a transaction that records a child, and deadlock with it.
_LOCK_STATE = (
    select(STATE.c.id, STATE.c.status, STATE.c.world_size)
    .where(STATE.c.uid == bindparam("uid"))
    .with_for_update(key_share=True)
)
_LOCK_NAMED = (
    select(STATE.c.id, STATE.c.uid, STATE.c.status, STATE.c.world_size)
    .where(STATE.c.uid.in_(bindparam("uids", expanding=True)))
    .order_by(STATE.c.id)
    .with_for_update(key_share=True)
)
_LOCK_STATES = (
    select(STATE.c.id)
    .where(STATE.c.id.in_(_ids))
    .order_by(STATE.c.id)
    .with_for_update(key_share=True)
)
_waits = and_(
    PART.c.state_uid == bindparam("uid"),
    PART.c.rank == bindparam("of_rank"),
    PART.c.place.is_not(None),
)
_LOCK_PART = select(PART.c.status, PART.c.bytes_new).where(_waits).with_for_update()
_MARK_PART = (
    update(PART)
    .where(_waits)
    .values(
        status=bindparam("new_status"),
        tier=bindparam("on_tier"),
        node=bindparam("on_node"),
        bytes_new=bindparam("added"),
    )
)
_SET_STATUS = (
    update(STATE).where(STATE.c.id == bindparam("state")).values(status=bindparam("new_status"))
)
_SET_DURABLE = _SET_STATUS.values(bytes_new=bindparam("added"))
_key = [REPLICA.c.state_id, REPLICA.c.rank, REPLICA.c.tier, REPLICA.c.node]
_SET = ("status", "bytes", "is_near")
_upsert_sqlite = sqlite.insert(REPLICA)
_upsert_postgresql = postgresql.insert(REPLICA)
_UPSERT_REPLICA = {
    "sqlite": _upsert_sqlite.on_conflict_do_update(
        index_elements=_key,
        set_={name: _upsert_sqlite.excluded[name] for name in _SET},
    ),
    "postgresql": _upsert_postgresql.on_conflict_do_update(
        index_elements=_key,
        set_={name: _upsert_postgresql.excluded[name] for name in _SET},
    ),
}
_RANKS_ON = select(func.count(REPLICA.c.rank.distinct())).where(
    REPLICA.c.state_id == bindparam("state"),
    REPLICA.c.tier == bindparam("on_tier"),
    REPLICA.c.status == "ok",
)
_DROP_REPLICAS = delete(REPLICA).where(
    REPLICA.c.state_id.in_(_ids),
    REPLICA.c.tier == bindparam("on_tier"),
    REPLICA.c.node == bindparam("on_node"),
)
_HELD = (
    select(STATE.c.uid)
    .join_from(REPLICA, STATE, STATE.c.id == REPLICA.c.state_id)
    .where(STATE.c.uid.in_(bindparam("uids", expanding=True)))
    .where(REPLICA.c.tier == bindparam("on_tier"), REPLICA.c.node == bindparam("on_node"))
)
_EVICT_UNHELD = (
    update(STATE)
    .where(STATE.c.id.in_(_ids), STATE.c.status.not_in(GONE), unheld())
    .values(status=Status.EVICTED.value)
    .returning(STATE.c.id, STATE.c.uid)
)


# Giving up the bytes of states on purpose: only of states that no ref needs.


# the advisory lock of PostgreSQL: two that are withdrawn at once might each count on the other
_LOCK = 0x6461_7461_6576


def withdraw(
    session: Session,
    uid: str,
    places: Iterable[tuple[str, str]],
    *,
    volatile: Collection[str],
    is_forced: bool = False,
) -> State:
    """Note that a state's bytes leave these places (tier, node); returns the state as it is then.
    Drop the bytes once this is committed.

    A state that only ``volatile`` tiers hold afterwards becomes ``captured`` again. A state that no
    tier holds becomes ``evicted``.

    :raises NotFound: there is no such state.
    :raises Conflict: a ref counts on it (see ``check_withdrawal``).
    """
    take_turns(session)
    check_withdrawal(session, uid, is_forced=is_forced)
    for tier, node in places:
        evict(session, [uid], tier=tier, node=node)
    session.execute(
        _ONLY_CAPTURED, {"ids": [id_of(session, uid)], "volatile": list(volatile), "gone": GONE}
    )
    return state(session, uid)


def take_turns(session: Session) -> None:
    """Wait until no other transaction withdraws states, deletes their files or adds files.
    (SQLite has only one writer anyway.)"""
    if session.dialect.name == "postgresql":
        session.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK})


def withdraw_all(
    session: Session,
    ids: Collection[int],
    *,
    tier: str,
    node: str,
    volatile: Collection[str],
    holder: str,
) -> list[str]:
    """Note that the bytes of states, by row id, leave a tier of a node; returns the uids of those
    that do. Drop the bytes once this is committed.

    States that something began to count on since the ids were chosen stay (see ``leading``), and so
    do those that another process than ``holder`` has in its ``volatile`` tiers. A state that
    only ``volatile`` tiers hold afterwards becomes ``captured`` again. A state that no tier holds
    becomes ``evicted``.
    """
    take_turns(session)
    held = leading(session, ids, tier=tier, node=node) | held_by_others(
        session, ids, volatile=volatile, holder=holder
    )
    chosen = sorted(set(ids) - held)
    rows = session.execute(_THOSE_HELD, {"ids": chosen, "on_tier": tier, "on_node": node}).all()
    uids = [row.uid for row in rows]
    evict(session, uids, tier=tier, node=node)
    session.execute(
        _ONLY_CAPTURED, {"ids": [row.id for row in rows], "volatile": list(volatile), "gone": GONE}
    )
    return uids


def check_withdrawal(session: Session, uid: str, *, is_forced: bool = False) -> State:
    """The state, if its bytes may go: no ref names it and no branch would go back to it, or
    ``is_forced``.

    :raises Conflict: a ref counts on it, or it is the last restorable state of a branch.
        ``is_forced`` does not override the second reason.
    :raises Unsupported: several ranks hold it.
    """
    found = state(session, uid)
    if found.world_size > 1:
        raise Unsupported(
            f"state {uid} is held by {found.world_size} ranks: one of them alone cannot drop it"
        )
    if not found.status.is_restorable:
        return found
    # for a durable state: check the refs as they are once memory is lost
    is_lasting = found.status is not Status.CAPTURED
    asked = {
        "ids": [id_of(session, uid)],
        "gone": [*GONE, Status.CAPTURED.value] if is_lasting else GONE,
    }
    named = sorted(session.execute(_LED_HERE, asked).all())
    branch = next((row.name for row in named if row.kind == RefKind.BRANCH.value), None)
    if branch is not None and (
        not found.parents
        or nearest_restorable(session, found.parents[0], is_lasting=is_lasting) is None
    ):
        raise Conflict(
            f"state {uid} is all that can be restored of branch {branch!r}: delete the branch, or"
            " keep the state"
        )
    if named and not is_forced:
        counting = ", ".join(f"{row.kind} {row.name!r}" for row in named[:5])
        raise Conflict(
            f"state {uid} is what {counting} leads to: move or delete that first, or force it"
        )
    return found


_LED_HERE = refs_leading_to(lambda passed: passed.c.status.in_(bindparam("gone", expanding=True)))
_THOSE_HELD = (
    select(STATE.c.id, STATE.c.uid)
    .join_from(REPLICA, STATE, STATE.c.id == REPLICA.c.state_id)
    .where(STATE.c.id.in_(_ids), STATE.c.world_size == 1)
    .where(REPLICA.c.tier == bindparam("on_tier"), REPLICA.c.node == bindparam("on_node"))
    .order_by(STATE.c.id)
)
_ONLY_CAPTURED = (
    update(STATE)
    .where(STATE.c.id.in_(_ids), STATE.c.status.not_in(bindparam("gone", expanding=True)))
    .where(
        ~exists().where(
            REPLICA.c.state_id == STATE.c.id,
            REPLICA.c.tier.not_in(bindparam("volatile", expanding=True)),
        )
    )
    .values(status=Status.CAPTURED.value)
)
