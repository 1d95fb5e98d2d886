"""Windows of graphs: the history of each set of heads is drawn once, kept in memory, and served by rows.

When heads move by captures, the new rows on top are drawn at once. A drawing that takes longer is made in the background. Until it is
done, windows come from the drawing before it, and a page says that it is not current.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from sqlalchemy import select

from datastates.errors import NotFound
from datastates.lineage import lookup
from datastates.lineage.lookup import uids_of
from datastates.lineage.schema import RefRow, table
from datastates.lineage.search import revision
from datastates.lineage.search.order import Topology
from datastates.lineage.show.drawing import Drawing, draw_history
from datastates.lineage.show.names import Names, names

from .background import Background
from .folding import Folded, Folds, Look
from .models import GraphPage, GraphRow, Overview
from .restorable import Restorable

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

__all__ = ["Windows"]

_AT_ONCE = 20_000  # rows that a request may draw itself: some 10 ms
_HISTORIES = 8  # sets of heads whose drawings are kept; at most 16 bytes a row each

_ref = table(RefRow)
_HEADS = select(_ref.c.state_id).distinct()


class Windows:
    """The drawings of one repository; ``reading`` opens sessions for work beside requests. Safe from any thread."""

    def __init__(self, reading: Callable[[], AbstractContextManager[Session]]) -> None:
        self.topology = Topology()
        self.background = Background("windows")
        self.restorable = Restorable(reading)
        self._reading = reading
        self._names: Names | None = None
        self._kept: OrderedDict[tuple[str, ...], _Kept] = OrderedDict()
        self._naming, self._lock = threading.Lock(), threading.Lock()

    def page(
        self, session: Session, heads: Sequence[str], *, first: int, count: int, around: str | None = None, look: Look | None = None
    ) -> GraphPage:
        """Rows of the history of ``heads``, which are revisions; none: of everything that a ref names.

        ``around`` is the uid of a state to be put in the middle, whatever ``first`` says. With ``look`` stretches of states are one row
        each; None gives every state its own row.

        :raises NotFound: a head names nothing, or ``around`` is not in the history.
        """
        folded, uids, is_current = self._shown(session, heads, look)
        if around is not None:
            row = folded.row_of(lookup.id_of(session, around))
            if row is None:
                raise NotFound(f"state {around} is not in the history of {', '.join(heads) or 'any branch or tag'}: ask for other heads")
            first = max(0, row - count // 2)
        rows, branches = self._rows(session, folded, first, count)
        drawing = folded.drawing
        return GraphPage(uids, folded.version, first, drawing.total, drawing.width, rows, is_current, branches, folded.states)

    def overview(self, session: Session, heads: Sequence[str], look: Look | None = None) -> Overview:
        """An overview of the whole drawing of which ``page`` gives rows.

        :raises NotFound: a head names nothing.
        """
        return self._shown(session, heads, look)[0].overview()

    def _shown(self, session: Session, heads: Sequence[str], look: Look | None) -> tuple[Folded, tuple[str, ...], bool]:
        with self._naming:  # whoever comes meanwhile need not read them again
            self._names = known = names(session, self._names)
        kept = self._of(tuple(sorted(set(heads))))
        ids = _ids_of(session, heads)
        drawing, uids, is_current = kept.drawing_of(session, ids, known.trunk if known.trunk in ids else None)
        return kept.folds.of(session, drawing, uids, known, look), uids, is_current

    def _rows(self, session: Session, folded: Folded, first: int, count: int) -> tuple[tuple[GraphRow, ...], dict[int, str]]:
        placed = folded.drawing.rows(first, count)
        stretches = [folded.stretch_of(one.id) for one in placed]
        states = lookup.states(
            session, [one.id if stretch is None else stretch.newest for one, stretch in zip(placed, stretches, strict=True)]
        )
        oldest = dict(
            zip(wide := [one.id for one, stretch in zip(placed, stretches, strict=True) if stretch], uids_of(session, wide), strict=True)
        )
        counted = self.restorable.by_node(session, folded.skeleton) if wide and folded.is_folded else None
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
                () if stretch else folded.names.at.get(one.id, ()),
                stretch.count if stretch else 1,
                counted.get(one.id, 0) if stretch and counted is not None else None,
                oldest.get(one.id),
            )
            for one, state, stretch in zip(placed, states, stretches, strict=True)
        )
        return rows, {rank: folded.names.branches[rank] for rank in sorted(seen)}

    def warm(self, *, then: Callable[[], None]) -> None:
        """Begin to draw the history of all refs, so that the first request waits less; call ``then`` afterwards in any case."""

        def draw() -> None:
            try:
                with self._reading() as session:
                    self.page(session, (), first=0, count=1)
                self.restorable.warm()
            finally:
                then()

        self.background.start("warm", draw)

    def close(self) -> None:
        """End the drawing; idempotent."""
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

    def drawing_of(self, session: Session, heads: frozenset[int], trunk: int | None) -> tuple[Drawing, tuple[str, ...], bool]:
        """The drawing of ``heads`` and their uids, or of heads as they stood before; and whether it is of the current heads."""
        kept = self._drawing
        if kept is None or (kept[0].heads, kept[0].trunk) != (heads, trunk):
            with self._lock:
                kept = self._drawing
                if kept is None or (kept[0].heads, kept[0].trunk) != (heads, trunk):
                    kept = self._draw(session, heads, trunk, kept)
        return *kept, kept[0].heads == heads

    def _draw(
        self, session: Session, heads: frozenset[int], trunk: int | None, kept: tuple[Drawing, tuple[str, ...]] | None
    ) -> tuple[Drawing, tuple[str, ...]]:
        background, topology = self._windows.background, self._windows.topology
        if kept is not None and background.is_running(self._key):
            return kept
        topology.refresh(session, heads)
        old = None if kept is None else kept[0]
        drawing = draw_history(topology, heads, old=old, trunk=trunk, budget_rows=None if old is None else _AT_ONCE)
        uids = tuple(uids_of(session, sorted(heads, reverse=True)))
        if drawing is not None:
            self._drawing = kept = drawing, uids
        else:
            background.start(self._key, lambda: self._redraw(heads, trunk, uids, old))
        assert kept is not None
        return kept

    def _redraw(self, heads: frozenset[int], trunk: int | None, uids: tuple[str, ...], old: Drawing | None) -> None:
        """Draw again, on a thread of its own."""
        drawing = draw_history(self._windows.topology, heads, old=old, trunk=trunk, pause=self._windows.background.pacer())
        if drawing is not None:
            self._drawing = drawing, uids


def _ids_of(session: Session, heads: Sequence[str]) -> frozenset[int]:
    if not heads:
        return frozenset(session.execute(_HEADS).scalars())
    return frozenset(revision.resolve_id(session, head) for head in heads)
