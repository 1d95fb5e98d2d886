"""``datastates.connect``: another process's repository, to be browsed and cloned from."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypeVar

from datastates import values
from datastates.config import Config, Data, data_plane
from datastates.content import digest
from datastates.content.manifest import Manifest
from datastates.errors import Closed, Conflict, DatastatesError, Dirty, Disconnected, InvalidInput, NotFound, PeerFault
from datastates.lineage.change import clones
from datastates.lineage.change import refs as lineage_refs
from datastates.lineage.search import walk
from datastates.lineage.states import Ref, RefKind, State
from datastates.opening.core import Core, Opened, core_of
from datastates.store.tier import Reader, Tier
from datastates.system.memory import available_memory_bytes
from datastates.transport import loop
from datastates.transport.clone.fetch import Fetched, fetch
from datastates.transport.clone.forward import Forwarder
from datastates.transport.contract import Tls, tls_of
from datastates.transport.limits import LISTED_STATES, LISTING_TIMEOUTS
from datastates.transport.protocol import Offer, StateRecord
from datastates.transport.session.feed import Feed
from datastates.transport.session.handshake import read_token
from datastates.transport.session.session import Session
from datastates.transport.sink import Sink
from datastates.transport.wire.plane import surely
from datastates.transport.wire.registry import transport_for

from . import arrivals
from .landing import ObjectsSink, Shadows, StateSink
from .records import record_of, record_of_ref, ref_of, state_of
from .serving import StateSource
from .transfer import Cloned, Progress, Transfer

__all__ = ["Peer", "connect"]

_log = logging.getLogger("datastates")
_PAGE = 1000
_SPARE = 1.25

T = TypeVar("T")


def _revision(value: object, what: str) -> str:
    return values.text(values.revision(value, what), what)  # it is to be sent


def _repository(value: object, what: str) -> object:
    core_of(value, what)
    return value


@values.takes(
    token=values.optional(values.token),
    token_file=values.optional(values.path),
    tls=values.optional(tls_of),
    timeout_s=values.seconds,
    data=values.optional(data_plane),
)
def connect(
    url: str | Sequence[str],
    *,
    token: str | bytes | None = None,
    token_file: str | os.PathLike[str] | None = None,
    tls: Tls | None = None,
    timeout_s: float = 10.0,
    data: str | None = None,
) -> Peer:
    """Reach a repository that another process serves; or several, which then share the work of a clone.

        with repo.serve("tcp://127.0.0.1:0") as server, datastates.connect(server.url) as peer:
            print(peer.refs())

    :param url: where the server listens; several urls are sources of one clone.
    :param token: the server's token; without it ``token_file``, or else ``DATASTATES_TOKEN``.
    :param token_file: a file that holds the token.
    :param tls: certificates for TLS 1.3.
    :param timeout_s: a peer that is silent for so long is treated as dead.
    :param data: what carries the bytes, as for ``Repository.serve``; None: as ``DATASTATES_DATA`` says.
    :raises Disconnected: nobody answers (of several: none of them).
    :raises Unauthorized: the token is missing or wrong.
    :raises Unsupported: the two sides can use no data plane in common.
    """
    urls = tuple(values.patterns(url, "url") or ())
    if not urls:
        raise InvalidInput("connect needs a url, such as ucx://10.0.0.2:4711")
    carries = Config.from_environment().data if data is None else Data(data)
    peer = Peer(urls, read_token(token, token_file), tls, timeout_s, carries)
    loop.run(peer._sessions())
    return peer


@dataclass(frozen=True, slots=True)
class _Opened:
    """A state that sources hold open for us."""

    state: State
    manifest: Manifest
    raw: bytes
    feeds: list[Feed]
    repository: str
    source: str
    forwarder: Forwarder | None


@dataclass(frozen=True, slots=True)
class _Arrival:
    """Where a clone goes. ``land`` ends it well; ``explain`` turns an error into the one that the caller gets; ``drop`` lets go of what
    came.
    """

    sink: Sink
    land: Callable[[_Opened, Fetched], tuple[State, Any]]
    explain: Callable[[BaseException], BaseException]
    drop: Callable[[], None]
    is_kept: bool


class Peer:
    """Other processes' repositories, as one: questions go to the first that answers. Safe from any thread but the transport's."""

    def __init__(self, urls: tuple[str, ...], token: bytes, tls: Tls | None, timeout_s: float, data: Data = Data.AUTO) -> None:
        self.urls, self._data = urls, data
        self._token, self._tls, self._timeout_s = token, tls, timeout_s
        self._open: dict[str, Session] = {}
        self._all: set[Session] = set()
        self._shadows = Shadows()
        self._pid = os.getpid()
        self._is_closed = False

    # --- the lineage -------------------------------------------------------------------------------------------------------

    def refs(self) -> list[Ref]:
        """Every branch and tag there, by name."""
        return [ref_of(record) for record in loop.run(self._first(Session.refs))]

    @values.takes(rev=_revision)
    def state(self, rev: str) -> State:
        """The state that a revision names there."""
        return state_of(loop.run(self._first(lambda session: session.resolve(rev))))

    @values.takes(rev=_revision, limit=values.optional(values.count))
    def log(self, rev: str = "main", *, limit: int | None = None) -> list[State]:
        """A state and its ancestors there, newest first."""
        return loop.run(self._listed(lambda session: _all(lambda count, after: session.log(rev, limit=count, after=after), limit)))

    @values.takes(query=values.text, limit=values.optional(values.count))
    def find(self, query: str, *, limit: int | None = None) -> list[State]:
        """The states there that a query asks for."""
        return loop.run(self._listed(lambda session: _all(lambda count, after: session.find(query, limit=count, after=after), limit)))

    # --- clones ------------------------------------------------------------------------------------------------------------

    def clone(
        self,
        rev: str,
        *,
        into: Mapping[str, object] | None = None,
        repo: Opened | None = None,
        only: str | Sequence[str] | None = None,
        strict: bool = True,
        atomic: bool | None = None,
        skip_equal: bool = False,
        tags: bool = False,
        chain: bool = False,
        on_progress: Progress | None = None,
    ) -> Cloned:
        """Bring a state from the peer's memory into live objects, or into a repository's memory; every byte is checked.

            with repo.serve("tcp://127.0.0.1:0") as server, datastates.connect(server.url) as peer:
                peer.clone("main", into={"model": model, "optimizer": optimizer})

        :param rev: the state, as the peer names it.
        :param into: live objects by name, as for ``Repository.restore``.
        :param repo: a repository that takes over the state with its ancestry; only chunks that it does not hold are moved.
        :param only: which parts of the objects, as for ``Repository.restore``.
        :param strict: as for ``Repository.restore``.
        :param atomic: True changes the objects at the very end, all at once, for which a second copy must fit into memory. False receives
            tensors where they are; a clone that fails leaves them *dirty*: trackers refuse to capture them until they are cloned into again
            or restored. None: True if there is memory for it.
        :param skip_equal: do not move what the objects hold already (not with ``atomic``).
        :param tags: whether the tags of the ancestry come along to ``repo``.
        :param chain: whether receivers of one state pass it on to each other, so that one copy leaves the source.
        :param on_progress: called with the bytes that are done, and all of them.
        :raises NotFound: the revision names nothing there.
        :raises Unavailable: its bytes are nowhere any more (or Disconnected: no source is left).
        :raises InvalidInput: the state does not fit the objects; nothing was moved.
        :raises Corrupt: bytes came with a wrong digest twice.
        :raises Dirty: a clone in place failed; its cause says why.
        """
        transfer = self.begin_clone(
            rev,
            into=into,
            repo=repo,
            only=only,
            strict=strict,
            atomic=atomic,
            skip_equal=skip_equal,
            tags=tags,
            chain=chain,
            on_progress=on_progress,
        )
        return transfer.wait()

    @values.takes(
        rev=_revision,
        into=values.optional(values.named),
        repo=values.optional(_repository),
        only=values.patterns,
        strict=values.flag,
        atomic=values.optional(values.flag),
        skip_equal=values.flag,
        tags=values.flag,
        chain=values.flag,
        resumable=values.flag,
        on_progress=values.optional(values.callback),
    )
    def begin_clone(
        self,
        rev: str,
        *,
        into: Mapping[str, object] | None = None,
        repo: Opened | None = None,
        only: str | Sequence[str] | None = None,
        strict: bool = True,
        atomic: bool | None = None,
        skip_equal: bool = False,
        tags: bool = False,
        chain: bool = False,
        resumable: bool = False,
        on_progress: Progress | None = None,
    ) -> Transfer:
        """Start ``clone`` in the background: ``wait`` for it or ``await`` it, on the thread that owns the objects.

        :param rev: as for ``clone``.
        :param into: as for ``clone``.
        :param repo: as for ``clone``.
        :param only: as for ``clone``.
        :param strict: as for ``clone``.
        :param atomic: as for ``clone``.
        :param skip_equal: as for ``clone``.
        :param tags: as for ``clone``.
        :param chain: as for ``clone``.
        :param resumable: keep what came if it fails: ``Transfer.resume`` goes on, ``Transfer.close`` lets go.
        :param on_progress: as for ``clone``.
        """
        if (into is None) == (repo is None):
            raise InvalidInput("a clone goes into live objects (into={...}) or into a repository (repo=...): give one of them")
        opened = loop.run(self._open_state(rev, chain=chain))
        try:
            if into is not None:
                return self._into_objects(opened, into, only, strict, atomic, skip_equal, resumable, on_progress)
            assert repo is not None, "one of them is given"
            return self._into_repository(opened, repo.core, tags, resumable, on_progress)
        except BaseException:
            loop.run(_let_go(opened))
            raise

    def push(self, rev: str, *, repo: Opened, tags: bool = False, on_progress: Progress | None = None) -> Cloned:
        """Bring a state of ``repo`` into the peer's memory, with its ancestry; the peer must be served with ``is_writable``.

        :param rev: the state, as ``repo`` names it.
        :param repo: where it is.
        :param tags: whether the tags of its ancestry go along.
        :param on_progress: called with the bytes that are done, and all of them.
        :raises InvalidInput: the peer takes no states.
        """
        return self.begin_push(rev, repo=repo, tags=tags, on_progress=on_progress).wait()

    @values.takes(rev=_revision, repo=_repository, tags=values.flag, on_progress=values.optional(values.callback))
    def begin_push(self, rev: str, *, repo: Opened, tags: bool = False, on_progress: Progress | None = None) -> Transfer:
        """Start ``push`` in the background.

        :param rev: the state, as ``repo`` names it.
        :param repo: where it is.
        :param tags: whether the tags of its ancestry go along.
        :param on_progress: called with the bytes that are done, and all of them.
        """
        core = repo.core
        state = core.state(rev)
        source = _CountedSource(core.open_payload(state, verify=False), core.local)
        landed: list[StateRecord] = []

        async def move(progress: Progress) -> Fetched:
            began = asyncio.get_running_loop().time()
            source.on_chunk = lambda moved: progress(moved, sum(source.lengths))
            try:
                session = await self._connected(self.urls[0])
                try:
                    ancestry = await _unknown_there(session, core, state)
                    offer = await asyncio.to_thread(_offer, core, state, source.manifest, ancestry, tags=tags)
                    landed.append(await session.push(source, state.uid, offer))
                finally:
                    await session.close()
            finally:
                source.close()
            progress(source.moved, source.moved)  # the peer had the rest
            return Fetched({self.urls[0]: source.moved}, source.chunks, asyncio.get_running_loop().time() - began, {})

        def give_up(error: BaseException) -> BaseException:
            source.close()  # also of a push that was cancelled before it began
            return error

        return Transfer(
            state,
            move,
            land=lambda _: (state_of(landed[0]), None),
            give_up=give_up,
            bytes_total=sum(source.lengths),
            on_progress=on_progress,
        )

    # --- the end -----------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the connections; transfers under way fail. Idempotent."""
        if not self._is_closed and self._pid == os.getpid():
            self._is_closed = True
            loop.run(self._close())
            self._shadows.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Peer {', '.join(self.urls)}{' (closed)' if self._is_closed else ''}>"

    # --- where a clone goes: the caller's thread ---------------------------------------------------------------------------

    def _into_objects(
        self,
        opened: _Opened,
        into: Mapping[str, object],
        only: str | Sequence[str] | None,
        strict: bool,
        atomic: bool | None,
        skip_equal: bool,
        resumable: bool,
        on_progress: Progress | None,
    ) -> Transfer:
        if atomic is None:
            atomic = not skip_equal and available_memory_bytes() > _SPARE * sum(chunk.length for chunk in opened.manifest.content.chunks)
        sink = ObjectsSink(
            opened.manifest,
            into,
            only=only,
            strict=strict,
            atomic=atomic,
            skip_equal=skip_equal,
            keep=opened.forwarder is not None,
            shadows=self._shadows,
        )

        def land(opened: _Opened, fetched: Fetched) -> tuple[State, Any]:
            report = sink.commit()
            loop.run(_stop_forwarding(opened, linger=True))
            sink.close()
            _log.info("cloned state %s, step %d, from %s", opened.state.uid[:10], opened.state.step, ", ".join(fetched.bytes_by_feed))
            return opened.state, report

        def explain(error: BaseException) -> BaseException:
            if not sink.is_dirty or not isinstance(error, Exception):
                return error
            names = ", ".join(into)
            return Dirty(
                f"{names} are half old, half new: the clone of {opened.state.uid[:10]} failed ({error}); clone again, or restore them"
            )

        return self._transfer(opened, _Arrival(sink, land, explain, sink.close, resumable), on_progress)

    def _into_repository(self, opened: _Opened, core: Core, tags: bool, resumable: bool, on_progress: Progress | None) -> Transfer:
        with core.database.read() as session:
            is_same = clones.repository_uid(session) == opened.repository
            is_shared = is_same and bool(clones.known(session, [opened.state.uid]))  # else one of the two is a copy of the other
        ancestry, wanted = ([], []) if is_shared else loop.run(self._listed(lambda session: _ancestry(session, core, opened.state, tags)))
        relatives = [state.uid for state in ancestry[:10]]
        sink = arrivals.make_room(core, opened.manifest, party=opened.source, relatives=relatives)

        def land(opened: _Opened, fetched: Fetched) -> tuple[State, None]:
            loop.run(_stop_forwarding(opened, linger=True))
            state = arrivals.land(
                core,
                sink,
                opened.state,
                ancestry=ancestry,
                tags=wanted,
                source=sink.party,
                source_repository=opened.repository,
                bytes_moved=sum(fetched.bytes_by_feed.values()),
            )
            return state, None

        arrival = _Arrival(sink, land, lambda error: error, lambda: arrivals.abandon(core, sink), resumable)
        return self._transfer(opened, arrival, on_progress)

    def _transfer(self, opened: _Opened, arrival: _Arrival, on_progress: Progress | None) -> Transfer:
        sink = arrival.sink

        async def move(progress: Progress) -> Fetched:
            if opened.forwarder is not None:
                return await opened.forwarder.fetch(sink, timeout_s=self._timeout_s, on_progress=progress)
            try:
                return await fetch(sink, opened.feeds, timeout_s=self._timeout_s, on_progress=progress)
            finally:  # a cancellation that comes now must not leave a connection behind
                await surely(asyncio.create_task(_let_go(opened)))

        def give_up(error: BaseException) -> BaseException:
            with suppress(Closed):  # the process is ending
                loop.run(_let_go(opened))  # it may have been cancelled before it began
            return arrival.explain(error)

        def again(peer: Peer, on_progress: Progress | None) -> Transfer:
            return peer._go_on(opened, arrival, on_progress)

        return Transfer(
            opened.state,
            move,
            land=lambda fetched: arrival.land(opened, fetched),
            give_up=give_up,
            bytes_total=sum(sink.lengths[index] for index in sink.missing()),
            on_progress=on_progress,
            drop=arrival.drop,
            again=again if arrival.is_kept else None,
        )

    def _go_on(self, before: _Opened, arrival: _Arrival, on_progress: Progress | None) -> Transfer:
        """A clone that failed, from here; its sink knows what is missing, and every digest."""
        opened = loop.run(self._open_state(before.state.uid, chain=False))
        if opened.state.digest != before.state.digest:
            loop.run(_let_go(opened))
            raise Conflict(f"{opened.source} has another state of the uid {before.state.uid}: resume from another peer")
        if isinstance(arrival.sink, StateSink) and opened.source != before.source:
            arrival.sink.party = f"{arrival.sink.party}, {opened.source}"
        return self._transfer(opened, arrival, on_progress)

    # --- the loop thread ---------------------------------------------------------------------------------------------------

    async def _sessions(self) -> list[tuple[str, Session]]:
        """A session for questions with every url that answers.

        :raises Disconnected: none does.
        """
        self._check_open()
        missing = [url for url in self.urls if url not in self._open or not self._open[url].is_open]
        made = await asyncio.gather(*(self._connected(url) for url in missing), return_exceptions=True)
        errors: list[BaseException] = []
        for url, each in zip(missing, made, strict=True):
            if isinstance(each, BaseException):
                errors.append(each)
            else:
                self._open[url] = each
        found = [(url, self._open[url]) for url in self.urls if url in self._open and self._open[url].is_open]
        if not found:
            raise errors[0]
        for error in errors:
            _log.warning("a source does not answer, the others go on without it: %s", error)
        return found

    async def _connected(self, url: str) -> Session:
        """A further session; it ends with this peer at the latest."""
        self._check_open()
        session = await Session.connect(url, token=self._token, timeout_s=self._timeout_s, tls=self._tls, data=self._data)
        self._all = {session, *(each for each in self._all if each.is_open)}
        if self._is_closed:  # meanwhile
            await session.close()
            self._check_open()
        return session

    async def _first(self, ask: Callable[[Session], Awaitable[T]]) -> T:
        """The answer of the first peer that is still there."""
        error: DatastatesError | None = None
        for _, session in await self._sessions():
            try:
                return await ask(session)
            except (Disconnected, Closed) as exc:
                error = exc
        assert error is not None, "there is at least one session"
        raise error

    async def _listed(self, ask: Callable[[Session], Awaitable[T]]) -> T:
        """``_first`` for lists that come in pages: the peer chooses their number, but not the time that they take."""
        patience_s = LISTING_TIMEOUTS * self._timeout_s

        async def within(session: Session) -> T:
            try:
                async with asyncio.timeout(patience_s):
                    return await ask(session)
            except TimeoutError:
                raise Disconnected(
                    f"{session.peer} lists states without coming to an end for {patience_s:g} s: pass a limit, or connect with a longer "
                    "timeout_s"
                ) from None

        return await self._first(within)

    async def _open_state(self, rev: str, *, chain: bool) -> _Opened:
        """Open a state at every source that has it, each by a connection of its own."""
        found = await self._resolve(rev)
        state = next(iter(found.values()))
        if chain:
            return await self._join_chain(next(iter(found)), state)
        sessions = await asyncio.gather(*(self._connected(url) for url in found), return_exceptions=True)
        feeds: list[Feed] = []
        chosen: tuple[Manifest, bytes, str] | None = None
        sources: list[str] = []
        errors: list[BaseException] = [each for each in sessions if isinstance(each, BaseException)]
        for url, session in zip(found, sessions, strict=True):
            if isinstance(session, BaseException):
                continue
            try:
                opened, feed = await session.open(state.uid)
                manifest = await asyncio.to_thread(_decode, opened.manifest, state, url)
            except DatastatesError as exc:
                errors.append(exc)
                await session.close()
                continue
            feeds.append(_Ending(feed, session))
            sources.append(url)
            chosen = chosen or (manifest, opened.manifest, session.identity.repository if session.identity else "")
        if chosen is None:
            raise errors[0]
        for error in errors:
            _log.warning("a source is left out: %s", error)
        manifest, raw, repository = chosen
        return _Opened(state, manifest, raw, feeds, repository, ", ".join(sources), None)

    async def _resolve(self, rev: str) -> dict[str, State]:
        """The state that a revision names, by the urls of those that agree on it."""
        sessions = await self._sessions()
        records = await asyncio.gather(*(session.resolve(rev) for _, session in sessions), return_exceptions=True)
        states = {
            url: state_of(record) for (url, _), record in zip(sessions, records, strict=True) if not isinstance(record, BaseException)
        }
        if not states:
            raise next(record for record in records if isinstance(record, BaseException))
        first = next(iter(states.values()))
        for url, state in states.items():
            if state.digest != first.digest:
                _log.warning("%s is another state at %s, which is left out", rev, url)
        return {url: state for url, state in states.items() if state.digest == first.digest}

    async def _join_chain(self, url: str, state: State) -> _Opened:
        forwarder = await Forwarder.join(
            url, state.uid, connect=self._connected, transport=transport_for(url), token=self._token, tls=self._tls, data=self._data
        )
        try:
            manifest = await asyncio.to_thread(_decode, forwarder.manifest, state, url)
        except BaseException:
            await forwarder.close()
            raise
        return _Opened(state, manifest, forwarder.manifest, [], forwarder.repository, f"a chain from {url}", forwarder)

    async def _close(self) -> None:
        await asyncio.gather(*(session.close() for session in self._all))
        self._all.clear()
        self._open.clear()

    def _check_open(self) -> None:
        if self._pid != os.getpid():
            raise Closed("this connection belongs to the parent process: connect again in the child")
        if self._is_closed:
            raise Closed("the connection is closed: connect again")


