"""The backup of an SQLite lineage: one file in the folder of packs, from which ``reindex`` rebuilds
a database that is lost.

``<packs>/lineage.backup`` is a database like ``lineage.db``, made by SQLite's online backup. It is
written under another name, synced and renamed, so a kill leaves the earlier backup whole. The time
of the file is the time of its last write to the lineage. All processes of a lineage share the file.
A lineage on PostgreSQL has none: ``pg_dump`` makes its backups.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
import time
from collections.abc import Iterable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from datastates.errors import Conflict, DatastatesError
from datastates.lineage.database import Database
from datastates.system.files import hold, make_regular, may_read, share, sync_folder
from datastates.system.threads import Latch

from .location import DATABASE, Location

_logger = logging.getLogger(__name__)

BACKUP = "lineage.backup"
"""The name of the backup in the folder of packs."""

_NEW = ".lineage.backup"
_TURN = ".backing-up"
_EVERY_S = 60.0
_PAUSE_FACTOR = 20
"""The pause after a backup is this many times as long as it took: one of 1 GB takes seconds."""

_PATIENCE_S = 10.0
_ASK_AGAIN_S = 0.02
_BEHIND = (
    "the lineage lacks what its backup has, because it was restored from an older copy: that backup"
    " stays, and no new one is made; `datastates repair --lineage --replace` adds what the lineage"
    " lacks"
)


def back_up(database: Database, location: Location, *, timeout_s: float = _PATIENCE_S) -> None:
    """Replace the backup by a copy of what the lineage has now, if it has more.

    Another process that makes the backup is waited for, for ``timeout_s``. Other transactions are
    not blocked.

    :raises OSError: the backup cannot be written; the earlier one stays.
    :raises DatastatesError: the lineage cannot be read, or lacks what the backup has.
    """
    packs, root = location.packs, location.root
    if root is None or database.read_only is not None or not packs.is_dir():
        return
    until = time.monotonic() + timeout_s
    while (turn := hold(packs / _TURN)) is None:
        if time.monotonic() > until:
            return
        time.sleep(_ASK_AGAIN_S)
    try:
        written_at = _written_at(root / DATABASE)
        if written_at == _written_at(packs / BACKUP):
            return
        with database.read() as session:
            source: Any = session.connection.dbapi_connection
            try:
                if is_behind(source, packs / BACKUP):
                    raise Conflict(_BEHIND)
                _copy(source, packs, written_at)
            except sqlite3.Error as exc:
                raise OSError(f"{packs / _NEW} cannot be written ({exc})") from exc
    finally:
        turn.close()


def _written_at(path: Path) -> int:
    """When a database or its log was written last, in ns; 0 if it is not there."""
    found = 0
    for file in (path, f"{path}-wal"):
        with suppress(OSError):
            found = max(found, os.stat(file).st_mtime_ns)
    return found


def _copy(source: sqlite3.Connection, packs: Path, written_at: int) -> None:
    new = packs / _NEW
    fd = make_regular(new)
    try:
        share(packs, fd)
        may_read(packs, fd)
        # a kill leaves a file that the next backup replaces, so SQLite needs neither log nor locks
        with closing(sqlite3.connect(f"{new.as_uri()}?vfs=unix-none", uri=True)) as target:
            target.execute("PRAGMA journal_mode=OFF")
            target.execute("PRAGMA synchronous=OFF")
            source.backup(target)
        os.utime(fd, ns=(written_at, written_at))
        os.fsync(fd)
        os.rename(new, packs / BACKUP)
    except BaseException:
        new.unlink(missing_ok=True)
        raise
    finally:
        os.close(fd)
    sync_folder(packs)


def open_read_only(path: Path) -> closing[sqlite3.Connection]:
    """A connection to a database to which no process writes; it makes no other files."""
    return closing(sqlite3.connect(f"{path.as_uri()}?immutable=1", uri=True))


def damage_of(path: Path) -> str | None:
    """Why a database to which no process writes cannot be used, in words; None if it is sound."""
    try:
        with open_read_only(path) as found:
            (said,) = found.execute("PRAGMA integrity_check(1)").fetchone()
            found.execute("SELECT uid FROM repository").fetchone()
    except sqlite3.Error as exc:
        return str(exc)
    return None if said == "ok" else str(said)


def is_behind(lineage: sqlite3.Connection, backup: Path) -> bool:
    """Whether a lineage lacks the newest state or the newest line of a tag that a sound backup has.

    (A training records states again, which an older copy lacks. The lines of branches are new
    then.)
    """
    if not backup.is_file():
        return False
    try:
        with open_read_only(backup) as found:
            newest = [(there, found.execute(query).fetchone()) for query, there in _NEWEST]
    except sqlite3.DatabaseError:
        return False  # a damaged one is replaced
    return any(
        row is not None and lineage.execute(there, row).fetchone() is None for there, row in newest
    )


_NEWEST = (
    (
        "SELECT uid FROM state ORDER BY id DESC LIMIT 1",
        "SELECT 1 FROM state WHERE uid = ?",
    ),
    (
        "SELECT name, created_at FROM ref_event WHERE kind = 'tag' ORDER BY id DESC LIMIT 1",
        "SELECT 1 FROM ref_event WHERE name = ? AND created_at = ?",
    ),
)
"""Queries on the backup, and whether the lineage has what they find."""


def unknown_to(backup: Path, uids: Iterable[str]) -> list[str]:
    """The states that a backup does not have; all of them if there is no sound backup."""
    known: set[str] = set()
    if backup.is_file():
        with suppress(sqlite3.Error), open_read_only(backup) as found:
            known.update(uid for (uid,) in found.execute("SELECT uid FROM state"))
    return [uid for uid in uids if uid not in known]


class Backups:
    """Makes backups while a process captures: at most one a minute, and one at the end.

    A failure is logged once. No capture waits for a backup, and no error reaches a training.
    """

    def __init__(self, database: Database, location: Location) -> None:
        self._database, self._location = database, location
        self._ends = Latch()
        self._said = ""
        self._thread = threading.Thread(target=self._run, name="datastates-backup", daemon=True)
        self._thread.start()

    def close(self, timeout_s: float | None = None) -> None:
        """Make the last backup, and end the thread. If the folder stalls, wait for at most
        ``timeout_s``, which is ten seconds if it is None."""
        self._ends.set()
        self._thread.join(_PATIENCE_S if timeout_s is None else timeout_s)

    def _run(self) -> None:
        pause_s = _EVERY_S
        while not self._ends.wait(pause_s):
            began = time.monotonic()
            self._back_up(0.0)
            pause_s = max(_EVERY_S, _PAUSE_FACTOR * (time.monotonic() - began))
        self._back_up(_PATIENCE_S)

    def _back_up(self, timeout_s: float) -> None:
        try:
            back_up(self._database, self._location, timeout_s=timeout_s)
        except (DatastatesError, OSError) as exc:
            if str(exc) != self._said:
                self._said = str(exc)
                _logger.warning("the lineage is not backed up: %s", exc)
        except Exception:  # a defect of ours here must not end a training
            _logger.exception("the lineage is not backed up")
