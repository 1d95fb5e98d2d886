"""Tiers that keep states as objects under keys, and the reader that fetches chunks of them.

A reader fetches only the chunks that are used. It fetches chunks ahead that it is about to need,
several at once.
"""

from __future__ import annotations

import logging
import re
import secrets
import threading
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from threading import Lock
from typing import ClassVar, TypeVar

import msgspec
from blake3 import blake3

from datastates.errors import Closed, Conflict, Corrupt, DatastatesError, InvalidInput, NotFound
from datastates.state.digest import chunk_digest, decode, encode
from datastates.state.manifest import Manifest
from datastates.system.interrupts import checkpoint

from .reading import HeldReader
from .tier import Payload, Placed, Reader, Tier

_logger = logging.getLogger(__name__)

AHEAD_BYTES = 64 << 20
"""The bytes that a reader fetches ahead of their use, at most, beyond one request."""

REQUEST_BYTES = 16 << 20
"""The bytes that one request fetches, at most; chunks that follow each other share requests."""

REQUESTS = 6
"""The requests of one reader or upload at once."""

IDENTITY = ".identity"
"""The key under which a tier has its uid and that of its lineage, as a folder of packs has."""

UID = re.compile(r"[0-9A-Za-z_-]{1,64}")
"""The uids of states that may be parts of keys."""

_LINES = re.compile(r"([0-9a-f]{24})\n([0-9a-f]{24})")
_PROBE = "probe/object"
_LOOK_S = 0.2  # how often the main thread looks for Ctrl-C
_T = TypeVar("_T")
_KEPT = 2  # the chunks read last: tensors that follow each other share them
_STATE = "state/"
_PART = "part/"
_CHUNK = "chunk/"


def awaited(request: Callable[[], _T]) -> _T:
    """The result of a request, for which Ctrl-C ends the wait."""
    if threading.current_thread() is not threading.main_thread():
        return request()
    future: Future[_T] = Future()

    def run() -> None:
        try:
            future.set_result(request())
        except BaseException as exc:  # raised by the caller
            future.set_exception(exc)

    threading.Thread(target=run, name="datastates-request", daemon=True).start()
    return _result(future)


def _result(future: Future[_T]) -> _T:
    while not wait([future], _LOOK_S).done:
        checkpoint()
    return future.result()


