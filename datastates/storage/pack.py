"""The pack: a safetensors file with the tensor bytes that states add on one rank.

    8 bytes   length of the JSON, little-endian
    …         JSON: name -> dtype, shape, data_offsets; padded with spaces
    …         data: the new chunks of at least 64 KiB, each from the start of a page; then the
    others, each at a multiple of 16 bytes

A tensor whose bytes are contiguous here is an entry under its path. Pieces of other tensors are
``path@start:end`` (bytes of the tensor), and zeros that fill a page are ``__padding__.N``, since
the format allows no holes. Readers of the format know only row-major tensors. A tensor with another
layout has the shape of its memory order. A tensor of an unknown dtype is an entry of bytes.
``layouts`` in the metadata describes such tensors (as JSON). If a tensor has several shards, each
is an entry ``path#N``, and ``layouts`` has its place in the whole.

In a pack of several states, ``<uid>.<rank>/`` comes before each path. A chunk of less than 64 KiB
is one entry of bytes, ``<uid>.<rank>/chunk.N``, because entries for its tensors would be larger
than the tensors.
"""

from __future__ import annotations

import errno
import logging
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from pathlib import Path
from typing import Any

import msgspec

from datastates.errors import Corrupt, Unavailable
from datastates.state.digest import MAX_MANIFEST, decode_places, frames, tensors_of
from datastates.state.manifest import (
    CHUNK_BYTES,
    LARGE_BYTES,
    ChunkRef,
    Content,
    Manifest,
    PackInfo,
    Shard,
    TensorSpec,
)
from datastates.system.files import open_regular, read_regular
from datastates.system.interrupts import Mutex

PAGE = 4096
"""The alignment of large chunks in a pack, which direct I/O and memory maps require."""

_UNIT = 16
"""The alignment of other chunks: the largest size of an item."""

_FORMAT = "datastates-pack"
_VERSION = "2"

DTYPE_CODES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}
"""The dtypes that safetensors' readers have known for years; a single name that they do not know
makes them refuse the whole file."""


MAX_HEADER = 100 << 20
"""The size of the largest header that is read, in bytes."""


class _Header(msgspec.Struct):
    """The part of a header that ``payload_bytes`` reads."""

    metadata: dict[str, str] = msgspec.field(name="__metadata__")


@dataclass(frozen=True, slots=True)
class PackLayout:
    """The layout of a new pack: its header, the byte offset of each new chunk in the file, and its
    whole size.

    ``has_pages``: it has large chunks, and they begin at pages.
    """

    header: bytes
    offsets: tuple[int, ...]
    size: int
    has_pages: bool


@dataclass(frozen=True, slots=True)
class Place:
    """A shard's bytes in the stream, and the tensor to which they belong."""

    start: int
    end: int
    name: str
    spec: TensorSpec
    shard: Shard


def alignment(length: int) -> int:
    """The alignment of a chunk of ``length`` bytes in a pack."""
    return PAGE if length >= LARGE_BYTES else _UNIT


