"""Every branch of a lineage, with what a few queries say of it; they cost as much as there are branches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sqlalchemy import BigInteger, bindparam, func, select

from datastates.lineage.batches import batches
from datastates.lineage.schema import RefRow, SegmentRow, StateRow, StretchRow, table
from datastates.lineage.states import RefKind, Status, Value
from datastates.lineage.tally import WHOLE

from .goals import Direction

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

__all__ = ["Row", "count_states", "rows_of"]

_BATCH = 500
_GONE = [status.value for status in Status if not status.is_restorable]
_SAFE = [Status.DURABLE.value, Status.REPLICATED.value, Status.EXTERNAL.value]


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


def rows_of(session: Session, metric: str | None, direction: Direction) -> list[Row]:
    """Every branch, with the summary of a metric."""
    rows = [Row(*row) for row in session.execute(_ALL)]
    if metric is None:
        return rows
    tallies = {row.segment_id: row for row in session.execute(_TALLIES, {"of": metric})}
    is_least = direction is Direction.MIN
    for row in rows:
        tally = row.tally = tallies.get(row.segment_id)
        if tally is not None:
            row.best, row.best_id = (tally.least, tally.least_id) if is_least else (tally.most, tally.most_id)
    return rows


def count_states(session: Session, rows: Sequence[Row]) -> None:
    """Count the states of each status, and the bytes, that these branches have to themselves; many are read along the index at once."""
    ids = [row.segment_id for row in rows if row.segment_id is not None]
    found: dict[int, list[int]] = {}
    counts = [session.execute(_COUNTS_OF, {"ids": some}) for some in batches(ids, _BATCH)]
    for each in counts:
        for segment_id, status, count, size in each:
            numbers = found.setdefault(segment_id, [0, 0, 0])
            numbers[0] += 0 if status in _GONE else count
            numbers[1] += count if status in _SAFE else 0
            numbers[2] += int(size or 0)
    for row in rows:
        row.restorable, row.durable, row.bytes = found.get(row.segment_id or 0, (0, 0, 0))


_state, _ref, _segment, _stretch = (table(row) for row in (StateRow, RefRow, SegmentRow, StretchRow))
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
_own = (_segment.c.id == _stretch.c.segment_id) & _segment.c.branch.is_not(None)
_TALLIES = select(_stretch).join_from(_segment, _stretch, _own).where(_stretch.c.key == bindparam("of"), _stretch.c.place == WHOLE)
_COUNTS_OF = (
    select(_state.c.segment_id, _state.c.status, func.count(), func.sum(_state.c.bytes_new))
    .where(_state.c.segment_id.in_(bindparam("ids", type_=BigInteger, expanding=True)))
    .group_by(_state.c.segment_id, _state.c.status)
)
