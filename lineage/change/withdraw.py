"""Giving up the bytes of states on purpose: only of states that nobody counts on."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

from sqlalchemy import BigInteger, bindparam, exists, select, text, update

from datastates.errors import Conflict, Unsupported
from datastates.lineage.lookup import id_of, state
from datastates.lineage.schema import ReplicaRow, StateRow, table
from datastates.lineage.search.retained import counted_on, elsewhere
from datastates.lineage.search.walk import nearest_restorable
from datastates.lineage.states import RefKind, State, Status

from .refs import refs
from .replicas import evict

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

__all__ = ["check_withdrawal", "take_turns", "withdraw", "withdraw_all"]

_LOCK = 0x6461_7461_6576  # the advisory lock of PostgreSQL: two that are withdrawn at once might each count on the other


def withdraw(session: Session, uid: str, places: Iterable[tuple[str, str]], *, volatile: Collection[str], is_forced: bool = False) -> State:
    """Note that a state's bytes leave these places (tier, node); returns the state as it is then. Drop the bytes once this is committed.

    A state that from then on only ``volatile`` tiers hold is ``captured`` again, one that nobody holds ``evicted``.

    :raises NotFound: there is no such state.
    :raises Conflict: a ref counts on it (see ``check_withdrawal``).
    """
    take_turns(session)
    check_withdrawal(session, uid, is_forced=is_forced)
    for tier, node in places:
        evict(session, [uid], tier=tier, node=node)
    found = state(session, uid)
    held = {"state": id_of(session, uid), "volatile": list(volatile)}
    is_safer = found.status.is_restorable and found.status is not Status.CAPTURED
    if is_safer and not session.execute(_OUTLIVES, held).scalar():
        session.execute(_ONLY_CAPTURED, {"state": held["state"]})
    return state(session, uid)


def take_turns(session: Session) -> None:
    """Wait until no other transaction withdraws states, deletes their files or adds files. (SQLite has only one writer anyway.)"""
    if session.get_bind().dialect.name == "postgresql":
        session.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK})


def withdraw_all(session: Session, ids: Collection[int], *, tier: str, node: str, volatile: Collection[str], holder: str) -> list[str]:
    """Note that the bytes of states, by row id, leave a tier of a node; returns the uids of those that do. Drop the bytes once this is
    committed.

    States that something began to count on since the ids were chosen stay (see ``counted_on``), and so do those that another process than
    ``holder`` has in its ``volatile`` tiers.
    A state that from then on only ``volatile`` tiers hold is ``captured`` again, one that nobody holds ``evicted``.
    """
    take_turns(session)
    held = counted_on(session, tier=tier, node=node).keys() | elsewhere(session, ids, volatile=volatile, holder=holder)
    chosen = sorted(set(ids) - held)
    rows = session.execute(_THOSE_HELD, {"ids": chosen, "on_tier": tier, "on_node": node}).all()
    uids = [row.uid for row in rows]
    evict(session, uids, tier=tier, node=node)
    session.execute(_ONLY_CAPTURED_ALL, {"ids": [row.id for row in rows], "volatile": list(volatile), "gone": _GONE})
    return uids


def check_withdrawal(session: Session, uid: str, *, is_forced: bool = False) -> State:
    """The state, if its bytes may go: no ref names it and no branch would go back to it, or ``is_forced``.

    :raises Conflict: a ref counts on it; or nothing else of a branch can be restored, which ``is_forced`` does not override.
    :raises Unsupported: several ranks hold it.
    """
    found = state(session, uid)
    if found.world_size > 1:
        raise Unsupported(f"state {uid} is held by {found.world_size} ranks: one of them alone cannot drop it")
    if not found.status.is_restorable:
        return found
    named = refs(session)
    for ref in named:
        if ref.kind is RefKind.BRANCH and _is_needed(session, ref.state, found) and not _has_another(session, found):
            raise Conflict(f"state {uid} is all that can be restored of branch {ref.name!r}: delete the branch, or keep the state")
    counting = [f"{ref.kind} {ref.name!r}" for ref in named if ref.state == uid or _is_needed(session, ref.state, found)]
    if counting and not is_forced:
        raise Conflict(f"state {uid} is what {', '.join(counting[:5])} leads to: move or delete that first, or force it")
    return found


def _is_needed(session: Session, head: str, found: State) -> bool:
    """Whether this state is the nearest one to ``head`` that has bytes, either now or once memory is gone."""
    lasting = (False, True) if _is_lasting(found) else (False,)
    leads = [nearest_restorable(session, head, is_lasting=each) for each in lasting]
    return any(nearest is not None and nearest.uid == found.uid for nearest in leads)


def _has_another(session: Session, found: State) -> bool:
    return bool(found.parents) and nearest_restorable(session, found.parents[0], is_lasting=_is_lasting(found)) is not None


def _is_lasting(found: State) -> bool:
    return found.status is not Status.CAPTURED


_state, _replica = table(StateRow), table(ReplicaRow)
_GONE = [status.value for status in Status if not status.is_restorable]
_ids = bindparam("ids", type_=BigInteger, expanding=True)
_OUTLIVES = (
    select(_replica.c.state_id)
    .where(_replica.c.state_id == bindparam("state"), _replica.c.tier.not_in(bindparam("volatile", expanding=True)))
    .limit(1)
)
_ONLY_CAPTURED = update(_state).where(_state.c.id == bindparam("state")).values(status=Status.CAPTURED.value)
_THOSE_HELD = (
    select(_state.c.id, _state.c.uid)
    .join_from(_replica, _state, _state.c.id == _replica.c.state_id)
    .where(_state.c.id.in_(_ids), _state.c.world_size == 1)
    .where(_replica.c.tier == bindparam("on_tier"), _replica.c.node == bindparam("on_node"))
    .order_by(_state.c.id)
)
_ONLY_CAPTURED_ALL = (
    update(_state)
    .where(_state.c.id.in_(_ids), _state.c.status.not_in(bindparam("gone", expanding=True)))
    .where(~exists().where(_replica.c.state_id == _state.c.id, _replica.c.tier.not_in(bindparam("volatile", expanding=True))))
    .values(status=Status.CAPTURED.value)
)
