"""The names of the files in a folder of packs, the packs that a state there needs, and what all of them take.

A state's manifest is in ``<uid>.<rank>.manifest`` and its new bytes are in ``<uid>.<rank>.safetensors``. States that are written together
share both files, which have the name of the first of them. A number (``<uid>.<rank>-1.manifest``) keeps the names of files apart.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from itertools import count
from pathlib import Path

from datastates.content.envelope import MAX_MANIFEST, decode_places, frames
from datastates.content.manifest import PackInfo
from datastates.errors import Corrupt, Unavailable
from datastates.system.regular import read_regular

__all__ = ["MAX_MANIFEST", "bytes_of_packs", "free_name", "manifest_name", "packs_of", "uid_of"]

_NAME = re.compile(r"([0-9A-Za-z_-]{1,64})\.(\d{1,9})(?:-\d+)?\.(?:manifest|safetensors)")


def manifest_name(uid: str, rank: int) -> str:
    """The name of the file with a state's manifest on one rank, if the state is the first or only one in it."""
    return f"{uid}.{rank}.manifest"


def free_name(root: Path, uid: str, rank: int, kind: str) -> str:
    """A name for a ``manifest`` or pack (``safetensors``) that no file has: others may still need a file of an earlier state."""
    names = (f"{uid}.{rank}{(number and -number) or ''}.{kind}" for number in count())
    return next(name for name in names if not (root / name).exists())


def uid_of(name: str, kind: str) -> tuple[str, int] | None:
    """The uid and rank in the name of a ``manifest`` or of a pack (``safetensors``); None for any other name."""
    match = _NAME.fullmatch(name)
    return (match[1], int(match[2])) if match is not None and name.endswith(kind) else None


def packs_of(root: Path, uid: str, rank: int = 0) -> tuple[PackInfo, ...]:
    """The packs that a state needs, as its manifest in this folder says; none if it has no manifest that can be read."""
    own = manifest_name(uid, rank)
    with suppress(OSError):
        for name in sorted(os.listdir(root), key=lambda name: name != own):
            if uid_of(name, "manifest") is not None:
                with suppress(OSError, Corrupt, Unavailable):
                    first = memoryview(b"")
                    for _, frame in frames(read_regular(root / name, most=MAX_MANIFEST)):
                        places = decode_places(frame, source=name, first=first or frame)
                        first = first or frame
                        if (places.origin.uid, places.origin.rank) == (uid, rank):
                            return places.packs
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
