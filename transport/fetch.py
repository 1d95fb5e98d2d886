"""One clone: chunks from feeds into a sink.

``fetch_schedule`` decides, this module acts. All but ``Sink.accept`` runs on the loop thread."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial

import msgspec

from datastates.errors import Corrupt, DatastatesError, Disconnected, InvalidInput, Unavailable
from datastates.system.failures import again, describe, revive
from datastates.system.logs import RateLimitFilter

from .contract import Destination, Feed, OnDevice, Sink
from .data_plane import finish, mark_retrieved
from .fetch_schedule import (
    Absent,
    Accepted,
    Done,
    Drop,
    Event,
    Freed,
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
from .protocol import CHUNKS, DIGESTS
from .sending import DAMAGED, digest_of

_FIRST_BATCH = CHUNKS  # chunks in the first request for digests

OriginDigest = tuple[Feed, bytes] | DatastatesError
"""A digest with the feed that sent it, or the error that kept every feed from sending it."""


class OriginDigests:
    """Digests of chunks, in the ``order`` in which these will come. Belongs to the loop thread.

    ``origins`` returns the feeds that can give digests now, the best first. If one cannot answer,
    the next is used. ``on_digests`` is called with the outcome for each chunk.
    """

    def __init__(
        self,
        order: Sequence[int],
        origins: Callable[[], Sequence[Feed]],
        on_digests: Callable[[Mapping[int, OriginDigest]], None],
    ) -> None:
        self._batches = list[Sequence[int]]()
        self._place = dict[int, int]()
        start, size = 0, _FIRST_BATCH
        while start < len(order):
            batch = order[start : start + size]
            self._place |= dict.fromkeys(batch, len(self._batches))
            self._batches.append(batch)
            start, size = start + size, DIGESTS
        self._origins, self._on_digests = origins, on_digests
        self._next = 0
        self._asking: set[asyncio.Task[None]] = set()

    def ahead(self, index: int) -> None:
        """Request the digest of a chunk that is being fetched, and the digests of the next ones."""
        while self._next < min(self._place[index] + 2, len(self._batches)):
            task = asyncio.create_task(self._ask(self._batches[self._next]))
            self._next += 1
            self._asking.add(task)
            task.add_done_callback(self._asking.discard)

    async def close(self) -> None:
        """Ask nothing more."""
        for task in self._asking:
            task.cancel()
        if self._asking:
            await asyncio.wait(self._asking)

    async def _ask(self, batch: Sequence[int]) -> None:
        left, asked = list(batch), list[Feed]()
        error: DatastatesError = Disconnected(
            "no source is left that has the digests of the chunks"
        )
        while (
            left
            and (origin := next((each for each in self._origins() if each not in asked), None))
            is not None
        ):
            asked.append(origin)
            try:
                found = dict(zip(left, await origin.digests(left), strict=True))
            except DatastatesError as exc:
                error = exc
                continue
            left = [index for index, digest in found.items() if digest == DAMAGED]
            self._on_digests({index: (origin, found[index]) for index in found.keys() - set(left)})
            if left:
                error = Corrupt(
                    f"chunk {left[0]} is damaged at {origin.name}: clone from another peer"
                )
        self._on_digests(dict.fromkeys(left, error))


_THREADS = 2
_TICK_S = 0.1
_AT_ONCE = 8  # how many verdicts wake the loop together
_WINDOW = 8  # chunks that a feed of several has under way; a feed that is alone has two requests
_UNITS = 4  # a feed that is alone brings the chunks in at least so many units
_UNITS_OF_MANY = 50  # a feed of several, since they divide the units by their speed
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
    window: int | None = None,
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
    :param window: How many chunks of 4 MiB each feed has under way, by default 8. A feed that is
        alone has 64.
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
    if window is not None and window < 1:
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
    window: int | None = None,
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


@dataclass(slots=True, eq=False)
class _Unit:
    """Chunks that are requested together. ``left`` are those that were not accepted yet. The other
    attributes are about the present request.

    ``buffers`` has the chunks without a verdict. ``waiting`` counts those that have not arrived,
    ``checking`` those that are being checked; the lock of ``_Run`` guards both. ``rechecking``
    counts the wrong chunks whose digests are requested from the feed."""

    left: list[int]
    feed: int = 0
    is_origin: bool = False
    buffers: dict[int, Destination] = field(default_factory=dict)
    waiting: int = 0
    checking: int = 0
    rechecking: int = 0
    task: asyncio.Task[None] | None = None
    is_over: bool = False


@dataclass(frozen=True, slots=True)
class _Checked:
    """The outcome for a chunk. ``expected`` is the digest with which it was compared, and the feed
    that sent this digest."""

    unit: _Unit
    index: int
    expected: tuple[Feed, bytes] | None
    done: Future[_Verdict]


class _Run:
    """The tasks, threads and errors of one ``fetch``."""

    def __init__(
        self,
        sink: Sink,
        missing: tuple[int, ...],
        expected: int,
        *,
        origin: Feed | None,
        window: int | None,
        timeout_s: float,
        on_progress: Callable[[int, int], None] | None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._clock = self._loop.time
        self._began = self._clock()
        self._sink, self._lengths = sink, sink.lengths
        is_one = expected <= 1
        window = (2 * CHUNKS if is_one else _WINDOW) if window is None else window
        least = _UNITS if is_one else _UNITS_OF_MANY * expected
        size = max(1, min(CHUNKS, window // 2, len(missing) // least))
        self._units = [_Unit(list(missing[at : at + size])) for at in range(0, len(missing), size)]
        self._schedule = Schedule(
            range(len(self._units)),
            window=window // size,
            expected=expected,
            timeout_s=timeout_s,
            now=self._began,
            backlog=max(1, _WINDOW // size),
        )
        self._bytes_done, self._bytes_total = 0, sum(self._lengths[index] for index in missing)
        self._chunks = 0
        self._on_progress = on_progress
        self._feeds: dict[int, Feed] = {}
        self._errors: dict[int, BaseException] = {}
        self._bytes: Counter[str] = Counter()
        self._threads = ThreadPoolExecutor(_THREADS, "datastates-verify")
        self._connecting: set[asyncio.Future[Feed]] = set()
        self._flying: dict[int, _Unit] = {}
        self._lock = threading.Lock()
        self._expected: dict[int, OriginDigest] = {}
        self._without_digest: dict[int, _Unit] = {}
        self._verdicts: list[_Checked] = []
        self._origin = origin
        self._digests = OriginDigests(missing, self._origins, self._on_digests)
        self._rechecking: set[asyncio.Task[None]] = set()
        self._is_full = self._is_stopping = False
        self._is_quiet = asyncio.Event()
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
        with self._lock:
            self._is_stopping = True
            for unit in self._without_digest.values():
                unit.checking -= 1
        if self._timer is not None:
            self._timer.cancel()
        for future in self._connecting:
            future.cancel()
        for unit in self._flying.values():
            if unit.task is not None:
                unit.task.cancel()
        for confronting in self._rechecking:
            confronting.cancel()
        await self._digests.close()
        self._settle()
        while self._connecting or self._flying:
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
        refused, split = list[Start](), None
        try:
            for action in self._schedule.handle(event):
                match action:
                    case Start() if refused or split is not None:
                        refused.append(action)
                    case Start(number, unit):
                        buffers = self._buffers(number, self._units[unit])
                        if not buffers:
                            refused.append(action)
                            continue
                        split = self._split(unit, len(buffers))
                        self._start(number, unit, buffers)
                    case Drop(number):
                        self._drop(number)
                    case Done():
                        self.end.set_result(None)
                    case Refuse() | GiveUp() | Stuck():
                        self.end.set_exception(self._failure(action))
        except Exception as exc:  # ``fetch`` raises it, whatever it is
            self._fail(exc)
        if refused or split is not None:
            self._is_full = True
            self._handle(NoRoom(tuple(refused), self._clock(), split))

    def _buffers(self, number: int, unit: _Unit) -> dict[int, Destination]:
        """The memory for the first chunks of a unit, as many as there is memory for.

        A chunk goes to a device only if its bytes are the origin's own, because the host does not
        look at them."""
        feed = self._feeds[number]
        is_there = feed.reaches_devices and feed.is_bound and self._is_origin(number)
        found, into = dict[int, Destination](), None
        try:
            for index in unit.left:
                there = self._sink.device_buffer(index) if is_there else None
                if there is None and into is not None and isinstance(into, OnDevice):
                    break  # the device may have memory for it later
                into = self._sink.buffers(index) if there is None else there
                if into is None:
                    break
                found[index] = into
        except BaseException:
            for index in found:
                self._forget(index)
            raise
        return found

    def _split(self, number: int, count: int) -> tuple[int, int] | None:
        """Make a new unit of all but the first ``count`` chunks of a unit, if there are more."""
        unit = self._units[number]
        if count == len(unit.left):
            return None
        self._units.append(_Unit(unit.left[count:]))
        del unit.left[count:]
        return number, len(self._units) - 1

    def _start(self, number: int, place: int, buffers: dict[int, Destination]) -> None:
        feed, left = self._feeds[number], self._units[place].left
        unit = self._units[place] = self._flying[place] = _Unit(
            left, number, self._is_origin(number), buffers, waiting=len(buffers)
        )
        if not (feed.is_bound and unit.is_origin):
            self._ask_ahead(left[-1])
        unit.task = self._loop.create_task(
            feed.receive(dict(buffers), partial(self._on_arrived, unit))
        )
        unit.task.add_done_callback(partial(self._on_received, place, unit))

    def _drop(self, number: int) -> None:
        for unit in self._flying.values():
            if unit.feed == number and unit.task is not None:
                unit.task.cancel()

    def _ask_ahead(self, index: int) -> None:
        if not self._is_stopping:
            self._digests.ahead(index)

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

    def _on_arrived(self, unit: _Unit, index: int, is_bound: bool) -> None:
        """Have a chunk checked as soon as its digest is known; on any thread."""
        expected: OriginDigest | None = None
        with self._lock:
            if self._is_stopping:
                return
            unit.waiting -= 1
            is_sure = is_bound and unit.is_origin
            if not is_sure and (expected := self._expected.get(index)) is None:
                self._without_digest[index] = unit
            unit.checking += 1
        if is_sure or expected is not None:
            self._check(unit, index, expected)
        else:
            self._loop.call_soon_threadsafe(self._ask_ahead, index)

    def _on_digests(self, found: Mapping[int, OriginDigest]) -> None:
        with self._lock:
            if self._is_stopping:
                return
            self._expected |= found
            ready = [
                (index, self._without_digest.pop(index))
                for index in found
                if index in self._without_digest
            ]
        for index, unit in ready:
            self._check(unit, index, found[index])

    def _check(self, unit: _Unit, index: int, expected: OriginDigest | None) -> None:
        future = self._threads.submit(self._verify, index, unit.buffers[index], expected)
        compared = None if isinstance(expected, DatastatesError) else expected
        future.add_done_callback(lambda done: self._verified(_Checked(unit, index, compared, done)))

    def _verify(self, index: int, received: Destination, expected: OriginDigest | None) -> _Verdict:
        """Verify a chunk in a thread: first the digest that cannot be forged, then the sink's
        own, which guards against rot."""
        if isinstance(expected, DatastatesError):
            raise again(expected)
        if expected is not None:
            assert not isinstance(received, OnDevice), "only the origin's own bytes go to a device"
            if digest_of(received) != expected[1]:
                self._sink.forget(index)
                return _Verdict.OTHER
        return _Verdict.RIGHT if self._sink.accept(index) else _Verdict.WRONG

    def _verified(self, checked: _Checked) -> None:
        """Wake the loop for several verdicts at once, unless something waits for this one; runs in
        a thread."""
        unit = checked.unit
        with self._lock:
            self._verdicts.append(checked)
            unit.checking -= 1
            is_last = unit.checking == 0 and (unit.is_over or unit.waiting == 0)
            is_due = is_last or self._is_full or len(self._verdicts) >= _AT_ONCE
        if is_due:
            self._loop.call_soon_threadsafe(self._settle)

    def _on_received(self, place: int, unit: _Unit, task: asyncio.Task[None]) -> None:
        unit.is_over = True
        if not task.cancelled() and task.exception() is None:
            self._handle(Received(unit.feed, place, self._clock()))
        self._settle()

    def _settle(self) -> None:
        """Act on the verdicts, and on units about which nothing more is to come."""
        with self._lock:
            verdicts, self._verdicts = self._verdicts, []
            over = [
                (place, unit)
                for place, unit in self._flying.items()
                if unit.is_over and not unit.checking
            ]
        for checked in verdicts:
            self._on_checked(checked)
        if verdicts and self._is_full:
            self._is_full = False
            self._handle(Freed(self._clock()))
        for place, unit in over:
            if not unit.rechecking and self._flying.get(place) is unit:
                del self._flying[place]
                self._on_settled(place, unit)
        self._look()

    def _on_checked(self, checked: _Checked) -> None:
        unit, index, expected = checked.unit, checked.index, checked.expected
        feed = self._feeds[unit.feed]
        if (error := checked.done.exception()) is not None:
            self._fail(error)
            return
        del unit.buffers[index]
        if checked.done.result() is _Verdict.RIGHT:
            unit.left.remove(index)
            self._count(feed.name, self._lengths[index])
            return
        _logger.warning("chunk %d came from %s with a wrong digest", index, feed.name)
        is_other = checked.done.result() is _Verdict.OTHER
        if is_other and expected is not None and expected[0] is not feed and not self._is_stopping:
            unit.rechecking += 1
            task = self._loop.create_task(self._check_with_feed(feed, index, *expected))
            self._rechecking.add(task)
            task.add_done_callback(partial(self._on_rechecked, unit))

    def _on_settled(self, place: int, unit: _Unit) -> None:
        assert unit.task is not None, "it was begun"
        for index in unit.buffers:
            self._forget(index)
        now, number, task = self._clock(), unit.feed, unit.task
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if not unit.left:
            if error is not None:
                self._handle(Received(number, place, now))
            self._handle(Accepted(place, now))
        elif error is None:
            self._handle(Refuted(place, now))
        elif task.cancelling():
            self._handle(Returned(number, place, now))
        else:
            self._errors.setdefault(number, _named(self._feeds[number].name, error))
            self._handle(Lost(number, place, now))

    async def _check_with_feed(self, feed: Feed, index: int, origin: Feed, wanted: bytes) -> None:
        """Compare a feed's own digest of a chunk with the digest of the origin.

        :raises Corrupt: they differ.
        """
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

    def _on_rechecked(self, unit: _Unit, task: asyncio.Task[None]) -> None:
        self._rechecking.discard(task)
        unit.rechecking -= 1
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)
        self._settle()

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
        try:
            self._sink.forget(index)
        except Exception as exc:  # ``fetch`` raises it
            self._fail(exc)

    def _fail(self, error: BaseException) -> None:
        if not self.end.done():
            self.end.set_exception(error)

    def _look(self) -> None:
        if not (self._connecting or self._flying):
            self._is_quiet.set()

    def _tick(self) -> None:
        self._timer = self._loop.call_later(_TICK_S, self._tick)
        self._settle()
        self._handle(Tick(self._clock()))

    def _failure(self, action: Refuse | GiveUp | Stuck) -> BaseException:
        match action:
            case Refuse(unit, numbers):
                names = " and then from ".join(self._feeds[number].name for number in numbers)
                return Corrupt(
                    f"chunk {self._units[unit].left[0]} came from {names}, and failed its digest"
                    " both times: clone from another peer; the rest is kept"
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
