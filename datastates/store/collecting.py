"""Makes room in a folder of packs. It deletes what crashed writers left and packs that no manifest needs, and rewrites packs most of whose
bytes no manifest needs.

A collection needs no knowledge in advance and leaves none behind: whatever ends one, the next one goes on. It holds the folder's exclusive
lock for a few files at a time, and copies bytes without it, so that captures and readers go on.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from datastates.errors import Conflict, Corrupt, NotFound, Unavailable, Unsupported
from datastates.system.interrupts import checkpoint
from datastates.system.locks import hold

from .files import TEMPORARY, is_abandoned, locked, sync_folder
from .naming import uid_of
from .references import Catalogue, Member
from .rewriting import Rewriting, Sparse, sparse_packs

__all__ = ["Collected", "Collector"]

_BATCH = 32
"""The number of files that are deleted while the lock is held once."""

_ONE_AT_A_TIME = ".collecting"


@dataclass(slots=True)
class Collected:
    """What was deleted and written, or would be; sizes are file sizes. ``left`` says what was left alone, and why."""

    temporaries: int = 0
    temporary_bytes: int = 0
    packs: int = 0
    pack_bytes: int = 0
    rewritten: int = 0
    rewritten_bytes: int = 0
    left: list[str] = field(default_factory=list)


class Collector:
    """One collection in a folder. ``tell`` is called with the bytes freed so far, and the total that can be.

    ``without`` are states that ``look`` treats as deleted.

    :raises Conflict: another process collects in this folder.
    """

    def __init__(
        self, root: Path, catalogue: Catalogue, rewriting: Rewriting, *, tell: Callable[[int, int], None], without: Iterable[str] = ()
    ) -> None:
        self._root, self._catalogue, self._rewriting = root, catalogue, rewriting
        self._tell, self._without = tell, frozenset(without)
        self._collected = Collected()

    def look(self) -> Collected:
        """What a collection would do; nothing is changed."""
        done = self._collected
        for path in self._temporaries():
            if is_abandoned(path):
                done.temporaries += 1
                done.temporary_bytes += _size(path)
        manifests = self._manifests()
        if manifests is not None:
            for name in self._unneeded(manifests):
                done.packs += 1
                done.pack_bytes += _size(self._root / name)
            for pack in sparse_packs(manifests):
                done.rewritten += 1
                done.rewritten_bytes += pack.dead_bytes
        return done

    def collect(self) -> Collected:
        """Collect; returns what was done."""
        held = hold(self._root / _ONE_AT_A_TIME)
        if held is None:
            raise Conflict(f"another process collects garbage in {self._root}: let it end, then do it again if there is still need")
        try:
            return self._collect()
        finally:
            held.close()

    def _collect(self) -> Collected:
        manifests = self._manifests()
        unneeded, sparse = ([], []) if manifests is None else (self._unneeded(manifests), sparse_packs(manifests))
        total = sum(_size(self._root / name) for name in unneeded) + sum(pack.dead_bytes for pack in sparse)
        self._say(total)
        self._remove_temporaries()
        self._remove_packs(unneeded, total)
        for pack in sparse:
            checkpoint()
            self._rewrite(pack)
            self._say(total)
        return self._collected

    def _say(self, total: int) -> None:
        self._tell(self._collected.pack_bytes + self._collected.rewritten_bytes, total)

    def _temporaries(self) -> list[Path]:
        return [self._root / name for name in os.listdir(self._root) if name.startswith(TEMPORARY)]

    def _manifests(self) -> dict[str, list[Member]] | None:
        """The manifests in each file; None if one cannot be read, since it may need any pack."""
        listed = self._catalogue.listed()
        unread = sorted(name for name, each in listed.items() if not each.is_sound and (self._root / name).exists())
        if unread:
            more = f" and {len(unread) - 1} more" if len(unread) > 1 else ""
            self._collected.left.append(
                f"every pack, because {unread[0]}{more} cannot be read and may need any of them: `datastates verify` says why, "
                "`datastates repair` brings it back where it is elsewhere"
            )
            return None
        return {name: [member for member in each.members if member.uid not in self._without] for name, each in listed.items()}

    def _unneeded(self, manifests: Mapping[str, list[Member]]) -> list[str]:
        needed = {pack.name for members in manifests.values() for member in members for pack in member.packs}
        return sorted(name for name in os.listdir(self._root) if uid_of(name, "safetensors") is not None and name not in needed)

    def _remove_temporaries(self) -> None:
        found = self._temporaries()
        for start in range(0, len(found), _BATCH):
            checkpoint()
            with locked(self._root, is_shared=False):  # an identity is written under this lock only
                for path in found[start : start + _BATCH]:
                    size = _size(path)
                    if is_abandoned(path, removes=True):
                        self._collected.temporaries += 1
                        self._collected.temporary_bytes += size

    def _remove_packs(self, names: list[str], total: int) -> None:
        for start in range(0, len(names), _BATCH):
            checkpoint()
            with locked(self._root, is_shared=False):
                needed = self._catalogue.needed()
                for name in names[start : start + _BATCH]:
                    if needed is not None and name not in needed:
                        self._remove_pack(name)
                sync_folder(self._root)
            self._say(total)

    def _remove_pack(self, name: str) -> None:
        """Runs under the exclusive lock."""
        path = self._root / name
        size = _size(path)
        try:
            path.unlink()
        except FileNotFoundError:
            return
        except OSError as exc:
            self._collected.left.append(f"{path}: {exc.strerror}")
            return
        self._collected.packs += 1
        self._collected.pack_bytes += size

    def _rewrite(self, pack: Sparse) -> None:
        try:
            freed = self._rewriting.rewrite(pack)
        except (Corrupt, NotFound, Unavailable, Unsupported, OSError) as exc:
            self._collected.left.append(f"{pack.name}, of which {pack.dead_bytes} bytes are not needed: {exc}")
            return
        if freed is not None:
            self._collected.rewritten += 1
            self._collected.rewritten_bytes += freed


def _size(path: Path) -> int:
    try:
        return path.lstat().st_size
    except FileNotFoundError:
        return 0
