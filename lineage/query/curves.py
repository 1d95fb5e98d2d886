"""Curves: a metric along the first parents of a state, the forks of several such paths, and the
parts that branches lost."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from sqlalchemy import BigInteger, Integer, bindparam, func, select

from datastates.lineage.lookup import rows_in_batches, segment_path
from datastates.lineage.schema import (
    ATTRIBUTE,
    EVENT,
    METRIC,
    RUN,
    SEGMENT,
    STATE,
    STRETCH,
)
from datastates.lineage.states import DIED, STATES, Status, Tally, place_of

from .walk import first_meeting, first_parent_at

if TYPE_CHECKING:
    from datastates.lineage.session import Session


_next = STATE.alias("next")
_above = bindparam("above", type_=BigInteger)
_path_series = (
    select(STATE.c.id, STATE.c.parent_id, STATE.c.step)
    .where(STATE.c.id == bindparam("start", type_=BigInteger), STATE.c.id > _above)
    .cte("path", recursive=True)
)
_path_series = _path_series.union_all(
    # The bound is on the path: for a bound on the joined table, SQLite would first read all of that
    # table.
    select(_next.c.id, _next.c.parent_id, _next.c.step)
    .join_from(_path_series, _next, _next.c.id == _path_series.c.parent_id)
    .where(_path_series.c.parent_id > _above)
)
# An outer join, so that SQLite begins with the path, however short, and not with all values of the
# metric; states without one are dropped.
_POINTS = (
    select(_path_series.c.id, _path_series.c.step, METRIC.c.value)
    .outerjoin_from(
        _path_series,
        METRIC,
        (METRIC.c.state_id == _path_series.c.id) & (METRIC.c.key == bindparam("key")),
    )
    .where(func.coalesce(METRIC.c.state_id, 0) > 0)
)


@dataclass(frozen=True, slots=True)
class Curve:
    """The values of one metric along a path, from the oldest state that has it to the newest;
    row ids rise. NaN is NaN."""

    ids: array[int]
    steps: array[int]
    values: array[float]


@dataclass(frozen=True, slots=True)
class Fork:
    """The state, by row id, where the paths of some heads fork; ``heads`` are their positions in
    the input."""

    id: int
    heads: tuple[int, ...]


def metrics_version(session: Session) -> int:
    """A number that grows when metrics are added to states after their capture, and when notes are
    written."""
    return int(session.execute(_ANNOTATED).scalar_one())


_ANNOTATED = select(func.count()).where(EVENT.c.old_id.is_(None), EVENT.c.new_id.is_(None))


def lost_parts(session: Session, heads: Mapping[str, int]) -> dict[str, list[Any]]:
    """The parts that branches lost with a process, by name, the oldest first; ``heads`` has the row
    id of each branch's newest state.

    A part has the ``id``, ``uid`` and ``step`` of its newest state, and the row id ``after`` which
    it begins (None: from the first). It is left out if the branch was moved elsewhere since: it
    begins on no state of the path to the newest state.
    """
    found: defaultdict[str, list[Any]] = defaultdict(list)
    for part in rows_in_batches(session, _LOST, sorted(heads), "names"):
        if part.after is None or first_meeting(session, heads[part.name], part.after) == part.after:
            found[part.name].append(part)
    return found


def curve(
    session: Session, head: int, key: str, *, base: Curve | None = None, above: int = 0
) -> Curve:
    """A metric along the first parents of ``head``, a row id.

    ``base`` is the curve of a path that shares the state ``above`` with this one: only what is
    newer than that state is read.
    """
    rows = session.execute(_POINTS, {"start": head, "key": key, "above": above})
    found = sorted(map(tuple, rows), key=itemgetter(0))
    kept = bisect_right(base.ids, above) if base is not None else 0
    ids, steps, values = (
        (array("q"), array("q"), array("d"))
        if base is None
        else (base.ids[:kept], base.steps[:kept], base.values[:kept])
    )
    ids.extend([row[0] for row in found])
    steps.extend([row[1] for row in found])
    values.extend([math.nan if row[2] is None else row[2] for row in found])
    return Curve(ids, steps, values)


def forks(session: Session, heads: Sequence[int]) -> list[Fork]:
    """The places where the paths of first parents of ``heads``, which are row ids, fork; the newest
    first.

    A head on another head's path causes no fork. Usually costs a few times O(log n) for each head.
    """
    found: dict[int, set[int]] = {}
    _part(session, sorted(set(heads)), found)
    return [
        Fork(met, tuple(place for place, head in enumerate(heads) if head in found[met]))
        for met in sorted(found, reverse=True)
    ]


def _part(session: Session, heads: list[int], found: dict[int, set[int]]) -> None:
    """Group the other heads against the path of one, by where they leave it and by which child
    of that state."""
    if len(heads) < 2:
        return
    trunk, *others = heads
    groups: defaultdict[int | None, list[int]] = defaultdict(list)
    for other in others:
        groups[first_meeting(session, trunk, other)].append(other)
    _part(session, groups.pop(None, []), found)
    beyond = {trunk}  # those whose paths continue with the trunk's
    for met in sorted((met for met in groups if met is not None), reverse=True):
        leaving: defaultdict[int, list[int]] = defaultdict(list)
        for other in groups[met]:
            if other != met:
                leaving[first_parent_at(session, other, met, younger=1)].append(other)
        on = beyond - {met}
        if len(leaving) + bool(on) > 1:
            found[met] = on.union(*leaving.values())
        for group in leaving.values():
            _part(session, group, found)
        beyond.update(groups[met])


_process = RUN.alias("process")
_left = (
    select(SEGMENT.c.name, SEGMENT.c.fork_id.label("after"), func.max(STATE.c.id).label("newest"))
    .join_from(SEGMENT, STATE, STATE.c.segment_id == SEGMENT.c.id)
    .where(
        SEGMENT.c.name.in_(bindparam("names", expanding=True)),
        SEGMENT.c.branch.is_(None),
        STATE.c.status == Status.LOST.value,
    )
    .group_by(SEGMENT.c.id, SEGMENT.c.name, SEGMENT.c.fork_id)
    .subquery()
)
# The newest state of each segment that a branch left, if it is lost, and the process that captured
# it was found dead.
_LOST = (
    select(_left.c.name, STATE.c.id, STATE.c.uid, STATE.c.step, _left.c.after)
    .join_from(_left, STATE, STATE.c.id == _left.c.newest)
    .join(RUN, RUN.c.id == STATE.c.run_id)
    .join(_process, _process.c.uid == func.coalesce(RUN.c.process, RUN.c.uid))
    .where(_process.c.config[DIED].as_boolean())
    .order_by(STATE.c.id)
)


# Curves from summaries: a very long path costs only as much as its stretches, of ``tally.STATES``
# states each.


_EXACT = 256  # a branch of at most so many states is read state by state

Row = tuple[int, float]
"""A state's row id and its value; NaN is NaN."""


