"""The places where bytes are: how many states each tier of each node holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sqlalchemy import func, select

from datastates.lineage.schema import FolderRow, ReplicaRow, table
from datastates.lineage.search.holders import node_of

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

__all__ = ["Held", "held"]

_replica, _folder = table(ReplicaRow), table(FolderRow)
_HELD = (
    select(_replica.c.tier, _replica.c.node, func.max(_folder.c.host), func.count(), func.sum(_replica.c.bytes))
    .outerjoin_from(_replica, _folder, _folder.c.uid == _replica.c.node)
    .where(_replica.c.status == "ok")
    .group_by(_replica.c.tier, _replica.c.node)
)


@dataclass(frozen=True, slots=True)
class Held:
    """What a tier of a node holds: ``replicas`` of states, or of ranks' parts of them, which added ``bytes`` there."""

    tier: str
    node: str
    replicas: int
    bytes: int


def held(session: Session) -> tuple[Held, ...]:
    """What each tier of each node holds, as reported; the processes of a node are added up. One scan of all replicas."""
    found: dict[tuple[str, str], tuple[int, int]] = {}
    for tier, place, host, count, size in session.execute(_HELD):
        key = tier, host or node_of(place)
        replicas, bytes_ = found.get(key, (0, 0))
        found[key] = replicas + count, bytes_ + int(size or 0)
    return tuple(Held(*key, *numbers) for key, numbers in sorted(found.items()))
