"""Lanes: which column each state of a history stands in, and the lines between them, as ``git log --graph`` draws them.

One pass from new to old; general graph layout gives up at a few thousand nodes, this takes a million. Pure functions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from .states import State

__all__ = ["Drawn", "Row", "draw", "lanes"]

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
    its parents will stand, the first parent's first; the state's own column goes on below only if it is among them.
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


def lanes(states: Iterable[State]) -> Iterator[Row]:
    """A row for each state. They come newest first, children before parents; parents may be missing at the end."""
    awaited: list[str | None] = []
    for state in states:
        here = [lane for lane, uid in enumerate(awaited) if uid == state.uid]
        above = _used(awaited)
        lane = here[0] if here else _free(awaited)
        for joined in here:
            awaited[joined] = None
        parents = _descend(awaited, lane, state)
        while awaited and awaited[-1] is None:
            awaited.pop()
        yield Row(state.uid, lane, above, _used(awaited), tuple(here[1:]), parents)


def draw(rows: Iterable[Row], *, mark: str = "*") -> Iterator[Drawn]:
    """The rows as text with box-drawing characters, two columns a lane."""
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


def _descend(awaited: list[str | None], lane: int, state: State) -> tuple[int, ...]:
    """Put the parents into columns: the first where the state stands, unless another column leads to it already."""
    parents: list[int] = []
    for index, parent in enumerate(dict.fromkeys(state.parents)):
        if parent in awaited and not (index == 0 and awaited.index(parent) > lane):
            parents.append(awaited.index(parent))
        elif index == 0:
            awaited[lane] = parent
            parents.append(lane)
        else:
            place = _free(awaited)
            awaited[place] = parent
            parents.append(place)
    return tuple(parents)


def _free(awaited: list[str | None]) -> int:
    for lane, uid in enumerate(awaited):
        if uid is None:
            return lane
    awaited.append(None)
    return len(awaited) - 1


def _used(awaited: list[str | None]) -> tuple[int, ...]:
    return tuple(lane for lane, uid in enumerate(awaited) if uid is not None)


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
