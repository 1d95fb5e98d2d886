"""A history drawn as lanes, of which any rows can be had at once, however long it is.

The lanes of a row depend on all rows above it. So the open lines are kept at every ``STRIDE`` rows, counted from the oldest, and
rows are made from the nearest place that was kept. When heads move by captures, only what is new on top is drawn: branches keep
their columns, and as soon as the open lines are as they were at a kept place, so is all below it.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from datastates.lineage.search.order import Topology, position

from .lanes import Front

__all__ = ["Drawing", "Placement", "draw_history"]

STRIDE = 256


@dataclass(frozen=True, slots=True)
class Placement:
    """A row, as ``lanes.Row``, of the state with this row id."""

    id: int
    lane: int
    above: tuple[int, ...]
    below: tuple[int, ...]
    joins: tuple[int, ...]
    parents: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Kept:
    """The open lines above a row, 0 where there is none, and the columns that the rows below need up to the next kept place."""

    awaited: array[int]
    width: int


@dataclass(frozen=True, slots=True)
class Drawing:
    """The history of ``heads``. ``order`` are its row ids, rising: the last is drawn first.

    ``tips`` are those heads that no other one descends from, and their columns: they and the heads decide all else. ``width`` is how
    many columns are needed. Two drawings with the same ``version`` have the same rows.
    """

    topology: Topology
    heads: frozenset[int]
    order: array[int]
    tips: Mapping[int, int]
    kept: Mapping[int, _Kept]
    width: int
    version: str

    @property
    def total(self) -> int:
        """The number of rows."""
        return len(self.order)

    def row_of(self, id_: int) -> int | None:
        """The row of a state, counted from 0, the newest; None if it is not in here."""
        index = position(self.order, id_)
        return None if index is None else len(self.order) - 1 - index

    def rows(self, first: int, count: int) -> list[Placement]:
        """Rows from ``first`` on, newest first; the cost is that of what is returned and of less than ``STRIDE`` rows above."""
        end = len(self.order) - first
        return list(self._draw(end, max(0, end - count))) if end > 0 else []

    def _draw(self, end: int, begin: int) -> Iterator[Placement]:
        """The states at these places of ``order``, from the last to the first."""
        start = min((place for place in self._places(end)), default=len(self.order))
        front = _front(self.kept[start].awaited, self.tips)
        _skip(front, self.topology, self.order, start, end)
        above = front.used()
        for index in range(end - 1, begin - 1, -1):
            id_ = self.order[index]
            lane, joins, parents = front.place(id_, self.topology.parents(id_))
            below = front.used()
            yield Placement(id_, lane, above, below, joins, parents)
            above = below

    def _places(self, end: int) -> Iterator[int]:
        """The nearest place at or above ``end`` whose lines were kept."""
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
    budget_rows: int | None = None,
    pause: Callable[[], None] = lambda: None,
) -> Drawing | None:
    """The history of ``heads``, which ``topology`` has read. ``old`` is one of theirs as they stood before: what it has is used.

    None if more than ``budget_rows`` would have to be looked at; ``pause`` is called every few hundred.
    """
    grown = None if old is None else _redraw(topology, old, heads, budget_rows, pause)
    if grown is not None or (old is not None and budget_rows is not None and len(old.order) > budget_rows):
        return grown
    order = topology.history(heads, pause=pause)
    if budget_rows is not None and len(order) > budget_rows:
        return None
    return _draw_all(topology, heads, order, None, budget_rows, pause)


def _redraw(topology: Topology, old: Drawing, heads: frozenset[int], budget_rows: int | None, pause: Callable[[], None]) -> Drawing | None:
    """``old`` with what its heads, or new ones, have captured since on top; None if they did anything else, or it is too much."""
    new = topology.since(old.order, heads)
    if new is None:
        return None
    led_to = {parent for id_ in new for parent in topology.parents(id_)}
    if any(tip not in heads and tip not in led_to for tip in old.tips):
        return None
    if not new:
        return replace(old, heads=heads, version=_version(heads, old.tips))
    return _draw_all(topology, heads, old.order + new, old, budget_rows, pause)


def _draw_all(
    topology: Topology,
    heads: frozenset[int],
    order: array[int],
    old: Drawing | None,
    budget_rows: int | None,
    pause: Callable[[], None],
) -> Drawing | None:
    """Draw from the top until the lines are those of ``old``, or to the end."""
    place = end = len(order)
    front = _front((), {} if old is None else _preferred(topology, old, heads))
    kept: dict[int, _Kept] = {}
    while end:
        lines = _lines(front)
        if old is not None and end in old.kept and old.kept[end].awaited == lines and end < len(old.order):
            break
        if budget_rows is not None and len(order) - end > budget_rows:
            return None
        begin = (end - 1) // STRIDE * STRIDE
        front.width = len(front.awaited)
        _skip(front, topology, order, end, begin)
        if end == len(order) or _is_kept(end, len(lines)):
            place = end
            kept[place] = _Kept(lines, front.width)
        else:
            kept[place] = replace(kept[place], width=max(kept[place].width, front.width))
        end = begin
        pause()
    tips = dict(front.begun)
    if old is not None and end:
        kept.update((place, one) for place, one in old.kept.items() if place <= end)
        tips.update((tip, lane) for tip, lane in old.tips.items() if tip < order[end])
    width = max((one.width for one in kept.values()), default=0)
    return Drawing(topology, heads, order, tips, kept, width, _version(heads, tips))


def _version(heads: frozenset[int], tips: Mapping[int, int]) -> str:
    return hashlib.blake2b(repr((sorted(heads), sorted(tips.items()))).encode(), digest_size=8).hexdigest()


def _is_kept(place: int, lines: int) -> bool:
    """Whether lines are kept at this place: the more lines, the fewer places, so that no more numbers are kept than there are rows."""
    return place // STRIDE % (1 << (lines // STRIDE).bit_length()) == 0


def _preferred(topology: Topology, old: Drawing, heads: frozenset[int]) -> dict[int, int]:
    """The columns in which heads stood before, or what they were captured from did."""
    first, last = topology.first, old.order[-1] if old.order else 0
    found: dict[int, int] = {}
    for head in heads:
        id_ = head
        while id_ > last:
            id_ = first[id_]
        if id_ in old.tips:
            found[head] = old.tips[id_]
    return found


def _front(awaited: array[int] | tuple[int, ...], preferred: Mapping[int, int]) -> Front[int]:
    return Front((id_ or None for id_ in awaited), preferred)


def _lines(front: Front[int]) -> array[int]:
    return array("q", [id_ or 0 for id_ in front.awaited])


def _skip(front: Front[int], topology: Topology, order: array[int], end: int, begin: int) -> None:
    """Place the states between, from the last to the first."""
    block = order[begin:end]
    block.reverse()
    front.skip(block, topology.first, topology.further)
