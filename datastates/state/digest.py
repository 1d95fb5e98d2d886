"""Digests of chunks and states, and manifests as bytes.

A state of one part has the part's digest. If a state has several parts, the digest of a part covers
its content alone, because its rank does not have the parents. The state has the *root digest* over
the digests of its parts and its parents: BLAKE3 of

    19 bytes   ``datastates parts 1 ``
    8 bytes    how many parts, little-endian
    64 bytes   the digest of each part, by rank, as lower-case hex digits
    64 bytes   the digest of each parent, in the same form

A file of manifests has one frame for each state. ``join`` makes one manifest from all parts of a
state.
"""

from __future__ import annotations

import re
import struct
import zlib
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, TypeVar

import msgspec
import xxhash
from blake3 import blake3

from datastates.errors import Corrupt, InvalidInput, NotFound, Unavailable
from datastates.values import RANKS

from .geometry import MAX_CUT, covers, dtype_of, is_dense, is_whole, stored_bytes
from .manifest import (
    CHUNK_BYTES,
    STORED,
    VERSION,
    Chunk,
    ChunkRef,
    Content,
    Manifest,
    Origin,
    PackInfo,
    Shard,
    TensorSpec,
    root_digest,
)

if TYPE_CHECKING:
    import torch

_CHECK_DIGEST_BYTES = 16
_MAX_DIMENSIONS = 64
_LIMIT = 1 << 62
_KEPT_BYTES = 4 << 20
_NAME = re.compile(r"[0-9A-Za-z_-][0-9A-Za-z_.-]{0,199}")
_UID = re.compile(r"[0-9A-Za-z_-]{1,64}")
_HEX = re.compile(r"[0-9a-f]{64}")

_specs_decoder = msgspec.msgpack.Decoder(tuple[TensorSpec, ...])
MAX_MANIFEST = 256 << 20
"""The size of the largest manifest that is read, in bytes."""

_MAGIC = b"DSMANIF\0"
_HEAD = struct.Struct("<8sIIQ")
_ENVELOPE_DIGEST_BYTES = 32
_PLAIN = 0
_DEFLATED = 1
_WINDOW = 15  # bits: deflate looks back 32 KiB
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Manifest)


def tensors_of(content: Content, *, source: str = "the manifest") -> tuple[TensorSpec, ...]:
    """The tensors of a state, in the order of its skeleton.

    :raises Corrupt: they do not decode.
    """
    try:
        return _specs_decoder.decode(content.tensors)
    except (msgspec.DecodeError, RecursionError, ValueError, OverflowError) as exc:
        raise Corrupt(f"{source} lists tensors that do not decode: {exc}") from exc


def check(manifest: Manifest, source: str) -> tuple[TensorSpec, ...]:
    """The tensors of a manifest, after its lengths, ranges, indices and names were checked.

    :raises Corrupt: they do not agree. The text names ``source`` and the contradiction.
    :raises Unavailable: a tensor has a dtype that this torch does not have.
    """
    try:
        _check_origin(manifest.origin)
        _check_chunks(manifest.content.chunks)
        _check_places(manifest)
        specs = _checked(manifest, source)
    except _Contradiction as exc:
        raise Corrupt(f"{source} contradicts itself: {exc}") from exc
    except InvalidInput as exc:
        raise Unavailable(f"{source} cannot be read here: {exc}") from exc
    return specs


_last: tuple[tuple[bytes, tuple[int, ...], bool], tuple[TensorSpec, ...]] | None = None
"""Tensors that passed the check, and everything on which it depends: of the last manifest only,
as the states of a training are alike."""


def _checked(manifest: Manifest, source: str) -> tuple[TensorSpec, ...]:
    global _last  # replaced as a whole: threads see one or the other
    content = manifest.content
    key = (
        bytes(content.tensors),
        tuple(chunk.length for chunk in content.chunks),
        manifest.origin.world_size == 1,
    )
    last = _last
    if last is not None and last[0] == key:
        return last[1]
    specs = tensors_of(content, source=source)
    _check_tensors(manifest, specs)
    if len(key[0]) <= _KEPT_BYTES:
        _last = (key, specs)
    return specs


class _Contradiction(Exception):
    """A disagreement within a manifest."""


