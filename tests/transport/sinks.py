"""Sinks, feeds and a clock for tests of one clone: what they do is counted, and writing to
memory that was given back is found out."""

from __future__ import annotations

import asyncio
import random
import selectors
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Executor, Future
from typing import Any, TypeVar

import pytest

from datastates.errors import Disconnected
from datastates.transport import fetch
from datastates.transport.contract import Destination, Feed, OnDevice, Sink, Source
from datastates.transport.sending import digest_of

T = TypeVar("T")


def make_chunks(count: int, length: int = 64, seed: int = 0) -> list[bytes]:
    """Chunks that all differ, of about this length."""
    generator = random.Random(seed)
    return [generator.randbytes(length - index % 3) for index in range(count)]


class BytesSink(Sink):
    """Chunks in memory.

    ``room``: how many may be lent at once. A buffer is dead once it was accepted or forgotten."""

    def __init__(
        self, chunks: Sequence[bytes], *, have: Iterable[int] = (), room: int | None = None
    ) -> None:
        self.chunks, self.room = list(map(bytearray, chunks)), room
        self.lengths = tuple(map(len, chunks))
        self.data = {index: self.chunks[index] for index in have}
        self.lent: dict[int, tuple[bytearray, list[memoryview]]] = {}
        self.calls: Counter[str] = Counter()
        self.most_lent = 0
        self.checking: Callable[[int], None] = lambda index: None
        self._lock = threading.Lock()

    def missing(self) -> list[int]:
        return [index for index in range(len(self.chunks)) if index not in self.data]

    def buffers(self, index: int) -> list[memoryview] | None:
        with self._lock:
            assert index not in self.lent, f"chunk {index} is lent already"
            assert index not in self.data, f"chunk {index} is here already"
            if self.room is not None and len(self.lent) >= self.room:
                self.calls["refused"] += 1
                return None
            memory = bytearray(self.lengths[index])
            cut = self.lengths[index] // 3
            views = [memoryview(memory)[:cut], memoryview(memory)[cut:]]
            self.lent[index] = memory, views
            self.most_lent = max(self.most_lent, len(self.lent))
            return views

    def accept(self, index: int) -> bool:
        self.checking(index)
        with self._lock:
            memory = self._take_back(index)
            self.calls["accept"] += 1
            if memory != self.chunks[index]:
                return False
            self.data[index] = memory
            return True

    def forget(self, index: int) -> None:
        with self._lock:
            self._take_back(index)
            self.calls["forget"] += 1

    def pieces(self, index: int) -> list[memoryview] | None:
        return [memoryview(self.data[index])] if index in self.data else None

    def is_whole(self) -> bool:
        return (
            not self.lent
            and [self.data.get(index) for index in range(len(self.chunks))] == self.chunks
        )

    def _take_back(self, index: int) -> bytearray:
        memory, views = self.lent.pop(index)
        for view in views:
            view.release()
        return memory


class BytesFeed(Feed):
    """A peer that sends one chunk after another, ``pace_s`` seconds each.

    It fails for good at its ``dies_at``-th chunk, sends nothing from its ``stalls_at``-th on, sends
    garbage for ``wrong[index]`` times, and each message ``times`` times. Cancelling does not stop a
    transfer at once, as with a real one: ``aborts`` counts how often somebody had to wait for its
    end.
    """

    def __init__(
        self,
        name: str,
        chunks: Sequence[bytes],
        *,
        pace_s: float = 0.0,
        dies_at: int | None = None,
        stalls_at: int | None = None,
        wrong: dict[int, int] | None = None,
        times: int = 1,
    ) -> None:
        self.name, self.chunks, self.pace_s, self.dies_at, self.stalls_at, self.times = (
            name,
            chunks,
            pace_s,
            dies_at,
            stalls_at,
            times,
        )
        self.wrong = Counter(wrong or {})
        self.asked: list[int] = []
        self.sent: list[int] = []
        self.most_flying = self.aborts = self.late_writes = 0
        self._flying = 0
        self._line = asyncio.Lock()
        self._is_dead = False
        self.is_bound = True

    async def receive(
        self, chunks: Mapping[int, Destination], arrived: Callable[[int, bool], None]
    ) -> None:
        self.asked += chunks
        self._flying += len(chunks)
        self.most_flying = max(self.most_flying, self._flying)
        transfer = asyncio.create_task(self._transfer(chunks, arrived))
        try:
            await asyncio.shield(transfer)
        except asyncio.CancelledError:
            self.aborts += 1
            transfer.cancel()
            await asyncio.wait({transfer})
            raise
        finally:
            self._flying -= len(chunks)

    async def digests(self, indexes: Sequence[int]) -> list[bytes]:
        return [digest_of([memoryview(self.chunks[index])]) for index in indexes]

    async def close(self) -> None:
        """Nothing is held."""

    async def _transfer(
        self, chunks: Mapping[int, Destination], arrived: Callable[[int, bool], None]
    ) -> None:
        left = dict(chunks)
        try:
            async with self._line:
                for index, into in chunks.items():
                    assert not isinstance(into, OnDevice)
                    await self._send(index, into)
                    del left[index]
                    arrived(index, self.is_bound)
        except asyncio.CancelledError:
            await asyncio.sleep(0)  # what was on the wire still arrives
            for index, into in left.items():
                assert not isinstance(into, OnDevice)
                self._write(into, b"\xff" * len(self.chunks[index]))
            raise

    async def _send(self, index: int, buffers: Sequence[memoryview]) -> None:
        if self._is_dead or len(self.sent) == self.dies_at:
            self._is_dead = True
            raise Disconnected("the connection was reset")
        if len(self.sent) == self.stalls_at:
            await asyncio.get_running_loop().create_future()
        data = self.chunks[index]
        if self.wrong[index] > 0:
            self.wrong[index] -= 1
            data = bytes(len(data))
        half = len(buffers[0])
        for _ in range(self.times):
            self._write(buffers[:1], data[:half])
            await asyncio.sleep(self.pace_s / self.times)
            self._write(buffers[1:], data[half:])
        self.sent.append(index)

    def _write(self, buffers: Sequence[memoryview], data: bytes) -> None:
        for buffer in buffers:
            try:
                buffer[:] = data[: len(buffer)]
            except ValueError:  # it was released: somebody else may use that memory by now
                self.late_writes += 1
                return
            data = data[len(buffer) :]


