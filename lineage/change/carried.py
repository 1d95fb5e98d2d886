"""Runs of other lineages, whose records arrive with states. Each record is kept once; nothing here changes it, and its process is not ours.

The uid of such a run is derived from its content. No peer can pass off one run as that of other states, or as one of our runs.
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
from datastates.lineage.states import Run, State
from datastates.lineage.typed import columns_of
from datastates.system import masking
from datastates.values import storable

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

__all__ = ["carry", "check"]

_UID_BYTES = 12


def carry(session: Session, states: Iterable[State], runs: Mapping[str, Run]) -> dict[str, str]:
    """Keep the runs of states that arrive; ``runs`` are those that came with the states, by uid. Returns the uid here, by the uid there."""
    wanted = {state.run for state in states if state.run in runs}
    rows = {uid: _row(runs[uid]) for uid in wanted if uid is not None}
    for uid, row in sorted(
        rows.items(), key=lambda item: str(item[1]["uid"])
    ):  # in one order, so that two writers never wait for each other
        connection = session.connection()
        connection.execute(_INSERT[connection.dialect.name], row)
        id_ = connection.execute(_ID, {"uid": row["uid"]}).one().id
        if not settings.of_runs(connection, [id_]):
            settings.keep(connection, id_, runs[uid].config)
    return {uid: str(row["uid"]) for uid, row in rows.items()}


def check(run: Run) -> None:
    """Raise unless the record of a run could be kept.

    :raises InvalidInput: a name or a value cannot be stored; the error names it.
    """
    for key, value in run.config.items():
        values.key(key, "the name of a setting")
        columns_of(key, value, "setting")


def _row(run: Run) -> dict[str, object]:
    row: dict[str, object] = {
        "host": storable(run.host),
        "user": storable(run.user),
        "argv": list(map(storable, masking.arguments(run.argv))),
        "git_commit": run.git_commit and storable(run.git_commit),
        "git_dirty": run.git_dirty,
        "versions": {storable(name): storable(version) for name, version in sorted(run.versions.items())},
        "started_at": to_us(run.started_at),
        "branch": run.branch and storable(run.branch),
    }
    said = json.dumps([*row.values(), sorted(settings.shown(run.config).items())], separators=(",", ":"))
    uid = blake2b(said.encode(), digest_size=_UID_BYTES, person=b"run").hexdigest()
    finished_at = None if run.finished_at is None else to_us(run.finished_at)
    return {**row, "uid": uid, "finished_at": finished_at, "pid": 0, "config": {}, "is_carried": True}


_run = table(RunRow)
_INSERT = {
    "sqlite": sqlite.insert(_run).on_conflict_do_nothing(),
    "postgresql": postgresql.insert(_run).on_conflict_do_nothing(),
}
_ID = select(_run.c.id).where(_run.c.uid == bindparam("uid"))
