"""The lineage as a graph, for people's own analyses."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import networkx as nx

from datastates.lineage.change import refs
from datastates.lineage.search import walk
from datastates.lineage.states import State

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

__all__ = ["FIRST_PARENT", "graph"]

FIRST_PARENT = "parent"
"""The kind of the edge from a state's first parent; further parents have the kinds of ``EdgeKind``."""


def graph(
    session: Session, *, of: Iterable[str] | None = None, ancestors: int | None = None, descendants: int | None = 0
) -> nx.DiGraph[str]:
    """The states ``of`` (uids; None: everything that a ref names), with the given numbers of ancestors and descendants of each.

    None instead of a number means all. Nodes are uids with ``state`` (a ``State``) and ``refs`` (names). Edges go from parent to child,
    with ``kind`` and ``weight``, where both ends are in the graph.

    :raises NotFound: one of ``of`` is no state.
    """
    names: dict[str, list[str]] = {}
    for ref in refs.refs(session):
        names.setdefault(ref.state, []).append(ref.name)
    found: dict[str, State] = {}
    for uid in names if of is None else of:
        limit = None if ancestors is None else ancestors + 1
        near = [*walk.log(session, uid, limit=limit), *(walk.descendants(session, uid, limit=descendants) if descendants != 0 else ())]
        found.update((state.uid, state) for state in near)
    result: nx.DiGraph[str] = nx.DiGraph()
    for uid, state in found.items():
        result.add_node(uid, state=state, refs=sorted(names.get(uid, ())))
    for uid, state in found.items():
        _add_edges(result, uid, state)
    return result


def _add_edges(result: nx.DiGraph[str], uid: str, state: State) -> None:
    weights = {edge.parent: (str(edge.kind), edge.weight) for edge in state.edges}
    for index, parent in enumerate(state.parents):
        if parent in result:
            kind, weight = weights.get(parent, (FIRST_PARENT, 1.0)) if index else (FIRST_PARENT, 1.0)
            result.add_edge(parent, uid, kind=kind, weight=weight)
