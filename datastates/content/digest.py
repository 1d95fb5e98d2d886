"""Digests of chunks and states, and manifests as bytes.

A state of one part has the digest of that part. A part of several does not name the state's parents, which its rank does not know: its
digest is that of its content. The state has the *root digest* over the parts' digests, and over those of its parents: BLAKE3 of

    19 bytes   ``datastates parts 1\\0``
    8 bytes    how many parts, little-endian
    64 bytes   the digest of each part, by rank, as lower-case hex digits
    64 bytes   the digest of each parent, likewise
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import msgspec
import xxhash
from blake3 import blake3

from datastates.errors import Corrupt, InvalidInput

from .check import check
from .envelope import joined, unwrapped
from .manifest import VERSION, Content, Manifest, Origin, TensorSpec
from .root import root_digest

__all__ = [
    "Sound",
    "chunk_digest",
    "decode",
    "decode_sound",
    "digest_of",
    "encode",
    "encode_all",
    "pieces_digest",
    "root_digest",
    "state_digest",
]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Manifest)


def chunk_digest(data: bytes | memoryview) -> bytes:
    """xxh3_128 of the bytes: 16 bytes. Releases the GIL for large buffers."""
    return xxhash.xxh3_128_digest(data)


def pieces_digest(pieces: Iterable[memoryview]) -> bytes:
    """The ``chunk_digest`` of the pieces joined in this order."""
    hasher = xxhash.xxh3_128()
    for piece in pieces:
        hasher.update(piece)
    return hasher.digest()


def state_digest(content: Content, parent_digests: Sequence[str]) -> str:
    """BLAKE3 of a state's content and its parents' digests, in hex; the same wherever the bytes lie."""
    said: list[bytes | memoryview] = [b"datastates state 1\0"]
    for part in _parts(content, parent_digests):
        said += len(part).to_bytes(8, "little"), part
    return blake3(b"".join(said)).hexdigest()  # one call: each releases the interpreter's lock


def digest_of(content: Content, origin: Origin) -> str:
    """The digest of what one rank captured; for a part of several it does not cover the parents."""
    return state_digest(content, () if origin.world_size > 1 else origin.parent_digests)


def encode(manifest: Manifest) -> bytes:
    """The manifest as bytes that ``decode`` can check as a whole.

    :raises InvalidInput: its version is not the one that this code writes.
    """
    return encode_all([manifest])[0]


def encode_all(manifests: Sequence[Manifest]) -> list[bytes]:
    """The frames of a file that holds these manifests, in this order.

    :raises InvalidInput: one has another version than this code writes.
    """
    for manifest in manifests:
        if manifest.version != VERSION:
            raise InvalidInput(f"manifest version {manifest.version}: this code writes version {VERSION}")
    return joined([_encoder.encode(manifest) for manifest in manifests])


@dataclass(frozen=True, slots=True, eq=False)
class Sound:
    """A manifest that was read and checked: its digest is right, it agrees with itself, and ``specs`` are its tensors. Made by
    ``decode_sound``.
    """

    manifest: Manifest
    specs: tuple[TensorSpec, ...]


def decode(data: bytes | memoryview, *, source: str) -> Manifest:
    """The manifest in ``data``, digest and consistency checked; ``source`` says in errors where it was read.

    :raises DatastatesError: as ``decode_sound``.
    """
    return decode_sound(data, source=source).manifest


def decode_sound(data: bytes | memoryview, *, source: str, first: bytes | memoryview = b"") -> Sound:
    """``decode`` for callers that also need the tensors. ``first`` is the first frame of the file from which ``data`` comes.

    :raises Corrupt: a byte is wrong or missing, or the manifest contradicts itself.
    :raises Unavailable: it is whole, but of a version that this code does not know, or with a dtype that this torch does not know.
    """
    manifest = unwrapped(_decoder, data, source=source, first=first)
    try:
        expected = digest_of(manifest.content, manifest.origin)
    except (OverflowError, UnicodeEncodeError) as exc:
        raise Corrupt(f"{source} is no manifest: {exc}") from exc
    if manifest.digest != expected:
        raise Corrupt(f"{source} holds a state whose digest is {expected}, but claims {manifest.digest[:64]}")
    return Sound(manifest, check(manifest, source))


def _parts(content: Content, parent_digests: Sequence[str]) -> Iterator[bytes | memoryview]:
    for raw in (content.skeleton, content.values, content.tensors):
        yield memoryview(raw)
    yield len(content.chunks).to_bytes(8, "little")
    for chunk in content.chunks:
        yield chunk.digest
        yield chunk.length.to_bytes(8, "little", signed=True)
    for digest in parent_digests:
        yield digest.encode()
