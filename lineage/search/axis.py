"""What curves are drawn over: steps, the time at which states were captured, or the epoch that a training recorded."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import TYPE_CHECKING

from sqlalchemy import BigInteger, bindparam, func, select

from datastates.lineage.batches import batches
from datastates.lineage.schema import AttributeRow, MetricRow, SegmentRow, StateRow, table

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

__all__ = ["EPOCH", "Axis", "along", "began"]

EPOCH = "epoch"
"""The metric, or else the attribute, that says in which epoch a state was captured."""

_BATCH = 1000


class Axis(StrEnum):
    """The quantity on the horizontal axis of a curve."""

    STEP = "step"
    TIME = "time"
    EPOCH = "epoch"


def along(session: Session, ids: Sequence[int], axis: Axis) -> list[float | None]:
    """The positions of states, by row id and in the order of ``ids``: seconds since 1970, or epochs, or None; nothing for steps."""
    if axis is Axis.STEP:
        return []
    found: dict[int, float | None] = {}
    wanted = sorted(set(ids))
    for batch in batches(wanted, _BATCH):
        some = {"ids": batch}
        if axis is Axis.TIME:
            found.update((row.id, row.created_at / 1e6) for row in session.execute(_TIMES, some))
        else:  # metrics last: a measured value overrides a noted one
            found.update((row.state_id, row.number) for row in session.execute(_NOTED, some))
            found.update((row.state_id, row.value) for row in session.execute(_MEASURED, some))
    return [found.get(id_) for id_ in ids]


def began(session: Session, id_: int) -> float:
    """When the branch of ``id_``, a row id, began after its fork, or at its root: in seconds since 1970."""
    return int(session.execute(_BEGAN, {"id": id_}).scalar_one()) / 1e6


_state, _metric, _attribute, _segment = table(StateRow), table(MetricRow), table(AttributeRow), table(SegmentRow)
_first = _state.alias("first")
_BEGAN = (
    select(func.coalesce(_first.c.created_at, _state.c.created_at))
    .outerjoin_from(_state, _segment, _segment.c.id == _state.c.segment_id)
    .outerjoin(_first, _first.c.id == _segment.c.first_id)
    .where(_state.c.id == bindparam("id", type_=BigInteger))
)
_ids = bindparam("ids", type_=BigInteger, expanding=True)
_TIMES = select(_state.c.id, _state.c.created_at).where(_state.c.id.in_(_ids))
_MEASURED = select(_metric.c.state_id, _metric.c.value).where(_metric.c.state_id.in_(_ids), _metric.c.key == EPOCH)
_NOTED = select(_attribute.c.state_id, _attribute.c.number).where(_attribute.c.state_id.in_(_ids), _attribute.c.key == EPOCH)
