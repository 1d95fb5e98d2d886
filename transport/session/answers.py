"""A server's answers: passes a peer's questions to the store, in worker threads."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import msgspec

from datastates.content.envelope import body_of
from datastates.errors import DatastatesError, InvalidInput, PeerFault, Unavailable
from datastates.system.seldom import Seldom
from datastates.transport.clone.fetch import fetch
from datastates.transport.limits import PAGE_BYTES, Budget, Limits, Share, weigh
from datastates.transport.protocol import Find, Log, Offer, Open, Opened, Push, Question, Reach, Refs, Resolve, StatePage, decode_offer
from datastates.transport.store import Relays, Source, Store, SupportsAddresses, SupportsParts

from .ahead import is_at
from .feed import Feed
from .fingerprints import Fingerprints
from .neighbours import Neighbours
from .sending import HANDLES, Sending, Sent

__all__ = ["Answers", "Service"]

_logger = logging.getLogger(__name__)
_logger.addFilter(Seldom())

_ROOM_AT_ONCE = 2
_T = TypeVar("_T")
_encode = msgspec.msgpack.Encoder().encode


@dataclass(frozen=True, slots=True)
class Service:
    """What the sessions of one server share. ``threads`` runs the store; ``pushing`` keeps some threads free for peers that do not push."""

    store: Store
    threads: Executor
    relays: Relays | None = None
    sent: Sent = field(default_factory=Sent)
    fingerprints: Fingerprints = field(default_factory=Fingerprints)
    neighbours: Neighbours = field(default_factory=Neighbours)
    pushing: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_ROOM_AT_ONCE))
    offers: Budget = field(default_factory=lambda: Budget(Limits().offer_bytes))


class Answers:
    """The answers to one peer. ``sending`` holds the states opened for it; a relay that it announced leaves when it does."""

    def __init__(
        self, service: Service, sending: Sending, peer: str, timeout_s: float, is_near: Callable[[], bool], remote: tuple[str, int] | None
    ) -> None:
        self._service, self._sending, self._peer, self._timeout_s = service, sending, peer, timeout_s
        self._is_near, self._remote = is_near, remote
        self._joined: set[tuple[str, str]] = set()
        self._offered = Share(service.offers)

    async def answer(self, question: Question) -> bytes:
        """The body of the answer to a question. If this raises, the error is the answer."""
        store = self._service.store
        match question:
            case Refs():
                return await self._run(lambda: _encode(store.refs()))
            case Find(query, limit, after):
                return await self._run(lambda: _page(lambda most: store.find(query, most, after), limit))
            case Log(rev, limit, after):
                return await self._run(lambda: _page(lambda most: store.log(rev, most, after), limit))
            case Resolve(rev):
                return await self._run(lambda: _encode(store.resolve(rev)))
            case Open():
                return await self._open(question)
            case Reach(uid):
                parts = self._parts()
                return await self._run(lambda: _encode(parts.reach(uid)))
            case _:
                raise PeerFault(f"{self._peer} asks {type(question).__name__} of a side that cannot answer it")

    def begin_push(self, push: Push) -> None:
        """Reserve room for what the peer is about to say of a state that it pushes; ``take`` releases it.

        :raises InvalidInput: this server accepts no pushes.
        :raises Unavailable: there is no room for it now.
        """
        self._service.store.check_writable()
        if push.bytes > self._offered.limit:
            raise InvalidInput(f"a push comes with {push.bytes} bytes of manifest and ancestry, at most {self._offered.limit} are taken")
        if not self._offered.take(push.bytes):
            raise Unavailable(f"there is no room for {push.bytes} bytes of a further push now: try again when others are done")

    async def take(self, push: Push, body: bytearray, feed: Callable[[Offer, tuple[int, ...]], Feed]) -> bytes:
        """Fetch a state that the peer pushes; the body of the answer is its record."""
        # Threads work on it. So it is not cancelled: it fails once the session is over, and what it holds counts until then.
        taking = asyncio.create_task(self._take(push, body, feed))
        taking.add_done_callback(lambda done: done.cancelled() or done.exception())  # marks it as retrieved
        try:
            return await asyncio.shield(taking)
        finally:
            del taking  # its error refers to this frame, and the two would keep what was pushed

    async def _take(self, push: Push, body: bytearray, feed: Callable[[Offer, tuple[int, ...]], Feed]) -> bytes:
        store, taken = self._service.store, push.bytes
        try:
            async with self._service.pushing:  # a push may have to wait for room
                taken += await self._reserve(body)
                offer = await self._run(partial(decode_offer, body, peer=self._peer))
                taken += await self._reserve(body_of(offer.manifest))
                sink = await self._run(lambda: store.receive(offer))
            source = feed(offer, tuple(sink.lengths))
            try:
                await fetch(sink, [source], timeout_s=self._timeout_s)
                return _encode(await self._run(lambda: store.received(offer, sink)))
            except BaseException:
                self._service.threads.submit(store.abandon, offer, sink)
                raise
            finally:
                await source.close()
        finally:
            self._offered.give(taken)

    async def _reserve(self, encoded: bytearray | memoryview) -> int:
        """Take what a part of a push will take in memory, before it is decoded."""
        if not self._offered.take(weight := await self._run(partial(weigh, encoded, self._offered.limit))):
            raise Unavailable(
                f"manifest and ancestry of a push take more memory here than is left of {self._offered.limit} bytes: push one of its "
                "ancestors first, or try again when others are done"
            )
        return weight

    def close(self, incomplete: int) -> None:
        """Clean up after a peer that is gone: its relays serve no more, and pushes with so many bytes do not come."""
        self._offered.give(incomplete)
        for uid, url in self._joined:
            if self._service.relays is not None:
                self._service.relays.leave(uid, url)
        self._joined.clear()

    async def _open(self, question: Open) -> bytes:
        source = await self._run(self._opener(question), late=lambda opened: opened.close())
        try:
            manifest, lengths = bytes(source.manifest), tuple(source.lengths)
            addresses = await self._addresses(source) if question.near and self._is_near() else ()
            upstream = self._join(question)
            handle = self._sending.add(source, question.uid, is_near=bool(addresses))
        except BaseException:
            self._service.threads.submit(source.close)
            raise
        return _encode(Opened(handle, manifest, lengths, upstream, addresses if upstream is None else ()))

    def _opener(self, question: Open) -> Callable[[], Source]:
        uid, part = question.uid, question.part
        return partial(self._service.store.open, uid) if part is None else partial(self._parts().open_part, uid, part)

    def _parts(self) -> SupportsParts:
        if not isinstance(self._service.store, SupportsParts):
            raise InvalidInput("this process serves no parts of states of several ranks: ask the source")
        return self._service.store

    async def _addresses(self, source: Source) -> tuple[int, ...]:
        if not isinstance(source, SupportsAddresses):
            return ()
        with suppress(DatastatesError):  # a chunk that cannot be read is reported when it is wanted
            return tuple(await self._run(source.addresses))
        return ()

    def _join(self, question: Open) -> str | None:
        relays = self._service.relays
        if question.relay is None or relays is None or len(self._joined) >= HANDLES or not is_at(question.relay, self._remote):
            return None
        upstream = relays.join(question.uid, question.relay, question.failed)
        self._joined.add((question.uid, question.relay))
        return None if question.here else upstream

    async def _run(self, work: Callable[[], _T], *, late: Callable[[_T], object] | None = None) -> _T:
        """Run ``work`` in a thread. If this is cancelled first, ``late`` gets the result."""
        future = self._service.threads.submit(work)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            if late is not None:
                future.add_done_callback(lambda done: _hand(done, late))
            raise
        finally:
            del future  # as in ``take``


def _page(ask: Callable[[int], StatePage], limit: int) -> bytes:
    """A page of at most ``limit`` states, encoded; of fewer if they take too many bytes."""
    while len(body := _encode(ask(limit))) > PAGE_BYTES and limit > 1:
        limit //= 2
    return body


def _hand(done: Future[_T], late: Callable[[_T], object]) -> None:
    if done.cancelled() or done.exception() is not None:
        return  # there is no result
    try:
        late(done.result())
    except Exception:  # the peer that asked is gone, so nobody else hears of it
        _logger.exception("what came too late could not be let go")
