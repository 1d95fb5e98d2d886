"""Giving up the bytes of states on purpose: only of states that nobody counts on."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

from sqlalchemy import BigInteger, bindparam, exists, select, text, update

from datastates.errors import Conflict, Unsupported
from datastates.lineage.lookup import id_of, state
from datastates.lineage.schema import ReplicaRow, StateRow, table
from datastates.lineage.search.retained import elsewhere, leading, led_here
from datastates.lineage.search.walk import nearest_restorable
from datastates.lineage.states import RefKind, State, Status

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
    session.execute(_ONLY_CAPTURED, {"ids": [id_of(session, uid)], "volatile": list(volatile), "gone": _GONE})
    return state(session, uid)


def take_turns(session: Session) -> None:
    """Wait until no other transaction withdraws states, deletes their files or adds files. (SQLite has only one writer anyway.)"""
    if session.get_bind().dialect.name == "postgresql":
        session.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK})


def withdraw_all(session: Session, ids: Collection[int], *, tier: str, node: str, volatile: Collection[str], holder: str) -> list[str]:
    """Note that the bytes of states, by row id, leave a tier of a node; returns the uids of those that do. Drop the bytes once this is
    committed.

    States that something began to count on since the ids were chosen stay (see ``leading``), and so do those that another process than
    ``holder`` has in its ``volatile`` tiers.
    A state that from then on only ``volatile`` tiers hold is ``captured`` again, one that nobody holds ``evicted``.
    """
    take_turns(session)
    held = leading(session, ids, tier=tier, node=node) | elsewhere(session, ids, volatile=volatile, holder=holder)
    chosen = sorted(set(ids) - held)
    rows = session.execute(_THOSE_HELD, {"ids": chosen, "on_tier": tier, "on_node": node}).all()
    uids = [row.uid for row in rows]
    evict(session, uids, tier=tier, node=node)
    session.execute(_ONLY_CAPTURED, {"ids": [row.id for row in rows], "volatile": list(volatile), "gone": _GONE})
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
    is_lasting = found.status is not Status.CAPTURED  # else what is asked is where names lead once memory is gone
    asked = {"ids": [id_of(session, uid)], "gone": [*_GONE, Status.CAPTURED.value] if is_lasting else _GONE}
    named = sorted(session.execute(_LED_HERE, asked).all())
    branch = next((row.name for row in named if row.kind == RefKind.BRANCH.value), None)
    if branch is not None and (not found.parents or nearest_restorable(session, found.parents[0], is_lasting=is_lasting) is None):
        raise Conflict(f"state {uid} is all that can be restored of branch {branch!r}: delete the branch, or keep the state")
    if named and not is_forced:
        counting = ", ".join(f"{row.kind} {row.name!r}" for row in named[:5])
        raise Conflict(f"state {uid} is what {counting} leads to: move or delete that first, or force it")
    return found


_state, _replica = table(StateRow), table(ReplicaRow)
_LED_HERE = led_here(lambda passed: passed.c.status.in_(bindparam("gone", expanding=True)))
_GONE = [status.value for status in Status if not status.is_restorable]
_ids = bindparam("ids", type_=BigInteger, expanding=True)
_THOSE_HELD = (
    select(_state.c.id, _state.c.uid)
    .join_from(_replica, _state, _state.c.id == _replica.c.state_id)
    .where(_state.c.id.in_(_ids), _state.c.world_size == 1)
    .where(_replica.c.tier == bindparam("on_tier"), _replica.c.node == bindparam("on_node"))
    .order_by(_state.c.id)
)
_ONLY_CAPTURED = (
    update(_state)
    .where(_state.c.id.in_(_ids), _state.c.status.not_in(bindparam("gone", expanding=True)))
    .where(~exists().where(_replica.c.state_id == _state.c.id, _replica.c.tier.not_in(bindparam("volatile", expanding=True))))
    .values(status=Status.CAPTURED.value)
)
