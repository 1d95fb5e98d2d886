"""Hints at where the chunks of a folder are, by digest: a file that all processes of the folder
read and extend.

    <folder>/.chunks    2**n pages of 64 entries of 64 bytes; the first n bits of a digest choose
                        the page, the newest entry comes first
    an entry            digest, length, offset (6 bytes), checksum (2), name of the pack without
                        its suffix; zeros if there is none

An entry of length 0 gives the place of a state's manifest. Its digest is the digest of the state's
uid and rank. Its pack is the name of the manifest file without the suffix, and its offset is the
offset of the frame.

No code relies on the index: code that uses a hint compares the bytes there. A file that is stale,
torn, copied, forged or gone costs only space. The file is never fsynced, and no memory is held
between two puts.

If a page is full and the file is crowded, the file is doubled, without the entries of packs that
are gone. Otherwise, and in a file of the largest size, the page's oldest entry gives way. A file
that is missing or has an invalid size starts with the chunks of the newest manifests.
"""

from __future__ import annotations

import fcntl
import logging
import os
import struct
import zlib
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from heapq import nlargest
from itertools import groupby
from pathlib import Path
from typing import Self

import msgspec

from datastates.errors import Corrupt, DatastatesError, Unsupported
from datastates.state.digest import MAX_MANIFEST, chunk_digest, decode_sound, encode_all, frames
from datastates.state.manifest import CHUNK_BYTES, LARGE_BYTES, ChunkRef, Manifest, PackInfo
from datastates.system.files import (
    close_lockable,
    open_lockable,
    open_regular,
    read_regular,
    write_at,
)

from .copying import are_equal
from .durable_files import temporary
from .pack import MAX_HEADER, PAGE, PackLayout, alignment, lay_out, padded, uid_of
from .tier import Payload

_logger = logging.getLogger(__name__)

SHARED_BYTES = 64 << 10
"""Chunks below this size are not shared between unrelated states: storing them again costs less
than what a shared chunk pins."""

NAME = ".chunks"
_SUFFIX = ".safetensors"
_ENTRY = struct.Struct("<16sIQ36s")
_STEM_BYTES = 36
_STEM_AT = 28
_OFFSET = (1 << 48) - 1
_LEAST_BITS = 4
_MOST_BITS = 17
_SAMPLED_PAGES = 16
_BEGIN_WITH = 256

_Key = tuple[bytes, int]
"""A chunk's digest and length."""


@dataclass(frozen=True, slots=True)
class Hint:
    """A chunk, and the pack and the offset at which it may be stored."""

    key: _Key
    pack: str
    offset: int