def _require(is_true: bool, message: str) -> None:
    if not is_true:
        raise _Contradiction(message)


def _check_origin(origin: Origin) -> None:
    for uid in (origin.uid, *origin.parents, *([origin.run] if origin.run is not None else [])):
        _require(_UID.fullmatch(uid) is not None, f"{uid[:80]!r} is no uid")
    for digest in origin.parent_digests:
        _require(_HEX.fullmatch(digest) is not None, f"{digest[:80]!r} is no digest of a state")
    _require(
        len(origin.parents) == len(origin.parent_digests),
        f"{len(origin.parents)} parents, {len(origin.parent_digests)} digests",
    )
    _require(
        0 <= origin.rank < origin.world_size <= RANKS, f"rank {origin.rank} of {origin.world_size}"
    )
    _require(
        origin.step >= 0 <= origin.micro_step, f"step {origin.step}, micro-step {origin.micro_step}"
    )


def _check_chunks(chunks: tuple[Chunk, ...]) -> None:
    for index, chunk in enumerate(chunks):
        if len(chunk.digest) != _CHECK_DIGEST_BYTES or not 0 < chunk.length <= CHUNK_BYTES:
            raise _Contradiction(
                f"chunk {index} has {chunk.length} bytes and a digest of {len(chunk.digest)}"
            )


def _check_places(manifest: Manifest) -> None:
    chunks, packs, refs = manifest.content.chunks, manifest.packs, manifest.refs
    for pack in packs:
        _require(_NAME.fullmatch(pack.name) is not None, f"{pack.name[:80]!r} is no name of a pack")
        _require(
            0 <= pack.header_length <= pack.size <= _LIMIT,
            f"pack {pack.name} has {pack.size} bytes, {pack.header_length} of header",
        )
    if refs:
        _require(len(refs) == len(chunks), f"{len(chunks)} chunks, {len(refs)} places")
    for index, (ref, chunk) in enumerate(zip(refs, chunks, strict=False)):
        if not 0 <= ref.pack < len(packs):
            raise _Contradiction(f"chunk {index} is in pack {ref.pack} of {len(packs)}")
        if ref.form != STORED:
            raise InvalidInput(
                f"chunk {index} is stored in form {ref.form}, which this datastates does not read:"
                " upgrade datastates"
            )
        if ref.length != chunk.length or not 0 <= ref.offset <= packs[ref.pack].size - ref.length:
            raise _Contradiction(
                f"chunk {index} of {chunk.length} bytes is outside its pack: {ref.length} bytes"
                f" at {ref.offset}"
            )


# --- Checks of each tensor, which build no message until an error is found ---


def _check_tensors(manifest: Manifest, specs: tuple[TensorSpec, ...]) -> None:
    chunks = manifest.content.chunks
    short = [index for index, chunk in enumerate(chunks) if chunk.length < CHUNK_BYTES]
    is_alone = manifest.origin.world_size == 1
    for index, spec in enumerate(specs):
        dtype = dtype_of(spec.dtype)
        _check_geometry(spec, dtype)
        if spec.alias is not None:
            _check_alias(index, spec, specs)
            continue
        total = 0
        for shard in spec.shards:
            total += _check_shard(spec, dtype, shard, chunks, short)
        if is_alone and not is_whole(spec):
            _check_cover(spec, dtype, total)
    _require(len({spec.path for spec in specs}) == len(specs), "two tensors have the same path")


def _check_geometry(spec: TensorSpec, dtype: torch.dtype) -> None:
    shape, strides = spec.shape, spec.strides
    if not len(shape) == len(strides) <= _MAX_DIMENSIONS:
        raise _Contradiction(f"{_where(spec)} has {len(shape)} dimensions, {len(strides)} strides")
    count = dtype.itemsize
    for size, stride in zip(shape, strides, strict=True):
        count *= size or 1
        if size < 0 or not 0 <= stride <= _LIMIT or count > _LIMIT:
            raise _Contradiction(f"{_where(spec)} has shape {shape}, strides {strides}")
    if not is_dense(shape, strides):
        raise _Contradiction(
            f"{_where(spec)} has shape {shape} and strides {strides}, which leave holes or overlap"
        )


