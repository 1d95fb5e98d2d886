"""A server and a client with a wire between them that the test holds: for the tests of sessions."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from datastates.transport.protocol import Message, Offer, Ping, RefRecord
from datastates.transport.server import Server
from datastates.transport.session import Session, SessionFeed
from tests.transport.stores import UID, MemoryStore, chunks, manifest_of, record
from tests.transport.wires import QueueChannel, QueueTransport

if TYPE_CHECKING:
    import pytest

STATE = chunks(1, 20)
PATIENCE_S = 60.0
"""Where nothing is to be waited for: a busy machine is slow."""


class World:
    """A server, a client, and both ends of what lies between them."""

    def __init__(self, store: MemoryStore, **options: Any) -> None:
        self.store = store
        self.near, self.far = QueueTransport("client"), QueueTransport("server")
        self.server = Server(
            store, "memory://server", transport=self.far, **{"timeout_s": PATIENCE_S, **options}
        )
        self.timeout_s: float = options.get("timeout_s", PATIENCE_S)
        self.channels: list[QueueChannel] = []

    async def connect(self, **options: Any) -> Session:
        channel = await self.near.dial("memory://server", timeout_s=1)
        self.channels.append(channel)
        return await Session.connect(
            "memory://server",
            channel=channel,
            transport=self.near,
            **{"timeout_s": self.timeout_s, **options},
        )


def run(test: Callable[[World], Awaitable[None]], **options: Any) -> None:
    """The test with a server that holds one state; whatever it does, no task and no pin is left."""

    async def within() -> None:
        before = asyncio.all_tasks()
        world = World(MemoryStore({UID: STATE}), **options)
        await world.server.start()
        try:
            async with asyncio.timeout(PATIENCE_S):
                await test(world)
        finally:
            await world.server.close(grace_s=0)
            await asyncio.gather(*world.far.visits)
            await world.near.close()
            await world.far.close()
        ending = asyncio.all_tasks() - before - {asyncio.current_task()}
        # one may wait for a thread that is at work
        left = (await asyncio.wait(ending, timeout=PATIENCE_S))[1] if ending else ending
        assert not left, left
        for source in world.store.opened:
            assert await asyncio.to_thread(source.is_closed.wait, PATIENCE_S)

    asyncio.run(within())


@asynccontextmanager
async def session(world: World, **options: Any) -> AsyncIterator[Session]:
    made = await world.connect(**options)
    try:
        yield made
    finally:
        await made.close()


async def opened(peer: Session) -> SessionFeed:
    _, feed = await peer.open(UID)
    assert feed is not None
    return feed


async def receive(feed: SessionFeed, index: int, *cuts: int) -> bytes:
    """A chunk of the state, received in pieces that end at ``cuts``."""
    memory = bytearray(len(STATE[index]))
    edges = [0, *cuts, len(memory)]
    pieces = [memoryview(memory)[a:b] for a, b in itertools.pairwise(edges)]
    await feed.receive({index: pieces}, lambda *_: None)
    return bytes(memory)


def posted(monkeypatch: pytest.MonkeyPatch) -> list[Message]:
    """The messages that sessions of this process post, in order, without pings."""
    found, post = list[Message](), Session._post

    async def noting(self: Session, message: Message) -> None:
        if not isinstance(message, Ping):
            found.append(message)
        await post(self, message)

    monkeypatch.setattr(Session, "_post", noting)
    return found


async def until(claim: Callable[[], bool]) -> None:
    """Wait for something that the other end does."""
    while not claim():  # noqa: ASYNC110 # what it waits for has no event
        await asyncio.sleep(0.001)


def offer(uid: str = "ab12" * 6, *, refs: int = 0) -> Offer:
    return Offer(
        manifest_of(STATE),
        record(uid),
        (),
        tuple(RefRecord(f"tag{n}", "tag", uid, "m" * 4000) for n in range(refs)),
    )
