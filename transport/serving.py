"""A repository as other processes see it over a transport: its lineage, and the states that its
tiers hold."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self, runtime_checkable
from urllib.parse import urlsplit

import msgspec

from datastates import values
from datastates.collective import CollectiveCall, Group
from datastates.config import BackPressure
from datastates.errors import (
    Closed,
    Corrupt,
    DatastatesError,
    Disconnected,
    InvalidInput,
    NotFound,
    OverBudget,
    PeerFault,
    Unavailable,
    Unsupported,
)
from datastates.lineage import database
from datastates.lineage.query import names, pages, revision, walk
from datastates.lineage.query.fields import check_names
from datastates.lineage.states import Ref, Run, State
from datastates.lineage.write import clones
from datastates.maintenance.core import Core
from datastates.state import digest
from datastates.storage.parallel_read import NOT_HERE
from datastates.storage.reading import refuse_parts
from datastates.storage.tier import Reader

from . import loop, receive_states
from . import server as transport_server
from .contract import Sink, Source, Store, Tls
from .protocol import PARTS, Identity, Offer, Reached, RefRecord, StatePage, StateRecord
from .receive_states import StateSink
from .requests import Chains
from .same_host import address_of
from .untrusted import (
    read_manifest,
    record_of,
    record_of_ref,
    records_of,
    ref_of,
    runs_of,
    state_of,
    states_of,
)

if TYPE_CHECKING:
    from datastates.lineage.session import Session

_ASK_AGAIN_S = 0.05


class PushBudget:
    """The bytes of one repository's arena that pushed states may have together, while they are
    on their way and until they are durable."""

    def __init__(self, core: Core, patience_s: float) -> None:
        self._core, self._patience_s = core, patience_s
        self._lock = threading.Lock()
        self._coming = 0

    def acquire(self, lengths: Sequence[int]) -> list[int]:
        """Acquire slots for chunks of these lengths, in addition to those that captures need. Waits
        at most ``patience_s`` until earlier pushes are written.

        :raises OverBudget: there are never so many.
        :raises Unavailable: there are not so many now.
        """
        until, size = time.monotonic() + self._patience_s, sum(lengths)
        if not (is_taken := self._take(size)):
            self._write()
        while not (is_taken or self._take(size)):
            if time.monotonic() > until:
                raise Unavailable(
                    "states that were pushed before take the memory that there is for them, and"
                    f" could not be written in {self._patience_s:g} s: push again later"
                )
            time.sleep(_ASK_AGAIN_S)
        try:
            slots = self._core.runner().slots.acquire(
                lengths, BackPressure.WAIT, within_s=max(0.0, until - time.monotonic())
            )
        except BaseException:
            self.give(size)
            raise
        if slots is None:
            self.give(size)
            raise Unavailable(
                f"no room for {size} bytes could be made in {self._patience_s:g} s: push again"
                " later"
            )
        return slots

    def give(self, size: int) -> None:
        """Note that so many bytes are no longer on their way: they were given back, or belong to
        the memory tier now."""
        with self._lock:
            self._coming -= size

    def _take(self, size: int) -> bool:
        engaged = self._core.engage()
        runner, memory, arena = engaged.runner, engaged.memory, engaged.arena
        limit = arena.capacity - runner.slots.needed_bytes
        if size > limit:
            raise OverBudget(
                f"a state of {size} bytes is pushed here, where {limit} of {arena.capacity} are not"
                " needed by the training: open the repository there with more memory_bytes"
            )
        here = memory.bytes_of(runner.unwritten_clones())
        with self._lock:
            is_room = self._coming + here + size <= limit
            self._coming += size if is_room else 0
        return is_room

    def _write(self) -> None:
        runner = self._core.runner()
        for uid in runner.unwritten_clones():
            runner.want(uid)


# A repository as other processes see it over a transport: its lineage, and the states that its
# tiers hold.


_PAGE = 1000  # states; for more, a peer sends another request
_TAGS = 1000  # each is one transaction
_PUSHERS = "push"
"""The party of every peer that has the token and may write: their states lend each other chunks."""

# found now: a process that forks while a thread looks for it leaves the child the lock of an import
_VERSION = version("datastates")


class StateSource(Source):
    """An open reader, as a source. The state stays pinned until it is closed, or until its memory
    is wanted back; it is then read from the reader that ``reopen`` returns, if there is one. The
    receiver checks its bytes.
    """

    def __init__(self, reader: Reader, reopen: Callable[[], Reader] | None = None) -> None:
        self._reader, self._reopen = reader, reopen
        self.manifest = digest.encode(
            msgspec.structs.replace(reader.manifest, packs=(), refs=(), bytes_new=0)
        )
        self.lengths = tuple(chunk.length for chunk in reader.manifest.content.chunks)

    async def chunk(self, index: int) -> Sequence[memoryview]:
        if self._reader.is_waited_for:
            return [await asyncio.to_thread(self._reader.chunk, index)]
        return [self._reader.chunk(index)]

    def addresses(self) -> list[int]:
        return [address_of(self._reader.lying(index)) for index in range(len(self.lengths))]

    def is_whole(self, index: int, pieces: Sequence[memoryview]) -> bool:
        return digest.pieces_digest(pieces) == self._reader.manifest.content.chunks[index].digest

    def when_wanted(self, tell: Callable[[], None]) -> None:
        self._reader.when_wanted(tell)

    def recall(self) -> bool:
        """Continue to read from a tier that outlives this process; returns whether there is one."""
        pinned, found = self._reader, None
        if self._reopen is not None:
            with suppress(DatastatesError):
                found = self._reader = self._reopen()
        pinned.close()
        return found is not None

    def close(self) -> None:
        self._reader.close()


ANSWER_S = 10.0
"""The most seconds that an answer to a peer may take of the database."""


class RepositoryStore(Store):
    """A repository as a server sees it; every method runs in worker threads. With ``is_writable``,
    peers may push. A push waits at most ``patience_s`` for memory.
    """

    def __init__(self, core: Core, *, is_writable: bool = False, patience_s: float = 10.0) -> None:
        self._core, self._is_writable = core, is_writable
        self.others: tuple[str, ...] = ()
        """The urls at which the other processes of this one's job serve."""
        self._budget = PushBudget(core, patience_s)
        self._pushed: dict[Sink, int] = {}

    def identity(self) -> Identity:
        with self._core.database.read() as session:
            return Identity(clones.repository_uid(session), self._core.node, _VERSION)

    @contextmanager
    def _asked(self) -> Iterator[Session]:
        """A session for a peer's question, which may cost only a limited time."""
        with database.deadline(ANSWER_S), self._core.reading() as session:
            yield session

    def refs(self) -> list[RefRecord]:
        with self._asked() as session:
            return [record_of_ref(ref) for ref in names.refs(session)]

    def find(self, query: str, limit: int, after: str | None) -> StatePage:
        with self._asked() as session:
            check_names(session, query)
            page = pages.find(session, query, after=after, limit=min(limit, _PAGE))
            states, made_by = records_of(session, page.states)
        return StatePage(states, page.next, made_by)

    def log(self, rev: str, limit: int, after: str | None) -> StatePage:
        limit = min(limit, _PAGE)
        with self._asked() as session:
            found = walk.log(
                session, revision.resolve(session, rev).uid, limit=limit + 1, after=after
            )
            states, made_by = records_of(session, found[:limit])
        return StatePage(states, states[-1].uid if len(found) > limit else None, made_by)

    def resolve(self, rev: str) -> StateRecord:
        with self._asked() as session:
            return record_of(session, revision.resolve(session, rev))

    def open(self, uid: str) -> Source:
        with database.deadline(ANSWER_S):
            state = self._core.state(uid)
        refuse_parts(state, "a clone as a whole")
        reopen = partial(self._core.tiers.reopen, state, verify=False)
        return StateSource(self._core.open_payload(state, verify=False), reopen)

    def open_part(self, uid: str, rank: int) -> Source:
        with database.deadline(ANSWER_S):
            state = self._core.state(uid)
        tiers = self._core.tiers
        try:
            reader, _ = tiers.open_part(state, rank, verify=False)
        except NotFound as exc:
            raise Unavailable(
                f"the part of rank {rank} of state {uid} is not here: ask the rank that has it"
            ) from exc
        return StateSource(reader, partial(tiers.reopen, state, rank=rank, verify=False))

    def reach(self, uid: str) -> Reached:
        with database.deadline(ANSWER_S):
            state = self._core.state(uid)
        if state.world_size > PARTS:
            raise Unsupported(
                f"state {uid} has {state.world_size} parts: at most {PARTS} are cloned part by"
                " part; clone it by its files"
            )
        return Reached(
            bytes(self._distance(state, rank) for rank in range(state.world_size)), self.others
        )

    def _distance(self, state: State, rank: int) -> int:
        try:
            reader, far = self._core.tiers.open_part(state, rank, verify=False)
        except (NotFound, Corrupt, Unavailable):
            return NOT_HERE
        reader.close()
        return min(far, NOT_HERE - 1)

    def check_writable(self) -> None:
        if not self._is_writable:
            raise InvalidInput(
                "this server takes no states: serve with is_writable=True (datastates serve"
                " --writable)"
            )

    def receive(self, offer: Offer) -> Sink:
        self.check_writable()
        checked = read_manifest(offer.manifest, source=f"the pushed state {offer.state.uid}")
        manifest = checked.manifest
        if (manifest.origin.uid, manifest.digest) != (offer.state.uid, offer.state.digest):
            raise InvalidInput(
                f"the manifest of the pushed state {offer.state.uid} is another state's: push again"
            )
        state, ancestry, tags, made_by = _told(offer)
        with self._core.database.read() as session:
            clones.check_arrival(session, state, ancestry, tags, made_by)
        relatives = [state.uid for state in offer.ancestry[:10]]
        taken = 0

        def acquire(lengths: Sequence[int]) -> list[int]:
            nonlocal taken
            slots = self._budget.acquire(lengths)
            taken += sum(lengths)
            return slots

        try:
            sink = receive_states.make_room(
                self._core, checked, party=_PUSHERS, relatives=relatives, acquire=acquire
            )
        except BaseException:
            self._budget.give(taken)
            raise
        self._pushed[sink] = taken
        return sink

    def received(self, offer: Offer, sink: Sink) -> StateRecord:
        assert isinstance(sink, StateSink), "receive made it"
        state, ancestry, tags, made_by = _told(offer)
        came = clones.Provenance(_PUSHERS, "", sink.bytes_missing, made_by)
        state = receive_states.land(
            self._core, sink, state, ancestry=ancestry, tags=tags, came=came
        )
        self._budget.give(self._pushed.pop(sink))
        with self._core.reading() as session:
            return record_of(session, state)

    def abandon(self, offer: Offer, sink: Sink) -> None:
        assert isinstance(sink, StateSink), "receive made it"
        receive_states.abandon(self._core, sink)
        self._budget.give(self._pushed.pop(sink, 0))


