"""A receiver in a chain: it takes a state from the receiver ahead, and serves what it has verified to the one behind."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Self

from datastates.errors import DatastatesError, Disconnected, InvalidInput, NotFound, Unavailable
from datastates.system.seldom import Seldom
from datastates.transport.contract import Tls, Transport
from datastates.transport.protocol import BODY_BYTES, Identity, Offer, RefRecord, StatePage, StateRecord
from datastates.transport.session.ahead import may_dial
from datastates.transport.session.feed import Feed
from datastates.transport.session.server import Server
from datastates.transport.session.session import Session
from datastates.transport.sink import Sink
from datastates.transport.store import Source

from .chain import Relay
from .fetch import Fetched, fetch

__all__ = ["Forwarder"]

_logger = logging.getLogger(__name__)
_logger.addFilter(Seldom())
_LINGER_S = 30.0
_TRIES = 8
_FAILED = 100
_SPARE_BYTES = 4 << 10

Connect = Callable[[str], Awaitable[Session]]


class Forwarder:
    """Created by ``join``; every coroutine belongs to the loop thread. The session with the source stays open while it forwards."""

    def __init__(self, url: str, uid: str, session: Session, connect: Connect, server: Server, store: _RelayStore) -> None:
        self._url, self._uid, self._session, self._connect = url, uid, session, connect
        self._server, self._store = server, store
        self._upstream: tuple[str, Session] | None = None
        self._failed: list[str] = []
        self._origin: Feed | None = None
        self._feed: Feed
        self.manifest = b""
        self.repository = ""

    @classmethod
    async def join(
        cls, url: str, uid: str, *, connect: Connect, transport: Transport, token: bytes, tls: Tls | None, data: str = "auto"
    ) -> Self:
        """Connect to the source at ``url``, listen on the address that faces it, and announce that to the source.

        :raises Unavailable: the source does not have the state's bytes.
        """
        session = await connect(url)
        store = _RelayStore(uid, session.identity)
        if tls is not None and tls.certificate is None:
            await session.close()
            raise InvalidInput(
                "a chain with TLS needs a certificate at every receiver, which serves the state too: give tls.certificate and tls.key"
            )
        server = Server(
            store, _own_url(transport, session), transport=transport, token=token, tls=tls, timeout_s=session.timeout_s, data=data
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

    async def fetch(self, sink: Sink, *, timeout_s: float, on_progress: Callable[[int, int], None] | None) -> Fetched:
        """Fill ``sink`` from the receiver ahead, or from the next one when that fails, and finally from the source itself."""
        relay = Relay(self.manifest, sink)
        self._store.relay.set_result(relay)
        counted = _Counted(sum(sink.lengths[index] for index in sink.missing()), on_progress)
        began = asyncio.get_running_loop().time()
        while True:
            counted.begin(self._feed.name)
            try:
                fetched = await fetch(relay, [self._feed], origin=self._origin, timeout_s=timeout_s, on_progress=counted)
            except (Disconnected, Unavailable) as exc:
                if self._upstream is None or len(self._failed) >= _TRIES or not self._session.is_open:
                    relay.fail(exc)
                    raise
                _logger.info("%s failed while it forwarded %s: asking the source again (%s)", self._upstream[0], self._uid[:10], exc)
                self._failed.append(self._upstream[0])
                self._feed = await self._ask()
            except DatastatesError as exc:
                relay.fail(exc)
                raise
            else:
                return Fetched(counted.bytes_by_feed(), fetched.chunks, asyncio.get_running_loop().time() - began, fetched.lost)

    async def drain(self) -> None:
        """Wait, for up to half a minute, until the receivers behind have everything that was promised to them."""
        if not self._store.relay.done():
            return
        relay = self._store.relay.result()
        self._store.is_closing = True
        try:
            await asyncio.wait_for(relay.idle(), _LINGER_S)
        except TimeoutError:
            _logger.warning("a receiver behind this one is too slow: it takes the rest of %s from the source", self._uid[:10])

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
        """The feed to use now; the source says from which receiver."""
        while True:
            if self._upstream is not None:
                await self._upstream[1].close()
                self._upstream = None
            is_tired = len(self._failed) >= _TRIES  # after so many tries the source itself is asked for the bytes
            opened, origin = await self._session.open(
                self._uid, relay=self._server.url, failed=self._failed[-_FAILED:], here=is_tired, limit=self._limit()
            )
            before, self._origin = self._origin, origin
            if before is not None:
                await before.close()
            self.manifest = opened.manifest
            if opened.upstream is None or is_tired:
                return origin
            if not may_dial(opened.upstream, self._session.remote):
                _logger.warning("%s sends this receiver to %r, which it does not dial", self._url, opened.upstream[:100])
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
        """The limit for what a peer says of a known state: no more than was said of it before, plus where its chunks are."""
        if self._origin is None:
            return BODY_BYTES
        return len(self._origin.manifest) + 16 * len(self._origin.lengths) + _SPARE_BYTES


class _RelayStore:
    """Serves one state, as far as it has come."""

    def __init__(self, uid: str, identity: Identity | None) -> None:
        self._uid, self._identity = uid, identity
        self._loop = asyncio.get_running_loop()
        self.relay: asyncio.Future[Relay] = self._loop.create_future()
        self.is_closing = False

    def identity(self) -> Identity:
        return self._identity or Identity("", "", "")

    def refs(self) -> list[RefRecord]:
        raise _only_forwards()

    def find(self, query: str, limit: int, after: str | None) -> StatePage:
        raise _only_forwards()

    def log(self, rev: str, limit: int, after: str | None) -> StatePage:
        raise _only_forwards()

    def resolve(self, rev: str) -> StateRecord:
        raise _only_forwards()

    def open(self, uid: str) -> Source:
        if uid != self._uid:
            raise NotFound(f"this process forwards state {self._uid[:10]} only, not {uid[:10]}: ask the source")
        if self.is_closing:
            raise Unavailable("this receiver is done and forwards no more: take the state from the source")
        return asyncio.run_coroutine_threadsafe(self._relay(), self._loop).result().open()

    async def _relay(self) -> Relay:
        try:
            return await asyncio.shield(self.relay)
        except asyncio.CancelledError:
            raise Unavailable("this receiver gave up before it began: take the state from the source") from None

    def check_writable(self) -> None:
        raise _only_forwards()

    def receive(self, offer: Offer) -> Sink:
        raise _only_forwards()

    def received(self, offer: Offer, sink: Sink) -> StateRecord:
        raise _only_forwards()

    def abandon(self, offer: Offer, sink: Sink) -> None:
        raise _only_forwards()


def _only_forwards() -> InvalidInput:
    return InvalidInput("this process only forwards a state that it is cloning: ask the source")


def _own_url(transport: Transport, session: Session) -> str:
    host = session.host
    return f"{transport.scheme}://" if host is None else f"{transport.scheme}://{f'[{host}]' if ':' in host else host}:0"


class _Counted:
    """Counts progress over several attempts, and how much came from which source."""

    def __init__(self, total: int, on_progress: Callable[[int, int], None] | None) -> None:
        self._total, self._on_progress = total, on_progress
        self._by_feed: dict[str, int] = {}
        self._name, self._before, self._done = "", 0, 0

    def begin(self, name: str) -> None:
        self._name, self._before = name, self._done

    def __call__(self, done: int, total: int) -> None:
        self._done = self._total - total + done
        self._by_feed[self._name] = self._by_feed.get(self._name, 0) + self._done - self._before
        self._before = self._done
        if self._on_progress is not None:
            self._on_progress(self._done, self._total)

    def bytes_by_feed(self) -> dict[str, int]:
        return dict(self._by_feed)
