"""Lanes: the column of each state of a history, and the lines between them, as ``git log --graph`` draws them.

One pass from new to old. General graph layout gives up at a few thousand nodes; this takes a million. Pure functions.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from datastates.lineage.states import State

if TYPE_CHECKING:
    from datastates.lineage.search.order import Firsts

__all__ = ["Drawn", "Front", "Placed", "Row", "draw", "lanes"]

Key = TypeVar("Key", bound=Hashable)
_NONE: frozenset[int] = frozenset()
_FIRST = frozenset((0,))

_BOXES = {
    frozenset(directions): box
    for directions, box in (
        ("", " "), ("ud", "│"), ("lr", "─"), ("ul", "╯"), ("ur", "╰"), ("dl", "╮"), ("dr", "╭"), ("u", "│"), ("d", "│"),
        ("l", "─"), ("r", "─"), ("udr", "├"), ("udl", "┤"), ("lru", "┴"), ("lrd", "┬"), ("udlr", "┼"),
    )
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Row:
    """One state. ``lane`` is its column; ``above`` and ``below`` are the columns with a line just above and just below it.

    ``joins`` are other columns whose lines end here: they lead to children of this state. ``parents`` are the columns in which
    its parents will stand, the first parent's first; the state's own column continues below only if it is among them.
    """

    uid: str
    lane: int
    above: tuple[int, ...]
    below: tuple[int, ...]
    joins: tuple[int, ...]
    parents: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Drawn:
    """A row as text: lines to print before the state's own, the prefix of its first line, of its further lines, and lines after."""

    before: tuple[str, ...]
    node: str
    rest: str
    after: tuple[str, ...]


class Placed(NamedTuple):
    """The lane of a state, the other columns that lead to it, and the lanes of its parents."""

    lane: int
    joins: tuple[int, ...]
    parents: tuple[int, ...]


class Front(Generic[Key]):
    """The lines that are open between two rows: ``awaited`` has the state that each column leads to, None where there is no line.

    States are identified by any key. ``preferred`` are columns for keys that no line leads to; other such keys stay out of these columns.
    ``begun`` has all such keys that were placed, and where; ``width`` is the number of columns needed. ``trunk`` is a key that stands in
    the first column; no line that begins beside it takes that column, whatever leads to it.

    ``sources`` has the owner of the line in each column in use: the child that the line comes from if it leads to a first parent, else the
    parent that it leads to.
    """

    def __init__(
        self,
        awaited: Iterable[Key | None] = (),
        preferred: Mapping[Key, int] | None = None,
        *,
        trunk: Key | None = None,
        sources: Iterable[Key | None] = (),
    ) -> None:
        self.awaited = list(awaited)
        self.sources: dict[int, Key] = {lane: key for lane, key in enumerate(sources) if key is not None}
        self._trunk = trunk
        self.width = len(self.awaited)
        self.begun: dict[Key, int] = {}
        self._preferred = preferred or {}
        self._reserved = frozenset((*self._preferred.values(), *(() if trunk is None else (0,))))
        self._first: dict[Key, int] = {}  # the leftmost column that leads to a key
        self._more: dict[Key, list[int]] = {}  # the other columns that do, rising
        for lane, key in enumerate(self.awaited):
            if key is not None:
                self._await(lane, key)

    def used(self) -> tuple[int, ...]:
        """The columns that have a line."""
        return tuple([lane for lane, key in enumerate(self.awaited) if key is not None])  # a list first: twice as fast

    def place(self, key: Key, parents: Sequence[Key]) -> Placed:
        """Place the next row: the lines to a state end at it, those to its parents begin."""
        awaited = self.awaited
        joins: tuple[int, ...] = ()
        lane = self._first.pop(key, -1)
        if lane < 0:
            lane = self.begun[key] = self._begin(key)
        else:
            awaited[lane] = None
            if key in self._more:
                joins = tuple(self._more.pop(key))
                for joined in joins:
                    awaited[joined] = None
        if key == self._trunk:
            if lane and awaited[0] is None:
                joins, lane = ((lane, *joins) if key not in self.begun else joins), 0
            self._trunk = None
            self._reserved = frozenset(self._preferred.values())
        below = self._descend(lane, parents, key)
        self.width = max(self.width, len(awaited))
        while awaited and awaited[-1] is None:
            awaited.pop()
        return Placed(lane, joins, below)

    def skip(self: Front[int], keys: Iterable[int], first: Firsts, further: Mapping[int, Sequence[int]]) -> None:
        """``place`` for many keys, without returning where they stand. ``first`` are first parents by key, 0 where there is none.

        Nearly every state only continues in its column, to a parent that nothing else leads to; each of these takes a third of a
        microsecond.
        """
        awaited, firsts, more, sources, trunk = self.awaited, self._first, self._more, self.sources, self._trunk
        for key in keys:
            parent = first[key]
            lane = firsts.get(key, -1)
            if lane >= 0 and parent and parent not in firsts and key not in more and key not in further and key != trunk:
                del firsts[key]
                firsts[parent] = lane
                awaited[lane] = parent
                sources[lane] = key
            else:
                self.place(key, (*((parent,) if parent else ()), *further.get(key, ())))

    def pass_by(self: Front[int], run: Sequence[int], parent: int, further: Mapping[int, Sequence[int]]) -> bool:
        """``skip`` a whole run of rising keys at once, each the first parent of the next; ``parent`` is that of the first.

        Returns False, and does nothing, where anything else leads to one of them, or one merges.
        """
        oldest, newest = run[0], run[-1]
        lane, trunk = self._first.get(newest, -1), self._trunk
        if lane < 0 or not parent or parent in self._first or newest in self._more or (trunk is not None and oldest <= trunk <= newest):
            return False
        if any(oldest <= key < newest for key in self._first) or (further and any(map(further.__contains__, run))):
            return False
        del self._first[newest]
        self._first[parent] = lane
        self.awaited[lane] = parent
        self.sources[lane] = oldest
        return True

    def _begin(self, key: Key) -> int:
        """A column for a state that no line leads to."""
        if key == self._trunk:
            if not self.awaited:
                self.awaited.append(None)
            return 0 if self.awaited[0] is None else self._free(self._reserved)
        wanted = self._preferred.get(key, -1)
        if wanted >= 0:
            self.awaited.extend([None] * (wanted + 1 - len(self.awaited)))
            if self.awaited[wanted] is None:
                return wanted
        return self._free(self._reserved)

    def _descend(self, lane: int, parents: Sequence[Key], key: Key) -> tuple[int, ...]:
        """Put the parents into columns: the first into the state's own column, unless another column leads to it already."""
        places: list[int] = []
        for index, parent in enumerate(dict.fromkeys(parents)):
            there = self._first.get(parent, -1)
            if there >= 0 and not (index == 0 and there > lane):
                places.append(there)
                continue
            place = lane if index == 0 else self._free(_FIRST if self._trunk is not None else _NONE)
            self._await(place, parent)
            self.sources[place] = parent if index else key
            places.append(place)
        return tuple(places)

    def _await(self, lane: int, key: Key) -> None:
        self.awaited[lane] = key
        first = self._first.setdefault(key, lane)
        if first != lane:
            self._first[key] = min(first, lane)
            self._more[key] = sorted((*self._more.get(key, ()), max(first, lane)))

    def _free(self, but: frozenset[int] = _NONE) -> int:
        for lane, key in enumerate(self.awaited):
            if key is None and lane not in but:
                return lane
        lane = len(self.awaited)
        while lane in but:
            lane += 1
        self.awaited.extend([None] * (lane + 1 - len(self.awaited)))
        return lane