def _told(offer: Offer) -> tuple[State, list[State], list[Ref], dict[str, Run]]:
    """The state, ancestors, tags and runs that a peer sends with a push.

    :raises PeerFault: they are impossible.
    """
    if len(offer.refs) > _TAGS:
        raise PeerFault(
            f"{len(offer.refs)} refs come with state {offer.state.uid}: at most {_TAGS} are taken"
        )
    tags = [ref_of(ref) for ref in offer.refs if ref.kind == "tag"]
    made_by = (
        offer.runs if offer.state.run_record is None else (*offer.runs, offer.state.run_record)
    )
    return state_of(offer.state), states_of(offer.ancestry, offer.runs), tags, runs_of(made_by)


@dataclass(frozen=True, slots=True)
class ServerStats:
    """Counts of a server since its start.

    ``refused_for`` counts refused connections by reason:

    - ``room``: all places were taken
    - ``gave way``: it had proved nothing when other connections needed its place
    - ``late``: it proved nothing in time
    - ``left``: it ended before it proved anything
    - the kind of the error that was sent to it, such as ``unauthorized``

    ``connections`` counts current connections, including those that have not proved anything yet.
    ``made_way`` counts peers that ended because others waited for their place. ``pins_revoked``
    counts states that peers held open and whose memory a capture needed.
    """

    bytes_sent: int
    chunks_sent: int
    peers: int
    peers_ever: int
    refused: int
    refused_for: Mapping[str, int] = field(default_factory=dict)
    connections: int = 0
    made_way: int = 0
    pins_revoked: int = 0


