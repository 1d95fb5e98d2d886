"""One authenticated connection. Once it stands both ends are equal: each may ask, answer, and send chunks of what it holds open.

    reader     takes every frame; never waits for anything else
    pulse      tells that this side is alive, and ends the session when the other is not, or lets nothing move
    a task for each question of the peer and each chunk on its way out

However a session ends, its link is aborted before any waiting caller hears of it; then its sources are closed, and no task is left.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar

import msgspec

from datastates.errors import Closed, DatastatesError, Disconnected, PeerFault
from datastates.system.seldom import Seldom
from datastates.transport.contract import Channel, Terms, Tls, Transport
from datastates.transport.failures import again, describe
from datastates.transport.limits import ANSWER_TIMEOUTS, SILENT_TIMEOUTS
from datastates.transport.protocol import (
    BODY_BYTES,
    PART_BYTES,
    Answer,
    Ask,
    Bye,
    Digests,
    Failed,
    Failure,
    Find,
    Gone,
    Identity,
    Log,
    Message,
    Moved,
    Offer,
    Open,
    Opened,
    Part,
    Ping,
    Push,
    Question,
    Ready,
    RefRecord,
    Refs,
    Release,
    Resolve,
    StatePage,
    StateRecord,
    Took,
    Want,
    encode,
)
from datastates.transport.store import Source
from datastates.transport.wire import near, tcp
from datastates.transport.wire.joining import NAME_BYTES
from datastates.transport.wire.plane import Plane
from datastates.transport.wire.registry import transport_for

from .answers import Answers, Service
from .asking import Asking
from .choice import agree, offer
from .feed import Feed, Receiving
from .fingerprints import DIGEST_BYTES, Fingerprints
from .handshake import admit, greet
from .neighbours import meet
from .sealed import Sealed
from .sending import Sending, Sent

__all__ = ["Session"]

_T = TypeVar("_T")
_logger = logging.getLogger(__name__)
_logger.addFilter(Seldom())

_AT_ONCE = 8  # questions of a peer that are being answered; more wait
_QUESTIONS = 256  # questions that a peer may have open, the waiting ones included
_IDLE_TIMEOUTS = 30  # for so many timeouts states may be held open without a chunk being wanted
_PAUSE = 0.1  # of a timeout: for so long a session may be unused before it counts as idle
_FAREWELL_S = 0.2


@dataclass(slots=True)
class _Upload:
    push: Push
    moved_at: float
    body: bytearray = field(default_factory=bytearray)


@dataclass(frozen=True, slots=True)
class _Dialled:
    """How this side reached the other one."""

    url: str
    tls: Tls | None


class Session:
    """Made by ``connect`` or ``serve``; every method belongs to the loop thread. ``peer`` says where the other end is."""

    def __init__(
        self,
        sealed: Sealed,
        transport: Transport,
        own: Ready,
        its: Ready,
        service: Service | None,
        terms: Terms,
        neighbour: near.Near | None = None,
    ) -> None:
        self.peer, self.identity, self.timeout_s = sealed.peer, its.identity, own.timeout_ms / 1000
        self.host, self.remote = sealed.host, sealed.remote
        self._interval_s = min(1.0, min(own.timeout_ms, its.timeout_ms) / 10_000)
        self._loop = asyncio.get_running_loop()
        self._stood_still_s = 0.0
        self._sealed, self._writing = sealed, asyncio.Lock()
        self._heard_at = self._used_at = self._clock()
        self._written_at: float | None = None  # when the frame that is being written was begun
        self.data = agree(own, its, self.peer)
        self._plane = Plane(own.address, its.address, self.peer, self._post)
        self._plane.begin(transport.end(self.data, terms, lambda: self._plane.generation))
        self._is_bound = self.data == "tcp" and sealed.is_secret  # whatever comes over TLS is the peer's own
        self._near = neighbour
        self._terms, self._service = terms, service
        self._asking = Asking(self._post, self._clock, self.peer)
        self._receiving = Receiving(self._plane, self._post, self._clock)
        self._fingerprints = Fingerprints() if service is None else service.fingerprints
        sent = Sent() if service is None else service.sent
        self._sending = Sending(self._plane, self._post, self._clock, self.peer, sent, self._fingerprints)
        self._sending.end = lambda error: self._fall(error, farewell=str(error))
        self._answers: Answers | None = None
        if service is not None:
            neighbours = service.neighbours
            self._answers = Answers(service, self._sending, self.peer, self.timeout_s, lambda: neighbours.has(terms.name), sealed.remote)
            neighbours.expect(terms)
        self._at_once = asyncio.Semaphore(_AT_ONCE)
        self._questions: set[int] = set()
        self._uploads: dict[int, _Upload] = {}
        self._refused: dict[int, int] = {}  # bodies that were refused and may still be on their way: what is left of them
        self._error: DatastatesError | None = None
        self._ended = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._ending: asyncio.Task[None] | None = None
        self._guard(self._read)
        self._guard(self._pulse)

    # --- how a session begins and ends ------------------------------------------------------------------------------------

    @classmethod
    async def connect(
        cls,
        url: str,
        *,
        token: bytes = b"",
        timeout_s: float = 10.0,
        tls: Tls | None = None,
        transport: Transport | None = None,
        channel: Channel | None = None,
        data: str = "auto",
    ) -> Self:
        """A session with the server at ``url``, over ``channel`` where one is open already; ``data`` as in ``choice``.

        :raises Disconnected: nobody answers there in time.
        :raises Unauthorized: the tokens differ.
        :raises PeerFault: it is no datastates, or speaks another version.
        :raises Unsupported: the two sides have no data plane in common.
        """
        transport = transport_for(url) if transport is None else transport
        planes, wish = offer(transport.planes, transport.scheme, data, is_secret=tls is not None)
        channel = await transport.dial(url, timeout_s=timeout_s, tls=tls) if channel is None else channel
        own = Ready(planes, transport.located, _milliseconds(timeout_s), wish=wish)
        sealed, its = await greet(channel, own, token=token, timeout_s=timeout_s)
        return await cls._begin(sealed, transport, own, its, None, _Dialled(url, tls))

    @classmethod
    async def serve(
        cls,
        channel: Channel,
        service: Service,
        *,
        transport: Transport,
        identity: Identity,
        token: bytes = b"",
        timeout_s: float = 10.0,
        admission: Callable[[], None] = lambda: None,
        data: str = "auto",
    ) -> Self:
        """A session with the client at the other end of ``channel``; ``admission`` may refuse one that knows the token.

        :raises DatastatesError: no session came about; the channel is closed.
        """

        def ready() -> Ready:
            admission()
            return own

        planes, wish = offer(transport.planes, transport.scheme, data, is_secret=channel.is_secret)
        own = Ready(planes, transport.located, _milliseconds(timeout_s), identity, wish, service.neighbours.name)
        sealed, its = await admit(channel, ready, token=token, timeout_s=timeout_s)
        return await cls._begin(sealed, transport, own, its, service)

    @classmethod
    async def _begin(
        cls, sealed: Sealed, transport: Transport, own: Ready, its: Ready, service: Service | None, dialled: _Dialled | None = None
    ) -> Self:
        neighbour: near.Near | None = None
        try:
            terms = _terms(sealed, own.timeout_ms / 1000, dialled)
            if sealed.remote is not None and its.near:
                neighbour = await meet(its.near, terms)
            return cls(sealed, transport, own, its, service, terms, neighbour)
        except BaseException:
            if neighbour is not None:
                neighbour.close()
            await sealed.close()
            raise

    @property
    def is_open(self) -> bool:
        """Whether it can be used; a session that is no longer open never is again."""
        return self._error is None

    @property
    def unused_s(self) -> float:
        """The seconds for which the peer has said nothing but that it is alive, while nothing that it asked for is under way."""
        is_used = bool(self._questions or self._uploads or self._sending.running)
        return 0.0 if is_used else self._clock() - self._used_at

    @property
    def is_idle(self) -> bool:
        """Whether it may end when others wait for its place; with states held open only after a whole timeout."""
        return self.unused_s > self.timeout_s * (1.0 if self._sending.is_holding else _PAUSE)

    @property
    def error(self) -> DatastatesError | None:
        """The error with which it ended."""
        return self._error

    async def wait_closed(self) -> None:
        """Wait until it has ended and nothing of it is left."""
        await self._ended.wait()

    async def close(self, reason: str = "it was closed") -> None:
        """End it and tell the peer; idempotent. Callers that wait for anything on it get ``Closed``."""
        self._fall(Closed(f"the connection to {self.peer} is over: {reason}"), farewell=reason)
        await self._ended.wait()

    async def drain(self, grace_s: float) -> None:
        """Send no further chunks, and wait up to ``grace_s`` for those on their way."""
        await self._sending.drain(grace_s)

    # --- what can be asked ------------------------------------------------------------------------------------------------

    async def ask(self, question: Question, *, limit: int = BODY_BYTES) -> bytes:
        """The body of the answer. An error on the other side is raised here as the same class.

        :raises PeerFault: the answer is longer than ``limit``; the session is over.
        :raises Disconnected: the session is over, or nothing was heard of the answer for six timeouts.
        """
        return await self._asking.ask(question, limit=limit)

    async def refs(self) -> list[RefRecord]:
        """Every branch and tag there."""
        return await self._asked(Refs(), list[RefRecord])

    async def find(self, query: str, *, limit: int = 100, after: str | None = None) -> StatePage:
        """A page of the states that a query asks for."""
        return await self._asked(Find(query, limit, after), StatePage)

    async def log(self, rev: str, *, limit: int = 100, after: str | None = None) -> StatePage:
        """A page of a state and its ancestors, newest first."""
        return await self._asked(Log(rev, limit, after), StatePage)

    async def resolve(self, rev: str) -> StateRecord:
        """The state that a revision names there."""
        return await self._asked(Resolve(rev), StateRecord)

    async def open(
        self, uid: str, *, relay: str | None = None, failed: Sequence[str] = (), here: bool = True, limit: int = BODY_BYTES
    ) -> tuple[Opened, Feed]:
        """Open a state, which stays pinned until the feed is closed. Where the answer names an ``upstream``, the chunks are to be taken
        from there; what they should be, this feed says. More than ``limit`` bytes are not listened to.

        :raises Unavailable: its bytes are not there.
        """
        opening = self._spawn(self._open(Open(uid, relay, tuple(failed), here, near=self._near is not None), limit))
        try:
            return await self._outcome(opening)
        except asyncio.CancelledError:
            opening.add_done_callback(self._unwanted)
            raise

    async def push(self, source: Source, uid: str, offer: Offer) -> StateRecord:
        """Have the peer fetch a state from here and record it. ``source`` is closed in the end.

        :raises InvalidInput: the peer takes none.
        """
        try:
            self._check_open()
            handle = self._sending.add(source, uid)
        except DatastatesError:
            await asyncio.to_thread(source.close)
            raise
        try:
            body = await asyncio.to_thread(msgspec.msgpack.encode, offer)
            pushing = self._spawn(self._asking.ask(Push(handle, len(body)), limit=BODY_BYTES, offer=body))
            return await self._decode(await self._outcome(pushing), StateRecord)
        finally:
            await self._sending.release(handle)

    async def _asked(self, question: Question, kind: type[_T], limit: int = BODY_BYTES) -> _T:
        return await self._decode(await self.ask(question, limit=limit), kind)

    async def _open(self, question: Open, limit: int) -> tuple[Opened, Feed]:
        opened = await self._asked(question, Opened, limit)
        return opened, self._feed(opened.handle, opened.manifest, opened.lengths, opened.addresses)

    def _unwanted(self, opening: asyncio.Task[tuple[Opened, Feed]]) -> None:
        if not opening.cancelled() and opening.exception() is None and self.is_open:
            self._spawn(opening.result()[1].close())

    def _feed(self, handle: int, manifest: bytes, lengths: tuple[int, ...], addresses: tuple[int, ...] = ()) -> Feed:
        chunks = self._near_chunks(handle, lengths, addresses)

        async def receive(index: int, buffers: Sequence[memoryview]) -> bool:
            try:
                is_near = chunks is not None and await chunks.receive(index, buffers)
                if is_near:
                    self._check_open()  # what was read after its end may have been anything
                else:
                    await self._receiving.chunk(handle, index, buffers)
            except DatastatesError as exc:
                if isinstance(exc, PeerFault):  # a message of the wrong length
                    self._fall(exc)
                if self._error is not None:
                    await self._ended.wait()
                    raise again(self._error) from exc
                raise
            return is_near or self._is_bound

        async def release() -> None:
            if chunks is not None:
                chunks.close()
            releasing = self._spawn(self.ask(Release(handle, self._plane.generation), limit=0))
            await asyncio.wait({releasing}, timeout=self.timeout_s)

        async def digests(indexes: Sequence[int]) -> list[bytes]:
            size = DIGEST_BYTES * len(indexes)
            said = await self.ask(Digests(handle, tuple(indexes)), limit=size)
            if len(said) != size:
                raise PeerFault(f"{self.peer} tells {len(said)} bytes of digests where {size} belong")
            return [said[start : start + DIGEST_BYTES] for start in range(0, size, DIGEST_BYTES)]

        is_bound = self._is_bound or chunks is not None
        return Feed(self.peer, manifest, lengths, receive=receive, release=release, digests=digests, is_bound=is_bound)

    def _near_chunks(self, handle: int, lengths: tuple[int, ...], addresses: tuple[int, ...]) -> near.NearChunks | None:
        if self._near is None or len(addresses) != len(lengths):
            return None
        return near.NearChunks(self._near, addresses, lambda count, size: self._guard(self._post, Took(handle, count, size)))

    async def _decode(self, body: bytes, kind: type[_T]) -> _T:
        try:
            if len(body) < PART_BYTES:
                return msgspec.msgpack.decode(body, type=kind)
            return await asyncio.to_thread(msgspec.msgpack.decode, body, type=kind)
        except (msgspec.DecodeError, RecursionError, ValueError) as exc:
            fault = PeerFault(f"{self.peer} answers with what is no {kind.__name__} ({exc})")
            self._fall(fault)
            raise fault from exc

    # --- frames -----------------------------------------------------------------------------------------------------------

    async def _post(self, message: Message) -> None:
        """Write a frame. It goes out whole even if the caller is cancelled meanwhile."""
        self._check_open()
        await self._outcome(self._spawn(self._write(encode(message))))

    async def _write(self, body: bytes) -> None:
        async with self._writing:
            self._check_open()
            self._written_at = self._clock()
            try:
                await self._sealed.send(body)
            except DatastatesError as exc:
                self._fall(exc)
                raise
            finally:
                self._written_at = None

    async def _read(self) -> None:
        while self._error is None:
            message = await self._sealed.receive()
            self._heard_at = self._clock()
            if not isinstance(message, Ping):
                self._used_at = self._heard_at
            self._take(message)

    def _take(self, message: Message) -> None:
        match message:
            case Ping(sent):
                if not self._receiving.claim(sent):
                    raise PeerFault(f"{self.peer} says it has sent {sent} bytes, which it was not asked for")
            case Want():
                if self._sending.want(message):
                    self._asking.touch()
            case Gone():
                self._receiving.gone(message)
            case Moved():
                self._plane.moved(message)
                if message.asks:
                    self._guard(self._plane.answer)
            case Took():
                self._sending.took(message)
            case Ask(number, question):
                self._asked_by_peer(number, question)
            case Part(number, data):
                self._part(number, data)
            case Answer():
                self._asking.answered(message)
            case Failed():
                self._asking.failed(message)
            case Bye(failure):
                raise Disconnected(f"{self.peer} closed the connection: {failure.message}")
            case _:
                raise PeerFault(f"{self.peer} sent {type(message).__name__} after the handshake")

    # --- what the peer asks -----------------------------------------------------------------------------------------------

    def _asked_by_peer(self, number: int, question: Question) -> None:
        if number in self._questions or len(self._questions) >= _QUESTIONS:
            problem = "twice" if number in self._questions else f"while {_QUESTIONS} others are open"
            raise PeerFault(f"{self.peer} asks question {number} {problem}")
        self._questions.add(number)
        match question:
            case Push():
                self._begin_upload(number, question)
            case Release():
                self._guard(self._reply, number, self._release, question)
            case Digests():
                self._guard(self._reply, number, self._sending.digests, question)
            case _:
                self._guard(self._answer, number, question)

    def _begin_upload(self, number: int, push: Push) -> None:
        """Refused is a push before its body is taken: what of that is on its way already is dropped."""
        try:
            self._require(push).begin_push(push)
        except DatastatesError as exc:
            self._refused[number] = push.bytes
            if len(self._refused) > _QUESTIONS:
                del self._refused[next(iter(self._refused))]
            self._questions.discard(number)
            self._guard(self._post, Failed(number, describe(exc)))
        else:
            self._uploads[number] = _Upload(push, self._clock())

    def _part(self, number: int, data: bytes) -> None:
        upload = self._uploads.get(number)
        left = self._refused.get(number, 0) if upload is None else upload.push.bytes - len(upload.body)
        if len(data) != min(PART_BYTES, left) or not data:
            raise PeerFault(f"{self.peer} sent {len(data)} bytes for question {number}, where {min(PART_BYTES, left)} belong")
        if upload is None:
            self._refused[number] -= len(data)
            return
        upload.body += data
        upload.moved_at = self._clock()
        if len(upload.body) == upload.push.bytes:
            del self._uploads[number]
            self._guard(self._reply, number, self._take_push, upload)

    async def _answer(self, number: int, question: Question) -> None:
        async with self._at_once:
            await self._reply(number, self._own, question)

    async def _reply(self, number: int, work: Callable[[_T], Awaitable[bytes]], matter: _T) -> None:
        try:
            body = await work(matter)
        except Exception as exc:  # whatever it was, the peer that asked must hear of it
            self._questions.discard(number)
            await self._post(Failed(number, describe(exc)))
            return
        last = max(len(body) - 1, 0) // PART_BYTES
        for part in range(last + 1):
            if part == last:
                self._questions.discard(number)
            await self._post(Answer(number, body[part * PART_BYTES : (part + 1) * PART_BYTES], part == last))

    async def _own(self, question: Question) -> bytes:
        return await self._require(question).answer(question)

    async def _take_push(self, upload: _Upload) -> bytes:
        def feed(offer: Offer, lengths: tuple[int, ...]) -> Feed:
            return self._feed(upload.push.handle, offer.manifest, lengths)

        return await self._require(upload.push).take(upload.push, upload.body, feed)

    async def _release(self, question: Release) -> bytes:
        await self._sending.release(question.handle, question.generation)
        return b""

    def _require(self, question: Question) -> Answers:
        if self._answers is None:
            raise PeerFault(f"{type(question).__name__} was asked of a side that serves nothing")
        return self._answers

    # --- life and death ---------------------------------------------------------------------------------------------------

    async def _pulse(self) -> None:
        while True:
            before = self._loop.time()
            await asyncio.sleep(self._interval_s)
            late = self._loop.time() - before - self._interval_s
            if late > self.timeout_s / 4:
                self._stood_still_s += late  # this process stood still, not the peer
            self._check_peer()
            self._asking.expire(SILENT_TIMEOUTS * self.timeout_s, ANSWER_TIMEOUTS * self.timeout_s)
            if not self._writing.locked():
                self._guard(self._post, Ping(self._sending.bytes))

    def _check_peer(self) -> None:
        now, limit = self._clock(), self.timeout_s
        if now - self._heard_at > limit:
            raise Disconnected(f"{self.peer} has been silent for {limit:g} s: it died, stopped, or cannot be reached any more")
        if self._written_at is not None and now - self._written_at > limit:
            raise Disconnected(f"{self.peer} has read nothing for {limit:g} s")
        if self._receiving.stalled_s > limit:
            raise Disconnected(f"{self.peer} is alive, but has sent nothing of the chunks that were asked for in {limit:g} s")
        if self._sending.stalled_s > limit:
            raise Disconnected(f"{self.peer} is alive, but has taken nothing of the chunks that it asked for in {limit:g} s")
        if any(now - upload.moved_at > limit for upload in self._uploads.values()):
            raise Disconnected(f"{self.peer} is alive, but has sent nothing for {limit:g} s of what it says of a state that it pushes")
        if self._sending.idle_s > _IDLE_TIMEOUTS * limit:
            raise Disconnected(f"{self.peer} has held states open for {_IDLE_TIMEOUTS * limit:g} s without asking for a chunk")

    def _clock(self) -> float:
        """Seconds, without those in which this process itself did not run."""
        return self._loop.time() - self._stood_still_s

    def _check_open(self) -> None:
        if self._error is not None:
            raise again(self._error)

    def _spawn(self, work: Coroutine[Any, Any, _T]) -> asyncio.Task[_T]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)
        return task

    async def _outcome(self, task: asyncio.Task[_T]) -> _T:
        """The outcome of a task of the session, which goes on if the caller is cancelled; if the session ends first: its error."""
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if self._error is None or (caller is not None and caller.cancelling()):
                raise
            raise again(self._error) from None

    def _finished(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # looked at: who waits for it, if anybody still does, gets it as well

    def _guard(self, work: Callable[..., Awaitable[None]], *arguments: object) -> None:
        """Do it in a task of its own; if it fails the session is over."""
        self._spawn(self._guarded(work, *arguments))

    async def _guarded(self, work: Callable[..., Awaitable[None]], *arguments: object) -> None:
        try:
            await work(*arguments)
        except DatastatesError as exc:
            self._fall(exc)
        except Exception as exc:
            _logger.exception("the connection to %s failed", self.peer)
            self._fall(Disconnected(f"the connection to {self.peer} failed with {type(exc).__name__}: {exc}"))

    def _fall(self, error: DatastatesError, *, farewell: str | None = None) -> None:
        if self._error is None:
            self._error = error
            if farewell is None and isinstance(error, PeerFault):
                farewell = str(error)
            self._ending = asyncio.create_task(self._end(error, farewell))

    async def _end(self, error: DatastatesError, farewell: str | None) -> None:
        try:
            await self._plane.close()  # from here on no buffer is read or written
            if self._service is not None:
                self._service.neighbours.forget(self._terms.name)
            if farewell is not None:
                await self._say_farewell(error.kind, farewell)
            self._asking.fail(error)
            tasks = list(self._tasks)
            for task in tasks:
                task.cancel()
            await self._sealed.close()
            await asyncio.gather(*tasks, return_exceptions=True)
            if self._answers is not None:
                self._answers.close()
            await self._sending.close()
        finally:
            if self._service is None:
                self._fingerprints.close()
            if self._near is not None:
                self._near.close()
            self._ended.set()

    async def _say_farewell(self, kind: str, reason: str) -> None:
        try:
            async with asyncio.timeout(_FAREWELL_S), self._writing:
                await self._sealed.send(encode(Bye(Failure(kind, reason[:1000]))))
        except (TimeoutError, DatastatesError):
            pass  # it will notice


def _terms(sealed: Sealed, timeout_s: float, dialled: _Dialled | None) -> Terms:
    name, key = sealed.derive(b"name")[:NAME_BYTES], sealed.derive(b"data")
    if dialled is None or sealed.remote is None:
        return Terms(name, key, sealed.peer, timeout_s=timeout_s)
    return Terms(name, key, sealed.peer, sealed.remote, tcp.split(dialled.url)[1], tcp.client_context(dialled.tls), timeout_s)


def _milliseconds(timeout_s: float) -> int:
    return max(100, round(timeout_s * 1000))
