"""Curves from summaries: a very long path costs only as much as its stretches, of ``tally.STATES`` states each.

For each complete stretch the first, the least, the greatest and the last value are known, and the first gap. The rest of a path, at most
``STATES - 1`` states of each segment, is read state by state.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sqlalchemy import BigInteger, Integer, bindparam, func, select

from datastates.lineage.batches import batches
from datastates.lineage.schema import MetricRow, SegmentRow, StateRow, StretchRow, table
from datastates.lineage.tally import STATES, Tally, place_of

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

__all__ = ["Means", "Outline", "generation_of", "means", "names_of", "outline", "own_points"]

_EXACT = 256  # a branch of at most so many states is read state by state

_state, _metric, _segment, _stretch = table(StateRow), table(MetricRow), table(SegmentRow), table(StretchRow)
_next = _state.alias("next")

Row = tuple[int, float]
"""A state's row id and its value; NaN is NaN."""


@dataclass(frozen=True, slots=True)
class Outline:
    """Points of one metric along a path, by rising row id: all of them where it is short, else those that determine how it looks.

    ``count`` is the number of all values.
    """

    ids: array[int]
    values: array[float]
    count: int


def generation_of(session: Session, id_: int) -> int:
    """How many first parents a state has."""
    return int(session.execute(_GENERATION, {"head": id_}).scalar_one())


@dataclass(frozen=True, slots=True)
class Means:
    """Sums of one metric along a path, by rising row id: one for each complete stretch, at its last state, and one for each other state.

    ``counts`` says how many values are in each sum; gaps are in none.
    """

    ids: array[int]
    sums: array[float]
    counts: array[int]
    count: int


def outline(session: Session, head: int, key: str) -> Outline:
    """A metric along the first parents of ``head``, a row id."""
    found: dict[int, float] = {}
    count = 0
    for stretches, rest in _spans_of(session, head, key):
        found.update(_points(stretches))
        found.update(rest)
        count += sum(int(row.number) for row in stretches) + len(rest)
    ids = sorted(found)
    return Outline(array("q", ids), array("d", [found[id_] for id_ in ids]), count)


def means(session: Session, head: int, key: str) -> Means:
    """A metric along the first parents of ``head`` as sums: a mean over many states needs them, and extremes do not give them."""
    found: dict[int, tuple[float, int]] = {}
    count = 0
    for stretches, rest in _spans_of(session, head, key):
        found.update((row.last_id, (row.total, row.number - row.gaps)) for row in stretches)
        found.update((id_, (value, 1) if math.isfinite(value) else (0.0, 0)) for id_, value in rest)
        count += sum(int(row.number) for row in stretches) + len(rest)
    ids = sorted(found)
    return Means(array("q", ids), array("d", [found[id_][0] for id_ in ids]), array("q", [found[id_][1] for id_ in ids]), count)


def own_points(session: Session, head: int, generation: int, segment: int, key: str, states: int) -> list[Row]:
    """Points of the part of a path that lies in the segment of its head, which has ``states`` states; ``generation`` is the head's.

    If there are many states, all those outside complete stretches count as one more stretch, so that the points are spread evenly.
    """
    if states <= _EXACT:
        return _values(session, head, segment, 0, key)
    whole = place_of(generation + 1)
    stretches = session.execute(_STRETCHES, {"of": segment, "wanted": key, "upto": whole}).all()
    rest = Tally()
    for id_, value in _values(session, head, segment, whole * STATES, key):
        rest.add(id_, value)
    return sorted(dict(_points([*stretches, rest] if rest.count else stretches)).items())


def names_of(session: Session, ids: Sequence[int]) -> list[tuple[str, int]]:
    """The uid and the step of states by row id, in the order of ``ids``."""
    found: dict[int, tuple[str, int]] = {}
    for some in batches(ids, 1000):
        found.update((row.id, (row.uid, row.step)) for row in session.execute(_NAMES, {"ids": some}))
    return [found[id_] for id_ in ids]


