"""The requests of one session: the peer's requests, which are answered here, and our own.

Ask   -> take -> _answer, _reply            a few at once
Ask   -> take -> _begin_upload              a push: the description of its state follows in parts
Part  -> part -> _reply, _push              with the last part, the state is fetched
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Executor, Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import msgspec

from datastates.errors import DatastatesError, Disconnected, InvalidInput, PeerFault, Unavailable
from datastates.state.digest import body_of
from datastates.system.failures import again, describe, revive
from datastates.system.logs import RateLimitFilter

from .contract import Feed, Store
from .data_plane import mark_retrieved
from .fetch import fetch
from .handshake import is_at
from .limits import PAGE_BYTES, Budget, Limits, Share, weigh
from .protocol import (
    PART_BYTES,
    Answer,
    Ask,
    Digests,
    Failed,
    Find,
    Log,
    Message,
    Open,
    Opened,
    Part,
    Push,
    Question,
    Reach,
    Refs,
    Release,
    Resolve,
    StatePage,
    decode_offer,
)
from .same_host import LocalPeers
from .sending import HANDLES, ChunkSender, DigestCache, SendStats

_logger = logging.getLogger(__name__)
_logger.addFilter(RateLimitFilter())

_PUSHES_AT_ONCE = 2  # that may wait for memory
_T = TypeVar("_T")
_encode = msgspec.msgpack.Encoder().encode


# The chains of a server: the order in which receivers take a state from each other.


RECEIVERS = 1000
"""The most receivers in the chain of one state; the server itself serves those beyond."""

STATES = 1000
"""The most states that have a chain at once."""


@dataclass(slots=True)
class _Chain:
    """The receivers that forward a state, in order. ``above`` has the source of each (None: the
    server itself)."""

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
    """The chains of one server: receivers form a line, so that only one copy leaves the server.

    Belongs to the loop thread."""

    def __init__(self) -> None:
        self._chains: dict[str, _Chain] = {}

    def join(self, uid: str, relay_url: str, failed: Sequence[str]) -> str | None:
        """Put a receiver at the end of the line, or let it ask again from its place. Returns the
        url of its source, or None for this server.

        The receivers in ``failed`` did not answer it; they leave the line. No receiver is sent to
        one that waits for it.
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
        upstream = next(
            (url for url in reversed(ahead) if not chain.is_fed_by(url, relay_url)), None
        )
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


# What the sessions of one server share.


@dataclass(frozen=True, slots=True)
class Service:
    """What the sessions of one server share.

    ``threads`` runs the store; ``pushing`` keeps some threads free for peers that do not push."""

    store: Store
    threads: Executor
    relays: Chains | None = None
    sent: SendStats = field(default_factory=SendStats)
    digests: DigestCache = field(default_factory=DigestCache)
    local_peers: LocalPeers = field(default_factory=LocalPeers)
    pushing: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_PUSHES_AT_ONCE))
    offers: Budget = field(default_factory=lambda: Budget(Limits().offer_bytes))


# The tasks of one session, and the error with which it ends.


_TASKS = 4096


class Lifecycle:
    """Belongs to the loop thread.

    ``end`` is run once, with the error and the farewell to the peer; it must set ``ended``."""

    def __init__(
        self, peer: str, end: Callable[[DatastatesError, str | None], Coroutine[Any, Any, None]]
    ) -> None:
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
        """Run ``work`` in a new task, which ends with the session.

        Each task holds something, so they may not be too many."""
        if len(self._tasks) > _TASKS:
            self.fall(PeerFault(f"{self._peer} sends more than it reads of the answers"))
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(mark_retrieved)  # a caller that waits for it gets the error as well
        return task

    async def outcome(self, task: asyncio.Task[_T]) -> _T:
        """The outcome of a task of the session. The task continues if the caller is cancelled;
        if the session ends first, its error is raised."""
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if self.error is None or (caller is not None and caller.cancelling()):
                raise
            raise again(self.error) from None

    def depend_on(self, work: Callable[..., Awaitable[None]], *arguments: object) -> None:
        """Run ``work`` in a new task. If it fails, the session ends."""
        self.spawn(self._or_fall(work, *arguments))

    def fall(self, error: DatastatesError, *, farewell: str | None = None) -> None:
        """End the session with an error, unless it already has one.

        The peer gets the ``farewell``, or the text of its fault."""
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

    async def _or_fall(self, work: Callable[..., Awaitable[None]], *arguments: object) -> None:
        try:
            await work(*arguments)
        except DatastatesError as exc:
            self.fall(exc)
        except Exception as exc:  # an error of ours ends this connection, not the server
            _logger.exception("the connection to %s failed", self._peer)
            self.fall(
                Disconnected(
                    f"the connection to {self._peer} failed with {type(exc).__name__}: {exc}"
                )
            )


