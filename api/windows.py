"""Windows of graphs: the history of each set of heads is drawn once, kept in memory, and given out by rows.

When heads move by captures, what is new on top is drawn at once. What takes longer is drawn in the background, while windows of
the drawing before it are given; a page of it says that it is not current.
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
from datastates.lineage.schema import RefRow, table
from datastates.lineage.search import revision
from datastates.lineage.search.order import Topology, uids_of
from datastates.lineage.show.drawing import Drawing, draw_history

from .background import Background
from .models import GraphPage, GraphRow

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

__all__ = ["Windows"]

_AT_ONCE = 20_000  # rows that a request may draw: some 10 ms
_HISTORIES = 8  # sets of heads whose drawings are kept; at most 16 bytes a row each

_ref = table(RefRow)
_HEADS = select(_ref.c.state_id).distinct()


class Windows:
    """The drawings of one repository. Safe from any thread."""

    def __init__(self) -> None:
        self.topology = Topology()
        self.background = Background("windows")
        self._kept: OrderedDict[tuple[str, ...], _Kept] = OrderedDict()
        self._lock = threading.Lock()

    def page(self, session: Session, heads: Sequence[str], *, first: int, count: int, around: str | None = None) -> GraphPage:
        """Rows of the history of ``heads``, which are revisions; none: of everything that a ref names.

        ``around`` is the uid of a state that is to be in the middle, whatever ``first`` says.

        :raises NotFound: a head names nothing, or ``around`` is not in the history.
        """
        kept = self._of(tuple(sorted(set(heads))))
        drawing, uids, is_current = kept.drawing_of(session, _ids_of(session, heads))
        if around is not None:
            row = drawing.row_of(lookup.id_of(session, around))
            if row is None:
                raise NotFound(f"state {around} is not in the history of {', '.join(heads) or 'any branch or tag'}: ask for other heads")
            first = max(0, row - count // 2)
        placed = drawing.rows(first, count)
        states = lookup.states(session, [one.id for one in placed])
        rows = (GraphRow(state, one.lane, one.above, one.below, one.joins, one.parents) for state, one in zip(states, placed, strict=True))
        return GraphPage(uids, drawing.version, first, drawing.total, drawing.width, tuple(rows), is_current)

    def warm(self, reading: Callable[[], AbstractContextManager[Session]]) -> None:
        """Begin to draw what all refs name, so that the first question need not wait as long."""

        def draw() -> None:
            with reading() as session:
                self.page(session, (), first=0, count=1)

        self.background.start("warm", draw)

    def close(self) -> None:
        """Idempotent."""
        self.background.close()

    def _of(self, key: tuple[str, ...]) -> _Kept:
        with self._lock:
            kept = self._kept.pop(key, None) or _Kept(self, key)
            self._kept[key] = kept
            while len(self._kept) > _HISTORIES:
                self._kept.popitem(last=False)
        return kept


class _Kept:
    """The drawing of some heads, as they stood when one last could see to it."""

    def __init__(self, windows: Windows, key: tuple[str, ...]) -> None:
        self._windows, self._key = windows, key
        self._drawing: tuple[Drawing, tuple[str, ...]] | None = None
        self._lock = threading.Lock()

    def drawing_of(self, session: Session, heads: frozenset[int]) -> tuple[Drawing, tuple[str, ...], bool]:
        """The drawing of ``heads`` and their uids, or of heads as they stood before; and whether it is the first of these."""
        kept = self._drawing
        if kept is None or kept[0].heads != heads:
            with self._lock:
                kept = self._drawing
                if kept is None or kept[0].heads != heads:
                    kept = self._draw(session, heads, kept)
        return *kept, kept[0].heads == heads

    def _draw(
        self, session: Session, heads: frozenset[int], kept: tuple[Drawing, tuple[str, ...]] | None
    ) -> tuple[Drawing, tuple[str, ...]]:
        background, topology = self._windows.background, self._windows.topology
        if kept is not None and background.is_running(self._key):
            return kept
        topology.refresh(session, heads)
        old = None if kept is None else kept[0]
        drawing = draw_history(topology, heads, old=old, budget_rows=None if old is None else _AT_ONCE)
        uids = tuple(uids_of(session, sorted(heads, reverse=True)))
        if drawing is not None:
            self._drawing = kept = drawing, uids
        else:
            background.start(self._key, lambda: self._redraw(heads, uids, old))
        assert kept is not None
        return kept

    def _redraw(self, heads: frozenset[int], uids: tuple[str, ...], old: Drawing | None) -> None:
        """Draw again, on a thread of its own."""
        drawing = draw_history(self._windows.topology, heads, old=old, pause=self._windows.background.pacer())
        if drawing is not None:
            self._drawing = drawing, uids


def _ids_of(session: Session, heads: Sequence[str]) -> frozenset[int]:
    if not heads:
        return frozenset(session.execute(_HEADS).scalars())
    return frozenset(revision.resolve_id(session, head) for head in heads)
