"""The names of all states at once, and which branch came first and so owns the states that several have in common."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sqlalchemy import BigInteger, Select, bindparam, func, select

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
_SOME_REFS = _REFS.where(_ref.c.name.in_(bindparam("names", expanding=True)))
_FEW = 100
_CHANGED = select(_event.c.name).distinct().where(_event.c.id > bindparam("last", type_=BigInteger)).limit(_FEW + 1)
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
    found = None if old is None else _moved(session, old, stamp)
    if found is None:
        found = _read(session, _REFS, {})
    states = {name: id_ for name, (id_, ref) in found.items() if ref.kind is RefKind.BRANCH}
    births = _births(session, states, {} if old is None else old.births)
    branches = sorted(states, key=lambda name: (TRUNKS.index(name) if name in TRUNKS else len(TRUNKS), births.get(name, 0), name))
    ranks: dict[int, int] = {}
    for rank, name in enumerate(branches):
        ranks.setdefault(states[name], rank)
    trunk = states[branches[0]] if branches and branches[0] in TRUNKS else None
    at: dict[int, list[Ref]] = {}
    for _, (id_, ref) in sorted(found.items()):
        at.setdefault(id_, []).append(ref)
    return Names(stamp, {id_: tuple(refs) for id_, refs in at.items()}, tuple(branches), ranks, trunk, births)


_Found = dict[str, tuple[int, Ref]]
"""Refs, with the row ids of their states, by name."""


def _moved(session: Session, old: Names, stamp: tuple[int, ...]) -> _Found | None:
    """``old`` with the names of later events read again; None if that does not make what ``stamp`` says, as when an event was late."""
    changed = session.execute(_CHANGED, {"last": old.stamp[0]}).scalars().all()
    if len(changed) > _FEW:
        return None
    found = {ref.name: (id_, ref) for id_, refs in old.at.items() for ref in refs}
    for name in changed:
        found.pop(name, None)
    found.update(_read(session, _SOME_REFS, {"names": changed}))
    return found if stamp[1:] == (len(found), sum(ref.version for _, ref in found.values())) else None


def _read(session: Session, statement: Select[Any], values: Mapping[str, object]) -> _Found:
    rows = session.execute(statement, values)
    return {row.name: (int(row.state_id), Ref(row.name, RefKind(row.kind), row.uid, row.version, row.message)) for row in rows}


def _births(session: Session, wanted: Mapping[str, int], known: Mapping[str, int]) -> dict[str, int]:
    """The first event of each branch; for known branches it is not read again."""
    found = {name: known[name] for name in wanted if name in known}
    missing = [name for name in wanted if name not in found]
    for some in batches(missing, 500):
        found.update((name, int(id_)) for name, id_ in session.execute(_BIRTHS, {"names": some}))
    return found
