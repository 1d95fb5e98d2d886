"""One authenticated connection. Once it stands both ends are equal: each may ask, answer, and send
chunks of what it holds open.

    beginning  the handshake, before there is a session
    reader     takes every frame and passes it to the object responsible (``_take``); never waits
               for anything else
    pulse      signals that this side is alive, and ends the session if the other side is not, or
               makes no progress
    tasks      one for each question of the peer (``requests``) and each chunk that is sent
               (``sending``)

However a session ends, its link is aborted before any waiting caller gets the error. Then its
sources are closed, and no task is left.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Self, TypeVar

import msgspec

from datastates.errors import (
    Closed,
    DatastatesError,
    Disconnected,
    InvalidInput,
    PeerFault,
    Unsupported,
)
from datastates.system.failures import Failure, again

from . import same_host, tcp
from .contract import Channel, Destination, Feed, OnDevice, Source, Terms, Tls, Transport, size_of
from .data_connection import NAME_BYTES
from .data_plane import Plane
from .handshake import SecureChannel, admit, agree, greet, offer
from .limits import ANSWER_TIMEOUTS, SILENT_TIMEOUTS, Share, weigh
from .protocol import (
    BODY_BYTES,
    CHUNKS,
    Answer,
    Ask,
    Bye,
    Digests,
    Failed,
    Find,
    Gone,
    Identity,
    Laid,
    Land,
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
    Reach,
    Reached,
    Ready,
    RefRecord,
    Refs,
    Release,
    Resolve,
    Room,
    StatePage,
    StateRecord,
    Took,
    Want,
    encode,
)
from .registry import transport_for
from .requests import Clock, IncomingRequests, Lifecycle, OutgoingRequests, Service
from .same_host import LocalChunks, meet
from .sending import DIGEST_BYTES, ChunkReceiver, ChunkSender, DigestCache, SendStats

if TYPE_CHECKING:
    from .ipc import IpcEnd


_DAY_S = 86_400.0


@dataclass(frozen=True, slots=True)
class _Handshake:
    """The outcome of a handshake. ``own`` and ``its`` are the frames of the two sides. ``plane`` is
    the data plane that they agreed on. ``local`` is the memory of the other process, if it can be
    read."""

    sealed: SecureChannel
    transport: Transport
    own: Ready
    its: Ready
    plane: str
    terms: Terms
    local: same_host.ProcessMemory | None
    service: Service | None


async def _finish_handshake(
    sealed: SecureChannel,
    transport: Transport,
    own: Ready,
    its: Ready,
    terms: Terms,
    service: Service | None = None,
) -> _Handshake:
    """Agree on a data plane, and find out whether both ends are processes of one host."""
    plane = agree(own, its, sealed.peer)
    local = await meet(its.near, terms) if sealed.remote is not None and its.near else None
    if plane == "ipc" and service is None and local is None:
        raise Unsupported(
            f"data='ipc' needs another process of this host and user whose memory may be read,"
            f" which {sealed.peer} is not: connect with data='auto'"
        )
    return _Handshake(sealed, transport, own, its, plane, terms, local, service)


def _terms(
    sealed: SecureChannel, timeout_s: float, url: str | None = None, tls: Tls | None = None
) -> Terms:
    """The name, the keys and the peer of the session; only the end that dialled has the url."""
    name, key = sealed.derive(b"name")[:NAME_BYTES], sealed.derive(b"data")
    if url is None or sealed.remote is None:
        return Terms(name, key, sealed.peer, timeout_s=timeout_s)
    return Terms(
        name, key, sealed.peer, sealed.remote, tcp.split(url)[1], tcp.client_context(tls), timeout_s
    )


def _milliseconds(timeout_s: float) -> int:
    """The number in ``Ready``: more than a day is a day."""
    return round(min(max(timeout_s, 0.1), _DAY_S) * 1000)


_T = TypeVar("_T")

_IDLE_TIMEOUTS = 30  # how many timeouts states may be held open without a chunk being wanted
_PAUSE = 0.1  # of a timeout: how long a session may be unused before it counts as idle
_FAREWELL_S = 0.2
_STAGED = 4  # chunks in one request, where shared memory for all of them is taken first
_STAGED_THERE = 16  # the same for memory of a device: half of what an end has
_SMALL_BYTES = 64 << 10  # an answer of fewer bytes is decoded on the loop's thread


class Session:
    """Created by ``connect`` or ``serve``; every method belongs to the loop thread.

    ``peer`` is the address of the other end."""

    def __init__(self, handshake: _Handshake) -> None:
        sealed, own, its = handshake.sealed, handshake.own, handshake.its
        service, terms = handshake.service, handshake.terms
        self.peer, self.identity, self.timeout_s = sealed.peer, its.identity, own.timeout_ms / 1000
        self.host, self.remote, self.data = sealed.host, sealed.remote, handshake.plane
        self._sealed, self._service, self._terms = sealed, service, terms
        self._local = handshake.local
        self._writing = asyncio.Lock()
        self._interval_s = min(1.0, min(own.timeout_ms, its.timeout_ms) / 10_000)
        self._clock = Clock(patience_s=self.timeout_s / 4)
        self._received_at = self._used_at = self._clock()
        self._written_at: float | None = None  # when writing the present frame began
        self._lifecycle = Lifecycle(self.peer, self._end)
        self._ipc: IpcEnd | None = None
        if self.data == "ipc":
            from .ipc import IpcEnd  # imports torch

            self._ipc = IpcEnd(self.peer, self._post, lambda: self._plane.generation, self._is_near)
        end = self._ipc or handshake.transport.end(self.data, terms, lambda: self._plane.generation)
        # an end that belongs to the session has one address for both sides
        own_address, address = (
            (own.address, its.address) if end is handshake.transport else (end.located, end.located)
        )
        self._plane = Plane(end, own_address, address, self.peer, self._post)
        self._outgoing = OutgoingRequests(self._post, self._clock, self.peer)
        self._receiving = ChunkReceiver(self._plane, self._post, self._clock)
        self._digests = DigestCache() if service is None else service.digests
        sent = SendStats() if service is None else service.sent
        self._sending = ChunkSender(
            self._plane, self._post, self._clock, self.peer, sent, self._digests
        )
        self._sending.end = lambda error: self._lifecycle.fall(error, farewell=str(error))
        # over TLS, and by the driver, everything is the peer's own
        self._is_bound = self._ipc is not None or (self.data == "tcp" and sealed.is_secret)
        if service is not None:
            service.local_peers.expect(terms)
        self._incoming = IncomingRequests(
            service,
            self._sending,
            lifecycle=self._lifecycle,
            post=self._post,
            clock=self._clock,
            peer=self.peer,
            remote=self.remote,
            timeout_s=self.timeout_s,
            is_near=self._is_near,
            feed=partial(SessionFeed, self),
        )
        self._lifecycle.depend_on(self._read)
        self._lifecycle.depend_on(self._pulse)

    def _is_near(self) -> bool:
        """Whether the other end has proved to be a process of this host and user."""
        if self._service is None:
            return self._local is not None
        return self._service.local_peers.has(self._terms.name)

    # --- how a session begins and ends ------------------------------------------------------------

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
        """A session with the server at ``url``, over ``channel`` if one is already open; ``data``
        as in ``handshake.offer``.

        :raises Disconnected: no process accepts in time.
        :raises Unauthorized: the tokens differ.
        :raises PeerFault: the other end is not datastates, or speaks another version.
        :raises Unsupported: the two sides have no data plane in common.
        """
        transport = transport_for(url) if transport is None else transport
        planes, wish = offer(transport.planes, transport.scheme, data, is_secret=tls is not None)
        if channel is None:
            channel = await transport.dial(url, timeout_s=timeout_s, tls=tls)
        own = Ready(planes, transport.located, _milliseconds(timeout_s), wish=wish)
        sealed, its = await greet(channel, own, token=token, timeout_s=timeout_s)
        try:
            terms = _terms(sealed, timeout_s, url, tls)
            return cls._of(await _finish_handshake(sealed, transport, own, its, terms))
        except BaseException:
            await sealed.close()
            raise

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
        """A session with the client at the other end of ``channel``; ``admission`` may refuse a
        client with the right token.

        :raises DatastatesError: there is no session; the channel is closed.
        """
        planes, wish = offer(transport.planes, transport.scheme, data, is_secret=channel.is_secret)
        own = Ready(
            planes,
            transport.located,
            _milliseconds(timeout_s),
            identity,
            wish,
            service.local_peers.name,
        )

        def ready() -> Ready:
            admission()
            return own

        sealed, its = await admit(channel, ready, token=token, timeout_s=timeout_s)
        try:
            terms = _terms(sealed, timeout_s)
            return cls._of(await _finish_handshake(sealed, transport, own, its, terms, service))
        except BaseException:
            await sealed.close()
            raise

    @classmethod
    def _of(cls, handshake: _Handshake) -> Self:
        try:
            return cls(handshake)
        except BaseException:
            if handshake.local is not None:
                handshake.local.close()
            raise

    @property
    def is_open(self) -> bool:
        """Whether it can be used. A session does not open again."""
        return self._lifecycle.error is None

    @property
    def unused_s(self) -> float:
        """The seconds for which the peer has sent only pings, while none of its requests is under
        way."""
        is_used = self._incoming.is_busy or bool(self._sending.running)
        return 0.0 if is_used else self._clock() - self._used_at

    @property
    def is_idle(self) -> bool:
        """Whether it may be ended when others wait for its place; with states held open, only
        after a whole timeout."""
        return self.unused_s > self.timeout_s * (1.0 if self._sending.is_holding else _PAUSE)

    @property
    def error(self) -> DatastatesError | None:
        """The error with which it ended, if it has."""
        return self._lifecycle.error

    async def wait_closed(self) -> None:
        """Wait until it has ended and nothing of it is left."""
        await self._lifecycle.ended.wait()

    async def close(self, reason: str = "it was closed") -> None:
        """End it, and send the reason to the peer; idempotent.

        Callers that wait for anything on it get ``Closed``."""
        self._lifecycle.fall(
            Closed(f"the connection to {self.peer} is over: {reason}"), farewell=reason
        )
        await self._lifecycle.ended.wait()

    async def drain(self, grace_s: float) -> None:
        """Send no further chunks, and wait up to ``grace_s`` for those under way."""
        await self._sending.drain(grace_s)

    # --- requests ---------------------------------------------------------------------------------

    async def ask(self, question: Question, *, limit: int = BODY_BYTES) -> bytes:
        """The body of the answer. An error on the other side is raised here as the same class.

        :raises PeerFault: the answer is longer than ``limit``; the session is over.
        :raises Disconnected: the session is over, or no part of the answer came for six timeouts.
        """
        return await self._outgoing.request(question, limit=limit)

    async def refs(self) -> list[RefRecord]:
        """Every branch and tag on the other side."""
        return await self._told(Refs(), list[RefRecord])

    async def find(
        self, query: str, *, limit: int = 100, after: str | None = None, room: Share | None = None
    ) -> StatePage:
        """A page of the states that a query finds. Its memory is taken from ``room``.

        :raises PeerFault: it has more than ``limit`` states, or ``room`` is used up; the session
            is over.
        """
        return await self._told(Find(query, limit, after), StatePage, room=room)

    async def log(
        self, rev: str, *, limit: int = 100, after: str | None = None, room: Share | None = None
    ) -> StatePage:
        """A page of a state and its ancestors, newest first.

        ``room`` and errors are as for ``find``."""
        return await self._told(Log(rev, limit, after), StatePage, room=room)

    async def resolve(self, rev: str) -> StateRecord:
        """The state that a revision names on the other side."""
        return await self._told(Resolve(rev), StateRecord)

    async def reach(self, uid: str) -> Reached:
        """How far away each part of a state is on the other side, and where the other processes
        of that job serve."""
        return await self._told(Reach(uid), Reached)

    async def open(
        self,
        uid: str,
        *,
        relay: str | None = None,
        failed: Sequence[str] = (),
        here: bool = True,
        part: int | None = None,
        limit: int = BODY_BYTES,
    ) -> tuple[Opened, SessionFeed]:
        """Open a state, which stays pinned until the feed is closed. If the answer names an
        ``upstream``, take the chunks from there; this feed still gives their digests. ``part``:
        open only the part of this rank. An answer of more than ``limit`` bytes is refused.

        :raises Unavailable: its bytes are not there.
        """
        question = Open(uid, relay, tuple(failed), here, near=self._local is not None, part=part)
        opening = self._lifecycle.spawn(self._open(question, limit))
        try:
            return await self._lifecycle.outcome(opening)
        except asyncio.CancelledError:
            opening.add_done_callback(self._close_unwanted)
            raise

    async def push(self, source: Source, uid: str, offer: Offer) -> StateRecord:
        """Have the peer fetch a state from here and record it. ``source`` is closed in the end.

        :raises InvalidInput: the peer accepts no pushes.
        """
        try:
            self._lifecycle.check_open()
            handle = self._sending.add(source, uid)
        except DatastatesError:
            await asyncio.to_thread(source.close)
            raise
        try:
            body = await asyncio.to_thread(msgspec.msgpack.encode, offer)
            pushing = self._lifecycle.spawn(
                self._outgoing.request(Push(handle, len(body)), limit=BODY_BYTES, offer=body)
            )
            return await self._decode(await self._lifecycle.outcome(pushing), StateRecord)
        finally:
            await self._sending.release(handle)

    async def _told(
        self, question: Question, kind: type[_T], limit: int = BODY_BYTES, room: Share | None = None
    ) -> _T:
        most = question.limit if isinstance(question, Find | Log) else None
        return await self._decode(await self.ask(question, limit=limit), kind, most, room)

    async def _open(self, question: Open, limit: int) -> tuple[Opened, SessionFeed]:
        opened = await self._told(question, Opened, limit)
        return opened, SessionFeed(
            self, opened.handle, opened.manifest, opened.lengths, opened.addresses
        )

    def _close_unwanted(self, opening: asyncio.Task[tuple[Opened, SessionFeed]]) -> None:
        if not opening.cancelled() and opening.exception() is None and self.is_open:
            self._lifecycle.spawn(opening.result()[1].close())

    async def _decode(
        self, body: bytes, kind: type[_T], most: int | None = None, room: Share | None = None
    ) -> _T:
        decode = partial(_decoded, body, kind, most, room)
        try:
            return decode() if len(body) < _SMALL_BYTES else await asyncio.to_thread(decode)
        except (msgspec.DecodeError, RecursionError, ValueError) as exc:
            fault = PeerFault(f"{self.peer} answers with what is no {kind.__name__} ({exc})")
            self._lifecycle.fall(fault)
            raise fault from exc

    # --- frames -----------------------------------------------------------------------------------

    async def _post(self, message: Message) -> None:
        """Write a frame. It is sent completely even if the caller is cancelled meanwhile."""
        self._lifecycle.check_open()
        await self._lifecycle.outcome(self._lifecycle.spawn(self._write(encode(message))))

    async def _write(self, body: bytes) -> None:
        async with self._writing:
            self._lifecycle.check_open()
            self._written_at = self._clock()
            try:
                await self._sealed.send(body)
            except DatastatesError as exc:
                self._lifecycle.fall(exc)
                raise
            finally:
                self._written_at = None

    async def _read(self) -> None:
        while self._lifecycle.error is None:
            message = await self._sealed.receive()
            self._received_at = self._clock()
            if not isinstance(message, Ping):
                self._used_at = self._received_at
            self._take(message)

    def _take(self, message: Message) -> None:
        match message:
            case Ping(sent):
                if not self._receiving.claim(sent):
                    raise PeerFault(
                        f"{self.peer} reported {sent} sent bytes that were not requested"
                    )
            case Want():
                if self._sending.want(message):
                    self._outgoing.touch()
            case Gone():
                self._receiving.gone(message)
            case Moved():
                self._plane.moved(message)
                if message.asks:
                    self._lifecycle.depend_on(self._plane.answer)
            case Land() | Room() | Laid() if self._ipc is not None:
                self._ipc.take(message)
            case Took():
                self._sending.took(message)
            case Ask(number, question):
                self._incoming.take(number, question)
            case Part(number, data):
                self._incoming.part(number, data)
            case Answer():
                self._outgoing.answered(message)
            case Failed():
                self._outgoing.failed(message)
            case Bye(failure):
                raise Disconnected(f"{self.peer} closed the connection: {failure.message}")
            case _:
                raise PeerFault(f"{self.peer} sent {type(message).__name__} after the handshake")

    # --- life and death ---------------------------------------------------------------------------

    async def _pulse(self) -> None:
        while True:
            await self._clock.tick(self._interval_s)
            self._check_peer()
            self._outgoing.expire(
                SILENT_TIMEOUTS * self.timeout_s, ANSWER_TIMEOUTS * self.timeout_s
            )
            if not self._writing.locked():
                self._lifecycle.depend_on(self._post, Ping(self._sending.bytes))

    def _check_peer(self) -> None:
        now, limit = self._clock(), self.timeout_s
        if now - self._received_at > limit:
            raise Disconnected(
                f"{self.peer} has been silent for {limit:g} s: it died, stopped, or cannot be"
                " reached any more"
            )
        if self._written_at is not None and now - self._written_at > limit:
            raise Disconnected(f"{self.peer} has read nothing for {limit:g} s")
        if self._receiving.stalled_s > limit:
            raise Disconnected(
                f"{self.peer} is alive, but has sent nothing of the requested chunks in {limit:g} s"
            )
        if self._sending.stalled_s > limit:
            raise Disconnected(
                f"{self.peer} is alive, but has taken nothing of the chunks that it requested in"
                f" {limit:g} s"
            )
        if self._incoming.stalled_s > limit:
            raise Disconnected(
                f"{self.peer} is alive, but for {limit:g} s has sent nothing of the description of"
                " a state that it pushes"
            )
        if self._sending.idle_s > _IDLE_TIMEOUTS * limit:
            raise Disconnected(
                f"{self.peer} has held states open for {_IDLE_TIMEOUTS * limit:g} s without asking"
                " for a chunk"
            )

    async def _end(self, error: DatastatesError, farewell: str | None) -> None:
        try:
            await self._plane.close()  # from here on no buffer is read or written
            if self._service is not None:
                self._service.local_peers.forget(self._terms.name)
            if farewell is not None:
                with suppress(TimeoutError, DatastatesError):  # the peer will notice
                    async with asyncio.timeout(_FAREWELL_S), self._writing:
                        failure = Failure(error.kind, farewell[:1000])
                        await self._sealed.send(encode(Bye(failure)))
            self._outgoing.fail(error)
            ending = self._lifecycle.cancel()
            await self._sealed.close()
            await asyncio.gather(*ending, return_exceptions=True)
            self._incoming.close()
            await self._sending.close()
        finally:
            if self._service is None:
                self._digests.close()
            if self._local is not None:
                self._local.close()
            self._lifecycle.ended.set()


class SessionFeed(Feed):
    """A state that the peer of a session holds open for us under ``handle``. ``lengths`` has
    the bytes of each chunk, ``addresses`` its address in the peer's memory."""

    def __init__(
        self,
        session: Session,
        handle: int,
        manifest: bytes,
        lengths: tuple[int, ...],
        addresses: tuple[int, ...] = (),
    ) -> None:
        self._session, self._handle, self._lifecycle = session, handle, session._lifecycle
        self.name, self.manifest, self.lengths = session.peer, manifest, lengths
        self.reaches_devices = session._ipc is not None
        self._near: LocalChunks | None = None
        if session._local is not None and len(addresses) == len(lengths):
            self._near = LocalChunks(session._local, addresses, self._took)
        self.is_bound = session._is_bound or self._near is not None
        self._is_closed = False

    async def receive(
        self, chunks: Mapping[int, Destination], arrived: Callable[[int, bool], None]
    ) -> None:
        """See ``Feed.receive``.

        :raises Disconnected: the session is over, nothing came for its ``timeout_s``, or the link
            broke four times in a row.
        """
        waiting = dict[int, Destination]()
        for index, into in chunks.items():
            self._check(index, size_of(into))
            if not isinstance(into, OnDevice):
                into = [piece for piece in into if piece.nbytes]
            if size_of(into):
                waiting[index] = into
            else:
                arrived(index, True)
        try:
            await self._receive(waiting, arrived)
        except DatastatesError as exc:
            if isinstance(exc, PeerFault):  # a message of the wrong length
                self._lifecycle.fall(exc)
            if self._lifecycle.error is not None:
                await self._lifecycle.ended.wait()
                raise again(self._lifecycle.error) from exc
            raise

    async def digests(self, indexes: Sequence[int]) -> Sequence[bytes]:
        size = DIGEST_BYTES * len(indexes)
        found = await self._session.ask(Digests(self._handle, tuple(indexes)), limit=size)
        if len(found) != size:
            raise PeerFault(f"{self.name} tells {len(found)} bytes of digests where {size} belong")
        return [found[start : start + DIGEST_BYTES] for start in range(0, size, DIGEST_BYTES)]

    async def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        with suppress(DatastatesError):
            if self._near is not None:
                self._near.close()
            question = Release(self._handle, self._session._plane.generation)
            releasing = self._lifecycle.spawn(self._session.ask(question, limit=0))
            await asyncio.wait({releasing}, timeout=self._session.timeout_s)

    def _check(self, index: int, wanted: int) -> None:
        if index >= len(self.lengths) or wanted != self.lengths[index]:
            had = f"{self.lengths[index]} bytes" if index < len(self.lengths) else "no such chunk"
            raise InvalidInput(
                f"{wanted} bytes were asked for as chunk {index} of a state that has {had} at"
                f" {self.name}"
            )

    def _took(self, count: int, size: int) -> None:
        self._lifecycle.depend_on(self._session._post, Took(self._handle, count, size))

    async def _receive(
        self, waiting: dict[int, Destination], arrived: Callable[[int, bool], None]
    ) -> None:
        def is_read(index: int) -> None:
            # memory read after the session's end may have been anything
            self._lifecycle.check_open()
            del waiting[index]
            arrived(index, True)

        def is_here(index: int) -> None:
            del waiting[index]
            arrived(index, self._session._is_bound)

        on_host = {index: into for index, into in waiting.items() if not isinstance(into, OnDevice)}
        if self._near is not None and on_host:
            await self._near.receive(on_host, is_read)
        while waiting:
            if isinstance(next(iter(waiting.values())), OnDevice):
                at_once = _STAGED_THERE
            else:
                at_once = _STAGED if self._session.data in {"ucx", "ipc"} else CHUNKS
            part = dict(islice(waiting.items(), at_once))
            await self._session._receiving.receive(self._handle, part, is_here)


def _decoded(body: bytes, kind: type[_T], most: int | None, room: Share | None) -> _T:
    """The content of a body. A page has at most ``most`` states; its memory is taken from
    ``room``."""
    weight, limit = weigh(body, BODY_BYTES), BODY_BYTES if room is None else room.limit
    if weight > BODY_BYTES or (room is not None and not room.take(weight)):
        raise ValueError(
            f"it takes more than {limit} bytes of memory: pass a limit, or ask for less"
        )
    found = msgspec.msgpack.decode(body, type=kind)
    if most is not None and isinstance(found, StatePage) and len(found.states) > most:
        raise ValueError(f"{len(found.states)} states, where at most {most} were asked for")
    return found
