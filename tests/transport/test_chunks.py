"""The chunks of a session, and the data plane that they come over."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections import Counter
from types import FrameType

import pytest

from datastates.errors import Disconnected, InvalidInput, Unavailable
from datastates.transport.fetch import fetch
from datastates.transport.protocol import Moved, Want
from tests.transport.stores import CHUNK, UID, MemorySink, chunks, manifest_of
from tests.transport.worlds import STATE, World, opened, posted, receive, run, session, until


def test_chunks_arrive_in_any_cut_many_at_once() -> None:
    async def test(world: World) -> None:
        async with session(world) as peer:
            feed = await opened(peer)
            assert feed.lengths == tuple(map(len, STATE))
            assert feed.manifest == manifest_of(STATE)
            got = await asyncio.gather(
                *(receive(feed, n, 10, 1000 + n, CHUNK // 2) for n in range(len(STATE)))
            )
            assert got == STATE
            await feed.close()
            assert world.store.opened[0].is_closed.is_set()
            await feed.close()
        sent = world.server.sent
        assert (sent.bytes, sent.chunks, sent.states[UID]) == (
            sum(map(len, STATE)),
            len(STATE),
            sum(map(len, STATE)),
        )
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


def test_chunks_that_came_before_the_link_broke_are_not_requested_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    messages, came = posted(monkeypatch), list[tuple[int, bytes]]()

    async def test(world: World) -> None:
        broken = asyncio.Event()

        async def breaks(index: int) -> None:
            if index == 2 and not broken.is_set():
                while len(came) < 2:  # noqa: ASYNC110 # what it waits for has no event
                    await asyncio.sleep(0.001)
                broken.set()
                world.far.die()

        world.store.before = breaks
        memory = {index: bytearray(len(STATE[index])) for index in range(4)}

        def arrived(index: int, is_bound: bool) -> None:
            assert not is_bound
            came.append((index, bytes(memory[index])))
            memory[index][:] = bytes(len(memory[index]))  # as if it were used elsewhere

        async with session(world) as peer:
            feed = await opened(peer)
            await feed.receive(
                {index: [memoryview(each)] for index, each in memory.items()}, arrived
            )
        assert sorted(came) == [(index, STATE[index]) for index in range(4)]
        assert not any(map(any, memory.values()))

    run(test)
    wanted = [message.indexes for message in messages if isinstance(message, Want)]
    assert wanted == [(0, 1, 2, 3), (2, 3)]


def test_a_clone_of_three_hundred_chunks_takes_twenty_messages_and_few_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls, messages = Counter[str](), posted(monkeypatch)

    def profile(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and "/transport/" in frame.f_code.co_filename:
            calls[frame.f_code.co_qualname] += 1

    async def test(world: World) -> None:
        world.store.states[UID] = chunks(2, 300, 100)
        async with session(world) as peer:
            threading.setprofile(profile)
            sys.setprofile(profile)
            try:
                state = await peer.resolve("main")
                told, feed = await peer.open(state.uid)
                sink = MemorySink(told.manifest)
                await fetch(sink, [feed])
                await feed.close()
            finally:
                sys.setprofile(None)
                threading.setprofile(None)
        assert [bytes(each) for each in sink.memory] == world.store.states[UID]

    run(test)
    # a session sends Moved once, whatever it carries
    assert sum(not isinstance(message, Moved) for message in messages) <= 20, messages
    assert calls.total() <= 300 * 100, calls.most_common(20)


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
                await feed.receive({3: [memoryview(memory)]}, lambda *_: None)
            assert world.far.links[0].aborted.is_set()  # nor does the sender go on with anything
            assert caught.value.nearest == UID
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
            task = asyncio.create_task(feed.receive({0: [memoryview(memory)]}, lambda *_: None))
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
            return (
                len(near.posted) == len(far.links) == len(near.links)
                and not near.links[-1].aborted.is_set()
            )

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
            assert [link.aborted.is_set() for link in (*world.near.links, *world.far.links)] == [
                True,
                False,
                False,
            ]

    run(test)


def test_what_a_receiver_asks_wrongly_is_told_before_anything_is_sent() -> None:
    async def test(world: World) -> None:
        async with session(world) as peer:
            feed = await opened(peer)
            with pytest.raises(InvalidInput, match="10 bytes were asked for as chunk 0"):
                await feed.receive({0: [memoryview(bytearray(10))]}, lambda *_: None)
            with pytest.raises(InvalidInput, match="no such chunk"):
                await feed.receive({len(STATE): [memoryview(bytearray(10))]}, lambda *_: None)
            assert peer.is_open

    run(test)


# --- the data plane that they come over -----------------------------------------------------------


def test_who_resets_the_data_plane_makes_the_other_end_reset_it_too() -> None:
    """What is sent over one end's old link to the other's new one would hang, and break the new
    one: so it is over UCX."""

    async def test(world: World) -> None:
        async with session(world) as peer:
            feed = await opened(peer)
            for round_ in range(3):
                assert await receive(feed, 0) == STATE[0]
                assert [len(transport.links) for transport in (world.near, world.far)] == [
                    round_ + 1
                ] * 2
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


def test_a_chunk_that_was_asked_for_before_the_data_plane_was_reset_does_not_reset_it_again() -> (
    None
):
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
            assert [link.aborted.is_set() for link in (*world.near.links, *world.far.links)] == [
                True,
                False,
                False,
            ]

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
                    # waited for at once
                    await until(lambda: len(world.near.posted) > posted)  # noqa: B023
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
