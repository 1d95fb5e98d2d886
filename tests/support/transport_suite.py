"""The suite that every transport must pass, whatever it sends over.

A test class inherits it and gives it a ``transport`` and a ``url``."""

from __future__ import annotations

import asyncio
import os
import random
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest

from datastates.errors import DatastatesError, Disconnected, InvalidInput, PeerFault, Unavailable
from datastates.transport import loop
from datastates.transport.contract import Channel, Link, Transport

LIMIT = 1 << 20
PATIENCE_S = 60.0


@asynccontextmanager
async def meeting(transport: Transport, url: str) -> AsyncIterator[tuple[Channel, Channel]]:
    """Both ends of a channel."""
    arrived: asyncio.Future[Channel] = asyncio.get_running_loop().create_future()
    leaving = asyncio.Event()

    async def accept(channel: Channel) -> None:
        arrived.set_result(channel)
        await leaving.wait()

    listener = await transport.listen(url, accept)
    here = await transport.dial(listener.url, timeout_s=5)
    await here.send(b"a word")  # a peer that sends nothing does not count as arrived
    there = await arrived
    assert await there.receive(LIMIT) == b"a word"
    try:
        yield here, there
    finally:
        leaving.set()
        for end in (here, there):
            await end.close()
        await listener.close()


@asynccontextmanager
async def linked(transport: Transport) -> AsyncIterator[tuple[Link, Link]]:
    """Both ends of the data plane, in one process here."""
    here, there = (
        await transport.link(await transport.address()),
        await transport.link(await transport.address()),
    )
    try:
        yield here, there
    finally:
        await here.abort()
        await there.abort()


