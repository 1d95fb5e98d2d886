"""The envelope of a manifest, and what can be read of it without knowing tensors.

The envelope is the same in all versions, so that any version can tell damage from a version that it does not know:

    8 bytes    magic ``DSMANIF\\0``
    4 bytes    version, little-endian
    8 bytes    length of the body, little-endian
    …          body: MessagePack
    32 bytes   BLAKE3 of everything before
"""

from __future__ import annotations

import struct
from typing import Protocol, TypeVar

import msgspec
from blake3 import blake3

from datastates.errors import Corrupt, Unavailable

from .manifest import VERSION, PackInfo

__all__ = ["decode_packs", "unwrapped", "wrap"]

_MAGIC = b"DSMANIF\0"
_HEAD = struct.Struct("<8sIQ")
_DIGEST_BYTES = 32


class _Versioned(Protocol):
    @property
    def version(self) -> int: ...


_T = TypeVar("_T", bound=_Versioned)


class _Packs(msgspec.Struct, frozen=True, array_like=True):
    """A manifest of which only the packs are decoded."""

    version: int
    digest: str
    origin: msgspec.Raw
    content: msgspec.Raw
    packs: tuple[PackInfo, ...] = ()


_packs_decoder = msgspec.msgpack.Decoder(_Packs)


def wrap(version: int, body: bytes) -> bytes:
    """The bytes of a file."""
    wrapped = _HEAD.pack(_MAGIC, version, len(body)) + body
    return wrapped + blake3(wrapped).digest()


def unwrapped(decoder: msgspec.msgpack.Decoder[_T], data: bytes | memoryview, *, source: str) -> _T:
    """The body as ``decoder`` reads it, once the envelope was checked; errors name ``source`` as the place where it was read.

    :raises Corrupt: a byte is wrong or missing.
    :raises Unavailable: it is whole, but of a version that this code does not know.
    """
    version, body = _opened(memoryview(data).cast("B"), source)
    if version != VERSION:
        raise Unavailable(f"{source} is a manifest of version {version}, this datastates reads version {VERSION}: upgrade datastates")
    try:
        manifest = decoder.decode(body)
    except (msgspec.DecodeError, RecursionError, ValueError, OverflowError) as exc:
        raise Corrupt(f"{source} is no manifest: {exc}") from exc
    if manifest.version != version:
        raise Corrupt(f"{source} says version {manifest.version} inside and {version} outside")
    return manifest


def decode_packs(data: bytes | memoryview, *, source: str) -> tuple[PackInfo, ...]:
    """Only the packs that the manifest in ``data`` needs, without the cost of the rest; the bytes are checked as in ``decode``."""
    return unwrapped(_packs_decoder, data, source=source).packs


def _opened(view: memoryview, source: str) -> tuple[int, memoryview]:
    least = _HEAD.size + _DIGEST_BYTES
    if len(view) < least:
        raise Corrupt(f"{source} has {len(view)} bytes, fewer than the {least} of the smallest manifest")
    magic, version, length = _HEAD.unpack_from(view)
    if magic != _MAGIC:
        raise Corrupt(f"{source} begins with {magic!r}, which is no manifest")
    if len(view) != least + length:
        raise Corrupt(f"{source} has {len(view)} bytes, its header says {least + length}: it was cut or damaged")
    end = _HEAD.size + length
    if blake3(view[:end]).digest() != view[end:]:
        raise Corrupt(f"{source} fails its digest: a byte of its {len(view)} was changed")
    return version, view[_HEAD.size : end]
