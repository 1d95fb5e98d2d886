"""Both ends in one process: for tests of code that is built on a transport, without a network."""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from urllib.parse import urlsplit

from datastates.errors import Disconnected, InvalidInput, PeerFault, Unavailable

from .connections import AdmittedConnection, ConnectionLimiter
from .contract import Channel, Link, Listener, Tls, Transport
from .data_plane import fail

_FRAMES = 64
"""How many frames wait in a channel before its sender must wait."""

_ADDRESS = b"memory"


class MemoryTransport(Transport):
    """The transport of ``memory://name``. Without a name it picks one. All ends must run on one
    event loop."""

    scheme = "memory"

    def __init__(self) -> None:
        self._listeners: dict[str, _Listener] = {}
        self._rendezvous: dict[int, _Rendezvous] = {}
        self._links: set[_Link] = set()

    async def listen(
        self,
        url: str,
        accept: Callable[[Channel], Awaitable[None]],
        *,
        tls: Tls | None = None,
        limiter: ConnectionLimiter | None = None,
    ) -> Listener:
        """Accept peers under a name; ``tls`` has nothing to protect here."""
        name = _name(url) or secrets.token_hex(4)
        if name in self._listeners:
            raise Unavailable(
                f"memory://{name} is taken: choose another name, or leave out the name"
            )
        listener = self._listeners[name] = _Listener(
            self._listeners, name, accept, ConnectionLimiter() if limiter is None else limiter
        )
        return listener

    async def dial(self, url: str, *, timeout_s: float, tls: Tls | None = None) -> Channel:
        listener = self._listeners.get(_name(url))
        if listener is None:
            raise Disconnected(f"nobody listens at {url}: serve there first")
        here, there = _Channel(url), _Channel("memory://client")
        here.other, there.other = there, here
        listener.visit(there)
        return here

    @property
    def located(self) -> bytes:
        return _ADDRESS

    async def address(self) -> bytes:
        return _ADDRESS

    async def link(self, address: bytes) -> Link:
        """A link; tags are matched over all links of the process, as UCX does."""
        if address != _ADDRESS:
            raise PeerFault(f"{address[:20]!r} is no address in this process's memory")
        link = _Link(self._rendezvous, self._links)
        self._links.add(link)
        return link

    async def close(self) -> None:
        for listener in list(self._listeners.values()):
            await listener.close()
        for link in list(self._links):
            await link.abort()


class _Listener(Listener):
    def __init__(
        self,
        listeners: dict[str, _Listener],
        name: str,
        accept: Callable[[Channel], Awaitable[None]],
        limiter: ConnectionLimiter,
    ) -> None:
        self.url = f"memory://{name}"
        self._listeners, self._name, self._accept, self._limiter = listeners, name, accept, limiter
        self._visits: set[asyncio.Future[None]] = set()

    def visit(self, channel: _Channel) -> None:
        channel.admitted = self._limiter.admit("", 0, channel.end)
        if channel.admitted is None:
            channel.end()
            return
        visit = asyncio.ensure_future(self._accept(channel))
        self._visits.add(visit)
        visit.add_done_callback(self._visits.discard)

    async def close(self) -> None:
        self._listeners.pop(self._name, None)


class _Channel(Channel):
    """One end of a channel; ``other`` is the other one. Frames that were sent before an end was
    closed still arrive, as over TCP."""

    other: _Channel
    admitted: AdmittedConnection | None = None

    def __init__(self, peer: str) -> None:
        self.peer = peer
        self._frames: deque[bytes] = deque()
        self._changed = asyncio.Event()
        self._is_closed = False

    async def send(self, frame: bytes) -> None:
        while not (self._is_closed or self.other._is_closed):
            if len(self.other._frames) < _FRAMES:
                self.other._frames.append(frame)
                self.other._changed.set()
                return
            await self._change()
        raise self._gone()

    async def receive(self, limit: int) -> bytes:
        while not self._is_closed:
            if self._frames:
                frame = self._frames.popleft()
                self.other._changed.set()  # its sender may continue
                if len(frame) > limit:
                    await self.close()
                    raise PeerFault(
                        f"{self.peer} announced a frame of {len(frame)} bytes, at most {limit} are"
                        " allowed here"
                    )
                return frame
            if self.other._is_closed:
                break
            await self._change()
        raise self._gone()

    def hold(self) -> None:
        if self.admitted is not None:
            self.admitted.hold()

    async def close(self) -> None:
        self.end()

    def end(self) -> None:
        self._is_closed = True
        for each in (self, self.other):
            each._changed.set()
        if self.admitted is not None:
            self.admitted.release()

    async def _change(self) -> None:
        """Wait until anything has changed; sender and receiver of this end may both wait."""
        changed = self._changed
        if changed.is_set():
            changed = self._changed = asyncio.Event()
        await changed.wait()

    def _gone(self) -> Disconnected:
        return Disconnected(
            f"{self.peer} is gone: the connection was closed"
            f" {'here' if self._is_closed else 'there'}"
        )


@dataclass(slots=True)
class _Rendezvous:
    """The first end to reach a tag: a sender with its bytes or a receiver with its memory. The
    outcome is set in ``done``."""

    link: _Link
    memory: memoryview
    is_sender: bool
    done: asyncio.Future[None]


class _Link(Link):
    """Sender and receiver of a tag wait for each other; the one that comes second copies."""

    def __init__(self, meetings: dict[int, _Rendezvous], links: set[_Link]) -> None:
        self._rendezvous, self._links = meetings, links
        self._is_aborted = False

    async def send(self, tag: int, data: memoryview) -> None:
        await self._meet(tag, data, is_sender=True)

    async def receive(self, tag: int, into: memoryview) -> None:
        if into.readonly:
            raise InvalidInput(f"the message of tag {tag} was to be received into read-only memory")
        await self._meet(tag, into, is_sender=False)

    async def abort(self) -> None:
        self._is_aborted = True
        self._links.discard(self)
        for tag in [tag for tag, meeting in self._rendezvous.items() if meeting.link is self]:
            meeting = self._rendezvous.pop(tag)
            fail(meeting.done, Disconnected("the link was aborted"))

    async def _meet(self, tag: int, memory: memoryview, *, is_sender: bool) -> None:
        if self._is_aborted:
            raise Disconnected("the link was aborted")
        first = self._rendezvous.get(tag)
        if first is None:
            done = asyncio.get_running_loop().create_future()
            self._rendezvous[tag] = _Rendezvous(self, memory, is_sender, done)
            await asyncio.shield(done)
            return
        if first.is_sender == is_sender:
            raise PeerFault(f"tag {tag} is used twice at once")
        del self._rendezvous[tag]
        data, into = (memory, first.memory) if is_sender else (first.memory, memory)
        problem = _deliver(data, into, tag)
        if first.is_sender or problem is None:
            first.done.set_result(None)
        else:
            fail(first.done, problem)
        if problem is not None and not is_sender:
            raise problem


def _deliver(data: memoryview, into: memoryview, tag: int) -> PeerFault | None:
    data, into = data.cast("B"), into.cast("B")
    if data.nbytes != into.nbytes:
        return PeerFault(
            f"the message of tag {tag} has {data.nbytes} bytes, {into.nbytes} were waited for"
        )
    into[:] = data
    return None


def _name(url: str) -> str:
    return urlsplit(url).netloc