class RemoteReader(HeldReader):
    """Reads a state whose chunks are fetched when they are used.

    ``fetch(indices)`` returns the bytes of chunks that follow each other where they are stored, in
    one request. ``follows(one, other)``: whether the chunk ``other`` can be fetched together with
    the chunk ``one`` before it. Both are called from several threads.
    """

    is_waited_for = True

    def __init__(
        self,
        manifest: Manifest,
        fetch: Callable[[Sequence[int]], Sequence[bytes | memoryview]],
        follows: Callable[[int, int], bool] = lambda one, other: False,
        *,
        source: str,
        verify: bool = True,
        at_once: int = REQUESTS,
    ) -> None:
        super().__init__(manifest, [b""] * len(manifest.content.chunks), source=source)
        self._fetch, self._follows, self._verifies = fetch, follows, verify
        self._at_once = at_once
        self._lock = Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._queue: deque[list[int]] = deque()
        self._coming: dict[int, tuple[Future[Sequence[bytes | memoryview]], int]] = {}
        self._coming_bytes = 0
        self._kept: dict[int, memoryview] = {}
        self._first: dict[int, int] = {}
        self._last: dict[int, int] = {}
        """The first and the last time that each chunk will be used, as far as that was said."""
        self._now = self._planned = 0
        self._lying: dict[int, memoryview] = {}

    def chunk(self, index: int) -> memoryview:
        """One chunk, from a request that was made ahead or from one made now."""
        self._check_open()
        view = self._kept.get(index)
        if view is None:
            view = self._received(index)
            if self._verifies:
                self._verify(index, view)
            with self._lock:
                self._now = max(self._now, self._first.get(index, 0))
                self._kept[index] = view
                for each in list(self._kept)[:-_KEPT]:
                    if self._last.get(each, -1) < self._now:
                        del self._kept[each]
            self._request()
        return view

    def span(self, start: int, length: int) -> memoryview | None:
        """A view if the stretch is in one chunk, else None, without a request."""
        self._check_open()
        return super().span(start, length) if len(self.chunks_of(start, length)) < 2 else None

    def lying(self, index: int) -> memoryview:
        """A chunk, which stays in memory until the reader is closed."""
        if index not in self._lying:
            self._lying[index] = self.chunk(index)
        return self._lying[index]

    def prepare(self, stretches: Sequence[tuple[int, int]]) -> None:
        """Begin to fetch the chunks of these stretches."""
        self.ahead([index for stretch in stretches for index in self.chunks_of(*stretch)])

    def ahead(self, chunks: Sequence[int]) -> None:
        """Begin to fetch these chunks, which will be read in this order."""
        self._check_open()
        lengths = self.manifest.content.chunks
        with self._lock:
            known = {*self._coming, *(index for run in self._queue for index in run)}
            for position, index in enumerate(chunks, self._planned):
                self._first.setdefault(index, position)
                self._last[index] = position
            self._planned += len(chunks)
            size = 0
            for index in dict.fromkeys(chunks):
                if index in known or index in self._kept:
                    continue
                run = self._queue[-1] if self._queue else []
                size += lengths[index].length
                if run and size <= REQUEST_BYTES and self._follows(run[-1], index):
                    run.append(index)
                else:
                    self._queue.append([index])
                    size = lengths[index].length
        self._request()

    def close(self) -> None:
        """Cancel what was requested ahead."""
        self._is_closed = True
        super().close()
        with self._lock:
            self._queue.clear()
            self._coming.clear()
            self._kept, self._lying = {}, {}
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=False, cancel_futures=True)

    def _request(self, index: int | None = None) -> None:
        """Make requests ahead within the budget; with ``index``, up to the one with that chunk."""
        with self._lock:
            if index is not None and not any(index in run for run in self._queue):
                return
            while (
                self._queue
                and not self._is_closed
                and (index is not None or self._coming_bytes < AHEAD_BYTES)
            ):
                if self._pool is None:
                    self._pool = ThreadPoolExecutor(self._at_once, "datastates-fetch")
                run = self._queue.popleft()
                future = self._pool.submit(self._fetch, run)
                for number, each in enumerate(run):
                    self._coming[each] = future, number
                    self._coming_bytes += self.manifest.content.chunks[each].length
                if index in run:
                    index = None

    def _received(self, index: int) -> memoryview:
        self._request(index)
        with self._lock:
            coming = self._coming.pop(index, None)
            if coming is not None:
                self._coming_bytes -= self.manifest.content.chunks[index].length
        if coming is None:
            return memoryview(awaited(lambda: self._fetch([index]))[0]).toreadonly()
        future, number = coming
        return memoryview(_result(future)[number]).toreadonly()

    def _verify(self, index: int, view: memoryview) -> None:
        chunk = self.manifest.content.chunks[index]
        if view.nbytes != chunk.length or chunk_digest(view) != chunk.digest:
            raise Corrupt(
                f"state {self.manifest.origin.uid}: chunk {index} fails its digest in"
                f" {self._source}: restore another state"
            )


