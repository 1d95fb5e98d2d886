"""What became of states of several parts: whole, given up, or neither yet."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sqlalchemy import BindParameter, and_, bindparam, or_, select

from datastates.lineage.change.awaited import WHYS
from datastates.lineage.lookup import states
from datastates.lineage.schema import PartRow, StateRow, table
from datastates.lineage.states import GivenUp, State, Why

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

__all__ = ["Outcome", "outcomes"]

_BATCH = 500  # uids in one IN list


@dataclass(frozen=True, slots=True)
class Outcome:
    """A state that waits no longer: the whole one, with the digests of its parents, or why there is none."""

    uid: str
    state: State | None = None
    parent_digests: tuple[str, ...] = ()
    given_up: GivenUp | None = None


def outcomes(session: Session, asked: Mapping[str, int]) -> tuple[dict[str, Outcome], list[str]]:
    """What became of these states, by uid in the order of ``asked``, and of which of them the lineage has not even the part of this rank.

    Those that wait are in neither.
    """
    uids = list(asked)
    found: dict[str, Outcome] = {}
    forgotten: list[str] = []
    for start in range(0, len(uids), _BATCH):
        batch = uids[start : start + _BATCH]
        ids = {row.uid: row.id for row in session.execute(_IDS, {"uids": batch})}
        whole = dict(zip(ids, states(session, list(ids.values())), strict=True)) if ids else {}
        digests = _digests(session, {parent for each in whole.values() for parent in each.parents})
        rows = _rows(session, [uid for uid in batch if uid not in ids], set(asked.values()))
        for uid in batch:
            of_it = rows.get(uid, [])
            ended = next((row for row in of_it if row.status in WHYS), None)
            if uid in whole:
                state = whole[uid]
                found[uid] = Outcome(uid, state, tuple(digests[parent] for parent in state.parents))
            elif ended is not None:
                reason = json.loads(ended.said)["reason"]
                found[uid] = Outcome(uid, given_up=GivenUp(uid, ended.rank, Why(ended.status), reason))
            elif not any(row.rank == asked[uid] for row in of_it):
                forgotten.append(uid)
    return found, forgotten


def _rows(session: Session, uids: list[str], ranks: Collection[int]) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for row in session.execute(_ROWS, {"uids": uids, "ranks": list(ranks)}) if uids else ():
        found.setdefault(row.state_uid, []).append(row)
    return found


def _digests(session: Session, uids: Collection[str]) -> dict[str, str]:
    return {row.uid: row.digest for row in session.execute(_DIGESTS, {"uids": list(uids)})} if uids else {}


_state, _part = table(StateRow), table(PartRow)
_uids: BindParameter[Any] = bindparam("uids", expanding=True)
_IDS = select(_state.c.uid, _state.c.id).where(_state.c.uid.in_(_uids))
_DIGESTS = select(_state.c.uid, _state.c.digest).where(_state.c.uid.in_(_uids))
_ROWS = select(_part.c.state_uid, _part.c.rank, _part.c.status, _part.c.said).where(
    _part.c.state_uid.in_(_uids),
    and_(_part.c.rank >= 0, or_(_part.c.rank.in_(bindparam("ranks", expanding=True)), _part.c.status.in_(WHYS))),
)
