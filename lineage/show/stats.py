"""The content of a lineage in numbers. Most are counted anew each time: some tens of milliseconds for 100,000 states."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sqlalchemy import ColumnElement, Select, func, select

from datastates.lineage.change.runs import counted
from datastates.lineage.lookup import states
from datastates.lineage.schema import AttributeRow, MetricRow, RefRow, RunRow, SettingRow, StateRow, table
from datastates.lineage.states import RefKind, State, Status

from .holdings import Held, held
from .keys import keys_of

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

__all__ = ["Counts", "KeyStats", "count", "newest"]

_state, _metric, _attribute, _setting, _run, _ref = (table(row) for row in (StateRow, MetricRow, AttributeRow, SettingRow, RunRow, RefRow))

# One scan of the table, without sorting.
_STATUSES = select(*(func.count().filter(_state.c.status == status.value).label(status.value) for status in Status)).select_from(_state)
_REFS = select(_ref.c.kind, func.count()).group_by(_ref.c.kind)
_NEWEST = select(_state.c.id).order_by(_state.c.id.desc()).limit(1)


@dataclass(frozen=True, slots=True)
class KeyStats:
    """One metric: how many states have it, and its least and greatest value; None where all are NaN."""

    key: str
    count: int
    least: float | None
    most: float | None


@dataclass(frozen=True, slots=True)
class Counts:
    """What a lineage holds. ``statuses`` counts the states of each; keys are those that a query or a column may name.

    ``config`` has the keys of the configurations of runs; ``tiers`` say where the bytes are.
    """

    states: int
    statuses: dict[str, int]
    branches: int
    tags: int
    runs: int
    metrics: tuple[KeyStats, ...]
    attributes: tuple[str, ...]
    config: tuple[str, ...]
    tiers: tuple[Held, ...]


def count(session: Session) -> Counts:
    """Count everything, in about ten queries."""
    statuses = {str(status): int(number) for status, number in session.execute(_STATUSES).one()._mapping.items() if number}
    refs = {str(kind): int(number) for kind, number in session.execute(_REFS)}
    return Counts(
        states=sum(statuses.values()),
        statuses=dict(sorted(statuses.items())),
        branches=refs.get(RefKind.BRANCH.value, 0),
        tags=refs.get(RefKind.TAG.value, 0),
        runs=session.execute(select(func.count()).select_from(_run).where(counted())).scalar_one(),
        metrics=tuple(sorted((KeyStats(*row) for row in session.execute(_ranges())), key=lambda one: one.key)),
        attributes=tuple(sorted(key for key in session.execute(select(keys_of(_attribute).c.key)).scalars() if key is not None)),
        config=tuple(sorted(key for key in session.execute(select(keys_of(_setting).c.key)).scalars() if key is not None)),
        tiers=held(session),
    )


def newest(session: Session) -> State | None:
    """The state that was recorded last."""
    found = session.execute(_NEWEST).scalar()
    return None if found is None else states(session, [found])[0]


def _ranges() -> Select[Any]:
    """The range and count of each key, along the index of keys and values: least and most cost a look-up each, the count reads the key's
    part."""
    keys = keys_of(_metric)

    def of(number: ColumnElement[Any]) -> ColumnElement[Any]:
        return select(number).where(_metric.c.key == keys.c.key).correlate(keys).scalar_subquery()

    wanted = of(func.count()), of(func.min(_metric.c.value)), of(func.max(_metric.c.value))
    return select(keys.c.key, *wanted).where(keys.c.key.is_not(None))
