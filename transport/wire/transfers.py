"""The transfers under way on a link, each in a task of its own, which continues when the caller that began it is cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

__all__ = ["Transfers"]


class Transfers:
    """The tasks of one link. Belongs to the loop thread."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Begin a task, and return it."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Wait for a task that continues if the caller is cancelled."""
        await asyncio.shield(self.begin(work))

    async def end(self) -> None:
        """Wait until no task is left."""
        while self._tasks:
            await asyncio.wait(list(self._tasks))

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # marks it as retrieved: the task that began it may wait no more
