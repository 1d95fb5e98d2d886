"""Leases show which processes are alive: each tracking process holds a lock on a file of its own for as long as it lives.

The kernel drops the lock when the process ends, however it ends; a pid alone might have been reused. The file records its own inode,
because a copy of a folder also contains copies of its leases, which no process will ever lock.
"""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path

from datastates.system.locks import hold, is_held
from datastates.system.sharing import make_folder_like

from .environment import node_name

__all__ = ["LEASES", "Lease", "Seen", "beat_at", "held_in", "look"]

LEASES = "leases"
"""The folder of the leases, inside the folder of packs."""


class Seen(StrEnum):
    """What can be seen of a lease: it is held, it is free, it is a copy of one, or there is none."""

    HELD = "held"
    FREE = "free"
    COPY = "copy"
    NOTHING = "nothing"


class Lease:
    """An exclusive lock on ``<packs>/leases/<uid>``, for as long as this process lives or until ``close``.

    :raises OSError: it cannot be made.
    """

    def __init__(self, packs: Path, uid: str) -> None:
        folder = packs / LEASES
        make_folder_like(packs, folder)
        held = hold(folder / uid)
        if held is None:
            raise BlockingIOError(f"{folder / uid} is held by another process")
        try:
            held.write(json.dumps({"inode": held.inode, "host": node_name(), "pid": os.getpid()}))
        except OSError:
            held.close()
            raise
        self._held = held

    def beat(self) -> None:
        """Note that the process is at work, for ``beat_at``; costs one system call."""
        self._held.touch()

    def close(self) -> None:
        """Drop the lock and remove the file; idempotent. Does nothing in a forked child."""
        self._held.close()


def beat_at(packs: Path, uid: str) -> datetime | None:
    """When a process last noted that it is at work; None if its lease cannot be seen."""
    try:
        return datetime.fromtimestamp((packs / LEASES / uid).stat().st_mtime, UTC)
    except OSError:
        return None


def held_in(packs: Path, *, is_held: bool = True) -> list[str]:
    """The runs whose leases in a folder are held, or may be, so that processes may be at work there; else those whose leases are not."""
    folder = packs / LEASES
    return [name for name in sorted(os.listdir(folder) if folder.is_dir() else ()) if (look(packs, name) is Seen.HELD) is is_held]


def look(packs: Path, uid: str) -> Seen:
    """What can be seen of a lease from here. It counts as held if it cannot be read, or if the file system cannot tell."""
    path = packs / LEASES / uid
    try:
        if is_held(path):
            return Seen.HELD
        note = path.read_bytes()
        inode = path.stat().st_ino
    except FileNotFoundError:
        return Seen.NOTHING
    except OSError:
        return Seen.HELD
    try:
        return Seen.FREE if not note or json.loads(note)["inode"] == inode else Seen.COPY
    except (ValueError, LookupError, TypeError):
        return Seen.FREE
