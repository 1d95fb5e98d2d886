"""Sessions: what breaks the protocol, pushes, and how they end."""

from __future__ import annotations

import asyncio
import math
import threading

import pytest

from datastates.errors import (
    Closed,
    DatastatesError,
    Disconnected,
    InvalidInput,
    PeerFault,
    Unavailable,
)
from datastates.system.failures import Failure
from datastates.transport.protocol import (
    MAGIC,
    Answer,
    Ask,
    Failed,
    Hello,
    Laid,
    Land,
    Message,
    Part,
    Ping,
    Proof,
    Ready,
    Release,
    Room,
    Took,
    Want,
)
from tests.transport.stores import CHUNK, UID, MemorySource
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

# --- what breaks the protocol ---------------------------------------------------------------------


WRONG = [
    Want(7, (0,), 1, (CHUNK,)),
    Took(7, 1, CHUNK),
    Land(0, b"a handle"),
    Room(0, 0, 1, 0, 0, 1),
    Laid(0, 0, 1),
    Want(0, (len(STATE),), 1, (CHUNK,)),
    Want(0, (0,), 1, (CHUNK, 1)),
    Want(0, (0,), 1, (1,)),
    Want(0, (0, 1), 1, (CHUNK,)),
    Want(0, (0, 1), 1, (2 * CHUNK,)),
    Want(0, (0, 1), 1, (CHUNK, CHUNK, 1)),
    Ask(0, Release(7)),
    Part(3, b"x"),
    Answer(0, b"", True),
    Failed(0, Failure("not-found", "x")),
    Ping(1),
    Hello(MAGIC, 1, bytes(32)),
    Proof(bytes(32)),
    Ready((), b"", 1000),
]


@pytest.mark.parametrize("message", WRONG, ids=str)
def test_what_breaks_the_protocol_is_answered_by_an_error_or_the_end(message: Message) -> None:
    async def test(world: World) -> None:
        async with session(world) as peer:
            await opened(peer)
            await peer._post(message)
            if isinstance(message, Ask):
                return
            await peer.wait_closed()
            assert isinstance(peer.error, Disconnected)
            assert "closed the connection" in str(peer.error)

    run(test)


def test_more_chunks_at_once_than_allowed_end_the_session() -> None:
    async def test(world: World) -> None:
        world.far.hold.clear()
        async with session(world) as peer:
            await opened(peer)
            wants = [peer._post(Want(0, (0,), n, (CHUNK,))) for n in range(33)]
            await asyncio.gather(*wants, return_exceptions=True)
            await peer.wait_closed()
            assert "more than 32 requests for chunks" in str(peer.error)
        world.far.hold.set()

    run(test)


def test_more_states_held_open_than_allowed_are_refused() -> None:
    async def test(world: World) -> None:
        async with session(world) as peer:
            feeds = [await opened(peer) for _ in range(64)]
            with pytest.raises(InvalidInput, match="64 states open"):
                await peer.open(UID)
            await feeds[0].close()
            await opened(peer)

    run(test)


# --- pushes ---------------------------------------------------------------------------------------


def test_a_push_is_fetched_by_the_server_and_recorded() -> None:
    async def test(world: World) -> None:
        async with session(world) as peer:
            source = MemorySource(STATE)
            given = offer(refs=500)  # 2 MB: several parts
            assert await peer.push(source, given.state.uid, given) == given.state
            assert source.is_closed.is_set()
            assert [bytes(chunk) for chunk in world.store.sinks[0].memory] == STATE
            assert not world.store.abandoned

    run(test)


def test_a_push_that_the_store_refuses_raises_its_error() -> None:
    def refuse(name: str) -> None:
        if name == "receive":
            raise InvalidInput("this server takes no pushes")

    async def test(world: World) -> None:
        world.store.hook = refuse
        async with session(world) as peer:
            source = MemorySource(STATE)
            with pytest.raises(InvalidInput, match="takes no pushes"):
                await peer.push(source, UID, offer())
            assert source.is_closed.is_set()

    run(test)


def test_a_push_that_fails_midway_is_abandoned() -> None:
    def fail(index: int) -> None:
        if index == 7:
            raise Unavailable("the source lost it")

    async def test(world: World) -> None:
        async with session(world) as peer:
            with pytest.raises(DatastatesError, match="the source lost it"):
                await peer.push(MemorySource(STATE, before=fail), UID, offer())
            await until(lambda: world.store.abandoned == world.store.sinks)
            assert await peer.refs()

    run(test)


def test_a_push_that_is_cancelled_leaves_the_session_usable() -> None:
    async def test(world: World) -> None:
        world.near.hold.clear()
        async with session(world) as peer:
            source = MemorySource(STATE)
            task = asyncio.create_task(peer.push(source, UID, offer()))
            await until(lambda: bool(world.near.links))
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert source.is_closed.is_set()
            world.near.hold.set()
            await until(lambda: world.store.abandoned == world.store.sinks)
            assert await peer.push(MemorySource(STATE), UID, offer()) == offer().state

    run(test)


