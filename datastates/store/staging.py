"""Holds many chunks of a state in memory of our own, which a few threads fill, so that tensors over several chunks are views."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from functools import partial

from datastates.content.manifest import CHUNK_BYTES
from datastates.system.interrupts import checkpoint

from .pouring import on_threads

__all__ = ["Stage"]


class Stage:
    """Room for the chunks ``indices`` (rising, at least one). All but the last are whole; the last has ``last`` bytes.

    Chunks that follow each other in the stream do so here. The memory lives as long as a view of it. Touching it for the first time
    may cost more than reading into it, so two threads are faster than one even if the file is in the page cache. Huge pages are not
    requested: with them some restores took five times as long, because the kernel had to find them.
    """

    def __init__(self, indices: Sequence[int], last: int) -> None:
        self._places = {index: number * CHUNK_BYTES for number, index in enumerate(indices)}
        size = (len(indices) - 1) * CHUNK_BYTES + last
        self._memory = memoryview(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))

    def fill(self, read: Callable[[int, memoryview], None]) -> None:
        """Call ``read`` with each index and its memory, on a few threads; of its errors, that of the first index is raised here.

        Every thread has ended when this returns.
        """
        on_threads(list(self._places), partial(self._fill, read), between=checkpoint)

    def room(self, index: int, length: int) -> memoryview:
        """The memory of a chunk of this length, for the caller to fill."""
        place = self._places[index]
        return self._memory[place : place + length]

    def holds(self, index: int) -> bool:
        """Whether it has room for this chunk."""
        return index in self._places

    def view(self, touched: range, offset: int, length: int) -> memoryview | None:
        """``length`` bytes from ``offset`` in the first of these chunks on; None if some of these chunks are not here."""
        if not touched or any(index not in self._places for index in touched):
            return None
        begin = self._places[touched.start] + offset
        return self._memory[begin : begin + length]

    def _fill(self, read: Callable[[int, memoryview], None], index: int) -> None:
        place = self._places[index]
        read(index, self._memory[place : place + CHUNK_BYTES])