# The time of one session.


class Clock:
    """Seconds, except those in which this process itself stood still for more than
    ``patience_s``: the peer is not to blame for these."""

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


# The requests of the peer. They are accepted as they come, and each is answered by a task.


_ANSWERED_AT_ONCE = 8  # more wait
_REQUESTS = 256  # requests that a peer may have open, the waiting ones included


@dataclass(slots=True)
class _Upload:
    """The description of a state that a peer pushes, as far as it has come."""

    push: Push
    moved_at: float
    body: bytearray = field(default_factory=bytearray)


class IncomingRequests:
    """The peer's requests; belongs to the loop thread.

    ``sending`` holds the states opened for the peer; a relay that it announced leaves when it does.
    ``feed`` makes the feed of a state that the peer holds open for us. Without ``service`` this
    side serves nothing, and the peer can request only what this side pushes.
    """

    def __init__(
        self,
        service: Service | None,
        sending: ChunkSender,
        *,
        lifecycle: Lifecycle,
        post: Callable[[Message], Awaitable[None]],
        clock: Clock,
        peer: str,
        timeout_s: float,
        feed: Callable[[int, bytes, tuple[int, ...]], Feed],
        remote: tuple[str, int] | None = None,
        is_near: Callable[[], bool] = lambda: False,
    ) -> None:
        self._service, self._sending, self._lifecycle = service, sending, lifecycle
        self._post, self._clock, self._peer, self._feed = post, clock, peer, feed
        self._remote, self._timeout_s, self._is_near = remote, timeout_s, is_near
        self._at_once = asyncio.Semaphore(_ANSWERED_AT_ONCE)
        self._open_requests: set[int] = set()
        self._uploads: dict[int, _Upload] = {}
        # refused bodies that may still be arriving: how much of each is left
        self._refused: dict[int, int] = {}
        self._joined: set[tuple[str, str]] = set()
        self._offered = Share(Budget(0) if service is None else service.offers)

    @property
    def is_busy(self) -> bool:
        """Whether a request is not answered yet."""
        return bool(self._open_requests or self._uploads)

    @property
    def stalled_s(self) -> float:
        """The seconds for which no part has come of a push whose description is incomplete."""
        now = self._clock()
        return max((now - upload.moved_at for upload in self._uploads.values()), default=0.0)

    def take(self, number: int, question: Question) -> None:
        """Begin to answer a request.

        :raises PeerFault: its number is already in use, or too many requests are open.
        """
        if number in self._open_requests or len(self._open_requests) >= _REQUESTS:
            problem = (
                "twice" if number in self._open_requests else f"while {_REQUESTS} others are open"
            )
            raise PeerFault(f"{self._peer} asks question {number} {problem}")
        self._open_requests.add(number)
        match question:
            case Push():
                self._begin_upload(number, question)
            case Release():
                self._lifecycle.depend_on(self._reply, number, self._release, question)
            case Digests():
                self._lifecycle.depend_on(self._reply, number, self._sending.digests, question)
            case _:
                self._lifecycle.depend_on(self._answer_in_turn, number, question)

    def part(self, number: int, data: bytes) -> None:
        """Add a part of the description of a state that the peer pushes.

        :raises PeerFault: its length is wrong.
        """
        upload = self._uploads.get(number)
        left = (
            self._refused.get(number, 0) if upload is None else upload.push.bytes - len(upload.body)
        )
        if len(data) != min(PART_BYTES, left) or not data:
            raise PeerFault(
                f"{self._peer} sent {len(data)} bytes for question {number}, where"
                f" {min(PART_BYTES, left)} belong"
            )
        if upload is None:
            self._refused[number] -= len(data)
            return
        upload.body += data
        upload.moved_at = self._clock()
        if len(upload.body) == upload.push.bytes:
            del self._uploads[number]
            self._lifecycle.depend_on(self._reply, number, self._receive, upload)

    def close(self) -> None:
        """Clean up after a peer that is gone: its relays serve no more, and incomplete pushes
        free their budget."""
        self._offered.give(sum(upload.push.bytes for upload in self._uploads.values()))
        for uid, url in self._joined:
            if self._service is not None and self._service.relays is not None:
                self._service.relays.leave(uid, url)
        self._joined.clear()

    async def _answer_in_turn(self, number: int, question: Question) -> None:
        async with self._at_once:
            await self._reply(number, self._answer, question)

    async def _reply(self, number: int, work: Callable[[_T], Awaitable[bytes]], matter: _T) -> None:
        try:
            body = await work(matter)
        except Exception as exc:  # whatever it was, the peer must get an answer
            self._open_requests.discard(number)
            await self._post(Failed(number, describe(exc)))
            return
        last = max(len(body) - 1, 0) // PART_BYTES
        for part in range(last + 1):
            if part == last:
                self._open_requests.discard(number)
            await self._post(
                Answer(number, body[part * PART_BYTES : (part + 1) * PART_BYTES], part == last)
            )

    async def _release(self, question: Release) -> bytes:
        await self._sending.release(question.handle, question.generation)
        return b""

    def _require(self, question: Question) -> Service:
        if self._service is None:
            raise PeerFault(f"{type(question).__name__} was sent to a side that serves nothing")
        return self._service

    # --- requests to the store --------------------------------------------------------------------

    async def _answer(self, question: Question) -> bytes:
        """The body of the answer. If this raises, the error is the answer."""
        store = self._require(question).store
        match question:
            case Refs():
                return await self._run(lambda: _encode(store.refs()))
            case Find(query, limit, after):
                return await self._run(
                    lambda: _page(lambda most: store.find(query, most, after), limit)
                )
            case Log(rev, limit, after):
                return await self._run(
                    lambda: _page(lambda most: store.log(rev, most, after), limit)
                )
            case Resolve(rev):
                return await self._run(lambda: _encode(store.resolve(rev)))
            case Open():
                return await self._open(question, store)
            case Reach(uid):
                return await self._run(lambda: _encode(store.reach(uid)))
            case _:
                raise PeerFault(
                    f"{self._peer} asks {type(question).__name__} of a side that cannot answer it"
                )

    async def _open(self, question: Open, store: Store) -> bytes:
        uid, part = question.uid, question.part
        source = await self._run(
            lambda: store.open(uid) if part is None else store.open_part(uid, part),
            late=lambda opened: opened.close(),
        )
        try:
            manifest, lengths = bytes(source.manifest), tuple(source.lengths)
            addresses: tuple[int, ...] = ()
            if question.near and self._is_near():
                with suppress(DatastatesError):  # reported when the unreadable chunk is wanted
                    addresses = tuple(await self._run(source.addresses))
            upstream = self._join(question)
            handle = self._sending.add(source, uid, is_near=bool(addresses))
        except BaseException:
            self._require(question).threads.submit(source.close)
            raise
        return _encode(
            Opened(handle, manifest, lengths, upstream, addresses if upstream is None else ())
        )

    def _join(self, question: Open) -> str | None:
        relays = self._require(question).relays
        if (
            question.relay is None
            or relays is None
            or len(self._joined) >= HANDLES
            or not is_at(question.relay, self._remote)
        ):
            return None
        upstream = relays.join(question.uid, question.relay, question.failed)
        self._joined.add((question.uid, question.relay))
        return None if question.here else upstream

    async def _run(
        self, work: Callable[[], _T], *, late: Callable[[_T], object] | None = None
    ) -> _T:
        """Run ``work`` in a thread. If this is cancelled first, ``late`` gets the result."""
        assert self._service is not None, "only a side that serves answers"
        future = self._service.threads.submit(work)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            if late is not None:
                future.add_done_callback(partial(_release_late, late))
            raise
        finally:
            del future  # as in ``_receive``

    # --- pushes -----------------------------------------------------------------------------------

    def _begin_upload(self, number: int, push: Push) -> None:
        """Begin a push, and reserve memory for its description.

        If it is refused, that happens before its body is accepted; parts already under way are
        dropped."""
        try:
            self._require(push).store.check_writable()
            if push.bytes > self._offered.limit:
                raise InvalidInput(
                    f"a push comes with {push.bytes} bytes of manifest and ancestry, at most"
                    f" {self._offered.limit} are taken"
                )
            if not self._offered.take(push.bytes):
                raise Unavailable(
                    f"a further push of {push.bytes} bytes does not fit in memory now: try again"
                    " when other pushes are done"
                )
        except DatastatesError as exc:
            self._refused[number] = push.bytes
            if len(self._refused) > _REQUESTS:
                del self._refused[next(iter(self._refused))]
            self._open_requests.discard(number)
            self._lifecycle.depend_on(self._post, Failed(number, describe(exc)))
        else:
            self._uploads[number] = _Upload(push, self._clock())

    async def _receive(self, upload: _Upload) -> bytes:
        """Fetch a state that the peer pushes; the body of the answer is its record."""
        # It is not cancelled, because threads work on it. It fails once the session is over, and
        # what it holds counts until then.
        receiving = asyncio.create_task(self._fetch_pushed(upload.push, upload.body))
        receiving.add_done_callback(mark_retrieved)
        try:
            return await asyncio.shield(receiving)
        finally:
            # its error refers to this frame, and the two would keep what was pushed
            del receiving

    async def _fetch_pushed(self, push: Push, body: bytearray) -> bytes:
        service, taken = self._require(push), push.bytes
        store = service.store
        try:
            async with service.pushing:  # a push may have to wait for memory
                taken += await self._reserve(body)
                offer = await self._run(partial(decode_offer, body, peer=self._peer))
                taken += await self._reserve(body_of(offer.manifest))
                sink = await self._run(lambda: store.receive(offer))
            feed = self._feed(push.handle, offer.manifest, tuple(sink.lengths))
            try:
                await fetch(sink, [feed], timeout_s=self._timeout_s)
                return _encode(await self._run(lambda: store.received(offer, sink)))
            except BaseException:
                service.threads.submit(store.abandon, offer, sink)
                raise
            finally:
                await feed.close()
        finally:
            self._offered.give(taken)

    async def _reserve(self, encoded: bytearray | memoryview) -> int:
        """Reserve the memory of a part of a push before it is decoded; returns how much."""
        weight = await self._run(partial(weigh, encoded, self._offered.limit))
        if not self._offered.take(weight):
            raise Unavailable(
                "manifest and ancestry of a push take more memory here than is left of"
                f" {self._offered.limit} bytes: push one of its ancestors first, or try again when"
                " others are done"
            )
        return weight


