"""The server: whom it lets in, how many, and how it ends."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import pytest
from blake3 import blake3

from datastates.errors import (
    Closed,
    DatastatesError,
    Disconnected,
    InvalidInput,
    NotFound,
    Unauthorized,
    Unavailable,
)
from datastates.transport.limits import Limits
from datastates.transport.server import Server, is_loopback
from datastates.transport.session import Session
from tests.transport.stores import UID, MemoryStore
from tests.transport.wires import QueueTransport
from tests.transport.worlds import (
    PATIENCE_S,
    STATE,
    World,
    offer,
    opened,
    receive,
    run,
    session,
    until,
)

TOKEN = b"0123456789abcdef"


@pytest.mark.parametrize(
    ("url", "is_local"),
    [
        ("ucx://127.0.0.1:0", True),
        ("ucx://127.8.9.10:0", True),
        ("ucx://[::1]:0", True),
        ("ucx://localhost:0", True),
        ("memory://name", True),
        ("ucx://0.0.0.0:0", False),
        ("ucx://[::]:0", False),
        ("ucx://10.0.0.1:0", False),
        ("ucx://:0", False),
        ("ucx://localhost.example.org:0", False),
        ("ucx://127.0.0.1.example.org:0", False),
    ],
)
def test_only_what_this_machine_alone_reaches_needs_no_token(url: str, is_local: bool) -> None:
    assert is_loopback(url) is is_local
    transport = QueueTransport("nobody")
    if not is_local:
        with pytest.raises(InvalidInput, match="DATASTATES_TOKEN"):
            Server(MemoryStore(), url, transport=transport)
    Server(MemoryStore(), url, transport=transport, token=TOKEN if not is_local else b"")


def test_who_does_not_know_the_token_is_turned_away_and_counted() -> None:
    async def test(world: World) -> None:
        for wrong in (b"", TOKEN[::-1]):
            with pytest.raises(Unauthorized, match="DATASTATES_TOKEN"):
                await world.connect(token=wrong)
        async with session(world, token=TOKEN) as peer:
            assert await peer.refs()
        assert (world.server.arrived, world.server.limiter.refused) == (1, 2)

    run(test, token=TOKEN)


def test_one_peer_too_many_is_told_so_and_may_come_when_another_has_left() -> None:
    async def test(world: World) -> None:
        first = await world.connect()
        async with session(world):
            with pytest.raises(Unavailable, match="2 peers already"):
                await world.connect()
            assert len(world.server.sessions) == 2
            await first.close()
            await until(lambda: len(world.server.sessions) == 1)
            async with session(world) as peer:
                assert await peer.refs()

    run(test, limits=Limits(sessions=2))


def test_peers_that_never_finish_the_handshake_give_way_and_are_dropped() -> None:
    async def test(world: World) -> None:
        silent = [await world.near.dial("memory://server", timeout_s=1) for _ in range(17)]
        await until(lambda: silent[0].other.is_closed)
        assert not silent[1].other.is_closed
        async with session(world) as peer:
            assert await peer.refs()
            await until(lambda: all(channel.other.is_closed for channel in silent))
            assert await peer.refs()
        assert (world.server.limiter.refused, world.server.limiter.admission.displaced) == (17, 2)

    run(test, timeout_s=2.0, limits=Limits(sessions=2))


def test_peer_that_does_nothing_makes_way_for_the_next_one() -> None:
    async def test(world: World) -> None:
        async with session(world) as busy, session(world) as idle:
            feed = await opened(busy)
            receiving = True

            async def work() -> None:
                while receiving:
                    await receive(feed, 0)

            working = asyncio.create_task(work())
            await until(lambda: any(each.is_idle for each in world.server.sessions))
            async with session(world) as third:
                assert await third.refs()
                await idle.wait_closed()
                assert "others wait for its place" in str(idle.error)
                assert busy.is_open
            receiving = False
            await working
        assert world.server.made_way == 1

    run(test, timeout_s=2.0, limits=Limits(sessions=2))


def test_peer_that_holds_a_state_open_may_pause() -> None:
    async def test(world: World) -> None:
        async with session(world) as peer:
            await opened(peer)
            await until(lambda: world.server.sessions[0].unused_s > 0.1)
            with pytest.raises(Unavailable, match="1 peers already"):
                await world.connect()
            await until(lambda: world.server.sessions[0].is_idle)
            async with session(world) as other:
                assert await other.refs()

    run(test, timeout_s=2.0, limits=Limits(sessions=1))


def test_closing_lets_chunks_on_their_way_arrive() -> None:
    async def test(world: World) -> None:
        world.far.hold.clear()
        peer = await world.connect()
        feed = await opened(peer)
        tasks = [asyncio.create_task(receive(feed, n)) for n in range(4)]
        await until(lambda: bool(world.server.sessions[0]._sending.running))
        closing = asyncio.create_task(world.server.close(grace_s=PATIENCE_S))
        await until(lambda: world.far.accept is None)
        world.far.hold.set()
        assert await asyncio.gather(*tasks) == STATE[:4]
        await closing
        await peer.wait_closed()
        assert "the server was closed" in str(peer.error)

    run(test)


def test_closing_cuts_clients_off_after_the_grace() -> None:
    async def test(world: World) -> None:
        world.far.hold.clear()
        peers = [await world.connect() for _ in range(3)]
        tasks = [asyncio.create_task(receive(await opened(peer), 0)) for peer in peers]
        await until(lambda: sum(each._sending.running for each in world.server.sessions) == 3)
        await world.server.close(grace_s=0.05)
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(result, Disconnected)
        assert not world.server.sessions
        assert all(source.is_closed.is_set() for source in world.store.opened)
        await asyncio.gather(*(peer.wait_closed() for peer in peers))
        with pytest.raises(Disconnected, match="nobody listens"):
            await world.connect()
        await world.server.close()

    run(test)


def test_closing_does_not_wait_for_the_store() -> None:
    block = threading.Event()

    async def test(world: World) -> None:
        world.store.hook = lambda name: block.wait(PATIENCE_S)
        peer = await world.connect()
        task = asyncio.create_task(peer.open(UID))
        await until(lambda: len(world.channels[0].sent) == 4)
        await world.server.close(grace_s=0)
        with pytest.raises(Disconnected):
            await task
        # the state that is opened now is let go by the thread that opened it: ``run`` looks
        block.set()

    run(test)


def test_a_server_starts_once() -> None:
    async def test(world: World) -> None:
        with pytest.raises(Closed, match="started already"):
            await world.server.start()
        await world.server.close()
        with pytest.raises(Closed, match="closed already"):
            await world.server.start()

    run(test)


def test_counters_tell_what_left_and_for_which_state() -> None:
    async def test(world: World) -> None:
        other = "0123" * 6
        world.store.states[other] = STATE[:2]
        async with session(world) as one, session(world) as two:
            await asyncio.gather(
                *(
                    receive(feed, n)
                    for feed in (await opened(one), await opened(two))
                    for n in range(3)
                )
            )
            _, feed = await two.open(other)
            assert feed is not None
            await receive(feed, 1)
        sent, server = world.server.sent, world.server
        size = len(STATE[0])
        assert (sent.bytes, sent.chunks, server.arrived) == (7 * size, 7, 2)
        assert sent.states == {UID: 6 * size, other: size}

    run(test)


def test_what_was_pushed_can_be_asked_for_by_others() -> None:
    async def test(world: World) -> None:
        async with session(world) as one, session(world) as two:
            from tests.transport.stores import MemorySource

            given = offer()
            with pytest.raises(NotFound):
                await two.resolve(given.state.uid)
            await one.push(MemorySource(STATE), given.state.uid, given)
            assert await two.resolve(given.state.uid) == given.state

    run(test)


class Line:
    """Relays that remember what they were told."""

    def __init__(self) -> None:
        self.joined: list[tuple[str, str, tuple[str, ...]]] = []
        self.left: list[tuple[str, str]] = []

    def join(self, uid: str, relay_url: str, failed: Sequence[str]) -> str | None:
        known = [url for _, url, _ in self.joined if url not in failed and url != relay_url]
        self.joined.append((uid, relay_url, tuple(failed)))
        return known[-1] if known else None

    def leave(self, uid: str, relay_url: str) -> None:
        self.left.append((uid, relay_url))


def test_receivers_form_a_chain_and_leave_it_with_their_session() -> None:
    line = Line()

    async def test(world: World) -> None:
        async with session(world) as one, session(world) as two:
            first, feed = await one.open(UID, relay="memory://one", here=False)
            assert first.upstream is None
            assert feed is not None
            second, origin = await two.open(UID, relay="memory://two", here=False)
            assert second.upstream == "memory://one"
            assert await origin.digests([0, 3]) == [
                blake3(STATE[0]).digest(),
                blake3(STATE[3]).digest(),
            ]
            await origin.close()
            assert (second.manifest, second.lengths) == (first.manifest, first.lengths)
            assert await asyncio.to_thread(world.store.opened[1].is_closed.wait, 5)
            again, feed = await two.open(
                UID, relay="memory://two", failed=("memory://one",), here=False
            )
            assert again.upstream is None
            assert feed is not None
            here, feed = await two.open(UID, relay="memory://two")
            assert here.upstream is None
            assert feed is not None
            with pytest.raises(DatastatesError):
                await one.open("abcd", relay="memory://one", here=False)
        await until(lambda: set(line.left) == {(UID, "memory://one"), (UID, "memory://two")})

    run(test, relays=line)


def test_a_session_with_itself_in_one_process_works_over_the_public_memory_transport() -> None:
    async def test() -> None:
        server = Server(MemoryStore({UID: STATE}), "memory://", token=TOKEN)
        await server.start()
        peer = await Session.connect(server.url, token=TOKEN)
        feed = await opened(peer)
        assert await asyncio.gather(*(receive(feed, n, 100) for n in range(len(STATE)))) == STATE
        await peer.close()
        await server.close()

    asyncio.run(test())
