"""Windows of graphs: the history of each set of heads is drawn once, kept in memory, and served by
rows.

When heads move by captures, the new rows on top are drawn at once. A drawing that takes longer is
made in the background. Until it is done, windows come from the drawing before it, and
``is_current`` of a page is false.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sqlalchemy import select

from datastates.errors import NotFound
from datastates.lineage import lookup
from datastates.lineage.lookup import uids_of
from datastates.lineage.query import revision
from datastates.lineage.query.walk import Topology, position
from datastates.lineage.schema import REF
from datastates.lineage.views.branch_rows import Names, names
from datastates.lineage.views.graph import (
    Drawing,
    Skeleton,
    draw_history,
    draw_nodes,
    opened,
    owners,
    skeleton,
)

from .cache import Background, Restorable
from .models import GraphPage, GraphRow, Overview, Span

if TYPE_CHECKING:
    from datastates.lineage.session import Session


@dataclass(frozen=True, slots=True)
class Look:
    """How to fold the graph. ``opened`` and ``alone`` are uids.

    Each stretch is one row, except those with a state in ``opened``. Each state in ``alone`` has a
    separate row.
    """

    opened: tuple[str, ...] = ()
    alone: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Folded:
    """A drawing with the branch of each node. If ``is_folded``, its rows are the nodes of
    ``skeleton``.

    ``base`` and ``base_drawing`` are those with nothing opened; ``states`` counts the states of
    all rows.
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

    def count_of(self, id_: int) -> int:
        """The number of states in the row with this id."""
        return self.skeleton.counts.get(id_, 1) if self.is_folded else 1

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
                spans.append(
                    Span(
                        self.names.branches[rank],
                        lane,
                        first,
                        last,
                        self.row_of(parent) if parent > 0 else None,
                    )
                )
        return Overview(
            self.version, self.drawing.total, self.base_drawing.width, self.states, tuple(spans)
        )


