"""Digests of chunks as two Triton kernels: one reads all blocks at the speed of memory, one goes
through the blocks of each chunk.

``device_digest`` imports this if Triton is installed. ``xxh3.Blocks`` defines which bytes make up
which chunks. On an H100 the first kernel reads 2.8 TB/s. The second takes as long as its chain of
dependent steps, for any number of chunks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
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

_GROUP = 256
"""The most chunks that are digested at once: their sums take 64 MiB of the device."""


@triton.jit  # type: ignore[untyped-decorator]  # Triton's
def sums(
    tiles: tl.tensor,
    base: tl.tensor,
    secret: tl.tensor,
    out: tl.tensor,
    most: tl.constexpr,
    at_once: tl.constexpr,
) -> None:
    """What the blocks of tile ``program_id`` add to the lanes. A tile is the offset of its first
    block from ``base``, its row in ``out``, and the number of its blocks.

    Each word adds a product to its own lane, and itself to the adjacent lane. The two are summed
    apart, so that only sums change places.
    """
    tile = tiles + tl.program_id(0) * 3
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
    has for each chunk the number of blocks before that one, its stripes, where it begins, where the
    last 64 bytes are, and whether these two are offsets from ``edges``.

    ``words`` has the secret of the last block, the initial lanes, and the secret that is mixed in.
    """
    chunk = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, 8)
    blocks, stripes = tl.load(ends + chunk * 5), tl.load(ends + chunk * 5 + 1)
    base = tl.load(ends + chunk * 5 + 4) * edges
    last = (tl.load(ends + chunk * 5 + 2) + base).to(tl.pointer_type(tl.uint64))
    final = (tl.load(ends + chunk * 5 + 3) + base).to(tl.pointer_type(tl.uint64))
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
    tl.store(out + chunk * 8 + lane, lanes)


@dataclass(frozen=True, slots=True)
class _Group:
    """Chunks that are digested at once: from ``first`` on, ``count`` of them, the longest of
    ``longest`` blocks before its last."""

    first: int
    count: int
    longest: int
    tiles: torch.Tensor
    rests: torch.Tensor
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
        """Queue the kernels on the current stream. Returns the lanes, (chunks, 8). ``edges`` are
        the gathered blocks. The blocks of ``Blocks.lasts`` may be missing."""
        words, base = edges.view(torch.uint64), edges.data_ptr()
        lanes = words.new_empty(self._count, 8)
        for group in self._groups:
            added = words.new_empty(group.count, group.longest, 8)
            for tiles, start in ((group.tiles, 0), (group.rests, base)):
                if len(tiles):
                    sums[(len(tiles),)](
                        tiles, start, self._inner, added, most=_MOST, at_once=_AT_ONCE
                    )
            chain[(group.count,)](
                added,
                base,
                group.ends,
                self._words,
                lanes[group.first :],
                group.longest,
                num_warps=1,
            )
        return lanes.view(torch.int64)


def _group(blocks: Blocks, first: int, count: int) -> _Group:
    chunks, longest = range(first, first + count), max(blocks.counts[first : first + count])
    tiles = [
        (
            run.data.data_ptr() + begin * BLOCK_BYTES,
            (run.chunk - first) * longest + run.block + begin,
            min(_MOST, whole - begin),
        )
        for run in blocks.runs
        if run.chunk in chunks
        for whole in (run.data.numel() // BLOCK_BYTES,)
        for begin in range(0, whole, _MOST)
    ]
    rests = [
        (row * BLOCK_BYTES, (chunk - first) * longest + block, 1)
        for row, (chunk, block) in enumerate(blocks.rests)
        if chunk in chunks
    ]
    ends = [_end(blocks, chunk) for chunk in chunks]
    found = (
        brought(np.array(each, np.int64).reshape(-1, width), blocks.like)
        for each, width in ((tiles, 3), (rests, 3), (ends, 5))
    )
    return _Group(first, count, longest, *found)


def _end(blocks: Blocks, chunk: int) -> tuple[int, int, int, int, int]:
    """A row of ``ends``."""
    found = blocks.lasts.get(chunk)
    if found is not None:
        return (
            blocks.counts[chunk],
            blocks.stripes[chunk],
            found[0].data_ptr(),
            found[1].data_ptr(),
            0,
        )
    row = (len(blocks.rests) + chunk) * BLOCK_BYTES
    return blocks.counts[chunk], blocks.stripes[chunk], row, row + BLOCK_BYTES - STRIPE_BYTES, 1
