"""Walks along the parents of states, and back to their children.

Every walk relies on two facts that ``record`` maintains. A parent is recorded before its child, so
ids fall along every path: newest first is simply falling id, and a walk can stop below the id that
it looks for. Each state also has a jump pointer along first parents by the skew-binary rule (Myers,
"An applicative random-access stack", 1983). Any first-parent ancestor is O(log n) look-ups away,
all inside one SQL statement.
"""

from __future__ import annotations

import heapq
import math
import threading
from array import array
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import chain, compress, count, islice
from operator import itemgetter, ne
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
from sqlalchemy import (
    CTE,
    BigInteger,
    ColumnElement,
    Integer,
    Select,
    and_,
    bindparam,
    case,
    func,
    lateral,
    literal,
    select,
    text,
    true,
    union_all,
)

from datastates.errors import InvalidInput, NotFound
from datastates.lineage.lookup import id_of, states, unknown
from datastates.lineage.schema import EDGE, METRIC, STATE
from datastates.lineage.states import GONE, State, Status

if TYPE_CHECKING:
    from datastates.lineage.session import Session


_PAGE_MIN = 32
_PAGE_MAX = 4096

_jump = STATE.alias("jump")
_next = STATE.alias("next")
_other = STATE.alias("other")

_PLACE = select(STATE.c.id, STATE.c.generation).where(STATE.c.uid == bindparam("uid"))
_GENERATIONS = select(STATE.c.id, STATE.c.generation).where(
    STATE.c.id.in_(bindparam("ids", type_=BigInteger, expanding=True))
)
_ANY_EDGE = select(EDGE.c.child_id).limit(1)
_CHILDREN = union_all(
    select(STATE.c.id).where(STATE.c.parent_id == bindparam("start")),
    select(EDGE.c.child_id).where(EDGE.c.parent_id == bindparam("start")),
)


def _climb(target: ColumnElement[int]) -> Select[Any]:
    """The first-parent ancestor of ``start`` at the generation ``target``: jump while that does
    not overshoot, else go one up."""
    columns = ("id", "parent_id", "jump_id", "generation")
    walk = (
        select(*(STATE.c[name] for name in columns), target.label("target"))
        .where(STATE.c.id == bindparam("start"))
        .cte("climb", recursive=True)
    )
    up = case((_jump.c.generation >= walk.c.target, _jump.c.id), else_=walk.c.parent_id)
    step = (
        select(*(_next.c[name] for name in columns), walk.c.target)
        .select_from(walk.join(_jump, _jump.c.id == walk.c.jump_id).join(_next, _next.c.id == up))
        .where(walk.c.generation > walk.c.target)
    )
    walk = walk.union_all(step)
    return select(walk.c.id).where(walk.c.generation == walk.c.target)


def _meet() -> Select[Any]:
    """The state where the first-parent chains of two states of one generation meet: both jump as
    long as that keeps them apart."""
    walk = select(
        bindparam("one", type_=BigInteger).label("one"),
        bindparam("other", type_=BigInteger).label("other"),
    ).cte("meet", recursive=True)
    apart = STATE.c.jump_id != _other.c.jump_id
    step = (
        select(
            case((apart, STATE.c.jump_id), else_=STATE.c.parent_id).label("one"),
            case((apart, _other.c.jump_id), else_=_other.c.parent_id).label("other"),
        )
        .select_from(
            walk.join(STATE, STATE.c.id == walk.c.one).join(_other, _other.c.id == walk.c.other)
        )
        .where(walk.c.one != walk.c.other)
    )
    walk = walk.union_all(step)
    return select(walk.c.one).where(walk.c.one == walk.c.other)


def _restorable(gone: list[str]) -> Select[Any]:
    """Walk up the first parents of ``start`` as long as their status is one of these."""
    walk = (
        select(STATE.c.id, STATE.c.parent_id, STATE.c.status)
        .where(STATE.c.id == bindparam("start"))
        .cte("restorable", recursive=True)
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
        select(STATE.c.id, STATE.c.parent_id, literal(1).label("place"))
        .where(STATE.c.id == start, STATE.c.id >= bottom)
        .cte("chain", recursive=True)
    )
    step = (
        select(_next.c.id, _next.c.parent_id, walk.c.place + 1)
        .join_from(walk, _next, _next.c.id == walk.c.parent_id)
        .where(walk.c.place < bindparam("count", type_=Integer), _next.c.id >= bottom)
    )
    walk = walk.union_all(step)
    return select(walk.c.id, walk.c.parent_id, EDGE.c.parent_id).outerjoin_from(
        walk, EDGE, EDGE.c.child_id == walk.c.id
    )