class Folds:
    """How the history of some heads is folded, as the heads last stood. Any thread may use it."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._lock = threading.Lock()
        self._base: tuple[Drawing, Names, Skeleton, Mapping[int, int]] | None = None
        self._folded: dict[Look | None, Folded] = {}
        self._lanes: dict[str, int] = {}

    def of(
        self,
        session: Session,
        drawing: Drawing,
        uids: Sequence[str],
        known: Names,
        look: Look | None,
    ) -> Folded:
        """The folded form of a drawing of all states. ``uids`` are the uids of its heads."""
        with self._lock:
            if self._base is None or self._base[0] is not drawing or self._base[1] is not known:
                self._base, self._folded = self._skeleton_of(drawing, known), {}
            folded = self._folded.get(look)
        return folded or self._fold(session, self._base, uids, look)

    def _skeleton_of(
        self, drawing: Drawing, known: Names
    ) -> tuple[Drawing, Names, Skeleton, Mapping[int, int]]:
        named = [id_ for id_ in known.at if position(drawing.order, id_) is not None]
        old = None if self._base is None else self._base[2]
        made = skeleton(self._topology, drawing.order, {*named, *drawing.heads}, old=old)
        return drawing, known, made, owners(made, known.ranks)

    def _fold(
        self,
        session: Session,
        base: tuple[Drawing, Names, Skeleton, Mapping[int, int]],
        uids: Sequence[str],
        look: Look | None,
    ) -> Folded:
        whole, known, made, ranks = base
        plain = self._draw(whole, known, made, ranks)
        shown, drawn, own = made, plain, ranks
        if look is not None and (look.opened or look.alone):
            shown = opened(made, _ids(session, look.opened), _ids(session, look.alone))
            own = owners(shown, known.ranks)
            drawn = self._draw(whole, known, shown, own)
        drawing = whole if look is None else drawn
        version = hashlib.blake2b(
            repr((drawing.version, uids, known.stamp, look)).encode(), digest_size=8
        ).hexdigest()
        folded = Folded(
            drawing, shown, plain, own, ranks, known, whole.total, version, look is not None
        )
        with self._lock:
            if self._base is base:
                if len(self._folded) >= _LOOKS:
                    self._folded.clear()
                self._folded[look] = folded
        return folded

    def _draw(
        self, whole: Drawing, known: Names, made: Skeleton, ranks: Mapping[int, int]
    ) -> Drawing:
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


# Windows of graphs: the history of each set of heads is drawn once, kept in memory, and served by
# rows.


_AT_ONCE = 20_000  # rows that a request may draw itself: some 10 ms
_HISTORIES = 8  # sets of heads whose drawings are kept; at most 16 bytes a row each

_HEADS = select(REF.c.state_id).distinct()


class Windows:
    """The drawings of one repository; ``reading`` opens sessions for work outside requests. Safe
    from any thread."""

    def __init__(self, reading: Callable[[], AbstractContextManager[Session]]) -> None:
        self.topology = Topology()
        self.background = Background("windows")
        self.restorable = Restorable(reading)
        self._reading = reading
        self._names: Names | None = None
        self._kept: OrderedDict[tuple[str, ...], _Kept] = OrderedDict()
        self._naming, self._lock = threading.Lock(), threading.Lock()

    def page(
        self,
        session: Session,
        heads: Sequence[str],
        *,
        first: int,
        count: int,
        around: str | None = None,
        look: Look | None = None,
    ) -> GraphPage:
        """Rows of the history of ``heads``, which are revisions. Without heads, the history of
        all refs.

        ``around`` is the uid of a state to be put in the middle. ``first`` is then ignored. With
        ``look`` stretches of states are one row each; None gives every state its own row.

        :raises NotFound: a head names nothing, or ``around`` is not in the history.
        """
        folded, uids, is_current = self._shown(session, heads, look)
        if around is not None:
            row = folded.row_of(lookup.id_of(session, around))
            if row is None:
                raise NotFound(
                    f"state {around} is not in the history of"
                    f" {', '.join(heads) or 'any branch or tag'}: ask for other heads"
                )
            first = max(0, row - count // 2)
        rows, branches = self._rows(session, folded, first, count)
        drawing = folded.drawing
        return GraphPage(
            uids,
            folded.version,
            first,
            drawing.total,
            drawing.width,
            rows,
            is_current,
            branches,
            folded.states,
        )

    def overview(
        self, session: Session, heads: Sequence[str], look: Look | None = None
    ) -> Overview:
        """An overview of the whole drawing of which ``page`` gives rows.

        :raises NotFound: a head names nothing.
        """
        return self._shown(session, heads, look)[0].overview()

    def _shown(
        self, session: Session, heads: Sequence[str], look: Look | None
    ) -> tuple[Folded, tuple[str, ...], bool]:
        with self._naming:  # whoever comes meanwhile need not read them again
            self._names = known = names(session, self._names)
        kept = self._of(tuple(sorted(set(heads))))
        if heads:
            ids = frozenset(revision.resolve_id(session, head) for head in heads)
        else:
            ids = frozenset(session.execute(_HEADS).scalars())
        drawing, uids, is_current = kept.drawing_of(
            session, ids, known.trunk if known.trunk in ids else None
        )
        return kept.folds.of(session, drawing, uids, known, look), uids, is_current

    def _rows(
        self, session: Session, folded: Folded, first: int, count: int
    ) -> tuple[tuple[GraphRow, ...], dict[int, str]]:
        placed = folded.drawing.rows(first, count)
        counts = {one.id: folded.count_of(one.id) for one in placed}
        wide = [id_ for id_, size in counts.items() if size > 1]
        newest = {id_: folded.skeleton.newest[id_] for id_ in wide}
        states = lookup.states(session, [newest.get(one.id, one.id) for one in placed])
        oldest = dict(zip(wide, uids_of(session, wide), strict=True))
        counted = (
            self.restorable.by_node(session, folded.skeleton) if wide and folded.is_folded else None
        )
        seen: set[int] = set()

        def branch(id_: int) -> int:
            rank = folded.rank_of(id_)
            if rank is None:
                return -1
            seen.add(rank)
            return rank

        rows = tuple(
            GraphRow(
                state,
                one.lane,
                one.above,
                one.below,
                one.joins,
                one.parents,
                branch(one.id),
                tuple([branch(id_) for id_ in one.sources_above]),
                tuple([branch(id_) for id_ in one.sources_below]),
                () if one.id in newest else folded.names.at.get(one.id, ()),
                counts[one.id],
                counted.get(one.id, 0) if one.id in newest and counted is not None else None,
                oldest.get(one.id),
            )
            for one, state in zip(placed, states, strict=True)
        )
        return rows, {rank: folded.names.branches[rank] for rank in sorted(seen)}

    def warm(self, *, then: Callable[[], None]) -> None:
        """Begin to draw the history of all refs, so that the first request waits less; call
        ``then`` afterwards in any case."""

        def draw() -> None:
            try:
                with self._reading() as session:
                    self.page(session, (), first=0, count=1)
                self.restorable.warm()
            finally:
                then()

        self.background.start("warm", draw)

    def close(self) -> None:
        self.background.close()
        self.restorable.close()

    def _of(self, key: tuple[str, ...]) -> _Kept:
        with self._lock:
            kept = self._kept.pop(key, None) or _Kept(self, key)
            self._kept[key] = kept
            while len(self._kept) > _HISTORIES:
                self._kept.popitem(last=False)
        return kept


class _Kept:
    """The drawing of some heads, as they stood when it was last made."""

    def __init__(self, windows: Windows, key: tuple[str, ...]) -> None:
        self._windows, self._key = windows, key
        self._drawing: tuple[Drawing, tuple[str, ...]] | None = None
        self.folds = Folds(windows.topology)
        self._lock = threading.Lock()

    def drawing_of(
        self, session: Session, heads: frozenset[int], trunk: int | None
    ) -> tuple[Drawing, tuple[str, ...], bool]:
        """The drawing of ``heads`` and their uids, or of heads as they stood before; and whether
        it is of the current heads."""
        kept = self._drawing
        if kept is None or (kept[0].heads, kept[0].trunk) != (heads, trunk):
            with self._lock:
                kept = self._drawing
                if kept is None or (kept[0].heads, kept[0].trunk) != (heads, trunk):
                    kept = self._draw(session, heads, trunk, kept)
        return *kept, kept[0].heads == heads

    def _draw(
        self,
        session: Session,
        heads: frozenset[int],
        trunk: int | None,
        kept: tuple[Drawing, tuple[str, ...]] | None,
    ) -> tuple[Drawing, tuple[str, ...]]:
        background, topology = self._windows.background, self._windows.topology
        if kept is not None and background.is_running(self._key):
            return kept
        topology.refresh(session, heads)
        old = None if kept is None else kept[0]
        drawing = draw_history(
            topology, heads, old=old, trunk=trunk, budget_rows=None if old is None else _AT_ONCE
        )
        uids = tuple(uids_of(session, sorted(heads, reverse=True)))
        if drawing is not None:
            self._drawing = kept = drawing, uids
        else:
            background.start(self._key, lambda: self._redraw(heads, trunk, uids, old))
        assert kept is not None
        return kept

    def _redraw(
        self, heads: frozenset[int], trunk: int | None, uids: tuple[str, ...], old: Drawing | None
    ) -> None:
        drawing = draw_history(
            self._windows.topology,
            heads,
            old=old,
            trunk=trunk,
            pause=self._windows.background.pacer(),
        )
        if drawing is not None:
            self._drawing = drawing, uids
