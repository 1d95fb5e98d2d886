"""Forwarding: a source over a sink that is still being filled, and a receiver that takes a state
from the receiver ahead of it."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Self

from datastates.errors import DatastatesError, Disconnected, InvalidInput, NotFound, Unavailable
from datastates.system.logs import RateLimitFilter

from .contract import Feed, Sink, Source, Store, Tls, Transport
from .fetch import Fetched, FetchProgress, fetch_with_fallback
from .handshake import may_dial
from .protocol import BODY_BYTES, Identity
from .server import Server
from .session import Session, SessionFeed


class Relay(Sink):
    """A sink that serves what it has accepted. Fill it in place of ``sink``; give each peer the
    result of ``open``.

    It is a ``Sink`` and a ``Source``. Every method is safe from any thread.
    """

    def __init__(self, manifest: bytes, sink: Sink) -> None:
        self.manifest, self.lengths, self._sink = manifest, sink.lengths, sink
        self._lock = threading.Lock()
        self._coming = set(sink.missing())
        self._waiting: dict[int, list[asyncio.Future[None]]] = {}
        self._error: DatastatesError | None = None
        self._readers: set[_Reader] = set()
        self._idle: list[asyncio.Future[None]] = []

    # --- the sink ---------------------------------------------------------------------------------

    def missing(self) -> Sequence[int]:
        return self._sink.missing()

    def buffers(self, index: int) -> Sequence[memoryview] | None:
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
        self._sink.forget(index)

    def pieces(self, index: int) -> Sequence[memoryview] | None:
        return self._sink.pieces(index)

    # --- the source -------------------------------------------------------------------------------

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
            raise Unavailable(
                f"chunk {index} is not kept by this receiver, which was not asked to fetch it: take"
                " it from the source"
            )
        return pieces

    def fail(self, error: DatastatesError) -> None:
        """End this clone: waiting peers get ``Unavailable``, and nothing more is served.

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
        """Serve nothing more; idempotent.

        Peers may still read bytes that they were given, until ``idle``."""
        self.fail(Unavailable("this receiver forwards no more: take the state from the source"))

    async def idle(self) -> None:
        """Wait until no peer holds this open. Then no peer reads the sink's memory any more."""
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


class _Reader(Source):
    """A relay as one peer holds it open."""

    def __init__(self, relay: Relay) -> None:
        self._relay, self.manifest, self.lengths = relay, relay.manifest, relay.lengths

    async def chunk(self, index: int) -> Sequence[memoryview]:
        return await self._relay.chunk(index)

    def close(self) -> None:
        self._relay._leave(self)


def _wake(futures: Sequence[asyncio.Future[None]]) -> None:
    for future in futures:
        future.get_loop().call_soon_threadsafe(_set, future)


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _unavailable(error: DatastatesError) -> Unavailable:
    """A new error for each waiting task: raising one object in several tasks would mix up their
    tracebacks."""
    made = Unavailable(f"the peer that forwards this state has given up: {error}")
    made.__cause__ = error
    return made


# A receiver in a chain: it takes a state from the receiver ahead, and serves what it has verified
# to the one behind.


_logger = logging.getLogger(__name__)
_logger.addFilter(RateLimitFilter())
_LINGER_S = 30.0
_TRIES = 8
_FAILED = 100
_SPARE_BYTES = 4 << 10

Connect = Callable[[str], Awaitable[Session]]


