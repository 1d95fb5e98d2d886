"""What a peer may cost: how long it may keep somebody waiting, and how much of it is taken in."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datastates.errors import Disconnected, InvalidInput, PeerFault, Unavailable
from datastates.transport.limits import Budget, Share
from datastates.transport.protocol import PART_BYTES, Answer, Ask, Message, Part, Push, Refs, Want
from datastates.transport.session.session import Session
from tests.transport.stores import CHUNK, UID, MemorySource
from tests.transport.worlds import STATE, World, offer, opened, receive, run, session, until


async def answered_by_hand(world: World, peer: Session) -> tuple[Session, asyncio.Task[object]]:
    """The server's end, and a question to it that it leaves to the test to answer."""
    await until(lambda: bool(world.server.sessions))
    far = world.server.sessions[0]
    far._asked.take = lambda number, question: None  # type: ignore[method-assign] # the test answers
    return far, asyncio.create_task(peer.ask(Refs()))


def test_a_peer_that_only_says_that_it_sends_is_given_up() -> None:
    async def never(index: int) -> None:
        await asyncio.Event().wait()

    async def test(world: World) -> None:
        world.store.before = never
        async with session(world) as peer:
            feed = await opened(peer)
            far = world.server.sessions[0]  # it has answered

            async def claim() -> None:
                for far._sending.bytes in range(CHUNK):  # which each heartbeat tells
                    await asyncio.sleep(0.01)

            receiving = asyncio.create_task(receive(feed, 0))
            await until(lambda: bool(far._sending.running))
            claiming = asyncio.create_task(claim())
            with pytest.raises(Disconnected, match="alive, but has sent nothing"):
                await receiving
            claiming.cancel()
            await asyncio.gather(claiming, return_exceptions=True)

    run(test, timeout_s=0.3)


@pytest.mark.parametrize("size", [0, 1, PART_BYTES - 1])
def test_parts_of_an_answer_are_whole(size: int) -> None:
    async def test(world: World) -> None:
        async with session(world) as peer:
            far, asked = await answered_by_hand(world, peer)
            await far._post(Answer(0, bytes(size), False))
            with pytest.raises(PeerFault, match=f"part of {size} bytes"):
                await asked

    run(test)


def test_an_answer_that_does_not_come_to_an_end_is_given_up() -> None:
    async def test(world: World) -> None:
        async with session(world) as peer:
            far, asked = await answered_by_hand(world, peer)

            async def drip() -> None:
                while True:
                    await far._post(Answer(0, bytes(PART_BYTES), False))
                    await asyncio.sleep(0.05)

            dripping = asyncio.create_task(drip())
            with pytest.raises(Disconnected, match="does not come to its end"):
                await asked
            dripping.cancel()
            await asyncio.gather(dripping, return_exceptions=True)

    run(test, timeout_s=0.1)


def test_a_peer_that_wants_the_same_chunk_for_ever_does_not_take_a_push_for_ever() -> None:
    async def test(world: World) -> None:
        async with session(world) as peer:
            await until(lambda: bool(world.server.sessions))
            far = world.server.sessions[0]
            far._asked.take = lambda number, question: None  # type: ignore[method-assign] # it takes the push and records nothing
            far._asked.part = lambda number, data: None  # type: ignore[method-assign] # as above
            far._receiving.bytes_wanted = 1 << 40

            async def want() -> None:
                while True:
                    await far._post(Want(0, 0, 1, (CHUNK,)))
                    await asyncio.sleep(0.05)

            pushing = asyncio.create_task(peer.push(MemorySource(STATE), UID, offer()))
            await until(lambda: bool(peer._sending._held))
            wanting = asyncio.create_task(want())
            with pytest.raises(Disconnected, match=r"has not answered for 0\.6 s"):
                await pushing
            wanting.cancel()
            await asyncio.gather(wanting, return_exceptions=True)

    run(test, timeout_s=0.1)


