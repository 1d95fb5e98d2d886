"""Threads that give way to others at the disk."""

from __future__ import annotations

import ctypes
import os
import sys

__all__ = ["LOWEST", "disk_priority", "yield_disk"]

_NUMBERS = {"x86_64": (251, 252), "aarch64": (30, 31)}
"""The numbers of ``ioprio_set`` and ``ioprio_get``, for which the C library has no names."""

_THREAD = 1

LOWEST = (2 << 13) | 7
"""The last priority of those that share the disk by turns. Not the class *idle*, which gets nothing at all while others use the disk:
writes that a checkpoint waits for must come to an end.
"""


def yield_disk() -> bool:
    """Let the disk serve other threads and processes before this thread, if its scheduler knows priorities; returns whether that was
    accepted.

    The processor's priority stays: a thread that holds the interpreter's lock and waits for its turn would hold up the training.
    """
    return _call(0, _THREAD, 0, LOWEST) == 0


def disk_priority(thread: int = 0) -> int | None:
    """The priority of a thread by its native id (0: this one), in the kernel's numbers; None if the kernel does not say."""
    found = _call(1, _THREAD, thread)
    return None if found < 0 else found


def _call(which: int, *arguments: int) -> int:
    numbers = _NUMBERS.get(os.uname().machine) if sys.platform == "linux" else None
    if numbers is None:
        return -1
    return int(ctypes.CDLL(None).syscall(numbers[which], *arguments))
