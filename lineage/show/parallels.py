"""Settings and metrics of many branches, one axis for each: the data of parallel coordinates and scatter plots.

All of it is read from the heads of branches, the settings of their runs and the summaries of their metrics, without looking at states.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from sqlalchemy import BigInteger, bindparam, select

from datastates.errors import InvalidInput
from datastates.lineage.batches import batches
from datastates.lineage.schema import RefRow, SegmentRow, StateRow, StretchRow, table
from datastates.lineage.states import RefKind, Status, Value
from datastates.lineage.tally import WHOLE

from .goals import Direction, direction_of
from .grouping import configs_of
from .overview import heads_where
from .relevance import by_relevance

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

__all__ = ["MOST", "Axis", "AxisKind", "ParallelBranch", "Parallels", "Taken", "parallels"]

MOST = 1000
"""The most branches that are drawn."""


class AxisKind(StrEnum):
    """Where the values of an axis come from: the configuration, or a metric."""

    SETTING = "setting"
    METRIC = "metric"


class Taken(StrEnum):
    """Which value of a branch's metric represents it: the best one, or the newest."""

    BEST = "best"
    LAST = "last"


@dataclass(frozen=True, slots=True)
class ParallelBranch:
    """One branch: its name, its newest state, and that state's step and status."""

    branch: str
    head: str
    step: int
    status: Status


@dataclass(frozen=True, slots=True)
class Axis:
    """One setting or metric, and its value for each branch in order; None where a branch has none, or has only NaN.

    ``varies``: at least two branches differ in it. ``direction`` says which values of a metric are better.
    """

    key: str
    kind: AxisKind
    values: tuple[Value, ...]
    varies: bool
    direction: Direction | None = None


@dataclass(frozen=True, slots=True)
class Parallels:
    """Branches by settings and metrics. ``matching`` out of ``total`` branches match; ``branches`` are the first of them, by name.

    Settings come first, those that vary before those that do not; then metrics, the most relevant first.
    """

    branches: tuple[ParallelBranch, ...]
    axes: tuple[Axis, ...]
    total: int
    matching: int


def parallels(
    session: Session, query: str = "", *, name: str = "", taken: Taken = Taken.BEST, limit: int = MOST, now: datetime | None = None
) -> Parallels:
    """The branches that match the request, with an axis for each setting and metric.

    :param query: a condition, as for states; it must hold of a branch's newest state.
    :param name: a part of the names of the branches.
    :param taken: which value of a metric represents a branch.
    :param limit: the most branches to return.
    :raises SyntaxProblem: the query does not parse; the error points at the column.
    :raises InvalidInput: it orders or limits, or ``limit`` is out of bounds.
    """
    if not 1 <= limit <= MOST:
        raise InvalidInput(f"limit is {limit}: from 1 to {MOST} branches can be drawn; choose them by a condition")
    rows = sorted(session.execute(_HEADS), key=lambda row: row.name)
    total = len(rows)
    rows = [row for row in rows if name in row.name]
    if query.strip():
        wanted = heads_where(session, query, now)
        rows = [row for row in rows if row.id in wanted]
    shown = rows[:limit]
    configs = configs_of(session, [row.run_id for row in shown if row.run_id is not None])
    settings = _settings([configs.get(row.run_id or 0, {}) for row in shown])
    return Parallels(
        branches=tuple(ParallelBranch(row.name, row.uid, row.step, Status(row.status)) for row in shown),
        axes=(*settings, *_metrics(session, shown, taken)),
        total=total,
        matching=len(rows),
    )


def _settings(configs: Sequence[Mapping[str, Value]]) -> list[Axis]:
    keys = sorted({key for config in configs for key in config})
    axes = {key: _axis(key, AxisKind.SETTING, [config.get(key) for config in configs]) for key in keys}
    own = [axis for key, axis in axes.items() if not _is_twin(key, axis, axes)]
    return sorted(own, key=lambda axis: not axis.varies)


def _is_twin(key: str, axis: Axis, axes: Mapping[str, Axis]) -> bool:
    """Whether a setting such as ``optimizer.lr`` has the values of the one that the user named ``lr``."""
    _, dot, leaf = key.rpartition(".")
    return bool(dot) and leaf in axes and axes[leaf].values == axis.values


def _metrics(session: Session, rows: Sequence[Any], taken: Taken) -> list[Axis]:
    found: defaultdict[str, dict[int, float | None]] = defaultdict(dict)
    ids = [row.segment_id for row in rows if row.segment_id is not None]
    for some in batches(ids, _BATCH):
        for tally in session.execute(_TALLIES, {"ids": some}):
            found[tally.key][tally.segment_id] = _value(tally, taken)
    axes = []
    for key in by_relevance(found):
        values = [found[key].get(row.segment_id or 0) for row in rows]
        axes.append(_axis(key, AxisKind.METRIC, values, direction_of(key)))
    return axes


def _value(tally: Any, taken: Taken) -> float | None:
    best = tally.least if direction_of(tally.key) is Direction.MIN else tally.most
    value = tally.last if taken is Taken.LAST else best
    return float(value) if value is not None and math.isfinite(value) else None


def _axis(key: str, kind: AxisKind, values: Sequence[Value], direction: Direction | None = None) -> Axis:
    prefix = "config" if kind is AxisKind.SETTING else "metrics"
    distinct = {(type(value) is bool, value) for value in values if value == value}
    return Axis(f"{prefix}.{key}", kind, tuple(values), len(distinct) > 1, direction)


_BATCH = 500
_state, _ref, _segment, _stretch = (table(row) for row in (StateRow, RefRow, SegmentRow, StretchRow))
_HEADS = (
    select(_ref.c.name, _state.c.id, _state.c.uid, _state.c.step, _state.c.status, _state.c.run_id, _segment.c.id.label("segment_id"))
    .join_from(_ref, _state, _state.c.id == _ref.c.state_id)
    .outerjoin(_segment, _segment.c.branch == _ref.c.name)
    .where(_ref.c.kind == RefKind.BRANCH.value)
)
_TALLIES = select(_stretch.c.segment_id, _stretch.c.key, _stretch.c.last, _stretch.c.least, _stretch.c.most).where(
    _stretch.c.segment_id.in_(bindparam("ids", type_=BigInteger, expanding=True)), _stretch.c.place == WHOLE
)
