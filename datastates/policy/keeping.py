"""How much memory states get, at once and in the end: pure functions of their sizes."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["AT_ONCE_BYTES", "FEW", "FEWEST", "SMALL_BYTES", "UNCOUNTED_BYTES", "bytes_allowed", "bytes_at_once", "bytes_kept", "is_tight"]

SMALL_BYTES = 128 << 20
"""As many small states are kept as fit into this. A small training then takes less than 200 MiB more, including imports."""

AT_ONCE_BYTES = 256 << 20
"""If the user chose the capacity, small states may take this much memory at once."""

FEWEST = 3
"""The least number of states that get memory at once, however large: one is being written, one is the head, one is being captured."""

FEW = 4
"""The least number of states that have memory in the end, however large: one more, to go back to."""


UNCOUNTED_BYTES = 4 << 20
"""What states may take besides their slots before it counts toward the memory that they may take."""

_RESERVE_BYTES = 64 << 20
"""The memory that is left to the training and to other processes in any case."""


def bytes_at_once(sizes: Iterable[int], capacity: int, *, is_given: bool) -> int:
    """The memory that captures take as they need it, given in ``sizes`` the bytes of one state of each training; at most ``capacity``.

    ``is_given``: the user chose the capacity.
    """
    small_bytes = AT_ONCE_BYTES if is_given else SMALL_BYTES
    return min(capacity, max(small_bytes, FEWEST * sum(sizes)))


def bytes_allowed(size: int, *, warm: int, at_once: int, kept: int) -> int:
    """The bytes that may be warm after a capture of ``size`` bytes, before states leave memory to make room for it.

    Warming up to a quarter of the state's bytes more costs no more than its copy does. So versions that share most of their chunks, and
    need few new ones each, all stay, whereas one that shares no chunks reuses the memory of an older one.
    """
    return min(kept, max(at_once, warm + size // 4))


def is_tight(available_bytes: int, held_bytes: int) -> bool:
    """Whether states should take no more memory: less is left than an eighth of all that they could have.

    :param available_bytes: what the process may still take, within its control groups.
    :param held_bytes: what states hold already.
    """
    return available_bytes < max(_RESERVE_BYTES, (available_bytes + held_bytes) // 8)


def bytes_kept(sizes: Iterable[int], capacity: int, *, is_given: bool, latest: int | None = None) -> int:
    """The bytes that hold states in the end. ``latest``: how many of its newest states each training should keep."""
    count = FEW if latest is None else max(FEWEST, latest + 2)  # the newest is the head; one is being written, one captured
    return capacity if is_given else min(capacity, max(SMALL_BYTES, count * sum(sizes)))
