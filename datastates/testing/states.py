"""States for tests, made without the capture engine: tensors laid out over chunks as a manifest
describes."""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import msgspec
import torch

from datastates.state.digest import chunk_digest, state_digest
from datastates.state.geometry import dense_view, spec_of
from datastates.state.manifest import (
    CHUNK_BYTES,
    VERSION,
    Chunk,
    Content,
    Manifest,
    Origin,
    Shard,
    TensorSpec,
)
from datastates.storage.tier import Payload, Reader

Group = dict[str, torch.Tensor]


def payload(uid: str, *groups: Group, is_aligned: bool = False) -> Payload:
    """A state of these groups of tensors; each group ends its last chunk.

    Aligned memory starts at a page, as an arena's does."""
    specs: list[TensorSpec] = []
    views: list[memoryview] = []
    for group in groups:
        start = len(views) * CHUNK_BYTES
        data = b""
        for path, tensor in sorted(group.items(), key=lambda item: -item[1].dtype.itemsize):
            flat = dense_view(tensor)
            assert flat is not None
            stored = flat.numpy().tobytes()
            shard = Shard((0,) * tensor.dim(), tuple(tensor.shape), start + len(data), len(stored))
            specs.append(spec_of(path, tensor, shards=(shard,)))
            data += stored
        views += [
            memoryview(data[begin : begin + CHUNK_BYTES])
            for begin in range(0, len(data), CHUNK_BYTES)
        ]
    chunks = tuple(Chunk(chunk_digest(view), view.nbytes) for view in views)
    encode = msgspec.msgpack.encode
    content = Content(
        msgspec.Raw(encode(0)), msgspec.Raw(encode([])), msgspec.Raw(encode(specs)), chunks
    )
    origin = Origin(uid, (), (), None, None, 0, 0, 0, None, {}, {})
    manifest = Manifest(VERSION, state_digest(content, ()), origin, content)
    return Payload(manifest, [aligned(view) for view in views] if is_aligned else views)


def aligned(data: memoryview) -> memoryview:
    """The same bytes at the start of a page, with other bytes behind them."""
    pages = mmap.mmap(-1, data.nbytes + 2 * mmap.PAGESIZE)
    pages[:] = b"\xa5" * len(pages)
    pages[: data.nbytes] = data
    return memoryview(pages)[: data.nbytes]


def numbers(count: int, seed: int = 0) -> torch.Tensor:
    """Random floats, the same for the same seed."""
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


def small(uid: str, *seeds: int) -> Payload:
    """A state of one small chunk for each seed; equal seeds give equal chunks."""
    return payload(
        uid, *({f"model/{number}": numbers(25, seed)} for number, seed in enumerate(seeds))
    )


def part(uid: str, rank: int, *seeds: int) -> Payload:
    """The part of a state that one rank of a job of two has: one small chunk for each seed."""
    made = small(uid, *seeds)
    origin = msgspec.structs.replace(made.manifest.origin, rank=rank, world_size=2)
    return Payload(msgspec.structs.replace(made.manifest, origin=origin), made.chunks)


def stream(reader: Reader) -> list[bytes]:
    return [bytes(reader.chunk(index)) for index in range(len(reader.manifest.content.chunks))]


def chunks_of(payload: Payload) -> list[bytes]:
    return [bytes(view) for view in payload.chunks]


def lengths(chunks: Sequence[bytes]) -> int:
    """The length of these chunks together, in bytes."""
    return sum(map(len, chunks))