class SourceFeed(Feed):
    """A peer that holds a source open for us, without a wire in between."""

    def __init__(self, name: str, source: Source) -> None:
        self.name, self.source, self.sent = name, source, 0
        self.is_killed = False
        self.is_bound = True

    async def receive(
        self, chunks: Mapping[int, Destination], arrived: Callable[[int, bool], None]
    ) -> None:
        for index, buffers in chunks.items():
            if self.is_killed:
                raise Disconnected(f"{self.name} was killed")
            data = b"".join(await self.source.chunk(index))
            await asyncio.sleep(0)
            if self.is_killed:
                raise Disconnected(f"{self.name} was killed")
            assert not isinstance(buffers, OnDevice)
            for buffer in buffers:
                buffer[:], data = data[: len(buffer)], data[len(buffer) :]
            self.sent += 1
            arrived(index, True)

    async def digests(self, indexes: Sequence[int]) -> list[bytes]:
        return [digest_of(await self.source.chunk(index)) for index in indexes]

    async def close(self) -> None:
        self.source.close()


class BytesSource(Source):
    """A state in memory, opened for sending."""

    manifest = b"manifest"

    def __init__(self, chunks: Sequence[bytes]) -> None:
        self.chunks, self.lengths = chunks, tuple(map(len, chunks))
        self.taken: Counter[int] = Counter()

    async def chunk(self, index: int) -> list[memoryview]:
        self.taken[index] += 1
        return [memoryview(self.chunks[index])]

    def close(self) -> None:
        """Nothing is held."""


class _Jumping(selectors.DefaultSelector):
    """Instead of waiting it lets the clock jump.

    The loop sees a hang as what it is: nothing will ever happen."""

    now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0)
        if not ready:
            assert timeout is not None, "nothing is scheduled: this would wait forever"
            self.now += max(timeout, 0.0)
            assert self.now < 1000, "nothing has ended for 1000 simulated seconds"
        return ready


class _Inline(Executor):
    """Works at once, so that simulated time stands still meanwhile."""

    def __init__(self, *_: object) -> None: ...

    def submit(self, work: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        future: Future[T] = Future()
        try:
            future.set_result(work(*args, **kwargs))
        except BaseException as exc:
            future.set_exception(exc)
        return future


def simulate(work: Callable[[], Coroutine[Any, Any, T]]) -> tuple[T, float]:
    """Run it in simulated time: the result, and how many seconds it took.

    Nothing waits, and each run goes the same way."""
    selector = _Jumping()
    loop = asyncio.SelectorEventLoop(selector)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fetch, "ThreadPoolExecutor", _Inline)
        patch.setattr(loop, "time", lambda: selector.now)
        try:
            return loop.run_until_complete(work()), selector.now
        finally:
            loop.close()


async def after(seconds: float, value: T) -> T:
    """A value that takes its time."""
    await asyncio.sleep(seconds)
    return value


async def failing(seconds: float, error: Exception) -> Any:
    """Nothing, after a time."""
    await asyncio.sleep(seconds)
    raise error


async def settled(*awaitables: Awaitable[T]) -> list[T | BaseException]:
    """What became of each."""
    return await asyncio.gather(*awaitables, return_exceptions=True)
