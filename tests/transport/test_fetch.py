"""One clone from one or several feeds: shares, failures, wrong bytes, cancelling."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence

import pytest

from datastates.errors import Corrupt, Disconnected, InvalidInput, Unavailable
from datastates.transport.contract import Destination, Feed, Sink
from datastates.transport.fetch import Fetched, fetch
from tests.support.effort import seeds
from tests.transport.sinks import BytesFeed, BytesSink, after, failing, make_chunks, simulate

KIB = 1 << 10


def run(sink: Sink, feeds: Sequence[Feed], window: int = 8) -> Fetched:
    """A fetch on a loop of its own, with real threads; nothing may be left of it."""

    async def clone() -> Fetched:
        try:
            return await fetch(sink, feeds, window=window)
        finally:
            assert asyncio.all_tasks() == {asyncio.current_task()}

    before = set(threading.enumerate())
    try:
        return asyncio.run(clone())
    finally:
        assert set(threading.enumerate()) <= before


# --- what arrives ---------------------------------------------------------------------------------


def test_every_missing_chunk_arrives_once() -> None:
    chunks = make_chunks(100)
    sink, feed = BytesSink(chunks, have=range(0, 100, 2)), BytesFeed("peer", chunks)
    fetched = run(sink, [feed])
    assert sink.is_whole()
    assert feed.asked == list(range(1, 100, 2))
    assert (fetched.chunks, fetched.bytes_by_feed) == (50, {"peer": sum(map(len, chunks[1::2]))})
    assert feed.most_flying == 8


def test_nothing_is_asked_for_when_nothing_is_missing() -> None:
    chunks = make_chunks(3)
    assert run(BytesSink(chunks, have=range(3)), []).chunks == 0


def test_missing_chunks_without_a_feed_are_refused() -> None:
    with pytest.raises(InvalidInput, match="3 chunks"):
        run(BytesSink(make_chunks(3)), [])
    with pytest.raises(InvalidInput, match="window of 0"):
        run(BytesSink(make_chunks(3)), [BytesFeed("peer", make_chunks(3))], window=0)


def test_empty_chunks_and_messages_that_come_twice_do_no_harm() -> None:
    chunks = [b"", b"a", b"", *make_chunks(20)]
    sink = BytesSink(chunks)
    run(sink, [BytesFeed("peer", chunks, times=2)])
    assert sink.is_whole()


def test_progress_goes_from_the_first_byte_to_the_last_on_the_loop_thread() -> None:
    chunks = make_chunks(10)
    seen: list[tuple[int, int]] = []
    threads: set[int] = set()

    def show(done: int, total: int) -> None:
        seen.append((done, total))
        threads.add(threading.get_ident())

    asyncio.run(fetch(BytesSink(chunks, have=[0]), [BytesFeed("peer", chunks)], on_progress=show))
    total = sum(map(len, chunks[1:]))
    assert seen[-1] == (total, total)
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    assert threads == {threading.get_ident()}


def test_progress_that_fails_is_logged_once_and_the_clone_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    chunks = make_chunks(10)
    sink = BytesSink(chunks)

    def show(done: int, total: int) -> None:
        raise ZeroDivisionError

    asyncio.run(fetch(sink, [BytesFeed("peer", chunks)], on_progress=show))
    assert sink.is_whole()
    assert len(caplog.records) == 1


def test_digests_are_checked_beside_the_loop_and_beside_the_transfer() -> None:
    chunks = make_chunks(40)
    sink, feed = BytesSink(chunks), BytesFeed("peer", chunks)
    names: set[str] = set()
    both, more = threading.Barrier(2, timeout=60), threading.Event()

    def check(index: int) -> None:
        names.add(threading.current_thread().name.rsplit("_", 1)[0])
        if index in (0, 1):
            both.wait()  # broken unless two are checked at once
            assert more.wait(60)  # set by a transfer that begins meanwhile

    class Watched(BytesFeed):
        async def receive(
            self, chunks: Mapping[int, Destination], arrived: Callable[[int, bool], None]
        ) -> None:
            if 9 in chunks:
                more.set()
            await super().receive(chunks, arrived)

    sink.checking = check
    feed = Watched("peer", chunks)
    run(sink, [feed])
    assert sink.is_whole()
    assert names == {"datastates-verify"}


# --- shares ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [9, 30, 300])
def test_three_equal_sources_give_between_a_fifth_and_a_half_each(count: int) -> None:
    chunks = make_chunks(count)
    sink = BytesSink(chunks)

    async def clone() -> Fetched:
        return await fetch(sink, [BytesFeed(name, chunks, pace_s=0.001) for name in "abc"])

    fetched, took_s = simulate(clone)
    assert sink.is_whole()
    assert all(0.2 < share / sum(sink.lengths) < 0.5 for share in fetched.bytes_by_feed.values())
    assert len(fetched.bytes_by_feed) == 3
    assert took_s < 0.001 * count / 3 * 1.15 + 0.001


def test_feeds_share_by_their_speed_and_end_together() -> None:
    chunks = make_chunks(300)
    sink = BytesSink(chunks)

    async def clone() -> Fetched:
        return await fetch(
            sink, [BytesFeed("slow", chunks, pace_s=0.01), BytesFeed("fast", chunks, pace_s=0.001)]
        )

    fetched, took_s = simulate(clone)
    assert sink.is_whole()
    assert 8 < fetched.bytes_by_feed["fast"] / fetched.bytes_by_feed["slow"] < 12
    # what both could do at best, and three chunks of the slow one
    assert took_s < 300 / (100 + 1000) + 0.03


@pytest.mark.parametrize("connects_s", [0.0, 0.02, 0.05])
def test_sources_that_connect_later_still_get_their_share(connects_s: float) -> None:
    chunks = make_chunks(300)
    sink = BytesSink(chunks)

    async def clone() -> Fetched:
        late = [after(connects_s, BytesFeed(name, chunks, pace_s=0.001)) for name in "bc"]
        return await fetch(sink, [BytesFeed("a", chunks, pace_s=0.001)], late=late)

    fetched, _ = simulate(clone)
    assert sink.is_whole()
    assert all(0.2 < share / sum(sink.lengths) < 0.5 for share in fetched.bytes_by_feed.values())
    assert len(fetched.bytes_by_feed) == 3


def test_a_source_that_never_connects_delays_little() -> None:
    chunks = make_chunks(300)
    sink = BytesSink(chunks)

    async def clone() -> Fetched:
        return await fetch(
            sink,
            [BytesFeed("a", chunks, pace_s=0.001)],
            late=[failing(10, Disconnected("b does not answer"))],
        )

    _, took_s = simulate(clone)
    assert sink.is_whole()
    assert took_s < 0.45  # 0.3 of it on the wire


def test_a_feed_is_waited_for_when_none_is_there_yet() -> None:
    chunks = make_chunks(5)
    sink = BytesSink(chunks)

    async def clone() -> Fetched:
        return await fetch(
            sink,
            [],
            late=[failing(1, Disconnected("a does not answer")), after(3, BytesFeed("b", chunks))],
        )

    fetched, took_s = simulate(clone)
    assert sink.is_whole()
    assert set(fetched.bytes_by_feed) == {"b"}
    assert took_s == pytest.approx(3)


def test_when_no_feed_can_be_reached_the_last_error_says_so() -> None:
    sink = BytesSink(make_chunks(5))

    async def clone() -> Fetched:
        return await fetch(
            sink,
            [],
            late=[
                failing(2, Disconnected("b does not answer")),
                failing(1, Disconnected("a does not answer")),
            ],
        )

    with pytest.raises(Disconnected, match="b does not answer"):
        simulate(clone)


def test_the_last_chunks_are_taken_from_a_feed_that_stalls() -> None:
    chunks = make_chunks(300)
    sink = BytesSink(chunks)
    slow = BytesFeed("slow", chunks, pace_s=0.001, stalls_at=3)

    async def clone() -> Fetched:
        return await fetch(sink, [slow, BytesFeed("fast", chunks, pace_s=0.001)])

    fetched, took_s = simulate(clone)
    assert sink.is_whole()
    assert slow.aborts == 2  # units of three chunks
    assert slow.late_writes == 0
    assert took_s < 1.5
    assert fetched.lost == {}  # it may yet be needed


# --- failures -------------------------------------------------------------------------------------


def test_the_others_do_what_a_dead_feed_leaves() -> None:
    chunks = make_chunks(100)
    sink = BytesSink(chunks)
    feeds = [
        BytesFeed("host-a", chunks),
        BytesFeed("host-b", chunks, dies_at=10),
        BytesFeed("host-c", chunks),
    ]
    fetched = run(sink, feeds)
    assert sink.is_whole()
    assert fetched.bytes_by_feed["host-b"] == sum(len(chunks[index]) for index in feeds[1].sent)
    assert str(fetched.lost["host-b"]) == "host-b: the connection was reset"
    assert isinstance(fetched.lost["host-b"], Disconnected)
    assert list(fetched.lost) == ["host-b"]


def test_when_all_feeds_are_dead_the_rest_comes_from_another_one() -> None:
    chunks = make_chunks(100)
    sink = BytesSink(chunks)
    feeds = [BytesFeed(f"host-{name}", chunks, dies_at=20) for name in "abc"]
    with pytest.raises(Disconnected, match=r"^host-[abc]: the connection was reset$"):
        run(sink, feeds)
    assert not sink.lent
    assert set(sink.data) == {index for feed in feeds for index in feed.sent}
    rest = sink.missing()
    fresh = BytesFeed("d", chunks)
    assert run(sink, [fresh]).chunks == len(rest) == 40
    assert sink.is_whole()
    assert sorted(fresh.asked) == rest


def test_of_a_feed_that_breaks_with_many_chunks_the_first_error_counts() -> None:
    class Breaking(BytesFeed):
        async def receive(self, chunks: Mapping[int, Destination], _: object) -> None:
            raise Disconnected(f"peer broke at chunk {next(iter(chunks))}")

    chunks = make_chunks(20)
    with pytest.raises(Disconnected, match="peer broke at chunk 0"):
        run(BytesSink(chunks), [Breaking("peer", chunks)])


def test_an_error_that_is_not_ours_comes_up_as_itself_and_names_the_peer() -> None:
    class Broken(BytesFeed):
        async def receive(self, chunks: Mapping[int, Destination], _: object) -> None:
            raise ZeroDivisionError("oops")

    sink = BytesSink(make_chunks(5))
    with pytest.raises(ZeroDivisionError, match="oops") as caught:
        run(sink, [Broken("peer", make_chunks(5))])
    assert caught.value.__notes__ == ["while receiving from peer"]
    assert not sink.lent


def test_a_feed_that_is_closed_under_us_does_not_look_like_our_caller_cancelling() -> None:
    class Closed(BytesFeed):
        async def receive(self, chunks: Mapping[int, Destination], _: object) -> None:
            raise asyncio.CancelledError

    sink = BytesSink(make_chunks(5))
    with pytest.raises(Disconnected, match="peer was closed"):
        run(sink, [Closed("peer", make_chunks(5))])


def test_an_error_of_the_sink_ends_the_clone_and_blames_no_peer() -> None:
    chunks = make_chunks(50)
    sink = BytesSink(chunks)

    def check(index: int) -> None:
        if index == 20:
            raise OSError("no memory")

    sink.checking = check
    with pytest.raises(OSError, match="no memory"):
        run(sink, [BytesFeed("a", chunks), BytesFeed("b", chunks)])
    assert not sink.lent
    sink.checking = lambda index: None
    run(sink, [BytesFeed("a", chunks)])
    assert sink.is_whole()


def test_of_chunks_that_are_requested_together_only_those_that_are_not_here_come_again() -> None:
    chunks = make_chunks(40)
    sink = BytesSink(chunks)
    first = BytesFeed("first", chunks, pace_s=0.01, dies_at=7)
    second = BytesFeed("second", chunks)

    with pytest.raises(Disconnected):
        simulate(lambda: fetch(sink, [first], window=20))
    assert first.asked[:10] == list(range(10))
    assert sorted(sink.data) == list(range(7))
    assert not sink.lent
    fetched, _ = simulate(lambda: fetch(sink, [second], window=20))
    assert sink.is_whole()
    assert fetched.chunks == 33
    assert sorted(second.asked) == list(range(7, 40))


# --- wrong bytes ----------------------------------------------------------------------------------


def test_a_wrong_chunk_is_asked_of_another_feed() -> None:
    chunks = make_chunks(30)
    sink = BytesSink(chunks)
    liar, honest = (
        BytesFeed("liar", chunks, wrong=dict.fromkeys(range(30), 9)),
        BytesFeed("honest", chunks),
    )
    fetched = run(sink, [liar, honest])
    assert sink.is_whole()
    assert liar.asked
    assert fetched.bytes_by_feed == {"honest": sum(sink.lengths)}
    assert len(set(liar.asked)) == len(liar.asked)  # never the same chunk again


def test_a_wrong_chunk_is_asked_again_of_the_only_feed() -> None:
    chunks = make_chunks(30)
    sink, feed = BytesSink(chunks), BytesFeed("peer", chunks, wrong={7: 1, 20: 1})
    run(sink, [feed])
    assert sink.is_whole()
    assert sorted(feed.asked) == sorted([*range(30), 7, 20])


@pytest.mark.parametrize("names", [["peer"], ["one", "two"]])
def test_a_chunk_that_is_wrong_twice_is_corrupt_and_the_peers_are_named(names: list[str]) -> None:
    chunks = make_chunks(30)
    sink = BytesSink(chunks)
    feeds = [BytesFeed(name, chunks, wrong={7: 2}) for name in names]
    with pytest.raises(Corrupt, match="chunk 7") as caught:
        run(sink, feeds)
    assert all(name in str(caught.value) for name in names)
    assert not sink.lent
    run(sink, [BytesFeed("honest", chunks)])
    assert sink.is_whole()


# --- room -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("room", [1, 3])
def test_no_more_is_under_way_than_the_sink_has_room_for(room: int) -> None:
    chunks = make_chunks(60)
    sink = BytesSink(chunks, room=room)
    feeds = [BytesFeed(name, chunks) for name in "ab"]
    run(sink, feeds)
    assert sink.is_whole()
    assert sink.most_lent == room


def test_feeds_share_what_room_there_is() -> None:
    chunks = make_chunks(60)
    sink = BytesSink(chunks, room=3)
    feeds = [BytesFeed(name, chunks, pace_s=0.01) for name in "ab"]
    simulate(lambda: fetch(sink, feeds))
    assert sink.is_whole()
    assert sink.most_lent == 3
    assert all(len(feed.sent) > 10 for feed in feeds)


def test_a_sink_that_never_has_room_is_given_up() -> None:
    chunks = make_chunks(10)

    async def clone() -> Fetched:
        return await fetch(BytesSink(chunks, room=0), [BytesFeed("a", chunks)], timeout_s=2)

    with pytest.raises(Unavailable, match="had no room"):
        simulate(clone)


def test_a_sink_that_has_room_again_goes_on() -> None:
    chunks = make_chunks(10)
    sink = BytesSink(chunks, room=0)

    async def clone() -> Fetched:
        asyncio.get_running_loop().call_later(1.0, setattr, sink, "room", 2)
        return await fetch(sink, [BytesFeed("a", chunks)], timeout_s=2)

    simulate(clone)
    assert sink.is_whole()


def test_slow_checks_hold_the_transfer_back() -> None:
    chunks = make_chunks(100)
    sink, feed = BytesSink(chunks), BytesFeed("peer", chunks)
    may_go = threading.Event()
    sink.checking = lambda index: None if may_go.wait(60) else pytest.fail("nobody let it go")

    async def clone() -> int:
        task = asyncio.create_task(fetch(sink, [feed]))
        before = -1
        while len(feed.asked) != before or not before:
            # until 100 turns of the loop ask for nothing new
            before = len(feed.asked)
            for _ in range(100):
                await asyncio.sleep(0)
        may_go.set()
        await task
        return before

    assert asyncio.run(clone()) <= 50  # two units of a quarter each
    assert sink.is_whole()


# --- cancelling -----------------------------------------------------------------------------------


def test_digests_that_are_being_checked_are_waited_for_while_the_loop_goes_on() -> None:
    chunks = make_chunks(1)
    sink = BytesSink(chunks)
    checks, may_go = threading.Event(), threading.Event()

    def check(index: int) -> None:
        checks.set()
        assert may_go.wait(10)

    async def cancel() -> None:
        task = asyncio.create_task(fetch(sink, [BytesFeed("peer", chunks)]))
        await asyncio.to_thread(checks.wait)
        task.cancel()
        for _ in range(100):
            await asyncio.sleep(0)
        assert not task.done()
        may_go.set()
        await asyncio.wait({task})
        assert task.cancelled()
        assert not sink.lent

    sink.checking = check
    asyncio.run(cancel())
    assert sink.is_whole()  # what was whole when it was cancelled is kept


def test_connections_that_are_no_longer_needed_are_cancelled_and_cleaned_up() -> None:
    chunks = make_chunks(20)
    steps: list[str] = []

    async def connect() -> Feed:
        never: asyncio.Future[Feed] = asyncio.get_running_loop().create_future()
        try:
            return await never
        finally:
            for _ in range(5):
                await asyncio.sleep(0)
            steps.append("cleaned up")

    async def clone() -> None:
        await fetch(BytesSink(chunks), [BytesFeed("peer", chunks)], late=[connect()])
        assert steps == ["cleaned up"]

    asyncio.run(clone())


def test_nothing_holds_the_sink_once_it_is_over() -> None:
    async def clone() -> weakref.ref[BytesSink]:
        chunks = make_chunks(20)
        sink = BytesSink(chunks)
        await fetch(sink, [BytesFeed("peer", chunks)])
        return weakref.ref(sink)

    async def look() -> None:
        held = await clone()
        gc.collect()
        assert held() is None

    asyncio.run(look())


@pytest.mark.parametrize("block", seeds(8))
def test_cancelling_leaves_no_task_no_thread_and_no_writer_and_the_rest_can_be_fetched(
    block: int,
) -> None:
    for seed in range(block * 25, block * 25 + 25):
        before = set(threading.enumerate())
        asyncio.run(_cancel_once(random.Random(seed)))
        assert set(threading.enumerate()) <= before, f"seed {seed}"


async def _cancel_once(generator: random.Random) -> None:
    chunks = make_chunks(40)
    sink = BytesSink(chunks, room=generator.choice([None, 5]))
    feeds = [
        BytesFeed(name, chunks, dies_at=generator.choice([None, None, 5]))
        for name in "abc"[: generator.randint(1, 3)]
    ]
    late = [after(0, BytesFeed("d", chunks))] if generator.random() < 0.5 else []
    task = asyncio.create_task(fetch(sink, feeds, late=late, window=generator.randint(1, 8)))
    for _ in range(generator.randint(1, 60)):
        await asyncio.sleep(0)
    task.cancel()
    if generator.random() < 0.5:
        await asyncio.sleep(0)
        task.cancel()  # who is impatient gets no more
    await asyncio.wait({task})
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert not sink.lent
    for _ in range(5):
        await asyncio.sleep(0)
    assert sum(feed.late_writes for feed in feeds) == 0
    if not task.cancelled():
        task.exception()
    await fetch(sink, [BytesFeed("fresh", chunks)])
    assert sink.is_whole()