def _spans_of(session: Session, head: int, key: str) -> Iterator[tuple[Sequence[Any], list[Row]]]:
    """What a path has in each segment: complete stretches, and the values beside them. Outside all segments there are no summaries."""
    at: int | None = head
    while at is not None:
        spans = session.execute(_SPANS, {"head": at}).all()
        for span in spans:
            whole = 0 if span.segment_id is None else place_of(span.generation + 1)
            stretches = session.execute(_STRETCHES, {"of": span.segment_id, "wanted": key, "upto": whole}).all() if whole else []
            yield stretches, _values(session, span.head, span.segment_id, whole * STATES, key)
        last = min(spans, key=lambda span: int(span.head))
        at = session.execute(_BEYOND, {"head": last.head, "of": 0, "low": 0}).scalar() if last.segment_id is None else None


def _points(stretches: Iterable[Any]) -> Iterator[Row]:
    for row in stretches:
        yield row.first_id, _number(row.first)
        if row.least_id is not None:
            yield row.least_id, row.least
            yield row.most_id, row.most
        if row.gap_id is not None and row.gap_id not in (row.first_id, row.last_id):
            yield row.gap_id, math.nan
        yield row.last_id, _number(row.last)


def _values(session: Session, head: int, segment: int | None, low: int, key: str) -> list[Row]:
    """The values of a state and its first parents within its segment, or outside all segments, down to a generation."""
    rows = session.execute(_VALUES, {"head": head, "of": segment or 0, "low": low, "wanted": key})
    return sorted((int(row.id), _number(row.value)) for row in rows)


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _spans() -> Any:
    """The segments of a path, each with the newest state that is on the path."""
    walk = (
        select(_state.c.id.label("head"), _state.c.segment_id, _state.c.generation, _segment.c.fork_id)
        .outerjoin_from(_state, _segment, _segment.c.id == _state.c.segment_id)
        .where(_state.c.id == bindparam("head", type_=BigInteger))
        .cte("spans", recursive=True)
    )
    step = select(_next.c.id, _next.c.segment_id, _next.c.generation, _segment.c.fork_id).select_from(
        walk.join(_next, _next.c.id == walk.c.fork_id).outerjoin(_segment, _segment.c.id == _next.c.segment_id)
    )
    walk = walk.union_all(step)
    return select(walk.c.head, walk.c.segment_id, walk.c.generation)


def _columns(state: Any) -> tuple[Any, ...]:
    return state.c.id, state.c.parent_id, state.c.generation, func.coalesce(state.c.segment_id, 0).label("segment")


def _path(name: str) -> Any:
    """A state and its first parents down to ``low``, as long as they are in the segment ``of``, where 0 means none; and the one beyond.

    The conditions that stop the walk are on the path: for a condition on the joined table SQLite would first read all of that table.
    """
    low = bindparam("low", type_=Integer)
    start = select(*_columns(_state)).where(_state.c.id == bindparam("head", type_=BigInteger), _state.c.generation >= low)
    walk = start.cte(name, recursive=True)
    step = select(*_columns(_next)).join_from(walk, _next, _next.c.id == walk.c.parent_id)
    return walk.union_all(step.where(walk.c.generation > low, walk.c.segment == _of))


def _points_of(walk: Any) -> Any:
    # An outer join, so that SQLite begins with the path, however short, and not with all values of the metric.
    points = select(walk.c.id, _metric.c.value).outerjoin_from(
        walk, _metric, (_metric.c.state_id == walk.c.id) & (_metric.c.key == bindparam("wanted"))
    )
    return points.where(walk.c.segment == _of, func.coalesce(_metric.c.state_id, 0) > 0)


_of = bindparam("of", type_=BigInteger)
_GENERATION = select(_state.c.generation).where(_state.c.id == bindparam("head", type_=BigInteger))
_NAMES = select(_state.c.id, _state.c.uid, _state.c.step).where(_state.c.id.in_(bindparam("ids", type_=BigInteger, expanding=True)))
_SPANS = _spans()
_way = _path("own_path")
_VALUES = _points_of(_way)
_BEYOND = select(_way.c.id).where(_way.c.segment != _of)
_STRETCHES = (
    select(_stretch, _stretch.c["count"].label("number"))
    .where(_stretch.c.segment_id == _of, _stretch.c.key == bindparam("wanted"))
    .where(_stretch.c.place >= 0, _stretch.c.place < bindparam("upto", type_=Integer))
    .order_by(_stretch.c.place)
)
