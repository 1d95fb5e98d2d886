"""The states that one end of a session holds open for the other, and how their chunks are sent."""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any, Final

from blake3 import blake3

from datastates.errors import (
    Closed,
    Corrupt,
    DatastatesError,
    Disconnected,
    InvalidInput,
    PeerFault,
    Unavailable,
)
from datastates.system.failures import again, describe, revive
from datastates.system.logs import RateLimitFilter

from .contract import Destination, Link, OnDevice, Source
from .data_plane import Plane, finish, mark_retrieved
from .protocol import PIECES, Digests, Gone, Message, Took, Want

DIGEST_BYTES: Final = 32

DAMAGED: Final = bytes(DIGEST_BYTES)
"""SendStats for a chunk that does not match its manifest here."""

_STATES = 64  # how many states' digests are kept: 32 bytes for each 4 MiB
_AT_ONCE = 2  # threads that compute: the training needs the other processors
_TOGETHER = 8  # chunks that a thread takes at a time


def digest_of(pieces: Sequence[memoryview]) -> bytes:
    """BLAKE3 of the bytes in some pieces of memory, in order; releases the interpreter's lock."""
    hasher = blake3()
    for piece in pieces:
        hasher.update(piece)
    return hasher.digest()


class DigestCache:
    """Digests that are computed once for all sessions that share this cache, in its own threads.

    Belongs to the loop thread."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_AT_ONCE, "datastates-digest")
        self._cached: OrderedDict[bytes, dict[int, bytes]] = OrderedDict()
        self._pending: dict[tuple[bytes, tuple[int, ...]], asyncio.Task[list[bytes]]] = {}

    async def of(self, state: bytes, indexes: Sequence[int], source: Source) -> list[bytes]:
        """The digests of some chunks. ``state`` identifies what ``source`` holds. The source must
        stay open until this returns, cancelled or not."""
        found = self._cached.get(state, {})
        missing = [index for index in indexes if index not in found]
        if not missing:
            if found:
                self._cached.move_to_end(state)
            return [found[index] for index in indexes]
        computed = dict(found)
        for start in range(0, len(missing), _TOGETHER):
            batch = tuple(missing[start : start + _TOGETHER])
            computed |= zip(batch, await self._batch(state, batch, source), strict=True)
        return [computed[index] for index in indexes]

    def close(self) -> None:
        """Let its threads end; idempotent."""
        self._threads.shutdown(wait=False)

    async def _batch(self, state: bytes, batch: tuple[int, ...], source: Source) -> Sequence[bytes]:
        key = state, batch
        pending = self._pending.get(key)
        if pending is not None and not pending.done():
            await asyncio.wait({pending})
            return (
                await self._batch(state, batch, source)
                if pending.cancelled() or pending.exception() is not None
                else pending.result()
            )
        pending = self._pending[key] = asyncio.create_task(self._compute(source, batch))
        try:
            while not pending.done():
                await asyncio.wait({pending})
            digests = pending.result()
        except asyncio.CancelledError:
            pending.cancel()
            await asyncio.wait({pending})
            raise
        finally:
            if self._pending.get(key) is pending:
                del self._pending[key]
        right = {
            index: digest for index, digest in zip(batch, digests, strict=True) if digest != DAMAGED
        }
        if right:
            self._cached.setdefault(state, {}).update(right)
            self._cached.move_to_end(state)
        while len(self._cached) > _STATES:
            self._cached.popitem(last=False)
        return digests

    async def _compute(self, source: Source, batch: Sequence[int]) -> list[bytes]:
        pieces = [await source.chunk(index) for index in batch]
        work = asyncio.get_running_loop().run_in_executor(
            self._threads, _digests, source, batch, pieces
        )
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            await asyncio.wait({work})  # milliseconds; after that the source is not read any more
            raise


def _digests(
    source: Source, batch: Sequence[int], chunks: Sequence[Sequence[memoryview]]
) -> list[bytes]:
    return [
        _digest_or_damaged(source, index, pieces)
        for index, pieces in zip(batch, chunks, strict=True)
    ]


def _digest_or_damaged(source: Source, index: int, pieces: Sequence[memoryview]) -> bytes:
    try:
        return digest_of(pieces) if source.is_whole(index, pieces) else DAMAGED
    except Corrupt:
        return DAMAGED


# Cuts the bytes of a chunk as its receiver wants them.


def cut(pieces: Sequence[memoryview], lengths: Sequence[int]) -> list[memoryview]:
    """The same bytes as pieces of other lengths. A new piece inside one old piece is a view, any
    other a copy.

    Old and new pieces have the same total length.
    """
    rest = _flat(pieces)
    current = next(rest, memoryview(b""))
    new = []
    for length in lengths:
        if not current:
            current = next(rest)
        if length <= len(current):
            new.append(current[:length])
            current = current[length:]
            continue
        joined = bytearray()
        while len(joined) < length:
            current = current or next(rest)
            taken = length - len(joined)
            joined += current[:taken]
            current = current[taken:]
        new.append(memoryview(joined))
    return new


def _flat(pieces: Sequence[memoryview]) -> Iterator[memoryview]:
    for piece in pieces:
        if piece.nbytes:
            yield piece if piece.format == "B" and piece.ndim == 1 else piece.cast("B")


# The states that one end of a session holds open for the other, and how their chunks are sent.


WANTS = 32
"""The most requests for chunks that a peer may have under way at once."""

HANDLES = 64
"""The most states that a peer may hold open at once."""

_FINISH_S = 1.0
_AHEAD = 3  # chunks of one request that are sent at once
_CLOSED = "the state is no longer held open for sending: open it again"
_logger = logging.getLogger(__name__)
_logger.addFilter(RateLimitFilter())


@dataclass(slots=True)
class SendStats:
    """The bytes that left this process through all sessions that share it. ``states`` counts
    bytes by uid, ``recalled`` counts states whose memory was wanted back while a peer held them
    open."""

    bytes: int = 0
    chunks: int = 0
    states: Counter[str] = field(default_factory=Counter)
    recalled: int = 0


@dataclass(slots=True)
class _OpenSource:
    source: Source
    uid: str
    lengths: tuple[int, ...]
    state: bytes
    reads: set[asyncio.Task[list[bytes]]] = field(default_factory=set)
    sends: dict[asyncio.Task[None], Want] = field(default_factory=dict)
    wanted: set[int] = field(default_factory=set)
    is_released: bool = False
    is_near: bool = False
    recall: asyncio.Task[None] | None = None
    error: DatastatesError | None = None


class ChunkSender:
    """Open sources by handle. A source is closed only when nothing reads its memory any more."""

    def __init__(
        self,
        plane: Plane,
        post: Callable[[Message], Awaitable[None]],
        clock: Callable[[], float],
        peer: str,
        sent: SendStats,
        digests: DigestCache,
    ) -> None:
        self._plane, self._post, self._clock, self._peer, self._sent = (
            plane,
            post,
            clock,
            peer,
            sent,
        )
        self._digests = digests
        self._held: dict[int, _OpenSource] = {}
        self._next = 0
        self._refusals: set[asyncio.Task[None]] = set()
        self.end: Callable[[DatastatesError], None] = lambda error: None
        """Ends the session, which is the only way to stop direct reads of a state by the peer."""
        self._moving, self._moved_at, self._used_at = 0, clock(), clock()
        self._has_moved = False
        self.bytes = 0
        self.is_draining = False

    @property
    def running(self) -> int:
        """The number of requests under way."""
        return sum(len(held.sends) for held in self._held.values())

    @property
    def is_holding(self) -> bool:
        """Whether the peer holds states open."""
        return bool(self._held)

    @property
    def stalled_s(self) -> float:
        """The seconds for which the peer has taken nothing of what is being sent, as of the last
        check."""
        if self._has_moved:
            self._moved_at, self._has_moved = self._clock(), False
        return self._clock() - self._moved_at if self._moving else 0.0

    @property
    def idle_s(self) -> float:
        """The seconds for which the peer has held states open without asking for any of their
        chunks."""
        return self._clock() - self._used_at if self._held and not self.running else 0.0

    def add(self, source: Source, uid: str, *, is_near: bool = False) -> int:
        """Hold a source open; it is closed with the handle, or with the session. ``is_near``: the
        peer has its addresses in memory.

        :raises InvalidInput: the peer holds too many already.
        """
        if len(self._held) >= HANDLES:
            raise InvalidInput(
                f"{self._peer} holds {HANDLES} states open: release one of them first"
            )
        handle, self._next = self._next, self._next + 1
        self._held[handle] = _OpenSource(
            source,
            uid,
            tuple(source.lengths),
            digest_of([memoryview(source.manifest)]),
            is_near=is_near,
        )
        loop = asyncio.get_running_loop()

        def recall() -> None:
            with suppress(RuntimeError):  # the loop has ended, and its sources with it
                loop.call_soon_threadsafe(self._take_back, handle)

        source.when_wanted(recall)
        self._used_at = self._clock()
        return handle

    def want(self, want: Want) -> bool:
        """Send chunks, in a new task. Returns whether one of them is requested for the first time.

        :raises PeerFault: there is no such chunk, it has another length, or too many requests are
            under way.
        """
        self._plane.follow(want.generation)
        if want.handle >= self._next:
            raise PeerFault(
                f"{self._peer} wants a chunk under handle {want.handle}, which it was never given"
            )
        if self.running + len(self._refusals) >= WANTS:
            raise PeerFault(f"{self._peer} has more than {WANTS} requests for chunks under way")
        held = self._held.get(want.handle)
        if held is None or held.is_released:
            refusal = asyncio.create_task(self._gone(want, Closed(_CLOSED)))
            self._refusals.add(refusal)
            refusal.add_done_callback(self._refusals.discard)
            return False
        messages = list(self._messages(held, want))
        self._used_at = self._clock()
        if not self.is_draining:
            send = asyncio.create_task(self._send(held, want, messages))
            held.sends[send] = want
            send.add_done_callback(held.sends.pop)
        is_new = not held.wanted.issuperset(want.indexes)
        held.wanted.update(want.indexes)
        return is_new

    async def digests(self, question: Digests) -> bytes:
        """The digests that the chunks of a state should have, one after the other.

        :raises PeerFault: there never was such a handle or chunk.
        :raises Closed: it was released.
        """
        if question.handle >= self._next:
            raise PeerFault(
                f"{self._peer} requested digests under handle {question.handle}, which it was never"
                " given"
            )
        held = self._held.get(question.handle)
        if held is None or held.is_released:
            raise Closed(_CLOSED)
        if max(question.indexes) >= len(held.lengths):
            raise PeerFault(
                f"{self._peer} requested the digest of chunk {max(question.indexes)} of"
                f" {len(held.lengths)}"
            )
        self._used_at = self._clock()
        await _settled(held)
        # one for each thread
        parts = [question.indexes[n::_AT_ONCE] for n in range(_AT_ONCE)]
        reads = [
            asyncio.create_task(self._digests.of(held.state, part, held.source)) for part in parts
        ]
        held.reads.update(reads)
        found = [b""] * len(question.indexes)
        try:
            for n, digests in enumerate(await asyncio.gather(*reads)):
                found[n::_AT_ONCE] = digests
        finally:
            for read in reads:
                read.cancel()
            await asyncio.wait(reads)
            held.reads.difference_update(reads)
        self._used_at = self._clock()
        return b"".join(found)

    def took(self, took: Took) -> None:
        """Note that the peer has read chunks directly from memory.

        :raises PeerFault: there never was such a handle.
        """
        if took.handle >= self._next:
            raise PeerFault(
                f"{self._peer} has read a state under handle {took.handle}, which it was never"
                " given"
            )
        self._used_at = self._clock()
        self._sent.chunks += took.chunks
        self._sent.bytes += took.bytes
        if (held := self._held.get(took.handle)) is not None:
            self._sent.states[held.uid] += took.bytes

    async def release(self, handle: int, generation: int = 0) -> None:
        """Release a state. Sends under way may finish shortly, else the data plane is reset.

        :raises PeerFault: there never was such a handle.
        """
        if handle >= self._next:
            raise PeerFault(f"{self._peer} releases handle {handle}, which it was never given")
        self._plane.follow(generation)
        held = self._held.get(handle)
        if held is None or held.is_released:
            return
        held.is_released = True
        if held.sends:
            await asyncio.wait(held.sends, timeout=_FINISH_S)
        cut_off = list(held.sends.values())
        await self._close(held)
        self._held.pop(handle, None)
        for want in cut_off:
            await self._gone(want, Closed(_CLOSED))

    def _take_back(self, handle: int) -> None:
        """Begin to give back the memory of a state, which its owner needs."""
        held = self._held.get(handle)
        if held is None or held.is_released or held.recall is not None:
            return
        self._sent.recalled += 1
        error = Unavailable(
            f"state {held.uid[:10]} had to leave memory while it was cloned, as the training that"
            " is served needed it: clone again, or a state that is durable"
        )
        if held.is_near:
            self.end(error)
        else:
            held.recall = asyncio.create_task(self._recall(held, error))

    async def _recall(self, held: _OpenSource, error: DatastatesError) -> None:
        """Stop its sends; the peer may ask for the chunks again if the state can be read on from
        elsewhere."""
        cut_off = await _cut_off(held)
        if held.reads:
            await asyncio.wait(held.reads)  # a few ms
        try:
            goes_on = await asyncio.to_thread(held.source.recall)
        except Exception:  # a store may fail in any way; the connection continues
            _logger.exception("state %s could not be let go", held.uid)
            goes_on = False
        held.error = None if goes_on else error
        why = Disconnected("the state is read on from disk") if goes_on else error
        for want in cut_off:
            await self._gone(want, why, is_link=goes_on)

    async def drain(self, grace_s: float) -> None:
        """Begin no more chunks, and wait for those under way."""
        self.is_draining = True
        if sends := [task for held in self._held.values() for task in held.sends]:
            await asyncio.wait(sends, timeout=grace_s)

    async def close(self) -> None:
        """Close every source; the plane was closed before."""
        for task in list(self._refusals):
            task.cancel()
        await asyncio.gather(
            *self._refusals,
            *(self._close(held) for held in list(self._held.values())),
            return_exceptions=True,
        )
        self._held.clear()

    def _messages(self, held: _OpenSource, want: Want) -> Iterator[tuple[int, int, Sequence[int]]]:
        """The tag of the first piece, the index and the lengths of the pieces of each chunk."""
        first = 0
        for index in want.indexes:
            length = held.lengths[index] if index < len(held.lengths) else -1
            end, size = first, 0
            while end < len(want.pieces) and size < max(length, 1):
                end, size = end + 1, size + want.pieces[end]
            if size != length:
                had = f"is none of {len(held.lengths)}" if length < 0 else f"has {length} bytes"
                raise PeerFault(
                    f"{self._peer} wants {size} bytes of chunk {index} of state {held.uid},"
                    f" which {had}"
                )
            yield want.tag + first, index, want.pieces[first:end]
            first = end
        if first != len(want.pieces):
            raise PeerFault(
                f"{self._peer} wants {len(want.pieces)} pieces of chunks that have {first}"
            )

    async def _send(
        self, held: _OpenSource, want: Want, messages: Sequence[tuple[int, int, Sequence[int]]]
    ) -> None:
        link: Link | None = None
        is_read = False
        sending = deque[asyncio.Future[Any]]()
        try:
            for tag, index, sizes in messages:
                is_read = False
                pieces = await _read(held, index)
                is_read = True
                if link is None:
                    link = await self._plane.link(want.generation)
                sending.append(self._hand_over(held, link, tag, cut(pieces, sizes)))
                if len(sending) >= _AHEAD:
                    await sending.popleft()
            while sending:
                await sending.popleft()
        except asyncio.CancelledError:
            if link is not None:
                # the pieces may still be under way on it; the current link may be another one
                await self._plane.drop(link)
            raise
        except Exception as exc:
            # report any error to the peer, which waits for the chunk
            if link is not None or want.generation == self._plane.generation:
                await self._plane.drop(link)
            await self._gone(want, exc, is_link=is_read and isinstance(exc, Disconnected))

    def _hand_over(
        self, held: _OpenSource, link: Link, tag: int, pieces: Sequence[memoryview]
    ) -> asyncio.Future[Any]:
        """Begin to send a chunk in as many messages as the peer waits for."""
        if not self._moving:
            self._moved_at = self._clock()
        self._moving += 1
        sending = link.send_all(tag, pieces, self._move)
        sending.add_done_callback(
            partial(self._on_sent, held, sum(piece.nbytes for piece in pieces))
        )
        return sending

    def _on_sent(self, held: _OpenSource, size: int, sending: asyncio.Future[Any]) -> None:
        self._moving -= 1
        mark_retrieved(sending)
        if sending.cancelled() or sending.exception() is not None:
            return
        self._moved_at = self._used_at = self._clock()
        self.bytes += size
        self._sent.bytes += size
        self._sent.chunks += 1
        self._sent.states[held.uid] += size

    def _move(self, number: int) -> None:
        """Note that a piece has left; called on any thread."""
        self._has_moved = True

    async def _gone(self, want: Want, error: BaseException, *, is_link: bool = False) -> None:
        with suppress(DatastatesError):  # the session is over, and the chunk is not awaited
            await self._post(Gone(want.tag, describe(error), self._plane.generation, is_link))

    async def _close(self, held: _OpenSource) -> None:
        if held.recall is not None:
            await asyncio.wait({held.recall})
        await _cut_off(held)
        if held.reads:
            for read in held.reads:
                read.cancel()
            await asyncio.wait(held.reads)
        try:
            await finish(asyncio.ensure_future(asyncio.to_thread(held.source.close)))
        except Exception:  # a store may fail in any way; the connection continues
            _logger.exception("state %s could not be let go", held.uid)


async def _cut_off(held: _OpenSource) -> list[Want]:
    """Stop all sends under way; returns what they were."""
    cut_off = list(held.sends.values())
    if held.sends:
        for task in held.sends:
            task.cancel()
        await asyncio.wait(held.sends)
    return cut_off


async def _settled(held: _OpenSource) -> None:
    """Wait until it is known where a state is now.

    :raises Unavailable: its memory was wanted back, and it is nowhere else.
    """
    if held.recall is not None:
        await asyncio.shield(held.recall)
    if held.error is not None:
        raise again(held.error)


async def _read(held: _OpenSource, index: int) -> Sequence[memoryview]:
    """The pieces of a chunk, from where the state now is."""
    await _settled(held)
    pieces = await held.source.chunk(index)
    found = sum(piece.nbytes for piece in pieces)
    if found != held.lengths[index]:
        raise Corrupt(
            f"chunk {index} of state {held.uid} should have {held.lengths[index]} bytes, and"
            f" {found} are here"
        )
    return pieces


# The chunks that were requested on one session.


_REQUESTS = WANTS // 4  # at once: the sender notes later than the receiver that one is done
_WORD_S = 0.1
_TRIES = 4  # each over a new link


class _Broken(Exception):
    """The link broke; the chunk itself is fine."""

    def __init__(self, error: DatastatesError) -> None:
        super().__init__(str(error))
        self.error = error


class ChunkReceiver:
    """The chunks that were requested on one session."""

    def __init__(
        self, plane: Plane, post: Callable[[Message], Awaitable[None]], clock: Callable[[], float]
    ) -> None:
        self._plane, self._post, self._clock = plane, post, clock
        self._room = asyncio.Semaphore(_REQUESTS)
        self._wanted: dict[int, tuple[asyncio.Future[Any], asyncio.Future[Gone]]] = {}
        self._tags, self._count = secrets.randbits(31) << 32, 0
        self._moved_at, self._has_moved = clock(), False
        self._claimed = 0
        self.bytes_wanted = 0

    @property
    def stalled_s(self) -> float:
        """The seconds for which no byte of the requested chunks has come, as of the last check."""
        if self._has_moved:
            self._moved_at, self._has_moved = self._clock(), False
        return self._clock() - self._moved_at if self._wanted else 0.0

    async def receive(
        self, handle: int, chunks: Mapping[int, Destination], arrived: Callable[[int], None]
    ) -> None:
        """Receive chunks: first the receives are posted, then the request is sent. ``arrived`` is
        called on any thread with the index of each chunk that is there.

        If the link breaks while the session is open, the chunks that have not arrived are requested
        again over a new link. UCX may take down a new connection together with one that either end
        closes at that moment.
        """
        for index, into in chunks.items():
            if not isinstance(into, OnDevice) and len(into) > PIECES:
                raise InvalidInput(
                    f"chunk {index} is to be received in {len(into)} pieces: at most {PIECES} can"
                    " be requested"
                )
        waiting = dict(chunks)

        def is_here(index: int) -> None:
            del waiting[index]
            arrived(index)

        async with self._room:
            for left in reversed(range(_TRIES)):
                link = await self._plane.link()
                try:
                    await self._receive(link, handle, dict(waiting), is_here)
                except _Broken as broken:
                    if not left:
                        raise broken.error from None
                    _logger.info(
                        "%d chunks are requested again over a new link: %s",
                        len(waiting),
                        broken.error,
                    )
                else:
                    return

    async def _receive(
        self,
        link: Link,
        handle: int,
        chunks: Mapping[int, Destination],
        arrived: Callable[[int], None],
    ) -> None:
        pieces = [
            (index, piece)
            for index, into in chunks.items()
            for piece in ([into] if isinstance(into, OnDevice) else into)
        ]
        left = Counter(index for index, _ in pieces)
        lock = threading.Lock()

        def moved(first: int, number: int) -> None:
            self._has_moved = True
            index = pieces[first + number][0]
            with lock:
                left[index] -= 1
                is_here = not left[index]
            if is_here:
                arrived(index)

        tag = self._take_tags(len(pieces))
        gone: asyncio.Future[Gone] = asyncio.get_running_loop().create_future()
        here = _post_receives(link, tag, [piece for _, piece in pieces], moved)
        sizes = tuple(piece.nbytes for _, piece in pieces)
        want = Want(handle, tuple(chunks), tag, sizes, self._plane.generation)
        try:
            await link.posted()
            if not self._wanted:
                self._moved_at = self._clock()
            self._wanted[tag] = here, gone
            self.bytes_wanted += sum(want.pieces)
            await self._post(want)
            await _outcome(here, gone)
        except BaseException:
            await self._take_back(link, here)
            raise
        finally:
            self._wanted.pop(tag, None)

    def gone(self, message: Gone) -> None:
        """Note that the peer will not send the chunks of a request."""
        self._plane.follow(message.generation)
        here, gone = self._wanted.get(message.tag, (None, None))
        if here is not None and gone is not None and not gone.done():
            gone.set_result(message)
            here.cancel()

    def claim(self, sent: int) -> bool:
        """Check the number of bytes that the peer claims to have sent; False if it cannot be true.
        The claim does not count as progress."""
        if not self._claimed <= sent <= self.bytes_wanted:
            return False
        self._claimed = sent
        return True

    def _take_tags(self, count: int) -> int:
        if self._count + count >= 1 << 32:
            self._count = 0
        first, self._count = self._count, self._count + count
        return self._tags | first

    async def _take_back(self, link: Link, here: asyncio.Future[Any]) -> None:
        """Give the buffers back to the caller: only a dropped link is certain not to write to
        them."""
        try:
            await self._plane.drop(link)
        finally:
            here.cancel()
            await asyncio.gather(here, return_exceptions=True)


def _post_receives(
    link: Link,
    tag: int,
    pieces: Sequence[memoryview | OnDevice],
    moved: Callable[[int, int], None],
) -> asyncio.Future[Any]:
    """Begin to receive each piece. ``moved`` gets two numbers, whose sum is the piece's."""
    first, begun = 0, list[asyncio.Future[Any]]()
    for where, group in groupby(pieces, _device_of):
        together = list(group)
        begun.append(
            link.receive_all(tag + first, together, partial(moved, first))  # type: ignore[arg-type]
            if where is None
            else link.receive_there(tag + first, together, partial(moved, first))  # type: ignore[arg-type]
        )
        first += len(together)
    return begun[0] if len(begun) == 1 else asyncio.gather(*begun)


def _device_of(piece: memoryview | OnDevice) -> object:
    return piece.memory.device if isinstance(piece, OnDevice) else None


async def _outcome(here: asyncio.Future[Any], gone: asyncio.Future[Gone]) -> None:
    """Wait until every piece is here, or one fails, or the peer reports that they will not come."""
    try:
        await here
    except asyncio.CancelledError:
        caller = asyncio.current_task()
        if not gone.done() or (caller is not None and caller.cancelling()):
            raise
    except DatastatesError as exc:
        # the peer's own message is more precise than a broken link
        await asyncio.wait({gone}, timeout=_WORD_S)
        if not gone.done():
            if isinstance(exc, Disconnected):
                raise _Broken(exc) from exc
            raise
    else:
        return
    error = revive(gone.result().failure)
    raise _Broken(error) if gone.result().is_link else error
