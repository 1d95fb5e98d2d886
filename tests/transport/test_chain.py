"""Forwarding what was verified, and who takes from whom."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datastates.errors import DatastatesError, Disconnected, Unavailable
from datastates.transport import requests
from datastates.transport.chain import Relay
from datastates.transport.contract import Destination
from datastates.transport.fetch import fetch
from datastates.transport.requests import Chains
from tests.transport.sinks import (
    BytesFeed,
    BytesSink,
    BytesSource,
    SourceFeed,
    make_chunks,
    settled,
)

# --- a relay --------------------------------------------------------------------------------------


def test_a_chunk_is_given_out_only_once_its_digest_was_right() -> None:
    chunks = make_chunks(4)
    sink = BytesSink(chunks)
    relay = Relay(b"manifest", sink)

    async def work() -> None:
        waiting = asyncio.create_task(relay.chunk(2))
        for wrong_first in (True, False):
            buffers = relay.buffers(2)
            assert buffers is not None
            data = bytes(len(chunks[2])) if wrong_first else chunks[2]
            for buffer in buffers:
                buffer[:], data = data[: len(buffer)], data[len(buffer) :]
            assert await asyncio.to_thread(relay.accept, 2) is not wrong_first
            await asyncio.sleep(0)
            assert waiting.done() is False or not wrong_first
        assert b"".join(await waiting) == chunks[2]

    asyncio.run(work())
    assert (relay.manifest, relay.lengths) == (b"manifest", sink.lengths)


def test_what_was_accepted_is_given_out_to_who_comes_later() -> None:
    chunks = make_chunks(10)
    relay = Relay(b"", BytesSink(chunks))

    async def work() -> list[bytes]:
        await fetch(relay, [BytesFeed("source", chunks)])
        return [b"".join(await relay.chunk(index)) for index in range(10)]

    assert asyncio.run(asyncio.wait_for(work(), 60)) == chunks


def test_chunks_that_are_here_before_the_clone_are_given_out_at_once() -> None:
    chunks = make_chunks(3)
    relay = Relay(b"", BytesSink(chunks, have=[1]))
    assert b"".join(asyncio.run(relay.chunk(1))) == chunks[1]


def test_a_chunk_that_nobody_asked_for_is_unavailable() -> None:
    class Partial(BytesSink):
        def missing(self) -> list[int]:
            return [0]

    with pytest.raises(Unavailable, match="chunk 1 is not kept"):
        asyncio.run(Relay(b"", Partial(make_chunks(2))).chunk(1))


def test_who_waits_hears_of_the_failure_and_who_comes_later_too() -> None:
    relay = Relay(b"", BytesSink(make_chunks(3)))

    async def work() -> list[object]:
        waiting = [asyncio.create_task(relay.chunk(index)) for index in (0, 0, 1)]
        await asyncio.sleep(0)
        threading.Thread(target=relay.fail, args=(Disconnected("no source is left"),)).start()
        return list(await settled(*waiting, relay.chunk(2)))

    errors = asyncio.run(work())
    assert len({id(error) for error in errors}) == 4
    for error in errors:
        assert isinstance(error, Unavailable)
        assert "no source is left" in str(error)
    with pytest.raises(Unavailable):
        relay.open()


def test_waiting_that_is_cancelled_leaves_nothing() -> None:
    relay = Relay(b"", BytesSink(make_chunks(3)))

    async def work() -> None:
        waiting = asyncio.create_task(relay.chunk(0))
        await asyncio.sleep(0)
        assert relay._waiting
        waiting.cancel()
        await settled(waiting)
        assert not relay._waiting

    asyncio.run(work())


def test_a_relay_is_idle_when_the_last_peer_has_let_go() -> None:
    relay = Relay(b"", BytesSink(make_chunks(3), have=range(3)))

    async def work() -> None:
        await relay.idle()
        first, second = relay.open(), relay.open()
        idle = asyncio.create_task(relay.idle())
        await asyncio.sleep(0)
        first.close()
        first.close()
        await asyncio.sleep(0)
        assert not idle.done()
        assert b"".join(await second.chunk(1)) == b"".join(relay.pieces(1) or [])
        await asyncio.to_thread(second.close)
        await idle
        assert relay.readers == 0

    asyncio.run(work())


# --- a chain of receivers -------------------------------------------------------------------------


class Receiver:
    """One that forwards. ``world`` knows what answers under each url."""

    def __init__(
        self, url: str, source: BytesSource, chains: Chains, world: dict[str, Receiver]
    ) -> None:
        self.url, self.chains, self.world, self.origin = url, chains, world, source
        self.sink = BytesSink(source.chunks)
        self.relay = Relay(b"", self.sink)
        self.is_killed = False
        self.upstreams: list[str] = []
        world[url] = self

    def feed(self) -> SourceFeed:
        """Ask the server whom to ask, leaving out those that failed before."""
        upstream = self.chains.join("state", self.url, tuple(self.upstreams))
        if upstream is None:
            return SourceFeed("source", self.origin)
        self.upstreams.append(upstream)
        return _Wire(upstream, self.world[upstream])

    async def clone(self) -> None:
        while True:
            try:
                await fetch(self.relay, [self.feed()])
            except DatastatesError:
                if self.is_killed:
                    self.relay.fail(Unavailable("killed"))
                    return
            else:
                return


class _Wire(SourceFeed):
    """Breaks when the other side is killed, also while it is waited for."""

    def __init__(self, name: str, receiver: Receiver) -> None:
        super().__init__(name, receiver.relay.open())
        self.receiver = receiver

    async def receive(
        self, chunks: Mapping[int, Destination], arrived: Callable[[int, bool], None]
    ) -> None:
        for index, into in chunks.items():
            self.is_killed = self.receiver.is_killed
            await super().receive({index: into}, arrived)


def test_one_copy_leaves_the_source_for_four_receivers() -> None:
    chunks = make_chunks(200)
    source, chains = BytesSource(chunks), Chains()
    world: dict[str, Receiver] = {}

    async def work() -> list[Receiver]:
        receivers = [Receiver(f"memory://{number}", source, chains, world) for number in range(4)]
        await asyncio.gather(*(receiver.clone() for receiver in receivers))
        return receivers

    receivers = asyncio.run(work())
    assert all(receiver.sink.is_whole() for receiver in receivers)
    assert sum(source.taken.values()) == 200
    assert [receiver.upstreams for receiver in receivers] == [
        [],
        ["memory://0"],
        ["memory://1"],
        ["memory://2"],
    ]


@pytest.mark.parametrize("killed", [0, 1, 2])
def test_when_one_of_the_chain_is_killed_those_behind_it_go_on_from_what_they_have(
    killed: int,
) -> None:
    chunks = make_chunks(200)
    source, chains = BytesSource(chunks), Chains()
    world: dict[str, Receiver] = {}

    async def work() -> list[Receiver]:
        receivers = [Receiver(f"memory://{number}", source, chains, world) for number in range(4)]
        victim, behind = receivers[killed], receivers[killed + 1]

        def kill(index: int) -> None:
            if len(behind.sink.data) == 50:
                victim.is_killed = True
                victim.relay.fail(Disconnected("killed"))

        behind.sink.checking = kill
        tasks = [asyncio.create_task(receiver.clone()) for receiver in receivers]
        await asyncio.gather(*tasks)
        return receivers

    receivers = asyncio.run(work())
    assert all(receiver.sink.is_whole() for receiver in receivers if not receiver.is_killed)
    # none came twice
    assert all(
        receiver.sink.calls["accept"] == 200 for receiver in receivers if not receiver.is_killed
    )
    assert f"memory://{killed}" not in chains.line("state")
    if killed:
        assert sum(source.taken.values()) == 200
        assert receivers[killed + 1].upstreams == [f"memory://{killed}", f"memory://{killed - 1}"]
    else:
        assert sum(source.taken.values()) < 200 + 200 - 50 + 1


def test_wrong_bytes_go_no_further_than_the_first_receiver() -> None:
    chunks = make_chunks(50)
    first = Relay(b"", BytesSink(chunks))
    second = BytesSink(chunks)

    async def work() -> None:
        await asyncio.gather(
            fetch(first, [BytesFeed("source", chunks, wrong={3: 1, 30: 1})]),
            fetch(second, [SourceFeed("first", first.open())]),
        )

    asyncio.run(work())
    assert second.is_whole()
    assert second.calls["accept"] == 50


# --- who takes from whom --------------------------------------------------------------------------


def test_receivers_form_a_line_for_each_state() -> None:
    chains = Chains()
    assert [chains.join("one", url, ()) for url in "abcd"] == [None, "a", "b", "c"]
    assert chains.join("two", "b", ()) is None
    assert chains.line("one") == tuple("abcd")


def test_who_asks_again_keeps_its_place() -> None:
    chains = Chains()
    for url in "abc":
        chains.join("state", url, ())
    assert chains.join("state", "b", ()) == "a"
    assert chains.line("state") == tuple("abc")


def test_who_failed_leaves_the_line_and_who_was_behind_moves_up() -> None:
    chains = Chains()
    for url in "abcd":
        chains.join("state", url, ())
    assert chains.join("state", "c", ("b",)) == "a"
    assert chains.join("state", "d", ()) == "c"
    assert chains.join("state", "c", ("b", "a")) is None
    assert chains.line("state") == ("c", "d")


def test_who_leaves_is_recommended_to_nobody_and_nothing_stays_of_an_empty_line() -> None:
    chains = Chains()
    chains.join("state", "a", ())
    chains.join("state", "b", ())
    chains.leave("state", "b")
    chains.leave("state", "b")
    assert chains.join("state", "c", ()) == "a"
    chains.leave("state", "a")
    chains.leave("state", "c")
    chains.leave("unknown", "c")
    assert not chains._chains


def test_nobody_is_sent_to_one_who_waits_for_him() -> None:
    chains = Chains()
    for url in "abdc":
        chains.join("state", url, ())
    assert chains.join("state", "c", ("d",)) == "b"  # c waits for b
    assert chains.join("state", "d", ("b",)) == "c"  # d waits for c
    assert chains.join("state", "b", ("a",)) is None  # both are ahead of b, and both wait for it
    assert chains.line("state") == ("c", "d", "b")


def test_lines_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "RECEIVERS", 3)
    monkeypatch.setattr(requests, "STATES", 2)
    chains = Chains()
    assert [chains.join("one", url, ()) for url in "abcd"] == [None, "a", "b", None]
    assert chains.line("one") == tuple("abc")
    assert chains.join("two", "a", ()) is None
    assert chains.join("three", "a", ()) is None
    assert chains.join("three", "b", ()) is None
    assert chains.line("three") == ()


@given(
    st.lists(
        st.tuples(
            st.sampled_from("abcdef"), st.sets(st.sampled_from("abcdef"), max_size=3), st.booleans()
        ),
        max_size=40,
    )
)
def test_whoever_joins_fails_and_leaves_in_whatever_order_nobody_waits_in_a_circle(
    steps: list[tuple[str, set[str], bool]],
) -> None:
    chains = Chains()
    above: dict[str, str | None] = {}
    for url, failed, leaves in steps:
        if leaves:
            chains.leave("state", url)
            above.pop(url, None)
            continue
        upstream = chains.join("state", url, tuple(failed - {url}))
        assert upstream != url
        assert upstream not in failed
        above[url] = upstream
        at, length = upstream, 0
        while at is not None:
            assert length <= len(above), f"{url} waits in a circle: {above}"
            at, length = above.get(at), length + 1