class _CountedSource(StateSource):
    """A source that counts what a peer asks for of a pushed state: ``moved`` bytes in ``chunks`` chunks so far."""

    def __init__(self, reader: Reader, local: Tier) -> None:
        super().__init__(reader, local)
        self.moved = self.chunks = 0
        self._counted: set[int] = set()
        self.on_chunk: Callable[[int], None] = lambda _: None

    async def chunk(self, index: int) -> Sequence[memoryview]:
        """The chunk where it lies."""
        found = await super().chunk(index)
        if index not in self._counted:  # it is read for its digest too, and again when a link breaks
            self._counted.add(index)
            self.moved += self.lengths[index]
            self.chunks += 1
            self.on_chunk(self.moved)
        return found


class _Ending(Feed):
    """A feed whose session ends with it: a clone that is cut off disturbs no other."""

    def __init__(self, feed: Feed, session: Session) -> None:
        super().__init__(
            feed.name,
            feed.manifest,
            feed.lengths,
            receive=feed.receive,
            release=session.close,
            digests=feed.digests,
            is_bound=feed.is_bound,
        )
        self._inner = feed

    async def close(self) -> None:
        """Let go of the state, and of the connection."""
        await self._inner.close()
        await super().close()


async def _let_go(opened: _Opened) -> None:
    for feed in opened.feeds:
        await feed.close()
    if opened.forwarder is not None:
        await opened.forwarder.close()


