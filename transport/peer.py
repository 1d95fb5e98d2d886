"""``datastates.connect``: another process's repository, to browse and to clone from."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import ExitStack, suppress
from functools import partial
from types import TracebackType
from typing import Annotated, Any, ClassVar, Self

import msgspec

from datastates import values
from datastates.collective import AnyGroup, CollectiveCall, Group
from datastates.config import Config, Data
from datastates.errors import Closed, Conflict, InvalidInput, NotFound, Unavailable
from datastates.lineage.query import names, walk
from datastates.lineage.states import Ref, RefKind, State
from datastates.maintenance.core import AnyRepository, Core
from datastates.maintenance.loading import restore_from
from datastates.state.adapters import given_objects
from datastates.state.data_position import Redivision
from datastates.state.digest import chunk_digest
from datastates.state.in_place import wait_for_copies
from datastates.state.manifest import CHUNK_BYTES, Manifest
from datastates.storage.parallel_read import open_shared
from datastates.storage.reading import of_state, refuse_parts
from datastates.storage.tier import Reader
from datastates.system.interrupts import undisturbed
from datastates.system.threads import Latch, Notifier
from datastates.values import Count, FilePath, Patterns, Seconds, Text, Token

from . import loop
from .contract import AnyTls, Sink
from .fetch import Fetched
from .handshake import read_token
from .protocol import Offer, StateRecord
from .receive_buffers import StreamMemory, StreamMemoryCache
from .serving import StateSource
from .session import Session
from .sources import PAGE, OpenState, Page, Sources, all_pages
from .state_parts import fetch_part
from .transfer import Cloned, IntoObjects, IntoRepository, Move, Progress, Pull, Transfer
from .untrusted import (
    distrusting,
    join_parts,
    record_of,
    record_of_ref,
    records_of,
    ref_of,
    state_of,
)


class Push(Move):
    """A push of a state to the first of some sources. With ``tags``, tags on it and on its
    ancestors go with it."""

    def __init__(self, sources: Sources, core: Core, state: State, *, tags: bool) -> None:
        self.state, self._sources, self._core, self._tags = state, sources, core, tags
        refuse_parts(
            state,
            "a push",
            instead="serve it here, and clone it there with repo=, which takes any number of parts",
        )
        self._source = _CountingSource(
            core.open_payload(state, verify=False), partial(core.tiers.reopen, state, verify=False)
        )
        self.bytes_total = sum(self._source.lengths)
        self._recorded: StateRecord | None = None

    async def run(self, progress: Progress) -> Fetched:
        url, source, clock = self._sources.urls[0], self._source, asyncio.get_running_loop()
        began = clock.time()
        source.on_chunk = lambda moved: progress(moved, self.bytes_total)
        try:
            session = await self._sources.connected(url)
            try:
                self._recorded = await session.push(
                    source, self.state.uid, await self._offer(session)
                )
            finally:
                await session.close()
        finally:
            source.close()
        progress(source.moved, source.moved)  # the peer had all other chunks
        return Fetched({url: source.moved}, source.chunks, clock.time() - began, {})

    def commit(self, fetched: Fetched) -> tuple[State, None]:
        del fetched
        assert self._recorded is not None, "it ran to its end"
        return state_of(self._recorded), None

    def fail(self, error: BaseException) -> BaseException:
        self._source.close()  # also of a push that was cancelled before it began
        return error

    async def _offer(self, session: Session) -> Offer:
        return await asyncio.to_thread(self._described, await self._unknown_there(session))

    def _described(self, ancestry: Sequence[State]) -> Offer:
        uids = {self.state.uid, *(each.uid for each in ancestry)}
        with self._core.database.read() as session:
            tags = names.refs(session, RefKind.TAG) if self._tags else []
            records, made_by = records_of(session, ancestry)
            return Offer(
                self._source.manifest,
                record_of(session, self.state),
                records,
                tuple(record_of_ref(tag) for tag in tags if tag.state in uids),
                made_by,
            )

    async def _unknown_there(self, session: Session) -> list[State]:
        """The ancestors of the state, newest first. It stops after the first page whose
        parents all exist on the peer."""
        found: list[State] = []
        known: set[str] = set()
        page = [self.state]
        while page:
            sent = {self.state.uid, *(each.uid for each in found)}
            open_ends = {parent for each in (self.state, *found) for parent in each.parents} - sent
            if not open_ends or await _knows_all(session, open_ends, known):
                break
            page = await asyncio.to_thread(self._ancestors, page[-1].uid)
            found += page
        return found

    def _ancestors(self, after: str) -> list[State]:
        with self._core.database.read() as session:
            return walk.log(session, self.state.uid, limit=PAGE, after=after)


class _CountingSource(StateSource):
    """A source that counts the bytes and chunks of a pushed state that the peer has fetched."""

    def __init__(self, reader: Reader, reopen: Callable[[], Reader]) -> None:
        super().__init__(reader, reopen)
        self.moved = self.chunks = 0
        self._counted: set[int] = set()
        self.on_chunk: Callable[[int], None] = lambda _: None

    async def chunk(self, index: int) -> Sequence[memoryview]:
        found = await super().chunk(index)
        if index not in self._counted:
            # it is read for its digest too, and again when a link breaks
            self._counted.add(index)
            self.moved += self.lengths[index]
            self.chunks += 1
            self.on_chunk(self.moved)
        return found


async def _knows_all(session: Session, uids: set[str], known: set[str]) -> bool:
    for uid in uids - known:
        try:
            await session.resolve(uid)
        except NotFound:
            return False
        known.add(uid)
    return True


# A reader of a part of a state that peers hold open for us. ``ahead`` fetches many chunks at once
# in the background.


Fetch = Callable[[Sink], Coroutine[Any, Any, Fetched]]


class PeerReader(Reader):
    """Reads a part from peers; ``fetch`` brings what is missing in a sink. Used by one thread.
    ``opened`` is closed with the reader. Without it, the caller closes what ``fetch`` uses, after
    the reader.

    Every chunk is checked as it arrives. ``bytes_by_source`` counts what came, by peer.
    """

    is_waited_for: ClassVar[bool] = True

    def __init__(self, manifest: Manifest, fetch: Fetch, opened: OpenState | None = None) -> None:
        self.manifest, self._opened = manifest, opened
        self.bytes_by_source: dict[str, int] = {}
        self._fetch = fetch
        self._lengths = tuple(chunk.length for chunk in manifest.content.chunks)
        self._stream_memory = StreamMemory(len(self._lengths))
        self._batches: dict[int, _ChunkBatch] = {}
        self._all: list[_ChunkBatch] = []
        self._is_closed = False

    def ahead(self, chunks: Sequence[int]) -> None:
        """Begin to fetch these chunks, unless that has begun before; never waits."""
        if self._is_closed:
            raise Closed(
                f"the reader of state {self.manifest.origin.uid} is closed: clone it again"
            )
        wanted = [index for index in dict.fromkeys(chunks) if index not in self._batches]
        if wanted:
            batch = _ChunkBatch(self.manifest, self._lengths, wanted, self._stream_memory)
            self._batches |= dict.fromkeys(wanted, batch)
            self._all.append(batch)
            batch.begin(self._fetch)

    def chunk(self, index: int) -> memoryview:
        self.ahead([index])
        self._batches[index].wait(index)
        return self._stream_memory.memory(index * CHUNK_BYTES, self._lengths[index]).toreadonly()

    def span(self, start: int, length: int) -> memoryview | None:
        """None: no memory here outlives the reader."""
        return None

    def loan(self, start: int, length: int) -> memoryview | None:
        """A stretch of the memory into which it comes, once all of it is here."""
        self.ahead(self.chunks_of(start, length))
        for index in self.chunks_of(start, length):
            self.chunk(index)
        return self._stream_memory.memory(start, length).toreadonly()

    def close(self) -> None:
        """Stop every fetch: afterwards the memory is not written any more. Idempotent."""
        self._is_closed = True
        for batch in self._all:
            for name, count in batch.end().items():
                self.bytes_by_source[name] = self.bytes_by_source.get(name, 0) + count
        self._all.clear()
        opened, self._opened = self._opened, None
        if opened is not None:
            loop.run(opened.close())


class _ChunkBatch(Sink):
    """Some chunks that are being received, each at its place in the stream memory."""

    def __init__(
        self,
        manifest: Manifest,
        lengths: tuple[int, ...],
        wanted: Sequence[int],
        stream_memory: StreamMemory,
    ) -> None:
        self.lengths = lengths
        self._manifest, self._stream_memory = manifest, stream_memory
        self._missing, self._here = dict.fromkeys(wanted), set[int]()
        self._lock, self._changed = threading.Lock(), Notifier()
        self._ended = Latch()
        self._future: Future[Fetched] | None = None

    def begin(self, fetch: Fetch) -> None:
        """Begin to fetch them."""
        self._future = loop.submit(fetch(self))
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
        raise Unavailable(
            f"chunk {index} of state {self._manifest.origin.uid} did not come: clone it again"
        )

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
        self._changed.notify_all()
        return is_right

    def forget(self, index: int) -> None:
        with self._lock:
            self._missing[index] = None

    def pieces(self, index: int) -> Sequence[memoryview] | None:
        return [self._memory(index).toreadonly()] if index in self._here else None

    def _memory(self, index: int) -> memoryview:
        return self._stream_memory.memory(index * CHUNK_BYTES, self.lengths[index])

    def _end(self, future: Future[Fetched]) -> None:
        self._ended.set()
        self._changed.notify_all()


# A clone of one state by all ranks of a job at once. Each rank fetches its share from the sources,
# and sends it to the other ranks that need it.


def clone_together(
    sources: Sources,
    rev: str,
    into: Mapping[str, object],
    group: Group,
    *,
    only: str | Sequence[str] | None,
    strict: bool,
    on_progress: Progress | None,
) -> Cloned:
    """Clone the state that ``rev`` names for rank 0 into the live objects of every rank;
    collective, on the training threads.

    If one rank fails, all fail, and no object of any rank has changed.
    """
    began, meeting = time.monotonic(), CollectiveCall(group, f"clone {rev}")
    with meeting.synchronized(), undisturbed():
        uid, digest = _chosen(sources, rev, meeting)
        wait_for_copies(into)
        opened = loop.run(sources.open(uid))
        try:
            if opened.state.digest != digest:
                raise Conflict(
                    f"{opened.source} has another state of the uid {uid} than rank 0 found:"
                    " clone from the same peer"
                )
            with distrusting():
                return _clone(
                    opened,
                    into,
                    meeting,
                    began,
                    only=only,
                    strict=strict,
                    on_progress=on_progress,
                    timeout_s=sources.timeout_s,
                )
        finally:
            loop.run(opened.close())


def _chosen(sources: Sources, rev: str, meeting: CollectiveCall) -> tuple[str, str]:
    """The uid and the digest of the state that rank 0 finds."""
    body = b""
    if meeting.group.rank == 0:
        state = next(iter(loop.run(sources.resolve(rev)).values()))
        body = msgspec.msgpack.encode((state.uid, state.digest))
    return msgspec.msgpack.decode(meeting.meet(body)[0], type=tuple[str, str])


def _clone(
    opened: OpenState,
    into: Mapping[str, object],
    meeting: CollectiveCall,
    began: float,
    *,
    only: str | Sequence[str] | None,
    strict: bool,
    on_progress: Progress | None,
    timeout_s: float,
) -> Cloned:
    state, group = opened.state, meeting.group
    own = Redivision(state.world_size, group.rank, group.size)
    readers = _readers(opened, own, timeout_s, on_progress)
    with ExitStack() as stack:
        for reader in readers:
            stack.callback(reader.close)
        shared = stack.enter_context(
            open_shared(
                meeting,
                state.uid,
                state.world_size,
                lambda rank: (readers[rank], 1),
                rank=own.source,
            )
        )
        report = restore_from(
            of_state(shared, state), into, only=only, strict=strict, own=own, meeting=meeting
        )
    moved = sum((Counter(reader.bytes_by_source) for reader in readers), Counter[str]())
    return Cloned(state, report, moved.total(), time.monotonic() - began, dict(moved))


def _readers(
    opened: OpenState, own: Redivision, timeout_s: float, on_progress: Progress | None
) -> list[PeerReader]:
    """A reader for each part."""
    if opened.parts is None:
        return [
            PeerReader(
                opened.manifest.manifest,
                partial(opened.fetch, timeout_s=timeout_s, on_progress=on_progress),
            )
        ]
    if own.source:
        join_parts(opened.manifest.parts, rank=own.source)  # their values were not looked at yet
    counted = _PartsProgress(on_progress)
    return [
        PeerReader(
            part.manifest,
            partial(fetch_part, part=part, timeout_s=timeout_s, on_progress=counted.of(part.rank)),
        )
        for part in opened.parts.parts
    ]


class _PartsProgress:
    """The bytes of all parts that this rank requested, and how many are here; used on the loop
    thread."""

    def __init__(self, on_progress: Progress | None) -> None:
        self._on_progress = on_progress
        self._parts: dict[int, tuple[int, int]] = {}

    def of(self, part: int) -> Callable[[int, int], None] | None:
        """The progress callback of one part."""
        return None if self._on_progress is None else partial(self._hear, part)

    def _hear(self, part: int, done: int, total: int) -> None:
        assert self._on_progress is not None
        self._parts[part] = done, total
        self._on_progress(
            sum(done for done, _ in self._parts.values()),
            sum(total for _, total in self._parts.values()),
        )


# ``datastates.connect``: another process's repository, to browse and to clone from.


def _sent(value: object, what: str) -> str:
    return values.text(values.revision(value, what), what)


SentRevision = Annotated[str | State, _sent]
"""A revision that is read at the other end."""


@values.checked
def connect(
    url: Patterns,
    *,
    token: Token | None = None,
    token_file: FilePath | None = None,
    tls: AnyTls | None = None,
    timeout_s: Seconds = 10.0,
    data: Data | str | None = None,
) -> Peer:
    """Connect to a repository that another process serves; or to several, which then share the work
    of a clone.

        with repo.serve("tcp://127.0.0.1:0") as server, datastates.connect(server.url) as peer:
            print(peer.refs())

    :param url: where the server listens; several urls become sources of one clone.
    :param token: the server's token; if not given, ``token_file`` is read, or else
        ``DATASTATES_TOKEN``.
    :param token_file: a file that holds the token.
    :param tls: certificates for TLS 1.3.
    :param timeout_s: a peer that is silent for this many seconds is treated as dead.
    :param data: the data plane that carries the bytes, as for ``Repository.serve``; None: as
        ``DATASTATES_DATA`` says.
    :raises Disconnected: the server does not answer (of several: none does).
    :raises Unauthorized: the token is missing or wrong.
    :raises Unsupported: the two sides have no data plane in common.
    """
    urls = tuple(url or ())
    if not urls:
        raise InvalidInput("connect needs a url, such as ucx://10.0.0.2:4711")
    carries = Config.from_environment().data if data is None else Data(data)
    sources = Sources(urls, read_token(token, token_file), tls, timeout_s, carries)
    loop.run(sources.sessions())
    return Peer(sources)


class Peer:
    """The repositories of other processes, as one. Requests go to the first reachable one.

    Safe from any thread but the transport's."""

    def __init__(self, sources: Sources) -> None:
        self.sources = sources
        self._memory_cache = StreamMemoryCache()

    @property
    def urls(self) -> tuple[str, ...]:
        """The urls to which it is connected."""
        return self.sources.urls

    # --- the lineage ------------------------------------------------------------------------------

    def refs(self) -> list[Ref]:
        """Every branch and tag there, by name."""
        return [ref_of(record) for record in loop.run(self.sources.first(Session.refs))]

    @values.checked
    def state(self, rev: SentRevision) -> State:
        """The state that a revision names there."""
        return next(iter(loop.run(self.sources.resolve(str(rev))).values()))

    @values.checked
    def log(self, rev: SentRevision = "main", *, limit: Count | None = None) -> list[State]:
        """A state and its ancestors there, newest first."""
        return self._listed(lambda session: partial(session.log, str(rev)), limit)

    @values.checked
    def find(self, query: Text, *, limit: Count | None = None) -> list[State]:
        """The states there that match a query."""
        return self._listed(lambda session: partial(session.find, query), limit)

    def _listed(self, question: Callable[[Session], Page], limit: int | None) -> list[State]:
        return loop.run(self.sources.listed(lambda session: all_pages(question(session), limit)))

    # --- clones -----------------------------------------------------------------------------------

    @values.checked
    def clone(
        self,
        rev: SentRevision,
        *,
        repo: AnyRepository | None = None,
        only: Patterns | None = None,
        strict: bool = True,
        atomic: bool | None = None,
        skip_equal: bool = False,
        tags: bool = False,
        chain: bool = False,
        on_progress: Progress | None = None,
        group: AnyGroup | None = None,
        objects: Mapping[str, object] | None = None,
        **more: object,
    ) -> Cloned:
        """Bring a state from the peer's memory into live objects, or into a repository's memory;
        every byte is checked.

            with repo.serve("tcp://127.0.0.1:0") as server, datastates.connect(server.url) as peer:
                peer.clone("main", model=model, optimizer=optimizer)

        :param rev: the state, by its name at the peer.
        :param repo: a repository that takes over the state with its ancestry; only chunks that it
            lacks are moved.
        :param only: which parts of the objects, as for ``Repository.restore``.
        :param strict: as for ``Repository.restore``.
        :param atomic: True changes the objects at the very end, all at once, which needs memory for
            a second copy. False receives tensors in place; a clone that fails leaves them *dirty*:
            trackers refuse to capture them until they are cloned into again or restored. None: True
            if there is memory for it.
        :param skip_equal: do not move chunks that the objects hold already (not with ``atomic``).
        :param tags: whether the tags of the ancestry come along to ``repo``.
        :param chain: whether receivers of one state pass it on to each other, so that one copy
            leaves the source.
        :param on_progress: called with the bytes that are done, and their total.
        :param group: the ranks of a job that clone the state together, each calling this with its
            own objects. Each is sent what it alone wants, and its share of what several want, which
            it passes on. All get the state that rank 0 finds; or all fail, and then no object has
            changed.
        :param objects: further live objects, by name. A name may equal the name of an argument.
        :param more: live objects by name, as for ``Repository.restore``.
        :raises NotFound: the revision does not exist there.
        :raises Unavailable: no source has the state's bytes any more (or Disconnected: no source
            is left).
        :raises InvalidInput: the state does not fit the objects; nothing was moved.
        :raises Corrupt: a chunk came with a wrong digest twice.
        :raises Dirty: a clone in place failed, with the reason as its cause.
        """
        into = given_objects(more, objects, Peer.clone)
        if group is None or group.size == 1:
            with self.begin_clone(
                rev,
                repo=repo,
                only=only,
                strict=strict,
                atomic=atomic,
                skip_equal=skip_equal,
                tags=tags,
                chain=chain,
                on_progress=on_progress,
                objects=into,
            ) as transfer:
                return transfer.wait()
        if not into or repo is not None or skip_equal or tags or chain or atomic is False:
            raise InvalidInput(
                "a group clones into live objects, all at once: name them, as in clone(rev,"
                " model=model), and leave repo=, atomic=False, skip_equal=, tags= and chain= out."
                " To copy a state into the repository of each rank, use broadcast of a"
                " datastates.ranks group"
            )
        return clone_together(
            self.sources,
            str(rev),
            into,
            group,
            only=only,
            strict=strict,
            on_progress=on_progress,
        )

    @values.checked
    def begin_clone(
        self,
        rev: SentRevision,
        *,
        repo: AnyRepository | None = None,
        only: Patterns | None = None,
        strict: bool = True,
        atomic: bool | None = None,
        skip_equal: bool = False,
        tags: bool = False,
        chain: bool = False,
        resumable: bool = False,
        on_progress: Progress | None = None,
        group: AnyGroup | None = None,
        objects: Mapping[str, object] | None = None,
        **more: object,
    ) -> Transfer:
        """Start ``clone`` in the background: ``wait`` for it or ``await`` it, on the thread that
        owns the objects.

        :param rev: as for ``clone``.
        :param repo: as for ``clone``.
        :param only: as for ``clone``.
        :param strict: as for ``clone``.
        :param atomic: as for ``clone``.
        :param skip_equal: as for ``clone``.
        :param tags: as for ``clone``.
        :param chain: as for ``clone``.
        :param resumable: keep what came if it fails: ``Transfer.resume`` continues,
            ``Transfer.close`` releases it.
        :param on_progress: as for ``clone``.
        :param group: None, or a group of one: ranks that clone together must use ``clone``.
        :param objects: as for ``clone``.
        :param more: as for ``clone``.
        """
        into = given_objects(more, objects, Peer.begin_clone)
        if group is not None and group.size > 1:
            raise InvalidInput(
                "ranks clone together on their training threads: call clone(group=...), which"
                " returns once all have the state"
            )
        if bool(into) == (repo is not None):
            raise InvalidInput(
                "a clone goes into live objects (model=model) or into a repository (repo=repo):"
                " give one of them"
            )
        opened = loop.run(self.sources.open(str(rev), chain=chain))
        try:
            move: Pull
            if repo is None:
                move = IntoObjects(
                    opened,
                    into,
                    only=only,
                    strict=strict,
                    atomic=atomic,
                    skip_equal=skip_equal,
                    memory_cache=self._memory_cache,
                    timeout_s=self.sources.timeout_s,
                    is_resumable=resumable,
                )
            else:
                move = IntoRepository.of(
                    self.sources, opened, repo.core, tags=tags, is_resumable=resumable
                )
            return Transfer(move, on_progress)
        except BaseException:
            loop.run(opened.close())
            raise

    @values.checked
    def push(
        self,
        rev: SentRevision,
        *,
        repo: AnyRepository,
        tags: bool = False,
        on_progress: Progress | None = None,
    ) -> Cloned:
        """Bring a state of ``repo`` into the peer's memory, with its ancestry; the peer must be
        served with ``is_writable``.

        :param rev: the state, by its name in ``repo``.
        :param repo: the repository that has the state.
        :param tags: whether the tags of its ancestry go along.
        :param on_progress: called with the bytes that are done, and their total.
        :raises InvalidInput: the peer accepts no states.
        """
        return self.begin_push(rev, repo=repo, tags=tags, on_progress=on_progress).wait()

    @values.checked
    def begin_push(
        self,
        rev: SentRevision,
        *,
        repo: AnyRepository,
        tags: bool = False,
        on_progress: Progress | None = None,
    ) -> Transfer:
        """Start ``push`` in the background.

        :param rev: the state, by its name in ``repo``.
        :param repo: the repository that has the state.
        :param tags: whether the tags of its ancestry go along.
        :param on_progress: called with the bytes that are done, and their total.
        """
        return Transfer(
            Push(self.sources, repo.core, repo.core.state(str(rev)), tags=tags), on_progress
        )

    # --- the end ----------------------------------------------------------------------------------

    def close(self) -> None:
        """End the connections; transfers under way fail. Idempotent."""
        if not self.sources.is_closed and self.sources.is_ours:
            self.sources.is_closed = True
            with suppress(Closed):  # the process is ending
                loop.run(self.sources.close())
            self._memory_cache.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Peer {', '.join(self.urls)}{' (closed)' if self.sources.is_closed else ''}>"


