"""Whether a manifest that was read agrees with itself, so that whoever uses it needs no bounds checks of their own."""

from __future__ import annotations

import re
from bisect import bisect_left

import msgspec

from .errors import Corrupt, InvalidInput, Unavailable
from .geometry import dtype_of, is_dense, stored_bytes
from .manifest import CHUNK_BYTES, Chunk, Content, Manifest, Origin, Shard, TensorSpec

__all__ = ["check", "tensors_of"]

_DIGEST_BYTES = 16
_MAX_DIMENSIONS = 64
_LIMIT = 1 << 62
_NAME = re.compile(r"[0-9A-Za-z_-][0-9A-Za-z_.-]{0,199}")
_UID = re.compile(r"[0-9A-Za-z_-]{1,64}")
_HEX = re.compile(r"[0-9a-f]{64}")

_specs_decoder = msgspec.msgpack.Decoder(tuple[TensorSpec, ...])


def tensors_of(content: Content, *, source: str = "the manifest") -> tuple[TensorSpec, ...]:
    """The tensors of a state, in the order of its skeleton.

    :raises Corrupt: they do not decode.
    """
    try:
        return _specs_decoder.decode(content.tensors)
    except (msgspec.DecodeError, RecursionError, ValueError, OverflowError) as exc:
        raise Corrupt(f"{source} lists tensors that do not decode: {exc}") from exc


def check(manifest: Manifest, source: str) -> None:
    """Nothing, if lengths, ranges, indices and names agree.

    :raises Corrupt: they do not; names ``source`` and the contradiction.
    :raises Unavailable: a tensor has a dtype that this torch does not know.
    """
    try:
        _check_origin(manifest.origin)
        _check_chunks(manifest.content.chunks)
        _check_places(manifest)
        _check_tensors(manifest, tensors_of(manifest.content, source=source))
    except _Contradiction as exc:
        raise Corrupt(f"{source} contradicts itself: {exc}") from exc
    except InvalidInput as exc:
        raise Unavailable(f"{source} cannot be read here: {exc}") from exc


class _Contradiction(Exception):
    """What does not agree."""


def _require(is_true: bool, message: str) -> None:
    if not is_true:
        raise _Contradiction(message)


def _check_origin(origin: Origin) -> None:
    for uid in (origin.uid, *origin.parents, *([origin.run] if origin.run is not None else [])):
        _require(_UID.fullmatch(uid) is not None, f"{uid[:80]!r} is no uid")
    for digest in origin.parent_digests:
        _require(_HEX.fullmatch(digest) is not None, f"{digest[:80]!r} is no digest of a state")
    _require(len(origin.parents) == len(origin.parent_digests), f"{len(origin.parents)} parents, {len(origin.parent_digests)} digests")
    _require(0 <= origin.rank < origin.world_size, f"rank {origin.rank} of {origin.world_size}")
    _require(origin.step >= 0 <= origin.micro_step, f"step {origin.step}, micro-step {origin.micro_step}")


def _check_chunks(chunks: tuple[Chunk, ...]) -> None:
    for index, chunk in enumerate(chunks):
        _require(len(chunk.digest) == _DIGEST_BYTES, f"chunk {index} has a digest of {len(chunk.digest)} bytes")
        _require(0 < chunk.length <= CHUNK_BYTES, f"chunk {index} has {chunk.length} bytes")


def _check_places(manifest: Manifest) -> None:
    chunks, packs, refs = manifest.content.chunks, manifest.packs, manifest.refs
    for pack in packs:
        _require(_NAME.fullmatch(pack.name) is not None, f"{pack.name[:80]!r} is no name of a pack")
        _require(0 <= pack.header_length <= pack.size <= _LIMIT, f"pack {pack.name} has {pack.size} bytes, {pack.header_length} of header")
    if refs:
        _require(len(refs) == len(chunks), f"{len(chunks)} chunks, {len(refs)} places")
    for index, (ref, chunk) in enumerate(zip(refs, chunks, strict=False)):
        _require(0 <= ref.pack < len(packs), f"chunk {index} lies in pack {ref.pack} of {len(packs)}")
        _require(0 <= ref.offset <= packs[ref.pack].size - chunk.length, f"chunk {index} lies outside its pack, at {ref.offset}")


