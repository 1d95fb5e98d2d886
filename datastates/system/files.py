"""Files in folders where others may have put anything: only a regular file is opened, and links are
never followed.

A FIFO would make its opener wait for ever. By a link we would read or write another file. By a hard
link we would truncate a file elsewhere.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import stat
import struct
import threading
import weakref
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from datastates.errors import Conflict, Corrupt, InvalidInput

from .threads import at

_SHARED = stat.S_ISGID | stat.S_IWGRP
FILE_MODE = 0o666
"""The mode with which files are made; the umask decides the rest."""


def share(folder: Path, made: Path | int) -> None:
    """Give what root made in ``folder`` to the folder's owner, and let the group write it if the
    folder is shared."""
    _hand_over(folder, made)
    if is_shared(folder):
        _add(made, stat.S_IWGRP | stat.S_IRGRP)


def is_shared(folder: Path) -> bool:
    """Whether the folder is marked as shared by its group."""
    return folder.stat().st_mode & _SHARED == _SHARED


def make_folders(path: Path) -> None:
    """Make a folder, and those above it that are missing; their names are durable when this
    returns.

    :raises FileExistsError: something else has that name.
    """
    if not path.is_dir():
        make_folders(path.parent)
        path.mkdir(exist_ok=True)
        sync_folder(path.parent)
        _hand_over(path.parent, path)
        if is_shared(path.parent):
            _add(path, stat.S_ISGID | stat.S_IRWXG)


def sync_folder(path: Path) -> None:
    """Make the names in the folder durable."""
    at("sync", path)
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def may_read(folder: Path, made: int) -> None:
    """Let everybody who may enter its folder read the file: a lock that cannot be opened cannot
    be seen."""
    mode = folder.stat().st_mode
    of_group, of_others = (
        (stat.S_IRGRP if mode & stat.S_IXGRP else 0),
        (stat.S_IROTH if mode & stat.S_IXOTH else 0),
    )
    _add(made, stat.S_IRUSR | of_group | of_others)


def make_folder_like(parent: Path, path: Path) -> None:
    """Make a folder in another one, writable for those who may write in that one; an existing
    folder is opened to them too."""
    path.mkdir(exist_ok=True)
    _hand_over(parent, path)
    _add(path, stat.S_IMODE(parent.stat().st_mode))


def _hand_over(folder: Path, made: Path | int) -> None:
    if os.geteuid() == 0:
        owner, status = folder.stat(), os.stat(made)
        if owner.st_uid and not status.st_uid:
            with suppress(OSError):  # a file server that does not trust root
                os.chown(made, owner.st_uid, owner.st_gid)


def _add(made: Path | int, bits: int) -> None:
    mode = stat.S_IMODE(os.stat(made).st_mode)
    if mode | bits != mode:
        with suppress(PermissionError):  # another user made it first, and did the same
            os.chmod(made, mode | bits)


# Files in folders where others may have put anything: only a regular file is opened, and links
# are never followed.


_READ_BYTES = 16 << 20


def open_regular(
    path: str | Path,
    flags: int = os.O_RDONLY,
    mode: int = FILE_MODE,
    *,
    may_have_links: bool = False,
) -> int:
    """A descriptor of a regular file, which the caller closes.

    ``may_have_links``: the file may have other hard links, because the caller only locks it.

    :raises OSError: as ``os.open``; also if it is not a regular file, or is opened for writing and
        has a second name.
    """
    fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, mode)
    status, error = os.fstat(fd), None
    if not stat.S_ISREG(status.st_mode):
        error = OSError(errno.EINVAL, "it is no regular file", str(path))
    elif flags & (os.O_WRONLY | os.O_RDWR) and status.st_nlink > 1 and not may_have_links:
        error = OSError(
            errno.EMLINK, "it has a second name, and would be written under that too", str(path)
        )
    if error is not None:
        os.close(fd)
        raise error
    return fd


def make_regular(path: Path) -> int:
    """A descriptor of a new file, for writing, in place of anything that had its name."""
    path.unlink(missing_ok=True)
    return open_regular(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)


def read_regular(path: str | Path, *, most: int) -> bytes:
    """The bytes of a file.

    :raises Corrupt: there are more than ``most``.
    """
    fd = open_regular(path)
    try:
        found, size = bytearray(), os.fstat(fd).st_size
        while len(found) <= most and (
            piece := os.read(fd, min(_READ_BYTES, most + 1 - len(found)))
        ):
            found += piece
    finally:
        os.close(fd)
    if max(size, len(found)) > most:
        raise Corrupt(
            f"{path} has {max(size, len(found))} bytes, {most} are the most that such a file has"
        )
    return bytes(found)


def read_at(fd: int, into: memoryview, offset: int) -> int:
    """Fill ``into`` from ``offset`` on; returns how many bytes there were, fewer only at the end
    of the file."""
    done = 0
    while done < into.nbytes and (count := os.preadv(fd, [into[done:]], offset + done)):
        done += count
    return done


def write_at(fd: int, data: bytes, offset: int) -> None:
    """Write all of ``data`` from ``offset`` on. The kernel may take less if the disk fills, a quota
    or limit is reached, or a signal comes.

    :raises OSError: a write failed; the bytes before it are written.
    """
    view, done = memoryview(data), 0
    while done < view.nbytes:
        count = os.pwrite(fd, view[done:], offset + done)
        if not count:
            raise OSError(errno.EIO, f"nothing was written at offset {offset + done}")
        done += count


# Files that hold tokens: made so that other users can never read them, and refused if they could.


_OTHERS = stat.S_IROTH | stat.S_IWOTH


def make_token() -> str:
    """A token that cannot be guessed, of characters that every header and shell carries."""
    return secrets.token_urlsafe(32)


def is_sendable(token: str) -> bool:
    """Whether an HTTP header can carry the token."""
    return token.isascii() and token.isprintable() and " " not in token


def read_secret(path: str | os.PathLike[str], what: str) -> bytes:
    """The content of a secret file; ``what`` names it in messages. It must be readable by its owner
    and its group alone.

    :raises InvalidInput: it cannot be read, or others can read or write it.
    """
    try:
        with open(path, "rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            if mode & _OTHERS:
                raise InvalidInput(
                    f"{what} can be read or written by every user of this machine (mode"
                    f" {mode:04o}): chmod o= {os.fspath(path)}, and take another token, for this"
                    " one is known"
                )
            return file.read()
    except OSError as exc:
        raise InvalidInput(
            f"{what} cannot be read ({exc.strerror}): name a file that holds it"
        ) from exc


def write_secret(path: Path, line: str) -> None:
    """Make a file of one line that only its owner can read, from the first moment.

    :raises Conflict: the file exists.
    """
    try:
        _write(path, line, os.O_EXCL)
    except FileExistsError as exc:
        raise Conflict(f"{path} is there already: move it away, or name another file") from exc


def append_secret(path: Path, line: str) -> None:
    """Add a line to such a file; makes the file if it does not exist."""
    if path.exists():
        read_secret(path, f"the file {os.fspath(path)!r}")
    _write(path, line, os.O_APPEND)


def _write(path: Path, line: str, how: int) -> None:
    descriptor = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC | how, 0o600)
    with open(descriptor, "w", encoding="utf-8") as file:
        file.write(f"{line}\n")


# Locks on files that last exactly as long as the process that took them, and that other processes
# can see.


_SET = getattr(fcntl, "F_OFD_SETLK", None)
_GET = getattr(fcntl, "F_OFD_GETLK", None)
_FLOCK = "hhqqi4x"  # struct flock: type, whence, start, length, pid
_UNKNOWN_TO_KERNEL = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)
# the two errors that POSIX has for a lock that is taken
_REFUSED = (
    errno.EAGAIN,
    errno.EACCES,
)
_held: weakref.WeakSet[FileLock] = weakref.WeakSet()
_lockable: set[int] = set()
_forking = threading.RLock()
"""Held while a process is forked, and while a descriptor is opened or closed that no child may
keep."""


def open_lockable(path: Path, flags: int = os.O_RDONLY, *, may_have_links: bool = False) -> int:
    """A descriptor of a regular file, to be locked and then closed by ``close_lockable``. A forked
    child closes it at once.

    :raises OSError: as of ``open_regular``.
    """
    with _forking:
        fd = open_regular(path, flags, may_have_links=may_have_links)
        _lockable.add(fd)
    return fd


def close_lockable(fd: int) -> None:
    """Release the descriptor's lock and close it."""
    with suppress(OSError):
        # explicitly: a child that Python did not fork shares it until it executes a program
        fcntl.flock(fd, fcntl.LOCK_UN)
    with _forking:
        _lockable.discard(fd)
        os.close(fd)


