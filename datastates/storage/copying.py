"""Copies bytes from a tier straight to where they belong: each chunk is checked while it is in the
processor's cache, and then copied.

Reading into memory that was never touched costs more for the touching than for the reading. No such
memory is used here.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from datastates.state.manifest import CHUNK_BYTES
from datastates.system.interrupts import checkpoint

STRIDE_BYTES = CHUNK_BYTES
"""The most bytes read, digested and copied at a time.

With less, threads lose more by waiting for the interpreter than the cache gains."""

_DIRECT_BYTES = 64 << 10
"""From this size on a piece is worth a read of its own."""

_RUN = 4
"""The number of chunks, 16 MiB at most, that one thread takes at a time."""

_MOST_THREADS = 8


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Bytes of a chunk from ``offset`` on, and the memory of the same length into which they
    belong."""

    offset: int
    memory: memoryview


@dataclass(frozen=True, slots=True, eq=False)
class ReadStep:
    """Bytes of a chunk that are read at once, straight into ``memory``. If that is None, they are
    read into a ``ThreadBuffer``, from which ``pieces`` are copied."""

    offset: int
    length: int
    memory: memoryview | None
    pieces: tuple[Piece, ...] = ()


@runtime_checkable
class SupportsParallelRead(Protocol):
    """A reader from which several threads may read chunks at once."""

    def check(self, indices: Sequence[int]) -> None:
        """Check the chunks that are not checked yet, and keep none of their bytes.

        :raises Corrupt: a chunk fails its digest.
        """

    def read_pieces(self, pieces: Mapping[int, Sequence[Piece]]) -> None:
        """Copy pieces, given by chunk, to their memory. Bytes that may have changed since their
        check are checked again.

        :raises Corrupt: a chunk fails its digest now; its bytes, and others, have already been
            copied to where they belong.
        """


class ThreadBuffer(threading.local):
    """Memory for each thread, used again and again."""

    def __init__(self) -> None:
        self.memory = memoryview(np.empty(STRIDE_BYTES, np.uint8).data)


def pieces_by_chunk(stretches: Iterable[tuple[int, memoryview]]) -> dict[int, list[Piece]]:
    """The pieces of these stretches, by chunk, in the order of the stream.

    A stretch is its start and the memory for it; none overlap."""
    found: dict[int, list[Piece]] = {}
    for start, memory in sorted(stretches, key=lambda stretch: stretch[0]):
        done = 0
        while done < memory.nbytes:
            index, offset = divmod(start + done, CHUNK_BYTES)
            piece = memory[done : done + CHUNK_BYTES - offset]
            found.setdefault(index, []).append(Piece(offset, piece))
            done += piece.nbytes
    return found


def read_steps(
    pieces: Sequence[Piece], length: int, *, is_whole: bool = True
) -> Iterator[ReadStep]:
    """The steps that read a chunk of ``length`` bytes. Each large piece has its own step, and
    everything between large pieces is read together. Unless ``is_whole``, they read no more than
    the pieces need."""
    if not is_whole:
        for step in read_steps(pieces, length):
            if step.memory is not None:
                yield step
            elif step.pieces:
                begin, last = step.pieces[0].offset, step.pieces[-1]
                end = last.offset + last.memory.nbytes
                yield ReadStep(begin, end - begin, None, step.pieces)
        return
    small: list[Piece] = []
    begin = 0
    for piece in pieces:
        if piece.memory.nbytes < _DIRECT_BYTES:
            small.append(piece)
            continue
        yield from _through_room(begin, piece.offset, small)
        small = []
        for at in range(0, piece.memory.nbytes, STRIDE_BYTES):
            stride = piece.memory[at : at + STRIDE_BYTES]
            yield ReadStep(piece.offset + at, stride.nbytes, stride)
        begin = piece.offset + piece.memory.nbytes
    yield from _through_room(begin, length, small)


def copy(into: memoryview, data: memoryview) -> None:
    """``into[:] = data`` for bytes, while other threads run."""
    np.copyto(np.frombuffer(into, np.uint8), np.frombuffer(data, np.uint8))


