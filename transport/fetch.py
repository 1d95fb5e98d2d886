"""One clone: chunks from feeds into a sink.

``fetch_schedule`` decides, this module acts. All but ``Sink.accept`` runs on the loop thread."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from typing import Any

import msgspec

from datastates.errors import Corrupt, DatastatesError, Disconnected, InvalidInput, Unavailable
from datastates.system.failures import describe, revive
from datastates.system.logs import RateLimitFilter

from .contract import Feed, Sink
from .data_plane import finish, mark_retrieved
from .fetch_schedule import (
    Absent,
    Accepted,
    Done,
    Drop,
    Event,
    GiveUp,
    Joined,
    Lost,
    NoRoom,
    Received,
    Refuse,
    Refuted,
    Returned,
    Schedule,
    Start,
    Stuck,
    Tick,
)
from .sending import DAMAGED, digest_of

_BATCH = 8  # chunks in one request; the next request is sent along with it


class OriginDigests:
    """Digests by index, in the ``order`` in which the chunks will come. Belongs to the loop thread.

    ``origins`` returns the feeds that can give digests now, the best first. If one cannot answer,
    the next is used.
    """

    def __init__(self, order: Sequence[int], origins: Callable[[], Sequence[Feed]]) -> None:
        self._batches = [
            tuple(order[start : start + _BATCH]) for start in range(0, len(order), _BATCH)
        ]
        self._place = {
            index: number for number, batch in enumerate(self._batches) for index in batch
        }
        self._origins = origins
        self._told: dict[int, asyncio.Future[tuple[Feed, bytes]]] = {}
        self._asking: set[asyncio.Task[None]] = set()

    def ahead(self, index: int) -> None:
        """Request the digest of a chunk that is being fetched, and the digests of the next ones."""
        for number in (self._place[index], self._place[index] + 1):
            if number < len(self._batches) and self._batches[number][0] not in self._told:
                self._ask(self._batches[number])

    def of(self, index: int) -> asyncio.Future[tuple[Feed, bytes]]:
        """The digest of a chunk, with the origin that gave it; fails if no origin can."""
        self.ahead(index)
        return self._told[index]

    async def close(self) -> None:
        """Ask nothing more; waiting callers are cancelled."""
        for task in self._asking:
            task.cancel()
        for told in self._told.values():
            told.cancel()
        if self._asking:
            await asyncio.wait(self._asking)

    def _ask(self, batch: tuple[int, ...]) -> None:
        loop = asyncio.get_running_loop()
        for index in batch:
            self._told[index] = told = loop.create_future()
            told.add_done_callback(mark_retrieved)  # the chunk may never come
        task = asyncio.create_task(self._hear(batch))
        self._asking.add(task)
        task.add_done_callback(self._asking.discard)

    async def _hear(self, batch: tuple[int, ...]) -> None:
        left, asked = list(batch), list[Feed]()
        error: BaseException = Disconnected("no source is left that has the digests of the chunks")
        while (
            left
            and (origin := next((each for each in self._origins() if each not in asked), None))
            is not None
        ):
            asked.append(origin)
            try:
                said = await origin.digests(left)
            except DatastatesError as exc:
                error = exc
                continue
            for index, digest in zip(list(left), said, strict=True):
                if digest == DAMAGED:
                    error = Corrupt(
                        f"chunk {index} is damaged at {origin.name}: clone from another peer"
                    )
                    continue
                left.remove(index)
                if not self._told[index].done():
                    self._told[index].set_result((origin, digest))
        for index in left:
            if not self._told[index].done():
                self._told[index].set_exception(error)


_THREADS = 2
_TICK_S = 0.1
_AT_ONCE = 3  # how many verdicts wake the loop together
_logger = logging.getLogger(__name__)
_logger.addFilter(RateLimitFilter())


@dataclass(frozen=True, slots=True)
class Fetched:
    """The result of a clone: the accepted bytes by the name of their feed, and why feeds were
    lost on the way."""

    bytes_by_feed: Mapping[str, int]
    chunks: int
    seconds: float
    lost: Mapping[str, BaseException]


async def fetch(
    sink: Sink,
    feeds: Sequence[Feed],
    *,
    late: Sequence[Awaitable[Feed]] = (),
    origin: Feed | None = None,
    window: int = 8,
    timeout_s: float = 10.0,
    on_progress: Callable[[int, int], None] | None = None,
) -> Fetched:
    """Fetch every chunk that is missing in ``sink`` from ``feeds`` that hold the same state.

    However this ends, the sink's buffers are not written afterwards, and accepted chunks stay
    accepted. Another call with the same sink moves only the missing chunks.

    :param late: Feeds that are still being connected; each must come or fail in time.
        They are cancelled when they are no longer needed.
    :param origin: The feed whose digests count, whichever feed brings the chunks.
        By default it is the first of ``feeds``, and when that fails the next one.
    :param window: How many chunks each feed has under way.
    :param timeout_s: How long the sink may be full while nothing is under way. A feed detects a
        silent peer itself.
    :param on_progress: Called on the loop thread with the bytes that were accepted and the total
        that this call is to fetch.
    :raises Corrupt: a chunk came with a wrong digest twice, or two feeds disagree about what it is.
    :raises DatastatesError: the error of the last feed, when none is left.
    """
    missing = tuple(dict.fromkeys(sink.missing()))
    if missing and not feeds and not late:
        raise InvalidInput(
            f"{len(missing)} chunks are missing and there is no feed to receive them from: pass at"
            " least one"
        )
    if window < 1:
        raise InvalidInput(f"a window of {window} chunks would bring none: pass at least 1")
    run = _Run(
        sink,
        missing,
        len(feeds) + len(late),
        origin=origin,
        window=window,
        timeout_s=timeout_s,
        on_progress=on_progress,
    )
    try:
        run.begin(feeds, late)
        await run.end
    finally:
        await finish(asyncio.create_task(run.stop()))
    return run.fetched()


class FetchProgress:
    """The progress of several fetches together; used on the loop thread."""

    def __init__(self, total: int, on_progress: Callable[[int, int], None] | None) -> None:
        self._total, self._done, self._on_progress = total, 0, on_progress

    def add(self, count: int) -> None:
        """Count ``count`` more bytes as received."""
        self._done += count
        if self._on_progress is not None:
            self._on_progress(self._done, self._total)


async def fetch_with_fallback(
    sink: Sink,
    feeds: Sequence[Feed],
    fallback: Callable[
        [Sequence[Feed], DatastatesError], Awaitable[tuple[Sequence[Feed], Feed | None]]
    ],
    *,
    progress: FetchProgress,
    origin: Feed | None = None,
    window: int = 8,
    timeout_s: float = 10.0,
) -> Fetched:
    """``fetch``, repeated for the missing chunks whenever it fails. ``fallback`` gets the feeds
    that failed. It returns the next feeds and their origin, or raises."""
    moved, lost = Counter[str](), dict[str, BaseException]()
    clock = asyncio.get_running_loop().time
    began = clock()
    while True:
        done = 0

        def advance(now: int, _: int) -> None:
            nonlocal done
            before, done = done, now
            progress.add(now - before)

        try:
            fetched = await fetch(
                sink,
                feeds,
                origin=origin,
                window=window,
                timeout_s=timeout_s,
                on_progress=advance,
            )
        except DatastatesError as exc:
            names = ", ".join(feed.name for feed in feeds)
            moved[names] += done
            lost[names] = exc
            feeds, origin = await fallback(feeds, exc)
        else:
            return Fetched(
                moved + Counter(fetched.bytes_by_feed),
                fetched.chunks,
                clock() - began,
                {**lost, **fetched.lost},
            )


class _Verdict(Enum):
    """The right chunk, a chunk with another digest than the origin's, or bytes that fail the
    manifest's digest."""

    RIGHT = auto()
    OTHER = auto()
    WRONG = auto()


