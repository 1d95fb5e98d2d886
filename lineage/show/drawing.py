"""A history drawn as lanes, from which any rows can be read at once, however long it is.

The lanes of a row depend on all rows above it. So the open lines are saved at every ``STRIDE`` rows, counted from the oldest, and rows are
computed from the nearest saved place. When heads move by captures, only the new part on top is drawn: branches keep their columns, and as
soon as the open lines equal those at a saved place, so does everything below it.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from datastates.lineage.search.order import Firsts, Topology, position, starts

from .lanes import Front

__all__ = ["Ancestry", "Drawing", "Placement", "draw_history", "draw_nodes"]

STRIDE = 256
SHORT = 16  # states that follow one another; for shorter runs it is faster to look at each state


@dataclass(frozen=True, slots=True)
class Placement:
    """The row, as in ``lanes.Row``, of the state with this row id; and the owners of the lines above and below, as
    ``lanes.Front.sources``."""

    id: int
    lane: int
    above: tuple[int, ...]
    below: tuple[int, ...]
    joins: tuple[int, ...]
    parents: tuple[int, ...]
    sources_above: tuple[int, ...] = ()
    sources_below: tuple[int, ...] = ()


class Ancestry(Protocol):
    """Parents by id: of all states, or of the nodes of a skeleton."""

    @property
    def first(self) -> Firsts:
        """The first parent, 0 where there is none."""
        ...

    @property
    def further(self) -> Mapping[int, Sequence[int]]:
        """The other parents of those that have some."""
        ...

    def parents(self, id_: int, /) -> tuple[int, ...]:
        """All parents, the first parent first."""
        ...


@dataclass(frozen=True, slots=True)
class _Kept:
    """The open lines above a row (0 where there is none), their owners, and the columns that the rows below need up to the next
    saved place."""

    awaited: array[int]
    sources: array[int]
    width: int


@dataclass(frozen=True, slots=True)
class Drawing:
    """The history of ``heads``. ``order`` are its row ids, rising: the last is drawn first.

    ``tips`` are the heads that no other head descends from, and their columns: with the heads they determine everything else. ``width`` is
    the number of columns needed. Two drawings with the same ``version`` have the same rows. ``trunk`` is the state in the first column, if
    there is one.
    """

    topology: Ancestry
    heads: frozenset[int]
    order: array[int]
    tips: Mapping[int, int]
    kept: Mapping[int, _Kept]
    width: int
    version: str
    trunk: int | None = None

    @property
    def total(self) -> int:
        """The number of rows."""
        return len(self.order)

    def row_of(self, id_: int) -> int | None:
        """The row of a state, counted from 0 for the newest; None if it is not in this history."""
        index = position(self.order, id_)
        return None if index is None else len(self.order) - 1 - index

    def rows(self, first: int, count: int) -> list[Placement]:
        """Rows from ``first`` on, newest first; the cost is that of the returned rows and of fewer than ``STRIDE`` rows above them."""
        end = len(self.order) - first
        return list(self._draw(end, max(0, end - count))) if end > 0 else []

    def _draw(self, end: int, begin: int) -> Iterator[Placement]:
        """The states at these places of ``order``, from the last to the first."""
        start = min((place for place in self._places(end)), default=len(self.order))
        # below the trunk, any line may take its column
        trunk = self.trunk if self.trunk is not None and (position(self.order, self.trunk) or 0) < start else None
        front = _front(self.kept[start].awaited, self.tips, trunk, self.kept[start].sources)
        _skip(front, self.topology, self.order, start, end)
        above = front.used()
        sources = tuple([front.sources[lane] for lane in above])
        for index in range(end - 1, begin - 1, -1):
            id_ = self.order[index]
            lane, joins, parents = front.place(id_, self.topology.parents(id_))
            below = front.used()
            following = tuple([front.sources[lane] for lane in below])
            yield Placement(id_, lane, above, below, joins, parents, sources, following)
            above, sources = below, following

    def _places(self, end: int) -> Iterator[int]:
        """The nearest place at or above ``end`` whose lines were saved."""
        place = -(-end // STRIDE) * STRIDE
        while place < len(self.order):
            if place in self.kept:
                yield place
                return
            place += STRIDE


def draw_history(
    topology: Topology,
    heads: frozenset[int],
    *,
    old: Drawing | None = None,
    trunk: int | None = None,
    budget_rows: int | None = None,
    pause: Callable[[], None] = lambda: None,
) -> Drawing | None:
    """The history of ``heads``, which ``topology`` has read. ``old`` is an earlier drawing of the same heads: what it has is reused.
    ``trunk`` is the head to put into the first column.

    None if more than ``budget_rows`` would have to be read; ``pause`` is called every few hundred rows.
    """
    grown = None if old is None else _redraw(topology, old, heads, trunk, budget_rows, pause)
    if grown is not None or (old is not None and budget_rows is not None and len(old.order) > budget_rows):
        return grown
    order = topology.history(heads, pause=pause)
    if budget_rows is not None and len(order) > budget_rows:
        return None
    return _draw_all(topology, heads, order, None, trunk, budget_rows, pause)


def draw_nodes(nodes: Ancestry, heads: frozenset[int], order: array[int], *, trunk: int | None, preferred: Mapping[int, int]) -> Drawing:
    """The drawing of a skeleton. Its nodes are few, so it is always drawn as a whole. ``preferred`` are columns for heads."""
    drawn = _draw_all(nodes, heads, order, None, trunk, None, lambda: None, preferred=preferred)
    assert drawn is not None, "there is no budget"
    return drawn


def _redraw(
    topology: Topology, old: Drawing, heads: frozenset[int], trunk: int | None, budget_rows: int | None, pause: Callable[[], None]
) -> Drawing | None:
    """``old`` extended by what its heads, or new ones, have captured since; None if they changed otherwise, or it is too much."""
    new = topology.since(old.order, heads)
    if new is None:
        return None
    led_to = {parent for id_ in new for parent in topology.parents(id_)}
    if any(tip not in heads and tip not in led_to for tip in old.tips):
        return None
    if not new and trunk == old.trunk:
        return replace(old, heads=heads, version=_version(heads, old.tips, trunk))
    if old.trunk is not None and (trunk is None or not _leads(topology, trunk, old.trunk)):
        return None  # another branch takes its column, from far down on
    if old.trunk is None and trunk is not None:
        return None
    return _draw_all(topology, heads, old.order + new, old, trunk, budget_rows, pause)


def _leads(topology: Topology, child: int, parent: int) -> bool:
    """Whether ``child`` is ``parent``, or descends from it by first parents."""
    while child > parent:
        child = topology.first[child]
    return child == parent


def _draw_all(
    topology: Ancestry,
    heads: frozenset[int],
    order: array[int],
    old: Drawing | None,
    trunk: int | None,
    budget_rows: int | None,
    pause: Callable[[], None],
    *,
    preferred: Mapping[int, int] | None = None,
) -> Drawing | None:
    """Draw from the top until the lines equal those of ``old``, or to the end."""
    place = end = len(order)
    if trunk is not None and position(order, trunk) is None:
        trunk = None
    wanted = dict(preferred or {}) if old is None else _preferred(topology, old, heads)
    if trunk is not None:
        wanted = {key: lane for key, lane in wanted.items() if lane and key != trunk}
    front = _front((), wanted, trunk)
    kept: dict[int, _Kept] = {}
    while end:
        if old is not None and end in old.kept and end < len(old.order):
            there = old.kept[end]
            is_same = there.awaited == _lines(front) and there.sources == _sources(front)
            if is_same and (old.trunk is None or old.order[end] <= old.trunk):
                break
        if budget_rows is not None and len(order) - end > budget_rows:
            return None
        begin = (end - 1) // STRIDE * STRIDE
        open_ = front.width = len(front.awaited)
        if end == len(order) or _is_kept(end, open_):
            place = end
            kept[place] = _Kept(_lines(front), _sources(front), open_)
        _skip(front, topology, order, end, begin)
        kept[place] = replace(kept[place], width=max(kept[place].width, front.width))
        end = begin
        pause()
    tips = dict(front.begun)
    if old is not None and end:
        kept.update((place, one) for place, one in old.kept.items() if place <= end)
        tips.update((tip, lane) for tip, lane in old.tips.items() if tip < order[end])
    width = max((one.width for one in kept.values()), default=0)
    return Drawing(topology, heads, order, tips, kept, width, _version(heads, tips, trunk), trunk)


def _version(heads: frozenset[int], tips: Mapping[int, int], trunk: int | None) -> str:
    return hashlib.blake2b(repr((sorted(heads), sorted(tips.items()), trunk)).encode(), digest_size=8).hexdigest()


def _is_kept(place: int, lines: int) -> bool:
    """Whether lines are saved at this place: the more lines, the fewer places, so that no more numbers are kept than there are rows."""
    return place // STRIDE % (1 << (lines // STRIDE).bit_length()) == 0


def _preferred(topology: Ancestry, old: Drawing, heads: frozenset[int]) -> dict[int, int]:
    """The columns in which heads stood before, or else those of the states that they were captured from."""
    first, last = topology.first, old.order[-1] if old.order else 0
    found: dict[int, int] = {}
    for head in heads:
        id_ = head
        while id_ > last:
            id_ = first[id_]
        if id_ in old.tips:
            found[head] = old.tips[id_]
    return found


def _front(awaited: Iterable[int], preferred: Mapping[int, int], trunk: int | None = None, sources: Iterable[int] = ()) -> Front[int]:
    return Front((id_ or None for id_ in awaited), preferred, trunk=trunk, sources=(id_ or None for id_ in sources))


def _lines(front: Front[int]) -> array[int]:
    return array("q", [id_ or 0 for id_ in front.awaited])


def _sources(front: Front[int]) -> array[int]:
    return array("q", [front.sources.get(lane, 0) if id_ else 0 for lane, id_ in enumerate(front.awaited)])


def _skip(front: Front[int], topology: Ancestry, order: array[int], end: int, begin: int) -> None:
    """Place the states in between, from the last to the first; runs that only follow one another are placed at once, where that pays."""
    block, first, further = order[begin:end], topology.first, topology.further
    places = starts(first, block)
    if len(places) * SHORT > len(block):
        block.reverse()
        front.skip(block, first, further)
        return
    for place in reversed(places):
        run = block[place:]
        del block[place:]
        if not front.pass_by(run, first[run[0]], further):
            run.reverse()
            front.skip(run, first, further)
