"""The folders of packs that a lineage knows, each by the uid stored in it, with where it was last seen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sqlalchemy import bindparam, select
from sqlalchemy.dialects import postgresql, sqlite

from datastates.lineage.lookup import id_of
from datastates.lineage.schema import FolderRow, ReplicaRow, table, to_us

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

__all__ = ["Folder", "at", "get", "note", "of_state"]


@dataclass(frozen=True, slots=True)
class Folder:
    """One folder of packs: the path and the host name where it was last seen, so that people can find it."""

    uid: str
    path: str
    host: str


def note(session: Session, uid: str, *, path: str, host: str) -> None:
    """Note where a folder was seen."""
    row = {"uid": uid, "path": path, "host": host, "seen_at": to_us(None)}
    session.execute(_UPSERT[session.get_bind().dialect.name], row)


def get(session: Session, uid: str) -> Folder | None:
    """The folder of this uid; None when it was never seen."""
    row = session.execute(_GET, {"wanted": uid}).first()
    return None if row is None else Folder(row.uid, row.path, row.host)


def at(session: Session, path: object) -> list[str]:
    """The uids of all folders that were last seen at a path."""
    return list(session.execute(_AT, {"seen": str(path)}).scalars())


def of_state(session: Session, uid: str) -> list[Folder]:
    """The folders that hold a state's bytes, as they were reported.

    :raises NotFound: there is no such state.
    """
    rows = session.execute(_OF_STATE, {"state": id_of(session, uid)})
    return [Folder(row.uid, row.path, row.host) for row in rows]


_folder, _replica = table(FolderRow), table(ReplicaRow)
_GET = select(_folder).where(_folder.c.uid == bindparam("wanted"))
_AT = select(_folder.c.uid).where(_folder.c.path == bindparam("seen"))
_OF_STATE = (
    select(_folder)
    .join_from(_folder, _replica, _replica.c.node == _folder.c.uid)
    .where(_replica.c.state_id == bindparam("state"))
    .order_by(_folder.c.uid)
)
_sqlite, _postgresql = sqlite.insert(_folder), postgresql.insert(_folder)
_SEEN = ("path", "host", "seen_at")
_UPSERT = {
    "sqlite": _sqlite.on_conflict_do_update(index_elements=["uid"], set_={name: _sqlite.excluded[name] for name in _SEEN}),
    "postgresql": _postgresql.on_conflict_do_update(index_elements=["uid"], set_={name: _postgresql.excluded[name] for name in _SEEN}),
}
