"""Who is alive: each tracking process holds a lock on a file of its own for as long as it lives.

The kernel lets go of the lock when the process ends, however it ends; a pid alone could have been given away again.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

__all__ = ["Lease", "is_held"]

_ours: dict[Path, int] = {}
"""Leases of this process, by path, with its pid: POSIX locks say nothing to the process that holds them."""


class Lease:
    """An exclusive lock on ``<folder>/<uid>``. A POSIX record lock, which forked children do not inherit."""

    def __init__(self, folder: Path, uid: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder.resolve() / uid
        self._fd = os.open(self._path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
        fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _ours[self._path] = os.getpid()

    def close(self) -> None:
        """Let go, and take the file away; idempotent. In a forked child: nothing."""
        if self._fd >= 0 and _ours.pop(self._path, None) == os.getpid():
            self._path.unlink(missing_ok=True)
            os.close(self._fd)
        self._fd = -1


def is_held(folder: Path, uid: str) -> bool:
    """Whether a live process on this machine holds the lease."""
    path = folder.resolve() / uid
    if _ours.get(path) == os.getpid():
        return True  # and its file must not be opened here: closing it again would drop our own lock
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    else:
        return False
    finally:
        os.close(fd)
