"""What a window shows of a history: every state, or stretches of states as one row each; and the branch that each line belongs to."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from datastates.errors import NotFound
from datastates.lineage import lookup
from datastates.lineage.search.order import Topology, position
from datastates.lineage.show.drawing import Drawing, draw_nodes
from datastates.lineage.show.names import Names
from datastates.lineage.show.skeleton import Skeleton, opened, owners, skeleton

from .models import Overview, Span

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

__all__ = ["Folded", "Folds", "Look", "Stretch"]


@dataclass(frozen=True, slots=True)
class Look:
    """How to fold: each stretch is one row, except those with a state in ``opened``; states in ``alone`` get rows of their own. Both are
    uids."""

    opened: tuple[str, ...] = ()
    alone: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Stretch:
    """The stretch that a row stands for: its newest state, by row id, and how many states it has."""

    newest: int
    count: int


@dataclass(frozen=True, slots=True)
class Folded:
    """A drawing; the skeleton whose nodes are its rows, where ``is_folded``; and the branch of each node.

    ``base`` and ``base_drawing`` are those with nothing opened; ``states`` counts all states that the rows stand for.
    """

    drawing: Drawing
    skeleton: Skeleton
    base_drawing: Drawing
    ranks: Mapping[int, int]
    base_ranks: Mapping[int, int]
    names: Names
    states: int
    version: str
    is_folded: bool

    def stretch_of(self, id_: int) -> Stretch | None:
        """The stretch of the row with this id, if the row stands for several states."""
        count = self.skeleton.counts.get(id_, 1) if self.is_folded else 1
        return Stretch(self.skeleton.newest[id_], count) if count > 1 else None

    def row_of(self, id_: int) -> int | None:
        """The row that contains a state; None if no row does."""
        return self.drawing.row_of(self.skeleton.node(id_) if self.is_folded else id_)

    def rank_of(self, id_: int) -> int | None:
        """The rank of the branch that a row, or the source of a line, belongs to."""
        return self.ranks.get(id_ if self.is_folded else self.skeleton.node(id_))

    def overview(self) -> Overview:
        """A span for each branch, in the columns of the drawing with nothing opened."""
        found: dict[int, tuple[int, int, int]] = {}  # lane, newest and oldest node by rank
        for one in self.base_drawing.rows(0, self.base_drawing.total):
            rank = self.base_ranks.get(one.id)
            if rank is not None:
                lane, newest, _ = found.get(rank, (one.lane, one.id, one.id))
                found[rank] = lane, newest, one.id
        base = self.base_drawing.topology
        spans = []
        for rank, (lane, newest, oldest) in sorted(found.items()):
            first, last = self.row_of(newest), self.row_of(oldest)
            parent = base.first[oldest]
            if first is not None and last is not None:
                spans.append(Span(self.names.branches[rank], lane, first, last, self.row_of(parent) if parent > 0 else None))
        return Overview(self.version, self.drawing.total, self.base_drawing.width, self.states, tuple(spans))


class Folds:
    """How the history of some heads is folded, as the heads last stood. Any thread may use it."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._lock = threading.Lock()
        self._base: tuple[Drawing, Names, Skeleton, Mapping[int, int]] | None = None
        self._folded: dict[Look | None, Folded] = {}
        self._lanes: dict[str, int] = {}

    def of(self, session: Session, drawing: Drawing, uids: Sequence[str], known: Names, look: Look | None) -> Folded:
        """What is shown of a drawing of all states; ``uids`` are those of its heads."""
        with self._lock:
            if self._base is None or self._base[0] is not drawing or self._base[1] is not known:
                self._base, self._folded = self._skeleton_of(drawing, known), {}
            folded = self._folded.get(look)
        return folded or self._fold(session, self._base, uids, look)

    def _skeleton_of(self, drawing: Drawing, known: Names) -> tuple[Drawing, Names, Skeleton, Mapping[int, int]]:
        named = [id_ for id_ in known.at if position(drawing.order, id_) is not None]
        old = None if self._base is None else self._base[2]
        made = skeleton(self._topology, drawing.order, {*named, *drawing.heads}, old=old)
        return drawing, known, made, owners(made, known.ranks)

    def _fold(
        self, session: Session, base: tuple[Drawing, Names, Skeleton, Mapping[int, int]], uids: Sequence[str], look: Look | None
    ) -> Folded:
        whole, known, made, ranks = base
        plain = self._draw(whole, known, made, ranks)
        shown, drawn, own = made, plain, ranks
        if look is not None and (look.opened or look.alone):
            shown = opened(made, _ids(session, look.opened), _ids(session, look.alone))
            own = owners(shown, known.ranks)
            drawn = self._draw(whole, known, shown, own)
        drawing = whole if look is None else drawn
        version = hashlib.blake2b(repr((drawing.version, uids, known.stamp, look)).encode(), digest_size=8).hexdigest()
        folded = Folded(drawing, shown, plain, own, ranks, known, whole.total, version, look is not None)
        with self._lock:
            if self._base is base:
                if len(self._folded) >= _LOOKS:
                    self._folded.clear()
                self._folded[look] = folded
        return folded

    def _draw(self, whole: Drawing, known: Names, made: Skeleton, ranks: Mapping[int, int]) -> Drawing:
        """Draw, keeping branches in the columns where they stood before."""
        named = {id_: known.branches[ranks[id_]] for id_ in whole.heads if id_ in ranks}
        preferred = {id_: self._lanes[name] for id_, name in named.items() if name in self._lanes}
        drawn = draw_nodes(made, whole.heads, made.order(), trunk=whole.trunk, preferred=preferred)
        self._lanes.update({named[id_]: lane for id_, lane in drawn.tips.items() if id_ in named})
        return drawn


_LOOKS = 8


def _ids(session: Session, uids: Sequence[str]) -> list[int]:
    """The row ids of the uids that exist; a state that was opened may be gone."""
    found = []
    for uid in uids:
        try:
            found.append(lookup.id_of(session, uid))
        except NotFound:
            continue
    return found
