"""One state on its way between processes: it can be waited for, awaited, cancelled and resumed."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, Self

from datastates import values
from datastates.errors import Cancelled, Closed, DatastatesError, InvalidInput
from datastates.lineage.states import State
from datastates.objects.report import RestoreReport
from datastates.system.bell import Latch
from datastates.system.interrupts import undisturbed
from datastates.transport import loop
from datastates.transport.clone.fetch import Fetched

from .sources import Sources

__all__ = ["Cloned", "Connected", "Move", "Progress", "Transfer"]

_logger = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
"""Called with the bytes that are here and their total, on the transport's thread: it must be quick."""


@dataclass(frozen=True, slots=True)
class Cloned:
    """The result of a clone or a push. ``report`` is that of a clone into live objects; ``by_source`` counts the bytes that moved, by
    peer.
    """

    state: State
    report: RestoreReport | None
    bytes_moved: int
    seconds: float
    by_source: Mapping[str, int]


class Connected(Protocol):
    """What ``Transfer.resume`` needs of a peer."""

    @property
    def sources(self) -> Sources:
        """The sources of its states."""


def _peer(value: object, what: str) -> object:
    if not isinstance(values.attribute(value, "sources"), Sources):
        raise InvalidInput(f"{what} is {values.shown(value)}: give the peer that datastates.connect returned")
    return value


class Move(ABC):
    """What differs between a clone and a push. ``run`` is called once, on the transport's thread; the waiting caller calls everything
    else.
    """

    state: State
    bytes_total: int

    @abstractmethod
    async def run(self, progress: Progress) -> Fetched:
        """Move the bytes."""

    @abstractmethod
    def land(self, fetched: Fetched) -> tuple[State, RestoreReport | None]:
        """Finish a transfer of which every byte is here."""

    @abstractmethod
    def give_up(self, error: BaseException) -> BaseException:
        """Release the other side, even if the transfer never ran. Returns the error for the waiting caller."""

    @property
    def is_resumable(self) -> bool:
        """Whether what came is kept if the transfer fails."""
        return False

    def resumed(self, sources: Sources) -> Move:
        """The rest of this failed transfer, from other sources; only if it is resumable."""
        raise NotImplementedError

    @abstractmethod
    def drop(self) -> None:
        """Release what came; called once, after ``give_up``."""


