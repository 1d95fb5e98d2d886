"""A history drawn as lanes, from which any rows can be read at once, however long it is.

The lanes of a row depend on all rows above it. Therefore the open lines are saved at every
``STRIDE`` rows, counted from the oldest. Rows are computed from the nearest saved place. After
captures moved heads, only the new part on top is drawn: branches keep their columns. Drawing stops
at the first saved place with the same open lines, because all rows below it are unchanged.
"""

from __future__ import annotations

import hashlib
from array import array
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, NamedTuple, Protocol, TypeVar

from datastates.lineage.query.walk import Firsts, Topology, position, starts
from datastates.lineage.states import State

Key = TypeVar("Key", bound=Hashable)
_NONE: frozenset[int] = frozenset()
_FIRST = frozenset((0,))

_BOXES = {
    frozenset(directions): box
    for directions, box in (
        ("", " "),
        ("ud", "│"),
        ("lr", "─"),
        ("ul", "╯"),
        ("ur", "╰"),
        ("dl", "╮"),
        ("dr", "╭"),
        ("u", "│"),
        ("d", "│"),
        ("l", "─"),
        ("r", "─"),
        ("udr", "├"),
        ("udl", "┤"),
        ("lru", "┴"),
        ("lrd", "┬"),
        ("udlr", "┼"),
    )
}


@dataclass(frozen=True, slots=True)
class Row:
    """One state. ``lane`` is its column; ``above`` and ``below`` are the columns with a line just
    above and just below it.

    ``joins`` are other columns whose lines end here: they lead to children of this state.
    ``parents`` are the columns in which its parents will stand, the first parent's first; the
    state's own column continues below only if it is among them.
    """

    uid: str
    lane: int
    above: tuple[int, ...]
    below: tuple[int, ...]
    joins: tuple[int, ...]
    parents: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RowText:
    """A row as text: lines to print before the state's own, the prefix of its first line, of its
    further lines, and lines after."""

    before: tuple[str, ...]
    node: str
    rest: str
    after: tuple[str, ...]


class LanePosition(NamedTuple):
    """The lane of a state, the other columns that lead to it, and the lanes of its parents."""

    lane: int
    joins: tuple[int, ...]
    parents: tuple[int, ...]


