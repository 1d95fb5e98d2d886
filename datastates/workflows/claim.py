"""Who works on what: a study has one explorer, a variant one worker, whoever else was told to do the same.

A claim is a lock on a file beside the packs that the kernel drops with the process, however that ends. The file says who holds it.
Between hosts it works where their shared file system passes POSIX locks on; elsewhere the compare-and-swap of branches remains.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

__all__ = ["Claim", "holder"]

_ours: dict[Path, tuple[int, str]] = {}
"""Claims of this process: its pid, their notes. A POSIX lock is no obstacle to its own process, and closing any descriptor drops it."""


class Claim:
    """An exclusive lock on ``<folder>/<name>``, with a note for others to read. Made by ``take``; a context manager."""

    def __init__(self, path: Path, fd: int, note: str) -> None:
        self._path, self._fd = path, fd
        os.ftruncate(fd, 0)
        os.pwrite(fd, note.encode(), 0)
        _ours[path] = (os.getpid(), note)

    @classmethod
    def take(cls, folder: Path, name: str, note: str) -> Self | None:
        """The claim, or None when somebody holds it."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder.resolve() / name
        if _own_note(path) is not None:
            return None
        while True:
            fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
            try:
                fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):  # the two that POSIX has for a lock that is held
                os.close(fd)
                return None
            except BaseException:
                os.close(fd)
                raise
            if _is_at(fd, path):
                return cls(path, fd, note)
            os.close(fd)  # its last holder took the file away between our open and our lock

    def close(self) -> None:
        """Let go, and take the file away; idempotent. In a forked child: nothing."""
        if self._fd >= 0 and _ours.get(self._path, (0, ""))[0] == os.getpid():
            del _ours[self._path]
            self._path.unlink(missing_ok=True)
            os.close(self._fd)
        self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def holder(folder: Path, name: str) -> str | None:
    """The note of whoever holds a claim; None when nobody does."""
    path = folder.resolve() / name
    if (note := _own_note(path)) is not None:
        return note
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        with suppress(BlockingIOError, PermissionError):
            fcntl.lockf(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: those who ask at once do not take each other for the holder
            return None
        return os.pread(fd, 4096, 0).decode()
    finally:
        os.close(fd)


def _own_note(path: Path) -> str | None:
    pid, note = _ours.get(path, (0, ""))
    return note if pid == os.getpid() else None


def _is_at(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False
