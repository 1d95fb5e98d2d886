"""What became of states of several parts: complete, given up, or neither yet."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sqlalchemy import BindParameter, Select, bindparam, select

from datastates.lineage.batches import batches
from datastates.lineage.change.awaited import WHYS
from datastates.lineage.lookup import states
from datastates.lineage.schema import PartRow, StateRow, table
from datastates.lineage.states import GivenUp, State, Status, Why

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

__all__ = ["Outcome", "outcomes", "statuses_of"]

_BATCH = 500  # uids in one IN list


@dataclass(frozen=True, slots=True)
class Outcome:
    """A state that no longer waits: the complete state, with the digests of its parents, or the reason why there is none."""

    uid: str
    state: State | None = None
    parent_digests: tuple[str, ...] = ()
    given_up: GivenUp | None = None


def outcomes(session: Session, asked: Mapping[str, int]) -> tuple[dict[str, Outcome], list[str]]:
    """What became of these states, by uid in the order of ``asked``; and those for which the lineage does not even have this rank's part.

    States that wait are in neither.
    """
    found: dict[str, Outcome] = {}
    forgotten: list[str] = []
    for batch in batches(list(asked), _BATCH):
        ids = {row.uid: row.id for row in session.execute(_IDS, {"uids": batch})}
        whole = dict(zip(ids, states(session, list(ids.values())), strict=True)) if ids else {}
        digests = _digests(session, {parent for each in whole.values() for parent in each.parents})
        own = _rows(session, _OWN, [uid for uid in batch if uid not in ids], ranks={asked[uid] for uid in batch})
        told = {row.state_uid for row in own if row.status not in WHYS and row.rank == asked[row.state_uid]}
        untold = [uid for uid in batch if uid not in ids and uid not in told]
        ends = {row.state_uid: row for row in _rows(session, _ENDS, untold)}
        for uid in batch:
            ended = ends.get(uid)
            if uid in whole:
                state = whole[uid]
                found[uid] = Outcome(uid, state, tuple(digests[parent] for parent in state.parents))
            elif ended is not None:
                reason = json.loads(ended.said)["reason"]
                found[uid] = Outcome(uid, given_up=GivenUp(uid, ended.rank, Why(ended.status), reason))
            elif uid not in told:
                forgotten.append(uid)
    return found, forgotten


def statuses_of(session: Session, uids: Sequence[str]) -> dict[str, Status]:
    """The status of each of these states that exists."""
    return {row.uid: Status(row.status) for row in session.execute(_STATUSES, {"uids": list(uids)})} if uids else {}


def _rows(session: Session, query: Select[Any], uids: list[str], **bound: Collection[int]) -> list[Any]:
    return list(session.execute(query, {"uids": uids, **{name: list(values) for name, values in bound.items()}})) if uids else []


def _digests(session: Session, uids: Collection[str]) -> dict[str, str]:
    return {row.uid: row.digest for row in session.execute(_DIGESTS, {"uids": list(uids)})} if uids else {}


_state, _part = table(StateRow), table(PartRow)
_uids: BindParameter[Any] = bindparam("uids", expanding=True)
_IDS = select(_state.c.uid, _state.c.id).where(_state.c.uid.in_(_uids))
_STATUSES = select(_state.c.uid, _state.c.status).where(_state.c.uid.in_(_uids))
_DIGESTS = select(_state.c.uid, _state.c.digest).where(_state.c.uid.in_(_uids))
_rows_of = select(_part.c.state_uid, _part.c.rank, _part.c.status, _part.c.said).where(_part.c.state_uid.in_(_uids))
_OWN = _rows_of.where(_part.c.rank.in_(bindparam("ranks", expanding=True)))
_ENDS = _rows_of.where(_part.c.rank >= 0, _part.c.status.in_(WHYS))  # only this row is left of a state that was given up