def _check_tensors(manifest: Manifest, specs: tuple[TensorSpec, ...]) -> None:
    chunks = manifest.content.chunks
    short = [index for index, chunk in enumerate(chunks) if chunk.length < CHUNK_BYTES]
    for index, spec in enumerate(specs):
        _check_geometry(spec)
        if spec.alias is not None:
            _check_alias(index, spec, specs)
            continue
        total = sum(_check_shard(spec, shard, chunks, short) for shard in spec.shards)
        needed = stored_bytes(dtype_of(spec.dtype), spec.shape, spec.strides)
        if manifest.origin.world_size == 1:
            _require(total == needed, f"{spec.path[:200]} has {total} bytes stored, its shape takes {needed}")
    _require(len({spec.path for spec in specs}) == len(specs), "two tensors have the same path")


def _check_geometry(spec: TensorSpec) -> None:
    where = spec.path[:200]
    shape, strides = spec.shape, spec.strides
    dtype = dtype_of(spec.dtype)
    _require(len(shape) == len(strides) <= _MAX_DIMENSIONS, f"{where} has {len(shape)} dimensions, {len(strides)} strides")
    _require(min(shape, default=0) >= 0 <= min(strides, default=0), f"{where} has shape {shape}, strides {strides}")
    _require(max(shape, default=0) <= _LIMIT >= max(strides, default=0), f"{where} has shape {shape}, strides {strides}")
    count = dtype.itemsize
    for size in shape:
        count *= max(size, 1)
    _require(count <= _LIMIT, f"{where} has shape {shape}")
    _require(is_dense(shape, strides), f"{where} has shape {shape} and strides {strides}, which leave holes or overlap")


def _check_alias(index: int, spec: TensorSpec, specs: tuple[TensorSpec, ...]) -> None:
    alias = spec.alias
    where = spec.path[:200]
    _require(alias is not None and 0 <= alias < index and not spec.shards, f"{where} is tied to tensor {alias}")
    first = specs[alias or 0]
    same = (first.dtype, first.shape, first.strides) == (spec.dtype, spec.shape, spec.strides)
    _require(first.alias is None and same, f"{where} is tied to {first.path[:200]}, which differs")


def _check_shard(spec: TensorSpec, shard: Shard, chunks: tuple[Chunk, ...], short: list[int]) -> int:
    """The bytes of a shard that lies inside its tensor and inside the stream."""
    where = f"a shard of {spec.path[:200]}"
    dtype = dtype_of(spec.dtype)
    _require(len(shard.offset) == len(shard.shape) == len(spec.shape), f"{where} has {len(shard.shape)} dimensions")
    for offset, size, whole in zip(shard.offset, shard.shape, spec.shape, strict=True):
        _require(offset >= 0 <= size and offset + size <= whole, f"{where} lies outside it: {shard.offset}, {shard.shape}")
    needed = stored_bytes(dtype, shard.shape, spec.strides)
    _require(shard.length == needed, f"{where} has {shard.length} bytes, its shape takes {needed}")
    _require(shard.start >= 0 and shard.start % dtype.itemsize == 0, f"{where} starts at {shard.start}, unaligned")
    if shard.length:
        first, last = shard.start // CHUNK_BYTES, (shard.start + shard.length - 1) // CHUNK_BYTES
        end = shard.start + shard.length - last * CHUNK_BYTES
        _require(last < len(chunks) and end <= chunks[last].length, f"{where} goes beyond the stream")
        is_whole = bisect_left(short, first) == bisect_left(short, last)
        _require(is_whole, f"{where} runs over a chunk that is not full")
    return shard.length
