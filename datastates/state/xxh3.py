"""XXH3-128's long form, split so that a device digests many chunks at once.

The hash reads stripes of 64 bytes, in blocks of 1 KiB, into eight *lanes* of 64 bits. What a block
adds to the lanes depends only on its bytes. It is computed for all blocks at once. Then the lanes
of a chunk go through its blocks one after the other. The lanes go to the host, 64 bytes for each
chunk, where ``digests_of`` finishes the hash. Seed 0 and the default secret are used, as in
``chunk_digest``. See the specification of xxHash,
https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from datastates.system.devices import devices

from .manifest import CHUNK_BYTES

BLOCK_BYTES = 1024
"""The bytes after which the lanes are scrambled."""

STRIPE_BYTES = 64
"""The bytes that are added to the lanes at once."""

SHORTEST = 241
"""The least length with this form of digest; shorter inputs have another."""

_Words = npt.NDArray[np.uint64]

_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
    "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364"
    "eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
_PRIMES_32 = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
_PRIMES_64 = (
    0x9E3779B185EBCA87,
    0xC2B2AE3D27D4EB4F,
    0x165667B19E3779F9,
    0x85EBCA77C2B2AE63,
    0x27D4EB2F165667C5,
)
_ALL = (1 << 64) - 1
_ALIGNED = 16
"""The alignment, in bytes, that a device's memory needs for the widest read."""

_WORD = 8
"""The begin of each read by a device must be a multiple of this many bytes."""

LANES = BLOCK_BYTES // STRIPE_BYTES, STRIPE_BYTES // 8
"""The shape of a block in words: its stripes, and the lanes to which they are added."""

Part = tuple[int, torch.Tensor]
"""The place in a chunk where some of its bytes begin, and these bytes: flat, ``uint8``."""


def _row(offset: int) -> _Words:
    return np.frombuffer(_SECRET[offset : offset + STRIPE_BYTES], "<u8").astype(np.uint64)


INITIAL = np.array(
    [_PRIMES_32[2], *_PRIMES_64[:4], _PRIMES_32[1], _PRIMES_64[4], _PRIMES_32[0]], np.uint64
)
"""The initial lanes."""

INNER = np.stack([_row(8 * stripe) for stripe in range(16)])
"""The secret for the stripes of a block."""

LAST = np.stack([*INNER[:15], _row(192 - 64 - 7)])
"""The same for the last block of a chunk: its last 64 bytes are a separate stripe."""

SCRAMBLE = _row(128)
"""The secret that is mixed in after each block."""

_MERGE_LOW = _row(11)
_MERGE_HIGH = _row(192 - 64 - 11)


def blocks_before_last(length: int) -> int:
    """The blocks of this many bytes after which the lanes are scrambled: all but the last, which
    may be short."""
    return (length - 1) // BLOCK_BYTES


def stripes_of_last(length: int) -> int:
    """The whole stripes of the last block that come before the last 64 bytes."""
    return (length - 1) % BLOCK_BYTES // STRIPE_BYTES


def digests_of(lanes: npt.NDArray[Any], lengths: Sequence[int]) -> list[bytes]:
    """The digests of chunks of these lengths, from the lanes of their bytes: (n, 8), of 64 bits."""
    words = np.ascontiguousarray(lanes).view(np.uint64)
    low = np.array([length * _PRIMES_64[0] & _ALL for length in lengths], np.uint64)
    high = np.array([~(length * _PRIMES_64[1]) & _ALL for length in lengths], np.uint64)
    for lane in range(0, 8, 2):
        low += _folded(words[:, lane] ^ _MERGE_LOW[lane], words[:, lane + 1] ^ _MERGE_LOW[lane + 1])
        high += _folded(
            words[:, lane] ^ _MERGE_HIGH[lane], words[:, lane + 1] ^ _MERGE_HIGH[lane + 1]
        )
    both = np.stack([_avalanche(high), _avalanche(low)], axis=1).astype(">u8")
    return [row.tobytes() for row in both]


def _folded(one: _Words, other: _Words) -> _Words:
    """The two halves of the 128-bit product, combined by XOR."""
    half, mask = np.uint64(32), np.uint64(0xFFFFFFFF)
    low, high, their_low, their_high = one & mask, one >> half, other & mask, other >> half
    lowest, first, second, highest = (
        low * their_low,
        high * their_low,
        low * their_high,
        high * their_high,
    )
    cross = (lowest >> half) + (first & mask) + second
    upper: _Words = (first >> half) + (cross >> half) + highest
    lower: _Words = (cross << half) | (lowest & mask)
    return upper ^ lower


def _avalanche(word: _Words) -> _Words:
    word = (word ^ (word >> np.uint64(37))) * np.uint64(0x165667919E3779F9)
    return word ^ (word >> np.uint64(32))


# --- Blocks of chunks: the bytes that a device reads to digest them ---


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """Whole blocks of a chunk in one tensor: the chunk, the number of the first block, and the
    bytes."""

    chunk: int
    block: int
    data: torch.Tensor


