"""Bytes that agree with every xxh3 and are others: from a man in the middle, the process that runs
UCX, one of several sources, a relay. None is taken.

A few random places here; ``python -m tests.transport.test_binding --count 1000`` tries as many as
one likes.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
import xxhash
from blake3 import blake3

from datastates.errors import Corrupt
from datastates.transport import loop, same_host, tcp
from datastates.transport.contract import Feed
from datastates.transport.data_connection import HEADER_BYTES, TcpTransport
from datastates.transport.fetch import Fetched, fetch
from datastates.transport.registry import transport_for
from datastates.transport.server import Server
from datastates.transport.session import Session
from datastates.transport.ucx import UcxLink
from tests.support.colliding import collide_somewhere
from tests.transport.stores import UID, MemorySink, MemorySource, MemoryStore, manifest_of
from tests.transport.worlds import PATIENCE_S, offer

TOKEN = b"0123456789abcdef"
CHUNK = 16 << 10
COUNT = 12
HONEST = [random.Random(seed).randbytes(CHUNK - (seed == COUNT - 1)) for seed in range(COUNT)]


class XxhSink(MemorySink):
    """As those of repositories: a chunk is right if its xxh3 is."""

    def __init__(self) -> None:
        super().__init__(manifest_of(HONEST))

    def buffers(self, index: int) -> Sequence[memoryview] | None:
        view = memoryview(self.memory[index])
        return [view[:1000], view[1000:]]

    def accept(self, index: int) -> bool:
        if xxhash.xxh3_128_digest(self.memory[index]) != xxhash.xxh3_128_digest(HONEST[index]):
            return False
        self.accepted.add(index)
        return True

    def has_lies(self) -> bool:
        return any(self.memory[index] != HONEST[index] for index in self.accepted)


class WholeSink(XxhSink):
    """Each chunk in one piece."""

    def buffers(self, index: int) -> Sequence[memoryview] | None:
        return [memoryview(self.memory[index])]


class LyingSource(MemorySource):
    """Gives out ``lies`` by index; with ``tells`` it says so, when it is asked for digests."""

    def __init__(self, lies: dict[int, bytes], *, tells: bool) -> None:
        super().__init__(HONEST)
        self.lies, self.tells, self.told = lies, tells, 0

    async def chunk(self, index: int) -> Sequence[memoryview]:
        if index in self.lies and not (self.is_asked_for_digest() and not self.tells):
            self.told += 1
            return [memoryview(self.lies[index])]
        return await super().chunk(index)

    def is_asked_for_digest(self) -> bool:
        task = asyncio.current_task()
        return task is not None and "DigestCache" in getattr(task.get_coro(), "__qualname__", "")


class LyingStore(MemoryStore):
    """Opens lying sources."""

    def __init__(self, lies: dict[int, bytes], *, tells: bool) -> None:
        super().__init__({UID: HONEST})
        self.lies, self.tells = lies, tells

    def open(self, uid: str) -> MemorySource:
        self.opened.append(LyingSource(self.lies, tells=self.tells))
        return self.opened[-1]


class Middle:
    """Listens like a server, and passes on what comes and goes; on connections for data the bytes
    of ``honest`` become those of ``lie``, whether a message is all of them, a part, or has them
    within. ``close`` fails if none was changed: nothing would have been tried.
    """

    def __init__(self, host: str, port: int, honest: bytes, lie: bytes) -> None:
        self.host, self.port, self.honest, self.lie = host, port, honest, lie
        self.changed = 0
        self.url = ""
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._visit, "127.0.0.1", 0, limit=1 << 22)
        self.url = f"tcp://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def close(self) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        assert self.changed, "the man in the middle changed no byte"

    async def _visit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(self.host, self.port, limit=1 << 22)
        first = await reader.read(1)
        back.write(first)
        is_data = first == tcp.JOIN[:1]
        for work in (
            self._pass(reader, back, (HEADER_BYTES - 1, 32), is_data),
            self._pass(there, writer, (32, 32), is_data),
        ):
            task = asyncio.create_task(work)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pass(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        handshake: tuple[int, int],
        is_data: bool,
    ) -> None:
        try:
            if is_data:
                for count in handshake:
                    writer.write(await reader.readexactly(count))
                while True:
                    head = await reader.readexactly(16)
                    body = await reader.readexactly(int.from_bytes(head[8:], "big"))
                    writer.write(head + self._lied(body))
                    await writer.drain()
            while part := await reader.read(1 << 16):
                writer.write(part)
                await writer.drain()
        except (OSError, EOFError):
            pass
        finally:
            writer.close()

    def _lied(self, body: bytes) -> bytes:
        """What is passed on instead of a message's bytes, which may be a part of the chunk, or
        have it within."""
        lie = body.replace(self.honest, self.lie)
        if len(body) >= 16 and (place := self.honest.find(body)) >= 0:
            lie = self.lie[place : place + len(body)]
        self.changed += lie != body
        return lie


@asynccontextmanager
async def served(store: MemoryStore, plane: str = "tcp") -> AsyncIterator[Server]:
    url = f"{plane}://127.0.0.1:0"
    server = Server(
        store, url, token=TOKEN, data=plane, timeout_s=PATIENCE_S, transport=transport_for(url)
    )
    await server.start()
    try:
        yield server
    finally:
        await server.close(grace_s=0)


@asynccontextmanager
async def feeding(url: str, plane: str = "tcp") -> AsyncIterator[Feed]:
    session = await Session.connect(
        url, token=TOKEN, data=plane, transport=transport_for(f"{plane}://"), timeout_s=PATIENCE_S
    )
    try:
        _, feed = await session.open(UID)
        yield feed
    finally:
        await session.close()


def a_lie(rng: random.Random) -> tuple[int, bytes]:
    """Other bytes of a chunk, of the same xxh3."""
    index = rng.randrange(COUNT)
    lie = collide_somewhere(HONEST[index], rng)
    assert lie != HONEST[index]
    assert xxhash.xxh3_128_digest(lie) == xxhash.xxh3_128_digest(HONEST[index])
    return index, lie


async def refusal(work: Awaitable[Fetched]) -> str:
    """How it was refused."""
    with pytest.raises(Corrupt) as caught:
        await work
    return str(caught.value)


# --- the ways; each says how often somebody lied --------------------------------------------------


async def man_in_the_middle(rng: random.Random) -> int:
    index, lie = a_lie(rng)
    sink = XxhSink()
    async with served(MemoryStore({UID: HONEST})) as server:
        middle = Middle(*tcp.split(server.url)[1:], HONEST[index], lie)
        await middle.start()
        try:
            async with feeding(middle.url) as feed:
                said = await refusal(fetch(sink, [feed]))
                assert f"chunk {index} came from {feed.name}" in said
        finally:
            await middle.close()
    assert not sink.has_lies()
    return middle.changed


async def taken_over_helper(rng: random.Random) -> int:
    """The process that runs UCX, or whoever is on the network between two of them, puts other
    bytes into what arrives."""
    index, lie = a_lie(rng)
    sink, lies = WholeSink(), 0
    honest_receive = UcxLink.receive

    async def receive(link: UcxLink, tag: int, into: memoryview) -> None:
        nonlocal lies
        await honest_receive(link, tag, into)
        if into == HONEST[index]:
            into[:] = lie
            lies += 1

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(UcxLink, "receive", receive)
        patch.setenv(same_host.SWITCH, "0")
        async with (
            served(MemoryStore({UID: HONEST}), "ucx") as server,
            feeding(server.url, "ucx") as feed,
        ):
            said = await refusal(fetch(sink, [feed]))
            assert f"chunk {index} came from {feed.name}" in said
    assert not sink.has_lies()
    return lies


async def second_source(rng: random.Random, *, tells: bool) -> int:
    """It brings what the origin does not have, and says so or not."""
    index, lie = a_lie(rng)
    liar, sink = LyingStore({index: lie}, tells=tells), XxhSink()
    async with (
        served(MemoryStore({UID: HONEST})) as one,
        served(liar) as other,
        feeding(one.url) as origin,
        feeding(other.url) as feed,
    ):
        said = await refusal(fetch(sink, [feed], origin=origin))
        if tells:
            assert f"{origin.name} and {feed.name} disagree about chunk {index}" in said
        else:
            assert f"chunk {index} came from {feed.name}" in said
            await fetch(sink, [origin])
            assert [bytes(each) for each in sink.memory] == HONEST
    assert not sink.has_lies()
    return sum(source.told for source in liar.opened if isinstance(source, LyingSource))


async def one_of_several(rng: random.Random) -> int:
    """The user's list of sources: the first one is the origin, the other one lies and does not
    say so; the clone comes, whole."""
    index, lie = a_lie(rng)
    liar, sink = LyingStore({index: lie}, tells=False), XxhSink()
    async with (
        served(MemoryStore({UID: HONEST})) as one,
        served(liar) as other,
        feeding(one.url) as origin,
        feeding(other.url) as feed,
    ):
        await fetch(sink, [origin, feed], window=2)
    assert [bytes(each) for each in sink.memory] == HONEST
    return sum(source.told for source in liar.opened if isinstance(source, LyingSource))


async def relay(rng: random.Random) -> int:
    """Whoever is ahead in a chain."""
    return await second_source(rng, tells=bool(rng.randrange(2)))


WAYS: dict[str, Callable[[random.Random], Awaitable[int]]] = {
    "a man in the middle": man_in_the_middle,
    "a helper that was taken over": taken_over_helper,
    "one of several sources": one_of_several,
    "a relay": relay,
}


def run(work: Awaitable[Any]) -> Any:
    async def bounded() -> Any:
        async with asyncio.timeout(280):
            return await work

    return loop.run(bounded())


@pytest.mark.parametrize("way", WAYS)
def test_bytes_of_the_same_xxh3_are_refused_wherever_they_are(way: str) -> None:
    async def several() -> int:
        return sum([await WAYS[way](random.Random(seed)) for seed in range(10)])

    assert run(several()), "nobody lied"


@pytest.mark.parametrize("tells", [False, True])
def test_whoever_lies_is_named(tells: bool) -> None:
    assert run(second_source(random.Random(7), tells=tells))


def test_a_source_computes_once_for_all_its_clones(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        store = MemoryStore({UID: HONEST})
        reads: list[int] = []
        store.before = reads.append
        async with served(store) as server:
            for _ in range(3):
                async with feeding(server.url) as feed:
                    assert await feed.digests(range(COUNT)) == [
                        blake3(chunk).digest() for chunk in HONEST
                    ]
        assert sorted(reads) == list(range(COUNT))

    run(test())


def test_a_push_is_bound_to_whoever_pushes() -> None:
    async def test() -> None:
        index, lie = a_lie(random.Random(3))
        store = MemoryStore({})
        sinks: list[XxhSink] = []

        def receive(given: object) -> XxhSink:
            sinks.append(XxhSink())
            return sinks[0]

        # a sink that is content with xxh3
        store.receive = receive  # type: ignore[method-assign, assignment]
        async with served(store) as server:
            middle = Middle(*tcp.split(server.url)[1:], HONEST[index], lie)
            await middle.start()
            try:
                session = await Session.connect(
                    middle.url, token=TOKEN, transport=TcpTransport(), timeout_s=PATIENCE_S
                )
                with pytest.raises(Corrupt, match=f"chunk {index}"):
                    await session.push(MemorySource(HONEST), offer().state.uid, offer())
                await session.close()
            finally:
                await middle.close()
            assert not sinks[0].has_lies()

    run(test())


def test_a_damaged_chunk_of_the_origin_is_said_to_be_so_and_taken_from_another() -> None:
    async def test() -> None:
        class Damaged(MemorySource):
            def is_whole(self, index: int, pieces: Sequence[memoryview]) -> bool:
                return index != 3

        class DamagedStore(MemoryStore):
            def open(self, uid: str) -> MemorySource:
                return Damaged(HONEST)

        store = DamagedStore({UID: HONEST})
        async with served(store) as one, served(MemoryStore({UID: HONEST})) as other:
            async with feeding(one.url) as feed:
                assert "chunk 3 is damaged" in await refusal(fetch(XxhSink(), [feed]))
            async with feeding(one.url) as feed, feeding(other.url) as good:
                sink = XxhSink()
                await fetch(sink, [feed, good])
                assert [bytes(each) for each in sink.memory] == HONEST

    run(test())


def main() -> None:
    """Try many places, and say how many lies were told."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--way", choices=[*WAYS], action="append")
    options = parser.parse_args()

    async def several(way: str) -> int:
        return sum(
            [
                await WAYS[way](random.Random(seed))
                for seed in range(options.first, options.first + options.count)
            ]
        )

    for way in options.way or WAYS:
        lies = run(several(way))
        # it is a command
        print(f"{way}: {options.count} places, {lies} lies told, none taken", flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
