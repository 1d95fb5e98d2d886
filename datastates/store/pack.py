"""The pack: one file with the tensor bytes that one state adds on one rank; any reader of safetensors opens it.

    8 bytes   length of the JSON, little-endian
    …         JSON: name -> dtype, shape, data_offsets; padded with spaces, so that the data starts at a page
    …         data: the chunks that this state adds, in the order of its stream, each from the start of a page

A tensor whose bytes are contiguous here is an entry under its path. Pieces of other tensors are ``path@start:end`` (bytes of the
tensor), and zeros that fill a page are ``__padding__.N``, since the format allows no holes. Readers of the format know only row-major
tensors. So a tensor with another layout has the shape of its memory order, and one of a dtype that they do not know is an entry of bytes;
``layouts`` in the metadata says (as JSON) what such tensors are. If a tensor has several shards, each is an entry ``path#N``, and
``layouts`` says where in the whole it belongs.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from datastates.content.check import tensors_of
from datastates.content.manifest import CHUNK_BYTES, Content, Manifest, Shard, TensorSpec
from datastates.system.regular import open_regular

__all__ = ["MAX_HEADER", "PAGE", "PackLayout", "Place", "lay_out", "padded", "payload_bytes", "places_of"]

PAGE = 4096
"""The alignment of chunks in a pack, which direct I/O and memory maps require."""

_FORMAT = "datastates-pack"
_VERSION = "1"

_DTYPES = {
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
"""The dtypes that safetensors' readers have known for years; a single name that they do not know makes them refuse the whole file."""


MAX_HEADER = 100 << 20
"""The size of the largest header that is read, in bytes."""


class _Header(msgspec.Struct):
    """The part of a header that ``payload_bytes`` reads."""

    metadata: dict[str, str] = msgspec.field(name="__metadata__")


@dataclass(frozen=True, slots=True)
class PackLayout:
    """The layout of a new pack: its header, the byte offset of each new chunk in the file, and its whole size."""

    header: bytes
    offsets: tuple[int, ...]
    size: int


@dataclass(frozen=True, slots=True)
class Place:
    """A shard's bytes in the stream, and the tensor to which they belong."""

    start: int
    end: int
    name: str
    spec: TensorSpec
    shard: Shard


def padded(length: int) -> int:
    """``length`` rounded up to whole pages."""
    return -(-length // PAGE) * PAGE


def lay_out(manifest: Manifest, new: Sequence[int]) -> PackLayout:
    """The layout of the pack of a state that adds the chunks ``new``: rising indices into its stream, at least one."""
    body, layouts, data_bytes = _body(manifest.content, tuple(new))
    lengths = [manifest.content.chunks[index].length for index in new]
    metadata = {
        "format": _FORMAT,
        "version": _VERSION,
        "state": manifest.origin.uid,
        "digest": manifest.digest,
        "payload_bytes": str(sum(lengths)),
    }
    if layouts:
        metadata["layouts"] = layouts
    text = b'{"__metadata__":' + msgspec.json.encode(metadata) + b"," + body + b"}"
    header_length = padded(8 + len(text))
    header = (header_length - 8).to_bytes(8, "little") + text.ljust(header_length - 8)
    offsets, offset = [], header_length
    for length in lengths:
        offsets.append(offset)
        offset += padded(length)
    assert offset == header_length + data_bytes
    return PackLayout(header, tuple(offsets), offset)


def payload_bytes(path: Path) -> int:
    """The bytes of chunks in a pack, as its header says; 0 if the header is damaged.

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


def _body(content: Content, new: tuple[int, ...]) -> tuple[bytes, str, int]:
    lengths = tuple(content.chunks[index].length for index in new)
    return _entries(bytes(content.tensors), new, lengths)


@lru_cache(maxsize=16)
def _entries(tensors: bytes, new: tuple[int, ...], lengths: tuple[int, ...]) -> tuple[bytes, str, int]:
    """The header's entries as JSON without its braces, the layouts, and the number of data bytes. These are the same at most captures."""
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
        table.fill(padded(end - start) - (end - start))
    layouts = msgspec.json.encode(table.layouts).decode() if table.layouts else ""
    return msgspec.json.encode(table.entries)[1:-1], layouts, table.end


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
        self.entries: dict[str, dict[str, Any]] = {}
        self.layouts: dict[str, dict[str, Any]] = {}
        self.end = 0
        self._paddings = 0

    def fill(self, length: int) -> None:
        """Add bytes that belong to no tensor."""
        if length > 0:
            self._enter(f"__padding__.{self._paddings}", "U8", (length,), length)
            self._paddings += 1

    def add(self, place: Place, start: int, end: int) -> None:
        """Add the bytes of a shard that lie in ``[start, end)`` of the stream."""
        if (start, end) != (place.start, place.end):
            self._enter(f"{place.name}@{start - place.start}:{end - place.start}", "U8", (end - start,), end - start)
            return
        dtype = _DTYPES.get(place.spec.dtype)
        spec, shard = place.spec, place.shard
        shape = _memory_shape(shard.shape, spec.strides)
        name = self._enter(place.name, dtype or "U8", shape if dtype else (end - start,), end - start)
        if dtype is None or shape != spec.shape:
            self.layouts[name] = {"dtype": spec.dtype, "shape": spec.shape, "strides": spec.strides}
        if shard.shape != spec.shape:
            self.layouts[name]["shard"] = {"offset": shard.offset, "shape": shard.shape}

    def _enter(self, name: str, dtype: str, shape: tuple[int, ...], length: int) -> str:
        while name in self.entries or name == "__metadata__":
            name += "'"
        self.entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": (self.end, self.end + length)}
        self.end += length
        return name


def _memory_shape(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a dense tensor in the order of its memory, which for a row-major tensor is its own shape."""
    stored = tuple(size if stride or not size else 1 for size, stride in zip(shape, strides, strict=True))
    wide = [dim for dim, size in enumerate(stored) if size != 1]
    order = sorted(wide, key=lambda dim: -strides[dim])
    return stored if order == wide else tuple(stored[dim] for dim in sorted(range(len(stored)), key=lambda dim: -strides[dim]))