class ChunkIndex:
    """The hints of one folder.

    Safe from any thread and process. Errors of the file system are logged, and then nothing is
    found."""

    def __init__(self, root: Path) -> None:
        self._root, self._path = root, root / NAME

    def find(self, keys: Iterable[_Key]) -> dict[_Key, list[Hint]]:
        """The hints for chunks and states that have any, in the order in which to try them."""
        found: dict[_Key, list[Hint]] = {}
        try:
            fd, bits = self._open()
            try:
                for key in keys:
                    page = os.pread(fd, PAGE, _page_of(key[0], bits))
                    if key[0] in page and (hints := list(_hints(page, key))):
                        found[key] = hints
            finally:
                os.close(fd)
        except OSError as exc:
            _logger.info(
                "chunks of other states are not looked for: %s cannot be read (%s)", self._path, exc
            )
        return found

    def add(self, hints: Iterable[Hint]) -> None:
        """Add hints for chunks in packs that a manifest needs."""
        left = [
            _sealed(_ENTRY.pack(*hint.key, hint.offset, stem))
            for hint in hints
            if len(stem := _stem(hint.pack)) <= _STEM_BYTES  # true of all our packs
        ]
        try:
            with suppress(FileNotFoundError):
                if self._path.stat().st_nlink > 1:
                    # a snapshot made by ``cp -al`` has this file too, and keeps it as it is
                    self._path.unlink()
            if left and _bits_at(self._path) is None:
                self._make()
            while left:
                with self._locked() as (fd, bits):
                    left = _insert(fd, bits, left)
                    if left:
                        self._grow(fd, bits)
        except OSError as exc:
            _logger.info(
                "the chunks of a state are not shared: %s cannot be written (%s)", self._path, exc
            )

    def damaged(self) -> int:
        """The number of entries that are not as they were written; a wrong size of the file counts
        as one.

        :raises OSError: the file cannot be read.
        """
        count = 0
        with suppress(FileNotFoundError), os.fdopen(open_regular(self._path), "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH)
            pages = filter(any, iter(partial(file.read, PAGE), b""))
            count = sum(
                any(entry) and entry != _sealed(entry)
                for page in pages
                for entry in (page[at : at + _ENTRY.size] for at in range(0, PAGE, _ENTRY.size))
            )
            count += _bits(os.fstat(file.fileno()).st_size) is None
        return count

    def _open(self) -> tuple[int, int]:
        """The file, open for reading, and how many bits of a digest choose a page."""
        if _bits_at(self._path) is None:
            self._make()
        fd = open_regular(self._path)
        bits = _bits(os.fstat(fd).st_size)
        if bits is None:
            os.close(fd)
            raise OSError(f"{self._path} was changed meanwhile")
        return fd, bits

    def _make(self) -> None:
        with temporary(self._path) as file:
            if _bits_at(self._path) is not None:
                return  # another process was first
            os.ftruncate(file.fd, PAGE << _LEAST_BITS)
            file.commit()
        self.add(_newest(self._root))

    @contextmanager
    def _locked(self) -> Iterator[tuple[int, int]]:
        """The file, open for writing; no other process writes or replaces it during the block."""
        while True:
            fd = open_lockable(self._path, os.O_RDWR)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX)
                bits = _bits(os.fstat(fd).st_size)
                if bits is None:
                    raise OSError(f"{self._path} was changed meanwhile")
                if os.path.samestat(os.fstat(fd), os.stat(self._path)):
                    yield fd, bits
                    return
            finally:
                close_lockable(fd)

    def _grow(self, fd: int, bits: int) -> None:
        """Replace this file by one with twice the pages."""
        here = {
            _stem(name.removesuffix(".manifest"))
            for name in os.listdir(self._root)
            if name.endswith((_SUFFIX, ".manifest"))
        }
        with temporary(self._path) as file:
            os.ftruncate(file.fd, PAGE << bits + 1)
            for number in range(1 << bits):
                write_at(
                    file.fd,
                    _split(os.pread(fd, PAGE, number * PAGE), bits, here),
                    2 * number * PAGE,
                )
            file.commit()


def state_key(uid: str, rank: int) -> _Key:
    """The key of the entry for the place of a state's manifest."""
    return chunk_digest(f"{uid}.{rank}".encode()), 0


def state_hints(
    stem: str, owners: Iterable[tuple[str, int] | None], frames: Iterable[bytes]
) -> Iterator[Hint]:
    """The entries of the manifests in the frames of one file. An owner is None if its frame is
    damaged."""
    offset = 0
    for owner, frame in zip(owners, frames, strict=True):
        if owner is not None:
            yield Hint(state_key(*owner), f"{stem}{_SUFFIX}", offset)
        offset += len(frame)


def chunk_hints(manifest: Manifest, packs: Container[str] | None = None) -> Iterator[Hint]:
    """The entries of a state's chunks that other states may share, if they are in one of
    ``packs``."""
    for chunk, ref in zip(manifest.content.chunks, manifest.refs, strict=False):
        name = manifest.packs[ref.pack].name
        if chunk.length >= SHARED_BYTES and (packs is None or name in packs):
            yield Hint((chunk.digest, chunk.length), name, ref.offset)


def _insert(fd: int, bits: int, entries: list[bytes]) -> list[bytes]:
    """Put entries first in their pages; returns those that are left because the file must grow
    first."""
    for number, entry in enumerate(entries):
        at = _page_of(entry, bits)
        page = os.pread(fd, PAGE, at)
        if page[PAGE - _ENTRY.size + _STEM_AT] and bits < _MOST_BITS and _is_crowded(fd, bits):
            return entries[number:]
        write_at(fd, entry + page[: -_ENTRY.size], at)
    return []


