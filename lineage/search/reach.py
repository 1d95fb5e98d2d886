"""What can be reached from states, as SQL for use inside other queries; and the difference of two histories.

``walk`` returns states; these return selectable ids, so that a filter or a minimum over a whole ancestry stays in
the database.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from itertools import count
from typing import TYPE_CHECKING, Any

from sqlalchemy import CTE, Select, lateral, select, true, union_all

from datastates.lineage.schema import EdgeRow, StateRow, table

from .walk import first_parents

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

__all__ = ["above", "below", "chain", "difference"]

_state, _edge = table(StateRow), table(EdgeRow)
_LEFT, _RIGHT = 1, 2


def chain(heads: Select[Any], name: str) -> CTE:
    """The states with the ids that ``heads`` selects, and their first parents up to the root."""
    next_ = _state.alias()
    start = heads.subquery()
    walk = select(_state.c.id, _state.c.parent_id).join_from(start, _state, _state.c.id == start.c[0]).cte(name, recursive=True)
    return walk.union(select(next_.c.id, next_.c.parent_id).join_from(walk, next_, next_.c.id == walk.c.parent_id))


def above(heads: Select[Any], name: str, dialect: str) -> CTE:
    """The states with the ids that ``heads`` selects, and all their ancestors through every parent."""
    next_, edge = _state.alias(), _edge.alias()
    start = heads.subquery()
    walk = select(start.c[0].label("id")).cte(name, recursive=True)
    first = select(next_.c.parent_id.label("id"))
    further = select(edge.c.parent_id.label("id"))
    if dialect == "sqlite":
        return walk.union(
            first.join_from(walk, next_, next_.c.id == walk.c.id).where(next_.c.parent_id.is_not(None)),
            further.join_from(walk, edge, edge.c.child_id == walk.c.id),
        )
    up = lateral(
        union_all(first.where(next_.c.id == walk.c.id, next_.c.parent_id.is_not(None)), further.where(edge.c.child_id == walk.c.id))
    )
    return walk.union(select(up.c.id).select_from(walk.join(up, true())))


def below(heads: Select[Any], name: str, dialect: str) -> CTE:
    """The states with the ids that ``heads`` selects, and all their descendants through any parent."""
    next_, edge = _state.alias(), _edge.alias()
    start = heads.subquery()
    walk = select(start.c[0].label("id")).cte(name, recursive=True)
    first = select(next_.c.id)
    further = select(edge.c.child_id.label("id"))
    if dialect == "sqlite":
        return walk.union(
            first.join_from(walk, next_, next_.c.parent_id == walk.c.id), further.join_from(walk, edge, edge.c.parent_id == walk.c.id)
        )
    down = lateral(union_all(first.where(next_.c.parent_id == walk.c.id), further.where(edge.c.parent_id == walk.c.id)))
    return walk.union(select(down.c.id).select_from(walk.join(down, true())))


def difference(session: Session, left: int, right: int) -> tuple[list[int], list[int]]:
    """The ids that only ``left`` reaches, and those that only ``right`` reaches, falling; through every parent.

    This works as git paints its commits: ids fall along every path, so once both reach all that is still to be visited, they reach
    everything above it too. The cost is that of the answer.
    """
    only: dict[int, list[int]] = {_LEFT: [], _RIGHT: []}
    heap: list[tuple[int, int, int, list[int], Iterator[tuple[int, list[int]]]]] = []
    serial = count()

    def push(steps: Iterator[tuple[int, list[int]]], side: int) -> None:
        for id_, further in steps:
            heapq.heappush(heap, (-id_, next(serial), side, further, steps))
            return

    push(first_parents(session, left, 0), _LEFT)
    push(first_parents(session, right, 0), _RIGHT)
    while any(entry[2] != _LEFT | _RIGHT for entry in heap):
        id_ = -heap[0][0]
        same = []
        while heap and -heap[0][0] == id_:
            same.append(heapq.heappop(heap))
        side = 0
        for entry in same:
            side |= entry[2]
        if side in only:
            only[side].append(id_)
        _, _, _, further, steps = same[0]
        push(steps, side)
        for parent in further:
            push(first_parents(session, parent, 0), side)
    return only[_LEFT], only[_RIGHT]