def padded(length: int) -> int:
    """The bytes that a chunk of ``length`` bytes takes in a pack, with the zeros behind it."""
    return -(-length // (unit := alignment(length))) * unit


def lay_out(manifests: Sequence[Manifest], new: Sequence[tuple[int, int]]) -> PackLayout:
    """The layout of the pack of states that add the chunks ``new``, at least one: index into
    ``manifests``, and into that state's stream.

    They are in the order of the pack: large ones first, and rising within a state.
    """
    lengths = [manifests[state].content.chunks[chunk].length for state, chunk in new]
    origin = manifests[0].origin
    metadata = {
        "format": _FORMAT,
        "version": _VERSION,
        "state": origin.uid,
        "digest": manifests[0].digest,
        "payload_bytes": str(sum(lengths)),
        "states": str(len(manifests)),
    }
    if len(manifests) == 1:
        entries, layouts, _ = _entries(
            bytes(manifests[0].content.tensors), tuple(chunk for _, chunk in new), tuple(lengths)
        )
        body = _rendered(entries)
    else:
        body, layouts = _of_several(manifests, new, lengths)
    if layouts:
        metadata["layouts"] = msgspec.json.encode(layouts).decode()
    text = b'{"__metadata__":' + msgspec.json.encode(metadata) + b"," + body + b"}"
    has_pages = max(lengths) >= LARGE_BYTES
    unit = PAGE if has_pages else _UNIT
    header_length = -(-(8 + len(text)) // unit) * unit
    header = (header_length - 8).to_bytes(8, "little") + text.ljust(header_length - 8)
    offsets, offset = [], header_length
    for length in lengths:
        offsets.append(offset)
        offset += padded(length)
    return PackLayout(header, tuple(offsets), offset, has_pages)


def payload_bytes(path: Path) -> int:
    """The bytes of chunks in a pack, from its header; 0 if the header is damaged.

    :raises FileNotFoundError: there is no such file.
    """
    with os.fdopen(open_regular(path), "rb") as file:
        try:
            length = int.from_bytes(file.read(8), "little")
            header = msgspec.json.decode(file.read(min(length, MAX_HEADER)), type=_Header)
            return int(header.metadata["payload_bytes"])
        except (msgspec.DecodeError, KeyError, ValueError):
            return 0


@lru_cache(maxsize=16)
def places_of(tensors: bytes) -> tuple[Place, ...]:
    """Every shard of the encoded ``Content.tensors`` that has bytes, in the order of the stream."""
    places = []
    for spec in tensors_of(Content(msgspec.Raw(), msgspec.Raw(), msgspec.Raw(tensors), ())):
        for number, shard in enumerate(spec.shards):
            if shard.length:
                name = spec.path if len(spec.shards) == 1 else f"{spec.path}#{number}"
                places.append(Place(shard.start, shard.start + shard.length, name, spec, shard))
    return tuple(sorted(places, key=lambda place: place.start))


_Entry = tuple[str, str, int, int]
"""A name and the beginning of an entry, as JSON, and where its bytes begin and end."""


def _rendered(entries: Sequence[_Entry], prefix: str = "", shift: int = 0) -> bytes:
    return ",".join(
        f'"{prefix}{name}":{said},"data_offsets":[{start + shift},{end + shift}]}}'
        for name, said, start, end in entries
    ).encode()


def _of_several(
    manifests: Sequence[Manifest], new: Sequence[tuple[int, int]], lengths: Sequence[int]
) -> tuple[bytes, dict[str, Any]]:
    """The entries and the layouts of a pack of several states."""
    large: dict[int, list[int]] = {}
    for (state, chunk), length in zip(new, lengths, strict=True):
        if length >= LARGE_BYTES:
            large.setdefault(state, []).append(chunk)
    found, layouts, end = list[bytes](), dict[str, Any](), 0
    for state, chunks in large.items():
        content, prefix = manifests[state].content, _prefix(manifests[state])
        entries, strange, size = _entries(
            bytes(content.tensors),
            tuple(chunks),
            tuple(content.chunks[chunk].length for chunk in chunks),
        )
        found.append(_rendered(entries, prefix, end))
        layouts |= {f"{prefix}{name}": layout for name, layout in strange.items()}
        end += size
    for (state, chunk), length in zip(new, lengths, strict=True):
        if length < LARGE_BYTES:
            entry = (
                f"chunk.{chunk}",
                f'{{"dtype":"U8","shape":[{padded(length)}]',
                end,
                end + padded(length),
            )
            found.append(_rendered([entry], _prefix(manifests[state])))
            end += padded(length)
    return b",".join(found), layouts


def _prefix(manifest: Manifest) -> str:
    return f"{manifest.origin.uid}.{manifest.origin.rank}/"


@lru_cache(maxsize=16)
def _entries(
    tensors: bytes, new: tuple[int, ...], lengths: tuple[int, ...]
) -> tuple[list[_Entry], dict[str, Any], int]:
    """The entries of the chunks of one state, the layouts, and the number of data bytes.

    These are the same at most captures."""
    table = _Table()
    places = places_of(tensors)
    position = 0
    for start, end in _runs(new, lengths):
        while position < len(places) and places[position].end <= start:
            position += 1
        at = position
        done = start
        while at < len(places) and places[at].start < end:
            place, at = places[at], at + 1
            begin, stop = max(done, place.start), min(end, place.end)
            if begin < stop:
                table.fill(begin - done)
                table.add(place, begin, stop)
                done = stop
        table.fill(end - done)
        last = (end - 1) % CHUNK_BYTES + 1
        table.fill(padded(last) - last)
    entries = [
        (
            msgspec.json.encode(name)[1:-1].decode(),
            msgspec.json.encode({"dtype": dtype, "shape": shape}).decode()[:-1],
            start,
            stop,
        )
        for name, (dtype, shape, start, stop) in table.entries.items()
    ]
    return entries, table.layouts, table.end


def _runs(new: tuple[int, ...], lengths: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """The stretches of the stream that are contiguous in the pack."""
    begin = end = -1
    for index, length in zip(new, lengths, strict=True):
        start = index * CHUNK_BYTES
        if start != end:
            if end > begin:
                yield begin, end
            begin = start
        end = start + length
    if end > begin:
        yield begin, end


class _Table:
    """Entries in the order of their bytes, without holes."""

    def __init__(self) -> None:
        self.entries: dict[str, tuple[str, tuple[int, ...], int, int]] = {}
        self.layouts: dict[str, dict[str, Any]] = {}
        self.end = 0
        self._paddings = 0

    def fill(self, length: int) -> None:
        """Add bytes that belong to no tensor."""
        if length > 0:
            self._enter(f"__padding__.{self._paddings}", "U8", (length,), length)
            self._paddings += 1

    def add(self, place: Place, start: int, end: int) -> None:
        """Add the bytes of a shard in ``[start, end)`` of the stream."""
        if (start, end) != (place.start, place.end):
            self._enter(
                f"{place.name}@{start - place.start}:{end - place.start}",
                "U8",
                (end - start,),
                end - start,
            )
            return
        dtype = DTYPE_CODES.get(place.spec.dtype)
        spec, shard = place.spec, place.shard
        shape = _memory_shape(shard.shape, spec.strides)
        name = self._enter(
            place.name, dtype or "U8", shape if dtype else (end - start,), end - start
        )
        if dtype is None or shape != spec.shape:
            self.layouts[name] = {"dtype": spec.dtype, "shape": spec.shape, "strides": spec.strides}
        if shard.shape != spec.shape:
            self.layouts[name]["shard"] = {"offset": shard.offset, "shape": shard.shape}

    def _enter(self, name: str, dtype: str, shape: tuple[int, ...], length: int) -> str:
        while name in self.entries or name == "__metadata__":
            name += "'"
        self.entries[name] = dtype, shape, self.end, self.end + length
        self.end += length
        return name


def _memory_shape(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a dense tensor in the order of its memory, which for a row-major tensor is
    its own shape."""
    stored = tuple(
        size if stride or not size else 1 for size, stride in zip(shape, strides, strict=True)
    )
    wide = [dim for dim, size in enumerate(stored) if size != 1]
    order = sorted(wide, key=lambda dim: -strides[dim])
    return (
        stored
        if order == wide
        else tuple(stored[dim] for dim in sorted(range(len(stored)), key=lambda dim: -strides[dim]))
    )


# The names of the files in a folder of packs, the packs that a state there needs, and what all of
# them take.


_NAME = re.compile(r"([0-9A-Za-z_-]{1,64})\.(\d{1,9})(?:-\d+)?\.(?:manifest|safetensors)")


def manifest_name(uid: str, rank: int) -> str:
    """The name of the file with a state's manifest on one rank, if the state is the first or
    only one in it."""
    return f"{uid}.{rank}.manifest"


def free_name(root: Path, uid: str, rank: int, kind: str) -> str:
    """A name for a ``manifest`` or pack (``safetensors``) that no file has: others may still
    need a file of an earlier state."""
    names = (f"{uid}.{rank}{(number and -number) or ''}.{kind}" for number in count())
    return next(name for name in names if not (root / name).exists())


def uid_of(name: str, kind: str) -> tuple[str, int] | None:
    """The uid and rank in the name of a ``manifest`` or of a pack (``safetensors``); None for
    any other name."""
    match = _NAME.fullmatch(name)
    return (match[1], int(match[2])) if match is not None and name.endswith(kind) else None


def packs_of(root: Path, uid: str, rank: int = 0) -> tuple[PackInfo, ...]:
    """The packs that a state needs, from its manifest in this folder; none if it has no manifest
    that can be read."""
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
    """The bytes that the packs in a folder take; none if it cannot be read.

    What is deleted meanwhile takes none."""
    taken = 0
    with suppress(OSError), os.scandir(root) as entries:
        for entry in entries:
            if uid_of(entry.name, "safetensors") is not None:
                with suppress(FileNotFoundError):  # deleted just now
                    taken += entry.stat(follow_symlinks=False).st_size
    return taken


# The states in a folder and the packs that they need, from manifests that are read only when they
# are new or changed. Needs no torch.


_logger = logging.getLogger(__name__)

LACKING = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""The kernel's errors for a process, or a machine, that lacks descriptors or memory."""

_Stamp = tuple[int, int, int]
_NEVER = -1  # a time that no file has


@dataclass(frozen=True, slots=True)
class ManifestEntry:
    """One manifest in a file: whose it is, where its frame is, and the places of its chunks."""

    uid: str
    rank: int
    offset: int
    length: int
    packs: tuple[PackInfo, ...]
    refs: tuple[ChunkRef, ...]


@dataclass(frozen=True, slots=True)
class ManifestFile:
    """A manifest file: its ``members``, and the offsets of manifests that are ``damaged``.

    ``is_read``: the file could be read at all."""

    stamp: _Stamp
    members: tuple[ManifestEntry, ...]
    damaged: tuple[int, ...] = ()
    is_read: bool = True

    @property
    def is_sound(self) -> bool:
        """Whether every manifest in it can be read."""
        return self.is_read and not self.damaged


class Catalogue:
    """The manifests of a folder and the packs that they need. Safe from any thread.

    Decide what to remove under the folder's exclusive lock, so that nothing is added meanwhile;
    looking needs no lock.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._known: dict[str, ManifestFile] = {}
        self._turn = Mutex()

    def needed(self) -> frozenset[str] | None:
        """The packs that any manifest needs.

        None if one cannot be read: it may need any pack, so none may be removed."""
        listed = self.listed().values()
        if not all(each.is_sound for each in listed):
            return None
        return frozenset(
            pack.name for each in listed for member in each.members for pack in member.packs
        )

    def find(self, uid: str, rank: int) -> tuple[str, int] | None:
        """The file of a state's manifest, and the offset in it."""
        found = ((name, each) for name, listed in self.listed().items() for each in listed.members)
        return next(
            ((name, each.offset) for name, each in found if (each.uid, each.rank) == (uid, rank)),
            None,
        )

    def files(
        self, extent: Callable[[int], int]
    ) -> dict[tuple[str, int], tuple[tuple[str, int], ...]]:
        """What belongs to each state: its manifest and the packs that it needs, each with a name
        and its bytes on disk. The first manifest of a file belongs to all states there, since the
        other manifests are deflated with it.

        A pack that several states need is divided: the name is ``<pack>@<offset>`` for each chunk,
        and its bytes include its part of what nothing needs any more. ``extent`` returns the bytes
        of a pack that a chunk of some length takes.
        """
        listed = self.listed()
        live: defaultdict[str, dict[int, int]] = defaultdict(dict)
        users: defaultdict[str, set[tuple[str, int]]] = defaultdict(set)
        for member in (member for each in listed.values() for member in each.members):
            for ref in member.refs:
                live[member.packs[ref.pack].name][ref.offset] = extent(ref.length)
                users[member.packs[ref.pack].name].add((member.uid, member.rank))
        totals = {pack: sum(chunks.values()) for pack, chunks in live.items()}

        def shares(member: ManifestEntry) -> Iterator[tuple[str, int]]:
            for number, pack in enumerate(member.packs):
                if len(users[pack.name]) < 2:
                    yield pack.name, pack.size
                    continue
                offsets = {ref.offset for ref in member.refs if ref.pack == number}
                yield from (
                    (f"{pack.name}@{at}", pack.size * live[pack.name][at] // totals[pack.name])
                    for at in offsets
                )

        return {
            (member.uid, member.rank): (
                (name, each.members[0].length),
                *(
                    [(f"{name}@{member.offset}", member.length)]
                    if member is not each.members[0]
                    else []
                ),
                *shares(member),
            )
            for name, each in listed.items()
            for member in each.members
        }

    def listed(self) -> dict[str, ManifestFile]:
        """Every manifest file, read again if its stamp has changed: a uid may have come back
        with other packs."""
        with self._turn:
            found: dict[str, ManifestFile] = {}
            with os.scandir(self._root) as entries:
                for entry in entries:
                    if uid_of(entry.name, "manifest") is not None:
                        with suppress(FileNotFoundError):  # removed just now
                            found[entry.name] = self._look(entry)
            self._known = found
            return found

    def look(self, path: Path) -> ManifestFile:
        """One manifest file; other files are not read.

        :raises FileNotFoundError: it was removed.
        """
        with self._turn:
            return self._look(path)

    def _look(self, entry: os.DirEntry[str] | Path) -> ManifestFile:
        status = entry.stat(follow_symlinks=False)
        stamp = (status.st_ino, status.st_mtime_ns, status.st_size)
        known = self._known.get(entry.name)
        if known is not None and known.stamp == stamp:
            return known
        members, damaged = list[ManifestEntry](), list[int]()
        try:
            data = read_regular(Path(entry), most=MAX_MANIFEST)
        except FileNotFoundError:
            raise
        except OSError as exc:
            _logger.warning("no pack is removed while a manifest cannot be read: %s", exc)
            is_passing = exc.errno in LACKING  # it is tried again
            return ManifestFile(
                (stamp[0], _NEVER if is_passing else stamp[1], stamp[2]), (), is_read=False
            )
        first = memoryview(b"")
        for offset, frame in frames(data):
            first = first or frame
            try:
                read = decode_places(frame, source=os.fspath(entry), first=first)
                members.append(
                    ManifestEntry(
                        read.origin.uid, read.origin.rank, offset, len(frame), read.packs, read.refs
                    )
                )
            except (Corrupt, Unavailable) as exc:
                damaged.append(offset)
                _logger.warning("no pack is removed while a manifest cannot be read: %s", exc)
        return ManifestFile(stamp, tuple(members), tuple(damaged))
