"""Sessions: chunks, pushes, and how they end."""

from __future__ import annotations

import asyncio
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
from datastates.transport.protocol import (
    MAGIC,
    Answer,
    Ask,
    Failed,
    Failure,
    Hello,
    Message,
    Part,
    Ping,
    Proof,
    Ready,
    Release,
    Took,
    Want,
)
from tests.transport.stores import CHUNK, UID, MemorySource, manifest_of
from tests.transport.worlds import STATE, World, offer, opened, receive, run, session, until

# --- chunks -----------------------------------------------------------------------------------------------------------------


def test_chunks_arrive_in_any_cut_many_at_once() -> None:
    async def test(world: World) -> None:
        async with session(world) as peer:
            feed = await opened(peer)
            assert feed.lengths == tuple(map(len, STATE))
            assert feed.manifest == manifest_of(STATE)
            got = await asyncio.gather(*(receive(feed, n, 10, 1000 + n, CHUNK // 2) for n in range(len(STATE))))
            assert got == STATE
            await feed.close()
            assert world.store.opened[0].is_closed.is_set()
            await feed.close()
        sent = world.server.sent
        assert (sent.bytes, sent.chunks, sent.states[UID]) == (sum(map(len, STATE)), len(STATE), sum(map(len, STATE)))
        assert [len(transport.links) for transport in (world.near, world.far)] == [1, 1]

    run(test)


def test_receives_are_posted_before_the_chunk_is_asked_for() -> None:
    async def test(world: World) -> None:
        async with session(world) as peer:
            feed = await opened(peer)
            before: list[int] = []

            def look(number: int, frame: bytes) -> list[bytes]:
                if b"Want" in frame:
                    before.append(len(world.near.posted))
                return [frame]

            world.channels[0].change = look
            await receive(feed, 0, 10, 20)
            assert before == [3]

    run(test)


def test_no_data_plane_is_made_before_a_chunk_is_wanted() -> None:
    async def test(world: World) -> None:
        async with session(world) as peer:
            await opened(peer)
            assert not world.near.links
            assert not world.far.links

    run(test)


def test_a_chunk_that_will_not_come_raises_why_and_nothing_writes_there_afterwards() -> None:
    def refuse(index: int) -> None:
        if index == 3:
            raise Unavailable("evicted meanwhile", nearest=UID)

    async def test(world: World) -> None:
        world.store.before = refuse
        async with session(world) as peer:
            feed = await opened(peer)
            memory = bytearray(CHUNK)
            assert await receive(feed, 0) == STATE[0]
            with pytest.raises(Unavailable, match="evicted meanwhile") as caught:
                await feed.receive(3, [memoryview(memory)])
            assert world.far.links[0].aborted.is_set()  # nor does the sender go on with anything
            assert caught.value.nearest == UID
            assert world.near.aborts == 1
            assert world.near.links[0].aborted.is_set()
            assert await receive(feed, 4) == STATE[4]  # over a new link
            assert not any(memory)

    run(test)


def test_a_chunk_whose_receiver_is_cancelled_is_not_written_to_afterwards() -> None:
    async def test(world: World) -> None:
        world.far.hold.clear()
        async with session(world) as peer:
            feed = await opened(peer)
            memory = bytearray(CHUNK)
            task = asyncio.create_task(feed.receive(0, [memoryview(memory)]))
            await until(lambda: bool(world.far.links))
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert world.near.links[0].aborted.is_set()
            world.far.hold.set()
            assert await receive(feed, 1) == STATE[1]
            assert not any(memory)

    run(test)


def test_a_state_that_is_released_while_it_is_sent_is_closed_only_when_nothing_reads_it() -> None:
    async def test(world: World) -> None:
        world.far.hold.clear()
        async with session(world) as peer:
            feed = await opened(peer)
            task = asyncio.create_task(receive(feed, 0))
            await until(lambda: bool(world.far.links))
            task.cancel()
            await feed.close()
            assert world.store.opened[0].is_closed.is_set()
            assert world.far.links[0].aborted.is_set()

    run(test)


@pytest.mark.parametrize("end", ["near", "far"])
def test_chunks_whose_link_breaks_come_over_a_new_one(end: str) -> None:
    async def test(world: World) -> None:
        world.far.hold.clear()
        async with session(world) as peer:
            feed = await opened(peer)
            tasks = [asyncio.create_task(receive(feed, n)) for n in range(3)]
            await until(lambda: len(world.near.posted) == 3 and bool(world.far.links))
            await getattr(world, end).links[0].abort()
            await until(lambda: len(world.near.links) == 2)
            world.far.hold.set()
            assert await asyncio.gather(*tasks) == STATE[:3]
            assert [len(transport.links) for transport in (world.near, world.far)] == [2, 2]

    run(test)


def test_a_chunk_whose_link_breaks_every_time_fails() -> None:
    async def test(world: World) -> None:
        near, far = world.near, world.far

        def is_asked_for_anew() -> bool:
            return len(near.posted) == len(far.links) == len(near.links) and not near.links[-1].aborted.is_set()

        far.hold.clear()
        async with session(world) as peer:
            feed = await opened(peer)
            task = asyncio.create_task(receive(feed, 0))
            await until(lambda: bool(near.links))
            for _ in range(4):
                await until(is_asked_for_anew)
                await near.links[-1].abort()
            with pytest.raises(Disconnected, match="aborted"):
                await task
            assert len(near.links) == 4
            far.hold.set()
            assert await receive(feed, 0) == STATE[0]

    run(test)


def test_a_source_whose_upstream_is_gone_is_asked_once() -> None:
    asked = []

    def fail(index: int) -> None:
        asked.append(index)
        raise Disconnected("the one before it is gone")

    async def test(world: World) -> None:
        world.store.before = fail
        async with session(world) as peer:
            feed = await opened(peer)
            with pytest.raises(Disconnected, match="before it is gone"):
                await receive(feed, 1)
            assert asked == [1]

    run(test)


def test_a_state_that_is_released_before_its_chunk_was_read_leaves_the_link_to_the_others() -> None:
    never = asyncio.Event()

    async def before(index: int) -> None:
        if index == 1:
            await never.wait()

    async def test(world: World) -> None:
        world.store.before = before
        async with session(world) as peer:
            one, other = await opened(peer), await opened(peer)
            given_up = asyncio.create_task(receive(one, 1))
            await until(lambda: world.server.sessions[0]._sending.running == 1)
            given_up.cancel()
            await asyncio.gather(given_up, return_exceptions=True)
            world.far.hold.clear()
            wanted = asyncio.create_task(receive(other, 2))
            await until(lambda: len(world.far.links) == 1)
            await one.close()
            world.far.hold.set()
            assert await wanted == STATE[2]
            assert [link.aborted.is_set() for link in (*world.near.links, *world.far.links)] == [True, False, False]

    run(test)


def test_what_a_receiver_asks_wrongly_is_told_before_anything_is_sent() -> None:
    async def test(world: World) -> None:
        async with session(world) as peer:
            feed = await opened(peer)
            with pytest.raises(InvalidInput, match="10 bytes were asked for as chunk 0"):
                await feed.receive(0, [memoryview(bytearray(10))])
            with pytest.raises(InvalidInput, match="no such chunk"):
                await feed.receive(len(STATE), [memoryview(bytearray(10))])
            assert peer.is_open

    run(test)


WRONG = [
    Want(7, 0, 1, (CHUNK,)),
    Took(7, 1, CHUNK),
    Want(0, len(STATE), 1, (CHUNK,)),
    Want(0, 0, 1, (CHUNK, 1)),
    Want(0, 0, 1, (1,)),
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
            wants = [peer._post(Want(0, 0, n, (CHUNK,))) for n in range(65)]
            await asyncio.gather(*wants, return_exceptions=True)
            await peer.wait_closed()
            assert "more than 64 chunks at once" in str(peer.error)
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


def test_who_resets_the_data_plane_makes_the_other_end_reset_it_too() -> None:
    """What is sent over one end's old link to the other's new one would hang, and break the new one: so it is over UCX."""

    async def test(world: World) -> None:
        async with session(world) as peer:
            feed = await opened(peer)
            for round_ in range(3):
                assert await receive(feed, 0) == STATE[0]
                assert [len(transport.links) for transport in (world.near, world.far)] == [round_ + 1] * 2
                await until(lambda: not world.server.sessions[0]._sending.running)
                world.far.hold.clear()
                task = asyncio.create_task(receive(feed, 1))
                await until(lambda: world.server.sessions[0]._sending.running == 1)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                world.far.hold.set()
            assert await receive(feed, 2) == STATE[2]
            assert [link.aborted.is_set() for link in world.far.links] == [True, True, True, False]
            assert [link.aborted.is_set() for link in world.near.links] == [True, True, True, False]

    run(test)


def test_a_chunk_that_was_asked_for_before_the_data_plane_was_reset_does_not_reset_it_again() -> None:
    """A slow source comes to it only when others are on their way over the new link."""

    async def test(world: World) -> None:
        gates = {1: asyncio.Event(), 2: asyncio.Event()}

        async def before(index: int) -> None:
            if index in gates:
                await gates[index].wait()

        world.store.before = before
        async with session(world) as peer:
            feed = await opened(peer)
            given_up = asyncio.create_task(receive(feed, 1))
            await until(lambda: world.server.sessions[0]._sending.running == 1)
            given_up.cancel()
            await asyncio.gather(given_up, return_exceptions=True)
            assert await receive(feed, 0) == STATE[0]
            wanted = asyncio.create_task(receive(feed, 2))
            await until(lambda: world.server.sessions[0]._sending.running == 2)
            gates[1].set()
            await until(lambda: world.server.sessions[0]._sending.running == 1)
            assert await receive(feed, 3) == STATE[3]
            gates[2].set()
            assert await wanted == STATE[2]
            assert [link.aborted.is_set() for link in (*world.near.links, *world.far.links)] == [True, False, False]

    run(test)


# --- pushes -----------------------------------------------------------------------------------------------------------------


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


# --- life and death -----------------------------------------------------------------------------------------------------------


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


def test_a_peer_that_falls_silent_is_given_up_and_the_link_is_aborted_before_anybody_hears() -> None:
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
            await peer._post(Want(0, 0, 1, (CHUNK,)))
            await peer.wait_closed()
            assert await asyncio.to_thread(world.store.opened[0].is_closed.wait, 5)

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
        world.store.hook = lambda name: block.wait(10)
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
        world.store.hook = lambda name: block.wait(10)
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


def test_where_the_data_plane_is_is_told_when_it_is_needed_and_not_before() -> None:
    async def test(world: World) -> None:
        async with session(world) as peer:
            feed = await opened(peer)
            assert not world.near.located
            assert not world.far.located
            assert await receive(feed, 0) == STATE[0]
            assert world.near.located
            assert world.far.located

    run(test)


@pytest.mark.parametrize("end", ["near", "far"])
def test_a_data_plane_that_died_is_made_anew_elsewhere_and_the_chunks_come(end: str) -> None:
    async def test(world: World) -> None:
        transport = world.near if end == "near" else world.far
        async with session(world) as peer:
            feed = await opened(peer)
            assert await receive(feed, 0) == STATE[0]
            for index in range(1, len(STATE)):
                if index % 3 == 0:
                    transport.die()  # in between
                receiving = asyncio.ensure_future(receive(feed, index))
                if index % 3 == 1:  # half way
                    posted = len(world.near.posted)
                    world.far.hold.clear()
                    await until(lambda: len(world.near.posted) > posted)  # noqa: B023 # waited for at once
                    transport.die()
                    world.far.hold.set()
                assert await receiving == STATE[index]
            assert peer.is_open

    run(test)


def test_a_data_plane_that_cannot_be_made_is_named_by_the_end_that_lacks_it() -> None:
    async def test(world: World) -> None:
        world.far.problem = Unavailable("UCX does not start over there")
        async with session(world) as peer:
            feed = await opened(peer)
            with pytest.raises(Unavailable, match="does not start over there"):
                await receive(feed, 0)
            assert peer.is_open

    run(test)
