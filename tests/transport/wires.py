"""Two ends joined by queues, and a channel that changes frames on their way."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable

from datastates.errors import DatastatesError, Disconnected, PeerFault
from datastates.transport.connections import AdmittedConnection, ConnectionLimiter
from datastates.transport.contract import Channel, Link, Listener, Tls, Transport

Change = Callable[[int, bytes], Iterable[bytes]]


class QueueChannel(Channel):
    """One end of a pair.

    ``sent`` keeps what went out of this end; ``change`` says what arrives instead of a frame."""

    def __init__(self, peer: str) -> None:
        self.peer = peer
        self.sent: list[bytes] = []
        self.change: Change = lambda number, frame: [frame]
        self.is_closed = False
        self.other: QueueChannel
        self.arrival: AdmittedConnection | None = None
        self.frames: asyncio.Queue[bytes | None] = asyncio.Queue()

    @classmethod
    def pair(cls) -> tuple[QueueChannel, QueueChannel]:
        left, right = cls("server:1"), cls("client:2")
        left.other, right.other = right, left
        return left, right

    async def send(self, frame: bytes) -> None:
        if self.is_closed or self.other.is_closed:
            raise Disconnected(f"{self.peer} is gone")
        self.sent.append(frame)
        for changed in self.change(len(self.sent) - 1, frame):
            self.other.frames.put_nowait(changed)

    async def receive(self, limit: int) -> bytes:
        frame = None if self.is_closed else await self.frames.get()
        if frame is None:
            raise Disconnected(f"{self.peer} closed the connection")
        if len(frame) > limit:
            raise PeerFault(f"{self.peer} announced {len(frame)} bytes")
        return frame

    def hold(self) -> None:
        assert self.arrival is not None
        self.arrival.hold()

    async def close(self) -> None:
        self.end()

    def end(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            self.frames.put_nowait(None)
            self.other.frames.put_nowait(None)
        if self.arrival is not None:
            self.arrival.release()


class QueueLink(Link):
    """Sends into the mailboxes of another transport. ``hold`` keeps sends back until it is set."""

    def __init__(self, here: QueueTransport, there: QueueTransport) -> None:
        self.here, self.there = here, there
        self.aborted = asyncio.Event()

    async def _or_abort(self, work: Awaitable[None]) -> None:
        task, aborted = asyncio.ensure_future(work), asyncio.ensure_future(self.aborted.wait())
        try:
            await asyncio.wait({task, aborted}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise Disconnected("the link was aborted")
            task.result()
        finally:
            task.cancel()
            aborted.cancel()

    async def send(self, tag: int, data: memoryview) -> None:
        async def work() -> None:
            await self.here.hold.wait()
            box = self.there.box(tag)
            if self.aborted.is_set():
                raise Disconnected("the link was aborted")
            box.put_nowait(bytes(data))

        await self._or_abort(work())

    async def receive(self, tag: int, into: memoryview) -> None:
        async def work() -> None:
            self.here.posted.add(tag)
            data = await self.here.box(tag).get()
            if len(data) != len(into):
                raise PeerFault(f"{len(data)} bytes came where {len(into)} belong")
            into[:] = data

        await self._or_abort(work())

    async def abort(self) -> None:
        await asyncio.sleep(0)
        self.aborted.set()
        await asyncio.sleep(0)
        self.here.aborts += 1


class QueueTransport(Transport):
    """A process of its own for the data plane; ``processes`` are all that there are."""

    scheme = "queue"
    processes: dict[bytes, QueueTransport] = {}  # noqa: RUF012 # a test's world
    dead: dict[bytes, QueueTransport] = {}  # noqa: RUF012 # under the names that they had

    def __init__(self, name: str) -> None:
        self.name = name.encode()
        self.boxes: dict[int, asyncio.Queue[bytes]] = {}
        self.posted: set[int] = set()
        self.hold = asyncio.Event()
        self.hold.set()
        self.aborts = 0
        self.is_located = False
        self.problem: DatastatesError | None = None
        self.links: list[QueueLink] = []
        self.accept: Callable[[Channel], Awaitable[None]] | None = None
        self.limiter = ConnectionLimiter()
        self.visits: set[asyncio.Task[None]] = set()
        self.processes[self.name] = self
        self.dead.pop(self.name, None)

    def box(self, tag: int) -> asyncio.Queue[bytes]:
        return self.boxes.setdefault(tag, asyncio.Queue())

    async def listen(
        self,
        url: str,
        accept: Callable[[Channel], Awaitable[None]],
        *,
        tls: Tls | None = None,
        limiter: ConnectionLimiter | None = None,
    ) -> Listener:
        self.accept, self.limiter = accept, limiter or ConnectionLimiter()
        transport = self

        class _Listener(Listener):
            def __init__(self) -> None:
                self.url = url

            async def close(self) -> None:
                transport.accept = None

        return _Listener()

    async def dial(self, url: str, *, timeout_s: float, tls: Tls | None = None) -> QueueChannel:
        server = next((each for each in self.processes.values() if each.accept is not None), None)
        if server is None or server.accept is None:
            raise Disconnected(f"nobody listens at {url}")
        here, there = QueueChannel.pair()
        there.arrival = server.limiter.admit("", 0, there.end)
        if there.arrival is None:
            there.end()
            return here
        visit = asyncio.ensure_future(server.accept(there))
        server.visits.add(visit)
        visit.add_done_callback(server.visits.discard)
        return here

    @property
    def located(self) -> bytes:
        return self.name if self.is_located else b""

    async def address(self) -> bytes:
        if self.problem is not None:
            raise self.problem
        self.is_located = True
        return self.name

    def die(self) -> None:
        """Whatever is under way to or from here fails; the next end is elsewhere."""
        self.boxes, self.is_located = {}, False
        for transport in self.processes.values():
            for link in transport.links:
                if self in {link.here, link.there}:
                    link.aborted.set()
        self.dead[self.name] = self.processes.pop(self.name)
        self.name += b"'"
        self.processes[self.name] = self

    async def link(self, address: bytes) -> Link:
        if address in self.dead:
            raise Disconnected(f"{address!r} is gone")
        if address not in self.processes:
            raise PeerFault(f"{address!r} is no address")
        link = QueueLink(self, self.processes[address])
        self.links.append(link)
        return link

    async def close(self) -> None:
        self.processes.pop(self.name, None)
