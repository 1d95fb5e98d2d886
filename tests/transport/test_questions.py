"""Questions to a peer, their answers and errors."""

from __future__ import annotations

import asyncio
import threading

import pytest

from datastates.errors import (
    Conflict,
    DatastatesError,
    Disconnected,
    NotFound,
    PeerFault,
    SyntaxProblem,
    Torn,
    Unavailable,
)
from datastates.transport.protocol import FRAME_BYTES, Ask, Find, Refs
from tests.transport.stores import UID, record
from tests.transport.worlds import PATIENCE_S, World, run, session, until


def test_questions_reach_the_store_and_answers_come_back() -> None:
    async def test(world: World) -> None:
        async with session(world) as peer:
            assert peer.identity == world.store.identity()
            assert await peer.refs() == world.store.branches
            assert (await peer.find("loss < 1", limit=5, after="cursor")).next == "cursor"
            assert (await peer.log("main", limit=1)).states == tuple(world.store.records)
            assert (await peer.resolve("main")).uid == UID

    run(test)


def test_an_answer_longer_than_a_frame_comes_in_parts() -> None:
    async def test(world: World) -> None:
        world.store.records = [record(step=n, message="m" * 8000) for n in range(1000)]
        async with session(world) as peer:
            page = await peer.find("all", limit=1000)
            assert page.states == tuple(world.store.records)
            assert max(len(frame) for frame in world.channels[0].other.sent) <= FRAME_BYTES

    run(test)


def test_an_answer_that_is_longer_than_was_asked_for_ends_the_session() -> None:
    async def test(world: World) -> None:
        world.store.records = [record(step=n, message="m" * 8000) for n in range(100)]
        async with session(world) as peer:
            with pytest.raises(PeerFault, match="more than the 100000 bytes"):
                await peer.ask(Find("all", 1000), limit=100_000)
            assert not peer.is_open

    run(test)


ERRORS = [
    NotFound("no branch 'x'"),
    Conflict("main moved"),
    Torn("torn", paths=("a",)),
    Unavailable("evicted", nearest=UID),
    Disconnected("the database is gone"),
    SyntaxProblem("unexpected word", text="loss <", column=7, expected=("a number",)),
    *(cls("of this kind") for cls in DatastatesError.__subclasses__() if cls not in {Conflict}),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.kind)
def test_an_error_of_the_store_comes_up_as_the_same_class(error: DatastatesError) -> None:
    def fail(name: str) -> None:
        raise error

    async def test(world: World) -> None:
        world.store.hook = fail
        async with session(world) as peer:
            with pytest.raises(DatastatesError) as caught:
                await peer.resolve("x")
            assert type(caught.value) is type(error)
            assert str(caught.value) == str(error)
            if isinstance(error, SyntaxProblem):
                assert isinstance(caught.value, SyntaxProblem)
                assert (caught.value.text, caught.value.column, caught.value.expected) == (
                    error.text,
                    error.column,
                    error.expected,
                )
            if isinstance(error, Unavailable):
                assert isinstance(caught.value, Unavailable)
                assert caught.value.nearest == error.nearest
            world.store.hook = lambda name: None
            assert await peer.refs()

    run(test)


def test_of_an_error_that_is_not_ours_the_peer_learns_the_type_only(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(name: str) -> None:
        raise KeyError("password of the database")

    async def test(world: World) -> None:
        world.store.hook = fail
        async with session(world) as peer:
            with pytest.raises(DatastatesError, match="KeyError: its log") as caught:
                await peer.refs()
            assert "password" not in str(caught.value)

    run(test)
    assert "password of the database" in caplog.text


def test_a_message_of_a_peer_cannot_steer_a_terminal() -> None:
    def fail(name: str) -> None:
        raise NotFound("\x1b[2Jgone\nreally")

    async def test(world: World) -> None:
        world.store.hook = fail
        async with session(world) as peer:
            with pytest.raises(NotFound) as caught:
                await peer.refs()
            assert str(caught.value) == "?[2Jgone\nreally"

    run(test)


def test_64_questions_at_once_are_all_answered_by_few_threads() -> None:
    inside, most, lock = 0, 0, threading.Lock()
    room = threading.Barrier(8)

    def count(name: str) -> None:
        nonlocal inside, most
        with lock:
            inside += 1
            most = max(most, inside)
        room.wait(PATIENCE_S)
        with lock:
            inside -= 1

    async def test(world: World) -> None:
        world.store.hook = count
        async with session(world) as peer:
            answers = await asyncio.gather(*(peer.find("x", after=str(n)) for n in range(64)))
            assert [page.next for page in answers] == [str(n) for n in range(64)]

    run(test)
    assert most == 8


def test_a_peer_that_asks_without_end_is_cut_off() -> None:
    block = threading.Event()

    async def test(world: World) -> None:
        world.store.hook = lambda name: block.wait(PATIENCE_S)
        async with session(world) as peer:
            flood = [asyncio.create_task(peer._post(Ask(n, Refs()))) for n in range(300)]
            await asyncio.gather(*flood, return_exceptions=True)
            await peer.wait_closed()
            assert "while 256 others are open" in str(peer.error)
        block.set()

    run(test)


def test_an_answer_that_comes_after_its_question_was_given_up_is_dropped() -> None:
    block = threading.Event()

    async def test(world: World) -> None:
        world.store.hook = lambda name: block.wait(PATIENCE_S)
        async with session(world) as peer:
            task = asyncio.create_task(peer.refs())
            await until(lambda: len(world.channels[0].sent) == 4)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            block.set()
            assert await peer.refs()

    run(test)


def test_a_state_that_was_opened_for_nobody_is_unpinned() -> None:
    block = threading.Event()

    async def test(world: World) -> None:
        world.store.hook = lambda name: block.wait(PATIENCE_S)
        async with session(world) as peer:
            task = asyncio.create_task(peer.open(UID))
            await until(lambda: len(world.channels[0].sent) == 4)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            block.set()
            await until(lambda: bool(world.store.opened))
            assert await asyncio.to_thread(world.store.opened[0].is_closed.wait, 5)

    run(test)


def test_a_client_answers_no_questions() -> None:
    async def test(world: World) -> None:
        async with session(world):
            await until(lambda: bool(world.server.sessions))
            with pytest.raises(PeerFault, match="serves nothing"):
                await world.server.sessions[0].refs()

    run(test)
