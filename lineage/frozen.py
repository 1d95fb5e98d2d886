"""A SQLite file that may not be written: a read-only file system, a snapshot, another user's.

SQLite itself wants to write beside a file that it only reads, if that file uses a write-ahead log. So a file with a log and its index is
read with both, and a file without a log is read as it is. A log without an index, or a schema of an older version, is read from a copy of
our own.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import tempfile
from contextlib import closing
from pathlib import Path

from datastates.errors import Unavailable

__all__ = ["Frozen", "why_frozen"]


def why_frozen(path: Path) -> str | None:
    """The reason, in words, why a SQLite file, or the folder that holds its log, cannot be written; None if both can."""
    is_effective = os.access in os.supports_effective_ids
    for place, wanted in ((path, os.W_OK), (path.parent, os.W_OK | os.X_OK)):
        if not os.access(place, wanted, effective_ids=is_effective):
            return f"{place} may not be written by this process"
    return None


class Frozen:
    """A file that may not be written. After ``has_changed`` returns True, new connections see what others wrote meanwhile."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._copy: tempfile.TemporaryDirectory[str] | None = None
        self._stamp: object = None

    def connect(self, timeout_s: float) -> sqlite3.Connection:
        """A new connection to the readable form of the file, for any thread, without the driver's own transactions."""
        log, index = Path(f"{self._path}-wal"), Path(f"{self._path}-shm")
        if self._copy is None and _size(log) and not index.exists():
            self.take_copy()
        if self._copy is not None:
            return self._connect(str(Path(self._copy.name, self._path.name)), timeout_s)
        self._stamp = self._now()
        mode = "mode=ro" if _size(log) else "immutable=1"
        return self._connect(f"{self._path.as_uri()}?{mode}", timeout_s)

    def has_changed(self) -> bool:
        """Whether connections that were made earlier may see an outdated file. A copy that is outdated is dropped."""
        is_changed = self._stamp is not None and self._stamp != self._now()
        if is_changed:
            self.close()
        return is_changed

    def take_copy(self, *, follows: bool = False) -> None:
        """From here on read, and migrate or change, a copy of our own; with ``follows`` only until the file changes.

        :raises Unavailable: there is no room for it.
        """
        if self._copy is not None:
            return
        copy = tempfile.TemporaryDirectory(prefix="datastates-", ignore_cleanup_errors=True)
        try:
            log = Path(f"{self._path}-wal")
            if _size(log) and Path(f"{self._path}-shm").exists():  # somebody may write it now: SQLite copies one snapshot
                with closing(self.connect(60.0)) as source, closing(sqlite3.connect(Path(copy.name, self._path.name))) as target:
                    source.backup(target)
            else:
                for path in filter(Path.exists, (self._path, log)):
                    shutil.copyfile(path, Path(copy.name, path.name))
        except (OSError, sqlite3.Error) as error:
            copy.cleanup()
            raise Unavailable(
                f"{self._path} can only be read from a copy, which was not made in {copy.name} ({error}): set TMPDIR to where there is room"
            ) from error
        self._copy = copy
        self._stamp = self._now() if follows else None

    def close(self) -> None:
        """Delete the copy."""
        copy, self._copy = self._copy, None
        if copy is not None:
            copy.cleanup()

    def _connect(self, name: str, timeout_s: float) -> sqlite3.Connection:
        return sqlite3.connect(name, timeout=timeout_s, isolation_level=None, check_same_thread=False, uri=name.startswith("file:"))

    def _now(self) -> object:
        """What identifies the file's present content; constant for a file that is read with its log: SQLite follows it by itself."""
        log = Path(f"{self._path}-wal")
        if _size(log) and self._copy is None:
            return "logged"
        return [(one.st_ino, one.st_mtime_ns, one.st_size) for one in (path.stat() for path in (self._path, log) if path.exists())]


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