async def _stop_forwarding(opened: _Opened, *, linger: bool) -> None:
    if opened.forwarder is not None:
        if linger:
            await opened.forwarder.drain()
        await opened.forwarder.close()


def _decode(raw: bytes, state: State, url: str) -> Manifest:
    manifest = digest.decode(raw, source=f"the manifest of {state.uid[:10]} from {url}")
    if (manifest.origin.uid, manifest.digest) != (state.uid, state.digest):
        raise PeerFault(f"{url} sent the manifest of state {manifest.origin.uid[:10]} when {state.uid[:10]} was asked for")
    return manifest


async def _all(page: Callable[[int, str | None], Coroutine[Any, Any, Any]], limit: int | None) -> list[State]:
    found: dict[str, State] = {}
    after: str | None = None
    while limit is None or len(found) < limit:
        got = await page(_PAGE if limit is None else min(_PAGE, limit - len(found)), after)
        _enter(found, map(state_of, got.states))
        after = got.next
        if after is None or not got.states:
            break
    return list(found.values())[:limit]


def _enter(found: dict[str, State], page: Iterable[State]) -> None:
    """A page of a list that must come to an end: none of its states was there before."""
    for state in page:
        if state.uid in found:
            raise PeerFault(f"the peer lists state {state.uid[:10]} twice: its list does not come to an end")
        found[state.uid] = state
    if len(found) > LISTED_STATES:
        raise PeerFault(f"the peer lists more than {LISTED_STATES} states: pass a limit")