# --- life and death -------------------------------------------------------------------------------


def test_an_idle_session_lives_by_its_heartbeats() -> None:
    async def test(world: World) -> None:
        async with session(world) as peer:
            await until(lambda: len(world.channels[0].sent) > 35)  # each timeout has 10 heartbeats
            assert peer.is_open
            assert await peer.refs()

    run(test, timeout_s=0.2)


def test_each_side_keeps_to_the_shorter_patience_of_the_other() -> None:
    async def test(world: World) -> None:
        async with session(world, timeout_s=100) as peer:
            await until(lambda: len(world.channels[0].sent) > 35)
            assert peer.is_open

    run(test, timeout_s=0.2)


@pytest.mark.parametrize("timeout_s", [math.inf, 1e6])
def test_any_patience_travels(timeout_s: float) -> None:
    async def test(world: World) -> None:
        async with session(world, timeout_s=timeout_s) as peer:
            assert 0.1 <= peer.timeout_s <= 86_400

    run(test, timeout_s=timeout_s)


def test_a_peer_that_falls_silent_is_given_up_and_the_link_is_aborted_before_anybody_hears() -> (
    None
):
    async def test(world: World) -> None:
        world.far.hold.clear()
        async with session(world) as peer:
            feed = await opened(peer)
            aborted: list[bool] = []

            async def chunk() -> None:
                try:
                    await receive(feed, 0)
                finally:
                    aborted.append(world.near.links[0].aborted.is_set())

            async def question() -> None:
                try:
                    await peer.refs()
                finally:
                    aborted.append(world.near.links[0].aborted.is_set())

            waiting = [asyncio.create_task(chunk())]
            await until(lambda: bool(world.far.links))
            world.channels[0].other.change = lambda number, frame: []
            waiting.append(asyncio.create_task(question()))
            results = await asyncio.gather(*waiting, return_exceptions=True)
            assert aborted == [True, True]
            for result in results:
                assert isinstance(result, Disconnected)
                assert "silent for 0.3 s" in str(result)
            with pytest.raises(Disconnected, match="silent"):
                await peer.refs()

    run(test, timeout_s=0.3)


def test_a_chunk_that_does_not_come_from_a_living_peer_is_given_up() -> None:
    async def test(world: World) -> None:
        async with session(world) as peer:
            feed = await opened(peer)
            with pytest.raises(Disconnected, match=r"alive, but has sent nothing .* in 0\.3 s"):
                await receive(feed, 0)

    async def never(index: int) -> None:
        await asyncio.Event().wait()

    async def silent(world: World) -> None:
        world.store.before = never
        await test(world)

    run(silent, timeout_s=0.3)


def test_a_receiver_that_takes_nothing_is_cut_off_and_its_pins_go() -> None:
    async def test(world: World) -> None:
        world.far.hold.clear()
        async with session(world, timeout_s=30) as peer:
            await opened(peer)
            await peer._post(Want(0, (0,), 1, (CHUNK,)))
            await peer.wait_closed()
            assert await asyncio.to_thread(world.store.opened[0].is_closed.wait, PATIENCE_S)

    run(test, timeout_s=0.3)


def test_states_held_open_for_nothing_are_let_go() -> None:
    async def test(world: World) -> None:
        async with session(world, timeout_s=30) as peer:
            await opened(peer)
            await peer.wait_closed()

    run(test, timeout_s=0.1)


def test_a_question_that_is_never_answered_is_given_up() -> None:
    block = threading.Event()

    async def test(world: World) -> None:
        world.store.hook = lambda name: block.wait(PATIENCE_S)
        async with session(world) as peer:
            with pytest.raises(Disconnected, match=r"alive, but has not answered for 0\.6 s"):
                await peer.refs()
            assert peer.is_open
        block.set()

    run(test, timeout_s=0.1)


@pytest.mark.parametrize("side", ["client", "server"])
def test_a_changed_frame_ends_the_session_as_the_peers_fault(side: str) -> None:
    def flip(number: int, frame: bytes) -> list[bytes]:
        return [bytes([frame[0] ^ 1]) + frame[1:]]

    async def test(world: World) -> None:
        async with session(world) as peer:
            await until(lambda: bool(world.server.sessions))
            far = world.server.sessions[0]
            channel = world.channels[0] if side == "client" else world.channels[0].other
            channel.change = flip
            with pytest.raises(DatastatesError):
                await peer.refs()
            noticed = far if side == "client" else peer
            await noticed.wait_closed()
            assert isinstance(noticed.error, PeerFault)

    run(test)


def test_a_session_that_is_closed_fails_whoever_waits_on_it() -> None:
    block = threading.Event()

    async def test(world: World) -> None:
        world.store.hook = lambda name: block.wait(PATIENCE_S)
        peer = await world.connect()
        task = asyncio.create_task(peer.refs())
        await until(lambda: len(world.channels[0].sent) == 4)
        await peer.close()
        with pytest.raises(Closed):
            await task
        with pytest.raises(Closed):
            await peer.refs()
        await peer.close()
        block.set()

    run(test)
