"""The parents of a whole lineage in memory, from which the history of any states is computed at once.

States never change their parents, and a parent's row id is below its child's. So what was read stays true, and in order of falling ids
children come before their parents.
"""

from __future__ import annotations

import threading
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import chain, compress, count
from operator import itemgetter, ne
from typing import TYPE_CHECKING, Protocol

import msgspec
from sqlalchemy import BigInteger, bindparam, func, select, text

from datastates.lineage.schema import EdgeRow, StateRow, table

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

__all__ = ["Firsts", "Topology", "position", "starts"]

_PAGE = 50_000
_UNREAD = -1
_OFTEN = 4096  # states between two calls of ``pause``
FEW = 20_000  # states that are found in some milliseconds; what finds more of them fast takes time for every state of the lineage
SHORT = 4  # states that follow one another; for shorter runs it is faster to look at each state

_state, _edge = table(StateRow), table(EdgeRow)
_ids = bindparam("ids", type_=BigInteger, expanding=True)
_parent = func.coalesce(_state.c.parent_id, 0)
_NEXT = select(_state.c.id, _parent).where(_state.c.id > bindparam("last", type_=BigInteger)).order_by(_state.c.id).limit(_PAGE)
_AGGREGATES = {"sqlite": "json_group_array({0})", "postgresql": "CAST(json_agg({0} ORDER BY id) AS text)"}
_PAGES = {  # one row for a whole page: one row for each state takes four times as long
    dialect: text(
        f"SELECT count(*), max(id), {aggregate.format('parent')} FROM (SELECT id, coalesce(parent_id, 0) AS parent FROM state"
        f" WHERE id > :last ORDER BY id LIMIT {_PAGE}) AS page"
    )
    for dialect, aggregate in _AGGREGATES.items()
}
_SOME = select(_state.c.id, _parent).where(_state.c.id.in_(_ids))
_EDGES = select(_edge.c.child_id, _edge.c.parent_id).order_by(_edge.c.child_id, _edge.c.position)
_NEXT_EDGES = _EDGES.where(_edge.c.child_id > bindparam("last", type_=BigInteger), _edge.c.child_id <= bindparam("upto", type_=BigInteger))
_SOME_EDGES = _EDGES.where(_edge.c.child_id.in_(_ids))


class Firsts(Protocol):
    """First parents by key, 0 where there is none."""

    def __getitem__(self, key: int, /) -> int:
        """The first parent of one."""
        ...


class Topology:
    """The parents of every state by row id, 8 bytes a state. ``refresh`` is safe from any thread, and beside readers.

    ``first`` has the first parent of each id, 0 for a root; ``further`` has the other parents of the states that have some. If a state was
    read, all its parents were read too.
    """

    def __init__(self) -> None:
        self.first = array("q", [0])
        self.further: dict[int, tuple[int, ...]] = {}
        self._refreshing = threading.Lock()

    def refresh(self, session: Session, heads: Collection[int] = ()) -> None:
        """Read the states recorded since; afterwards ``heads`` and all their ancestors are known.

        PostgreSQL may commit a lower id after a higher one: such states are read when something leads to them.
        """
        page = _PAGES[session.connection().dialect.name]
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

    def history(self, heads: Iterable[int], *, pause: Callable[[], None] = lambda: None) -> array[int]:
        """The ids of ``heads`` and all their ancestors, rising. ``pause`` is called from time to time."""
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

    def since(self, order: array[int], heads: Iterable[int], *, most: int | None = None) -> array[int] | None:
        """The ids, rising, that ``heads`` and their ancestors add to ``order``; None unless all of them are above its last, and there are
        at most ``most``."""
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

    def _see_runs(self, seen: bytearray, heads: Iterable[int], breaks: Sequence[int], pause: Callable[[], None]) -> None:
        """The same for histories where most states follow the id before theirs: marks a run at once, down to its end or to marked
        states."""
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
        return {parent for id_ in ids for parent in self.parents(id_) if self.first[parent] == _UNREAD}


def starts(first: Firsts, order: Sequence[int]) -> list[int]:
    """The positions in ``order``, which rises, of states that do not follow the one before: their first parent is another one."""
    if isinstance(first, array) and order and order[-1] - order[0] == len(order) - 1:  # every id: slices take half the time of lookups
        begin, end = order[0], order[-1] + 1
        return [0, *compress(count(1), map(ne, first[begin + 1 : end], range(begin, end)))]
    return list(compress(count(), map(ne, map(first.__getitem__, order), chain((_UNREAD - 1,), order))))


def position(order: array[int], id_: int) -> int | None:
    """The position of an id among rising ids."""
    index = bisect_left(order, id_)
    return index if index < len(order) and order[index] == id_ else None