class FileLock:
    """A file that this process has locked, as long as the process lives or until ``close``.

    Made by ``hold``."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path, self._fd = path, fd
        _held.add(self)

    @property
    def inode(self) -> int:
        """The number of the locked file; a copy of the file has another."""
        return os.fstat(self._fd).st_ino

    def fileno(self) -> int:
        """The descriptor, which stays the lock's own. A process that it is passed to holds the lock
        as well."""
        return self._fd

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
        """Set the file's time to now, which shows others that the holder is at work, not only
        that it lives."""
        with suppress(OSError):
            # the file may be on a full disk, or just gone: the lock is what counts
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


def hold(path: Path) -> FileLock | None:
    """Make the file and lock it; None if this process or another holds it.

    The file is readable for every user who may enter its folder. A process that could not read it
    could not see that it is locked.

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
                return FileLock(path, fd)
        except BaseException:
            close_lockable(fd)
            raise
        close_lockable(fd)  # its last holder removed the file between our open and our lock


def is_held(path: Path) -> bool:
    """Whether a live process holds the file, this one included. Needs no permission to write, and
    takes no lock that others could see.

    :raises FileNotFoundError: there is no such file.
    :raises OSError: it cannot be read, or its file system does not report locks.
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
        # shared: two checks at once do not take each other for the holder
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


def is_ours(fd: int, path: Path) -> bool:
    """Whether a locked file is still at its path and may be written. A file with other hard links
    loses this name, and the caller makes another file. Otherwise writes would appear under those
    links too, as in a snapshot made by ``cp -al``.
    """
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
        each._fd = -1
    for fd in _lockable:
        with suppress(OSError):
            os.close(fd)
    _lockable.clear()
    _forking.release()


os.register_at_fork(
    before=_forking.acquire, after_in_parent=_forking.release, after_in_child=_let_go
)


def check_archive(file: Path | BinaryIO, size: int) -> None:
    """Raise if a file of ``torch.save`` has more bytes than its ``size`` once it is unpacked; torch
    would unpack it first.

    :raises InvalidInput: it is compressed, or uses the same bytes again and again.
    """
    if zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as archive:
            unpacked = sum(info.file_size for info in archive.infolist())
        if unpacked > size:
            raise InvalidInput(
                f"it unpacks to {unpacked} bytes from {size}: write it with torch.save, which does"
                " not compress"
            )
