"""Locks that show other processes that a SQLite file is in use, and that this process cannot lose
by accident.

SQLite's own locks belong to the process and the file. All of them vanish as soon as the process
closes any descriptor of the file, for example when it copies or uploads the folder. Another process
that opens the lineage then believes that it is alone. It empties the index of the log, and the next
read of that index kills this process by SIGBUS; or it removes the log, and what this process
commits is lost.

The locks here are shared locks on two bytes that SQLite locks before it does either ("How To
Corrupt An SQLite Database File", and the layout of locks in SQLite's ``os_unix.c``). They belong to
an open file description (``F_OFD_SETLK``) that no other code closes. They do not replace the locks
of a transaction that is under way while the copy is made.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import sqlite3
import struct
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from datastates.errors import Unavailable
from datastates.system.files import open_regular
from datastates.system.interrupts import Mutex

_SET = getattr(fcntl, "F_OFD_SETLK", None)
_FLOCK = "hhqqi4x"  # struct flock: type, whence, start, length, pid
# of the database: a process that wants the file alone locks all 510 bytes from here on
_SHARED = 0x4000_0002
_IN_USE = 128  # of the index of the log: a process that empties it locks this byte
_REFUSED = (errno.EAGAIN, errno.EACCES)  # the two errors that POSIX allows for a lock that is held
_PATIENCE_S = 10.0
_ASK_AGAIN_S = 0.01
_turn = Mutex()
_anchors: dict[tuple[int, int], _FileLocks] = {}


class _FileLocks:
    """The locks of this process on one file, counting their users.

    Its methods run one at a time."""

    def __init__(self, descriptors: list[int]) -> None:
        self.users = 0
        self.descriptors = descriptors

    def unlock(self) -> None:
        """Release the locks; the descriptors stay open."""
        for fd in self.descriptors:
            with suppress(OSError):
                _lock(fd, 0, fcntl.F_UNLCK, length=0)

    def close(self) -> None:
        """Close the descriptors. This also drops SQLite's locks of this process, so no connection
        may need them any more."""
        for fd in self.descriptors:
            os.close(fd)
        self.descriptors = []


def hold(path: Path) -> Callable[[Callable[[], None]], None]:
    """Hold the locks of a file that a connection of this process has open.

    The returned function closes that connection by calling its argument, and then releases the
    locks. It is called once, on any thread. If the kernel lacks such locks, it only closes.
    """
    key = _anchored(path)

    def close(end: Callable[[], None]) -> None:
        if key is None:
            end()
            return
        with _turn:
            anchor = _anchors.get(key)
            is_last = anchor is not None and anchor.users == 1
            if anchor is not None and is_last:
                anchor.unlock()  # SQLite's last connection may now tidy its file
            try:
                end()
            finally:
                if anchor is not None:
                    anchor.users -= 1
                    if is_last:
                        del _anchors[key]
                        anchor.close()

    return close


@contextmanager
def exclusive(path: Path) -> Iterator[bool]:
    """Whether no process, this one included, has the file open in SQLite, as far as can be seen.

    Until the block ends no process can open it: one that tries waits, and then finds what is at the
    path by then. Hold it only for moments.
    """
    with _turn:
        try:
            status = path.stat()
            is_ours = (status.st_dev, status.st_ino) in _anchors
            # closing a descriptor would release the locks of this process's own connections
            fd = (
                None
                if is_ours or _SET is None
                else open_regular(path, os.O_RDWR, may_have_links=True)
            )
        except OSError:  # not there, or not writable by us
            is_ours, fd = False, None
        if fd is None:
            yield not is_ours
            return
        try:
            yield _lock_alone(fd)
        finally:
            os.close(fd)


def _lock_alone(fd: int) -> bool:
    """Take the lock that keeps others away; returns whether no other process held one."""
    try:
        _lock(fd, _SHARED, fcntl.F_WRLCK)
    except OSError as exc:
        return exc.errno not in _REFUSED  # on a file system without such locks, leases must suffice
    return True


def _anchored(path: Path) -> tuple[int, int] | None:
    if _SET is None:
        return None
    with _turn:
        try:
            status = path.stat()
            key = (status.st_dev, status.st_ino)
            anchor = _anchors.get(key)
            if anchor is None:
                anchor = _anchors[key] = _FileLocks(_locked(path))
        except OSError:  # a file system without such locks: SQLite's own must suffice
            return None
        anchor.users += 1
        return key


def _locked(path: Path) -> list[int]:
    found: list[int] = []
    try:
        for name, start in ((path, _SHARED), (Path(f"{path}-shm"), _IN_USE)):
            found.append(open_regular(name))
            _lock_soon(found[-1], start)
    except BaseException:
        for fd in found:
            os.close(fd)
        raise
    return found


def _lock_soon(fd: int, start: int) -> None:
    """Take a shared lock, waiting if need be: a process that replaces the file holds the
    exclusive one only for moments."""
    until = time.monotonic() + _PATIENCE_S
    while True:
        try:
            return _lock(fd, start, fcntl.F_RDLCK)
        except OSError as exc:
            if exc.errno not in _REFUSED or time.monotonic() > until:
                raise
        time.sleep(_ASK_AGAIN_S)


def _lock(fd: int, start: int, kind: int, *, length: int = 1) -> None:
    assert _SET is not None
    fcntl.fcntl(fd, _SET, struct.pack(_FLOCK, kind, os.SEEK_SET, start, length, 0))


def _forget() -> None:
    """Forget all locks in a forked child: they belong to the parent, and the child uses none of its
    connections."""
    for anchor in _anchors.values():
        anchor.close()
    _anchors.clear()


os.register_at_fork(after_in_child=_forget)


# A SQLite file that may not be written: a read-only file system, a snapshot, another user's.


def why_read_only(path: Path) -> str | None:
    """The reason, in words, why a SQLite file, or the folder that holds its log, cannot be
    written; None if both can."""
    is_effective = os.access in os.supports_effective_ids
    for place, wanted in ((path, os.W_OK), (path.parent, os.W_OK | os.X_OK)):
        if not os.access(place, wanted, effective_ids=is_effective):
            return f"{place} may not be written by this process"
    return None


class ReadOnlyFile:
    """A file that may not be written.

    After ``has_changed`` returns True, new connections see what others wrote meanwhile."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._copy: tempfile.TemporaryDirectory[str] | None = None
        self._stamp: object = None

    def connect(self, timeout_s: float) -> sqlite3.Connection:
        """A new connection to the readable form of the file, for any thread, without the
        driver's own transactions."""
        log, index = Path(f"{self._path}-wal"), Path(f"{self._path}-shm")
        if self._copy is None and _size(log) and not index.exists():
            self.take_copy()
        if self._copy is not None:
            return _connect(str(Path(self._copy.name, self._path.name)), timeout_s)
        self._stamp = self._now()
        mode = "mode=ro" if _size(log) else "immutable=1"
        return _connect(f"{self._path.as_uri()}?{mode}", timeout_s)

    def has_changed(self) -> bool:
        """Whether connections that were made earlier may see an outdated file.

        A copy that is outdated is dropped."""
        is_changed = self._stamp is not None and self._stamp != self._now()
        if is_changed:
            self.close()
        return is_changed

    def take_copy(self, *, follows: bool = False) -> None:
        """From now on use a private copy, also for migrations and changes; with ``follows`` only
        until the file changes.

        :raises Unavailable: it cannot be made.
        """
        if self._copy is not None:
            return
        copy = tempfile.TemporaryDirectory(prefix="datastates-", ignore_cleanup_errors=True)
        try:
            log = Path(f"{self._path}-wal")
            if _size(log) and Path(f"{self._path}-shm").exists():
                # another process may write it now; SQLite copies one snapshot
                with (
                    closing(self.connect(60.0)) as source,
                    closing(sqlite3.connect(Path(copy.name, self._path.name))) as target,
                ):
                    source.backup(target)
            else:
                for path in filter(Path.exists, (self._path, log)):
                    shutil.copyfile(path, Path(copy.name, path.name))
        except (OSError, sqlite3.Error) as error:
            copy.cleanup()
            raise Unavailable(
                f"{self._path} can only be read from a copy, which was not made in {copy.name}"
                f" ({error}): set TMPDIR to a folder with free space"
            ) from error
        self._copy = copy
        self._stamp = self._now() if follows else None

    def close(self) -> None:
        """Delete the copy."""
        copy, self._copy = self._copy, None
        if copy is not None:
            copy.cleanup()

    def _now(self) -> object:
        """A stamp of the file's present content. It is constant for a file that is read with its
        log, since SQLite follows the log itself."""
        log = Path(f"{self._path}-wal")
        if _size(log) and self._copy is None:
            return "logged"
        return [
            (one.st_ino, one.st_mtime_ns, one.st_size)
            for one in (path.stat() for path in (self._path, log) if path.exists())
        ]


def _connect(name: str, timeout_s: float) -> sqlite3.Connection:
    return sqlite3.connect(
        name,
        timeout=timeout_s,
        isolation_level=None,
        check_same_thread=False,
        uri=name.startswith("file:"),
    )


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