class Front(Generic[Key]):
    """The lines that are open between two rows: ``awaited`` has the state that each column leads
    to, None where there is no line.

    States are identified by any key. ``preferred`` are columns for keys that no line leads to;
    other such keys stay out of these columns. ``begun`` has all such keys that were placed, and
    where; ``width`` is the number of columns needed. ``trunk`` is a key that is placed in
    the first column. Until then, no new line begins in that column.

    ``sources`` has the owner of the line in each column in use. For a line to a first parent, the
    owner is the child. For another line, the owner is the parent.
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
        self.sources: dict[int, Key] = {
            lane: key for lane, key in enumerate(sources) if key is not None
        }
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
        # a list first: twice as fast
        return tuple([lane for lane, key in enumerate(self.awaited) if key is not None])

    def place(self, key: Key, parents: Sequence[Key]) -> LanePosition:
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
        return LanePosition(lane, joins, below)

    def skip(
        self: Front[int], keys: Iterable[int], first: Firsts, further: Mapping[int, Sequence[int]]
    ) -> None:
        """``place`` for many keys, without returning where they stand. ``first`` are first parents
        by key, 0 where there is none.

        Nearly every state only continues in its column, to a parent without other children.
        Each of these takes a third of a microsecond.
        """
        awaited, firsts, more, sources, trunk = (
            self.awaited,
            self._first,
            self._more,
            self.sources,
            self._trunk,
        )
        for key in keys:
            parent = first[key]
            lane = firsts.get(key, -1)
            if (
                lane >= 0
                and parent
                and parent not in firsts
                and key not in more
                and key not in further
                and key != trunk
            ):
                del firsts[key]
                firsts[parent] = lane
                awaited[lane] = parent
                sources[lane] = key
            else:
                self.place(key, (*((parent,) if parent else ()), *further.get(key, ())))

    def pass_by(
        self: Front[int], run: Sequence[int], parent: int, further: Mapping[int, Sequence[int]]
    ) -> bool:
        """``skip`` a whole run of rising keys at once, each the first parent of the next.
        ``parent`` is the parent of the first key.

        Returns False, and does nothing, if another line leads to one of them, or one merges.
        """
        oldest, newest = run[0], run[-1]
        lane, trunk = self._first.get(newest, -1), self._trunk
        if (
            lane < 0
            or not parent
            or parent in self._first
            or newest in self._more
            or (trunk is not None and oldest <= trunk <= newest)
        ):
            return False
        if any(oldest <= key < newest for key in self._first) or (
            further and any(map(further.__contains__, run))
        ):
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
        """Put the parents into columns: the first into the state's own column, unless another
        column leads to it already."""
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


def lanes(
    states: Iterable[State], *, preferred: Mapping[str, int] | None = None, trunk: str | None = None
) -> Iterator[Row]:
    """A row for each state. They come newest first, children before parents; parents may be missing
    at the end.

    ``preferred`` are columns, by uid, for states that no line leads to, so that branches stay where
    they were when they grow. ``trunk`` is a state to put into the first column.
    """
    front: Front[str] = Front(preferred=preferred, trunk=trunk)
    above = front.used()
    for state in states:
        lane, joins, parents = front.place(state.uid, state.parents)
        below = front.used()
        yield Row(state.uid, lane, above, below, joins, parents)
        above = below


def draw(rows: Iterable[Row], *, mark: str = "*") -> Iterator[RowText]:
    """The rows as text with box-drawing characters, two columns for each lane."""
    for row in rows:
        passing = [lane for lane in row.above if lane != row.lane and lane not in row.joins]
        before = (_line(row.lane, [*passing, row.lane], ends=row.joins),) if row.joins else ()
        others = [lane for lane in row.parents if lane != row.lane]
        crossed = [lane for lane in passing if lane not in others]
        goes_on = [row.lane] if row.lane in row.parents else []
        begun = [lane for lane in others if lane not in passing]
        kept = [lane for lane in others if lane in passing]
        after = (
            (
                _line(
                    row.lane, [*crossed, *kept, *goes_on], begins=begun, meets=kept, node_above=True
                ),
            )
            if others
            else ()
        )
        yield RowText(
            before,
            _columns({**dict.fromkeys(passing, "│"), row.lane: mark}),
            _columns(dict.fromkeys(row.below, "│")),
            after,
        )


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
    for column, way in (
        *((c, "u") for c in ends),
        *((c, "d") for c in begins),
        *((c, "") for c in meets),
    ):
        left, right = sorted((2 * lane, 2 * column))
        cells.setdefault(2 * column, set()).update(way)
        cells.setdefault(left, set()).add("r")
        cells.setdefault(right, set()).add("l")
        for between in range(left + 1, right):
            cells.setdefault(between, set()).update("lr")
    return _columns_of(
        {place: _BOXES[frozenset(directions)] for place, directions in cells.items()}
    )


def _columns(marks: dict[int, str]) -> str:
    return _columns_of({2 * lane: mark for lane, mark in marks.items()})


def _columns_of(cells: dict[int, str]) -> str:
    return "".join(cells.get(place, " ") for place in range(max(cells, default=-1) + 1))


# A history drawn as lanes, from which any rows can be read at once, however long it is.


STRIDE = 256
SHORT = 16  # states that follow one another; for shorter runs it is faster to look at each state


@dataclass(frozen=True, slots=True)
class Placement:
    """The row, as in ``lanes.Row``, of the state with this row id; and the owners of the lines
    above and below, as ``lanes.Front.sources``."""

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
class _SavedLines:
    """The open lines above a row (0 where there is none), their owners, and the columns that the
    rows below need up to the next saved place."""

    awaited: array[int]
    sources: array[int]
    width: int


@dataclass(frozen=True, slots=True)
class Drawing:
    """The history of ``heads``. ``order`` are its row ids, rising: the last is drawn first.

    ``tips`` are the heads that no other head descends from, and their columns: with the heads they
    determine everything else. ``width`` is the number of columns needed. Two drawings with the same
    ``version`` have the same rows. ``trunk`` is the state in the first column, if there is one.
    """

    topology: Ancestry
    heads: frozenset[int]
    order: array[int]
    tips: Mapping[int, int]
    kept: Mapping[int, _SavedLines]
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
        """Rows from ``first`` on, newest first. It computes the returned rows and fewer than
        ``STRIDE`` rows above them."""
        end = len(self.order) - first
        return list(self._draw(end, max(0, end - count))) if end > 0 else []

    def _draw(self, end: int, begin: int) -> Iterator[Placement]:
        """The states at these places of ``order``, from the last to the first."""
        start = min((place for place in self._places(end)), default=len(self.order))
        # below the trunk, any line may take its column
        trunk = (
            self.trunk
            if self.trunk is not None and (position(self.order, self.trunk) or 0) < start
            else None
        )
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
    """The history of ``heads``, which ``topology`` has read. ``old`` is an earlier drawing of the
    same heads: what it has is reused. ``trunk`` is the head to put into the first column.

    None if more than ``budget_rows`` would have to be read; ``pause`` is called every few hundred
    rows.
    """
    grown = None if old is None else _redraw(topology, old, heads, trunk, budget_rows, pause)
    if grown is not None or (
        old is not None and budget_rows is not None and len(old.order) > budget_rows
    ):
        return grown
    order = topology.history(heads, pause=pause)
    if budget_rows is not None and len(order) > budget_rows:
        return None
    return _draw_all(topology, heads, order, None, trunk, budget_rows, pause)


def draw_nodes(
    nodes: Ancestry,
    heads: frozenset[int],
    order: array[int],
    *,
    trunk: int | None,
    preferred: Mapping[int, int],
) -> Drawing:
    """The drawing of a skeleton.

    Its nodes are few, so it is always drawn as a whole. ``preferred`` are columns for heads."""
    drawn = _draw_all(nodes, heads, order, None, trunk, None, lambda: None, preferred=preferred)
    assert drawn is not None, "there is no budget"
    return drawn


def _redraw(
    topology: Topology,
    old: Drawing,
    heads: frozenset[int],
    trunk: int | None,
    budget_rows: int | None,
    pause: Callable[[], None],
) -> Drawing | None:
    """``old`` extended by what its heads, or new ones, have captured since; None if they changed
    otherwise, or it is too much."""
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
    """Draw from the top until the lines equal the lines of ``old``, or to the end."""
    place = end = len(order)
    if trunk is not None and position(order, trunk) is None:
        trunk = None
    wanted = dict(preferred or {}) if old is None else _preferred(topology, old, heads)
    if trunk is not None:
        wanted = {key: lane for key, lane in wanted.items() if lane and key != trunk}
    front = _front((), wanted, trunk)
    kept: dict[int, _SavedLines] = {}
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
            kept[place] = _SavedLines(_lines(front), _sources(front), open_)
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
    return hashlib.blake2b(
        repr((sorted(heads), sorted(tips.items()), trunk)).encode(), digest_size=8
    ).hexdigest()


def _is_kept(place: int, lines: int) -> bool:
    """Whether lines are saved at this place: the more lines, the fewer places, so that no more
    numbers are kept than there are rows."""
    return place // STRIDE % (1 << (lines // STRIDE).bit_length()) == 0


def _preferred(topology: Ancestry, old: Drawing, heads: frozenset[int]) -> dict[int, int]:
    """The earlier columns of heads. A new head gets the column of the state that it was captured
    from."""
    first, last = topology.first, old.order[-1] if old.order else 0
    found: dict[int, int] = {}
    for head in heads:
        id_ = head
        while id_ > last:
            id_ = first[id_]
        if id_ in old.tips:
            found[head] = old.tips[id_]
    return found


def _front(
    awaited: Iterable[int],
    preferred: Mapping[int, int],
    trunk: int | None = None,
    sources: Iterable[int] = (),
) -> Front[int]:
    return Front(
        (id_ or None for id_ in awaited),
        preferred,
        trunk=trunk,
        sources=(id_ or None for id_ in sources),
    )


def _lines(front: Front[int]) -> array[int]:
    return array("q", [id_ or 0 for id_ in front.awaited])


def _sources(front: Front[int]) -> array[int]:
    return array(
        "q", [front.sources.get(lane, 0) if id_ else 0 for lane, id_ in enumerate(front.awaited)]
    )


def _skip(front: Front[int], topology: Ancestry, order: array[int], end: int, begin: int) -> None:
    """Place the states in between, from the last to the first; runs that only follow one another
    are placed at once, where that pays."""
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


# The forks of a history: what is left when states that only follow one another are merged into
# one node.


_OFTEN = 256  # runs of states between two calls of ``pause``


@dataclass(frozen=True, slots=True)
class Skeleton:
    """The nodes of a history. ``first`` and ``further`` are their parents, which are nodes too.
    ``Topology`` has the same attributes for states.

    ``counts`` are the numbers of states in stretches, and ``newest`` the row id of the newest state
    of each; other nodes are single states. ``node_of`` has the node of a state by its row id, or a
    node that has since become part of another; ``node`` resolves it.
    """

    topology: Topology
    first: Mapping[int, int]
    further: Mapping[int, tuple[int, ...]]
    counts: Mapping[int, int]
    newest: Mapping[int, int]
    node_of: array[int]
    kept: frozenset[int]
    last: int

    def parents(self, id_: int) -> tuple[int, ...]:
        """The parents of a node, the first parent first."""
        first, further = self.first[id_], self.further.get(id_, ())
        return (first, *further) if first > 0 else further

    def order(self) -> array[int]:
        """The nodes, by rising row id."""
        return array("q", sorted(self.first))

    def node(self, id_: int) -> int:
        """The node to which a state of this history belongs; 0 if it belongs to none."""
        node = self.node_of[id_] if id_ < len(self.node_of) else 0
        while node and node not in self.first:
            node = self.node_of[node]
        return node


def skeleton(
    topology: Topology,
    order: array[int],
    keep: Collection[int],
    *,
    old: Skeleton | None = None,
    pause: Callable[[], None] = lambda: None,
) -> Skeleton:
    """The skeleton of the states in ``order``, which rises; ``keep`` become separate nodes.
    ``old`` is the skeleton of an earlier, shorter state of this history. It is reused if only
    captures were added since. ``pause`` is called every few thousand states.
    """
    wanted = frozenset(keep)
    grown = None if old is None else _grow(topology, order, wanted, old)
    return _make(topology, order, wanted, pause) if grown is None else grown


def _make(
    topology: Topology, order: array[int], keep: frozenset[int], pause: Callable[[], None]
) -> Skeleton:
    """Build it run by run of states that only follow one another: most runs are one node,
    however long they are."""
    first = topology.first
    last = order[-1] if order else 0
    begins = starts(first, order)
    ends = [*begins, len(order)][1:]
    own = sorted(_own(topology, order, begins, ends, keep))
    node_of = array("q", bytes(8 * (last + 1)))
    firsts: dict[int, int] = {}
    counts: dict[int, int] = {}
    newest: dict[int, int] = {}
    for index, (begin, end) in enumerate(zip(begins, ends, strict=True)):
        if index % _OFTEN == 0:
            pause()
        parent = first[order[begin]]
        node = node_of[parent] if parent > 0 else 0
        place = begin
        for id_ in own[bisect_left(own, order[begin]) : bisect_right(own, order[end - 1])]:
            stop = bisect_left(order, id_, place, end)
            node = _stretch(order, place, stop, node, firsts, counts, newest, node_of)
            firsts[id_], node_of[id_], node, place = node, id_, id_, stop + 1
        _stretch(order, place, end, node, firsts, counts, newest, node_of)
    return Skeleton(
        topology, firsts, _further(topology, firsts), counts, newest, node_of, keep, last
    )


def _own(
    topology: Topology,
    order: array[int],
    begins: Sequence[int],
    ends: Sequence[int],
    keep: Collection[int],
) -> set[int]:
    """The states that are not part of a stretch: roots, tips, forks, merges and their parents,
    and states to keep."""
    forks = Counter(topology.first[order[begin]] for begin in begins)
    tips = {order[end - 1] for end in ends}
    own = {id_ for id_ in tips if forks[id_] != 1} | {
        id_ for id_ in forks if id_ > 0 and id_ not in tips
    }
    own |= {order[begin] for begin in begins if topology.first[order[begin]] <= 0}
    own |= {id_ for id_ in keep if position(order, id_) is not None}
    for id_ in _merges(topology, order):
        own.update((id_, *topology.further[id_]))
    return own


def _stretch(
    order: array[int],
    begin: int,
    end: int,
    below: int,
    firsts: dict[int, int],
    counts: dict[int, int],
    newest: dict[int, int],
    node_of: array[int],
) -> int:
    """Add the states from ``begin`` to before ``end``, which follow a node, to it or to a new
    stretch; returns the node that they are in."""
    if begin == end:
        return below
    id_, last = order[begin], order[end - 1]
    node = below if below in counts else id_
    if node == id_:
        firsts[id_], counts[id_] = below, 0
    counts[node] += end - begin
    newest[node] = last
    if last - id_ == end - begin - 1:
        node_of[id_ : last + 1] = array("q", [node]) * (end - begin)
    else:
        for one in order[begin:end]:
            node_of[one] = node
    return node


def _grow(
    topology: Topology, order: array[int], keep: frozenset[int], old: Skeleton
) -> Skeleton | None:
    """``old`` extended by what was captured since; None if one of its stretches would have to be
    split, or names disappeared."""
    added = _above(order, old.last)
    parents = {parent for id_ in added for parent in topology.parents(id_)}
    if len(order) - len(added) != _total(old) or any(
        old.node(id_) in old.counts for id_ in (keep - old.kept) | parents if id_ <= old.last
    ):
        return None
    if any(id_ not in keep and id_ not in parents for id_ in old.kept if id_ in old.first):
        return None
    firsts, counts, newest = dict(old.first), dict(old.counts), dict(old.newest)
    node_of = array("q", old.node_of)
    node_of.extend([0] * ((order[-1] if order else 0) + 1 - len(node_of)))
    led_to = Counter(topology.first[id_] for id_ in added)
    children = Counter(firsts.values())
    further = topology.further
    merged = {parent for id_ in _merges(topology, added) for parent in further[id_]} | {
        one for these in old.further.values() for one in these
    }
    for id_ in added:
        parent = topology.first[id_]
        if parent > 0 and parent in firsts and parent not in counts:
            is_alone = led_to[parent] == 1 and not children[parent] and parent not in keep
            if is_alone and parent not in further and parent not in merged and firsts[parent]:
                _join(parent, firsts, counts, newest, node_of)
        node = node_of[parent] if parent > 0 else 0
        firsts[id_] = node
        node_of[id_] = id_
    return Skeleton(
        topology,
        firsts,
        _further(topology, firsts),
        counts,
        newest,
        node_of,
        keep,
        order[-1] if order else 0,
    )


def _total(old: Skeleton) -> int:
    """The number of states in all its nodes."""
    return len(old.first) - len(old.counts) + sum(old.counts.values())


def _join(
    id_: int,
    firsts: dict[int, int],
    counts: dict[int, int],
    newest: dict[int, int],
    node_of: array[int],
) -> None:
    """Join a state that is no longer a tip to the stretch below it, or begin one with it."""
    below = firsts[id_]
    if below in counts:
        del firsts[id_]
        counts[below] += 1
        newest[below] = id_
        node_of[id_] = below
    else:
        counts[id_], newest[id_] = 1, id_


def opened(made: Skeleton, shown: Iterable[int], alone: Iterable[int] = ()) -> Skeleton:
    """The skeleton with all states of the stretches of ``shown``, and the states in ``alone``,
    as separate nodes."""
    firsts, counts, newest = dict(made.first), dict(made.counts), dict(made.newest)
    node_of = array("q", made.node_of)
    above = {parent: node for node, parent in made.first.items() if parent in made.counts}
    for id_ in {made.node(id_) for id_ in shown} & counts.keys():
        _part(made.topology, id_, _members(made, id_), firsts, counts, newest, node_of, above)
    for id_ in alone:
        node = node_of[id_] if id_ < len(node_of) else 0
        while node and node not in firsts:
            node = node_of[node]
        if node in counts and counts[node] > 1:
            _part(made.topology, node, {id_}, firsts, counts, newest, node_of, above)
    return Skeleton(
        made.topology,
        firsts,
        _further(made.topology, firsts),
        counts,
        newest,
        node_of,
        made.kept,
        made.last,
    )


def _members(made: Skeleton, node: int) -> set[int]:
    first, members, id_ = made.topology.first, {node}, made.newest[node]
    while id_ != node:
        members.add(id_)
        id_ = first[id_]
    return members


def _part(
    topology: Topology,
    node: int,
    alone: set[int],
    firsts: dict[int, int],
    counts: dict[int, int],
    newest: dict[int, int],
    node_of: array[int],
    above: dict[int, int],
) -> None:
    """Split a stretch, so that some of its states are separate nodes."""
    chain, id_ = [], newest[node]
    while id_ != node:
        chain.append(id_)
        id_ = topology.first[id_]
    chain.append(node)
    child, below = above.get(node), firsts[node]
    del firsts[node], counts[node], newest[node]
    current = 0
    for id_ in reversed(chain):
        if current and id_ not in alone:
            counts[current] += 1
            newest[current], node_of[id_] = id_, current
            continue
        firsts[id_], node_of[id_], above[below] = below, id_, id_
        below, current = id_, 0 if id_ in alone else id_
        if current:
            counts[id_], newest[id_] = 1, id_
    if child is not None:
        firsts[child], above[below] = below, child


def owners(made: Skeleton, ranks: Mapping[int, int]) -> dict[int, int]:
    """The rank of the branch that each node belongs to: the lowest among the branches on whose
    first-parent path it is.

    ``ranks`` has the lowest rank of the branches at each state; nodes on no branch are left out.
    """
    found: dict[int, int] = {}
    for id_ in sorted(made.first, reverse=True):
        own, came = ranks.get(id_), found.get(id_)
        rank = own if came is None else came if own is None else min(own, came)
        if rank is None:
            continue
        found[id_] = rank
        parent = made.first[id_]
        if parent > 0:
            found[parent] = min(rank, found.get(parent, rank))
    return found


def _above(order: array[int], last: int) -> array[int]:
    index = len(order)
    while index and order[index - 1] > last:
        index -= 1
    return order[index:]


def _merges(topology: Topology, ids: array[int]) -> list[int]:
    further = topology.further
    if len(further) * 20 < len(ids):
        return [id_ for id_ in further if position(ids, id_) is not None]
    return [id_ for id_ in ids if id_ in further]


def _further(topology: Topology, firsts: Mapping[int, int]) -> dict[int, tuple[int, ...]]:
    """The further parents of nodes; every state that merges or is merged is a node."""
    return {id_: parents for id_, parents in topology.further.items() if id_ in firsts}
