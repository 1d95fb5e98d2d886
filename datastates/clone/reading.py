"""A reader of a part of a state that peers hold open for us: chunks that are asked for ahead come in the background, many at once."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from typing import ClassVar

from datastates.content.digest import chunk_digest
from datastates.content.manifest import CHUNK_BYTES, Manifest
from datastates.errors import Closed, Unavailable
from datastates.store.tier import Reader
from datastates.system.bell import Bell, Latch
from datastates.transport import loop
from datastates.transport.clone.fetch import Fetched
from datastates.transport.sink import Sink

from .landing.shadow import Shadow

__all__ = ["PeerReader"]

Fetch = Callable[[Sink], Awaitable[Fetched]]


class PeerReader(Reader):
    """Reads a part from peers; ``fetch`` brings what is missing in a sink. Used by one thread, and closed before the feeds behind ``fetch``
    are.

    Every chunk is checked as it arrives. ``bytes_by_source`` counts what came, by peer.
    """

    is_waited_for: ClassVar[bool] = True

    def __init__(self, manifest: Manifest, fetch: Fetch) -> None:
        self.manifest = manifest
        self.bytes_by_source: dict[str, int] = {}
        self._fetch = fetch
        self._lengths = tuple(chunk.length for chunk in manifest.content.chunks)
        self._shadow = Shadow(len(self._lengths))
        self._coming: dict[int, _Coming] = {}
        self._all: list[_Coming] = []
        self._is_closed = False

    def ahead(self, chunks: Sequence[int]) -> None:
        """Begin to fetch those of these chunks that are neither here nor on their way; never waits."""
        if self._is_closed:
            raise Closed(f"the reader of state {self.manifest.origin.uid} is closed: clone it again")
        wanted = [index for index in dict.fromkeys(chunks) if index not in self._coming]
        if wanted:
            coming = _Coming(self.manifest, self._lengths, wanted, self._shadow)
            self._coming |= dict.fromkeys(wanted, coming)
            self._all.append(coming)
            coming.begin(self._fetch)

    def chunk(self, index: int) -> memoryview:
        """One chunk, once it is here.

        :raises DatastatesError: the chunk is not available.
        """
        self.ahead([index])
        self._coming[index].wait(index)
        return self._shadow.memory(index * CHUNK_BYTES, self._lengths[index]).toreadonly()

    def span(self, start: int, length: int) -> memoryview | None:
        """None: no memory here outlives the reader."""
        return None

    def loan(self, start: int, length: int) -> memoryview | None:
        """A stretch of the memory into which it comes, once all of it is here."""
        self.ahead(self.chunks_of(start, length))
        for index in self.chunks_of(start, length):
            self.chunk(index)
        return self._shadow.memory(start, length).toreadonly()

    def close(self) -> None:
        """Stop what is on its way, so that nobody writes to the memory any more. Idempotent."""
        self._is_closed = True
        for coming in self._all:
            for name, count in coming.end().items():
                self.bytes_by_source[name] = self.bytes_by_source.get(name, 0) + count
        self._all.clear()


class _Coming:
    """Some chunks on their way, as a sink: each lies in the shadow at its place in the stream."""

    def __init__(self, manifest: Manifest, lengths: tuple[int, ...], wanted: Sequence[int], shadow: Shadow) -> None:
        self.lengths = lengths
        self._manifest, self._shadow = manifest, shadow
        self._missing, self._here = dict.fromkeys(wanted), set[int]()
        self._lock, self._changed = threading.Lock(), Bell()
        self._ended = Latch()
        self._future: Future[Fetched] | None = None

    def begin(self, fetch: Fetch) -> None:
        """Begin to fetch them."""
        self._future = loop.submit(_awaited(fetch, self))
        self._future.add_done_callback(self._end)

    def wait(self, index: int) -> None:
        """Wait until a chunk is here.

        :raises DatastatesError: it will not come.
        """
        self._changed.wait_for(lambda: index in self._here or self._ended.is_set())
        if index in self._here:
            return
        assert self._future is not None
        with suppress(CancelledError):
            self._future.result()
        raise Unavailable(f"chunk {index} of state {self._manifest.origin.uid} did not come: clone it again")

    def end(self) -> dict[str, int]:
        """Stop; returns what came, by peer."""
        if self._future is None:
            return {}
        self._future.cancel()
        self._ended.wait()
        if self._future.cancelled() or self._future.exception() is not None:
            return {}
        return dict(self._future.result().bytes_by_feed)

    def missing(self) -> Sequence[int]:
        with self._lock:
            return list(self._missing)

    def buffers(self, index: int) -> Sequence[memoryview]:
        with self._lock:
            del self._missing[index]
        return [self._memory(index)]

    def accept(self, index: int) -> bool:
        is_right = chunk_digest(self._memory(index)) == self._manifest.content.chunks[index].digest
        with self._lock:
            if is_right:
                self._here.add(index)
            else:
                self._missing[index] = None
        self._changed.ring()
        return is_right

    def forget(self, index: int) -> None:
        with self._lock:
            self._missing[index] = None

    def pieces(self, index: int) -> Sequence[memoryview] | None:
        return [self._memory(index).toreadonly()] if index in self._here else None

    def _memory(self, index: int) -> memoryview:
        return self._shadow.memory(index * CHUNK_BYTES, self.lengths[index])

    def _end(self, future: Future[Fetched]) -> None:
        self._ended.set()
        self._changed.ring()


async def _awaited(fetch: Fetch, sink: Sink) -> Fetched:
    return await fetch(sink)