class KeyedTier(Tier):
    """A tier that keeps each state as objects under keys; a subclass defines how objects are read,
    written and listed.

    A chunk's key is its BLAKE3 digest, so that states share equal chunks. The object that makes a
    state visible is written last. Nothing is ever removed. Each rank of a job puts its part under
    its own key, which looks like any other key to the subclass.

    ``holds``, ``read_range``, ``write_new`` and ``delete`` have defaults. Override them where the
    store has a request for that. A reader makes ``requests_at_once``.
    """

    holds_parts = True
    requests_at_once: ClassVar[int] = REQUESTS

    def __init__(self) -> None:
        self._lock, self._is_closed, self._is_checked = Lock(), False, False
        self._overwrites = False

    @abstractmethod
    def read(self, key: str) -> bytes | memoryview:
        """The object under a key.

        :raises KeyError: there is no such object.
        """

    @abstractmethod
    def write(self, key: str, data: bytes) -> None:
        """Store an object under a key; it is whole and safe once this returns."""

    @abstractmethod
    def keys(self, prefix: str) -> Iterable[str]:
        """Every key that begins with ``prefix``, in no order."""

    def holds(self, key: str) -> bool:
        """Whether there is an object under a key.

        By default it lists the folder of the key, or else reads the object, because a store may
        list by whole path segments only.
        """
        if key in self.keys(key[: key.rfind("/") + 1]):
            return True
        try:
            self.read(key)
        except KeyError:
            return False
        return True

    def read_range(self, key: str, start: int, length: int) -> bytes | memoryview:
        """``length`` bytes of an object from ``start`` on. By default it reads the whole object.

        :raises KeyError: there is no such object.
        """
        return memoryview(self.read(key))[start : start + length]

    def write_new(self, key: str, data: bytes) -> bool:
        """Store an object unless there is one under this key. Returns whether it was stored.

        By default another process may write in between.
        """
        if self.holds(key):
            return False
        self.write(key, data)
        return True

    def delete(self, key: str) -> None:  # an archive keeps everything
        """Delete an object, if there is one. By default nothing is deleted."""

    def check(self, repository: str) -> None:
        """Write, read, list and delete a small object."""
        if self._is_checked:
            return
        self._check_open()
        deletes = type(self).delete is not KeyedTier.delete
        key = f"{_PROBE}-{secrets.token_hex(8)}" if deletes else _PROBE
        data = key.encode()
        try:
            self.write(key, data)
            if not self.holds(key):
                raise InvalidInput(
                    f"the {self.name} tier took an object and does not list it: check what holds"
                    f" and keys of {type(self).__name__} return"
                )
            if bytes(self.read(key)) != data or bytes(self.read_range(key, 3, 5)) != data[3:8]:
                raise InvalidInput(
                    f"the {self.name} tier returns other bytes than were written: check read and"
                    f" read_range of {type(self).__name__}, and the server's settings"
                )
            self._overwrites = self.write_new(key, data)
            if self._overwrites:
                _logger.info("the %s tier overwrites objects that it should only create", self.name)
        finally:
            with suppress(DatastatesError):
                self.delete(key)
        self._is_checked = True

    def put(self, payload: Payload, *, base: Manifest | None = None) -> Placed:
        """Write the chunks that are not there yet, then the state."""
        payload.check()
        origin, keys, bytes_new = payload.manifest.origin, list[str](), 0
        with self._lock:  # otherwise two threads would write, and count, the same chunk
            if not self._has(origin.uid, origin.rank):
                for view in payload.chunks:
                    keys.append(f"{_CHUNK}{blake3(view).hexdigest()}")
                    if not self.holds(keys[-1]):
                        self._write_chunk(keys[-1], view)
                        bytes_new += view.nbytes
                self.write(
                    _key(origin.uid, origin.rank),
                    msgspec.msgpack.encode([encode(payload.manifest), keys]),
                )
        return Placed(payload.manifest, bytes_new)

    def open(self, uid: str, *, verify: bool = True) -> Reader:
        """Open a state; if it has several parts, the part of rank 0.

        :raises NotFound: it is not here.
        :raises Corrupt: the list of its chunks is damaged.
        """
        return self.open_part(uid, 0, verify=verify)

    def open_part(self, uid: str, rank: int, *, verify: bool = True) -> Reader:
        """Open the part of one rank."""
        place, what = f"the {self.name} tier", part_name(uid, rank)
        if not awaited(lambda: self._has(uid, rank)):
            raise NotFound(f"{what} is not on {place}")
        try:
            encoded, keys = msgspec.msgpack.decode(
                awaited(lambda: self.read(_key(uid, rank))), type=tuple[bytes, list[str]]
            )
        except (KeyError, msgspec.DecodeError) as exc:
            raise Corrupt(f"{what} is damaged on {place} ({exc}): restore another state") from exc
        manifest = self._decoded(encoded, uid, rank)
        if len(keys) != len(manifest.content.chunks):
            raise Corrupt(
                f"{what} is damaged on {place}, which lists {len(keys)} of its"
                f" {len(manifest.content.chunks)} chunks: restore another state"
            )

        def fetch(indices: Sequence[int]) -> list[bytes | memoryview]:
            try:
                return [self.read(keys[index]) for index in indices]
            except KeyError as exc:
                raise Corrupt(
                    f"{what} is damaged on {place}, where chunk {indices[0]} is gone: restore"
                    " another state"
                ) from exc

        return RemoteReader(
            manifest, fetch, source=place, verify=verify, at_once=self.requests_at_once
        )

    def has(self, uid: str) -> bool:
        """Whether a state is here; if it has several parts, the part of rank 0."""
        return self.has_part(uid, 0)

    def uids(self) -> Iterator[str]:
        """The uid of every state that is here."""
        return (key.removeprefix(_STATE) for key in self.keys(_STATE))

    def close(self) -> None:
        """Refuse further use; a subclass closes what it opened itself."""
        self._is_closed = True

    def has_part(self, uid: str, rank: int) -> bool:
        """Whether one rank's part of a state is here."""
        return self._has(uid, rank)

    def _has(self, uid: str, rank: int) -> bool:
        self._check_open()
        return UID.fullmatch(uid) is not None and self.holds(_key(uid, rank))

    def _write_chunk(self, key: str, view: memoryview) -> None:
        self.write(key, bytes(view))

    def _decoded(self, encoded: bytes | memoryview, uid: str, rank: int) -> Manifest:
        place = f"the {self.name} tier"
        manifest = decode(encoded, source=place)
        if (manifest.origin.uid, manifest.origin.rank) != (uid, rank):
            raise Corrupt(
                f"{part_name(uid, rank)} is damaged on {place}, which has another one under its"
                " key: restore another state"
            )
        return manifest

    def _check_identity(self, repository: str) -> str:
        """The uid of this place. It belongs to one repository, which is written there.

        :raises Conflict: it belongs to another one.
        """
        mine = f"{secrets.token_hex(12)}\n{repository}\n".encode()
        try:
            found = self.read(IDENTITY)
        except KeyError:
            self.write_new(IDENTITY, mine)
            found = self.read(IDENTITY)  # another process may have been first
        return owned(found, repository, self.name)

    def _check_open(self) -> None:
        if self._is_closed:
            raise Closed(f"the {self.name} tier is closed: make another one")