class Forwarder:
    """Created by ``join``; every coroutine belongs to the loop thread.

    The session with the source stays open while it forwards."""

    def __init__(
        self,
        url: str,
        uid: str,
        session: Session,
        connect: Connect,
        server: Server,
        store: _RelayStore,
    ) -> None:
        self._url, self._uid, self._session, self._connect = url, uid, session, connect
        self._server, self._store = server, store
        self._upstream: tuple[str, Session] | None = None
        self._failed: list[str] = []
        self._origin: SessionFeed | None = None
        self._feed: Feed
        self.manifest = b""
        self.repository = ""

    @classmethod
    async def join(
        cls,
        url: str,
        uid: str,
        *,
        connect: Connect,
        transport: Transport,
        token: bytes,
        tls: Tls | None,
        data: str = "auto",
    ) -> Self:
        """Connect to the source at ``url``, listen on the address that faces it, and announce that
        to the source.

        :raises Unavailable: the source does not have the state's bytes.
        """
        session = await connect(url)
        store = _RelayStore(uid, session.identity)
        if tls is not None and tls.certificate is None:
            await session.close()
            raise InvalidInput(
                "a chain with TLS needs a certificate at every receiver, which serves the state"
                " too: give tls.certificate and tls.key"
            )
        server = Server(
            store,
            _own_url(transport, session),
            transport=transport,
            token=token,
            tls=tls,
            timeout_s=session.timeout_s,
            data=data,
        )
        try:
            await server.start()
            self = cls(url, uid, session, connect, server, store)
            self._feed = await self._ask()
        except BaseException:
            await server.close(grace_s=0)
            await session.close()
            raise
        self.repository = session.identity.repository if session.identity is not None else ""
        return self

    async def fetch(
        self, sink: Sink, *, timeout_s: float, on_progress: Callable[[int, int], None] | None
    ) -> Fetched:
        """Fill ``sink`` from the receiver ahead, or from the next one when that fails, and
        finally from the source itself."""
        relay = Relay(self.manifest, sink)
        self._store.relay.set_result(relay)
        total = sum(sink.lengths[index] for index in sink.missing())
        try:
            return await fetch_with_fallback(
                relay,
                [self._feed],
                self._next_feed,
                progress=FetchProgress(total, on_progress),
                origin=self._origin,
                timeout_s=timeout_s,
            )
        except DatastatesError as exc:
            relay.fail(exc)
            raise

    async def _next_feed(
        self, failed: Sequence[Feed], error: DatastatesError
    ) -> tuple[Sequence[Feed], Feed | None]:
        """The feed to use after the receiver ahead has failed."""
        if (
            not isinstance(error, Disconnected | Unavailable)
            or self._upstream is None
            or len(self._failed) >= _TRIES
            or not self._session.is_open
        ):
            raise error
        _logger.info(
            "%s failed while it forwarded %s: asking the source again (%s)",
            self._upstream[0],
            self._uid[:10],
            error,
        )
        self._failed.append(self._upstream[0])
        self._feed = await self._ask()
        return [self._feed], self._origin

    async def drain(self) -> None:
        """Wait, for up to half a minute, until the receivers behind have everything that was
        promised to them."""
        if not self._store.relay.done():
            return
        relay = self._store.relay.result()
        self._store.is_closing = True
        try:
            await asyncio.wait_for(relay.idle(), _LINGER_S)
        except TimeoutError:
            _logger.warning(
                "a receiver behind this one is too slow: it takes chunks of %s from the source",
                self._uid[:10],
            )

    async def close(self) -> None:
        """Stop forwarding; idempotent."""
        if self._store.relay.done() and not self._store.relay.cancelled():
            self._store.relay.result().close()
        else:
            self._store.relay.cancel()
        await self._server.close(grace_s=0)
        if self._upstream is not None:
            await self._upstream[1].close()
        await self._session.close()

    async def _ask(self) -> Feed:
        """The feed to use now, from the receiver that the source names."""
        while True:
            if self._upstream is not None:
                await self._upstream[1].close()
                self._upstream = None
            # after so many tries the bytes come from the source itself
            is_tired = len(self._failed) >= _TRIES
            opened, origin = await self._session.open(
                self._uid,
                relay=self._server.url,
                failed=self._failed[-_FAILED:],
                here=is_tired,
                limit=self._limit(),
            )
            before, self._origin = self._origin, origin
            if before is not None:
                await before.close()
            self.manifest = opened.manifest
            if opened.upstream is None or is_tired:
                return origin
            if not may_dial(opened.upstream, self._session.remote):
                _logger.warning(
                    "%s sends this receiver to %r, which it does not dial",
                    self._url,
                    opened.upstream[:100],
                )
                self._failed.append(opened.upstream)
                continue
            try:
                session = await self._connect(opened.upstream)
            except DatastatesError:
                self._failed.append(opened.upstream)
                continue
            self._upstream = (opened.upstream, session)
            try:
                its, feed = await session.open(self._uid, limit=self._limit())
            except DatastatesError:
                self._failed.append(opened.upstream)
                continue
            if its.manifest != opened.manifest:
                self._failed.append(opened.upstream)
                continue
            return feed

    def _limit(self) -> int:
        """The most bytes of a further answer about the state: the size of the first answer, plus
        the addresses of its chunks."""
        if self._origin is None:
            return BODY_BYTES
        return len(self._origin.manifest) + 16 * len(self._origin.lengths) + _SPARE_BYTES


class _RelayStore(Store):
    """Serves one state, as far as it has come."""

    def __init__(self, uid: str, identity: Identity | None) -> None:
        self._uid, self._identity = uid, identity
        self._loop = asyncio.get_running_loop()
        self.relay: asyncio.Future[Relay] = self._loop.create_future()
        self.is_closing = False

    def identity(self) -> Identity:
        return self._identity or Identity("", "", "")

    def open(self, uid: str) -> Source:
        if uid != self._uid:
            raise NotFound(
                f"this process forwards state {self._uid[:10]} only, not {uid[:10]}: ask the source"
            )
        if self.is_closing:
            raise Unavailable(
                "this receiver is done and forwards no more: take the state from the source"
            )
        return asyncio.run_coroutine_threadsafe(self._relay(), self._loop).result().open()

    async def _relay(self) -> Relay:
        try:
            return await asyncio.shield(self.relay)
        except asyncio.CancelledError:
            raise Unavailable(
                "this receiver gave up before it began: take the state from the source"
            ) from None


def _own_url(transport: Transport, session: Session) -> str:
    host = session.host
    return (
        f"{transport.scheme}://"
        if host is None
        else f"{transport.scheme}://{f'[{host}]' if ':' in host else host}:0"
    )
