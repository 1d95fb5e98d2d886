"""Other bytes of the same xxh3_128: what anyone can make in milliseconds, and what no check of ours
may be content with.

Of every block of 1024 bytes xxh3 keeps, for each of eight lanes, a sum over its 16 stripes: the
neighbour's word, plus the product of the two halves of the own word under a key. A word whose one
half equals the key's has no product, and its other half is free: two stripes of such words set the
sums of all lanes to whatever is wanted. So all but 128 bytes of a block may be chosen.
"""

from __future__ import annotations

from random import Random

import numpy as np

BLOCK = 1024
_STRIPE = 64
_STRIPES = BLOCK // _STRIPE
_HALF = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
_NEIGHBOUR = np.arange(8) ^ 1

_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
_KEYS = np.array(
    [
        [int.from_bytes(_SECRET[8 * (stripe + lane) :][:8], "little") for lane in range(8)]
        for stripe in range(_STRIPES)
    ],
    np.uint64,
)


def collide(
    original: bytes | memoryview, wanted: bytes | memoryview, *, stripes: tuple[int, int] = (14, 15)
) -> bytes:
    """``wanted``, but for two stripes of each of its blocks that differ, with the digest of
    ``original``, which is as long.

    What lies behind the last whole block must be the same in both.
    """
    whole = (len(original) - 1) // BLOCK * BLOCK
    if len(original) != len(wanted) or len(original) <= BLOCK or original[whole:] != wanted[whole:]:
        raise ValueError(
            f"{len(original)} bytes and {len(wanted)} bytes, of which only those before {whole} may"
            " differ"
        )
    old = np.frombuffer(original, np.uint64, whole // 8).reshape(-1, _STRIPES, 8)
    new = np.frombuffer(wanted, np.uint64, whole // 8).reshape(-1, _STRIPES, 8).copy()
    changed = (old != new).any(axis=(1, 2))
    new[changed] = _corrected(old[changed], new[changed], *stripes)
    return new.tobytes() + bytes(original[whole:])


def collide_somewhere(original: bytes | memoryview, random: Random) -> bytes:
    """Bytes of the digest of ``original`` that differ from it in a random stretch of blocks,
    with its corrections at random places."""
    blocks = (len(original) - 1) // BLOCK
    first = random.randrange(blocks)
    count = random.randrange(1, min(8, blocks - first) + 1)
    wanted = bytearray(original)
    wanted[first * BLOCK : (first + count) * BLOCK] = random.randbytes(count * BLOCK)
    one, other = random.sample(range(_STRIPES), 2)
    return collide(original, bytes(wanted), stripes=(one, other))


def _corrected(old: np.ndarray, new: np.ndarray, low: int, high: int) -> np.ndarray:
    """``new`` with the sums of ``old``: stripe ``low`` gives the lower halves of what is
    lacking, stripe ``high`` the upper ones."""
    with np.errstate(over="ignore"):
        new[:, low], new[:, high] = _KEYS[low] & ~_HALF, _KEYS[high] & _HALF
        # a word is added to its neighbour's lane
        lacking = (_sums(old) - _sums(new))[:, _NEIGHBOUR]
        new[:, low] |= lacking & _HALF
        new[:, high] |= (lacking >> _SHIFT) << _SHIFT
    return new


def _sums(blocks: np.ndarray) -> np.ndarray:
    keyed = blocks ^ _KEYS
    sums: np.ndarray = ((keyed & _HALF) * (keyed >> _SHIFT) + blocks[:, :, _NEIGHBOUR]).sum(
        axis=1, dtype=np.uint64
    )
    return sums
