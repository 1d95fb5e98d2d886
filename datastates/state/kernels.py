"""Digests of chunks as two Triton kernels: one reads all blocks at the speed of memory, one goes
through the blocks of each chunk.

``device_digest`` imports this if Triton is installed. ``xxh3.Blocks`` defines which bytes make up
which chunks. On an H100 the first kernel reads 2.8 TB/s. The second takes as long as its chain of
dependent steps, for any number of chunks. Therefore each is launched once for many chunks, with
the blocks that are in one tensor and the gathered ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from .xxh3 import BLOCK_BYTES, INITIAL, INNER, LAST, SCRAMBLE, STRIPE_BYTES, Blocks, brought

_MOST = 32
"""The number of blocks that one program reads."""

_AT_ONCE = 16
"""The number of blocks that it reads at a time."""

_UNROLLED = tl.constexpr(4)
"""The number of steps of the chain that are compiled together.

More take longer to compile, and no less time to run."""

_GROUP = 512
"""The most chunks that are digested at once: their sums take 128 MiB of the device."""


@triton.jit  # type: ignore[untyped-decorator]  # Triton's
def sums(
    tiles: tl.tensor,
    edges: tl.tensor,
    secret: tl.tensor,
    out: tl.tensor,
    most: tl.constexpr,
    at_once: tl.constexpr,
) -> None:
    """What the blocks of tile ``program_id`` add to the lanes. A tile is where its first block is,
    its row in ``out``, the number of its blocks, and whether the first is an offset from ``edges``.

    Each word adds a product to its own lane, and itself to the adjacent lane. The two are summed
    apart, so that only sums change places.
    """
    tile = tiles + tl.program_id(0) * 4
    base = tl.load(tile + 3) * edges
    source = tl.multiple_of((tl.load(tile) + base).to(tl.pointer_type(tl.uint64)), 16)
    row, count = tl.load(tile + 1), tl.load(tile + 2)
    stripe = tl.arange(0, 16)[None, :, None]
    lane = tl.arange(0, 8)[None, None, :]
    mix = tl.load(secret + stripe * 8 + lane)
    pair = tl.arange(0, 4)[None, :, None] * 2 + tl.arange(0, 2)[None, None, :]
    for first in range(0, most, at_once):
        block = first + tl.arange(0, at_once)[:, None, None]
        is_here = block < count
        data = tl.load(source + block * 128 + stripe * 8 + lane, mask=is_here, other=0)
        key = data ^ mix
        products = tl.reshape(tl.sum((key & 0xFFFFFFFF) * (key >> 32), axis=1), (at_once, 4, 2))
        even, odd = tl.split(tl.reshape(tl.sum(data, axis=1), (at_once, 4, 2)))
        tl.store(out + (row + block) * 8 + pair, products + tl.join(odd, even), mask=is_here)


@triton.jit(do_not_specialize=["longest"])  # type: ignore[untyped-decorator]  # Triton's
def chain(
    added: tl.tensor,
    edges: tl.tensor,
    ends: tl.tensor,
    words: tl.tensor,
    out: tl.tensor,
    longest: tl.tensor,
) -> None:
    """The lanes of chunk ``program_id``, from what its blocks add and from its last block. ``ends``
    has six numbers for each chunk. The first two are the number of blocks before the last one, and
    the stripes of the last one. The next two are where the last block begins, and where the last 64
    bytes are. The fifth is 1 if these two are offsets from ``edges``. The sixth is the row in
    ``out``.

    ``words`` has the secret of the last block, the initial lanes, and the secret that is mixed in.
    """
    chunk = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, 8)
    blocks, stripes = tl.load(ends + chunk * 6), tl.load(ends + chunk * 6 + 1)
    base = tl.load(ends + chunk * 6 + 4) * edges
    last = (tl.load(ends + chunk * 6 + 2) + base).to(tl.pointer_type(tl.uint64))
    final = (tl.load(ends + chunk * 6 + 3) + base).to(tl.pointer_type(tl.uint64))
    lanes = tl.load(words + 128 + lane)
    mix = tl.load(words + 136 + lane)
    here = added + chunk * longest * 8 + lane
    for block in tl.range(0, blocks, loop_unroll_factor=_UNROLLED):
        going = lanes + tl.load(here + block * 8)
        lanes = (going ^ (going >> 47) ^ mix) * 0x9E3779B1
    for stripe in tl.static_range(16):
        source = final if stripe == 15 else last + stripe * 8
        is_read = (stripe == 15) | (stripe < stripes)
        data = tl.load(source + lane, mask=is_read, other=0)
        beside = tl.load(source + (lane ^ 1), mask=is_read, other=0)
        key = data ^ tl.load(words + stripe * 8 + lane)
        lanes += tl.where(is_read, beside + (key & 0xFFFFFFFF) * (key >> 32), 0)
    tl.store(out + tl.load(ends + chunk * 6 + 5) * 8 + lane, lanes)


@dataclass(frozen=True, slots=True)
class _Group:
    """``count`` chunks that are digested at once, the longest of ``longest`` blocks before its
    last."""

    count: int
    longest: int
    tiles: torch.Tensor
    ends: torch.Tensor


class Launch:
    """The kernels over the blocks of chunks. The caller owns what each call returns."""

    def __init__(self, blocks: Blocks) -> None:
        like, self._count = blocks.like, len(blocks.counts)
        self._groups = [
            _group(blocks, first, min(_GROUP, self._count - first))
            for first in range(0, self._count, _GROUP)
        ]
        self._inner = brought(INNER, like).view(torch.uint64)
        self._words = brought(np.concatenate([LAST.reshape(-1), INITIAL, SCRAMBLE]), like).view(
            torch.uint64
        )

    def __call__(self, edges: torch.Tensor) -> torch.Tensor:
        """Queue the kernels on the current stream. Returns the lanes, (chunks, 8), in the caller's
        order. ``edges`` are the gathered blocks. The blocks of ``Blocks.lasts`` may be missing."""
        words, base = edges.view(torch.uint64), edges.data_ptr()
        lanes = words.new_empty(self._count, 8)
        for group in self._groups:
            added = words.new_empty(group.count, group.longest, 8)
            if len(group.tiles):
                sums[(len(group.tiles),)](
                    group.tiles, base, self._inner, added, most=_MOST, at_once=_AT_ONCE
                )
            chain[(group.count,)](
                added, base, group.ends, self._words, lanes, group.longest, num_warps=1
            )
        return lanes.view(torch.int64)


def _group(blocks: Blocks, first: int, count: int) -> _Group:
    chunks, longest = range(first, first + count), max(blocks.counts[first : first + count])
    tiles = [
        _tiles(run.data, (run.chunk - first) * longest + run.block)
        for run in blocks.runs
        if run.chunk in chunks
    ]
    rests = [
        (row * BLOCK_BYTES, (chunk - first) * longest + block, 1, 1)
        for row, (chunk, block) in enumerate(blocks.rests)
        if chunk in chunks
    ]
    found = np.concatenate([*tiles, np.array(rests, np.int64).reshape(-1, 4)])
    ends = np.array([_end(blocks, chunk) for chunk in chunks], np.int64)
    return _Group(count, longest, brought(found, blocks.like), brought(ends, blocks.like))


def _tiles(data: torch.Tensor, row: int) -> npt.NDArray[np.int64]:
    """The rows of ``tiles`` for whole blocks in one tensor."""
    whole = data.numel() // BLOCK_BYTES
    begins = np.arange(0, whole, _MOST)
    starts, counts = data.data_ptr() + begins * BLOCK_BYTES, np.minimum(_MOST, whole - begins)
    return np.stack([starts, row + begins, counts, np.zeros_like(begins)], axis=1)


def _end(blocks: Blocks, chunk: int) -> tuple[int, ...]:
    """A row of ``ends``."""
    found, row = blocks.lasts.get(chunk), (len(blocks.rests) + chunk) * BLOCK_BYTES
    places = (
        (row, row + BLOCK_BYTES - STRIPE_BYTES, 1)
        if found is None
        else (found[0].data_ptr(), found[1].data_ptr(), 0)
    )
    return blocks.counts[chunk], blocks.stripes[chunk], *places, blocks.order[chunk]
