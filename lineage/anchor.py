"""Locks that tell other processes that a SQLite file is in use, and that this process cannot lose by accident.

SQLite's own locks belong to the process and the file: all of them vanish as soon as the process closes any descriptor of the file, which
happens when it copies or uploads the folder. Another process that opens the lineage then believes that it is alone. It empties the index
of the log, and the next read of that index kills this process by SIGBUS; or it removes the log, and what this process commits is lost.

An anchor holds shared locks of its own on two bytes that SQLite locks before it does either ("How To Corrupt An SQLite Database
File", and the layout of locks in SQLite's ``os_unix.c``). They belong to an open file description (``F_OFD_SETLK``), which nobody else
closes. They do not replace the locks of a transaction that is under way while the copy is made.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from datastates.system.interrupts import Mutex
from datastates.system.regular import open_regular

__all__ = ["alone", "cast"]

_SET = getattr(fcntl, "F_OFD_SETLK", None)
_FLOCK = "hhqqi4x"  # struct flock: type, whence, start, length, pid
_SHARED = 0x4000_0002  # of the database: a process that wants the file alone locks all 510 bytes from here on
_IN_USE = 128  # of the index of the log: a process that empties it locks this byte
_REFUSED = (errno.EAGAIN, errno.EACCES)  # the two errors that POSIX allows for a lock that is held
_PATIENCE_S = 10.0
_ASK_AGAIN_S = 0.01
_turn = Mutex()
_anchors: dict[tuple[int, int], _Anchor] = {}


class _Anchor:
    """The locks of this process on one file, counting their users. Its methods run one at a time."""

    def __init__(self, descriptors: list[int]) -> None:
        self.users = 0
        self.descriptors = descriptors

    def weigh(self) -> None:
        """Release the locks; the descriptors stay open."""
        for fd in self.descriptors:
            with suppress(OSError):
                _lock(fd, 0, fcntl.F_UNLCK, length=0)

    def close(self) -> None:
        """Close the descriptors, which also drops this process's SQLite locks, so nobody may need those any more."""
        for fd in self.descriptors:
            os.close(fd)
        self.descriptors = []


def cast(path: Path) -> Callable[[Callable[[], None]], None]:
    """Hold the anchor of a file that a connection of this process has open.

    The returned function closes that connection by calling its argument, and then releases the anchor. It is called once, on any thread.
    Where the kernel lacks such locks it does only the closing.
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
                anchor.weigh()  # SQLite's last connection may now tidy its file
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
def alone(path: Path) -> Iterator[bool]:
    """Whether no process, this one included, has the file open in SQLite, as far as can be seen.

    Until the block ends no process can open it: one that tries waits, and then finds what is at the path by then. Hold it only for moments.
    """
    with _turn:
        fd = _opened(path)
        try:
            yield fd is None or _is_locked(fd)
        finally:
            if fd is not None and fd >= 0:
                os.close(fd)


_OURS = -1


def _opened(path: Path) -> int | None:
    """A descriptor; None if there is nothing to lock; ``_OURS`` if closing one would cost this process's connections their locks."""
    try:
        status = path.stat()
        if (status.st_dev, status.st_ino) in _anchors:
            return _OURS
        return None if _SET is None else open_regular(path, os.O_RDWR, may_have_links=True)
    except OSError:  # not there, or not writable by us
        return None


def _is_locked(fd: int) -> bool:
    """Take the lock that keeps others away; returns whether no other process held one."""
    if fd == _OURS:
        return False
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
                anchor = _anchors[key] = _Anchor(_locked(path))
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
    """Take a shared lock, waiting if need be: a process that replaces the file holds the exclusive one only for moments."""
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
    """Forget all anchors in a forked child: it uses no connection of its parent's, and the locks are the parent's alone."""
    for anchor in _anchors.values():
        anchor.close()
    _anchors.clear()


os.register_at_fork(after_in_child=_forget)
