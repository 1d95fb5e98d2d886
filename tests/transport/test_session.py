"""Sessions: questions, errors, chunks, and how they end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from datastates.errors import Closed, Conflict, DatastatesError, Disconnected, NotFound, PeerFault, SyntaxProblem, Torn, Unavailable
from datastates.transport.protocol import Offer, RefRecord, Refs
from datastates.transport.server import Server
from datastates.transport.session import Session
from tests.transport.stores import UID, MemorySource, MemoryStore, chunks, manifest_of, record
from tests.transport.wires import QueueChannel, QueueTransport

STATE = chunks(1, 20)


class World:
    """A server, a client, and both ends of what lies between them."""

    def __init__(self, store: MemoryStore, **options: Any) -> None:
        self.store = store
        self.near, self.far = QueueTransport("client"), QueueTransport("server")
        self.server = Server(store, "memory://server", transport=self.far, **{"timeout_s": 5.0, **options})
        self.timeout_s: float = options.get("timeout_s", 5.0)
        self.channels: list[QueueChannel] = []

    async def connect(self, **options: Any) -> Session:
        channel = await self.near.dial("memory://server", timeout_s=1)
        self.channels.append(channel)
        return await Session.connect("memory://server", channel=channel, transport=self.near, **{"timeout_s": self.timeout_s, **options})


def run(test: Callable[[World], Awaitable[None]], **options: Any) -> None:
    """The test with a server that holds one state; whatever it does, no task and no pin is left."""

    async def within() -> None:
        before = asyncio.all_tasks()
        world = World(MemoryStore({UID: STATE}), **options)
        await world.server.start()
        try:
            async with asyncio.timeout(20):
                await test(world)
        finally:
            await world.server.close(grace_s=0)
            await asyncio.gather(*world.far.visits)
            await world.near.close()
            await world.far.close()
        for _ in range(3):
            await asyncio.sleep(0)
        left = {task for task in asyncio.all_tasks() - before if not task.done()}
        assert not left, left
        for source in world.store.opened:
            assert await asyncio.to_thread(source.is_closed.wait, 5)

    asyncio.run(within())


@asynccontextmanager
async def session(world: World, **options: Any) -> AsyncIterator[Session]:
    made = await world.connect(**options)
    try:
        yield made
    finally:
        await made.close()


def test_smoke() -> None:
    async def test(world: World) -> None:
        async with session(world) as peer:
            assert await peer.refs() == world.store.branches
            assert (await peer.find("x")).states == tuple(world.store.records)
            assert (await peer.log("main", limit=1)).next is None
            assert (await peer.resolve("main")).uid == UID
            opened, feed = await peer.open(UID)
            assert feed is not None
            assert opened.lengths == tuple(map(len, STATE))
            for n, piece in enumerate(STATE):
                into = bytearray(len(piece))
                await feed.receive(n, [memoryview(into)[:1000], memoryview(into)[1000:]])
                assert into == piece
            await feed.close()

    run(test)
