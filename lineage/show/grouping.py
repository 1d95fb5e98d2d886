"""What branches are grouped by: a study, a setting of a run, an attribute."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from sqlalchemy import BigInteger, bindparam, select

from datastates.errors import InvalidInput
from datastates.lineage import settings
from datastates.lineage.batches import batches
from datastates.lineage.schema import AttributeRow, StateRow, table
from datastates.lineage.states import Value

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

__all__ = ["attributes_of", "configs_of", "groups_of", "runs_of"]

_BATCH = 500


def groups_of(session: Session, group: str, made_by: Mapping[int, int | None]) -> dict[int, Value]:
    """The value of ``study``, ``config.KEY`` or ``attr.KEY`` for each state, by row id; states without one are left out.

    :param made_by: the states, and the row id of the run of each.
    :raises InvalidInput: ``group`` is none of these.
    """
    kind, _, key = group.partition(".")
    if group == "study":
        kind, key = "attr", "study"
    if kind == "attr" and key:
        return attributes_of(session, list(made_by), key)
    if kind == "config" and key:
        configs = configs_of(session, [run for run in made_by.values() if run is not None])
        return {state: configs[run][key] for state, run in made_by.items() if run is not None and key in configs.get(run, {})}
    raise InvalidInput(f"branches cannot be grouped by {group!r}: name 'study', 'config.KEY' or 'attr.KEY'")


def configs_of(session: Session, ids: Sequence[int]) -> dict[int, dict[str, Value]]:
    """The chosen settings of runs, by row id."""
    return settings.of_runs(session.connection(), ids)


def attributes_of(session: Session, ids: Sequence[int], key: str) -> dict[int, Value]:
    """One attribute of states, by row id."""
    found: dict[int, Value] = {}
    for some in batches(ids, _BATCH):
        rows = session.execute(_ATTRIBUTES, {"ids": some, "of": key})
        found.update({row.state_id: row.text if row.type == "str" else row.number for row in rows})
    return found


def runs_of(session: Session, ids: Sequence[int]) -> dict[int, int | None]:
    """The row ids of the runs that captured states."""
    found: dict[int, int | None] = {}
    for some in batches(ids, _BATCH):
        found.update({row.id: row.run_id for row in session.execute(_RUNS, {"ids": some})})
    return found


_attribute, _state = table(AttributeRow), table(StateRow)
_ids = bindparam("ids", type_=BigInteger, expanding=True)
_ATTRIBUTES = select(_attribute.c.state_id, _attribute.c.type, _attribute.c.number, _attribute.c.text).where(
    _attribute.c.state_id.in_(_ids), _attribute.c.key == bindparam("of")
)
_RUNS = select(_state.c.id, _state.c.run_id).where(_state.c.id.in_(_ids))