@dataclass(frozen=True, slots=True)
class Outline:
    """Points of one metric along a path, by rising row id: all of them where it is short, else
    those that determine how it looks.

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
    """Sums of one metric along a path, by rising row id: one for each complete stretch, at its last
    state, and one for each other state.

    ``counts`` has the number of values in each sum. Gaps are in no sum.
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
    """A metric along the first parents of ``head`` as sums: a mean over many states needs them,
    and extremes do not give them."""
    found: dict[int, tuple[float, int]] = {}
    count = 0
    for stretches, rest in _spans_of(session, head, key):
        found.update((row.last_id, (row.total, row.number - row.gaps)) for row in stretches)
        found.update((id_, (value, 1) if math.isfinite(value) else (0.0, 0)) for id_, value in rest)
        count += sum(int(row.number) for row in stretches) + len(rest)
    ids = sorted(found)
    return Means(
        array("q", ids),
        array("d", [found[id_][0] for id_ in ids]),
        array("q", [found[id_][1] for id_ in ids]),
        count,
    )


def own_points(
    session: Session, head: int, generation: int, segment: int, key: str, states: int
) -> list[Row]:
    """Points of the part of a path in the segment of its head, which has ``states`` states.
    ``generation`` is the head's.

    If there are many states, all those outside complete stretches count as one more stretch, so
    that the points are spread evenly.
    """
    if states <= _EXACT:
        return _values(session, head, segment, 0, key)
    whole = place_of(generation + 1)
    stretches = session.execute(
        _STRETCHES, {"segment": segment, "wanted": key, "upto": whole}
    ).all()
    rest = Tally()
    for id_, value in _values(session, head, segment, whole * STATES, key):
        rest.add(id_, value)
    return sorted(dict(_points([*stretches, rest] if rest.count else stretches)).items())


def names_of(session: Session, ids: Sequence[int]) -> list[tuple[str, int]]:
    """The uid and the step of states by row id, in the order of ``ids``."""
    found = {row.id: (row.uid, row.step) for row in rows_in_batches(session, _NAMES, ids)}
    return [found[id_] for id_ in ids]


