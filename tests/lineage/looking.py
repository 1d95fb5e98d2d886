"""States by what the lineage's queries find as row ids."""

from __future__ import annotations

from typing import TYPE_CHECKING

from datastates.lineage import lookup
from datastates.lineage.query import walk

if TYPE_CHECKING:
    from datastates.lineage import State
    from datastates.lineage.session import Session


def by_prefix(session: Session, prefix: str) -> State:
    """The one state whose uid begins like this."""
    return lookup.states(session, [lookup.id_by_prefix(session, prefix)])[0]


def nth_ancestor(session: Session, uid: str, n: int) -> State:
    """The n-th first parent upwards."""
    return lookup.states(session, [walk.nth_ancestor_id(session, lookup.id_of(session, uid), n)])[0]