_LATER = (
    select(_next.c.uid)
    .join_from(
        STATE, _next, and_(_next.c.segment_id == STATE.c.segment_id, _next.c.id > STATE.c.id)
    )
    .where(STATE.c.uid == bindparam("uid"), _next.c.status.not_in(GONE))
    .order_by(_next.c.id)
)
_CLIMB = _climb(bindparam("target", type_=Integer))
_CLIMB_BACK = _climb(STATE.c.generation - bindparam("count", type_=BigInteger))
_MEET = _meet()
_CHAIN = _chain_page()
_WALK_RESTORABLE = _restorable(GONE)
_LASTING = _restorable([*GONE, Status.CAPTURED.value])


# Sets of states, for conditions of other queries


def first_parents_of(heads: Select[Any], name: str) -> CTE:
    """The states with the ids that ``heads`` selects, and their first parents up to the root."""
    next_ = STATE.alias()
    start = heads.subquery()
    walk = (
        select(STATE.c.id, STATE.c.parent_id)
        .join_from(start, STATE, STATE.c.id == start.c[0])
        .cte(name, recursive=True)
    )
    return walk.union(
        select(next_.c.id, next_.c.parent_id).join_from(walk, next_, next_.c.id == walk.c.parent_id)
    )


def above(heads: Select[Any], name: str, dialect: str) -> CTE:
    """The states with the ids that ``heads`` selects, and all their ancestors through every
    parent."""
    following, edge = STATE.alias(), EDGE.alias()
    first = select(following.c.parent_id.label("id")).where(following.c.parent_id.is_not(None))
    further = select(edge.c.parent_id.label("id"))
    return _reach(heads, name, dialect, (first, following.c.id), (further, edge.c.child_id))


def below(heads: Select[Any], name: str, dialect: str) -> CTE:
    """The states with the ids that ``heads`` selects, and all their descendants through any
    parent, breadth first, so that a limit takes the nearest."""
    following, edge = STATE.alias(), EDGE.alias()
    first, further = select(following.c.id), select(edge.c.child_id.label("id"))
    return _reach(heads, name, dialect, (first, following.c.parent_id), (further, edge.c.parent_id))


def _reach(
    heads: Select[Any], name: str, dialect: str, *steps: tuple[Select[Any], ColumnElement[Any]]
) -> CTE:
    """Repeat steps from ``heads`` on. A step has the ids that it leads to, and the column with the
    id that it comes from.

    SQLite searches the index of each table only if both have their own place in the recursion;
    PostgreSQL allows the recursion in only one place.
    """
    walk = select(heads.subquery().c[0].label("id")).cte(name, recursive=True)
    if dialect == "sqlite":
        return walk.union(*(to.where(at == walk.c.id) for to, at in steps))
    either = lateral(union_all(*(to.where(at == walk.c.id) for to, at in steps)))
    return walk.union(select(either.c.id).select_from(walk.join(either, true())))


# Towards the root


def log(
    session: Session, uid: str, *, limit: int | None = None, after: str | None = None
) -> list[State]:
    """The state and all its ancestors through every parent, newest first. The cost is proportional
    to the result.

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
    return list(
        islice(_walk(session, id_of(session, uid)), 1, None if limit is None else limit + 1)
    )


def nth_ancestor_id(session: Session, id_: int, n: int) -> int:
    """The row id of the n-th first parent upwards (0 is the state itself), in O(log n) look-ups and
    one statement.

    :raises NotFound: the chain of first parents is shorter.
    """
    if n < 0:
        raise InvalidInput(f"{n} is no number of generations: count from 0, towards the root")
    found = session.execute(_CLIMB_BACK, {"start": id_, "count": n}).scalar()
    if found is None:
        (start,) = states(session, [id_])
        raise NotFound(
            f"{start.uid} has {start.generation} first parents up to its root: ~{n} goes beyond it"
        )
    return int(found)


def first_parent_at(session: Session, id_: int, other: int, *, younger: int = 0) -> int:
    """The row id of ``id_`` or of its first parent in the generation of ``other``, or ``younger``
    generations later. O(log n).

    :raises NotFound: ``id_`` is older itself.
    """
    new, old = _generations(session, id_, other)
    found = (
        session.execute(_CLIMB, {"start": id_, "target": old + younger}).scalar()
        if new >= old + younger
        else None
    )
    if found is None:
        raise NotFound(
            f"{states(session, [id_])[0].uid} has {new} first parents up to its root: none of them"
            f" has {old + younger}"
        )
    return int(found)


def first_meeting(session: Session, one: int, other: int) -> int | None:
    """The newest state on the first-parent paths of both, as row ids; None when they never meet.
    O(log n)."""
    level = min(_generations(session, one, other))
    one, other = (
        session.execute(_CLIMB, {"start": id_, "target": level}).scalar_one()
        for id_ in (one, other)
    )
    found = session.execute(_MEET, {"one": one, "other": other}).scalar()
    return None if found is None else int(found)


def is_ancestor(session: Session, a: str, b: str) -> bool:
    """Whether ``a`` is ``b`` or one of its ancestors through any parent.

    O(log n) along first parents. If further parents exist and the answer is no, the states between
    the two are read.
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
    """The newest state that both are or descend from, through any parent; None when their histories
    never meet.

    O(log n) if no state has further parents; otherwise everything above the answer is read.
    """
    one, other = _place(session, a), _place(session, b)
    if _has_edges(session):
        base = _first_common(_walk(session, one.id), _walk(session, other.id))
    else:
        base = first_meeting(session, one.id, other.id)
    return None if base is None else states(session, [int(base)])[0]


