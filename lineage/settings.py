"""The settings of runs: the part of their configuration that somebody chose, one row for each value."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from sqlalchemy import BigInteger, bindparam, delete, insert, select

from datastates.system import masking

from .batches import batches
from .schema import SettingRow, table
from .states import OURS, Value
from .typed import columns_of, value_of

if TYPE_CHECKING:
    from sqlalchemy import Connection

__all__ = ["keep", "of_runs", "shown"]

_BATCH = 1000  # ids in one IN list


def keep(connection: Connection, run_id: int, config: Mapping[str, Value], *, replaces: bool = False) -> None:
    """Record the settings of a run, secrets masked. ``replaces``: in place of those that it has."""
    if replaces:
        connection.execute(delete(_setting).where(_setting.c.run_id == run_id))
    rows = [{"run_id": run_id, **columns_of(key, value, "setting")} for key, value in shown(config).items()]
    if rows:
        connection.execute(_KEEP, rows)


def shown(config: Mapping[str, Value]) -> dict[str, Value]:
    """The part of a configuration that is kept: what somebody chose, with secrets masked."""
    return masking.named({key: value for key, value in config.items() if not key.startswith(OURS)})


def of_runs(connection: Connection, ids: Iterable[int]) -> dict[int, dict[str, Value]]:
    """The settings of runs by row id, each in alphabetical order; runs without any are left out."""
    found: defaultdict[int, dict[str, Value]] = defaultdict(dict)
    for some in batches(sorted(set(ids)), _BATCH):
        for id_, key, type_, number, text in connection.execute(_OF_RUNS, {"ids": some}).all():
            found[id_][key] = value_of(type_, number, text)
    return {id_: masking.named(chosen) for id_, chosen in found.items()}


_setting = table(SettingRow)
_KEEP = insert(_setting)
_OF_RUNS = (
    select(_setting.c.run_id, _setting.c.key, _setting.c.type, _setting.c.number, _setting.c.text)
    .where(_setting.c.run_id.in_(bindparam("ids", type_=BigInteger, expanding=True)))
    .order_by(_setting.c.run_id, _setting.c.key)
)
