"""The configuration that a state was trained with, since when it holds, and what was different before."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from sqlalchemy import BigInteger, bindparam, select

from datastates.lineage import settings
from datastates.lineage.lookup import id_of, states
from datastates.lineage.schema import StateRow, table
from datastates.lineage.search.walk import first_parents
from datastates.lineage.states import State, Value

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

__all__ = ["Configured", "changes", "configured"]

_PAGE = 1000
_state = table(StateRow)
_RUNS = select(_state.c.id, _state.c.run_id).where(_state.c.id.in_(bindparam("ids", type_=BigInteger, expanding=True)))

Pair = tuple[Value, Value]
"""The old and the new value; None where there is none."""


@dataclass(frozen=True, slots=True)
class Configured:
    """``since`` is the oldest state, among this one and its first parents, from which on the configuration is the same. ``before`` is the
    one before that, with a different configuration; None if the path begins like this. ``changes`` lead from ``before`` to here."""

    state: State
    since: State
    before: State | None
    changes: Mapping[str, Pair]


def configured(session: Session, uid: str) -> Configured:
    """A state's configuration and its history; of its first parents only the runs are looked up."""
    start = since = id_of(session, uid)
    chosen: Mapping[str, Value] | None = None
    for id_, config in _configs(session, start):
        if chosen is None:
            chosen = config
        elif changes(config, chosen):
            here, oldest, before = states(session, [start, since, id_])
            return Configured(here, oldest, before, changes(before.config, here.config))
        since = id_
    here, oldest = states(session, [start, since])
    return Configured(here, oldest, None, {})


def _configs(session: Session, start: int) -> Iterator[tuple[int, Mapping[str, Value]]]:
    """The configurations of a state and its first parents; each run's is read once."""
    known: dict[int | None, Mapping[str, Value]] = {None: {}}
    ids = (id_ for id_, _ in first_parents(session, start, 0))
    while page := list(islice(ids, _PAGE)):
        runs: dict[int, int | None] = {row[0]: row[1] for row in session.execute(_RUNS, {"ids": page})}
        missing = {run for run in runs.values() if run is not None and run not in known}
        found = settings.of_runs(session.connection(), missing)
        known.update({run: found.get(run, {}) for run in missing})
        yield from ((id_, known[runs[id_]]) for id_ in page)


def changes(old: Mapping[str, Value], new: Mapping[str, Value]) -> dict[str, Pair]:
    """The differences between two configurations, in alphabetical order."""
    return {
        key: (old.get(key), new.get(key))
        for key in sorted({*old, *new})
        if (type(old.get(key)), old.get(key), key in old) != (type(new.get(key)), new.get(key), key in new)
    }
