"""The forks of a history: what is left when states that only follow one another are merged into one node.

A node is a state that shapes the history (a root, a fork, a merge, a state that a ref names, any other that is to be kept), or a stretch of
states between two of these. A stretch is identified by its oldest state, so it stays the same stretch while it grows. Nodes have row ids,
and falling ids order them as they order states, so they are drawn as states are (``drawing.draw_nodes``).
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from datastates.lineage.search.order import Topology, position, starts

__all__ = ["Skeleton", "opened", "owners", "skeleton"]

_OFTEN = 256  # runs of states between two calls of ``pause``


@dataclass(frozen=True, slots=True)
class Skeleton:
    """The nodes of a history. ``first`` and ``further`` are their parents, which are nodes too, as ``Topology`` has those of states.

    ``counts`` are the numbers of states in stretches, and ``newest`` the row id of the newest state of each; other nodes are single states.
    ``node_of`` has the node of a state by its row id, or a node that has since become part of another; ``node`` resolves it.
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
    topology: Topology, order: array[int], keep: Collection[int], *, old: Skeleton | None = None, pause: Callable[[], None] = lambda: None
) -> Skeleton:
    """The skeleton of the states in ``order``, which rises; ``keep`` become nodes of their own. ``old`` is that of the same history when it
    was shorter: it is reused if only captures came since. ``pause`` is called every few thousand states."""
    wanted = frozenset(keep)
    grown = None if old is None else _grow(topology, order, wanted, old)
    return _make(topology, order, wanted, pause) if grown is None else grown


def _make(topology: Topology, order: array[int], keep: frozenset[int], pause: Callable[[], None]) -> Skeleton:
    """Build it run by run of states that only follow one another: most runs are one node, however long they are."""
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
    return Skeleton(topology, firsts, _further(topology, firsts), counts, newest, node_of, keep, last)


def _own(topology: Topology, order: array[int], begins: Sequence[int], ends: Sequence[int], keep: Collection[int]) -> set[int]:
    """The states that are not part of a stretch: roots, tips, forks, merges and their parents, and states to keep."""
    forks = Counter(topology.first[order[begin]] for begin in begins)
    tips = {order[end - 1] for end in ends}
    own = {id_ for id_ in tips if forks[id_] != 1} | {id_ for id_ in forks if id_ > 0 and id_ not in tips}
    own |= {order[begin] for begin in begins if topology.first[order[begin]] <= 0}
    own |= {id_ for id_ in keep if position(order, id_) is not None}
    for id_ in _merges(topology, order):
        own.update((id_, *topology.further[id_]))
    return own


def _stretch(
    order: array[int], begin: int, end: int, below: int, firsts: dict[int, int], counts: dict[int, int], newest: dict[int, int],
    node_of: array[int],
) -> int:  # fmt: skip
    """Add the states from ``begin`` to before ``end``, which follow a node, to it or to a new stretch; returns the node that they are
    in."""
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


def _grow(topology: Topology, order: array[int], keep: frozenset[int], old: Skeleton) -> Skeleton | None:
    """``old`` extended by what was captured since; None if one of its stretches would have to be split, or names disappeared."""
    added = _above(order, old.last)
    parents = {parent for id_ in added for parent in topology.parents(id_)}
    if len(order) - len(added) != _total(old) or any(old.node(id_) in old.counts for id_ in (keep - old.kept) | parents if id_ <= old.last):
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
    return Skeleton(topology, firsts, _further(topology, firsts), counts, newest, node_of, keep, order[-1] if order else 0)


def _total(old: Skeleton) -> int:
    """The number of states in all its nodes."""
    return len(old.first) - len(old.counts) + sum(old.counts.values())


def _join(id_: int, firsts: dict[int, int], counts: dict[int, int], newest: dict[int, int], node_of: array[int]) -> None:
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
    """The skeleton with all states of the stretches of ``shown``, and the states in ``alone``, as nodes of their own."""
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
    return Skeleton(made.topology, firsts, _further(made.topology, firsts), counts, newest, node_of, made.kept, made.last)


def _members(made: Skeleton, node: int) -> set[int]:
    first, members, id_ = made.topology.first, {node}, made.newest[node]
    while id_ != node:
        members.add(id_)
        id_ = first[id_]
    return members


def _part(
    topology: Topology, node: int, alone: set[int], firsts: dict[int, int], counts: dict[int, int], newest: dict[int, int],
    node_of: array[int], above: dict[int, int],
) -> None:  # fmt: skip
    """Split a stretch, so that some of its states are nodes of their own."""
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
    """The rank of the branch that each node belongs to: the lowest among the branches on whose first-parent path it is.

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
