"""Which packs the manifests of a folder need, kept up to date by looking only at manifests that are new or changed."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from datastates.content.envelope import decode_packs
from datastates.errors import Corrupt, Unavailable
from datastates.system.regular import read_regular

from .naming import MAX_MANIFEST, uid_of

__all__ = ["References"]

_logger = logging.getLogger(__name__)

_Stamp = tuple[int, int, int]


class References:
    """The packs that each manifest of a folder needs. What is to be relied on is asked for under the folder's exclusive lock."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._known: dict[str, tuple[_Stamp, frozenset[str] | None]] = {}

    def needed(self, *, without: str | None = None) -> frozenset[str] | None:
        """The packs that any manifest needs, that of the name ``without`` left out.

        None when a manifest cannot be read: it may need any pack, so none is to be removed.
        """
        self._refresh()
        needed: set[str] = set()
        for name, (_, packs) in self._known.items():
            if name == without:
                continue
            if packs is None:
                return None
            needed |= packs
        return frozenset(needed)

    def of_each(self) -> dict[str, frozenset[str] | None]:
        """The packs that each manifest needs, by its name; None where it cannot be read."""
        self._refresh()
        return {name: packs for name, (_, packs) in self._known.items()}

    def _refresh(self) -> None:
        """A uid may have come back with other packs, so a name alone does not say that a manifest is the one that was read."""
        found: dict[str, tuple[_Stamp, frozenset[str] | None]] = {}
        with os.scandir(self._root) as entries:
            for entry in entries:
                if uid_of(entry.name, "manifest") is None:
                    continue
                try:
                    status = entry.stat(follow_symlinks=False)
                except FileNotFoundError:  # removed just now, by whoever has the lock that we have not
                    continue
                stamp = (status.st_ino, status.st_mtime_ns, status.st_size)
                known = self._known.get(entry.name)
                found[entry.name] = known if known is not None and known[0] == stamp else (stamp, _packs_in(Path(entry.path)))
        self._known = found


def _packs_in(path: Path) -> frozenset[str] | None:
    try:
        return frozenset(pack.name for pack in decode_packs(read_regular(path, most=MAX_MANIFEST), source=str(path)))
    except (Corrupt, Unavailable, OSError) as exc:
        _logger.warning("no pack is removed while a manifest cannot be read: %s", exc)
        return None