def test_a_push_that_nobody_takes_is_refused_before_its_body_comes() -> None:
    def refuse(name: str) -> None:
        if name == "writable":
            raise InvalidInput("this server takes no pushes")

    async def test(world: World) -> None:
        world.store.hook = refuse
        async with session(world) as peer:
            await until(lambda: bool(world.server.sessions))
            far = world.server.sessions[0]
            peer._asking._next = 8
            await peer._post(Ask(7, Push(0, 3 * PART_BYTES)))
            for _ in range(3):
                await peer._post(Part(7, bytes(PART_BYTES)))
            assert await peer.refs()  # which comes behind: all of it was dropped
            assert not far._asked._uploads
            assert not far._asked._questions
            source = MemorySource(STATE)
            with pytest.raises(InvalidInput, match="takes no pushes"):
                await peer.push(source, UID, offer(refs=2000))
            assert await peer.refs()
            assert source.is_closed.is_set()

    run(test)


def test_a_client_takes_no_body_of_what_a_server_pushes() -> None:
    async def test(world: World) -> None:
        async with session(world) as peer:
            await until(lambda: bool(world.server.sessions))
            with pytest.raises(PeerFault, match="serves nothing"):
                await world.server.sessions[0].push(MemorySource(STATE), UID, offer(refs=500))
            assert not peer._asked._uploads

    run(test)


def test_what_all_peers_say_of_pushes_is_bounded_and_given_back_with_their_session() -> None:
    async def test(world: World) -> None:
        assert world.server._service is not None
        offers = world.server._service.offers
        half = offers.limit // 2
        async with session(world) as one, session(world) as two, session(world) as three:
            with pytest.raises(InvalidInput, match="at most"):
                await one.ask(Push(0, half + 1))
            for peer in (one, two):
                await peer._post(Ask(50, Push(0, half)))
            assert await one.refs()
            assert await two.refs()
            assert offers.taken == offers.limit
            with pytest.raises(Unavailable, match="try again"):
                await three.push(MemorySource(STATE), UID, offer())
            await one.close()
            await until(lambda: offers.taken == half)
            assert await three.push(MemorySource(STATE), UID, offer()) == offer().state
            assert offers.taken == half

    run(test)


def test_a_push_whose_body_does_not_come_ends_the_session() -> None:
    async def test(world: World) -> None:
        async with session(world, timeout_s=30) as peer:
            await peer._post(Ask(7, Push(0, 3 * PART_BYTES)))
            await peer._post(Part(7, bytes(PART_BYTES)))
            await peer.wait_closed()
            assert world.server._service is not None
            await until(lambda: world.server._service is not None and not world.server._service.offers.taken)

    run(test, timeout_s=0.3)


@pytest.mark.parametrize("message", [Part(3, b""), Part(3, b"x"), Part(3, bytes(PART_BYTES + 1))], ids=["empty", "short", "long"])
def test_parts_of_a_push_are_whole(message: Message) -> None:
    async def test(world: World) -> None:
        async with session(world) as peer:
            await peer._post(Ask(3, Push(0, 2 * PART_BYTES)))
            await peer._post(message)
            await peer.wait_closed()
            assert "where 524288 belong" in str(peer.error)

    run(test)


_STEPS = st.lists(st.tuples(st.sampled_from(["take", "give", "close"]), st.integers(0, 3), st.integers(0, 60)), max_size=60)


@given(_STEPS)
def test_a_budget_is_what_its_shares_have_together(steps: list[tuple[str, int, int]]) -> None:
    budget = Budget(100)
    shares: list[Share] = [budget.share() for _ in range(4)]
    for what, which, amount in steps:
        share = shares[which]
        match what:
            case "take":
                before, could = share.taken, budget.taken + amount <= 100 and share.taken + amount <= 50
                assert share.take(amount) == could or share._is_closed
                assert share.taken - before in {0, amount}
            case "give":
                share.give(amount)
            case _:
                share.close()
                assert not share.taken
                assert not share.take(1)
        assert budget.taken == sum(each.taken for each in shares) <= 100
        assert all(0 <= each.taken <= 50 for each in shares)
