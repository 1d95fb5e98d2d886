"""The time of one session."""

from __future__ import annotations

import asyncio

__all__ = ["Clock"]


class Clock:
    """Seconds, except those in which this process itself stood still for more than ``patience_s``: the peer is not to blame for these."""

    def __init__(self, patience_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._patience_s = patience_s
        self._stood_still_s = 0.0

    def __call__(self) -> float:
        return self._loop.time() - self._stood_still_s

    async def tick(self, interval_s: float) -> None:
        """Sleep for the interval, and notice if that took longer."""
        before = self._loop.time()
        await asyncio.sleep(interval_s)
        late = self._loop.time() - before - interval_s
        if late > self._patience_s:
            self._stood_still_s += late
