"""Small curves: a few points of what a branch has to itself, its extremes among them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from sqlalchemy import BigInteger, bindparam, select

from datastates.lineage.batches import batches
from datastates.lineage.schema import StateRow, table
from datastates.lineage.search.outline import own_points

from .branches import Line

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

__all__ = ["lines_of", "thinned"]

_BATCH = 500

_state = table(StateRow)
_STEPS = select(_state.c.id, _state.c.step).where(_state.c.id.in_(bindparam("ids", type_=BigInteger, expanding=True)))


def lines_of(
    session: Session, branches: Sequence[tuple[int, int | None, int]], metric: str | None, points: int
) -> dict[tuple[int, int | None], Line]:
    """The line of each branch, by its head's row id and its segment; ``branches`` has these two and the number of its own states."""
    found: dict[tuple[int, int | None], list[tuple[int, float]]] = {}
    for head, segment, states in branches:
        own = own_points(session, head, segment, metric, states) if metric is not None and segment is not None and states else []
        found[head, segment] = thinned(own, points)
    steps: dict[int, int] = {}
    ids = sorted({id_ for line in found.values() for id_, _ in line})
    for some in batches(ids, _BATCH):
        steps.update((row.id, row.step) for row in session.execute(_STEPS, {"ids": some}))
    return {
        at: Line(tuple(steps[id_] for id_, _ in line), tuple(None if math.isnan(value) else value for _, value in line))
        for at, line in found.items()
    }


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