async def _ancestry(session: Session, core: Core, state: State, tags: bool) -> tuple[list[State], list[Ref]]:
    """The ancestors, newest first, that the repository does not have, down to where it has every parent; tags of all that come.

    A page that it has all of is no end: what a merge brought in from elsewhere may be older than that.
    """
    coming: list[State] = []
    listed = {state.uid: state}
    after: str | None = state.uid
    while after is not None and await asyncio.to_thread(arrivals.lacks_parents, core, [state, *coming]):
        page = await session.log(state.uid, limit=_PAGE, after=after)
        states = list(map(state_of, page.states))
        _enter(listed, states)
        coming += await asyncio.to_thread(arrivals.missing_ancestry, core, states)
        after = page.next if states else None
    if not tags:
        return coming, []
    uids = {state.uid, *(each.uid for each in coming)}
    found = [ref_of(record) for record in await session.refs()]
    return coming, [ref for ref in found if ref.kind is RefKind.TAG and ref.state in uids]


async def _unknown_there(session: Session, core: Core, state: State) -> list[State]:
    """The ancestors of a state, newest first, down to the first page behind which the peer knows every parent."""
    found: list[State] = []
    known: set[str] = set()
    page = [state]
    while page:
        sent = {state.uid, *(each.uid for each in found)}
        open_ends = {parent for each in (state, *found) for parent in each.parents} - sent
        if not open_ends or await _knows_all(session, open_ends, known):
            break
        page = await asyncio.to_thread(_ancestors, core, state.uid, page[-1].uid)
        found += page
    return found


async def _knows_all(session: Session, uids: set[str], known: set[str]) -> bool:
    for uid in uids - known:
        try:
            await session.resolve(uid)
        except NotFound:
            return False
        known.add(uid)
    return True


def _ancestors(core: Core, uid: str, after: str) -> list[State]:
    with core.database.read() as session:
        return walk.log(session, uid, limit=_PAGE, after=after)


def _offer(core: Core, state: State, manifest: bytes, ancestry: Sequence[State], *, tags: bool) -> Offer:
    refs: list[Ref] = []
    if tags:
        uids = {state.uid, *(each.uid for each in ancestry)}
        with core.database.read() as session:
            refs = [ref for ref in lineage_refs.refs(session, RefKind.TAG) if ref.state in uids]
    return Offer(manifest, record_of(state), tuple(map(record_of, ancestry)), tuple(map(record_of_ref, refs)))
