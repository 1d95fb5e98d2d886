"""Digests of chunks and states, and the frame that a manifest is written in.

The frame is the same in all versions, so that any version can tell damage from a version that it does not know:

    8 bytes    magic ``DSMANIF\\0``
    4 bytes    version, little-endian
    8 bytes    length of the body, little-endian
    …          body: MessagePack
    32 bytes   BLAKE3 of all before
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

import msgspec
import xxhash
from blake3 import blake3

from datastates.errors import Corrupt, InvalidInput, Unavailable

from .check import check
from .manifest import VERSION, Content, Manifest, PackInfo

__all__ = ["chunk_digest", "decode", "decode_packs", "encode", "pieces_digest", "state_digest"]

_MAGIC = b"DSMANIF\0"
_HEAD = struct.Struct("<8sIQ")
_DIGEST_BYTES = 32

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Manifest)


class _Packs(msgspec.Struct, frozen=True, array_like=True):
    """A manifest of which only the packs are decoded."""

    version: int
    digest: str
    origin: msgspec.Raw
    content: msgspec.Raw
    packs: tuple[PackInfo, ...] = ()


_T = TypeVar("_T", Manifest, _Packs)

_packs_decoder = msgspec.msgpack.Decoder(_Packs)


def chunk_digest(data: bytes | memoryview) -> bytes:
    """xxh3_128 of the bytes: 16 bytes. Releases the GIL for large buffers."""
    return xxhash.xxh3_128_digest(data)


def pieces_digest(pieces: Iterable[memoryview]) -> bytes:
    """What ``chunk_digest`` says of the pieces put together in this order."""
    hasher = xxhash.xxh3_128()
    for piece in pieces:
        hasher.update(piece)
    return hasher.digest()


def state_digest(content: Content, parent_digests: Sequence[str]) -> str:
    """BLAKE3 of a state's content and its parents' digests, in hex; the same wherever the bytes lie."""
    hasher = blake3(b"datastates state 1\0")
    for part in _parts(content, parent_digests):
        hasher.update(len(part).to_bytes(8, "little"))
        hasher.update(part)
    return hasher.hexdigest()


def encode(manifest: Manifest) -> bytes:
    """The manifest as bytes that ``decode`` checks whole.

    :raises InvalidInput: its version is not the one that this code writes.
    """
    if manifest.version != VERSION:
        raise InvalidInput(f"manifest version {manifest.version}: this code writes version {VERSION}")
    body = _encoder.encode(manifest)
    framed = _HEAD.pack(_MAGIC, VERSION, len(body)) + body
    return framed + blake3(framed).digest()


def decode(data: bytes | memoryview, *, source: str) -> Manifest:
    """The manifest in ``data``, digest and consistency checked; ``source`` says in errors where it was read.

    :raises Corrupt: a byte is wrong or missing, or the manifest contradicts itself.
    :raises Unavailable: it is whole, but of a version that this code, or with a dtype that this torch, does not know.
    """
    manifest = _decode(_decoder, data, source)
    try:
        expected = state_digest(manifest.content, manifest.origin.parent_digests)
    except (OverflowError, UnicodeEncodeError) as exc:
        raise Corrupt(f"{source} is no manifest: {exc}") from exc
    if manifest.digest != expected:
        raise Corrupt(f"{source} holds a state whose digest is {expected}, but claims {manifest.digest[:64]}")
    check(manifest, source)
    return manifest


def decode_packs(data: bytes | memoryview, *, source: str) -> tuple[PackInfo, ...]:
    """Only the packs that the manifest in ``data`` needs, without the cost of the rest; its bytes are checked as in ``decode``."""
    return _decode(_packs_decoder, data, source).packs


def _decode(decoder: msgspec.msgpack.Decoder[_T], data: bytes | memoryview, source: str) -> _T:
    version, body = _unframe(memoryview(data).cast("B"), source)
    if version != VERSION:
        raise Unavailable(f"{source} is a manifest of version {version}, this datastates reads version {VERSION}: upgrade datastates")
    try:
        manifest = decoder.decode(body)
    except (msgspec.DecodeError, RecursionError, ValueError, OverflowError) as exc:
        raise Corrupt(f"{source} is no manifest: {exc}") from exc
    if manifest.version != version:
        raise Corrupt(f"{source} says version {manifest.version} inside and {version} outside")
    return manifest


def _unframe(view: memoryview, source: str) -> tuple[int, memoryview]:
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


def _parts(content: Content, parent_digests: Sequence[str]) -> Iterator[bytes | memoryview]:
    for raw in (content.skeleton, content.values, content.tensors):
        yield memoryview(raw)
    yield len(content.chunks).to_bytes(8, "little")
    for chunk in content.chunks:
        yield chunk.digest
        yield chunk.length.to_bytes(8, "little", signed=True)
    for digest in parent_digests:
        yield digest.encode()