class _Run:
    """The tasks, threads and errors of one ``fetch``."""

    def __init__(
        self,
        sink: Sink,
        missing: tuple[int, ...],
        expected: int,
        *,
        origin: Feed | None,
        window: int,
        timeout_s: float,
        on_progress: Callable[[int, int], None] | None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._clock = self._loop.time
        self._began = self._clock()
        self._sink, self._lengths = sink, sink.lengths
        self._schedule = Schedule(
            missing, window=window, expected=expected, timeout_s=timeout_s, now=self._began
        )
        self._bytes_done, self._bytes_total = 0, sum(self._lengths[index] for index in missing)
        self._chunks = 0
        self._on_progress = on_progress
        self._feeds: dict[int, Feed] = {}
        self._errors: dict[int, BaseException] = {}
        self._bytes: Counter[str] = Counter()
        self._threads = ThreadPoolExecutor(_THREADS, "datastates-verify")
        self._connecting: set[asyncio.Future[Feed]] = set()
        self._flying: dict[tuple[int, int], asyncio.Task[bool]] = {}
        self._checking: dict[int, int] = {}
        self._lock = threading.Lock()
        self._verdicts: list[tuple[int, tuple[Feed, bytes] | None, Future[_Verdict]]] = []
        self._verifying = 0
        self._buffers: dict[int, Sequence[memoryview]] = {}
        self._origin = origin
        self._digests = OriginDigests(missing, self._origins)
        self._rechecking: set[asyncio.Task[None]] = set()
        self._is_stopping, self._is_quiet = False, asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self.end: asyncio.Future[None] = self._loop.create_future()

    def begin(self, feeds: Sequence[Feed], late: Sequence[Awaitable[Feed]]) -> None:
        """Ask for the first chunks."""
        self._feeds = dict(enumerate(feeds))
        for number, awaitable in enumerate(late, len(feeds)):
            future = asyncio.ensure_future(awaitable)
            self._connecting.add(future)
            future.add_done_callback(partial(self._on_connected, number))
        self._handle(Joined(tuple(self._feeds), self._clock()))
        self._tick()

    async def stop(self) -> None:
        """Cancel everything under way, and wait until nothing is."""
        self._is_stopping = True
        if self._timer is not None:
            self._timer.cancel()
        for future in self._connecting:
            future.cancel()
        for task in self._flying.values():
            task.cancel()
        for confronting in self._rechecking:
            confronting.cancel()
        await self._digests.close()
        while self._connecting or self._flying or self._checking:
            self._is_quiet.clear()
            await self._is_quiet.wait()
        self._threads.shutdown()  # joins threads that have nothing to do
        if self.end.done():
            mark_retrieved(self.end)  # also if this was cancelled at the same moment

    def fetched(self) -> Fetched:
        """The result."""
        lost = {
            self._feeds[number].name: error
            for number, error in self._errors.items()
            if number in self._feeds
        }
        return Fetched(dict(self._bytes), self._chunks, self._clock() - self._began, lost)

    def _handle(self, event: Event) -> None:
        """Act on an event. An error in here is the sink's, or ours, and ends the clone."""
        if self._is_stopping or self.end.done():
            return
        refused: list[Start] = []
        try:
            for action in self._schedule.handle(event):
                match action:
                    case Start():
                        if refused or not self._start(action.feed, action.index):
                            refused.append(action)
                    case Drop(number):
                        self._drop(number)
                    case Done():
                        self.end.set_result(None)
                    case Refuse() | GiveUp() | Stuck():
                        self.end.set_exception(self._failure(action))
        except Exception as exc:  # ``fetch`` raises it, whatever it is
            self._fail(exc)
        if refused:
            self._handle(NoRoom(tuple(refused), self._clock()))

    def _start(self, number: int, index: int) -> bool:
        feed = self._feeds[number]
        is_sure = feed.is_bound and self._is_origin(number)
        receiving = self._receiving_there(feed, index) if is_sure else None
        if receiving is None:
            buffers = self._sink.buffers(index)
            if buffers is None:
                return False
            receiving, self._buffers[index] = feed.receive(index, buffers), buffers
        if not is_sure:
            self._digests.ahead(index)
        task = self._loop.create_task(receiving)
        self._flying[number, index] = task
        task.add_done_callback(partial(self._on_received, number, index))
        return True

    def _receiving_there(self, feed: Feed, index: int) -> Coroutine[Any, Any, bool] | None:
        """The coroutine that receives a chunk on a device, if possible; the bytes are the
        origin's own, so the host need not look at them."""
        into = self._sink.device_buffer(index) if feed.reaches_devices else None
        if into is None:
            return None
        self._buffers[index] = ()
        return feed.receive_there(index, into)

    def _drop(self, number: int) -> None:
        for (feed, _), task in self._flying.items():
            if feed == number:
                task.cancel()

    def _on_connected(self, number: int, future: asyncio.Future[Feed]) -> None:
        self._connecting.discard(future)
        error = (
            Disconnected("connecting to a further source was cancelled")
            if future.cancelled()
            else future.exception()
        )
        if error is not None:
            self._errors[number] = error
            self._handle(Absent(number, self._clock()))
        else:
            self._feeds[number] = future.result()
            self._handle(Joined((number,), self._clock()))
        self._look()

    def _on_received(self, number: int, index: int, task: asyncio.Task[bool]) -> None:
        del self._flying[number, index]
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if error is None and not self._is_stopping:
            self._checking[index] = number
            if task.result() and self._is_origin(number):
                self._check(index, None)
            else:
                self._digests.of(index).add_done_callback(partial(self._on_told, index))
            self._handle(Received(number, index, self._clock()))
            return
        self._forget(index)
        if error is None or task.cancelling():
            self._handle(Returned(number, index, self._clock()))
        else:
            self._errors.setdefault(number, _named(self._feeds[number].name, error))
            self._handle(Lost(number, index, self._clock()))
        self._look()

    def _on_told(self, index: int, told: asyncio.Future[tuple[Feed, bytes]]) -> None:
        """Take the origin's answer about a chunk that has come."""
        if not told.cancelled() and told.exception() is None and not self._is_stopping:
            self._check(index, told.result())
            return
        del self._checking[index]
        self._forget(index)
        if not told.cancelled() and (error := told.exception()) is not None:
            self._fail(error)
        self._look()

    def _check(self, index: int, told: tuple[Feed, bytes] | None) -> None:
        with self._lock:
            self._verifying += 1
        future = self._threads.submit(self._verify, index, None if told is None else told[1])
        future.add_done_callback(lambda done: self._verified(index, told, done))

    def _verified(
        self, index: int, told: tuple[Feed, bytes] | None, done: Future[_Verdict]
    ) -> None:
        """Report some verdicts to the loop at once, unless no further one is to come; runs in a
        thread."""
        with self._lock:
            self._verdicts.append((index, told, done))
            self._verifying -= 1
            is_due = len(self._verdicts) >= _AT_ONCE or not self._verifying
        if is_due:
            self._loop.call_soon_threadsafe(self._on_verified)

    def _on_verified(self) -> None:
        with self._lock:
            verdicts, self._verdicts = self._verdicts, []
        for verdict in verdicts:
            self._on_checked(*verdict)

    def _verify(self, index: int, wanted: bytes | None) -> _Verdict:
        """Verify a chunk in a thread: first the digest that cannot be forged, then the sink's
        own, which guards against rot."""
        if wanted is not None and digest_of(self._buffers[index]) != wanted:
            self._sink.forget(index)
            return _Verdict.OTHER
        return _Verdict.RIGHT if self._sink.accept(index) else _Verdict.WRONG

    def _on_checked(
        self, index: int, told: tuple[Feed, bytes] | None, future: Future[_Verdict]
    ) -> None:
        number = self._checking[index]
        del self._buffers[index]
        if (error := future.exception()) is not None:
            del self._checking[index]
            self._forget(index)
            self._fail(error)
        elif future.result() is _Verdict.RIGHT:
            del self._checking[index]
            self._count(self._feeds[number].name, self._lengths[index])
            self._handle(Accepted(index, self._clock()))
        elif (
            future.result() is _Verdict.OTHER
            and told is not None
            and told[0] is not self._feeds[number]
            and not self._is_stopping
        ):
            task = self._loop.create_task(self._check_with_feed(number, index, *told))
            self._rechecking.add(task)
            task.add_done_callback(partial(self._on_rechecked, index))
        else:
            self._refute(index)
        self._look()

    async def _check_with_feed(self, number: int, index: int, origin: Feed, wanted: bytes) -> None:
        """Compare a feed's own digest of a chunk with the digest of the origin.

        :raises Corrupt: they differ.
        """
        feed = self._feeds[number]
        try:
            (said,) = await feed.digests([index])
        except DatastatesError:
            return
        if said not in {wanted, DAMAGED}:
            raise Corrupt(
                f"{origin.name} and {feed.name} disagree about chunk {index} of the state. One of"
                " them is not honest, or damaged. The chunk was discarded: clone from the one"
                " that you trust"
            )

    def _on_rechecked(self, index: int, task: asyncio.Task[None]) -> None:
        self._rechecking.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            del self._checking[index]
            self._fail(error)
        else:
            self._refute(index)
        self._look()

    def _refute(self, index: int) -> None:
        name = self._feeds[self._checking.pop(index)].name
        _logger.warning("chunk %d came from %s with a wrong digest", index, name)
        self._handle(Refuted(index, self._clock()))

    def _origins(self) -> Sequence[Feed]:
        """The feeds whose digests may be used, the best first."""
        if self._origin is not None:
            return [self._origin]
        return [self._feeds[number] for number in sorted(self._feeds) if number not in self._errors]

    def _is_origin(self, number: int) -> bool:
        origins = self._origins()
        return bool(origins) and origins[0] is self._feeds[number]

    def _count(self, name: str, length: int) -> None:
        self._bytes[name] += length
        self._bytes_done += length
        self._chunks += 1
        if self._on_progress is None:
            return
        try:
            self._on_progress(self._bytes_done, self._bytes_total)
        except Exception:  # the caller's own function may raise anything
            _logger.exception("on_progress failed; it is not called again, the clone continues")
            self._on_progress = None

    def _forget(self, index: int) -> None:
        self._buffers.pop(index, None)
        try:
            self._sink.forget(index)
        except Exception as exc:  # ``fetch`` raises it
            self._fail(exc)

    def _fail(self, error: BaseException) -> None:
        if not self.end.done():
            self.end.set_exception(error)

    def _look(self) -> None:
        if not (self._connecting or self._flying or self._checking):
            self._is_quiet.set()

    def _tick(self) -> None:
        self._timer = self._loop.call_later(_TICK_S, self._tick)
        self._handle(Tick(self._clock()))

    def _failure(self, action: Refuse | GiveUp | Stuck) -> BaseException:
        match action:
            case Refuse(index, numbers):
                names = " and then from ".join(self._feeds[number].name for number in numbers)
                return Corrupt(
                    f"chunk {index} came from {names}, and failed its digest both times: clone from"
                    " another peer; the rest is kept"
                )
            case GiveUp(number):
                return self._errors[number]
            case Stuck(seconds):
                return Unavailable(
                    f"the destination had no room for a chunk for {seconds:.1f} s: is its memory"
                    " taken by another clone?"
                )


def _named(name: str, error: BaseException) -> BaseException:
    """The error, naming the feed: in its message if it is of our tree, else in a note."""
    if isinstance(error, asyncio.CancelledError):
        # not by us: if it were raised on, our caller would seem to be cancelled
        return Disconnected(f"{name} was closed while it was receiving")
    if not isinstance(error, DatastatesError):
        error.add_note(f"while receiving from {name}")
        return error
    if name in str(error):
        return error
    named = revive(msgspec.structs.replace(describe(error), message=f"{name}: {error}"))
    named.__cause__ = error
    return named