def owned(identity: bytes | memoryview, repository: str, name: str) -> str:
    """The uid of the place with this identity.

    :raises Conflict: it belongs to another repository.
    """
    uid, owner = identity_of(identity, name)
    if owner != repository:
        raise Conflict(
            f"the {name} tier holds states of the lineage {owner}, and this repository has the"
            f" lineage {repository}: give each repository a prefix or folder of its own, as in"
            " s3://bucket/my-run"
        )
    return uid


def identity_of(identity: bytes | memoryview, name: str) -> tuple[str, str]:
    """The uids of a place and of its lineage.

    :raises Corrupt: they cannot be read.
    """
    found = _LINES.fullmatch(bytes(identity).decode(errors="replace").strip())
    if found is None:
        raise Corrupt(
            f"{IDENTITY} on the {name} tier is damaged: restore it, or give this tier another"
            " prefix"
        )
    return found[1], found[2]


def part_name(uid: str, rank: int) -> str:
    return f"rank {rank} of state {uid}" if rank else f"state {uid}"


def _key(uid: str, rank: int) -> str:
    """The key of a part's list of chunks.

    No key has a dot, or is the folder of another: a subclass may use keys as file names."""
    return f"{_PART}{uid}/{rank}" if rank else f"{_STATE}{uid}"
