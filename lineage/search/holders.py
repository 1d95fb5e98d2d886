"""The holders of a state's bytes: its replicas, as they were reported.

A disk is identified by its folder of packs, memory by its process: ``holder`` adds that process to the node of a replica in memory, so that
each of several processes on a node may hold the same state, and drop it. People are shown a host name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sqlalchemy import bindparam, func, select

from datastates.lineage.lookup import id_of
from datastates.lineage.schema import FolderRow, ReplicaRow, table

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

__all__ = ["Replica", "holder", "node_of", "replicas_of"]

_MARK = "#"

_replica, _folder = table(ReplicaRow), table(FolderRow)
_REPLICAS = (
    select(
        *(_replica.c.rank, _replica.c.tier, func.coalesce(_folder.c.host, _replica.c.node).label("node")),
        *(_replica.c.status, _replica.c.bytes),
    )
    .outerjoin_from(_replica, _folder, _folder.c.uid == _replica.c.node)
    .where(_replica.c.state_id == bindparam("state"))
    .order_by(_replica.c.rank, _replica.c.tier, _replica.c.node)
)


@dataclass(frozen=True, slots=True)
class Replica:
    """One rank's shard is complete on a tier of a node; ``status`` is ``ok`` or ``gone``. In memory: in that of the process of ``run``.

    ``bytes`` are those that it added there: bytes that other states held already came without a copy.
    """

    rank: int
    tier: str
    node: str
    status: str
    bytes: int
    run: str | None = None


def holder(node: str, run: str | None) -> str:
    """The node of a replica that is in the memory of a process."""
    return node if run is None else f"{node}{_MARK}{run}"


def node_of(place: str) -> str:
    """The node in a place, whichever process has the memory."""
    return place.partition(_MARK)[0]


def replicas_of(session: Session, uid: str) -> list[Replica]:
    """Every replica of a state, by rank, tier and node.

    :raises NotFound: there is no such state.
    """
    rows = session.execute(_REPLICAS, {"state": id_of(session, uid)})
    return [_replica_of(row) for row in rows]


def _replica_of(row: Any) -> Replica:
    node, _, run = row.node.partition(_MARK)
    return Replica(row.rank, row.tier, node, row.status, row.bytes, run or None)
