"""Curves: a metric along the first parents of a state, the forks of several such paths, and the parts that branches lost."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from sqlalchemy import BigInteger, bindparam, func, select

from datastates.lineage.batches import batches
from datastates.lineage.schema import MetricRow, RunRow, SegmentRow, StateRow, table
from datastates.lineage.states import DIED, Status

from .walk import first_meeting, first_parent_at

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

__all__ = ["Curve", "Parting", "curve", "lost_parts", "partings"]

_state, _metric = table(StateRow), table(MetricRow)
_next = _state.alias("next")
_above = bindparam("above", type_=BigInteger)
_path = (
    select(_state.c.id, _state.c.parent_id, _state.c.step)
    .where(_state.c.id == bindparam("start", type_=BigInteger), _state.c.id > _above)
    .cte("path", recursive=True)
)
_path = _path.union_all(
    # The bound is on the path: for a bound on the joined table, SQLite would first read all of that table.
    select(_next.c.id, _next.c.parent_id, _next.c.step)
    .join_from(_path, _next, _next.c.id == _path.c.parent_id)
    .where(_path.c.parent_id > _above)
)
# An outer join, so that SQLite begins with the path, however short, and not with all values of the metric; states without one are dropped.
_POINTS = (
    select(_path.c.id, _path.c.step, _metric.c.value)
    .outerjoin_from(_path, _metric, (_metric.c.state_id == _path.c.id) & (_metric.c.key == bindparam("key")))
    .where(func.coalesce(_metric.c.state_id, 0) > 0)
)


@dataclass(frozen=True, slots=True)
class Curve:
    """The values of one metric along a path, from the oldest state that has it to the newest; row ids rise. NaN is NaN."""

    ids: array[int]
    steps: array[int]
    values: array[float]


@dataclass(frozen=True, slots=True)
class Parting:
    """The state, by row id, where the paths of some heads fork; ``heads`` are their positions in the input."""

    id: int
    heads: tuple[int, ...]


def lost_parts(session: Session, heads: Mapping[str, int]) -> dict[str, list[Any]]:
    """The parts that branches lost with a process, by name, the oldest first; ``heads`` has the row id of each branch's newest state.

    A part has the ``id``, ``uid`` and ``step`` of its newest state, and the row id ``after`` which it begins (None: from the first). It is
    left out if the branch was moved elsewhere since: it begins on no state of the path to the newest state.
    """
    found: defaultdict[str, list[Any]] = defaultdict(list)
    for part in (row for some in batches(sorted(heads), 500) for row in session.execute(_LOST, {"names": some})):
        if part.after is None or first_meeting(session, heads[part.name], part.after) == part.after:
            found[part.name].append(part)
    return found


def curve(session: Session, head: int, key: str, *, base: Curve | None = None, above: int = 0) -> Curve:
    """A metric along the first parents of ``head``, a row id.

    ``base`` is the curve of a path that shares the state ``above`` with this one: only what is newer than that state is read.
    """
    rows = session.connection().execute(_POINTS, {"start": head, "key": key, "above": above})
    found = sorted(map(tuple, rows), key=itemgetter(0))
    kept = bisect_right(base.ids, above) if base is not None else 0
    ids, steps, values = (array("q"), array("q"), array("d")) if base is None else (base.ids[:kept], base.steps[:kept], base.values[:kept])
    ids.extend([row[0] for row in found])
    steps.extend([row[1] for row in found])
    values.extend([math.nan if row[2] is None else row[2] for row in found])
    return Curve(ids, steps, values)


def partings(session: Session, heads: Sequence[int]) -> list[Parting]:
    """The places where the paths of first parents of ``heads``, which are row ids, fork; the newest first.

    A head that lies on another head's path causes no fork. Usually costs a few times O(log n) for each head.
    """
    found: dict[int, set[int]] = {}
    _part(session, sorted(set(heads)), found)
    return [Parting(met, tuple(place for place, head in enumerate(heads) if head in found[met])) for met in sorted(found, reverse=True)]


def _part(session: Session, heads: list[int], found: dict[int, set[int]]) -> None:
    """Group the other heads against the path of one, by where they leave it and by which child of that state."""
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


_segment, _run, _process = table(SegmentRow), table(RunRow), table(RunRow).alias("process")
_left = (
    select(_segment.c.name, _segment.c.fork_id.label("after"), func.max(_state.c.id).label("newest"))
    .join_from(_segment, _state, _state.c.segment_id == _segment.c.id)
    .where(_segment.c.name.in_(bindparam("names", expanding=True)), _segment.c.branch.is_(None), _state.c.status == Status.LOST.value)
    .group_by(_segment.c.id, _segment.c.name, _segment.c.fork_id)
    .subquery()
)
# The newest state of each segment that a branch left, if it is lost, and the process that captured it was found dead.
_LOST = (
    select(_left.c.name, _state.c.id, _state.c.uid, _state.c.step, _left.c.after)
    .join_from(_left, _state, _state.c.id == _left.c.newest)
    .join(_run, _run.c.id == _state.c.run_id)
    .join(_process, _process.c.uid == func.coalesce(_run.c.process, _run.c.uid))
    .where(_process.c.config[DIED].as_boolean())
    .order_by(_state.c.id)
)
