"""Borrows chunks that other states of a folder hold already, whichever process wrote them, after comparing each byte by byte.

A digest tells which chunks may be equal, never that they are: xxh3 finds rot, but does not resist an attacker who makes two chunks of one
digest. The compared bytes are read once, when a state first shares them; its successors refer to what it refers to.
"""

from __future__ import annotations

import os
from collections.abc import Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from types import TracebackType
from typing import Self

from datastates.content.digest import chunk_digest
from datastates.content.manifest import CHUNK_BYTES, PackInfo
from datastates.system.regular import open_regular

from .comparing import are_equal
from .index import SHARED_BYTES, Hint
from .pack import MAX_HEADER, alignment, padded
from .placing import Places
from .tier import Payload

__all__ = ["Borrowed", "Stamp", "find_borrowed", "shared_keys", "stamp_of"]

_AHEAD_BYTES = 8 * CHUNK_BYTES
"""How much the kernel is asked to read ahead; without this the disk delivers a third of its speed."""

_Key = tuple[bytes, int]
"""A chunk's digest and length."""

Stamp = tuple[int, int, int, int]
"""Device, inode, time and size, which distinguish a file from another one that has taken its name."""


@dataclass(frozen=True, slots=True)
class Borrowed:
    """Chunks of a state that lie in packs of other states; ``stamps`` are those of the packs when their bytes were compared."""

    places: Mapping[_Key, tuple[PackInfo, int]] = field(default_factory=dict)
    stamps: Mapping[str, Stamp] = field(default_factory=dict)


def shared_keys(payload: Payload, known: Container[_Key]) -> list[_Key]:
    """The chunks of a state that may lie in packs of other states, except ``known`` ones."""
    keys = ((chunk.digest, chunk.length) for chunk in payload.manifest.content.chunks if chunk.length >= SHARED_BYTES)
    return [key for key in keys if key not in known]


def find_borrowed(root: Path, hinted: Mapping[_Key, Sequence[Hint]], payload: Payload, known: Container[_Key], likely: Places) -> Borrowed:
    """The chunks of a state that lie in packs of ``root``, except ``known`` ones: at places that are ``hinted`` for the
    ``shared_keys`` of the state, or at ``likely`` ones.
    """
    first: dict[_Key, int] = {}
    for number, chunk in enumerate(payload.manifest.content.chunks):
        key = (chunk.digest, chunk.length)
        if key not in known and (key in hinted or key in likely):
            first.setdefault(key, number)
    if not first:
        return Borrowed()
    places: dict[_Key, tuple[PackInfo, int]] = {}
    stamps: dict[str, Stamp] = {}
    hints = [Hint(key, likely[key][0].name, likely[key][1]) for key in first if key in likely]
    hints += [hint for key in first for hint in hinted.get(key, ())]
    hints = sorted(dict.fromkeys(hints), key=lambda hint: (hint.pack, hint.offset))
    buffer = memoryview(bytearray(CHUNK_BYTES if hints else 0))
    for name, group in groupby(hints, key=lambda hint: hint.pack):
        asked = [hint for hint in group if hint.key not in places]
        with suppress(OSError), _Pack(root / name, buffer) as pack:
            found = {hint.key: (pack.info, hint.offset) for hint in asked if pack.holds(hint.offset, payload.chunks[first[hint.key]])}
            if found:
                places |= found
                stamps[name] = pack.stamp
    return Borrowed(places, stamps)


def stamp_of(status: os.stat_result) -> Stamp:
    """The facts by which a file is recognized as the same."""
    return status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size


def is_there(path: Path, size: int, stamp: Stamp | None = None) -> bool:
    """Whether a file of that size exists, and is the one of the ``stamp`` if that is given."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return False
    return status.st_size == size if stamp is None else stamp_of(status) == stamp


class _Pack:
    """A pack to compare with. It is read, not mapped: a mapped file that is cut short kills the process.

    :raises OSError: it does not exist, cannot be read, or is no pack.
    """

    def __init__(self, path: Path, buffer: memoryview) -> None:
        self._fd, self._buffer = open_regular(path), buffer
        try:
            status = os.fstat(self._fd)
            self.stamp, self.info = stamp_of(status), _info(self._fd, path.name, status.st_size)
        except BaseException:
            os.close(self._fd)
            raise

    def holds(self, offset: int, wanted: memoryview) -> bool:
        """Whether these bytes lie at ``offset`` as a chunk: aligned, and followed by zeros."""
        end = padded(wanted.nbytes)
        if offset % alignment(wanted.nbytes) or offset < self.info.header_length or offset + end > self.info.size:
            return False
        os.posix_fadvise(self._fd, offset, _AHEAD_BYTES, os.POSIX_FADV_WILLNEED)
        found = self._buffer[:end]
        if os.preadv(self._fd, [found], offset) != end:
            return False
        return are_equal(found[: wanted.nbytes], wanted) and not any(found[wanted.nbytes :])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        os.close(self._fd)


def _info(fd: int, name: str, size: int) -> PackInfo:
    length = 8 + int.from_bytes(os.pread(fd, 8, 0), "little")
    if length % alignment(0) or not 8 < length <= min(size, MAX_HEADER):
        raise OSError(f"{name} is no pack")
    return PackInfo(name, size, length, chunk_digest(os.pread(fd, length, 0)))
