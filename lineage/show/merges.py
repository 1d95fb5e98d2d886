"""Merged states, with their parents and the weight of each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

import msgspec
from sqlalchemy import bindparam, select

from datastates.errors import InvalidInput
from datastates.lineage.batches import batches
from datastates.lineage.lookup import id_of, states
from datastates.lineage.schema import EdgeRow, RefRow, StateRow, table
from datastates.lineage.states import EdgeKind, State, Status

from .origins import branches_of
from .relevance import by_relevance

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

__all__ = ["Ingredient", "Merge", "Merges", "merges"]

_KINDS = (EdgeKind.MERGE.value, EdgeKind.SOUP.value)


@dataclass(frozen=True, slots=True)
class Ingredient:
    """A parent of a merged state. ``branch`` captured it; ``weight`` is its share, None if none was recorded."""

    state: str
    step: int
    status: Status
    branch: str | None
    weight: float | None
    value: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Merge:
    """One merged state. ``method`` is that of ``Repository.merge``; ``refs`` are its names."""

    state: str
    step: int
    status: Status
    kind: EdgeKind
    method: str | None
    created_at: datetime
    message: str | None
    refs: tuple[str, ...]
    value: float | None
    parents: tuple[Ingredient, ...]


@dataclass(frozen=True, slots=True)
class Merges:
    """Some merged states, the newest first. ``next`` continues ``after`` the last of them. ``values`` are of ``metric``."""

    items: tuple[Merge, ...]
    next: str | None
    metric: str | None


def merges(session: Session, *, metric: str | None = None, after: str | None = None, limit: int = 50) -> Merges:
    """The merged states, the newest first; without ``metric`` it is the most relevant one that they or their parents have.

    :raises NotFound: there is no state ``after``.
    """
    if limit < 1:
        raise InvalidInput(f"limit is {limit}: a page has at least one merge")
    before = None if after is None else id_of(session, after)
    wanted = _NEWEST if before is None else _NEWEST.where(_edge.c.child_id < before)
    ids = list(session.execute(wanted.limit(limit + 1)).scalars())
    made = states(session, ids[:limit])
    parents = {state.uid: state for state in _by_uid(session, sorted({uid for state in made for uid in state.parents}))}
    if metric is None:
        known = by_relevance(key for state in (*made, *parents.values()) for key in state.metrics)
        metric = next(iter(known), None)
    origins = branches_of(session, list(parents))
    names = _names(session, [state.uid for state in made])
    items = tuple(_merge(state, parents, origins, names.get(state.uid, ()), metric) for state in made)
    return Merges(items, items[-1].state if len(ids) > limit else None, metric)


def _merge(state: State, parents: dict[str, State], origins: dict[str, str], refs: Sequence[str], metric: str | None) -> Merge:
    weights = _weights(state)
    members = [
        Ingredient(uid, parents[uid].step, parents[uid].status, origins.get(uid), weight, _value(parents[uid], metric))
        for uid, weight in zip(state.parents, weights, strict=True)
        if uid in parents
    ]
    method = state.attributes.get("merge.method")
    return Merge(
        state=state.uid,
        step=state.step,
        status=state.status,
        kind=next((edge.kind for edge in state.edges if edge.kind.value in _KINDS), EdgeKind.MERGE),
        method=None if method is None else str(method),
        created_at=state.created_at,
        message=state.message,
        refs=tuple(refs),
        value=_value(state, metric),
        parents=tuple(members),
    )


def _weights(state: State) -> list[float | None]:
    """The weight of each parent, the first parent's first: from the recipe, else from the edges, where the first parent has none."""
    try:
        recorded = msgspec.json.decode(str(state.attributes.get("merge.weights")), type=list[float])
    except msgspec.MsgspecError:
        recorded = []
    if len(recorded) == len(state.parents):
        return [*recorded]
    edges = {edge.parent: edge.weight for edge in state.edges}
    return [edges.get(uid) for uid in state.parents]


def _value(state: State, metric: str | None) -> float | None:
    value = state.metrics.get(metric or "")
    return value if value is not None and math.isfinite(value) else None


def _by_uid(session: Session, uids: Sequence[str]) -> list[State]:
    found: list[State] = []
    for some in batches(uids, _BATCH):
        found += states(session, list(session.execute(_IDS, {"uids": some}).scalars()))
    return found


def _names(session: Session, uids: Sequence[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for uid, name in session.execute(_REFS, {"uids": list(uids)}):
        found.setdefault(uid, []).append(name)
    return found


_BATCH = 500
_edge, _state, _ref = table(EdgeRow), table(StateRow), table(RefRow)
_NEWEST = select(_edge.c.child_id).where(_edge.c.kind.in_(_KINDS)).group_by(_edge.c.child_id).order_by(_edge.c.child_id.desc())
_IDS = select(_state.c.id).where(_state.c.uid.in_(bindparam("uids", expanding=True)))
_REFS = (
    select(_state.c.uid, _ref.c.name)
    .join_from(_ref, _state, _state.c.id == _ref.c.state_id)
    .where(_state.c.uid.in_(bindparam("uids", expanding=True)))
    .order_by(_ref.c.name)
)
