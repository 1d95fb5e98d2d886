"""Checks that a manifest agrees with itself, so that its users need no bounds checks of their own."""

from __future__ import annotations

import re
from bisect import bisect_left
from typing import TYPE_CHECKING

import msgspec

from datastates.errors import Corrupt, InvalidInput, Unavailable
from datastates.values import RANKS

from .geometry import dtype_of, is_dense, stored_bytes
from .manifest import CHUNK_BYTES, STORED, Chunk, Content, Manifest, Origin, Shard, TensorSpec
from .shards import MAX_CUT, covers, is_whole

if TYPE_CHECKING:
    import torch

__all__ = ["check", "tensors_of"]

_DIGEST_BYTES = 16
_MAX_DIMENSIONS = 64
_LIMIT = 1 << 62
_KEPT_BYTES = 4 << 20
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


def check(manifest: Manifest, source: str) -> tuple[TensorSpec, ...]:
    """The tensors of a manifest, once its lengths, ranges, indices and names are found to agree.

    :raises Corrupt: they do not agree; names ``source`` and the contradiction.
    :raises Unavailable: a tensor has a dtype that this torch does not know.
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
"""Tensors that passed the check, and everything on which it depends: of the last manifest only, as the states of a training are alike."""


def _checked(manifest: Manifest, source: str) -> tuple[TensorSpec, ...]:
    global _last  # replaced as a whole: threads see one or the other
    content = manifest.content
    key = (bytes(content.tensors), tuple(chunk.length for chunk in content.chunks), manifest.origin.world_size == 1)
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
    _require(len(origin.parents) == len(origin.parent_digests), f"{len(origin.parents)} parents, {len(origin.parent_digests)} digests")
    _require(0 <= origin.rank < origin.world_size <= RANKS, f"rank {origin.rank} of {origin.world_size}")
    _require(origin.step >= 0 <= origin.micro_step, f"step {origin.step}, micro-step {origin.micro_step}")


def _check_chunks(chunks: tuple[Chunk, ...]) -> None:
    for index, chunk in enumerate(chunks):
        if len(chunk.digest) != _DIGEST_BYTES or not 0 < chunk.length <= CHUNK_BYTES:
            raise _Contradiction(f"chunk {index} has {chunk.length} bytes and a digest of {len(chunk.digest)}")


def _check_places(manifest: Manifest) -> None:
    chunks, packs, refs = manifest.content.chunks, manifest.packs, manifest.refs
    for pack in packs:
        _require(_NAME.fullmatch(pack.name) is not None, f"{pack.name[:80]!r} is no name of a pack")
        _require(0 <= pack.header_length <= pack.size <= _LIMIT, f"pack {pack.name} has {pack.size} bytes, {pack.header_length} of header")
    if refs:
        _require(len(refs) == len(chunks), f"{len(chunks)} chunks, {len(refs)} places")
    for index, (ref, chunk) in enumerate(zip(refs, chunks, strict=False)):
        if not 0 <= ref.pack < len(packs):
            raise _Contradiction(f"chunk {index} lies in pack {ref.pack} of {len(packs)}")
        if ref.form != STORED:
            raise InvalidInput(f"chunk {index} is stored in form {ref.form}, which this datastates does not read: upgrade datastates")
        if ref.length != chunk.length or not 0 <= ref.offset <= packs[ref.pack].size - ref.length:
            raise _Contradiction(f"chunk {index} of {chunk.length} bytes lies outside its pack: {ref.length} bytes at {ref.offset}")


# Called for each tensor, so these build no message until something is wrong.


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
        raise _Contradiction(f"{_where(spec)} has shape {shape} and strides {strides}, which leave holes or overlap")


def _check_alias(index: int, spec: TensorSpec, specs: tuple[TensorSpec, ...]) -> None:
    if spec.alias is None or not 0 <= spec.alias < index or spec.shards:
        raise _Contradiction(f"{_where(spec)} is tied to tensor {spec.alias}")
    first = specs[spec.alias]
    if first.alias is not None or (first.dtype, first.shape, first.strides) != (spec.dtype, spec.shape, spec.strides):
        raise _Contradiction(f"{_where(spec)} is tied to {_where(first)}, which differs")


def _check_cover(spec: TensorSpec, dtype: torch.dtype, total: int) -> None:
    needed = stored_bytes(dtype, spec.shape, spec.strides)
    if total != needed:
        raise _Contradiction(f"{_where(spec)} has {total} bytes stored, its shape takes {needed}")
    if not covers(spec):
        more = f", or are cut along more than {MAX_CUT} dimensions" if len(spec.shape) > MAX_CUT else ""
        raise _Contradiction(f"{_where(spec)} has {len(spec.shards)} shards, which overlap and leave holes{more}")


def _check_shard(spec: TensorSpec, dtype: torch.dtype, shard: Shard, chunks: tuple[Chunk, ...], short: list[int]) -> int:
    """The length of a shard that lies inside its tensor and inside the stream."""
    if not len(shard.offset) == len(shard.shape) == len(spec.shape):
        raise _Contradiction(f"a shard of {_where(spec)} has {len(shard.shape)} dimensions")
    for offset, size, whole, stride in zip(shard.offset, shard.shape, spec.shape, spec.strides, strict=True):
        if offset < 0 or size < 0 or offset + size > whole:
            raise _Contradiction(f"a shard of {_where(spec)} lies outside it: {shard.offset}, {shard.shape}")
        if not stride and size != whole > 1:
            raise _Contradiction(f"a shard of {_where(spec)} is cut where the tensor is expanded: {shard.offset}, {shard.shape}")
    start, length = shard.start, shard.length
    if length != stored_bytes(dtype, shard.shape, spec.strides):
        raise _Contradiction(f"a shard of {_where(spec)} has {length} bytes, its shape takes another number")
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
