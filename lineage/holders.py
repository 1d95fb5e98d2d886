"""Who holds a state's bytes: its replicas, as they were reported."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sqlalchemy import bindparam, select

from .lookup import id_of
from .schema import ReplicaRow, table

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

__all__ = ["Replica", "replicas_of"]

_replica = table(ReplicaRow)
_REPLICAS = (
    select(_replica.c.rank, _replica.c.tier, _replica.c.node, _replica.c.status, _replica.c.bytes)
    .where(_replica.c.state_id == bindparam("state"))
    .order_by(_replica.c.rank, _replica.c.tier, _replica.c.node)
)


@dataclass(frozen=True, slots=True)
class Replica:
    """One rank's shard is complete on a tier of a node; ``status`` is ``ok`` or ``gone``."""

    rank: int
    tier: str
    node: str
    status: str
    bytes: int


def replicas_of(session: Session, uid: str) -> list[Replica]:
    """Every replica of a state, by rank, tier and node.

    :raises NotFound: there is no such state.
    """
    rows = session.execute(_REPLICAS, {"state": id_of(session, uid)})
    return [Replica(row.rank, row.tier, row.node, row.status, row.bytes) for row in rows]
