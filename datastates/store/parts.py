"""Reads a state of several parts as one: each chunk comes from the part that holds it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import ClassVar

from datastates.content.manifest import CHUNK_BYTES
from datastates.content.parts import first_chunks, join
from datastates.errors import NotFound, Unavailable, Unsupported
from datastates.lineage.states import State

from .tier import Reader

__all__ = ["PartsReader", "open_parts", "refuse_parts"]


_NAMED = 16
"""How many missing parts an error names."""

_SOUGHT = 4096
"""After how many missing parts the search ends: the number of parts is whatever a lineage from elsewhere claims."""


def refuse_parts(state: State, what: str, *, instead: str = "load it here, and capture that") -> None:
    """Raise if a state has several parts, which ``what`` does not support; ``instead`` says what to do.

    :raises Unsupported: it has several.
    """
    if state.world_size > 1:
        raise Unsupported(f"state {state.uid} has {state.world_size} parts, and {what} takes states of one part: {instead}")


def open_parts(opened: Callable[[int], Reader], size: int, uid: str, *, rank: int = 0) -> Reader:
    """A reader of the whole state of ``size`` parts; ``opened`` opens the part of a rank, and values are those of ``rank``.

    :raises NotFound: no part is there.
    :raises Unavailable: some parts are there and others are missing; names these.
    :raises Corrupt: they are not the parts of one state.
    """
    missing, readers = [], []
    with ExitStack() as stack:
        for number in range(size):
            try:
                readers.append(stack.enter_context(opened(number)))
            except NotFound:
                missing.append(str(number))
                if len(missing) == _SOUGHT:
                    break
        if not readers and len(missing) == size:
            raise NotFound(f"no part of state {uid} is here")
        if missing:
            least = "at least " if len(missing) == _SOUGHT else ""
            named = ", ".join(missing[:_NAMED]) + (f" and {least}{len(missing) - _NAMED} more" if len(missing) > _NAMED else "")
            raise Unavailable(f"state {uid} has {size} parts, and those of rank {named} are not here: bring them, too")
        found = PartsReader(readers, rank=rank)
        stack.pop_all()
        return found


class PartsReader(Reader):
    """A reader of the whole state. It takes the readers of all parts, by rank, and closes them.

    :raises Corrupt: they are not the parts of one state.
    """

    is_waited_for: ClassVar[bool] = True

    def __init__(self, parts: Sequence[Reader], *, rank: int = 0) -> None:
        manifests = [part.manifest for part in parts]
        self.manifest = join(manifests, rank=rank)
        self._parts, self._starts = tuple(parts), first_chunks(manifests)

    def chunk(self, index: int) -> memoryview:
        """One chunk, from its part."""
        part, start = self._part_of(index)
        return part.chunk(index - start)

    def span(self, start: int, length: int) -> memoryview | None:
        """The part's own span, if one part holds the whole stretch."""
        touched = self.chunks_of(start, length)
        part, first = self._part_of(touched.start)
        return part.span(start - first * CHUNK_BYTES, length) if self._is_in_one(touched) else None

    def prepare(self, stretches: Sequence[tuple[int, int]]) -> None:
        """Have each part prepare the stretches that it holds entirely."""
        for part, first in zip(self._parts, self._starts, strict=False):
            mine = [each for each in stretches if (touched := self.chunks_of(*each)) and self._holds(part, touched)]
            part.prepare([(start - first * CHUNK_BYTES, length) for start, length in mine])

    def loan(self, start: int, length: int) -> memoryview | None:
        """The part's own loan, if one part holds the whole stretch."""
        touched = self.chunks_of(start, length)
        part, first = self._part_of(touched.start)
        return part.loan(start - first * CHUNK_BYTES, length) if self._is_in_one(touched) else None

    def lying(self, index: int) -> memoryview:
        """One chunk where it lies, from its part."""
        part, start = self._part_of(index)
        return part.lying(index - start)

    def when_wanted(self, tell: Callable[[], None]) -> None:
        """Call ``tell`` when the memory of any part is wanted back."""
        for part in self._parts:
            part.when_wanted(tell)

    def verify_headers(self) -> None:
        """Verify the headers of every part."""
        for part in self._parts:
            part.verify_headers()

    def close(self) -> None:
        """Close every part."""
        with ExitStack() as stack:
            for part in self._parts:
                stack.callback(part.close)

    def _holds(self, part: Reader, touched: range) -> bool:
        return self._part_of(touched[0])[0] is part and self._is_in_one(touched)

    def _is_in_one(self, touched: range) -> bool:
        return len(touched) < 2 or self._part_of(touched[0]) == self._part_of(touched[-1])

    def _part_of(self, index: int) -> tuple[Reader, int]:
        number = bisect_right(self._starts, index, hi=len(self._parts)) - 1
        return self._parts[number], self._starts[number]
