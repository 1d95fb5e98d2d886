"""Configurations that arrive with states of other lineages. Each is kept once, as a run of which nothing else is known.

The uid of that run is derived from its content, so that no peer can pass off one configuration as that of other states, or of our runs.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from hashlib import blake2b
from typing import TYPE_CHECKING

from sqlalchemy import bindparam, select
from sqlalchemy.dialects import postgresql, sqlite

from datastates import values
from datastates.lineage import settings
from datastates.lineage.schema import RunRow, table, to_us
from datastates.lineage.states import State, Value
from datastates.lineage.typed import columns_of

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

__all__ = ["carry", "check", "uid_of"]

_UID_BYTES = 12


def carry(session: Session, states: Iterable[State]) -> dict[str, str]:
    """Keep the configurations of states that arrive. Returns, by each state's uid, the uid to record its configuration under, if it has
    one."""
    seen: dict[int, str | None] = {}
    chosen: dict[str, dict[str, Value]] = {}
    runs: dict[str, str] = {}
    for state in states:
        key = id(state.config)  # thousands of states arrive with the same one
        if key not in seen:
            found = settings.shown(state.config)
            seen[key] = uid = uid_of(found) if found else None
            if uid is not None:
                chosen[uid] = found
        if (run := seen[key]) is not None:
            runs[state.uid] = run
    for uid in sorted(chosen):  # in one order, so that two writers never wait for each other
        _keep(session, uid, chosen[uid])
    return runs


def uid_of(config: Mapping[str, Value]) -> str:
    """The uid of a configuration: equal for equal values, and only for those."""
    said = json.dumps(sorted(config.items()), separators=(",", ":"))
    return blake2b(said.encode(), digest_size=_UID_BYTES, person=b"configuration").hexdigest()


def check(config: Mapping[str, Value]) -> None:
    """Raise unless a configuration could be kept.

    :raises InvalidInput: a name or a value cannot be stored; the error names it.
    """
    for key, value in config.items():
        values.key(key, "the name of a setting")
        columns_of(key, value, "setting")


def _keep(session: Session, uid: str, config: Mapping[str, Value]) -> None:
    connection = session.connection()
    now = to_us(None)
    connection.execute(_INSERT[connection.dialect.name], {"uid": uid, "started_at": now, "finished_at": now})
    row = connection.execute(_ID, {"uid": uid}).one()
    if not settings.of_runs(connection, [row.id]):
        settings.keep(connection, row.id, config)


_run = table(RunRow)
_NOTHING = {"host": "", "user": "", "pid": 0, "argv": [], "config": {}, "versions": {}, "is_carried": True}
_INSERT = {
    "sqlite": sqlite.insert(_run).values(**_NOTHING).on_conflict_do_nothing(),
    "postgresql": postgresql.insert(_run).values(**_NOTHING).on_conflict_do_nothing(),
}
_ID = select(_run.c.id).where(_run.c.uid == bindparam("uid"))
