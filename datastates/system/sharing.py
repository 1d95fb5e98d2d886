"""Files and folders for several users: they follow the umask, and what is made in a folder that a group shares, the group may write.

A folder counts as shared when it is marked so: setgid, and its group may write in it. The umask of most users would have it otherwise.
Every file is made with ``FILE_MODE``, from which the umask takes what it takes. What root makes in a user's folder is that user's, who
is to go on writing there.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

__all__ = ["FILE_MODE", "is_shared", "make_folder_like", "make_folders", "may_read", "share"]

_SHARED = stat.S_ISGID | stat.S_IWGRP
FILE_MODE = 0o666
"""What a file is made with: the umask decides."""


def share(folder: Path, made: Path | int) -> None:
    """Let the owner of ``folder`` have what root made in it, and the group write it, if the folder is shared."""
    _hand_over(folder, made)
    if is_shared(folder):
        _add(made, stat.S_IWGRP | stat.S_IRGRP)


def is_shared(folder: Path) -> bool:
    """Whether it is marked as its group's."""
    return folder.stat().st_mode & _SHARED == _SHARED


def make_folders(path: Path) -> None:
    """A folder and those above it, as far as they are missing."""
    if not path.is_dir():
        make_folders(path.parent)
        path.mkdir(exist_ok=True)
        _hand_over(path.parent, path)
        if is_shared(path.parent):
            _add(path, stat.S_ISGID | stat.S_IRWXG)


def may_read(folder: Path, made: int) -> None:
    """Let everybody who may enter its folder read it: a lock that cannot be opened cannot be seen."""
    mode = folder.stat().st_mode
    of_group, of_others = (stat.S_IRGRP if mode & stat.S_IXGRP else 0), (stat.S_IROTH if mode & stat.S_IXOTH else 0)
    _add(made, stat.S_IRUSR | of_group | of_others)


def make_folder_like(parent: Path, path: Path) -> None:
    """Make a folder in another one, for those who may write in that; one that exists is opened to them too."""
    path.mkdir(exist_ok=True)
    _hand_over(parent, path)
    _add(path, stat.S_IMODE(parent.stat().st_mode))


def _hand_over(folder: Path, made: Path | int) -> None:
    if os.geteuid() == 0:
        owner, status = folder.stat(), os.stat(made)
        if owner.st_uid and not status.st_uid:
            with suppress(OSError):  # a file server that trusts no root
                os.chown(made, owner.st_uid, owner.st_gid)


def _add(made: Path | int, bits: int) -> None:
    mode = stat.S_IMODE(os.stat(made).st_mode)
    if mode | bits != mode:
        with suppress(PermissionError):  # another user made it first, and did the same
            os.chmod(made, mode | bits)
