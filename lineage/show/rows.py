"""Every branch of a lineage, with what a few queries say of it; they cost as much as there are branches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sqlalchemy import BigInteger, bindparam, func, select

from datastates.lineage.batches import batches
from datastates.lineage.schema import MetricRow, RefRow, RunRow, SegmentRow, StateRow, StretchRow, table
from datastates.lineage.search.outline import outline
from datastates.lineage.states import RefKind, Status, Value
from datastates.lineage.tally import WHOLE, Tally

from .goals import Direction
from .keys import keys_of

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

__all__ = ["Counts", "Row", "count_states", "counts_of", "kept_of", "metrics_of", "rows_of"]

_BATCH = 500
_GONE = [status.value for status in Status if not status.is_restorable]
_SAFE = [Status.DURABLE.value, Status.REPLICATED.value, Status.EXTERNAL.value]


Counts = Mapping[int, tuple[int, int, int]]
"""How many states of a segment can be restored and how many are durable, and the bytes of all, by the segment's row id."""


@dataclass(slots=True)
class Row:
    """One branch. ``count_states`` sets the last three numbers; the code that groups branches sets ``group``."""

    name: str
    head_id: int
    head: str
    step: int
    generation: int
    status: str
    changed_us: int
    run_id: int | None
    segment_id: int | None
    fork_id: int | None
    fork: str | None
    fork_step: int | None
    fork_generation: int | None
    fork_run_id: int | None
    parent: str | None
    parent_name: str | None
    first_id: int | None
    began_us: int | None
    tally: Any = None
    best: float | None = None
    best_id: int | None = None
    restorable: int = 0
    durable: int = 0
    bytes: int = 0
    group: Value = None

    @property
    def states(self) -> int:
        """How many states it has to itself."""
        return self.generation + 1 if self.fork_generation is None else self.generation - self.fork_generation

    @property
    def last(self) -> float | None:
        """The newest value of the metric; None if it has none, or it is NaN."""
        return None if self.tally is None else self.tally.last

    @property
    def took_us(self) -> int:
        """The time from its first own state to its newest."""
        return 0 if self.began_us is None else max(0, self.changed_us - self.began_us)


def metrics_of(session: Session) -> list[str]:
    """The metrics that branches have, in no order."""
    return list(session.execute(_METRICS).scalars())


def rows_of(session: Session, metric: str | None, direction: Direction) -> list[Row]:
    """Every branch, with the summary of a metric: that of its own states, or of its path of first parents if it has none of its own."""
    rows = [Row(*row) for row in session.execute(_ALL)]
    if metric is None:
        return rows
    tallies = {row.segment_id: row for row in session.execute(_TALLIES, {"of": metric})}
    paths = {head: _of_path(session, head, metric) for head in {row.head_id for row in rows if row.first_id is None}}
    is_least = direction is Direction.MIN
    for row in rows:
        tally = row.tally = paths[row.head_id] if row.first_id is None else tallies.get(row.segment_id)
        if tally is not None:
            row.best, row.best_id = (tally.least, tally.least_id) if is_least else (tally.most, tally.most_id)
    return rows


def _of_path(session: Session, head: int, metric: str) -> Tally | None:
    found, points = Tally(), outline(session, head, metric)
    for id_, value in zip(points.ids, points.values, strict=True):
        found.add(id_, value)
    return found if found.count else None


def count_states(session: Session, rows: Sequence[Row], known: Counts | None = None) -> None:
    """Count the states that these branches have to themselves, and their bytes; those of which the counts are ``known`` are not counted."""
    known = known or {}
    ids = [row.segment_id for row in rows if row.segment_id is not None and row.segment_id not in known]
    found = _counted(session, ids)
    for row in rows:
        segment = row.segment_id or 0
        row.restorable, row.durable, row.bytes = known.get(segment) or found.get(segment, (0, 0, 0))


def counts_of(session: Session) -> Counts:
    """The counts of every branch."""
    return _counted(session, session.execute(_BRANCHES).scalars().all())


def kept_of(session: Session, run: str) -> tuple[int, int, int]:
    """How many states a run captured, how many of them can be restored, and how many bytes those on disk added there."""
    rows = session.execute(_OF_RUN, {"run": run}).all()
    return (
        sum(row.states for row in rows),
        sum(row.states for row in rows if row.status not in _GONE),
        sum(int(row.size) for row in rows if row.status in _SAFE),
    )


def _counted(session: Session, ids: Sequence[int]) -> Counts:
    """The counts of some segments; many are read along the index at once."""
    found = dict.fromkeys(ids, (0, 0, 0))
    for some in batches(ids, _BATCH):
        for segment_id, status, count, size in session.execute(_COUNTS_OF, {"ids": some}):
            restorable, durable, total = found[segment_id]
            found[segment_id] = (
                restorable + (0 if status in _GONE else count),
                durable + (count if status in _SAFE else 0),
                total + int(size or 0),
            )
    return found


_state, _ref, _segment, _stretch, _metric, _run = (table(row) for row in (StateRow, RefRow, SegmentRow, StretchRow, MetricRow, RunRow))
_OF_RUN = (
    select(_state.c.status, func.count().label("states"), func.sum(_state.c.bytes_new).label("size"))
    .where(_state.c.run_id == select(_run.c.id).where(_run.c.uid == bindparam("run")).scalar_subquery())
    .group_by(_state.c.status)
)
_fork, _first, _parent = _state.alias("fork"), _state.alias("first"), _segment.alias("parent")
_is_branch = _ref.c.kind == RefKind.BRANCH.value
_ALL = (
    select(_ref.c.name, _state.c.id, _state.c.uid, _state.c.step, _state.c.generation, _state.c.status, _state.c.created_at)
    .add_columns(_state.c.run_id, _segment.c.id, _segment.c.fork_id)
    .add_columns(_fork.c.uid, _fork.c.step, _fork.c.generation, _fork.c.run_id, _parent.c.branch, _parent.c.name)
    .add_columns(_segment.c.first_id, _first.c.created_at)
    .join_from(_ref, _state, _state.c.id == _ref.c.state_id)
    .outerjoin(_segment, _segment.c.branch == _ref.c.name)
    .outerjoin(_fork, _fork.c.id == _segment.c.fork_id)
    .outerjoin(_parent, _parent.c.id == _fork.c.segment_id)
    .outerjoin(_first, _first.c.id == _segment.c.first_id)
    .where(_is_branch)
)
_BRANCHES = select(_segment.c.id).where(_segment.c.branch.is_not(None))
# By segments, so that SQLite looks each up: in a join it would read all stretches.
_TALLIES = select(_stretch).where(_stretch.c.segment_id.in_(_BRANCHES), _stretch.c.key == bindparam("of"), _stretch.c.place == WHOLE)


def _metrics() -> Any:
    """Those metrics of states of which a branch has a stretch."""
    keys = keys_of(_metric)
    own = select(_stretch.c.key).where(_stretch.c.segment_id.in_(_BRANCHES), _stretch.c.key == keys.c.key, _stretch.c.place == WHOLE)
    return select(keys.c.key).where(own.correlate(keys).exists())


_METRICS = _metrics()
_COUNTS_OF = (
    select(_state.c.segment_id, _state.c.status, func.count(), func.sum(_state.c.bytes_new))
    .where(_state.c.segment_id.in_(bindparam("ids", type_=BigInteger, expanding=True)))
    .group_by(_state.c.segment_id, _state.c.status)
)
