"""The tasks of one session, and the error with which it ends."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from datastates.errors import DatastatesError, Disconnected, PeerFault
from datastates.system.seldom import Seldom
from datastates.transport.failures import again

__all__ = ["Life"]

_T = TypeVar("_T")
_TASKS = 4096
_logger = logging.getLogger(__name__)
_logger.addFilter(Seldom())


class Life:
    """Belongs to the loop thread. ``end`` is run once, with the error and what to tell the peer; it must set ``ended``."""

    def __init__(self, peer: str, end: Callable[[DatastatesError, str | None], Coroutine[Any, Any, None]]) -> None:
        self._peer, self._end = peer, end
        self._tasks: set[asyncio.Task[Any]] = set()
        self._ending: asyncio.Task[None] | None = None
        self.error: DatastatesError | None = None
        self.ended = asyncio.Event()

    def check_open(self) -> None:
        """Raise the error with which the session ended, if it has."""
        if self.error is not None:
            raise again(self.error)

    def spawn(self, work: Coroutine[Any, Any, _T]) -> asyncio.Task[_T]:
        """Run ``work`` in a task of its own, which ends with the session. Each task holds something, so they may not be too many."""
        if len(self._tasks) > _TASKS:
            self.fall(PeerFault(f"{self._peer} sends more than it reads of the answers"))
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)
        return task

    async def outcome(self, task: asyncio.Task[_T]) -> _T:
        """The outcome of a task of the session. The task continues if the caller is cancelled; if the session ends first, its error is
        raised."""
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if self.error is None or (caller is not None and caller.cancelling()):
                raise
            raise again(self.error) from None

    def depend_on(self, work: Callable[..., Awaitable[None]], *arguments: object) -> None:
        """Run ``work`` in a task of its own; if it fails, the session is over."""
        self.spawn(self._or_fall(work, *arguments))

    def fall(self, error: DatastatesError, *, farewell: str | None = None) -> None:
        """End the session with an error, unless it already has one. The peer is told its fault, or the ``farewell``."""
        if self.error is None:
            self.error = error
            if farewell is None and isinstance(error, PeerFault):
                farewell = str(error)
            self._ending = asyncio.create_task(self._end(error, farewell))

    def cancel(self) -> list[asyncio.Task[Any]]:
        """Cancel every task; returns those that have yet to end."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        return tasks

    def _finished(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # marks it as retrieved: a caller that still waits for it gets it as well

    async def _or_fall(self, work: Callable[..., Awaitable[None]], *arguments: object) -> None:
        try:
            await work(*arguments)
        except DatastatesError as exc:
            self.fall(exc)
        except Exception as exc:  # a fault of ours ends this connection, not the server
            _logger.exception("the connection to %s failed", self._peer)
            self.fall(Disconnected(f"the connection to {self._peer} failed with {type(exc).__name__}: {exc}"))