def nearest_restorable(session: Session, uid: str, *, is_lasting: bool = False) -> State | None:
    """The state itself if some tier holds its bytes, otherwise the newest such state along first
    parents; or None.

    ``is_lasting`` skips states that only the memory of processes holds.
    """
    found = session.execute(
        _LASTING if is_lasting else _WALK_RESTORABLE, {"start": id_of(session, uid)}
    ).scalar()
    return None if found is None else states(session, [int(found)])[0]


# Away from the root


def later_restorable(session: Session, uid: str) -> Iterator[str]:
    """The uids of the states after this one on its own branch whose bytes some tier holds, the
    nearest first."""
    return iter(session.execute(_LATER, {"uid": uid}).scalars())


def children(session: Session, uid: str) -> list[State]:
    """The states that have this one as their first or as a further parent, oldest first."""
    ids = session.execute(_CHILDREN, {"start": id_of(session, uid)}).scalars()
    return states(session, sorted(set(ids)))


def descendants(session: Session, uid: str, *, limit: int | None = None) -> list[State]:
    """The states that descend from this one through any parent, parents before children; at most
    the ``limit`` nearest."""
    return states(session, descendant_ids(session, uid, limit=limit))


def descendant_ids(session: Session, uid: str, *, limit: int | None = None) -> list[int]:
    """The row ids of ``descendants``."""
    head = select(STATE.c.id).where(STATE.c.id == bindparam("start"))
    reach = below(head, "below", session.dialect.name)
    query = select(reach.c.id) if limit is None else select(reach.c.id).limit(limit + 1)
    start = id_of(session, uid)
    found = session.execute(query, {"start": start}).scalars()
    return sorted(id_ for id_ in found if id_ != start)


# How


