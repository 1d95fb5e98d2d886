"""Keeps track of the packs that the manifests of a folder need, by reading only manifests that are new or changed."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from datastates.content.envelope import decode_packs
from datastates.content.manifest import PackInfo
from datastates.errors import Corrupt, Unavailable
from datastates.system.interrupts import Mutex
from datastates.system.regular import read_regular

from .files import LACKING
from .naming import MAX_MANIFEST, uid_of

__all__ = ["References"]

_logger = logging.getLogger(__name__)

_Stamp = tuple[int, int, int]
_NEVER = -1  # a time that no file has


class References:
    """The packs that each manifest of a folder needs. Safe from any thread.

    Decide what to remove under the folder's exclusive lock, so that nothing is added meanwhile; looking needs no lock.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._known: dict[str, tuple[_Stamp, tuple[PackInfo, ...] | None]] = {}
        self._turn = Mutex()

    def needed(self) -> frozenset[str] | None:
        """The packs that any manifest needs. None if one cannot be read: it may need any pack, so none may be removed."""
        each = [packs for _, packs in self._refreshed().values()]
        return None if None in each else frozenset(pack.name for packs in each for pack in packs or ())

    def freed(self, names: Collection[str]) -> tuple[list[str], frozenset[str]]:
        """Those of these manifests that are here, and the packs that no manifest needs once they are gone; no packs while one cannot be
        read."""
        known = self._refreshed()
        here = [name for name in names if name in known]
        gone = set(here)
        kept = [packs for name, (_, packs) in known.items() if name not in gone]
        if None in kept:
            return here, frozenset()
        needed = {pack.name for packs in kept for pack in packs or ()}
        return here, frozenset(pack.name for name in here for pack in known[name][1] or ()) - needed

    def of_each(self) -> dict[str, frozenset[str] | None]:
        """The packs that each manifest needs, by its name; None if it cannot be read."""
        known = self._refreshed()
        return {name: None if packs is None else frozenset(pack.name for pack in packs) for name, (_, packs) in known.items()}

    def files(self) -> dict[str, tuple[tuple[str, int], ...]]:
        """The files that belong to each manifest, by its name: itself and the packs that it needs, each with its size."""
        return {
            name: ((name, stamp[2]), *((pack.name, pack.size) for pack in packs or ()))
            for name, (stamp, packs) in self._refreshed().items()
        }

    def _refreshed(self) -> dict[str, tuple[_Stamp, tuple[PackInfo, ...] | None]]:
        """What is known of each manifest, read again if its stamp has changed: a uid may have come back with other packs, so a name alone
        does not identify a manifest."""
        with self._turn:
            found: dict[str, tuple[_Stamp, tuple[PackInfo, ...] | None]] = {}
            with os.scandir(self._root) as entries:
                for entry in entries:
                    if uid_of(entry.name, "manifest") is not None:
                        with suppress(FileNotFoundError):  # removed just now
                            found[entry.name] = self._look(entry)
            self._known = found
            return found

    def _look(self, entry: os.DirEntry[str]) -> tuple[_Stamp, tuple[PackInfo, ...] | None]:
        status = entry.stat(follow_symlinks=False)
        stamp = (status.st_ino, status.st_mtime_ns, status.st_size)
        known = self._known.get(entry.name)
        if known is not None and known[0] == stamp:
            return known
        try:
            return stamp, decode_packs(read_regular(entry.path, most=MAX_MANIFEST), source=entry.path)
        except FileNotFoundError:
            raise
        except (Corrupt, Unavailable, OSError) as exc:
            _logger.warning("no pack is removed while a manifest cannot be read: %s", exc)
            is_passing = isinstance(exc, OSError) and exc.errno in LACKING  # it is tried again
            return (stamp[0], _NEVER if is_passing else stamp[1], stamp[2]), None