def _check_alias(index: int, spec: TensorSpec, specs: tuple[TensorSpec, ...]) -> None:
    if spec.alias is None or not 0 <= spec.alias < index or spec.shards:
        raise _Contradiction(f"{_where(spec)} is tied to tensor {spec.alias}")
    first = specs[spec.alias]
    if first.alias is not None or (first.dtype, first.shape, first.strides) != (
        spec.dtype,
        spec.shape,
        spec.strides,
    ):
        raise _Contradiction(f"{_where(spec)} is tied to {_where(first)}, which differs")


def _check_cover(spec: TensorSpec, dtype: torch.dtype, total: int) -> None:
    needed = stored_bytes(dtype, spec.shape, spec.strides)
    if total != needed:
        raise _Contradiction(f"{_where(spec)} has {total} bytes stored, its shape takes {needed}")
    if not covers(spec):
        more = (
            f", or are cut along more than {MAX_CUT} dimensions"
            if len(spec.shape) > MAX_CUT
            else ""
        )
        raise _Contradiction(
            f"{_where(spec)} has {len(spec.shards)} shards, which overlap and leave holes{more}"
        )


def _check_shard(
    spec: TensorSpec, dtype: torch.dtype, shard: Shard, chunks: tuple[Chunk, ...], short: list[int]
) -> int:
    """The length of a shard that is inside its tensor and inside the stream."""
    if not len(shard.offset) == len(shard.shape) == len(spec.shape):
        raise _Contradiction(f"a shard of {_where(spec)} has {len(shard.shape)} dimensions")
    for offset, size, whole, stride in zip(
        shard.offset, shard.shape, spec.shape, spec.strides, strict=True
    ):
        if offset < 0 or size < 0 or offset + size > whole:
            raise _Contradiction(
                f"a shard of {_where(spec)} is outside it: {shard.offset}, {shard.shape}"
            )
        if not stride and size != whole > 1:
            raise _Contradiction(
                f"a shard of {_where(spec)} is cut where the tensor is expanded: {shard.offset},"
                f" {shard.shape}"
            )
    start, length = shard.start, shard.length
    if length != stored_bytes(dtype, shard.shape, spec.strides):
        raise _Contradiction(
            f"a shard of {_where(spec)} has {length} bytes, its shape takes another number"
        )
    if start < 0 or start % dtype.itemsize:
        raise _Contradiction(f"a shard of {_where(spec)} starts at {start}, unaligned")
    if length:
        last = (start + length - 1) // CHUNK_BYTES
        if last >= len(chunks) or start + length - last * CHUNK_BYTES > chunks[last].length:
            raise _Contradiction(f"a shard of {_where(spec)} goes beyond the stream")
        if bisect_left(short, start // CHUNK_BYTES) != bisect_left(short, last):
            raise _Contradiction(f"a shard of {_where(spec)} runs over a chunk that is not full")
    return length


def _where(spec: TensorSpec) -> str:
    return spec.path[:200]


# --- Manifests as bytes: one frame a state. Needs no torch. ---


class Places(msgspec.Struct, frozen=True, array_like=True):
    """A manifest of which only the origin and the places of the chunks are decoded."""

    version: int
    digest: str
    origin: Origin
    content: msgspec.Raw
    packs: tuple[PackInfo, ...] = ()
    refs: tuple[ChunkRef, ...] = ()


_places_decoder = msgspec.msgpack.Decoder(Places)
_T = TypeVar("_T", Manifest, Places)


def wrap(version: int, body: bytes, form: int = _PLAIN) -> bytes:
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
    """The frames of a file, with their offsets.

    Bytes that begin no frame belong to the frame before them, which then fails its check."""
    view, start = memoryview(data).cast("B"), 0
    while start < len(view):
        end = _stated_end(view, start)
        if end != len(view) and not (start < end < len(view) and _is_frame(view, end)):
            found = bytes(view).find(_MAGIC, start + 1)
            end = found if found > 0 else len(view)
        yield start, view[start:end]
        start = end


def _stated_end(view: memoryview, start: int) -> int:
    """The end of the frame that begins here, as its head gives it. The magic may be wrong."""
    return (
        start + _HEAD.size + _HEAD.unpack_from(view, start)[3] + _ENVELOPE_DIGEST_BYTES
        if len(view) - start >= _HEAD.size
        else 0
    )


def _is_frame(view: memoryview, start: int) -> bool:
    """Whether a frame begins here. If its magic is wrong, its head must give an end at which
    another frame begins, or the file ends."""
    end = _stated_end(view, start)
    return _is_magic(view, start) or end == len(view) or (end > start and _is_magic(view, end))


def _is_magic(view: memoryview, at: int) -> bool:
    return view[at : at + len(_MAGIC)] == _MAGIC


def body_of(data: bytes | memoryview) -> memoryview:
    """The body of a frame that is not deflated, which is not checked here."""
    return memoryview(data).cast("B")[_HEAD.size : -_ENVELOPE_DIGEST_BYTES]


def unwrapped(
    decoder: msgspec.msgpack.Decoder[_T],
    data: bytes | memoryview,
    *,
    source: str,
    first: bytes | memoryview = b"",
) -> _T:
    """The manifest in a frame, once the frame was checked. ``first`` is the first frame of its
    file. Errors name ``source``.

    :raises Corrupt: a byte is wrong or missing.
    :raises Unavailable: it is whole, but of a version that this code does not read.
    """
    version, body = opened(
        memoryview(data).cast("B"), source=source, first=memoryview(first).cast("B")
    )
    try:
        manifest = decoder.decode(body)
    except (msgspec.DecodeError, RecursionError, ValueError, OverflowError) as exc:
        raise Corrupt(f"{source} is no manifest: {exc}") from exc
    if manifest.version != version:
        raise Corrupt(f"{source} says version {manifest.version} inside and {version} outside")
    return manifest


def decode_places(
    data: bytes | memoryview, *, source: str, first: bytes | memoryview = b""
) -> Places:
    """The origin of the manifest in a frame, and the places of its chunks. All other parts are
    skipped, but the bytes are checked as in ``decode``."""
    return unwrapped(_places_decoder, data, source=source, first=first)


def opened(frame: memoryview, *, source: str, first: memoryview) -> tuple[int, bytes | memoryview]:
    """The version and the body of a frame, checked. ``first`` is the first frame of its file.

    :raises DatastatesError: as ``unwrapped``.
    """
    version, form, body = _opened(frame, source)
    if version != VERSION or form not in (_PLAIN, _DEFLATED):
        raise Unavailable(
            f"{source} is a manifest of version {version}, this datastates reads version {VERSION}:"
            " upgrade datastates"
        )
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
    least = _HEAD.size + _ENVELOPE_DIGEST_BYTES
    if len(view) < least:
        raise Corrupt(
            f"{source} has {len(view)} bytes, fewer than the {least} of the smallest manifest"
        )
    magic, version, form, length = _HEAD.unpack_from(view)
    if magic != _MAGIC:
        raise Corrupt(f"{source} begins with {magic!r}, which is no manifest")
    if len(view) != least + length:
        raise Corrupt(
            f"{source} has {len(view)} bytes, its header gives {least + length}: it was cut or"
            " damaged"
        )
    end = _HEAD.size + length
    if blake3(view[:end]).digest() != view[end:]:
        raise Corrupt(f"{source} fails its digest: a byte of its {len(view)} was changed")
    return version, form, view[_HEAD.size : end]


# --- Digests ---


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
    """BLAKE3 of a state's content and its parents' digests, in hex. The place of the bytes has no
    effect."""
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
            raise InvalidInput(
                f"manifest version {manifest.version}: this code writes version {VERSION}"
            )
    return joined([_encoder.encode(manifest) for manifest in manifests])


@dataclass(frozen=True, slots=True, eq=False)
class Sound:
    """A manifest that was read and checked: its digest is right, it agrees with itself, and
    ``specs`` are its tensors. Made by ``decode_sound``.
    """

    manifest: Manifest
    specs: tuple[TensorSpec, ...]


def decode(data: bytes | memoryview, *, source: str) -> Manifest:
    """The manifest in ``data``, digest and consistency checked. Errors name ``source``, the place
    where it was read.

    :raises DatastatesError: as ``decode_sound``.
    """
    return decode_sound(data, source=source).manifest


def decode_sound(
    data: bytes | memoryview, *, source: str, first: bytes | memoryview = b""
) -> Sound:
    """``decode`` for callers that also need the tensors. ``first`` is the first frame of the file
    from which ``data`` comes.

    :raises Corrupt: a byte is wrong or missing, or the manifest contradicts itself.
    :raises Unavailable: it is whole, but of a version that this code cannot read, or with a dtype
        that this torch does not have.
    """
    manifest = unwrapped(_decoder, data, source=source, first=first)
    try:
        expected = digest_of(manifest.content, manifest.origin)
    except (OverflowError, UnicodeEncodeError) as exc:
        raise Corrupt(f"{source} is no manifest: {exc}") from exc
    if manifest.digest != expected:
        raise Corrupt(
            f"{source} holds a state whose digest is {expected}, but claims {manifest.digest[:64]}"
        )
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


# --- Joining parts, one for each rank: one content whose stream is all parts' streams in order ---


def first_chunks(parts: Sequence[Manifest]) -> list[int]:
    """The index in the joined content of the first chunk of each part, and of the end."""
    return list(accumulate((len(part.content.chunks) for part in parts), initial=0))


def join(parts: Sequence[Manifest], *, rank: int = 0) -> Manifest:
    """The whole state, from the checked manifests of all its parts by rank. A single part is the
    whole state.

    Values that are not tensors, and the content of ``origin``, come from ``rank``. The digest is
    the state's. The manifest has no places of chunks: they are in the parts.

    :raises Corrupt: the parts do not belong to one state, or a tensor is not whole. The text names
        the state and the contradiction.
    :raises NotFound: the state has no such rank.
    """
    first = parts[0]
    _check_same(parts)
    if not 0 <= rank < len(parts):
        raise NotFound(f"state {first.origin.uid} has {len(parts)} parts, and none of rank {rank}")
    if len(parts) == 1:
        return first
    chosen = parts[rank]
    content = Content(
        first.content.skeleton,
        chosen.content.values,
        msgspec.Raw(msgspec.msgpack.encode(_tensors(parts))),
        tuple(chunk for part in parts for chunk in part.content.chunks),
    )
    digest = root_digest([part.digest for part in parts], first.origin.parent_digests)
    return Manifest(first.version, digest, chosen.origin, content)


def _check_same(parts: Sequence[Manifest]) -> None:
    """Raise unless these are all parts of one state, in order."""
    first = parts[0]
    for rank, part in enumerate(parts):
        origin = part.origin
        if (origin.uid, origin.rank, origin.world_size) != (first.origin.uid, rank, len(parts)):
            raise Corrupt(
                f"rank {origin.rank} of {origin.world_size} of state {origin.uid} is no part of"
                f" state {first.origin.uid}, of which rank {rank} of {len(parts)} is wanted"
            )
        if (origin.parents, origin.parent_digests) != (
            first.origin.parents,
            first.origin.parent_digests,
        ):
            raise Corrupt(f"state {origin.uid}: rank {rank} names other parents than rank 0")
        if bytes(part.content.skeleton) != bytes(first.content.skeleton):
            raise Corrupt(f"state {origin.uid}: rank {rank} has another tree than rank 0")


def _tensors(parts: Sequence[Manifest]) -> list[TensorSpec]:
    uid, starts = parts[0].origin.uid, first_chunks(parts)
    joined = list(tensors_of(parts[0].content))
    for rank, part in enumerate(parts[1:], 1):
        specs = tensors_of(part.content)
        if len(specs) != len(joined):
            raise Corrupt(
                f"state {uid}: rank {rank} has {len(specs)} tensors, rank 0 {len(joined)}"
            )
        for index, (ours, theirs) in enumerate(zip(joined, specs, strict=True)):
            if msgspec.structs.replace(theirs, shards=()) != msgspec.structs.replace(
                ours, shards=()
            ):
                raise Corrupt(
                    f"state {uid}: {theirs.path[:200]} of rank {rank} has another geometry than"
                    f" {ours.path[:200]} of rank 0"
                )
            moved = (
                msgspec.structs.replace(shard, start=shard.start + starts[rank] * CHUNK_BYTES)
                for shard in theirs.shards
            )
            joined[index] = msgspec.structs.replace(ours, shards=(*ours.shards, *moved))
    for spec in joined:
        if spec.alias is None and not covers(spec):
            raise Corrupt(
                f"state {uid}: the {len(spec.shards)} shards of {spec.path[:200]} in all its parts"
                " overlap, or leave holes"
            )
    return joined
