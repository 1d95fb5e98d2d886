"""Files and folders for several users: what is made in a folder that a group shares, the group may write.

A folder counts as shared when it is marked so: setgid, and its group may write in it. The umask of most users would have it otherwise.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

__all__ = ["make_folder_like", "make_folders", "may_read", "share"]

_SHARED = stat.S_ISGID | stat.S_IWGRP
_ALL_READ = stat.S_IRUSR | stat.S_IRGRP | stat.S_IROTH


def share(folder: Path, made: Path | int) -> None:
    """Let the group write what was made in ``folder``, if that is shared."""
    if folder.stat().st_mode & _SHARED == _SHARED:
        _add(made, stat.S_IWGRP | stat.S_IRGRP)


def make_folders(path: Path) -> None:
    """A folder and those above it, as far as they are missing."""
    if not path.is_dir():
        make_folders(path.parent)
        path.mkdir(exist_ok=True)
        share(path.parent, path)


def may_read(made: int) -> None:
    """Let everybody read it who may enter its folder: a lock that cannot be opened cannot be seen."""
    _add(made, _ALL_READ)


def make_folder_like(parent: Path, path: Path) -> None:
    """A folder in another one, for those who may write in that; one that is there is theirs too."""
    path.mkdir(exist_ok=True)
    _add(path, stat.S_IMODE(parent.stat().st_mode))


def _add(made: Path | int, bits: int) -> None:
    mode = stat.S_IMODE(os.stat(made).st_mode)
    if mode | bits != mode:
        with suppress(PermissionError):  # another user made it first, and did the same
            os.chmod(made, mode | bits)
