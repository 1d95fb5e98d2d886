"""Digests of chunks as two Triton kernels: one reads all blocks at the speed of memory, one goes through the blocks of each chunk.

``digester`` imports this if Triton is installed; ``blocks`` says which bytes make up which chunks. The kernels have never run on a device
so far: Triton's interpreter shows that the digests are right, and its compiler produces machine code for them.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl

from .blocks import Blocks, brought
from .xxh3 import BLOCK_BYTES, INITIAL, INNER, LAST, SCRAMBLE

__all__ = ["Launch", "chain", "sums"]

_MOST = 64
"""The number of blocks that one program reads."""

_AT_ONCE = 8
"""The number of blocks that it reads at a time."""

_CHUNKS = 4
"""The number of chunks whose lanes one program processes: with eight lanes each they make a warp."""


@triton.jit  # type: ignore[untyped-decorator]  # Triton's
def sums(tiles: tl.tensor, base: tl.tensor, secret: tl.tensor, out: tl.tensor, most: tl.constexpr, at_once: tl.constexpr) -> None:
    """What the blocks of tile ``program_id`` add to the lanes. A tile is the offset of its first block from ``base``, its row in ``out``,
    and the number of its blocks.

    A thread has two neighbouring lanes of a block; only these two exchange anything.
    """
    tile = tiles + tl.program_id(0) * 3
    source = tl.multiple_of((tl.load(tile) + base).to(tl.pointer_type(tl.uint64)), 16)
    row, count = tl.load(tile + 1), tl.load(tile + 2)
    lane = tl.arange(0, 4)[None, :, None] * 2 + tl.arange(0, 2)[None, None, :]
    for first in range(0, most, at_once):
        block = first + tl.arange(0, at_once)[:, None, None]
        is_here = block < count
        even_sum = tl.zeros((at_once, 4), dtype=tl.uint64)
        odd_sum = tl.zeros((at_once, 4), dtype=tl.uint64)
        for stripe in tl.static_range(16):
            even, odd = tl.split(tl.load(source + block * 128 + stripe * 8 + lane, mask=is_here, other=0))
            even_secret, odd_secret = tl.split(tl.load(secret + stripe * 8 + lane))
            even_key = even ^ even_secret
            odd_key = odd ^ odd_secret
            even_sum += (even_key & 0xFFFFFFFF) * (even_key >> 32) + odd
            odd_sum += (odd_key & 0xFFFFFFFF) * (odd_key >> 32) + even
        tl.store(out + (row + block) * 8 + lane, tl.join(even_sum, odd_sum), mask=is_here)


@triton.jit  # type: ignore[untyped-decorator]  # Triton's
def chain(
    added: tl.tensor,
    last: tl.tensor,
    ends: tl.tensor,
    words: tl.tensor,
    out: tl.tensor,
    count: tl.tensor,
    longest: tl.tensor,
    chunks: tl.constexpr,
) -> None:
    """The lanes of ``chunks`` chunks, from what their blocks add and from their last block. ``ends`` has the number of blocks before that
    one, and its stripes.

    ``words`` has the secret of the last block, the initial lanes, and the secret that is mixed in.
    """
    chunk = tl.program_id(0).to(tl.int64) * chunks + tl.arange(0, chunks)[:, None]
    lane = tl.arange(0, 8)[None, :]
    is_here = chunk < count
    blocks = tl.load(ends + chunk * 2, mask=is_here, other=0)
    stripes = tl.load(ends + chunk * 2 + 1, mask=is_here, other=0)
    lanes = tl.load(words + 128 + lane) + tl.zeros((chunks, 8), dtype=tl.uint64)
    mix = tl.load(words + 136 + lane)
    for block in tl.range(0, longest, loop_unroll_factor=8):
        going = lanes + tl.load(added + (chunk * longest + block) * 8 + lane, mask=is_here & (block < blocks), other=0)
        lanes = tl.where(block < blocks, (going ^ (going >> 47) ^ mix) * 0x9E3779B1, lanes)
    for stripe in tl.static_range(16):
        place = last + chunk * 128 + stripe * 8
        data = tl.load(place + lane, mask=is_here, other=0)
        beside = tl.load(place + (lane ^ 1), mask=is_here, other=0)
        key = data ^ tl.load(words + stripe * 8 + lane)
        is_read = (stripe == 15) | (stripe < stripes)
        lanes += tl.where(is_read, beside + (key & 0xFFFFFFFF) * (key >> 32), 0)
    tl.store(out + chunk * 8 + lane, lanes, mask=is_here)


class Launch:
    """The kernels over the blocks of chunks. The caller owns what each call returns."""

    def __init__(self, blocks: Blocks) -> None:
        like = blocks.like
        self._count, self._longest, self._rests = len(blocks.counts), max(blocks.counts), len(blocks.rests)
        tiles = [
            (run.data.data_ptr() + first * BLOCK_BYTES, run.chunk * self._longest + run.block + first, min(_MOST, count - first))
            for run in blocks.runs
            for count in (run.data.numel() // BLOCK_BYTES,)
            for first in range(0, count, _MOST)
        ]
        rests = [(row * BLOCK_BYTES, chunk * self._longest + block, 1) for row, (chunk, block) in enumerate(blocks.rests)]
        self._tiles, self._rest_tiles = (brought(np.array(each, np.int64).reshape(-1, 3), like) for each in (tiles, rests))
        self._ends = brought(np.array([blocks.counts, blocks.stripes], np.int64).T, like)
        self._inner = brought(INNER, like).view(torch.uint64)
        self._words = brought(np.concatenate([LAST.reshape(-1), INITIAL, SCRAMBLE]), like).view(torch.uint64)

    def __call__(self, edges: torch.Tensor) -> torch.Tensor:
        """Queue the kernels on the current stream; returns the lanes, (chunks, 8). ``edges`` are the blocks that were gathered."""
        words = edges.view(torch.uint64)
        added, lanes = words.new_empty(self._count, self._longest, 8), words.new_empty(self._count, 8)
        for tiles, base in ((self._tiles, 0), (self._rest_tiles, edges.data_ptr())):
            if len(tiles):
                sums[(len(tiles),)](tiles, base, self._inner, added, most=_MOST, at_once=_AT_ONCE)
        last, programs = words[self._rests :], (triton.cdiv(self._count, _CHUNKS),)
        chain[programs](added, last, self._ends, self._words, lanes, self._count, self._longest, chunks=_CHUNKS, num_warps=1)
        return lanes.view(torch.int64)
