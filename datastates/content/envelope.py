"""Manifests as bytes: one frame for each state, one after the other in a file. This module needs no torch.

A frame is the same in all versions, so that any version can tell damage from a version that it does not read:

    8 bytes    magic ``DSMANIF\\0``
    4 bytes    version, little-endian
    4 bytes    form of the body, little-endian: 0 as it is, 1 deflated with the body of the file's first frame as the dictionary
    8 bytes    length of the body, little-endian
    …          body: MessagePack
    32 bytes   BLAKE3 of everything before

States that are written together share a file. Their manifests differ in few bytes, so all but the first are deflated.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Sequence
from typing import Protocol, TypeVar

import msgspec
from blake3 import blake3

from datastates.errors import Corrupt, Unavailable

from .manifest import VERSION, ChunkRef, Origin, PackInfo

__all__ = ["MAX_MANIFEST", "Places", "body_of", "decode_places", "frames", "joined", "opened", "unwrapped", "wrap"]

MAX_MANIFEST = 256 << 20
"""The size of the largest manifest that is read, in bytes."""

_MAGIC = b"DSMANIF\0"
_HEAD = struct.Struct("<8sIIQ")
_DIGEST_BYTES = 32
_PLAIN, _DEFLATED = 0, 1
_WINDOW = 15  # bits: deflate looks back 32 KiB


class _Versioned(Protocol):
    @property
    def version(self) -> int: ...


_T = TypeVar("_T", bound=_Versioned)


class Places(msgspec.Struct, frozen=True, array_like=True):
    """A manifest of which only the origin and the places of the chunks are decoded."""

    version: int
    digest: str
    origin: Origin
    content: msgspec.Raw
    packs: tuple[PackInfo, ...] = ()
    refs: tuple[ChunkRef, ...] = ()


_places_decoder = msgspec.msgpack.Decoder(Places)


def wrap(version: int, body: bytes, form: int = _PLAIN) -> bytes:
    """A frame."""
    wrapped = _HEAD.pack(_MAGIC, version, form, len(body)) + body
    return wrapped + blake3(wrapped).digest()


def joined(bodies: Sequence[bytes]) -> list[bytes]:
    """The frames of one file, in this order."""
    found = [wrap(VERSION, bodies[0])]
    for body in bodies[1:]:
        deflate = zlib.compressobj(1, wbits=-_WINDOW, zdict=_dictionary(bodies[0]))
        found.append(wrap(VERSION, deflate.compress(body) + deflate.flush(), _DEFLATED))
    return found


def frames(data: bytes | memoryview) -> Iterator[tuple[int, memoryview]]:
    """The frames of a file, with their offsets. What no frame begins with belongs to the frame before."""
    view, start = memoryview(data).cast("B"), 0
    while start < len(view):
        end = _stated_end(view, start)
        if not (
            end == len(view)
            or (
                start < end < len(view) and (_is_magic(view, end) or _is_magic(view, after := _stated_end(view, end)) or after == len(view))
            )
        ):
            found = bytes(view).find(_MAGIC, start + 1)
            end = found if found > 0 else len(view)
        yield start, view[start:end]
        start = end


def _stated_end(view: memoryview, start: int) -> int:
    """Where the frame that begins here ends, as its head says, whether its magic is right or not."""
    return start + _HEAD.size + _HEAD.unpack_from(view, start)[3] + _DIGEST_BYTES if len(view) - start >= _HEAD.size else 0


def _is_magic(view: memoryview, at: int) -> bool:
    return view[at : at + len(_MAGIC)] == _MAGIC


def body_of(data: bytes | memoryview) -> memoryview:
    """The body of a frame that is not deflated, which is not checked here."""
    return memoryview(data).cast("B")[_HEAD.size : -_DIGEST_BYTES]


def unwrapped(decoder: msgspec.msgpack.Decoder[_T], data: bytes | memoryview, *, source: str, first: bytes | memoryview = b"") -> _T:
    """The manifest in a frame, once the frame was checked. ``first`` is the first frame of its file. Errors name ``source``.

    :raises Corrupt: a byte is wrong or missing.
    :raises Unavailable: it is whole, but of a version that this code does not read.
    """
    version, body = opened(memoryview(data).cast("B"), source=source, first=memoryview(first).cast("B"))
    try:
        manifest = decoder.decode(body)
    except (msgspec.DecodeError, RecursionError, ValueError, OverflowError) as exc:
        raise Corrupt(f"{source} is no manifest: {exc}") from exc
    if manifest.version != version:
        raise Corrupt(f"{source} says version {manifest.version} inside and {version} outside")
    return manifest


def decode_places(data: bytes | memoryview, *, source: str, first: bytes | memoryview = b"") -> Places:
    """Whose manifest is in a frame, and where its chunks are, without the cost of the rest; the bytes are checked as in ``decode``."""
    return unwrapped(_places_decoder, data, source=source, first=first)


def opened(frame: memoryview, *, source: str, first: memoryview) -> tuple[int, bytes | memoryview]:
    """The version and the body of a frame, checked; ``first`` is the first frame of its file.

    :raises DatastatesError: as ``unwrapped``.
    """
    version, form, body = _opened(frame, source)
    if version != VERSION or form not in (_PLAIN, _DEFLATED):
        raise Unavailable(f"{source} is a manifest of version {version}, this datastates reads version {VERSION}: upgrade datastates")
    if form == _PLAIN:
        return version, body
    _, other, before = _opened(first, f"the first manifest of {source}")
    if other != _PLAIN:
        raise Corrupt(f"{source} begins with a manifest that needs another")
    return version, _inflated(body, before, source)


def _dictionary(body: bytes | memoryview) -> bytes:
    return bytes(body[-(1 << _WINDOW) :])


def _inflated(body: memoryview, first: memoryview, source: str) -> bytes:
    inflate = zlib.decompressobj(-_WINDOW, zdict=_dictionary(first))
    try:
        found = inflate.decompress(body, MAX_MANIFEST)
    except zlib.error as exc:
        raise Corrupt(f"{source} cannot be inflated: {exc}") from exc
    if not inflate.eof or inflate.unused_data:
        raise Corrupt(f"{source} is cut short, or inflates to more than {MAX_MANIFEST} bytes")
    return found


def _opened(view: memoryview, source: str) -> tuple[int, int, memoryview]:
    least = _HEAD.size + _DIGEST_BYTES
    if len(view) < least:
        raise Corrupt(f"{source} has {len(view)} bytes, fewer than the {least} of the smallest manifest")
    magic, version, form, length = _HEAD.unpack_from(view)
    if magic != _MAGIC:
        raise Corrupt(f"{source} begins with {magic!r}, which is no manifest")
    if len(view) != least + length:
        raise Corrupt(f"{source} has {len(view)} bytes, its header says {least + length}: it was cut or damaged")
    end = _HEAD.size + length
    if blake3(view[:end]).digest() != view[end:]:
        raise Corrupt(f"{source} fails its digest: a byte of its {len(view)} was changed")
    return version, form, view[_HEAD.size : end]