def _is_crowded(fd: int, bits: int) -> bool:
    """Whether most of a few sampled pages are filled to a quarter, so that digests made to fall
    on one page do not make the file grow."""
    step, at = PAGE << bits - _LEAST_BITS, PAGE // 4 + _STEM_AT
    return (
        sum(os.pread(fd, 1, number * step + at) > b"\0" for number in range(_SAMPLED_PAGES))
        > _SAMPLED_PAGES // 2
    )


def _split(page: bytes, bits: int, here: set[bytes]) -> bytes:
    """The two pages into which one is split, by the next bit of each digest, without the entries
    of packs that are gone."""
    halves: tuple[list[bytes], list[bytes]] = ([], [])
    for at in range(0, PAGE, _ENTRY.size):
        entry = page[at : at + _ENTRY.size]
        if entry[_STEM_AT:] in here:
            halves[entry[bits >> 3] >> 7 - (bits & 7) & 1].append(entry)
    return b"".join(b"".join(half).ljust(PAGE, b"\0") for half in halves)


def _page_of(digest: bytes, bits: int) -> int:
    """The offset at which the page of a digest, or of an entry, begins."""
    return (int.from_bytes(digest[:4], "big") >> 32 - bits) * PAGE


def _hints(page: bytes, key: _Key) -> Iterator[Hint]:
    wanted = key[0] + key[1].to_bytes(4, "little")
    at = page.find(wanted)
    while at >= 0:
        if at % _ENTRY.size == 0:
            _, _, offset, stem = _ENTRY.unpack_from(page, at)
            pack = stem.rstrip(b"\0").decode("ascii", "replace") + _SUFFIX
            if uid_of(pack, "safetensors") is not None:
                yield Hint(key, pack, offset & _OFFSET)
        at = page.find(wanted, at + 1)


def _sealed(entry: bytes) -> bytes:
    """The entry with its check sum, in the part of the offset that no file is large enough to
    need."""
    return (
        entry[:26]
        + (zlib.crc32(entry[:26] + entry[28:]) & 0xFFFF | 1).to_bytes(2, "little")
        + entry[28:]
    )


def _stem(pack: str) -> bytes:
    return pack.removesuffix(_SUFFIX).encode().ljust(_STEM_BYTES, b"\0")


def _bits_at(path: Path) -> int | None:
    try:
        return _bits(path.stat().st_size)
    except FileNotFoundError:
        return None


