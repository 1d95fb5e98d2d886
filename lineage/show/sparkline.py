"""Small curves: a few points of what a branch has to itself, or of its path if it has nothing, its extremes among them."""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from sqlalchemy import BigInteger, bindparam, select

from datastates.lineage.batches import batches
from datastates.lineage.schema import StateRow, table
from datastates.lineage.search.outline import outline, own_points

from .branches import Line
from .rows import Row

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

__all__ = ["Lines", "lines_of", "thinned"]

_BATCH = 500

_state = table(StateRow)
_STEPS = select(_state.c.id, _state.c.step).where(_state.c.id.in_(bindparam("ids", type_=BigInteger, expanding=True)))


class Lines:
    """Lines that were drawn, the ``most`` latest. Any thread may use it."""

    def __init__(self, most: int = 10_000) -> None:
        self._most, self._lock = most, threading.Lock()
        self._drawn: OrderedDict[tuple[object, ...], Line] = OrderedDict()

    def get(self, key: tuple[object, ...]) -> Line | None:
        """The line for a branch as it was: its head's uid, its segment and how many states that has, the metric and its summary, and
        the number of points."""
        with self._lock:
            found = self._drawn.get(key)
            if found is not None:
                self._drawn.move_to_end(key)
            return found

    def put(self, key: tuple[object, ...], line: Line) -> None:
        """Keep it; the one that was longest unused may go."""
        with self._lock:
            self._drawn[key] = line
            if len(self._drawn) > self._most:
                self._drawn.popitem(last=False)


def lines_of(session: Session, rows: Sequence[Row], metric: str | None, points: int, drawn: Lines | None = None) -> list[Line]:
    """The line of each branch. Those that were ``drawn`` are not read again."""
    return [_line(session, row, metric, points, Lines() if drawn is None else drawn) for row in rows]


def _line(session: Session, row: Row, metric: str | None, points: int, drawn: Lines) -> Line:
    if metric is None or row.segment_id is None:
        return Line()
    key = row.head, row.segment_id, row.states, metric, repr(row.tally), points
    line = drawn.get(key)
    if line is None:
        if row.first_id is None:
            path = outline(session, row.head_id, metric)
            own = thinned(list(zip(path.ids, path.values, strict=True)), points)
        else:
            own = thinned(own_points(session, row.head_id, row.generation, row.segment_id, metric, row.states), points)
        steps: dict[int, int] = {}
        for some in batches([id_ for id_, _ in own], _BATCH):
            steps.update((found.id, found.step) for found in session.execute(_STEPS, {"ids": some}))
        line = Line(tuple([steps[id_] for id_, _ in own]), tuple([None if math.isnan(value) else value for _, value in own]))
        drawn.put(key, line)
    return line


def thinned(points: Sequence[tuple[int, float]], most: int) -> list[tuple[int, float]]:
    """At most ``most`` (at least 4) of some points: the ends, and the least and the greatest of each of equally large stretches."""
    if len(points) <= most:
        return list(points)
    stretches = (most - 2) // 2
    kept = {0, len(points) - 1}
    for number in range(stretches):
        places = range(number * len(points) // stretches, (number + 1) * len(points) // stretches)
        finite = [place for place in places if math.isfinite(points[place][1])]
        if finite:
            kept.add(min(finite, key=lambda place: points[place][1]))
            kept.add(max(finite, key=lambda place: points[place][1]))
        else:
            kept.add(places[0])
    return [points[place] for place in sorted(kept)]