def can_digest(length: int, parts: Sequence[Part]) -> bool:
    """Whether a device can digest a chunk of this length in place: its parts are aligned, on one
    device, and begin at whole KiB of the chunk.

    The parts follow each other, with less than 1 KiB of zeros between them and behind the last.
    """
    end = 0
    for start, data in parts:
        if (
            start != -(-end // BLOCK_BYTES) * BLOCK_BYTES
            or data.data_ptr() % _ALIGNED
            or data.storage_offset() % _ALIGNED
        ):
            return False
        end = start + data.numel()
    return (
        length >= SHORTEST
        and end <= length < end + BLOCK_BYTES
        and len({devices().of(data) for _, data in parts}) == 1
    )


def split_by_chunk(start: int, flat: torch.Tensor) -> Iterator[tuple[int, int, torch.Tensor]]:
    """For each chunk that overlaps a stretch of the stream: the chunk, where the stretch begins in
    it, and its bytes there."""
    done = 0
    while done < flat.numel():
        chunk, offset = divmod(start + done, CHUNK_BYTES)
        data = flat[done : done + CHUNK_BYTES - offset]
        yield chunk, offset, data
        done += data.numel()


class Blocks:
    """The blocks of chunks on one device. Each chunk is a length and its parts in order.
    ``can_digest`` holds for each.

    Chunks are sorted by ``order``, the longest first. Chunks that are not done after n blocks are
    then always the first ones. ``counts`` are the blocks of each chunk before its last, ``stripes``
    the whole stripes of that last block. ``runs`` are blocks that are in one tensor. ``rests`` are
    all other blocks, as chunk and number. ``lasts`` has, by chunk, the last block and the last 64
    bytes of chunks whose end may be read in place. Tensors are kept as long as this object, and
    read on demand.
    """

    def __init__(self, chunks: Sequence[tuple[int, Sequence[Part]]]) -> None:
        self.lengths = tuple(length for length, _ in chunks)
        self.order = sorted(range(len(chunks)), key=lambda index: -self.lengths[index])
        self.counts = [blocks_before_last(self.lengths[index]) for index in self.order]
        self.stripes = [stripes_of_last(self.lengths[index]) for index in self.order]
        self.like = chunks[0][1][0][1]
        self.runs: list[Run] = []
        self.rests: list[tuple[int, int]] = []
        self.lasts: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._copies: list[Part] = []
        self._copies_of_lasts: list[Part] = []
        self._nothing: torch.Tensor | None = None
        for chunk, index in enumerate(self.order):
            for start, data in chunks[index][1]:
                self._cut(chunk, start, data)
        for chunk, index in enumerate(self.order):
            for start, data in chunks[index][1]:
                self._take_last(chunk, self.lengths[index], start, data)

    def gathered(self, *, is_all: bool = True) -> torch.Tensor:
        """The blocks that are in no run, on the device: first ``rests``, then the last of each
        chunk. Its shape is (blocks, 16, 8), its dtype ``int64``.

        The last 64 bytes of a chunk are the sixteenth stripe of its last block. The space between
        parts is zeros. Unless ``is_all``, the rows of chunks in ``lasts`` are zeros, too.
        """
        copies = [*self._copies, *self._copies_of_lasts] if is_all else self._copies
        if not copies and self._nothing is not None:
            return self._nothing
        found = self.like.new_zeros((len(self.rests) + len(self.lengths)) * BLOCK_BYTES)
        if not copies:
            self._nothing = found.view(torch.int64).view(-1, *LANES)
            return self._nothing
        torch._foreach_copy_(
            [found[at : at + data.numel()] for at, data in copies], [data for _, data in copies]
        )
        return found.view(torch.int64).view(-1, *LANES)

    def _cut(self, chunk: int, start: int, data: torch.Tensor) -> None:
        """Cut the blocks of a part that come before the last of its chunk: whole ones, and what
        is left over."""
        first = start // BLOCK_BYTES
        count = min(data.numel() // BLOCK_BYTES, self.counts[chunk] - first)
        if count > 0:
            self.runs.append(Run(chunk, first, data[: count * BLOCK_BYTES]))
        if first + count < self.counts[chunk] and data.numel() > count * BLOCK_BYTES:
            self._copies.append((len(self.rests) * BLOCK_BYTES, data[count * BLOCK_BYTES :]))
            self.rests.append((chunk, first + count))

    def _take_last(self, chunk: int, length: int, start: int, data: torch.Tensor) -> None:
        """Take what a part has of the last block of its chunk: the whole stripes, and the last
        64 bytes as the sixteenth."""
        row = (len(self.rests) + chunk) * BLOCK_BYTES
        begin = self.counts[chunk] * BLOCK_BYTES
        copies = self._copies
        if (
            start <= min(begin, length - STRIPE_BYTES)
            and length <= start + data.numel()
            and not length % _WORD
        ):
            self.lasts[chunk] = data[begin - start :], data[length - STRIPE_BYTES - start :]
            copies = self._copies_of_lasts
        for low, high, at in (
            (begin, begin + self.stripes[chunk] * STRIPE_BYTES, row),
            (length - STRIPE_BYTES, length, row + BLOCK_BYTES - STRIPE_BYTES),
        ):
            first, last = max(low, start), min(high, start + data.numel())
            if first < last:
                copies.append((at + first - low, data[first - start : last - start]))


def brought(words: npt.NDArray[Any], like: torch.Tensor) -> torch.Tensor:
    """Numbers as ``int64`` on the device of a tensor.

    The host does not wait until they are there."""
    there = torch.from_numpy(np.ascontiguousarray(words).view(np.int64))
    if not devices().is_on(like):
        return there
    pinned = devices().pinned(there.shape, there.dtype).copy_(there)
    return like.new_empty(there.shape, dtype=there.dtype).copy_(pinned, non_blocking=True)
