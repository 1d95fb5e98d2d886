"""Files and folders for several users: they follow the umask, and the group may write what is made in a folder that it shares.

A folder counts as shared if it is marked so: it is setgid, and its group may write in it. The umask of most users alone would not allow
that. Every file is made with ``FILE_MODE``, from which the umask removes its bits. What root makes in a user's folder belongs to that user,
who has to go on writing there.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

__all__ = ["FILE_MODE", "is_shared", "make_folder_like", "make_folders", "may_read", "share"]

_SHARED = stat.S_ISGID | stat.S_IWGRP
FILE_MODE = 0o666
"""The mode with which files are made; the umask decides the rest."""


def share(folder: Path, made: Path | int) -> None:
    """Give what root made in ``folder`` to the folder's owner, and let the group write it if the folder is shared."""
    _hand_over(folder, made)
    if is_shared(folder):
        _add(made, stat.S_IWGRP | stat.S_IRGRP)


def is_shared(folder: Path) -> bool:
    """Whether the folder is marked as shared by its group."""
    return folder.stat().st_mode & _SHARED == _SHARED


def make_folders(path: Path) -> None:
    """Make a folder, and those above it that are missing; their names are durable when this returns.

    :raises FileExistsError: something else has that name.
    """
    if not path.is_dir():
        make_folders(path.parent)
        path.mkdir(exist_ok=True)
        parent = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(parent)
        finally:
            os.close(parent)
        _hand_over(path.parent, path)
        if is_shared(path.parent):
            _add(path, stat.S_ISGID | stat.S_IRWXG)


def may_read(folder: Path, made: int) -> None:
    """Let everybody who may enter its folder read the file: a lock that cannot be opened cannot be seen."""
    mode = folder.stat().st_mode
    of_group, of_others = (stat.S_IRGRP if mode & stat.S_IXGRP else 0), (stat.S_IROTH if mode & stat.S_IXOTH else 0)
    _add(made, stat.S_IRUSR | of_group | of_others)


def make_folder_like(parent: Path, path: Path) -> None:
    """Make a folder in another one, writable for those who may write in that one; an existing folder is opened to them too."""
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