def lanes(states: Iterable[State], *, preferred: Mapping[str, int] | None = None, trunk: str | None = None) -> Iterator[Row]:
    """A row for each state. They come newest first, children before parents; parents may be missing at the end.

    ``preferred`` are columns, by uid, for states that no line leads to, so that branches stay where they were when they grow.
    ``trunk`` is a state to put into the first column.
    """
    front: Front[str] = Front(preferred=preferred, trunk=trunk)
    above = front.used()
    for state in states:
        lane, joins, parents = front.place(state.uid, state.parents)
        below = front.used()
        yield Row(state.uid, lane, above, below, joins, parents)
        above = below


def draw(rows: Iterable[Row], *, mark: str = "*") -> Iterator[Drawn]:
    """The rows as text with box-drawing characters, two columns for each lane."""
    for row in rows:
        passing = [lane for lane in row.above if lane != row.lane and lane not in row.joins]
        before = (_line(row.lane, [*passing, row.lane], ends=row.joins),) if row.joins else ()
        others = [lane for lane in row.parents if lane != row.lane]
        crossed = [lane for lane in passing if lane not in others]
        goes_on = [row.lane] if row.lane in row.parents else []
        begun = [lane for lane in others if lane not in passing]
        kept = [lane for lane in others if lane in passing]
        after = (_line(row.lane, [*crossed, *kept, *goes_on], begins=begun, meets=kept, node_above=True),) if others else ()
        yield Drawn(before, _columns({**dict.fromkeys(passing, "│"), row.lane: mark}), _columns(dict.fromkeys(row.below, "│")), after)


def _line(
    lane: int,
    upright: Iterable[int],
    *,
    ends: Iterable[int] = (),
    begins: Iterable[int] = (),
    meets: Iterable[int] = (),
    node_above: bool = False,
) -> str:
    """A line of connections between ``lane`` and the columns that end, begin or are met there."""
    cells: dict[int, set[str]] = {}
    for column in upright:
        cells.setdefault(2 * column, set()).update("ud")
    if node_above:
        cells.setdefault(2 * lane, set()).add("u")
    for column, way in (*((c, "u") for c in ends), *((c, "d") for c in begins), *((c, "") for c in meets)):
        left, right = sorted((2 * lane, 2 * column))
        cells.setdefault(2 * column, set()).update(way)
        cells.setdefault(left, set()).add("r")
        cells.setdefault(right, set()).add("l")
        for between in range(left + 1, right):
            cells.setdefault(between, set()).update("lr")
    return _columns_of({place: _BOXES[frozenset(directions)] for place, directions in cells.items()})


def _columns(marks: dict[int, str]) -> str:
    return _columns_of({2 * lane: mark for lane, mark in marks.items()})


def _columns_of(cells: dict[int, str]) -> str:
    return "".join(cells.get(place, " ") for place in range(max(cells, default=-1) + 1))
