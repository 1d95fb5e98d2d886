"""Seals: a digest of what the chunks of a state held when it was first exported, imported or verified."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from sqlalchemy import bindparam, select
from sqlalchemy.dialects import postgresql, sqlite

from datastates.errors import Corrupt
from datastates.lineage.amendments import Amended, amend
from datastates.lineage.batches import batches
from datastates.lineage.schema import SealRow, StateRow, table

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

__all__ = ["check", "seal", "seals"]

_BATCH = 500  # uids in one IN list


def seals(session: Session, uids: Iterable[str]) -> dict[str, str]:
    """The seal of each of these states that has one."""
    found = dict[str, str]()
    for some in batches(list(uids), _BATCH):
        found.update((row.uid, row.digest) for row in session.execute(_SEALS, {"uids": some}))
    return found


def check(known: str | None, found: str, uid: str) -> None:
    """Raise unless a state's seal equals the known one, or none is known.

    :raises Corrupt: it differs.
    """
    if known is not None and known != found:
        raise Corrupt(
            f"state {uid} holds other bytes than when it was sealed ({found[:16]} now, {known[:16]} then), though their digests against "
            "rot agree: they were forged on purpose; restore another state, or bring this one again from where it is sound"
        )


def seal(session: Session, uid: str, digest: str) -> None:
    """Seal a state permanently.

    :raises Corrupt: it has another seal.
    """
    made: Any = session.execute(_INSERT[session.connection().dialect.name], {"held": uid, "digest": digest})
    if made.rowcount:
        amend(session, Amended.SEAL, [uid])
    check(seals(session, [uid]).get(uid), digest, uid)


_seal, _state = table(SealRow), table(StateRow)
_SEALS = (
    select(_state.c.uid, _seal.c.digest)
    .join_from(_seal, _state, _state.c.id == _seal.c.state_id)
    .where(_state.c.uid.in_(bindparam("uids", expanding=True)))
)
_HELD = select(_state.c.id, bindparam("digest", type_=_seal.c.digest.type)).where(_state.c.uid == bindparam("held"))
_INSERT = {
    name: make(_seal).from_select(["state_id", "digest"], _HELD).on_conflict_do_nothing()
    for name, make in (("sqlite", sqlite.insert), ("postgresql", postgresql.insert))
}
