"""Walks along the parents of states, and back to their children.

Every walk relies on two facts that ``record`` maintains. A parent is recorded before its child, so ids fall along every path: newest first
is simply falling id, and a walk can stop below the id that it looks for. And each state has a jump pointer along first parents by the
skew-binary rule (Myers, "An applicative random-access stack", 1983), so that any first-parent ancestor is O(log n) look-ups away, all
inside one SQL statement.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from itertools import count, islice
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from sqlalchemy import CTE, BigInteger, Integer, Select, and_, bindparam, case, lateral, literal, select, true, union_all

from datastates.errors import InvalidInput, NotFound
from datastates.lineage.lookup import id_of, state, states, unknown
from datastates.lineage.schema import EdgeRow, StateRow, table
from datastates.lineage.states import State, Status

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

__all__ = [
    "ancestor_ids",
    "ancestors",
    "children",
    "descendant_ids",
    "descendants",
    "first_meeting",
    "first_parent_at",
    "is_ancestor",
    "later_restorable",
    "log",
    "merge_base",
    "nearest_restorable",
    "nth_ancestor_id",
    "state",
    "states",
]

_PAGE_MIN, _PAGE_MAX = 32, 4096  # states of a chain fetched at once
_GONE = [status.value for status in Status if not status.is_restorable]

_state, _edge = table(StateRow), table(EdgeRow)
_jump, _next, _other = _state.alias("jump"), _state.alias("next"), _state.alias("other")

_PLACE = select(_state.c.id, _state.c.generation).where(_state.c.uid == bindparam("uid"))
_GENERATIONS = select(_state.c.id, _state.c.generation).where(_state.c.id.in_(bindparam("ids", type_=BigInteger, expanding=True)))
_ANY_EDGE = select(_edge.c.child_id).limit(1)
_CHILDREN = union_all(
    select(_state.c.id).where(_state.c.parent_id == bindparam("start")),
    select(_edge.c.child_id).where(_edge.c.parent_id == bindparam("start")),
)


def _climb() -> Select[Any]:
    """The first-parent ancestor of ``start`` at generation ``target``: jump while that does not overshoot, else go one up."""
    target = bindparam("target", type_=Integer)
    at = select(_state.c.id, _state.c.parent_id, _state.c.jump_id, _state.c.generation).where(_state.c.id == bindparam("start"))
    walk = at.cte("climb", recursive=True)
    up = case((_jump.c.generation >= target, _jump.c.id), else_=walk.c.parent_id)
    step = (
        select(_next.c.id, _next.c.parent_id, _next.c.jump_id, _next.c.generation)
        .select_from(walk.join(_jump, _jump.c.id == walk.c.jump_id).join(_next, _next.c.id == up))
        .where(walk.c.generation > target)
    )
    walk = walk.union_all(step)
    return select(walk.c.id).where(walk.c.generation == target)


def _climb_back() -> Select[Any]:
    """The first-parent ancestor ``count`` generations above ``start``; nothing if the chain is shorter."""
    target = (_state.c.generation - bindparam("count", type_=BigInteger)).label("target")
    at = select(_state.c.id, _state.c.parent_id, _state.c.jump_id, _state.c.generation, target).where(_state.c.id == bindparam("start"))
    walk = at.cte("climb", recursive=True)
    up = case((_jump.c.generation >= walk.c.target, _jump.c.id), else_=walk.c.parent_id)
    step = (
        select(_next.c.id, _next.c.parent_id, _next.c.jump_id, _next.c.generation, walk.c.target)
        .select_from(walk.join(_jump, _jump.c.id == walk.c.jump_id).join(_next, _next.c.id == up))
        .where(walk.c.generation > walk.c.target)
    )
    walk = walk.union_all(step)
    return select(walk.c.id).where(walk.c.generation == walk.c.target)


def _meet() -> Select[Any]:
    """The state where the first-parent chains of two states of one generation meet: both jump as long as that keeps them apart."""
    walk = select(bindparam("one", type_=BigInteger).label("one"), bindparam("other", type_=BigInteger).label("other")).cte(
        "meet", recursive=True
    )
    apart = _state.c.jump_id != _other.c.jump_id
    step = (
        select(
            case((apart, _state.c.jump_id), else_=_state.c.parent_id).label("one"),
            case((apart, _other.c.jump_id), else_=_other.c.parent_id).label("other"),
        )
        .select_from(walk.join(_state, _state.c.id == walk.c.one).join(_other, _other.c.id == walk.c.other))
        .where(walk.c.one != walk.c.other)
    )
    walk = walk.union_all(step)
    return select(walk.c.one).where(walk.c.one == walk.c.other)


def _restorable(gone: list[str]) -> Select[Any]:
    """Walk up the first parents of ``start`` as long as their status is one of these."""
    walk = (
        select(_state.c.id, _state.c.parent_id, _state.c.status).where(_state.c.id == bindparam("start")).cte("restorable", recursive=True)
    )
    step = (
        select(_next.c.id, _next.c.parent_id, _next.c.status)
        .join_from(walk, _next, _next.c.id == walk.c.parent_id)
        .where(walk.c.status.in_(gone))
    )
    walk = walk.union_all(step)
    return select(walk.c.id).where(walk.c.status.not_in(gone))


def _chain_page() -> Select[Any]:
    """``count`` first parents from ``start`` on, and a row for each of their further parents."""
    start, bottom = bindparam("start", type_=BigInteger), bindparam("bottom", type_=BigInteger)
    walk = (
        select(_state.c.id, _state.c.parent_id, literal(1).label("place"))
        .where(_state.c.id == start, _state.c.id >= bottom)
        .cte("chain", recursive=True)
    )
    step = (
        select(_next.c.id, _next.c.parent_id, walk.c.place + 1)
        .join_from(walk, _next, _next.c.id == walk.c.parent_id)
        .where(walk.c.place < bindparam("count", type_=Integer), _next.c.id >= bottom)
    )
    walk = walk.union_all(step)
    return select(walk.c.id, walk.c.parent_id, _edge.c.parent_id).outerjoin_from(walk, _edge, _edge.c.child_id == walk.c.id)


_LATER = (
    select(_next.c.uid)
    .join_from(_state, _next, and_(_next.c.segment_id == _state.c.segment_id, _next.c.id > _state.c.id))
    .where(_state.c.uid == bindparam("uid"), _next.c.status.not_in(_GONE))
    .order_by(_next.c.id)
)
_CLIMB, _CLIMB_BACK, _MEET, _CHAIN = _climb(), _climb_back(), _meet(), _chain_page()
_RESTORABLE, _LASTING = _restorable(_GONE), _restorable([*_GONE, Status.CAPTURED.value])


@cache
def _descendants(dialect: str) -> CTE:
    """All states below ``start``, breadth first, so that a limit takes the nearest.

    SQLite searches the index of each table only if both have their own place in the recursion; PostgreSQL allows the recursion in only one
    place.
    """
    walk = select(_state.c.id).where(_state.c.id == bindparam("start")).cte("below", recursive=True)
    if dialect == "sqlite":
        return walk.union(
            select(_next.c.id).join_from(walk, _next, _next.c.parent_id == walk.c.id),
            select(_edge.c.child_id).join_from(walk, _edge, _edge.c.parent_id == walk.c.id),
        )
    below = lateral(
        union_all(select(_next.c.id).where(_next.c.parent_id == walk.c.id), select(_edge.c.child_id).where(_edge.c.parent_id == walk.c.id))
    )
    return walk.union(select(below.c.id).select_from(walk.join(below, true())))


# Towards the root


def log(session: Session, uid: str, *, limit: int | None = None, after: str | None = None) -> list[State]:
    """The state and all its ancestors through every parent, newest first; the cost is that of what is returned.

    ``after`` continues after a state that an earlier call returned.
    """
    ids = _walk(session, id_of(session, uid))
    if after is not None:
        last = id_of(session, after)
        ids = (id_ for id_ in ids if id_ < last)
    return states(session, list(islice(ids, limit)))


def ancestors(session: Session, uid: str, *, limit: int | None = None) -> list[State]:
    """The result of ``log`` without the state itself."""
    return states(session, ancestor_ids(session, uid, limit=limit))


def ancestor_ids(session: Session, uid: str, *, limit: int | None = None) -> list[int]:
    """The row ids of ``ancestors``; ten thousand take tens of milliseconds."""
    return list(islice(_walk(session, id_of(session, uid)), 1, None if limit is None else limit + 1))


def nth_ancestor_id(session: Session, id_: int, n: int) -> int:
    """The row id of the n-th first parent upwards (0 is the state itself), in O(log n) look-ups and one statement.

    :raises NotFound: the chain of first parents is shorter.
    """
    if n < 0:
        raise InvalidInput(f"{n} is no number of generations: count from 0, towards the root")
    found = session.execute(_CLIMB_BACK, {"start": id_, "count": n}).scalar()
    if found is None:
        (start,) = states(session, [id_])
        raise NotFound(f"{start.uid} has {start.generation} first parents up to its root: ~{n} goes beyond it")
    return int(found)


def first_parent_at(session: Session, id_: int, other: int, *, younger: int = 0) -> int:
    """The row id of ``id_`` or of its first parent in the generation of ``other``, or ``younger`` generations later. O(log n).

    :raises NotFound: ``id_`` is older itself.
    """
    new, old = _generations(session, id_, other)
    found = session.execute(_CLIMB, {"start": id_, "target": old + younger}).scalar() if new >= old + younger else None
    if found is None:
        raise NotFound(f"{states(session, [id_])[0].uid} has {new} first parents up to its root: none of them has {old + younger}")
    return int(found)


def first_meeting(session: Session, one: int, other: int) -> int | None:
    """The newest state on the first-parent paths of both, as row ids; None when they never meet. O(log n)."""
    level = min(_generations(session, one, other))
    one, other = (session.execute(_CLIMB, {"start": id_, "target": level}).scalar_one() for id_ in (one, other))
    found = session.execute(_MEET, {"one": one, "other": other}).scalar()
    return None if found is None else int(found)


def is_ancestor(session: Session, a: str, b: str) -> bool:
    """Whether ``a`` is ``b`` or one of its ancestors through any parent.

    O(log n) along first parents. Where further parents exist and the answer is no, the states between the two are read.
    """
    old, new = _place(session, a), _place(session, b)
    if old.id >= new.id:
        return bool(old.id == new.id)
    if old.generation <= new.generation:
        found = session.execute(_CLIMB, {"start": new.id, "target": old.generation}).scalar_one()
        if found == old.id:
            return True
    if not _has_edges(session):
        return False
    return old.id in _walk(session, new.id, bottom=old.id)


def merge_base(session: Session, a: str, b: str) -> State | None:
    """The newest state that both are or descend from, through any parent; None when their histories never meet.

    O(log n) if no state has further parents; otherwise everything above the answer is read.
    """
    one, other = _place(session, a), _place(session, b)
    if _has_edges(session):
        base = _first_common(_walk(session, one.id), _walk(session, other.id))
    else:
        base = first_meeting(session, one.id, other.id)
    return None if base is None else states(session, [int(base)])[0]


def nearest_restorable(session: Session, uid: str, *, is_lasting: bool = False) -> State | None:
    """The state itself if some tier holds its bytes, otherwise the newest such state along first parents; or None.

    ``is_lasting`` skips states that only the memory of processes holds.
    """
    found = session.execute(_LASTING if is_lasting else _RESTORABLE, {"start": id_of(session, uid)}).scalar()
    return None if found is None else states(session, [int(found)])[0]


# Away from the root


def later_restorable(session: Session, uid: str) -> Iterator[str]:
    """The uids of the states after this one on its own branch whose bytes some tier holds, the nearest first."""
    return iter(session.execute(_LATER, {"uid": uid}).scalars())


def children(session: Session, uid: str) -> list[State]:
    """The states that have this one as their first or as a further parent, oldest first."""
    ids = session.execute(_CHILDREN, {"start": id_of(session, uid)}).scalars()
    return states(session, sorted(set(ids)))


def descendants(session: Session, uid: str, *, limit: int | None = None) -> list[State]:
    """The states that descend from this one through any parent, parents before children; at most the ``limit`` nearest."""
    return states(session, descendant_ids(session, uid, limit=limit))


def descendant_ids(session: Session, uid: str, *, limit: int | None = None) -> list[int]:
    """The row ids of ``descendants``."""
    reach = _descendants(session.get_bind().dialect.name)
    query = select(reach.c.id) if limit is None else select(reach.c.id).limit(limit + 1)
    start = id_of(session, uid)
    found = session.execute(query, {"start": start}).scalars()
    return sorted(id_ for id_ in found if id_ != start)


# How


def _walk(session: Session, start: int, *, bottom: int = 0) -> Iterator[int]:
    """The ids of a state and its ancestors, falling, read a page at a time; none below ``bottom``.

    It keeps a heap of chains of first parents. The highest id comes next; a further parent opens a chain of its own; a chain that reaches
    an id already seen ends there.
    """
    if not _has_edges(session):
        for ids, _ in _pages(session, start, bottom):
            yield from ids
        return
    serial = count()
    heap: list[tuple[int, int, Iterator[tuple[int, list[int]]], list[int]]] = []

    def push(chain: Iterator[tuple[int, list[int]]]) -> None:
        for id_, further in chain:
            heapq.heappush(heap, (-id_, next(serial), chain, further))
            return

    seen: set[int] = set()
    push(first_parents(session, start, bottom))
    while heap:
        negative, _, chain, further = heapq.heappop(heap)
        if -negative in seen:
            continue
        seen.add(-negative)
        yield -negative
        push(chain)
        for parent in further:
            if parent not in seen:
                push(first_parents(session, parent, bottom))


def first_parents(session: Session, start: int, bottom: int) -> Iterator[tuple[int, list[int]]]:
    """The first parents from ``start`` on, each with its further parents."""
    for ids, further in _pages(session, start, bottom):
        for id_ in ids:
            yield id_, further.get(id_, [])


def _pages(session: Session, start: int, bottom: int) -> Iterator[tuple[list[int], dict[int, list[int]]]]:
    """The first parents from ``start`` on, falling, and the further parents of those that have some; in pages of growing size."""
    following: int | None = start
    page = _PAGE_MIN
    while following is not None:
        rows = session.execute(_CHAIN, {"start": following, "count": page, "bottom": bottom}).all()
        if not rows:
            return
        further: defaultdict[int, list[int]] = defaultdict(list)
        for id_, _, other in rows:
            if other is not None:
                further[id_].append(other)
        ids = sorted({row[0] for row in rows}, reverse=True)
        yield ids, further
        following = min(rows, key=itemgetter(0))[1] if len(ids) == page else None
        page = min(page * 4, _PAGE_MAX)


def _first_common(one: Iterator[int], other: Iterator[int]) -> int | None:
    """The highest id in two falling sequences."""
    a, b = next(one, None), next(other, None)
    while a is not None and b is not None and a != b:
        if a > b:
            a = next(one, None)
        else:
            b = next(other, None)
    return a if a == b else None


def _place(session: Session, uid: str) -> Any:
    row = session.execute(_PLACE, {"uid": uid}).first()
    if row is None:
        raise unknown(uid)
    return row


def _generations(session: Session, *ids: int) -> list[int]:
    found = {row.id: row.generation for row in session.execute(_GENERATIONS, {"ids": list(ids)})}
    return [found[id_] for id_ in ids]


def _has_edges(session: Session) -> bool:
    return session.execute(_ANY_EDGE).first() is not None
