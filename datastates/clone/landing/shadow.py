"""Memory for a state that is on its way: as large as its stream, with real pages only where something lands."""

from __future__ import annotations

import ctypes
import mmap
import sys
import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress

import torch

from datastates.content.manifest import CHUNK_BYTES
from datastates.errors import OverBudget

__all__ = ["Extent", "Shadow", "Shadows"]

_HUGE_BYTES = 2 << 20
_MADV_DONTNEED = 4
_MADV_POPULATE_WRITE = 23
_MAP_NORESERVE = 0x4000 if sys.platform == "linux" else 0

_libc = ctypes.CDLL(None, use_errno=True)

Extent = tuple[int, int]
"""Start and length in bytes."""


class Shadow:
    """Memory in which byte ``i`` of a stream lies at byte ``i``. It is freed once no view of it is left.

    It uses huge pages if the kernel gives them: touching them for the first time costs a third of touching small ones, and a helper thread
    touches them ahead of the transfer.
    """

    def __init__(self, chunk_count: int) -> None:
        self._length = max(1, chunk_count) * CHUNK_BYTES
        try:
            reserved = mmap.mmap(-1, self._length + _HUGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
        except (OSError, ValueError, OverflowError) as exc:
            raise OverBudget(f"{self._length} bytes of memory cannot be reserved for the state ({exc}): choose less with only=…") from exc
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # a kernel without huge pages
                reserved.madvise(mmap.MADV_HUGEPAGE)
        address = ctypes.addressof(ctypes.c_char.from_buffer(reserved))
        first = -address % _HUGE_BYTES
        self._address = address + first
        self._view = memoryview(reserved)[first : first + self._length]
        self._is_closed = False
        self._helper: threading.Thread | None = None

    def memory(self, start: int, length: int) -> memoryview:
        """A stretch of it, writable."""
        return self._view[start : start + length]

    def tensor(self, start: int, length: int) -> torch.Tensor:
        """A stretch of it as flat ``uint8``, with a storage of its own."""
        return (
            torch.frombuffer(self.memory(start, length), dtype=torch.uint8) if length else torch.empty(0, dtype=torch.uint8, device="cpu")
        )

    def warm(self, extents: Sequence[Extent]) -> None:
        """Begin to touch these stretches, in this order, on a separate thread."""
        if extents and self._helper is None:
            self._helper = threading.Thread(target=self._touch, args=(extents,), name="datastates-landing", daemon=True)
            self._helper.start()

    def reopen(self, chunk_count: int) -> bool:
        """Begin anew with the existing pages; False if there are too few."""
        self._is_closed = False
        return chunk_count * CHUNK_BYTES <= self._length

    def close(self, keep: Iterable[Extent] | None = None) -> None:
        """Stop touching. With ``keep``, the pages of everything else are given back, and nobody may look at them any more."""
        self._is_closed = True
        if self._helper is not None:
            self._helper.join()
            self._helper = None
        if keep is not None:
            done = 0
            for start, length in [*sorted(keep), (self._length, 0)]:
                self._drop(done, start)
                done = start + length

    def _touch(self, extents: Sequence[Extent]) -> None:
        for start, length in extents:
            if self._is_closed:
                return
            begin = start // mmap.PAGESIZE * mmap.PAGESIZE
            _advise(self._address + begin, start + length - begin, _MADV_POPULATE_WRITE)

    def _drop(self, begin: int, end: int) -> None:
        begin, end = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
        if begin < end:
            _advise(self._address + begin, end - begin, _MADV_DONTNEED)


class Shadows:
    """Keeps the memory of the last clone for the next one: pages that were touched before take bytes many times as fast."""

    def __init__(self) -> None:
        self._kept: Shadow | None = None
        self._lock = threading.Lock()

    def take(self, chunk_count: int) -> Shadow:
        """A shadow of at least ``chunk_count`` chunks, with arbitrary contents."""
        with self._lock:
            kept, self._kept = self._kept, None
        return kept if kept is not None and kept.reopen(chunk_count) else Shadow(chunk_count)

    def give(self, shadow: Shadow) -> None:
        """Keep a closed shadow that nobody looks at any more, and release the one before it."""
        with self._lock:
            self._kept = shadow

    def close(self) -> None:
        """Release the shadow that is kept; idempotent."""
        with self._lock:
            self._kept = None


def _advise(address: int, length: int, advice: int) -> None:
    """Call madvise without the interpreter's lock. If the kernel does not know the advice, pages are touched when they are written."""
    if sys.platform == "linux":
        _libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(length), advice)