def _walk(session: Session, start: int, *, bottom: int = 0) -> Iterator[int]:
    """The ids of a state and its ancestors, falling, read a page at a time; none below ``bottom``.

    It keeps a heap of chains of first parents. The highest id comes next. A further parent opens a
    new chain. A chain ends at an id that was seen before.
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


def _pages(
    session: Session, start: int, bottom: int
) -> Iterator[tuple[list[int], dict[int, list[int]]]]:
    """The first parents from ``start`` on, falling, and the further parents of those that have
    some; in pages of growing size."""
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


# The states between one state and a descendant of it, and what can be read for all of them at
# once.


_LOW = bindparam("low", type_=BigInteger)
_HIGH = bindparam("high", type_=BigInteger)
_PATH_RESTORABLE = select(STATE.c.id).where(
    STATE.c.id >= _LOW,
    STATE.c.id <= _HIGH,
    STATE.c.status.in_([status.value for status in Status if status.is_restorable]),
)
_VALUES = select(METRIC.c.state_id, METRIC.c.value).where(
    METRIC.c.key == bindparam("key"), METRIC.c.state_id >= _LOW, METRIC.c.state_id <= _HIGH
)


def path_ids(session: Session, old: int, new: int) -> list[int]:
    """The row ids from ``old`` to ``new``, both included, oldest first: by first parents, and by a
    further parent only where first parents do not lead there.

    Empty where ``new`` does not descend from ``old``.
    """
    seen: set[int] = set()
    # where to continue, and what was passed on the way there, newest first
    heads: list[tuple[int, list[int]]] = [(new, [])]
    while heads:
        start, passed = heads.pop(0)
        line: list[int] = []
        for id_, further in first_parents(session, start, old):
            if id_ in seen:
                break
            seen.add(id_)
            line.append(id_)
            if id_ == old:
                return [*passed, *line][::-1]
            heads.extend((parent, [*passed, *line]) for parent in further if parent >= old)
    return []


def restorable_along(session: Session, path: Sequence[int]) -> set[int]:
    """Those states of a path whose bytes some tier still holds."""
    return set(path) & set(
        session.execute(_PATH_RESTORABLE, {"low": path[0], "high": path[-1]}).scalars()
    )


def metric_along(session: Session, path: Sequence[int], key: str) -> dict[int, float]:
    """The value of a metric for those states of a path that have it; NaN counts as one."""
    rows = session.execute(_VALUES, {"key": key, "low": path[0], "high": path[-1]})
    found = {id_: math.nan if value is None else float(value) for id_, value in rows}
    return {id_: found[id_] for id_ in path if id_ in found}


# The parents of a whole lineage in memory, from which the history of any states is computed at
# once.


_PAGE = 50_000
_UNREAD = -1
_OFTEN = 4096  # states between two calls of ``pause``
# states that are found in some milliseconds; what finds more of them fast takes time for every
# state of the lineage
FEW = 20_000
SHORT = 4  # states that follow one another; for shorter runs it is faster to look at each state
_ids = bindparam("ids", type_=BigInteger, expanding=True)
_parent = func.coalesce(STATE.c.parent_id, 0)
_NEXT = (
    select(STATE.c.id, _parent)
    .where(STATE.c.id > bindparam("last", type_=BigInteger))
    .order_by(STATE.c.id)
    .limit(_PAGE)
)
_AGGREGATES = {
    "sqlite": "json_group_array({0})",
    "postgresql": "CAST(json_agg({0} ORDER BY id) AS text)",
}
_PAGES = {  # one row for a whole page: one row for each state takes four times as long
    dialect: text(
        f"SELECT count(*), max(id), {aggregate.format('parent')} FROM (SELECT id,"
        f" coalesce(parent_id, 0) AS parent FROM state WHERE id > :last ORDER BY id LIMIT {_PAGE})"
        " AS page"
    )
    for dialect, aggregate in _AGGREGATES.items()
}
_SOME = select(STATE.c.id, _parent).where(STATE.c.id.in_(_ids))
_EDGES = select(EDGE.c.child_id, EDGE.c.parent_id).order_by(EDGE.c.child_id, EDGE.c.position)
_NEXT_EDGES = _EDGES.where(
    EDGE.c.child_id > bindparam("last", type_=BigInteger),
    EDGE.c.child_id <= bindparam("upto", type_=BigInteger),
)
_SOME_EDGES = _EDGES.where(EDGE.c.child_id.in_(_ids))


class Firsts(Protocol):
    """First parents by key, 0 where there is none."""

    def __getitem__(self, key: int, /) -> int:
        """The first parent of one."""
        ...


class Topology:
    """The parents of every state by row id, 8 bytes a state. ``refresh`` is safe from any thread,
    also while others read.

    ``first`` has the first parent of each id, 0 for a root; ``further`` has the other parents of
    the states that have some. If a state was read, all its parents were read too.
    """

    def __init__(self) -> None:
        self.first = array("q", [0])
        self.further: dict[int, tuple[int, ...]] = {}
        self._refreshing = threading.Lock()

    def refresh(self, session: Session, heads: Collection[int] = ()) -> None:
        """Read the states recorded since; afterwards ``heads`` and all their ancestors are known.

        PostgreSQL may commit a lower id after a higher one: such states are read when something
        leads to them.
        """
        page = _PAGES[session.dialect.name]
        with self._refreshing:
            while True:
                last = len(self.first) - 1
                number, upto, parents = session.execute(page, {"last": last}).one()
                if not number:
                    break
                self._take_edges(session.execute(_NEXT_EDGES, {"last": last, "upto": upto}).all())
                if number == upto - last:
                    self.first.extend(msgspec.json.decode(parents, type=list[int]))
                else:
                    self._append_some(session.execute(_NEXT, {"last": last}).all())
                if number < _PAGE:
                    break
            missing = {head for head in heads if self.first[head] == _UNREAD}
            while missing:
                missing = self._read(session, sorted(missing)[:1000]) | set(sorted(missing)[1000:])

    def parents(self, id_: int) -> tuple[int, ...]:
        """The parents of one state, the first parent first."""
        first, further = self.first[id_], self.further.get(id_, ())
        return (first, *further) if first > 0 else further

    def history(
        self, heads: Iterable[int], *, pause: Callable[[], None] = lambda: None
    ) -> array[int]:
        """The ids of ``heads`` and all their ancestors, rising.

        ``pause`` is called from time to time."""
        few = self.since(array("q"), heads := tuple(heads), most=FEW)
        if few is not None:
            return few
        seen = bytearray(len(self.first))
        breaks = starts(self.first, range(1, len(seen)))
        if len(breaks) * SHORT < len(seen):
            self._see_runs(seen, heads, breaks, pause)
        else:
            self._see(seen, heads, pause)
        return array("q", compress(range(len(seen)), seen))

    def since(
        self, order: array[int], heads: Iterable[int], *, most: int | None = None
    ) -> array[int] | None:
        """The ids, rising, that ``heads`` and their ancestors add to ``order``; None unless all
        of them are above its last, and there are at most ``most``."""
        last = order[-1] if order else 0
        found: set[int] = set()
        open_ = list(heads)
        while open_:
            id_ = open_.pop()
            if id_ <= last:
                if position(order, id_) is None:
                    return None
            elif id_ not in found:
                if len(found) == most:
                    return None
                found.add(id_)
                open_.extend(self.parents(id_))
        return array("q", sorted(found))

    def _see(self, seen: bytearray, heads: Iterable[int], pause: Callable[[], None]) -> None:
        """Mark ``heads`` and all their ancestors, one by one."""
        first, further = self.first, self.further
        open_, looked = list(heads), 0
        while open_:
            id_ = open_.pop()
            while id_ > 0 and not seen[id_]:
                seen[id_] = 1
                if id_ in further:
                    open_.extend(further[id_])
                id_ = first[id_]
                looked += 1
                if looked % _OFTEN == 0:
                    pause()

    def _see_runs(
        self,
        seen: bytearray,
        heads: Iterable[int],
        breaks: Sequence[int],
        pause: Callable[[], None],
    ) -> None:
        """The same for histories where most states follow the id before theirs: marks a run at
        once, down to its end or to marked states."""
        first, further, merges = self.first, self.further, sorted(self.further)
        open_, looked = list(heads), 0
        while open_:
            id_ = open_.pop()
            while id_ > 0 and not seen[id_]:
                start = breaks[bisect_right(breaks, id_ - 1) - 1] + 1
                known = seen.rfind(1, start, id_)
                start = max(start, known + 1)
                seen[start : id_ + 1] = b"\1" * (id_ + 1 - start)
                for merge in merges[bisect_left(merges, start) : bisect_right(merges, id_)]:
                    open_.extend(further[merge])
                id_ = first[start]
                looked += 1
                if looked % _OFTEN == 0:
                    pause()

    def _append_some(self, rows: Iterable[Sequence[int]]) -> None:
        """Append rows whose ids rise. Ids that do not exist, or not yet, stay unread."""
        for id_, parent in rows:
            self.first.extend([_UNREAD] * (id_ - len(self.first)))
            self.first.append(parent)

    def _take_edges(self, edges: Iterable[tuple[int, int]]) -> None:
        found: dict[int, list[int]] = {}
        for child, parent in edges:
            found.setdefault(child, []).append(parent)
        self.further.update((child, tuple(parents)) for child, parents in found.items())

    def _read(self, session: Session, ids: list[int]) -> set[int]:
        """Read states that were left out; returns the left-out states that these lead to."""
        self._take_edges(session.execute(_SOME_EDGES, {"ids": ids}).all())
        rows = session.execute(_SOME, {"ids": ids}).all()
        for id_, parent in sorted(rows, key=itemgetter(0)):
            self.first[id_] = parent
        return {
            parent for id_ in ids for parent in self.parents(id_) if self.first[parent] == _UNREAD
        }


def starts(first: Firsts, order: Sequence[int]) -> list[int]:
    """The positions in ``order``, which rises, of states that do not follow the one before:
    their first parent is another one."""
    if isinstance(first, array) and order and order[-1] - order[0] == len(order) - 1:
        # every id: slices take half the time of lookups
        begin, end = order[0], order[-1] + 1
        return [0, *compress(count(1), map(ne, first[begin + 1 : end], range(begin, end)))]
    return list(
        compress(count(), map(ne, map(first.__getitem__, order), chain((_UNREAD - 1,), order)))
    )


def position(order: array[int], id_: int) -> int | None:
    """The position of an id among rising ids."""
    index = bisect_left(order, id_)
    return index if index < len(order) and order[index] == id_ else None