def on_threads(
    indices: Sequence[int],
    work: Callable[[int], object],
    *,
    between: Callable[[], None] = lambda: None,
) -> None:
    """Call ``work`` with each index, on a few threads. The error of the first index that failed is
    raised here.

    There are as many threads as half the cores that this process may use, but at least four (or one
    for each core), and at most eight.

    ``between`` is called now and then, on this thread. Every thread has ended when this returns.
    """
    if len(indices) < 2:
        for index in indices:
            work(index)
        return
    pool = ThreadPoolExecutor(_threads(), thread_name_prefix="datastates-read")
    try:
        runs = []
        for at in range(0, len(indices), _RUN):
            some = indices[at : at + _RUN]
            try:
                runs.append(pool.submit(_each, some, work))
            except RuntimeError:  # the interpreter ends, and starts no threads any more
                _each(some, work)
        for run in runs:
            between()
            run.result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _threads() -> int:
    usable = len(os.sched_getaffinity(0))
    return min(usable, max(4, usable // 2), _MOST_THREADS)


def _each(indices: Sequence[int], work: Callable[[int], object]) -> None:
    for index in indices:
        work(index)


def _through_room(begin: int, end: int, pieces: Sequence[Piece]) -> Iterator[ReadStep]:
    """Steps through a ``ThreadBuffer`` from ``begin`` to ``end``, each with its pieces, or parts of
    pieces."""
    left = list(pieces)
    for at in range(begin, end, STRIDE_BYTES):
        stop, inside = min(at + STRIDE_BYTES, end), []
        while left and left[0].offset < stop:
            piece = left.pop(0)
            head = piece.memory[: stop - piece.offset]
            inside.append(Piece(piece.offset, head))
            if head.nbytes < piece.memory.nbytes:
                left.insert(0, Piece(stop, piece.memory[head.nbytes :]))
        yield ReadStep(at, stop - at, None, tuple(inside))


# Memory for many chunks of a state, which a few threads fill, so that tensors over several chunks
# are views.


class Stage:
    """Memory for the chunks ``indices`` (rising, at least one). All but the last are whole. The
    last has ``last`` bytes.

    Chunks that follow each other in the stream do so here. The memory lives as long as a view of
    it. Touching it for the first time may cost more than reading into it, so two threads are faster
    than one even if the file is in the page cache. Huge pages are not requested: with them some
    restores took five times as long, because the kernel had to find them.
    """

    def __init__(self, indices: Sequence[int], last: int) -> None:
        self._places = {index: number * CHUNK_BYTES for number, index in enumerate(indices)}
        size = (len(indices) - 1) * CHUNK_BYTES + last
        self._memory = memoryview(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))

    def fill(self, read: Callable[[int, memoryview], None]) -> None:
        """Call ``read`` with each index and its memory, on a few threads. The error of the first
        index that failed is raised here.

        Every thread has ended when this returns.
        """
        on_threads(
            list(self._places),
            lambda index: read(index, self.room(index, CHUNK_BYTES)),
            between=checkpoint,
        )

    def room(self, index: int, length: int) -> memoryview:
        """The memory of a chunk of this length, for the caller to fill."""
        place = self._places[index]
        return self._memory[place : place + length]

    def holds(self, index: int) -> bool:
        return index in self._places

    def view(self, touched: range, offset: int, length: int) -> memoryview | None:
        """``length`` bytes from ``offset`` in the first of these chunks on; None if some of
        these chunks are not here."""
        if not touched or any(index not in self._places for index in touched):
            return None
        begin = self._places[touched.start] + offset
        return self._memory[begin : begin + length]


# Compares two stretches of memory.


def are_equal(one: memoryview, other: memoryview) -> bool:
    """Whether both hold the same bytes; compares eight bytes at a time, which is four times as
    fast, without the GIL."""
    if one.nbytes != other.nbytes:
        return False
    count = one.nbytes // 8
    is_same = np.array_equal(
        np.frombuffer(one, np.uint64, count), np.frombuffer(other, np.uint64, count)
    )
    return is_same and one[count * 8 :] == other[count * 8 :]