class TransportSuite(ABC):
    """The suite for transports.

    Inherit it as ``class TestMyTransport(TransportSuite)`` with fixtures ``transport`` and
    ``url``."""

    @pytest.fixture
    @abstractmethod
    def transport(self) -> Transport:
        """The transport; both ends lie in this process."""

    @pytest.fixture
    @abstractmethod
    def url(self) -> str:
        """An address that ``listen`` accepts, with a free port."""

    def run(self, work: Coroutine[Any, Any, object]) -> None:
        loop.run(work, timeout_s=PATIENCE_S)

    def test_frames_arrive_whole_and_in_order_both_ways(
        self, transport: Transport, url: str
    ) -> None:
        frames = [random.Random(i).randbytes(i % 300) for i in range(10_000)]

        async def work() -> None:
            async with meeting(transport, url) as (here, there):

                async def send(end: Channel) -> None:
                    for frame in frames:
                        await end.send(frame)

                async def receive(end: Channel) -> list[bytes]:
                    return [await end.receive(LIMIT) for _ in frames]

                _, _, mine, theirs = await asyncio.gather(
                    send(here), send(there), receive(here), receive(there)
                )
                assert mine == frames
                assert theirs == frames

        self.run(work())

    def test_a_frame_of_the_limit_arrives_and_a_longer_one_ends_the_channel(
        self, transport: Transport, url: str
    ) -> None:
        async def work() -> None:
            async with meeting(transport, url) as (here, there):
                await here.send(b"x" * 5000)
                assert await there.receive(5000) == b"x" * 5000
                await here.send(b"x" * 5001)
                with pytest.raises(PeerFault, match="5001"):
                    await there.receive(5000)
                with pytest.raises(DatastatesError):
                    await there.receive(5000)

        self.run(work())

    def test_closing_wakes_who_waits_on_either_end(self, transport: Transport, url: str) -> None:
        async def work() -> None:
            async with meeting(transport, url) as (here, there):
                waiting = [asyncio.ensure_future(end.receive(LIMIT)) for end in (here, there)]
                await asyncio.sleep(0)
                await there.close()
                for each in waiting:
                    with pytest.raises(Disconnected):
                        await each
                with pytest.raises(Disconnected):
                    await send_for_ever(here)  # TCP may accept some before it notices
                await there.close()

        self.run(work())

    def test_nobody_there_is_disconnected(self, transport: Transport, url: str) -> None:
        async def work() -> None:
            listener = await transport.listen(url, forget)
            gone = listener.url
            await listener.close()
            with pytest.raises(Disconnected):
                await transport.dial(gone, timeout_s=2)

        self.run(work())

    def test_a_taken_address_is_unavailable(self, transport: Transport, url: str) -> None:
        async def work() -> None:
            listener = await transport.listen(url, forget)
            with pytest.raises(Unavailable):
                await transport.listen(listener.url, forget)
            await listener.close()
            again = await transport.listen(listener.url, forget)
            await again.close()

        self.run(work())

    def test_many_messages_arrive_exactly_whatever_comes_first(self, transport: Transport) -> None:
        rng = random.Random(0)
        messages = {
            1000 + i: rng.randbytes(rng.choice([1, 100, 4096, 70_000])) for i in range(1000)
        }

        async def work() -> None:
            async with linked(transport) as (here, there):
                into = {tag: bytearray(len(data)) for tag, data in messages.items()}
                steps = [here.send(tag, memoryview(data)) for tag, data in messages.items()]
                steps += [there.receive(tag, memoryview(into[tag])) for tag in messages]
                rng.shuffle(steps)
                await asyncio.gather(*steps)
                assert into == messages

        self.run(work())

    def test_bytes_go_straight_into_the_given_memory_and_not_beyond(
        self, transport: Transport
    ) -> None:
        async def work() -> None:
            async with linked(transport) as (here, there):
                memory = bytearray(b"." * (9 << 20))
                data = random.Random(1).randbytes(8 << 20)
                await asyncio.gather(
                    here.send(5, memoryview(data)),
                    there.receive(5, memoryview(memory)[100 : 100 + len(data)]),
                )
                assert memory[:100] == b"." * 100
                assert memory[100 : 100 + len(data)] == data
                assert memory[100 + len(data) :] == b"." * ((1 << 20) - 100)

        self.run(work())

    def test_a_long_message_arrives_while_others_go_the_other_way(
        self, transport: Transport
    ) -> None:
        long = random.Random(2).randbytes(64 << 20)
        short = [random.Random(n).randbytes(1 << 20) for n in range(16)]

        async def work() -> None:
            async with linked(transport) as (here, there):
                into, back = bytearray(len(long)), [bytearray(len(each)) for each in short]
                await asyncio.gather(
                    here.send(1, memoryview(long)),
                    there.receive(1, memoryview(into)),
                    *(there.send(100 + n, memoryview(each)) for n, each in enumerate(short)),
                    *(here.receive(100 + n, memoryview(each)) for n, each in enumerate(back)),
                )
                assert into == long
                assert back == short

        self.run(work())

    def test_many_links_at_once_keep_their_messages_apart(self, transport: Transport) -> None:
        async def one(number: int) -> None:
            async with linked(transport) as (here, there):
                data, into = number.to_bytes(2, "big") * 50_000, bytearray(100_000)
                await asyncio.gather(
                    here.send(number, memoryview(data)), there.receive(number, memoryview(into))
                )
                assert into == data

        async def work() -> None:
            await asyncio.gather(*(one(number) for number in range(40)))

        self.run(work())

    def test_memory_that_cannot_be_written_is_refused(self, transport: Transport) -> None:
        async def work() -> None:
            async with linked(transport) as (here, there):
                constant = bytes(10)
                with pytest.raises(InvalidInput, match="read-only"):
                    await there.receive(3, memoryview(constant))
                into = bytearray(10)
                await asyncio.gather(
                    here.send(3, memoryview(b"x" * 10)), there.receive(3, memoryview(into))
                )
                assert into == b"x" * 10
                assert constant == bytes(10)

        self.run(work())

    def test_what_was_sent_before_closing_arrives(self, transport: Transport, url: str) -> None:
        async def work() -> None:
            async with meeting(transport, url) as (here, there):
                for number in range(20):
                    await here.send(bytes([number]))
                await here.close()
                assert [await there.receive(1) for _ in range(20)] == [
                    bytes([number]) for number in range(20)
                ]
                with pytest.raises(Disconnected):
                    await there.receive(1)

        self.run(work())

    def test_a_sender_waits_for_a_receiver_that_does_not_read(
        self, transport: Transport, url: str
    ) -> None:
        async def work() -> None:
            async with meeting(transport, url) as (here, there):
                sent = 0

                async def send() -> None:
                    nonlocal sent
                    for _ in range(2000):  # 200 MB, more than any buffer on the way
                        await here.send(bytes(100_000))
                        sent += 1

                sending = asyncio.ensure_future(send())
                _, is_waiting = await asyncio.wait({sending}, timeout=0.5)
                assert is_waiting
                was_sent = sent
                for _ in range(was_sent + 1):  # waiting sends go on as soon as there is room
                    assert await there.receive(LIMIT) == bytes(100_000)
                sending.cancel()
                await asyncio.wait({sending})

        self.run(work())

    @pytest.mark.parametrize("length", [101, 70_000, 5_000_000])
    def test_a_longer_message_than_was_waited_for_is_a_fault(
        self, transport: Transport, length: int
    ) -> None:
        async def work() -> None:
            async with linked(transport) as (here, there):
                sending = asyncio.ensure_future(here.send(7, memoryview(bytes(length))))
                with pytest.raises(PeerFault):
                    await there.receive(7, memoryview(bytearray(100)))
                sending.cancel()

        self.run(work())

    def test_after_an_abort_nothing_is_written_and_all_who_wait_know(
        self, transport: Transport
    ) -> None:
        async def work() -> None:
            async with linked(transport) as (here, there):
                memory = [bytearray(4 << 20) for _ in range(8)]
                waiting = [
                    asyncio.ensure_future(there.receive(100 + i, memoryview(each)))
                    for i, each in enumerate(memory)
                ]
                await asyncio.sleep(0.01)
                began = time.monotonic()
                await there.abort()
                assert time.monotonic() - began < 3
                for each in waiting:
                    with pytest.raises(Disconnected):
                        await each
                late = [
                    asyncio.ensure_future(here.send(100 + i, memoryview(b"x" * (4 << 20))))
                    for i in range(8)
                ]
                await asyncio.sleep(0.2)
                assert not any(map(any, memory))
                await here.abort()
                await asyncio.gather(*late, return_exceptions=True)
                with pytest.raises(Disconnected):
                    await there.receive(1, memoryview(bytearray(4)))

        self.run(work())

    def test_a_cancelled_receive_is_over_after_the_abort(self, transport: Transport) -> None:
        async def work() -> None:
            async with linked(transport) as (here, there):
                memory = bytearray(1 << 20)
                waiting = asyncio.ensure_future(there.receive(9, memoryview(memory)))
                await asyncio.sleep(0.01)
                waiting.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await waiting
                await there.abort()
                sending = asyncio.ensure_future(here.send(9, memoryview(b"x" * len(memory))))
                await asyncio.sleep(0.1)
                assert not any(memory)
                await here.abort()
                await asyncio.gather(sending, return_exceptions=True)

        self.run(work())

    def test_cancelling_a_receive_does_not_stop_it(self, transport: Transport) -> None:
        async def work() -> None:
            async with linked(transport) as (here, there):
                memory, data = bytearray(1 << 20), random.Random(3).randbytes(1 << 20)
                waiting = asyncio.ensure_future(there.receive(70, memoryview(memory)))
                await asyncio.sleep(0.01)
                waiting.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await waiting
                await here.send(70, memoryview(data))
                while memory != data:  # noqa: ASYNC110 # nobody is told any more
                    await asyncio.sleep(0.01)

        self.run(work())

    def test_a_damaged_address_is_refused(self, transport: Transport) -> None:
        rng = random.Random(0)

        async def work() -> None:
            address = await transport.address()
            assert len(address) <= 8 << 10
            damaged = [
                b"",
                b"x",
                address[:-1],
                address + b"x",
                address[1:],
                rng.randbytes(len(address)),
            ]
            for position in range(len(address)):
                flipped = bytearray(address)
                flipped[position] ^= 1 << rng.randrange(8)
                damaged.append(bytes(flipped))
            for each in damaged:
                with pytest.raises(PeerFault):
                    await transport.link(each)

        self.run(work())

    def test_nothing_is_left_running(self, transport: Transport, url: str) -> None:
        async def work() -> None:
            for _ in range(3):
                async with meeting(transport, url), linked(transport):
                    pass
            await asyncio.sleep(0)

        self.run(work())
        threads, descriptors = _count_threads(), count_descriptors()
        tasks = loop.run(count_tasks())
        self.run(work())
        deadline = time.monotonic() + 5
        while (
            _count_threads() > threads
            or count_descriptors() > descriptors
            or loop.run(count_tasks()) > tasks
        ):
            assert time.monotonic() < deadline, (
                threading.enumerate(),
                count_descriptors(),
                descriptors,
                loop.run(count_tasks()),
            )
            self.run(asyncio.sleep(0.01))


def _count_threads() -> int:
    """The number of threads without those of asyncio's own pool, which resolves names and starts
    another of at most a few whenever all are busy.
    """
    return sum(not thread.name.startswith("asyncio_") for thread in threading.enumerate())


async def send_for_ever(channel: Channel) -> None:
    """Send until it fails: at first the bytes fit the buffers on the way."""
    while True:
        await channel.send(b"x" * 1000)
        await asyncio.sleep(0)


async def forget(channel: Channel) -> None:
    await channel.close()


def count_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


async def count_tasks() -> int:
    return len(asyncio.all_tasks())
