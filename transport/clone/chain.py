"""Forwarding: a source over a sink that is still being filled, and the order in which receivers take from each other."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from datastates.errors import DatastatesError, Unavailable
from datastates.transport.sink import Sink
from datastates.transport.store import Source

__all__ = ["RECEIVERS", "STATES", "Chains", "Relay"]

RECEIVERS = 1000
"""The most receivers in the chain of one state; the server itself serves those beyond."""

STATES = 1000
"""The most states that have a chain at once."""


class Relay:
    """A sink that serves what it has accepted. Fill it in place of ``sink``; give each peer the result of ``open``.

    It is a ``Sink`` and a ``Source``. Every method is safe from any thread.
    """

    def __init__(self, manifest: bytes, sink: Sink) -> None:
        self._manifest, self._sink = manifest, sink
        self._lock = threading.Lock()
        self._coming = set(sink.missing())
        self._waiting: dict[int, list[asyncio.Future[None]]] = {}
        self._error: DatastatesError | None = None
        self._readers: set[_Reader] = set()
        self._idle: list[asyncio.Future[None]] = []

    @property
    def manifest(self) -> bytes:
        """See ``Source.manifest``."""
        return self._manifest

    @property
    def lengths(self) -> tuple[int, ...]:
        """See both contracts."""
        return self._sink.lengths

    # --- the sink -----------------------------------------------------------------------------------------------------

    def missing(self) -> Sequence[int]:
        """See ``Sink.missing``."""
        return self._sink.missing()

    def buffers(self, index: int) -> Sequence[memoryview] | None:
        """See ``Sink.buffers``."""
        return self._sink.buffers(index)

    def accept(self, index: int) -> bool:
        """See ``Sink.accept``; also wakes the callers that wait for the chunk."""
        if not self._sink.accept(index):
            return False
        with self._lock:
            self._coming.discard(index)
            waiting = self._waiting.pop(index, [])
        _wake(waiting)
        return True

    def forget(self, index: int) -> None:
        """See ``Sink.forget``."""
        self._sink.forget(index)

    def pieces(self, index: int) -> Sequence[memoryview] | None:
        """See ``Sink.pieces``."""
        return self._sink.pieces(index)

    # --- the source ---------------------------------------------------------------------------------------------------

    def open(self) -> Source:
        """The state, for one peer that takes it from here.

        :raises Unavailable: nothing is served any more.
        """
        with self._lock:
            if self._error is not None:
                raise _unavailable(self._error)
            reader = _Reader(self)
            self._readers.add(reader)
        return reader

    async def chunk(self, index: int) -> Sequence[memoryview]:
        """The bytes of a chunk, once it is accepted here.

        :raises Unavailable: it will not be accepted, or its bytes are not kept.
        """
        with self._lock:
            if self._error is not None:
                raise _unavailable(self._error)
            future = asyncio.get_running_loop().create_future() if index in self._coming else None
            if future is not None:
                self._waiting.setdefault(index, []).append(future)
        if future is not None:
            await self._accepted(index, future)
        pieces = self._sink.pieces(index)
        if pieces is None:
            raise Unavailable(f"chunk {index} is not kept by this receiver, which was not asked to fetch it: take it from the source")
        return pieces

    def fail(self, error: DatastatesError) -> None:
        """End this clone, which has failed for good or is over: waiting peers get ``Unavailable``, and nothing more is served.

        Do not call it when only one source failed and the clone continues with another.
        """
        with self._lock:
            if self._error is not None:
                return
            self._error = error
            waiting = [future for futures in self._waiting.values() for future in futures]
            self._waiting.clear()
        _wake(waiting)

    def close(self) -> None:
        """Serve nothing more; idempotent. Peers may still read bytes that they were given, until ``idle``."""
        self.fail(Unavailable("this receiver forwards no more: take the state from the source"))

    async def idle(self) -> None:
        """Wait until no peer holds this open any more: then nobody reads the sink's memory."""
        with self._lock:
            if not self._readers:
                return
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._idle.append(future)
        await future

    @property
    def readers(self) -> int:
        """The number of peers that hold this open."""
        return len(self._readers)

    async def _accepted(self, index: int, future: asyncio.Future[None]) -> None:
        try:
            await future
        finally:
            with self._lock:
                if future in (waiting := self._waiting.get(index, [])):
                    waiting.remove(future)
                if not waiting:
                    self._waiting.pop(index, None)
                error = self._error if index in self._coming else None
        if error is not None:
            raise _unavailable(error)

    def _leave(self, reader: _Reader) -> None:
        with self._lock:
            self._readers.discard(reader)
            idle = [] if self._readers else self._idle
            self._idle = [] if not self._readers else self._idle
        _wake(idle)


