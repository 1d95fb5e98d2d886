"""What the lineage knows of states whose files are in a folder: that they may be deleted, or nothing at all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from sqlalchemy import BindParameter, bindparam, exists, select, union

from datastates.lineage.batches import batches
from datastates.lineage.change.awaited import WHYS
from datastates.lineage.schema import PartRow, ReplicaRow, StateRow, table
from datastates.lineage.states import Status

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

__all__ = ["given_up", "held_on", "unheard_of"]

_BATCH = 500  # uids in one IN list


def given_up(session: Session, uids: Sequence[str], *, tier: str, node: str) -> list[str]:
    """Those of these states that were evicted or lost, and have no recorded replica on a tier of a node; and those of several parts that
    never became complete.
    """
    found: list[str] = []
    for some in batches(uids, _BATCH):
        found += session.execute(_GIVEN_UP, {"uids": some, "on_tier": tier, "on_node": node}).scalars()
        found += session.execute(_NEVER_WHOLE, {"uids": some}).scalars()
    return found


def unheard_of(session: Session, uids: Iterable[str]) -> list[str]:
    """The uids that neither are states here nor wait for their parts."""
    wanted, known = list(uids), set[str]()
    for some in batches(wanted, _BATCH):
        known.update(session.execute(_KNOWN, {"uids": some}).scalars())
    return [uid for uid in wanted if uid not in known]


def held_on(session: Session, *, tier: str, node: str) -> list[tuple[str, int]]:
    """Every state, with its rank, that has a recorded replica on a tier of a node."""
    return [(row.uid, row.rank) for row in session.execute(_HELD_ON, {"on_tier": tier, "on_node": node})]


_state, _replica, _part = table(StateRow), table(ReplicaRow), table(PartRow)
_uids: BindParameter[Any] = bindparam("uids", expanding=True)
_GONE = [status.value for status in Status if not status.is_restorable]
_held = exists().where(_replica.c.state_id == _state.c.id, _replica.c.tier == bindparam("on_tier"), _replica.c.node == bindparam("on_node"))
_GIVEN_UP = select(_state.c.uid).where(_state.c.uid.in_(_uids), _state.c.status.in_(_GONE), ~_held)
_NEVER_WHOLE = select(_part.c.state_uid).where(_part.c.state_uid.in_(_uids), _part.c.status.in_(WHYS))
_KNOWN = union(select(_state.c.uid).where(_state.c.uid.in_(_uids)), select(_part.c.state_uid).where(_part.c.state_uid.in_(_uids)))
_HELD_ON = (
    select(_state.c.uid, _replica.c.rank)
    .join_from(_replica, _state, _state.c.id == _replica.c.state_id)
    .where(_replica.c.tier == bindparam("on_tier"), _replica.c.node == bindparam("on_node"))
)
