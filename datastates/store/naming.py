"""The names of the files in a folder of packs, the packs that a manifest there needs, and what all of them take."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

from datastates.content.envelope import decode_packs
from datastates.content.manifest import PackInfo
from datastates.errors import Corrupt, Unavailable
from datastates.system.regular import read_regular

__all__ = ["MAX_MANIFEST", "bytes_of_packs", "manifest_name", "packs_of", "uid_of"]

MAX_MANIFEST = 256 << 20
"""The size of the largest manifest that is read, in bytes."""

_NAME = re.compile(r"([0-9A-Za-z_-]{1,64})\.(\d{1,9})(?:\.manifest|(?:-\d+)?\.safetensors)")


def manifest_name(uid: str, rank: int) -> str:
    """The name of the file with a state's manifest on one rank."""
    return f"{uid}.{rank}.manifest"


def uid_of(name: str, kind: str) -> tuple[str, int] | None:
    """The uid and rank in the name of a ``manifest`` or of a pack (``safetensors``); None for any other name."""
    match = _NAME.fullmatch(name)
    return (match[1], int(match[2])) if match is not None and name.endswith(kind) else None


def packs_of(root: Path, uid: str, rank: int = 0) -> tuple[PackInfo, ...]:
    """The packs that a state needs, as its manifest in this folder says; none if it has no manifest that can be read."""
    path = root / manifest_name(uid, rank)
    if uid_of(path.name, "manifest") is None:
        return ()
    try:
        return decode_packs(read_regular(path, most=MAX_MANIFEST), source=str(path))
    except (OSError, Corrupt, Unavailable):
        return ()


def bytes_of_packs(root: Path) -> int:
    """The bytes that the packs in a folder take; none if it cannot be read. What is deleted meanwhile takes none."""
    taken = 0
    with suppress(OSError), os.scandir(root) as entries:
        for entry in entries:
            if uid_of(entry.name, "safetensors") is not None:
                with suppress(FileNotFoundError):  # deleted just now
                    taken += entry.stat(follow_symlinks=False).st_size
    return taken