def _spans_of(session: Session, head: int, key: str) -> Iterator[tuple[Sequence[Any], list[Row]]]:
    """The complete stretches of a path in each segment, and the values outside them.

    Outside all segments there are no summaries."""
    at: int | None = head
    while at is not None:
        spans = session.execute(_SPANS, {"head": at}).all()
        for span in spans:
            whole = 0 if span.segment_id is None else place_of(span.generation + 1)
            stretches = (
                session.execute(
                    _STRETCHES, {"segment": span.segment_id, "wanted": key, "upto": whole}
                ).all()
                if whole
                else []
            )
            yield stretches, _values(session, span.head, span.segment_id, whole * STATES, key)
        last = min(spans, key=lambda span: int(span.head))
        at = (
            session.execute(_BEYOND, {"head": last.head, "segment": 0, "low": 0}).scalar()
            if last.segment_id is None
            else None
        )


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
    """The values of a state and its first parents within its segment, or outside all segments,
    down to a generation."""
    rows = session.execute(
        _VALUES, {"head": head, "segment": segment or 0, "low": low, "wanted": key}
    )
    return sorted((int(row.id), _number(row.value)) for row in rows)


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _spans() -> Any:
    """The segments of a path, each with the newest state that is on the path."""
    walk = (
        select(STATE.c.id.label("head"), STATE.c.segment_id, STATE.c.generation, SEGMENT.c.fork_id)
        .outerjoin_from(STATE, SEGMENT, SEGMENT.c.id == STATE.c.segment_id)
        .where(STATE.c.id == bindparam("head", type_=BigInteger))
        .cte("spans", recursive=True)
    )
    step = select(
        _next.c.id, _next.c.segment_id, _next.c.generation, SEGMENT.c.fork_id
    ).select_from(
        walk.join(_next, _next.c.id == walk.c.fork_id).outerjoin(
            SEGMENT, SEGMENT.c.id == _next.c.segment_id
        )
    )
    walk = walk.union_all(step)
    return select(walk.c.head, walk.c.segment_id, walk.c.generation)


_of = bindparam("segment", type_=BigInteger)
_GENERATION = select(STATE.c.generation).where(STATE.c.id == bindparam("head", type_=BigInteger))
_NAMES = select(STATE.c.id, STATE.c.uid, STATE.c.step).where(
    STATE.c.id.in_(bindparam("ids", type_=BigInteger, expanding=True))
)
_SPANS = _spans()
_own_path = segment_path("own_path")
# An outer join, so that SQLite begins with the path, however short, and not with all values of the
# metric.
_VALUES = (
    select(_own_path.c.id, METRIC.c.value)
    .outerjoin_from(
        _own_path,
        METRIC,
        (METRIC.c.state_id == _own_path.c.id) & (METRIC.c.key == bindparam("wanted")),
    )
    .where(_own_path.c.segment == _of, func.coalesce(METRIC.c.state_id, 0) > 0)
)
_BEYOND = select(_own_path.c.id).where(_own_path.c.segment != _of)
_STRETCHES = (
    select(STRETCH, STRETCH.c["count"].label("number"))
    .where(STRETCH.c.segment_id == _of, STRETCH.c.key == bindparam("wanted"))
    .where(STRETCH.c.place >= 0, STRETCH.c.place < bindparam("upto", type_=Integer))
    .order_by(STRETCH.c.place)
)


# The horizontal axes of curves: steps, the time at which states were captured, or the epoch that a
# training recorded.


EPOCH = "epoch"
"""The metric, or else the attribute, that says in which epoch a state was captured."""


class Axis(StrEnum):
    """The quantity on the horizontal axis of a curve."""

    STEP = "step"
    TIME = "time"
    EPOCH = "epoch"


def along(session: Session, ids: Sequence[int], axis: Axis) -> list[float | None]:
    """The positions of the states ``ids`` (row ids), in their order: seconds since 1970, epochs,
    or None. Empty if the axis is steps."""
    if axis is Axis.STEP:
        return []
    wanted = sorted(set(ids))
    found: dict[int, float | None]
    if axis is Axis.TIME:
        found = {row.id: row.created_at / 1e6 for row in rows_in_batches(session, _TIMES, wanted)}
    else:  # metrics last: a measured value overrides an attribute
        found = {
            row.state_id: row.value
            for statement in (_NOTED, _MEASURED)
            for row in rows_in_batches(session, statement, wanted)
        }
    return [found.get(id_) for id_ in ids]


def began(session: Session, id_: int) -> float:
    """When the branch of ``id_``, a row id, began after its fork, or at its root: in seconds
    since 1970."""
    return int(session.execute(_BEGAN, {"id": id_}).scalar_one()) / 1e6


_first = STATE.alias("first")
_BEGAN = (
    select(func.coalesce(_first.c.created_at, STATE.c.created_at))
    .outerjoin_from(STATE, SEGMENT, SEGMENT.c.id == STATE.c.segment_id)
    .outerjoin(_first, _first.c.id == SEGMENT.c.first_id)
    .where(STATE.c.id == bindparam("id", type_=BigInteger))
)
_ids = bindparam("ids", type_=BigInteger, expanding=True)
_TIMES = select(STATE.c.id, STATE.c.created_at).where(STATE.c.id.in_(_ids))
_MEASURED = select(METRIC.c.state_id, METRIC.c.value).where(
    METRIC.c.state_id.in_(_ids), METRIC.c.key == EPOCH
)
_NOTED = select(ATTRIBUTE.c.state_id, ATTRIBUTE.c.number.label("value")).where(
    ATTRIBUTE.c.state_id.in_(_ids), ATTRIBUTE.c.key == EPOCH
)