def _page(find: Callable[[int], StatePage], limit: int) -> bytes:
    """A page of at most ``limit`` states, encoded; of fewer if they take too many bytes."""
    while len(body := _encode(find(limit))) > PAGE_BYTES and limit > 1:
        limit //= 2
    return body


def _release_late(late: Callable[[_T], object], done: Future[_T]) -> None:
    if done.cancelled() or done.exception() is not None:
        return  # there is no result
    try:
        late(done.result())
    except Exception:  # the request was cancelled, so no task gets the error
        _logger.exception("the result of a cancelled request could not be released")


# Our own requests. A response comes in parts.


_PENDING_AT_ONCE = 64


@dataclass(slots=True)
class _Pending:
    done: asyncio.Future[bytes]
    limit: int
    asked_at: float
    touched_at: float
    is_push: bool
    body: bytearray = field(default_factory=bytearray)


class OutgoingRequests:
    """Our requests, by id.

    An answer to a request that was given up is dropped. An answer to one that was never made is the
    peer's fault."""

    def __init__(
        self, post: Callable[[Message], Awaitable[None]], clock: Callable[[], float], peer: str
    ) -> None:
        self._post, self._clock, self._peer = post, clock, peer
        self._room = asyncio.Semaphore(_PENDING_AT_ONCE)
        self._pending: dict[int, _Pending] = {}
        self._next = 0

    async def request(self, question: Question, *, limit: int, offer: bytes = b"") -> bytes:
        """The whole body of the answer, of at most ``limit`` bytes.

        ``offer`` is sent after a ``Push``."""
        async with self._room:
            now = self._clock()
            pending = _Pending(
                asyncio.get_running_loop().create_future(), limit, now, now, is_push=bool(offer)
            )
            number, self._next = self._next, self._next + 1
            self._pending[number] = pending
            try:
                await self._post(Ask(number, question))
                for start in range(0, len(offer), PART_BYTES):
                    if pending.done.done():  # refused before all of it was sent
                        break
                    await self._post(Part(number, offer[start : start + PART_BYTES]))
                return await pending.done
            finally:
                del self._pending[number]
                if not pending.done.cancel() and not pending.done.cancelled():
                    # marks it as retrieved, also when posting failed first
                    pending.done.exception()

    def answered(self, message: Answer) -> None:
        """Take in a part of an answer.

        :raises PeerFault: it belongs to no request, or the parts are longer than allowed, or a part
            before the last is too short.
        """
        pending = self._find(message.id)
        if not message.is_last and len(message.data) != PART_BYTES:
            raise PeerFault(
                f"{self._peer} sent a part of {len(message.data)} bytes, where each but the last"
                f" has {PART_BYTES}"
            )
        if pending is None:
            return
        if len(pending.body) + len(message.data) > pending.limit:
            raise PeerFault(
                f"{self._peer} sent a response of more than the {pending.limit} bytes allowed"
            )
        pending.body += message.data
        pending.touched_at = self._clock()
        if message.is_last:
            pending.done.set_result(bytes(pending.body))

    def failed(self, message: Failed) -> None:
        """Take in an error as the answer to a question.

        :raises PeerFault: it belongs to no request.
        """
        pending = self._find(message.id)
        if pending is not None:
            pending.done.set_exception(revive(message.failure))

    def touch(self) -> None:
        """Note that the peer works on what is pushed to it: it wants a chunk that it has not
        wanted before."""
        for pending in self._pending.values():
            if pending.is_push:
                pending.touched_at = self._clock()

    def expire(self, silent_s: float, total_s: float) -> None:
        """Give up questions whose answer had no further part for ``silent_s``, or is not complete
        within ``total_s``.

        A push lasts for as long as the peer keeps asking for its chunks.
        """
        now = self._clock()
        for pending in self._pending.values():
            if pending.done.done():
                continue
            if now - pending.touched_at > silent_s:
                problem = f"has not answered for {silent_s:g} s"
            elif now - pending.asked_at > total_s and not pending.is_push:
                problem = (
                    f"has sent {len(pending.body)} bytes of an answer in {total_s:g} s and does not"
                    " come to its end"
                )
            else:
                continue
            pending.done.set_exception(
                Disconnected(f"{self._peer} is alive, but {problem}: try again later")
            )

    def fail(self, error: DatastatesError) -> None:
        """Fail all open questions; the session is over."""
        for pending in self._pending.values():
            if not pending.done.done():
                pending.done.set_exception(again(error))

    def _find(self, number: int) -> _Pending | None:
        if number >= self._next:
            raise PeerFault(f"{self._peer} sent a response to an unknown request {number}")
        pending = self._pending.get(number)
        return None if pending is None or pending.done.done() else pending
