"""A number of bytes a second that is not exceeded: whoever writes waits, a little after each piece, until the next may go."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from datastates.system.bell import Bell
from datastates.system.deeds import at
from datastates.system.interrupts import Mutex

from .pack import PAGE

__all__ = ["Pace"]

_PIECES_PER_S = 10
"""So many pieces a second are written at least, where they can be so small."""

_LEAST_BYTES = 64 << 10

_SIGN_S = 1.0
"""So often whoever waits says that it is no stall."""


class Pace:
    """Safe from any thread: all writers together keep to ``bytes_per_s``. What was not used for a while is not made up for.

    While it is ``lifted`` nobody waits, whoever waits already neither.
    """

    def __init__(self, bytes_per_s: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.bytes_per_s = bytes_per_s
        self._clock = clock
        self._bell, self._lock = Bell(), Mutex()
        self._free_at = 0.0
        self._lifts = 0

    @property
    def piece_bytes(self) -> int:
        """About as much as is to be written at a time; whole pages."""
        return max(_LEAST_BYTES, self.bytes_per_s // _PIECES_PER_S // PAGE * PAGE)

    @property
    def is_lifted(self) -> bool:
        """Whether nobody waits."""
        return self._lifts > 0

    def wait(self, path: Path, size: int) -> None:
        """Return when so many bytes may be written to a file, after what was allowed before."""
        if self.is_lifted:
            return
        with self._lock:
            begin = max(self._clock(), self._free_at)
            self._free_at = begin + size / self.bytes_per_s
        while (left := begin - self._clock()) > 0 and not self.is_lifted:
            at("pace", path)
            self._sleep(min(left, _SIGN_S))

    @contextmanager
    def lifted(self) -> Iterator[None]:
        """As fast as the disk takes it, until the end of the block; such blocks of several threads may overlap."""
        self._lift(1)
        try:
            yield
        finally:
            self._lift(-1)

    def _lift(self, change: int) -> None:
        with self._lock:
            self._lifts += change
        self._bell.ring()

    def _sleep(self, seconds: float) -> None:
        self._bell.wait_for(lambda: self.is_lifted, seconds)