def _bits(size: int) -> int | None:
    """The number of bits that choose a page in a file of this size; None if no index has this
    size."""
    bits = (size // PAGE).bit_length() - 1
    return bits if size == PAGE << max(bits, 0) and _LEAST_BITS <= bits <= _MOST_BITS else None


def _newest(root: Path) -> Iterator[Hint]:
    """The entries for the newest manifests of a folder."""
    with os.scandir(root) as entries:
        found = [
            (entry.stat().st_mtime_ns, entry.path)
            for entry in entries
            if uid_of(entry.name, "manifest") is not None
        ]
    for _, path in nlargest(_BEGIN_WITH, found):
        first = memoryview(b"")
        with suppress(OSError):
            for offset, frame in frames(read_regular(path, most=MAX_MANIFEST)):
                first = first or frame
                with suppress(DatastatesError):
                    manifest = decode_sound(frame, source=path, first=first).manifest
                    stem = os.path.basename(path).removesuffix(".manifest")
                    yield Hint(
                        state_key(manifest.origin.uid, manifest.origin.rank),
                        f"{stem}{_SUFFIX}",
                        offset,
                    )
                    yield from chunk_hints(manifest)


# Decides, before any file is touched, which chunks a put of one or several states writes, and to
# which it refers.


"""A chunk's digest and length."""

Places = Mapping[_Key, tuple[PackInfo, int]]
"""The pack and the offset of each chunk, by its digest and length."""


@dataclass(frozen=True, slots=True)
class PutPlan:
    """A put of the chunks ``new`` into the pack ``name``; ``layout`` is None if nothing is new, so
    that there is no pack.

    ``new`` are in the order of the pack: the index of the state, and of the chunk in it.
    ``manifests`` are those to write, with the place of every chunk; ``borrowed`` are the older
    packs to which they refer.
    """

    manifests: tuple[Manifest, ...]
    name: str
    new: tuple[tuple[int, int], ...]
    layout: PackLayout | None
    borrowed: tuple[PackInfo, ...]


def plan_put(
    manifests: Sequence[Manifest],
    places: Sequence[Places],
    name: str,
    are_equal: Callable[[tuple[int, int], tuple[int, int]], bool] = lambda one, other: True,
) -> PutPlan:
    """The plan of a put. Each state refers to its chunks that have one of ``places``, and to equal
    ones that came earlier in this put.

    ``are_equal`` compares the bytes of two chunks of two states whose digests are equal.
    """
    first: dict[_Key, list[tuple[int, int]]] = {}
    twin: dict[tuple[int, int], tuple[int, int]] = {}
    for state, manifest in enumerate(manifests):
        for index, chunk in enumerate(manifest.content.chunks):
            key, mine = (chunk.digest, chunk.length), (state, index)
            if key in places[state]:
                continue
            others = first.setdefault(key, [])
            twin[mine] = next(
                (each for each in others if each[0] == state or are_equal(each, mine)), mine
            )
            if twin[mine] == mine:
                others.append(mine)
    new = [mine for mine, other in twin.items() if mine == other]
    new.sort(key=lambda mine: _length(manifests, mine) < LARGE_BYTES)
    layout = lay_out(manifests, new) if new else None
    own: dict[tuple[int, int], tuple[PackInfo, int]] = {}
    if layout is not None:
        info = PackInfo(name, layout.size, len(layout.header), chunk_digest(layout.header))
        own = {mine: (info, offset) for mine, offset in zip(new, layout.offsets, strict=True)}
    placed, borrowed = list[Manifest](), dict[PackInfo, None]()
    for state, manifest in enumerate(manifests):
        added = sum(
            _length(manifests, mine)
            for mine, other in twin.items()
            if mine == other and mine[0] == state
        )
        packs: dict[PackInfo, int] = {own[new[0]][0]: 0} if added else {}
        refs = []
        for index, chunk in enumerate(manifest.content.chunks):
            mine = state, index
            pack, offset = (
                own[twin[mine]] if mine in twin else places[state][chunk.digest, chunk.length]
            )
            if mine not in twin:
                borrowed[pack] = None
            refs.append(ChunkRef(packs.setdefault(pack, len(packs)), offset, chunk.length))
        placed.append(
            msgspec.structs.replace(manifest, packs=tuple(packs), refs=tuple(refs), bytes_new=added)
        )
    return PutPlan(tuple(placed), name, tuple(new), layout, tuple(borrowed))


def _length(manifests: Sequence[Manifest], mine: tuple[int, int]) -> int:
    return manifests[mine[0]].content.chunks[mine[1]].length


def places_of(base: Manifest | None) -> Places:
    """The places of a manifest's chunks; empty for a manifest that no folder placed."""
    if base is None:
        return {}
    placed = zip(base.content.chunks, base.refs, strict=False)
    return {
        (chunk.digest, chunk.length): (base.packs[ref.pack], ref.offset) for chunk, ref in placed
    }


def readable(manifests: Sequence[Manifest]) -> list[bytes]:
    """The frames of a file with these manifests. One frame of each layout was decoded again,
    because a state that cannot be read must not count as durable.

    :raises Unsupported: one could not be read again.
    """
    uid = manifests[0].origin.uid
    try:
        encoded = encode_all(manifests)
        size = sum(map(len, encoded))
        layouts = {
            (bytes(manifest.content.skeleton), bytes(manifest.content.tensors)): (manifest, frame)
            for manifest, frame in zip(
                manifests, encoded if size <= MAX_MANIFEST else (), strict=False
            )
        }
        for manifest, frame in layouts.values():
            uid = manifest.origin.uid
            decode_sound(frame, source=f"the manifest of state {uid}", first=encoded[0])
    except (Corrupt, TypeError, ValueError, OverflowError) as exc:
        raise Unsupported(
            f"state {uid} was not written, because it could not be read again: {exc}"
        ) from exc
    if size > MAX_MANIFEST:
        raise Unsupported(
            f"state {uid} was not written: what it holds besides tensors and arrays takes {size}"
            f" bytes, and {MAX_MANIFEST} are the most that can be read again: keep large values as"
            " tensors or arrays"
        )
    return encoded


# Borrows chunks that other states of a folder hold already, whichever process wrote them, after
# comparing each byte by byte.


_AHEAD_BYTES = 8 * CHUNK_BYTES
"""How much the kernel is asked to read ahead; without this the disk delivers a third of its
speed."""
"""A chunk's digest and length."""

Stamp = tuple[int, int, int, int]
"""Device, inode, time and size, which distinguish a file from another one that has taken its
name."""


@dataclass(frozen=True, slots=True)
class SharedChunks:
    """Chunks of a state that are stored in packs of other states. ``stamps`` identify the packs
    whose bytes were compared."""

    places: Mapping[_Key, tuple[PackInfo, int]] = field(default_factory=dict)
    stamps: Mapping[str, Stamp] = field(default_factory=dict)


def find_shared(
    root: Path,
    hinted: Mapping[_Key, Sequence[Hint]],
    payload: Payload,
    known: Container[_Key],
    likely: Places,
) -> SharedChunks:
    """The chunks of a state that are stored in packs of ``root``, except ``known`` ones. The
    ``hinted`` and the ``likely`` places are compared.
    """
    first: dict[_Key, int] = {}
    for number, chunk in enumerate(payload.manifest.content.chunks):
        key = (chunk.digest, chunk.length)
        if key not in known and (key in hinted or key in likely):
            first.setdefault(key, number)
    if not first:
        return SharedChunks()
    places: dict[_Key, tuple[PackInfo, int]] = {}
    stamps: dict[str, Stamp] = {}
    hints = [Hint(key, likely[key][0].name, likely[key][1]) for key in first if key in likely]
    hints += [hint for key in first for hint in hinted.get(key, ())]
    hints = sorted(dict.fromkeys(hints), key=lambda hint: (hint.pack, hint.offset))
    buffer = memoryview(bytearray(CHUNK_BYTES if hints else 0))
    for name, group in groupby(hints, key=lambda hint: hint.pack):
        asked = [hint for hint in group if hint.key not in places]
        with suppress(OSError), _Pack(root / name, buffer) as pack:
            found = {
                hint.key: (pack.info, hint.offset)
                for hint in asked
                if pack.holds(hint.offset, payload.chunks[first[hint.key]])
            }
            if found:
                places |= found
                stamps[name] = pack.stamp
    return SharedChunks(places, stamps)


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
    """A pack to compare with. It is read, not mapped: a mapped file that is cut short kills the
    process.

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
        """Whether these bytes are stored at ``offset`` as a chunk: aligned, and followed by
        zeros."""
        end = padded(wanted.nbytes)
        if (
            offset % alignment(wanted.nbytes)
            or offset < self.info.header_length
            or offset + end > self.info.size
        ):
            return False
        os.posix_fadvise(self._fd, offset, _AHEAD_BYTES, os.POSIX_FADV_WILLNEED)
        found = self._buffer[:end]
        if os.preadv(self._fd, [found], offset) != end:
            return False
        return are_equal(found[: wanted.nbytes], wanted) and not any(found[wanted.nbytes :])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)


def _info(fd: int, name: str, size: int) -> PackInfo:
    length = 8 + int.from_bytes(os.pread(fd, 8, 0), "little")
    if length % alignment(0) or not 8 < length <= min(size, MAX_HEADER):
        raise OSError(f"{name} is no pack")
    return PackInfo(name, size, length, chunk_digest(os.pread(fd, length, 0)))
