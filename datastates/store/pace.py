"""A limit on the bytes written per second: a writer waits a little after each piece, until it may write the next."""

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
"""The least number of pieces written per second, if they can be that small."""

_LEAST_BYTES = 64 << 10

_SIGN_S = 1.0
"""How often a waiting writer reports that it has not stalled, in seconds."""


class Pace:
    """The pace of all writers together, who keep to ``bytes_per_s``. Safe from any thread. Unused bandwidth is not made up for later.

    While it is ``lifted`` no writer waits, not even one that was waiting already.
    """

    def __init__(self, bytes_per_s: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.bytes_per_s = bytes_per_s
        self._clock = clock
        self._bell, self._lock = Bell(), Mutex()
        self._free_at = 0.0
        self._lifts = 0

    @property
    def piece_bytes(self) -> int:
        """About how many bytes to write at a time; whole pages."""
        return max(_LEAST_BYTES, self.bytes_per_s // _PIECES_PER_S // PAGE * PAGE)

    @property
    def is_lifted(self) -> bool:
        """Whether the limit is lifted, so that no writer waits."""
        return self._lifts > 0

    def wait(self, path: Path, size: int) -> None:
        """Wait until ``size`` bytes may be written to a file, after what was allowed before."""
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
        """Lift the limit until the end of the block; such blocks of several threads may overlap."""
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
