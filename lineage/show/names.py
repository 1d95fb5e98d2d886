"""The names of all states at once, and which branch came first and so owns the states that several have in common."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sqlalchemy import bindparam, func, select

from datastates.lineage.batches import batches
from datastates.lineage.schema import RefEventRow, RefRow, StateRow, table
from datastates.lineage.states import Ref, RefKind

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

__all__ = ["TRUNKS", "Names", "names"]

TRUNKS = ("main", "master")
"""The names that make a branch the trunk of a history; the first of them that exists is it."""

_ref, _event, _state = table(RefRow), table(RefEventRow), table(StateRow)
_STAMP = select(
    select(func.coalesce(func.max(_event.c.id), 0)).scalar_subquery(),
    select(func.count()).select_from(_ref).scalar_subquery(),
    select(func.coalesce(func.sum(_ref.c.version), 0)).scalar_subquery(),
)
_REFS = select(_ref.c.name, _ref.c.kind, _ref.c.version, _ref.c.message, _ref.c.state_id, _state.c.uid).join_from(
    _ref, _state, _state.c.id == _ref.c.state_id
)
_BIRTHS = select(_event.c.name, func.min(_event.c.id)).where(_event.c.name.in_(bindparam("names", expanding=True))).group_by(_event.c.name)


@dataclass(frozen=True, slots=True)
class Names:
    """Branches and tags as they stand. ``stamp`` changes when one of them is created, moved or deleted.

    ``at`` has those of each state, by its row id, in order of name. ``branches`` are in order of their rank: the trunk, then the ones
    created first. ``ranks`` has the lowest rank among those that name a state. ``trunk`` is the row id of the trunk's state.
    """

    stamp: tuple[int, ...]
    at: Mapping[int, tuple[Ref, ...]]
    branches: tuple[str, ...]
    ranks: Mapping[int, int]
    trunk: int | None
    births: Mapping[str, int]


def names(session: Session, old: Names | None = None) -> Names:
    """The names as they stand for this session; ``old`` itself if nothing has changed since."""
    stamp = tuple(int(number) for number in session.execute(_STAMP).one())
    if old is not None and old.stamp == stamp:
        return old
    at: dict[int, list[Ref]] = {}
    states: dict[str, int] = {}
    for row in session.execute(_REFS):
        ref = Ref(row.name, RefKind(row.kind), row.uid, row.version, row.message)
        at.setdefault(int(row.state_id), []).append(ref)
        if ref.kind is RefKind.BRANCH:
            states[ref.name] = int(row.state_id)
    births = _births(session, states, {} if old is None else old.births)
    branches = sorted(states, key=lambda name: (TRUNKS.index(name) if name in TRUNKS else len(TRUNKS), births.get(name, 0), name))
    ranks: dict[int, int] = {}
    for rank, name in enumerate(branches):
        ranks.setdefault(states[name], rank)
    trunk = states[branches[0]] if branches and branches[0] in TRUNKS else None
    ordered = {id_: tuple(sorted(refs, key=lambda ref: ref.name)) for id_, refs in at.items()}
    return Names(stamp, ordered, tuple(branches), ranks, trunk, births)


def _births(session: Session, wanted: Mapping[str, int], known: Mapping[str, int]) -> dict[str, int]:
    """The first event of each branch; for known branches it is not read again."""
    found = {name: known[name] for name in wanted if name in known}
    missing = [name for name in wanted if name not in found]
    for some in batches(missing, 500):
        found.update((name, int(id_)) for name, id_ in session.execute(_BIRTHS, {"names": some}))
    return found
