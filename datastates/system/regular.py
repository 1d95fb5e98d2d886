"""Files in folders where others may have put anything: only a regular file is opened, and links are never followed.

A FIFO would make its opener wait for ever, a link would have us read or write somewhere else, and a name that is also a name of a file
elsewhere (a hard link) would have us empty that file.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from datastates.errors import Corrupt

from .sharing import FILE_MODE

__all__ = ["make_regular", "open_regular", "read_at", "read_regular", "write_at"]

_READ_BYTES = 16 << 20


def open_regular(path: str | Path, flags: int = os.O_RDONLY, mode: int = FILE_MODE, *, may_have_links: bool = False) -> int:
    """A descriptor of a regular file, which the caller closes.

    ``may_have_links``: the file may have other hard links, because the caller only locks it.

    :raises OSError: as ``os.open``; also if it is not a regular file, or is opened for writing and has a second name.
    """
    fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, mode)
    error = _objection(os.fstat(fd), path, os.O_RDONLY if may_have_links else flags)
    if error is not None:
        os.close(fd)
        raise error
    return fd


def _objection(status: os.stat_result, path: str | Path, flags: int) -> OSError | None:
    if not stat.S_ISREG(status.st_mode):
        return OSError(errno.EINVAL, "it is no regular file", str(path))
    if flags & (os.O_WRONLY | os.O_RDWR) and status.st_nlink > 1:
        return OSError(errno.EMLINK, "it has a second name, and would be written under that too", str(path))
    return None


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
        while len(found) <= most and (piece := os.read(fd, min(_READ_BYTES, most + 1 - len(found)))):
            found += piece
    finally:
        os.close(fd)
    if max(size, len(found)) > most:
        raise Corrupt(f"{path} has {max(size, len(found))} bytes, {most} are the most that such a file has")
    return bytes(found)


def read_at(fd: int, into: memoryview, offset: int) -> int:
    """Fill ``into`` from ``offset`` on; returns how many bytes there were, fewer only at the end of the file."""
    done = 0
    while done < into.nbytes and (count := os.preadv(fd, [into[done:]], offset + done)):
        done += count
    return done


def write_at(fd: int, data: bytes, offset: int) -> None:
    """Write all of ``data`` from ``offset`` on. The kernel may take less if the disk fills, a quota or limit is reached, or a signal comes.

    :raises OSError: the rest cannot be written; the bytes before it are there.
    """
    view, done = memoryview(data), 0
    while done < view.nbytes:
        count = os.pwrite(fd, view[done:], offset + done)
        if not count:
            raise OSError(errno.EIO, f"nothing was written at offset {offset + done}")
        done += count
