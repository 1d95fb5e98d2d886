"""The names of the files in a folder of packs, and the packs that a manifest there needs."""

from __future__ import annotations

import re
from pathlib import Path

from datastates.content.envelope import decode_packs
from datastates.content.manifest import PackInfo
from datastates.errors import Corrupt, Unavailable
from datastates.system.regular import read_regular

__all__ = ["MAX_MANIFEST", "manifest_name", "packs_of", "uid_of"]

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
