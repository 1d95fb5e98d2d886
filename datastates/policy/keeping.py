"""How many states are kept in memory where nobody said: a pure function of their sizes."""

from __future__ import annotations

from collections.abc import Iterable

from datastates.manifest import CHUNK_BYTES

__all__ = ["AT_ONCE_BYTES", "FEW", "SMALL_BYTES", "slots_kept"]

SMALL_BYTES = 96 << 20
"""As many small states as fit into this are kept. With what is imported a small training then takes less than 200 MiB more."""

AT_ONCE_BYTES = 256 << 20
"""Where somebody chose how much memory there is, small states take so much of it at once."""

FEW = 4
"""So many states are kept at least, however large: one is being written, one is the head, one was the head a second ago and may
still count as named, and one is being captured."""


def slots_kept(sizes: Iterable[int], capacity: int, *, small_bytes: int = SMALL_BYTES) -> int:
    """Slots of the arena that are to hold states, where ``sizes`` are the slots of one state of each training; at most ``capacity``."""
    return min(capacity, max(small_bytes // CHUNK_BYTES, FEW * sum(sizes)))
