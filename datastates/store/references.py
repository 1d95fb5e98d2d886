"""The states in a folder and the packs that they need, from manifests that are read only when they are new or changed. Needs no torch."""

from __future__ import annotations

import errno
import logging
import os
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from datastates.content.envelope import MAX_MANIFEST, decode_places, frames
from datastates.content.manifest import ChunkRef, PackInfo
from datastates.errors import Corrupt, Unavailable
from datastates.system.interrupts import Mutex
from datastates.system.regular import read_regular

from .naming import uid_of

__all__ = ["LACKING", "Catalogue", "Listed", "Member"]

_logger = logging.getLogger(__name__)

LACKING = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""The kernel's errors for a process, or a machine, that lacks descriptors or memory."""

_Stamp = tuple[int, int, int]
_NEVER = -1  # a time that no file has


@dataclass(frozen=True, slots=True)
class Member:
    """One manifest in a file: whose it is, where its frame is, and the places of its chunks."""

    uid: str
    rank: int
    offset: int
    length: int
    packs: tuple[PackInfo, ...]
    refs: tuple[ChunkRef, ...]


@dataclass(frozen=True, slots=True)
class Listed:
    """A manifest file: its ``members``, and the offsets of manifests that are ``damaged``. ``is_read``: the file could be read at all."""

    stamp: _Stamp
    members: tuple[Member, ...]
    damaged: tuple[int, ...] = ()
    is_read: bool = True

    @property
    def is_sound(self) -> bool:
        """Whether every manifest in it can be read."""
        return self.is_read and not self.damaged


class Catalogue:
    """The manifests of a folder and the packs that they need. Safe from any thread.

    Decide what to remove under the folder's exclusive lock, so that nothing is added meanwhile; looking needs no lock.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._known: dict[str, Listed] = {}
        self._turn = Mutex()

    def needed(self) -> frozenset[str] | None:
        """The packs that any manifest needs. None if one cannot be read: it may need any pack, so none may be removed."""
        listed = self.listed().values()
        return frozenset(pack.name for each in listed for member in each.members for pack in member.packs) if _are_sound(listed) else None

    def find(self, uid: str, rank: int) -> tuple[str, int] | None:
        """The file of a state's manifest, and the offset in it."""
        found = ((name, each) for name, listed in self.listed().items() for each in listed.members)
        return next(((name, each.offset) for name, each in found if (each.uid, each.rank) == (uid, rank)), None)

    def files(self, extent: Callable[[int], int]) -> dict[tuple[str, int], tuple[tuple[str, int], ...]]:
        """What belongs to each state: its manifest and the packs that it needs, each with a name and its bytes on disk. The first manifest
        of a file belongs to all states there, as the others are deflated with it.

        A pack that several states need is divided: the name is ``<pack>@<offset>`` for each chunk, and its bytes include its part of what
        nothing needs any more. ``extent`` returns the bytes of a pack that a chunk of some length takes.
        """
        listed = self.listed()
        live: defaultdict[str, dict[int, int]] = defaultdict(dict)
        users: defaultdict[str, set[tuple[str, int]]] = defaultdict(set)
        for member in (member for each in listed.values() for member in each.members):
            for ref in member.refs:
                live[member.packs[ref.pack].name][ref.offset] = extent(ref.length)
                users[member.packs[ref.pack].name].add((member.uid, member.rank))
        totals = {pack: sum(chunks.values()) for pack, chunks in live.items()}

        def shares(member: Member) -> Iterator[tuple[str, int]]:
            for number, pack in enumerate(member.packs):
                if len(users[pack.name]) < 2:
                    yield pack.name, pack.size
                    continue
                offsets = {ref.offset for ref in member.refs if ref.pack == number}
                yield from ((f"{pack.name}@{at}", pack.size * live[pack.name][at] // totals[pack.name]) for at in offsets)

        return {
            (member.uid, member.rank): (
                (name, each.members[0].length),
                *([(f"{name}@{member.offset}", member.length)] if member is not each.members[0] else []),
                *shares(member),
            )
            for name, each in listed.items()
            for member in each.members
        }

    def listed(self) -> dict[str, Listed]:
        """Every manifest file, read again if its stamp has changed: a uid may have come back with other packs."""
        with self._turn:
            found: dict[str, Listed] = {}
            with os.scandir(self._root) as entries:
                for entry in entries:
                    if uid_of(entry.name, "manifest") is not None:
                        with suppress(FileNotFoundError):  # removed just now
                            found[entry.name] = self._look(entry)
            self._known = found
            return found

    def look(self, path: Path) -> Listed:
        """One manifest file; the others are not looked at.

        :raises FileNotFoundError: it was removed.
        """
        with self._turn:
            return self._look(path)

    def _look(self, entry: os.DirEntry[str] | Path) -> Listed:
        status = entry.stat(follow_symlinks=False)
        stamp = (status.st_ino, status.st_mtime_ns, status.st_size)
        known = self._known.get(entry.name)
        if known is not None and known.stamp == stamp:
            return known
        members, damaged = list[Member](), list[int]()
        try:
            data = read_regular(Path(entry), most=MAX_MANIFEST)
        except FileNotFoundError:
            raise
        except OSError as exc:
            _logger.warning("no pack is removed while a manifest cannot be read: %s", exc)
            is_passing = exc.errno in LACKING  # it is tried again
            return Listed((stamp[0], _NEVER if is_passing else stamp[1], stamp[2]), (), is_read=False)
        first = memoryview(b"")
        for offset, frame in frames(data):
            first = first or frame
            try:
                read = decode_places(frame, source=os.fspath(entry), first=first)
                members.append(Member(read.origin.uid, read.origin.rank, offset, len(frame), read.packs, read.refs))
            except (Corrupt, Unavailable) as exc:
                damaged.append(offset)
                _logger.warning("no pack is removed while a manifest cannot be read: %s", exc)
        return Listed(stamp, tuple(members), tuple(damaged))


def _are_sound(listed: Collection[Listed]) -> bool:
    return all(each.is_sound for each in listed)