class _Reader:
    """A relay as one peer holds it open."""

    def __init__(self, relay: Relay) -> None:
        self._relay = relay

    @property
    def manifest(self) -> bytes:
        return self._relay.manifest

    @property
    def lengths(self) -> tuple[int, ...]:
        return self._relay.lengths

    async def chunk(self, index: int) -> Sequence[memoryview]:
        return await self._relay.chunk(index)

    def close(self) -> None:
        self._relay._leave(self)


@dataclass(slots=True)
class _Chain:
    """The receivers that forward a state, in order, and the one that each was told to take it from (None: the server itself)."""

    order: list[str] = field(default_factory=list)
    above: dict[str, str | None] = field(default_factory=dict)

    def is_fed_by(self, url: str, other: str) -> bool:
        """Whether the bytes that ``url`` gets pass through ``other``."""
        seen = set()
        at: str | None = url
        while at is not None and at not in seen:
            if at == other:
                return True
            seen.add(at)
            at = self.above.get(at)
        return False


class Chains:
    """The chains of one server: receivers form a line, so that only one copy leaves the server. Belongs to the loop thread."""

    def __init__(self) -> None:
        self._chains: dict[str, _Chain] = {}

    def join(self, uid: str, relay_url: str, failed: Sequence[str]) -> str | None:
        """Put a receiver at the end of the line, or let it ask again from its place. Returns the url to ask; None: this server.

        The receivers in ``failed`` did not answer it; they leave the line. No receiver is sent to one that waits for it.
        """
        chain = self._chains.get(uid)
        if chain is None:
            if len(self._chains) >= STATES:
                return None
            chain = self._chains[uid] = _Chain()
        chain.order = [url for url in chain.order if url == relay_url or url not in failed]
        if relay_url not in chain.order:
            if len(chain.above) >= RECEIVERS and relay_url not in chain.above:
                return None
            chain.order.append(relay_url)
        ahead = chain.order[: chain.order.index(relay_url)]
        upstream = next((url for url in reversed(ahead) if not chain.is_fed_by(url, relay_url)), None)
        chain.above[relay_url] = upstream
        return upstream

    def leave(self, uid: str, relay_url: str) -> None:
        """Remove a receiver that serves no more; idempotent."""
        chain = self._chains.get(uid)
        if chain is None:
            return
        chain.order = [url for url in chain.order if url != relay_url]
        chain.above.pop(relay_url, None)
        if not chain.above:
            del self._chains[uid]

    def line(self, uid: str) -> tuple[str, ...]:
        """The receivers that forward a state, in order."""
        chain = self._chains.get(uid)
        return () if chain is None else tuple(chain.order)


def _wake(futures: Sequence[asyncio.Future[None]]) -> None:
    for future in futures:
        future.get_loop().call_soon_threadsafe(_set, future)


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _unavailable(error: DatastatesError) -> Unavailable:
    """A new error for each waiting task: raising one object in several tasks would mix up their tracebacks."""
    made = Unavailable(f"the peer that forwards this state has given up: {error}")
    made.__cause__ = error
    return made