# Peers as a source for repairs. A state is opened at the peer, and only the chunks that the repair
# reads are moved.


class PeerTier:
    """A peer's states, part by part. ``party`` is the peer, as the lineage records it."""

    def __init__(self, peer: Peer) -> None:
        self.party = ", ".join(peer.urls)
        self._sources: Sources = peer.sources

    def open_part(self, uid: str, rank: int, *, verify: bool = True) -> Reader:
        """The part of a state that one of its ranks captured, held open there until the reader is
        closed; chunks are checked as they arrive.

        :raises NotFound: it is not there.
        :raises Disconnected: the peer does not answer.
        """
        del verify
        opened = loop.run(self._sources.open(uid))
        try:
            return _reader(opened, rank, self._sources.timeout_s)
        except BaseException:
            loop.run(opened.close())
            raise


def _reader(opened: OpenState, rank: int, timeout_s: float) -> Reader:
    if opened.parts is None:
        if rank:
            raise NotFound(
                f"state {opened.state.uid} has one part at {opened.source}, not the part of rank"
                f" {rank}"
            )
        fetch: Fetch = partial(opened.fetch, timeout_s=timeout_s)
        return PeerReader(opened.manifest.manifest, fetch, opened)
    part = next((each for each in opened.parts.parts if each.rank == rank), None)
    if part is None:
        raise NotFound(f"rank {rank} of state {opened.state.uid} is not at {opened.source}")
    return PeerReader(part.manifest, partial(fetch_part, part=part, timeout_s=timeout_s), opened)
