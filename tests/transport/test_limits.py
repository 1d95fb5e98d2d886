"""What a peer may cost: how long it may keep somebody waiting, and how much of it is taken in."""

from __future__ import annotations

import asyncio
import threading
import tracemalloc
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from datastates.errors import Disconnected, InvalidInput, PeerFault, Unavailable
from datastates.transport import requests
from datastates.transport import session as session_module
from datastates.transport.limits import Budget, Limits, Share, weigh
from datastates.transport.protocol import (
    PART_BYTES,
    Answer,
    Ask,
    Message,
    Offer,
    Part,
    Push,
    Refs,
    StateRecord,
    Want,
)
from datastates.transport.requests import Chains
from datastates.transport.sending import HANDLES
from datastates.transport.session import Session
from tests.drivers.peers import offer_bodies
from tests.transport.stores import CHUNK, UID, MemorySource, record
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

BODIES = {
    name: body
    for name, body in offer_bodies(1 << 20).items()
    if name not in {"nothing", "a claim", "noise"}
}


async def answered_by_hand(world: World, peer: Session) -> tuple[Session, asyncio.Task[object]]:
    """The server's end, and a question to it that it leaves to the test to answer."""
    await until(lambda: bool(world.server.sessions))
    far = world.server.sessions[0]
    # the test answers
    far._incoming.take = lambda number, question: None  # type: ignore[method-assign]
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
            # it takes the push and records nothing
            far._incoming.take = lambda number, question: None  # type: ignore[method-assign]
            far._incoming.part = lambda number, data: None  # type: ignore[method-assign] # as above
            far._receiving.bytes_wanted = 1 << 40

            async def want() -> None:
                while True:
                    await far._post(Want(0, (0,), 1, (CHUNK,)))
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
            peer._outgoing._next = 8
            await peer._post(Ask(7, Push(0, 3 * PART_BYTES)))
            for _ in range(3):
                await peer._post(Part(7, bytes(PART_BYTES)))
            assert await peer.refs()  # which comes behind: all of it was dropped
            assert not far._incoming._uploads
            assert not far._incoming._open_requests
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
            assert not peer._incoming._uploads

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
            await until(
                lambda: world.server._service is not None and not world.server._service.offers.taken
            )

    run(test, timeout_s=0.3)


@pytest.mark.parametrize(
    "message",
    [Part(3, b""), Part(3, b"x"), Part(3, bytes(PART_BYTES + 1))],
    ids=["empty", "short", "long"],
)
def test_parts_of_a_push_are_whole(message: Message) -> None:
    async def test(world: World) -> None:
        async with session(world) as peer:
            await peer._post(Ask(3, Push(0, 2 * PART_BYTES)))
            await peer._post(message)
            await peer.wait_closed()
            assert "where 524288 belong" in str(peer.error)

    run(test)


# --- memory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(BODIES))
def test_a_body_takes_no_more_memory_than_was_reckoned(name: str) -> None:
    body = BODIES[name]
    reckoned = weigh(body, 1 << 40)
    tracemalloc.start()
    try:
        held = msgspec.msgpack.decode(body, type=Offer)
        taken = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert isinstance(held, Offer)
    assert taken < 1.1 * reckoned
    assert weigh(bytearray(body), 1 << 40) == weigh(memoryview(body), 1 << 40) == reckoned
    assert weigh(body, 1000) < 1000 + 41 * max(1000, len(body)), "it goes on when there is too much"


@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-(1 << 63), (1 << 64) - 1)
        | st.floats()
        | st.text()
        | st.binary()
        | st.builds(msgspec.msgpack.Ext, st.integers(-128, 127), st.binary()),
        lambda each: st.lists(each) | st.dictionaries(st.text(), each),
    )
)
def test_every_item_is_counted_once(value: object) -> None:
    body = msgspec.msgpack.encode([value, "the end of it, which is longer than others"])
    assert weigh(body, 1 << 40) - weigh(body[:-44], 1 << 40) == 100 + 2 + 42


def test_an_offer_that_takes_too_much_memory_is_refused_before_it_is_decoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(requests, "decode_offer", None)

    async def test(world: World) -> None:
        async with session(world) as peer:
            body = BODIES["parents"]
            with pytest.raises(Unavailable, match="push one of its ancestors first"):
                await peer._outgoing.request(Push(0, len(body)), limit=0, offer=body)
            assert await peer.refs()
            assert world.server._service is not None
            assert not world.server._service.offers.taken

    run(test, limits=Limits(offer_bytes=4 << 20))


def test_manifest_that_takes_too_much_memory_is_refused_before_it_is_decoded() -> None:
    async def test(world: World) -> None:
        world.store.hook = lambda name: pytest.fail("it was decoded") if name == "receive" else None
        async with session(world) as peer:
            heavy = msgspec.structs.replace(
                offer(), manifest=bytes(20) + b"\x90" * 100_000 + bytes(32)
            )
            with pytest.raises(Unavailable, match="manifest and ancestry of a push take more"):
                await peer.push(MemorySource(STATE), UID, heavy)

    run(test, limits=Limits(offer_bytes=4 << 20))


