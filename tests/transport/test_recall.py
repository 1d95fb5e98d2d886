"""Memory that a peer holds open is wanted back: the clone goes on from elsewhere, or hears why
it cannot."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from datastates.errors import Disconnected, Unavailable
from datastates.transport.session import Session
from tests.transport.stores import UID, MemorySource, MemoryStore
from tests.transport.worlds import STATE, World, opened, receive, run, session, until


class Recalled(MemorySource):
    """``wanted`` tells that its memory is wanted back; ``goes_on``: it is elsewhere too."""

    goes_on = True
    is_gone = False
    wanted: Callable[[], None]

    def when_wanted(self, tell: Callable[[], None]) -> None:
        self.wanted = tell

    def recall(self) -> bool:
        self.is_gone = True
        return self.goes_on


class Store(MemoryStore):
    def open(self, uid: str) -> Recalled:
        source = Recalled(self.states[uid], before=self.before)
        self.opened.append(source)
        return source


async def pinned(world: World, peer: Session) -> tuple[Recalled, list[asyncio.Task[bytes]]]:
    """A state that is held open, chunks of it that are on their way and do not arrive."""
    world.far.hold.clear()
    feed = await opened(peer)
    receiving = [asyncio.create_task(receive(feed, index)) for index in range(4)]
    await until(lambda: bool(world.server.sessions[0]._sending.running == 4))
    source = world.store.opened[0]
    assert isinstance(source, Recalled)
    return source, receiving


def with_store(test: Callable[[World], object]) -> None:
    async def within(world: World) -> None:
        world.store.__class__ = Store
        await test(world)  # type: ignore[misc] # a coroutine

    run(within)


def test_a_clone_goes_on_from_elsewhere_and_lets_go_of_memory_at_once() -> None:
    async def test(world: World) -> None:
        async with session(world) as peer:
            source, receiving = await pinned(world, peer)
            for _ in range(3):
                source.wanted()
            await until(lambda: source.is_gone)
            assert world.far.links[0].aborted.is_set()  # before: nobody reads there any more
            world.far.hold.set()
            assert await asyncio.gather(*receiving) == STATE[:4]
            assert world.server.sent.recalled == 1
            assert await peer.refs()

    with_store(test)


def test_a_clone_that_cannot_go_on_hears_why() -> None:
    async def test(world: World) -> None:
        async with session(world) as peer:
            source, receiving = await pinned(world, peer)
            source.goes_on = False
            source.wanted()
            for result in await asyncio.gather(*receiving, return_exceptions=True):
                assert isinstance(result, Unavailable)
                assert "the training that is served needed it: clone again" in str(result)
            assert source.is_gone
            world.far.hold.set()
            world.store.opened.clear()
            _, feed = await peer.open(UID)
            assert feed is not None
            assert await receive(feed, 5) == STATE[5]

    with_store(test)


def test_a_peer_that_reads_by_itself_loses_its_session() -> None:
    async def test(world: World) -> None:
        async with session(world) as peer:
            feed = await opened(peer)
            held = next(iter(world.server.sessions[0]._sending._held.values()))
            held.is_near = True
            source = world.store.opened[0]
            assert isinstance(source, Recalled)
            source.wanted()
            await peer.wait_closed()
            with pytest.raises(Disconnected, match="needed it: clone again"):
                await receive(feed, 0)
            assert await asyncio.to_thread(source.is_closed.wait, 5)

    with_store(test)
