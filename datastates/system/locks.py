"""Locks on files that last exactly as long as the process that took them, and that other processes can see.

The lock belongs to one open file description, which nobody else has (``F_OFD_SETLK``). The process may open and close the file as often
as it likes, as code that copies the folder does, and keeps its lock. If a kernel has no such locks, ``flock`` is used instead. A forked
child would share the description and hold the lock for a parent that is dead, as a loader's worker that outlives its training would. So a
child first closes its own descriptor. The same holds for locks that last only a moment, on files that ``open_lockable`` opens.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import threading
import weakref
from contextlib import suppress
from pathlib import Path

from .regular import open_regular, write_at
from .sharing import may_read, share

__all__ = ["Held", "close_lockable", "hold", "is_at", "is_held", "is_ours", "open_lockable"]

_SET, _GET = getattr(fcntl, "F_OFD_SETLK", None), getattr(fcntl, "F_OFD_GETLK", None)
_FLOCK = "hhqqi4x"  # struct flock: type, whence, start, length, pid
_UNKNOWN_TO_KERNEL = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)
_REFUSED = (errno.EAGAIN, errno.EACCES)  # the two errors that POSIX has for a lock that somebody holds
_held: weakref.WeakSet[Held] = weakref.WeakSet()
_lockable: set[int] = set()
_forking = threading.RLock()
"""Held while a process is forked, and while a descriptor is opened or closed that no child may keep."""


def open_lockable(path: Path, flags: int = os.O_RDONLY, *, may_have_links: bool = False) -> int:
    """A descriptor like that of ``open_regular``, to be locked and then closed by ``close_lockable``; a forked child closes it at once.

    :raises OSError: as of ``open_regular``.
    """
    with _forking:
        fd = open_regular(path, flags, may_have_links=may_have_links)
        _lockable.add(fd)
    return fd


def close_lockable(fd: int) -> None:
    """Release the descriptor's lock and close it."""
    with suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_UN)  # explicitly: a child that Python did not fork shares it until it executes a program
    with _forking:
        _lockable.discard(fd)
        os.close(fd)


class Held:
    """A file that this process has locked, as long as the process lives or until ``close``. Made by ``hold``."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path, self._fd = path, fd
        _held.add(self)

    @property
    def inode(self) -> int:
        """The number of the locked file; a copy of the file has another."""
        return os.fstat(self._fd).st_ino

    def write(self, note: str) -> None:
        """Write a text for processes that read the file; the file is empty if that fails.

        :raises OSError: it cannot be written.
        """
        os.ftruncate(self._fd, 0)
        try:
            write_at(self._fd, note.encode(), 0)
        except OSError:
            os.ftruncate(self._fd, 0)
            raise

    def touch(self) -> None:
        """Set the file's time to now, which shows others that the holder is at work, not only that it lives."""
        with suppress(OSError):  # the file may be on a full disk, or just gone: the lock is what counts
            if self._fd >= 0:
                os.utime(self._fd)

    def close(self) -> None:
        """Release the lock and remove the file; idempotent. Does nothing in a forked child."""
        fd, self._fd = self._fd, -1
        _held.discard(self)
        if fd >= 0:
            if is_at(fd, self.path):
                self.path.unlink(missing_ok=True)
            close_lockable(fd)

    def _forget(self) -> None:
        """Forget the lock in a forked child, which has closed it: only the parent owns it."""
        self._fd = -1


def hold(path: Path) -> Held | None:
    """Make the file and lock it; None if somebody, in this process or another, holds it.

    Everybody may read the file: a process that could not read it could not see that it is locked.

    :raises OSError: it cannot be made, or its file system has no locks.
    """
    while True:
        fd = open_lockable(path, os.O_CREAT | os.O_RDWR, may_have_links=True)
        try:
            if not _lock(fd):
                close_lockable(fd)
                return None
            if is_ours(fd, path):
                may_read(path.parent, fd)
                share(path.parent, fd)
                return Held(path, fd)
        except BaseException:
            close_lockable(fd)
            raise
        close_lockable(fd)  # its last holder removed the file between our open and our lock


def is_held(path: Path) -> bool:
    """Whether a live process holds the file, this one included. Needs no permission to write, and takes no lock that others could see.

    :raises FileNotFoundError: there is no such file.
    :raises OSError: it cannot be read, or the file system cannot say.
    """
    fd = open_regular(path)
    try:
        return _is_locked(fd)
    finally:
        os.close(fd)


def _lock(fd: int) -> bool:
    if _SET is not None:
        try:
            fcntl.fcntl(fd, _SET, struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
        except OSError as exc:
            if exc.errno in _REFUSED:
                return False
            if exc.errno not in _UNKNOWN_TO_KERNEL:
                raise
        else:
            return True
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_locked(fd: int) -> bool:
    """Check both kinds of lock, because the holder of the file may run on another kernel."""
    if _GET is not None:
        try:
            answer = fcntl.fcntl(fd, _GET, struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
        except OSError as exc:
            if exc.errno not in _UNKNOWN_TO_KERNEL:
                raise
        else:
            if struct.unpack(_FLOCK, answer)[0] != fcntl.F_UNLCK:
                return True
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: two checks at once do not take each other for the holder
    except BlockingIOError:
        return True
    return False


def is_ours(fd: int, path: Path) -> bool:
    """Whether a locked file is still at its path and may be written. A file with other hard links loses this name, and the caller makes
    another file: what is written to it would also appear under those links, as in a snapshot made by ``cp -al``."""
    is_here = is_at(fd, path)
    if is_here and os.fstat(fd).st_nlink > 1:
        path.unlink(missing_ok=True)
        return False
    return is_here


def is_at(fd: int, path: Path) -> bool:
    """Whether an open file is the one at its path."""
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False


def _let_go() -> None:
    """Close the locked descriptors in a forked child."""
    for each in list(_held):
        each._forget()
    for fd in _lockable:
        with suppress(OSError):
            os.close(fd)
    _lockable.clear()
    _forking.release()


os.register_at_fork(before=_forking.acquire, after_in_parent=_forking.release, after_in_child=_let_go)