@runtime_checkable
class Server(Protocol):
    """What ``Repository.serve`` returns, for any protocol.

    A context manager; safe from any thread."""

    @property
    def url(self) -> str:
        """The url to connect to, with the port that was taken."""

    def stats(self) -> ServerStats:
        """Counts of what the server has done so far."""

    def close(self, *, grace_s: float = ...) -> None:
        """Accept no more peers, let transfers under way finish for ``grace_s`` seconds, and end
        every connection; idempotent."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


class PeerServer:
    """Serves states of a repository during a training; made by ``Repository.serve``. Safe from any
    thread.

    A state that a peer clones is pinned. Captures reuse its memory only once the peer is done, or
    silent for ``timeout_s``. If a capture would have to wait, it takes the memory at once. The
    clone then continues from disk, or fails.
    """

    def __init__(
        self,
        core: Core,
        url: str,
        *,
        token: bytes,
        tls: Tls | None,
        is_writable: bool,
        timeout_s: float,
        data: str,
    ) -> None:
        self._store = store = RepositoryStore(core, is_writable=is_writable, patience_s=timeout_s)
        self._server = transport_server.Server(
            store, url, token=token, tls=tls, timeout_s=timeout_s, relays=Chains(), data=data
        )
        self._pid = os.getpid()
        self._is_closed = False
        loop.run(self._server.start())

    @property
    def url(self) -> str:
        """The url to connect to, with the port that was taken."""
        return self._server.url

    def meet(self, urls: Sequence[str]) -> None:
        """Set the urls of the other processes of this job. Peers that clone a state of the whole
        job get these urls."""
        self._store.others = tuple(urls)

    def stats(self) -> ServerStats:
        """Counts of what the server has done so far."""
        server, limiter = self._server, self._server.limiter
        tried = Counter(
            {kind: count for kind, count in server.turned_away.items() if kind != Disconnected.kind}
        )
        tried[PeerFault.kind] += limiter.foreign
        refused_for = (
            Counter(
                {
                    "room": limiter.admission.refused,
                    "gave way": limiter.admission.displaced,
                    "late": limiter.late,
                }
            )
            + tried
        )
        refused_for["left"] = max(0, limiter.unproved - tried.total())
        return ServerStats(
            bytes_sent=server.sent.bytes,
            chunks_sent=server.sent.chunks,
            peers=len(server.sessions),
            peers_ever=server.arrived,
            refused=server.limiter.refused,
            refused_for={kind: count for kind, count in refused_for.items() if count},
            connections=limiter.admission.connections,
            made_way=server.made_way,
            pins_revoked=server.sent.recalled,
        )

    @values.checked
    def close(self, *, grace_s: values.Seconds = 1.0) -> None:
        """Accept no more peers, let chunks that are on their way arrive, and end every
        connection; idempotent."""
        if not self._is_closed and self._pid == os.getpid():
            self._is_closed = True
            with suppress(Closed):
                loop.run(self._server.close(grace_s=grace_s))

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
        return f"<Server {self.url}{' (closed)' if self._is_closed else ''}>"


# The ranks of a job that serve: one exchange gives each rank the urls of all.


def serve_together(group: Group, begin: Callable[[], Server]) -> Server:
    """The server of this rank, which has the urls of all ranks; collective. If one rank cannot
    serve, none does.

    :raises InvalidInput: it is a server for browsers.
    :raises Unavailable: another rank failed, or did not come; names it.
    """
    meeting, server = CollectiveCall(group, "serve its states"), None
    try:
        with meeting.reporting_errors():
            server = begin()
            serving = _for_peers(server)
            url = announced(server.url)
        urls = [each.decode() for each in meeting.meet(url.encode())]
    except BaseException:
        if server is not None:
            server.close(grace_s=0.0)
        raise
    serving.meet([each for rank, each in enumerate(urls) if rank != group.rank])
    return server


def _for_peers(server: Server) -> PeerServer:
    if not isinstance(server, PeerServer):
        raise InvalidInput(
            f"{server.url} is for browsers, which cannot clone with a group. Leave group= out, or"
            " serve at a tcp:// address"
        )
    return server


def announced(url: str) -> str:
    """The url of a server for processes elsewhere: with an address, even if it listens on all of
    them, or under a name."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        address = ipaddress.ip_address(socket.getaddrinfo(host, None)[0][4][0])
    found = own_address() if address.is_unspecified else str(address)
    return f"{parts.scheme}://{f'[{found}]' if ':' in found else found}:{parts.port}"


def own_address() -> str:
    """This machine's address for other machines, from its routes or its name."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # nothing is sent: the kernel only picks the interface
            probe.connect(("198.51.100.1", 9))
            return str(probe.getsockname()[0])
        except OSError:
            return socket.gethostbyname(socket.gethostname())
