"""The states between one state and a descendant of it, and what can be read for all of them at once."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from sqlalchemy import BigInteger, bindparam, select

from datastates.lineage.schema import MetricRow, StateRow, table
from datastates.lineage.states import Status

from .walk import first_parents

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy.orm import Session

__all__ = ["metric_along", "path_ids", "restorable_along"]

_state, _metric = table(StateRow), table(MetricRow)
_LOW, _HIGH = bindparam("low", type_=BigInteger), bindparam("high", type_=BigInteger)
_RESTORABLE = select(_state.c.id).where(
    _state.c.id >= _LOW, _state.c.id <= _HIGH, _state.c.status.in_([status.value for status in Status if status.is_restorable])
)
_VALUES = select(_metric.c.state_id, _metric.c.value).where(
    _metric.c.key == bindparam("key"), _metric.c.state_id >= _LOW, _metric.c.state_id <= _HIGH
)


def path_ids(session: Session, old: int, new: int) -> list[int]:
    """The row ids from ``old`` to ``new``, both included, oldest first: by first parents, and by a further one only where nothing else
    leads there.

    Empty where ``new`` does not descend from ``old``.
    """
    seen: set[int] = set()
    heads: list[tuple[int, list[int]]] = [(new, [])]  # where to continue, and what was passed on the way there, newest first
    while heads:
        start, passed = heads.pop(0)
        line: list[int] = []
        for id_, further in first_parents(session, start, old):
            if id_ in seen:
                break
            seen.add(id_)
            line.append(id_)
            if id_ == old:
                return [*passed, *line][::-1]
            heads.extend((parent, [*passed, *line]) for parent in further if parent >= old)
    return []


def restorable_along(session: Session, path: Sequence[int]) -> set[int]:
    """Those states of a path whose bytes some tier still holds."""
    return set(path) & set(session.execute(_RESTORABLE, {"low": path[0], "high": path[-1]}).scalars())


def metric_along(session: Session, path: Sequence[int], key: str) -> dict[int, float]:
    """The value of a metric for those states of a path that have it; NaN counts as one."""
    rows = session.execute(_VALUES, {"key": key, "low": path[0], "high": path[-1]})
    found = {id_: math.nan if value is None else float(value) for id_, value in rows}
    return {id_: found[id_] for id_ in path if id_ in found}
