"""XXH3-128's long form, split so that many chunks are digested at once: its constants, and its end.

The hash reads stripes of 64 bytes, in blocks of 1 KiB, into eight *lanes* of 64 bits. What a block adds to the lanes depends only on its
bytes, so that is computed for all blocks at once; then the lanes of a chunk go through its blocks one after the other. Only the lanes
go to the host, 64 bytes for each chunk, where ``digests_of`` finishes the hash. Seed 0 and the default secret, as in ``chunk_digest``.
After the specification of xxHash, https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = [
    "BLOCK_BYTES",
    "INITIAL",
    "INNER",
    "LAST",
    "SCRAMBLE",
    "SHORTEST",
    "STRIPE_BYTES",
    "blocks_before_last",
    "digests_of",
    "stripes_of_last",
]

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
_PRIMES_64 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5
_ALL = (1 << 64) - 1


def _row(offset: int) -> _Words:
    """Eight words of the secret."""
    return np.frombuffer(_SECRET[offset : offset + STRIPE_BYTES], "<u8").astype(np.uint64)


INITIAL = np.array([_PRIMES_32[2], *_PRIMES_64[:4], _PRIMES_32[1], _PRIMES_64[4], _PRIMES_32[0]], np.uint64)
"""The initial lanes."""

INNER = np.stack([_row(8 * stripe) for stripe in range(16)])
"""The secret for the stripes of a block."""

LAST = np.stack([*INNER[:15], _row(192 - 64 - 7)])
"""The same for the last block of a chunk: its last 64 bytes are a stripe of their own."""

SCRAMBLE = _row(128)
"""The secret that is mixed in after each block."""

_MERGE_LOW, _MERGE_HIGH = _row(11), _row(192 - 64 - 11)


def blocks_before_last(length: int) -> int:
    """The blocks of this many bytes after which the lanes are scrambled: all but the last, which may be short."""
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
        high += _folded(words[:, lane] ^ _MERGE_HIGH[lane], words[:, lane + 1] ^ _MERGE_HIGH[lane + 1])
    both = np.stack([_avalanche(high), _avalanche(low)], axis=1).astype(">u8")
    return [row.tobytes() for row in both]


def _folded(one: _Words, other: _Words) -> _Words:
    """The two halves of the 128-bit product, combined by XOR."""
    half, mask = np.uint64(32), np.uint64(0xFFFFFFFF)
    low, high, their_low, their_high = one & mask, one >> half, other & mask, other >> half
    lowest, first, second, highest = low * their_low, high * their_low, low * their_high, high * their_high
    cross = (lowest >> half) + (first & mask) + second
    upper: _Words = (first >> half) + (cross >> half) + highest
    lower: _Words = (cross << half) | (lowest & mask)
    return upper ^ lower


def _avalanche(word: _Words) -> _Words:
    word = (word ^ (word >> np.uint64(37))) * np.uint64(0x165667919E3779F9)
    return word ^ (word >> np.uint64(32))
