"""What retention needs to know of durable states: pages of those in a folder of packs, and which of them something counts on."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from sqlalchemy import BigInteger, Select, bindparam, exists, func, select

from datastates.lineage.batches import batches
from datastates.lineage.schema import MetricRow, RefRow, ReplicaRow, RunRow, SegmentRow, StateRow, table

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

__all__ = ["Durable", "counted_on", "durable", "elsewhere", "segments_of", "told"]

_PAGE = 5000
_BATCH = 1000  # ids in one IN list

_state, _replica, _metric, _ref, _segment, _run = (table(row) for row in (StateRow, ReplicaRow, MetricRow, RefRow, SegmentRow, RunRow))


@dataclass(frozen=True, slots=True)
class Durable:
    """A state that a folder of packs holds, as the lineage records it. ``created_us`` is in microseconds since the epoch."""

    id: int
    uid: str
    segment: int
    generation: int
    step: int
    created_us: int
    world_size: int
    metrics: Mapping[str, float]


def durable(session: Session, *, tier: str, node: str, keys: Collection[str] = ()) -> Iterator[Durable]:
    """The states that a tier of a node holds, in the order of their row ids, read a page at a time; with the values of the metrics
    ``keys``, where those are numbers.
    """
    after, place = 0, {"on_tier": tier, "on_node": node}
    while rows := session.execute(_PAGES, {**place, "after": after}).all():
        metrics: defaultdict[int, dict[str, float]] = defaultdict(dict)
        for some in batches([row.id for row in rows], _BATCH) if keys else ():
            for state_id, key, value in session.execute(_METRICS, {"ids": some, "keys": list(keys)}):
                if value is not None:
                    metrics[state_id][key] = value
        for row in rows:
            yield Durable(*row, metrics.get(row.id, _NONE))
        after = rows[-1].id
        if len(rows) < _PAGE:
            return


def counted_on(session: Session, *, tier: str, node: str) -> dict[int, str]:
    """The states that a tier of a node holds, by row id, and that something counts on, with the reason.

    These are the states that names lead to, or their nearest first parent that is held there; and the states where branches forked.
    """
    place = {"on_tier": tier, "on_node": node}
    found: dict[int, str] = {}
    for branch, fork in session.execute(_FORKS):
        found[fork] = f"branch {branch!r} forks here"
    nearest = {row.start: row for row in session.execute(_nearest(), place)}
    for name, kind, state_id in session.execute(_NAMED):
        row = nearest.get(state_id)
        if row is not None:
            what = "the head of" if kind == "branch" else "what"
            leads = f"{kind} {name!r}" + ("" if kind == "branch" else " names")
            found[row.id] = f"{what} {leads}" if row.id == state_id else f"the newest durable state of {kind} {name!r}"
    return found


def elsewhere(session: Session, ids: Collection[int], *, volatile: Collection[str], holder: str) -> set[int]:
    """Those of these row ids whose states other processes than ``holder`` have in their ``volatile`` tiers."""
    found = set[int]()
    for some in batches(sorted(ids), _BATCH):
        found.update(session.execute(_ELSEWHERE, {"ids": some, "volatile": list(volatile), "own": holder}).scalars())
    return found


def segments_of(session: Session) -> dict[int, tuple[str, int | None]]:
    """For each segment that a branch has: the branch, and the state that it forked from, by row id."""
    return {row.id: (row.branch, row.fork_id) for row in session.execute(_SEGMENTS)}


def told(session: Session, key: str) -> dict[str, str]:
    """What the newest training of each branch noted under a key of ours, by branch; branches whose training noted nothing are left out."""
    found = ((branch, config.get(key)) for branch, config in session.execute(_NEWEST_RUNS))
    return {branch: str(value) for branch, value in found if value is not None}


_NONE: Mapping[str, float] = {}
_here = (_replica.c.tier == bindparam("on_tier"), _replica.c.node == bindparam("on_node"), _replica.c.status == "ok", _replica.c.rank == 0)
_PAGES = (
    select(
        *(_state.c.id, _state.c.uid, func.coalesce(_state.c.segment_id, 0), _state.c.generation, _state.c.step),
        *(_state.c.created_at, _state.c.world_size),
    )
    .join_from(_replica, _state, _state.c.id == _replica.c.state_id)
    .where(*_here, _replica.c.state_id > bindparam("after", type_=BigInteger))
    .order_by(_replica.c.state_id)
    .limit(_PAGE)
)
_METRICS = select(_metric.c.state_id, _metric.c.key, _metric.c.value).where(  # with a condition on values SQLite may walk all of a metric
    _metric.c.state_id.in_(bindparam("ids", type_=BigInteger, expanding=True)), _metric.c.key.in_(bindparam("keys", expanding=True))
)
_FORKS = select(_segment.c.branch, _segment.c.fork_id).where(_segment.c.branch.is_not(None), _segment.c.fork_id.is_not(None))
_NAMED = select(_ref.c.name, _ref.c.kind, _ref.c.state_id).order_by(_ref.c.kind.desc(), _ref.c.name)
_SEGMENTS = select(_segment.c.id, _segment.c.branch, _segment.c.fork_id).where(_segment.c.branch.is_not(None))
_ELSEWHERE = (
    select(_replica.c.state_id)
    .where(_replica.c.state_id.in_(bindparam("ids", type_=BigInteger, expanding=True)))
    .where(_replica.c.tier.in_(bindparam("volatile", expanding=True)), _replica.c.node != bindparam("own"))
)
_newest = select(func.max(_run.c.id).label("id")).where(_run.c.branch.is_not(None), _run.c.is_carried.is_(None)).group_by(_run.c.branch)
_NEWEST_RUNS = select(_run.c.branch, _run.c.config).where(_run.c.id.in_(_newest))


@cache
def _nearest() -> Select[Any]:
    """For each state that has a name: itself, or the nearest first parent that the tier of the node holds.

    Parents are older than their children, so the walk stops below the oldest state that is held.
    """
    next_, oldest = _state.alias("next"), select(func.min(_replica.c.state_id)).where(*_here).scalar_subquery()
    held = exists().where(*_here)
    start = select(
        _state.c.id.label("start"), _state.c.id, _state.c.parent_id, held.where(_replica.c.state_id == _state.c.id).label("here")
    )
    walk = start.where(_state.c.id.in_(select(_ref.c.state_id))).cte("nearest", recursive=True)
    is_held = held.where(_replica.c.state_id == next_.c.id).label("here")
    step = select(walk.c.start, next_.c.id, next_.c.parent_id, is_held).join_from(walk, next_, next_.c.id == walk.c.parent_id)
    walk = walk.union_all(step.where(~walk.c.here, next_.c.id >= oldest))
    return select(walk.c.start, walk.c.id).where(walk.c.here)