class Transfer:
    """A clone or a push under way. ``wait`` and ``await`` finish it, on the thread that calls them.

    The waiting thread writes live objects at the very end; it must be the thread that owns them. With ``atomic=False`` they are written all
    the time, and must be left alone until then. ``bytes_done`` and ``bytes_total`` may be read at any time.

    A transfer that was begun as ``resumable`` keeps what came when it fails, for ``resume``, until it is closed: use it as a context
    manager.
    """

    def __init__(self, move: Move, on_progress: Progress | None = None) -> None:
        self.state, self.bytes_done, self.bytes_total = move.state, 0, move.bytes_total
        self._move, self._on_progress = move, on_progress
        self._is_kept = move.is_resumable
        self._lock = threading.Lock()
        self._result: Cloned | None = None
        self._error: BaseException | None = None
        self._is_given_up = False
        self._pid = os.getpid()
        self._ended = Latch()
        self._future = loop.submit(move.run(self._progress))
        self._future.add_done_callback(lambda _: self._ended.set())  # also if it was cancelled before it began

    @property
    def is_done(self) -> bool:
        """Whether nothing moves any more: ``wait`` returns, or raises, without waiting for the network."""
        return self._ended.is_set()

    @property
    def error(self) -> BaseException | None:
        """The error with which it failed; None if it has not failed."""
        return self._error

    @values.takes(timeout_s=values.optional(values.seconds))
    def wait(self, timeout_s: float | None = None) -> Cloned:
        """Wait until every byte is here and checked, and finish. Ctrl-C gives the transfer up, and is raised once nothing is written any
        more.

        :raises TimeoutError: it takes longer; the transfer goes on.
        :raises Cancelled: it was cancelled.
        :raises Closed: the peer was closed, or this is a forked child.
        :raises Disconnected: no source is left (or Corrupt, Unavailable: what else went wrong).
        :raises Dirty: the same, and live objects are half new: the cause says why; clone again, or restore them.
        """
        self._check_own()
        try:
            if not self._ended.wait(timeout_s):
                raise TimeoutError(f"{self.bytes_done} of {self.bytes_total} bytes are here after {timeout_s} s: the clone goes on")
        except KeyboardInterrupt:
            self._is_given_up = True
            self.cancel()
            self._ended.wait()
            self._finish_given_up()
            raise
        return self._finish()

    def cancel(self) -> None:
        """Stop the transfer; ``wait`` then raises Cancelled. Nothing after it is done."""
        self._future.cancel()

    @values.takes(peer=_peer, on_progress=values.optional(values.callback))
    def resume(self, peer: Connected, *, on_progress: Progress | None = None) -> Transfer:
        """Continue from the verified chunks, from any peer that has the state, once this has failed or was cancelled.

        :raises InvalidInput: it has not failed, was not begun as ``resumable``, was closed, or was resumed already.
        :raises Disconnected: the peer is gone (NotFound, Unavailable: it does not have the state); try another.
        """
        with self._lock:
            if self._error is None:
                raise InvalidInput("only a clone that has failed can be resumed: wait for it first")
            if not self._is_kept:
                raise InvalidInput("nothing was kept of this clone: begin it with resumable=True, and resume it once, before it is closed")
            self._is_kept = False
        try:
            return Transfer(self._move.resumed(peer.sources), on_progress)
        except BaseException:
            self._is_kept = True
            raise

    def close(self) -> None:
        """Give the transfer up if it is under way, and release what it kept. Idempotent; does nothing once it is done or was resumed."""
        if self._result is None and self._error is None:
            self._is_given_up = True
            self.cancel()
            self._ended.wait()
            self._finish_given_up()
        with self._lock:
            was_kept, self._is_kept = self._is_kept, False
        if was_kept and self._error is not None:
            self._move.drop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __await__(self) -> Generator[Any, None, Cloned]:
        return self._await().__await__()

    async def _await(self) -> Cloned:
        self._check_own()
        ended = asyncio.get_running_loop().run_in_executor(None, self._ended.wait)
        try:
            await asyncio.shield(ended)
        except asyncio.CancelledError:
            self._is_given_up = True
            self.cancel()
            await asyncio.shield(ended)
            self._finish_given_up()
            raise
        return self._finish()

    def _progress(self, done: int, total: int) -> None:
        self.bytes_done, self.bytes_total = done, total
        if self._on_progress is None:
            return
        try:
            self._on_progress(done, total)
        except Exception:  # what it shows must not end the transfer
            self._on_progress = None
            _logger.exception("on_progress failed, and is not called again")

    def _finish(self) -> Cloned:
        with self._lock:
            if self._result is None and self._error is None:
                try:
                    fetched = self._fetched()
                    state, report = self._move.land(fetched)
                    moved = sum(fetched.bytes_by_feed.values())
                    self._result = Cloned(state, report, moved, fetched.seconds, fetched.bytes_by_feed)
                except BaseException as exc:
                    self._error = self._move.give_up(exc)
                    if not self._is_kept:
                        self._move.drop()
                    if self._error is not exc:
                        raise self._error from exc
                    raise
        if self._error is not None:
            raise self._error
        assert self._result is not None, "it is one or the other"
        return self._result

    def _finish_given_up(self) -> None:
        """Release what came; ``error`` is set to the meaning of that, and the caller gets what interrupted it."""
        self._is_kept = False
        with suppress(DatastatesError):
            self._finish()

    def _check_own(self) -> None:
        if self._pid != os.getpid():
            raise Closed(f"the transfer of state {self.state.uid[:10]} belongs to the parent process: begin another one in the child")

    def _fetched(self) -> Fetched:
        cancelled = Cancelled(f"the transfer of state {self.state.uid[:10]} was cancelled after {self.bytes_done} bytes")
        try:
            with undisturbed():
                fetched = self._future.result()  # it has ended
        except concurrent.futures.CancelledError:
            raise cancelled from None
        if self._is_given_up:  # it was too late to stop it
            raise cancelled
        return fetched