def test_what_a_push_takes_counts_until_no_thread_works_on_it() -> None:
    begun, go_on = threading.Event(), threading.Event()

    def wait(name: str) -> None:
        if name == "receive":
            begun.set()
            assert go_on.wait(PATIENCE_S)

    async def test(world: World) -> None:
        world.store.hook = wait
        assert world.server._service is not None
        offers = world.server._service.offers
        async with session(world) as peer:
            pushing = asyncio.create_task(peer.push(MemorySource(STATE), UID, offer()))
            await asyncio.to_thread(begun.wait)
            held = offers.taken
        await asyncio.gather(pushing, return_exceptions=True)
        await until(lambda: not world.server.sessions)
        assert held == offers.taken > len(offer().manifest)
        go_on.set()
        await until(lambda: not offers.taken)
        await until(lambda: len(world.store.abandoned) == 1)

    run(test)


def test_a_peer_that_reads_no_answers_is_ended_before_they_take_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(requests, "_TASKS", 50)

    def refuse(name: str) -> None:
        raise InvalidInput("this server takes no pushes")

    async def test(world: World) -> None:
        world.store.hook = refuse
        async with session(world) as peer:
            await until(lambda: bool(world.server.sessions))
            far = world.server.sessions[0]
            await far._writing.acquire()  # as if nothing could be sent
            for number in range(100):
                await peer._post(Ask(number, Push(0, 1)))
            await until(lambda: not far.is_open)
            far._writing.release()
            assert "more than it reads" in str(far.error)

    run(test)


def test_a_page_of_more_states_than_were_asked_for_is_the_peers_fault() -> None:
    async def test(world: World) -> None:
        world.store.records = Longer(record(f"{n:024x}") for n in range(3))
        async with session(world) as peer:
            with pytest.raises(PeerFault, match="3 states, where at most 1 were asked for"):
                await peer.log("main", limit=1)
            assert not peer.is_open
        async with session(world) as peer:
            with pytest.raises(PeerFault, match="at most 2"):
                await peer.find("step > 0", limit=2)

    run(test)


class Longer(list[StateRecord]):
    """Records of which none can be left out."""

    def __getitem__(self, key: Any) -> Any:
        return self if isinstance(key, slice) else super().__getitem__(key)


def test_a_page_of_many_bytes_has_fewer_states(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "PAGE_BYTES", 100_000)

    async def test(world: World) -> None:
        world.store.records = [record(f"{n:024x}", message="m" * 16_000) for n in range(20)]
        async with session(world) as peer:
            assert len((await peer.log("main", limit=20)).states) == 5
            assert len((await peer.find("main", limit=1)).states) == 1
            world.store.records = [record(message="m" * 16_000, step=n) for n in range(2)]
            monkeypatch.setattr(requests, "PAGE_BYTES", 10)
            assert len((await peer.find("main", limit=20)).states) == 1

    run(test)


def test_an_answer_that_takes_too_much_memory_is_refused_before_it_is_decoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(session_module, "BODY_BYTES", 4 << 20)

    async def test(world: World) -> None:
        world.store.records = [msgspec.structs.replace(record(), parents=("ab",) * 1000)] * 50
        async with session(world) as peer:
            with pytest.raises(
                PeerFault, match=r"no StatePage .*more than 4194304 bytes of memory"
            ):
                await peer.log("main", limit=50)

    run(test)


def test_a_peer_serves_in_few_chains_at_once() -> None:
    chains = Chains()

    async def test(world: World) -> None:
        async with session(world) as peer:
            for number in range(1, 200):
                _, feed = await peer.open(UID, relay=f"tcp://10.0.0.1:{number}", here=False)
                await feed.close()
            assert len(chains.line(UID)) == HANDLES

    run(test, relays=chains)


_STEPS = st.lists(
    st.tuples(st.sampled_from(["take", "give"]), st.integers(0, 3), st.integers(0, 60)), max_size=60
)


@given(_STEPS)
def test_a_budget_is_what_its_shares_have_together(steps: list[tuple[str, int, int]]) -> None:
    budget = Budget(100)
    shares: list[Share] = [Share(budget) for _ in range(4)]
    for what, which, amount in steps:
        share = shares[which]
        match what:
            case "take":
                before, could = (
                    share.taken,
                    budget.taken + amount <= 100 and share.taken + amount <= 50,
                )
                assert share.take(amount) == could
                assert share.taken - before in {0, amount}
            case _:
                share.give(amount)
        assert budget.taken == sum(each.taken for each in shares) <= 100
        assert all(0 <= each.taken <= 50 for each in shares)
