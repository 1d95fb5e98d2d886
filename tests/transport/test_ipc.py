"""The data plane by memory of a device that two processes have, on late devices: it keeps the
contract, and believes nothing of a peer."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from datastates.errors import Disconnected, InvalidInput, PeerFault, Unavailable
from datastates.system.devices import devices, swapped
from datastates.transport import loop
from datastates.transport.contract import Link, OnDevice
from datastates.transport.data_connection import TcpTransport
from datastates.transport.ipc import ADDRESS, IpcEnd
from datastates.transport.protocol import Laid, Land, Message, Room, decode, encode
from tests.support.counted import counted
from tests.support.late import LateDevices, Lateness
from tests.support.transport_suite import TransportSuite, linked

DEVICE = torch.device("cuda", 0)


@pytest.fixture(autouse=True, params=[Lateness.BOTH, Lateness.RANDOM], ids=lambda each: each.value)
def late(request: pytest.FixtureRequest) -> Iterator[LateDevices]:
    """Devices that do everything late, until somebody insists: at once then, for nobody is to
    see them catch up here."""
    late = LateDevices(request.param)
    late.schedule.patience_s = 0.0
    late.reached.add(0)
    with swapped(late):
        yield late


class PairedTransport(TcpTransport):
    """Every second link is the other end of the one before it, as if two processes had a
    session."""

    def __init__(
        self, change: Callable[[Message], Message | None] = lambda message: message
    ) -> None:
        super().__init__()
        self.halves: dict[asyncio.Task[Any] | None, IpcEnd] = {}
        self.change = change
        self.faults: list[PeerFault] = []

    async def address(self) -> bytes:
        return ADDRESS

    async def link(self, address: bytes) -> Link:
        task = asyncio.current_task()
        if task in self.halves:
            return await self._leaving(self.halves.pop(task), address)
        ends: list[IpcEnd] = []

        def post_to(other: int) -> Callable[[Message], Any]:
            async def post(message: Message) -> None:
                await asyncio.sleep(0)
                changed = self.change(message)
                if changed is not None:
                    self._hand(ends[other], decode(encode(changed), peer="the other end"))

            return post

        ends += [IpcEnd(f"end {n}", post_to(1 - n), lambda: 0, lambda: True) for n in range(2)]
        made = await self._leaving(ends[0], address)
        self.halves[task] = ends[1]
        return made

    def _hand(self, end: IpcEnd, message: Message) -> None:
        assert isinstance(message, Land | Room | Laid)
        try:
            end.take(message)
        except PeerFault as exc:
            self.faults.append(exc)

    async def _leaving(self, end: IpcEnd, address: bytes) -> Link:
        link = await end.link(address)
        abort = link.abort

        async def aborted() -> None:
            await abort()
            await end.leave()

        link.abort = aborted  # type: ignore[method-assign]  # as a session does when it ends
        return link


class TestIpc(TransportSuite):
    @pytest.fixture
    def transport(self) -> PairedTransport:
        return PairedTransport()

    @pytest.fixture
    def url(self) -> str:
        return "tcp://127.0.0.1:0"


def put(late: LateDevices, length: int) -> OnDevice:
    """Memory on a device, of which its owner's stream has still to be waited for."""
    owner, memory = devices().stream(DEVICE), late.put(torch.zeros(length, dtype=torch.uint8))
    with devices().on(owner):
        memory.fill_(7)
    return OnDevice(memory, devices().mark(owner))


def test_messages_come_to_memory_on_a_device_behind_what_its_owner_queued(
    late: LateDevices,
) -> None:
    messages, moved = Counter[str](), list[int]()
    data = [random.Random(n).randbytes((4 << 20) - n) for n in range(11)]

    def count(message: Message) -> Message:
        messages[type(message).__name__] += 1
        return message

    async def work() -> list[torch.Tensor]:
        async with linked(PairedTransport(count)) as (here, there):
            into = [put(late, len(each)) for each in data]
            coming = there.receive_there(5, into, moved.append)
            await there.posted()
            sends = [here.send(5 + n, memoryview(each)) for n, each in enumerate(data)]
            await asyncio.gather(*sends, coming)
            return [each.memory for each in into]

    memory = loop.run(work(), 30)
    assert [bytes(each.numpy()) for each in memory] == data
    assert sorted(moved) == list(range(11))
    assert messages == {"Land": 1, "Room": 2, "Laid": 2}  # eight messages together


def test_no_other_plane_takes_memory_on_a_device(late: LateDevices) -> None:
    async def work() -> None:
        async with linked(PairedTransport()) as (here, _):
            with pytest.raises(InvalidInput, match="does not reach"):
                Link.receive_there(here, 5, [put(late, 8)], lambda _: None)
            with pytest.raises(InvalidInput, match="at most 4194304 bytes"):
                here.receive_there(5, [put(late, (4 << 20) + 1)], lambda _: None)

    loop.run(work(), 30)


def test_one_wrong_length_of_several_is_the_peers_fault(late: LateDevices) -> None:
    async def work() -> None:
        async with linked(PairedTransport()) as (here, there):
            coming = there.receive_there(5, [put(late, 100), put(late, 100)], lambda _: None)
            await there.posted()
            await asyncio.gather(
                here.send(5, memoryview(bytes(100))), here.send(6, memoryview(bytes(99)))
            )
            with pytest.raises(PeerFault, match="has 99 bytes"):
                await coming

    loop.run(work(), 30)


LIES: dict[str, Callable[[Message], Message | None]] = {
    "memory that was not told of": lambda m: (
        Room(m.tag, m.number, m.total, 9, m.start, m.length) if isinstance(m, Room) else m
    ),
    "beyond the memory": lambda m: (
        Room(m.tag, m.number, m.total, 0, 1 << 40, m.length) if isinstance(m, Room) else m
    ),
    "more than a part": lambda m: (
        Room(m.tag, m.number, m.total, 0, m.start, m.length + 1) if isinstance(m, Room) else m
    ),
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES.keys())
def test_bytes_are_put_nowhere_but_into_room_that_there_is(
    lie: Callable[[Message], Message | None],
) -> None:
    async def work() -> None:
        async with linked(PairedTransport(lie)) as (here, there):
            coming = asyncio.ensure_future(there.receive(5, memoryview(bytearray(100))))
            with pytest.raises(PeerFault):
                await asyncio.wait_for(here.send(5, memoryview(bytes(100))), 5)
            await there.abort()
            with pytest.raises(Disconnected):
                await coming

    loop.run(work(), 30)


def test_a_handle_that_is_none_is_refused_with_what_to_do() -> None:
    async def work() -> None:
        other = PairedTransport(
            lambda m: Land(m.region, b"torch_1234_5678") if isinstance(m, Land) else m
        )
        async with linked(other) as (here, there):
            coming = asyncio.ensure_future(there.receive(5, memoryview(bytearray(100))))
            with pytest.raises(Unavailable, match="data='auto'"):
                await asyncio.wait_for(here.send(5, memoryview(bytes(100))), 5)
            await there.abort()
            with pytest.raises(Disconnected):
                await coming

    loop.run(work(), 30)


def test_memory_is_opened_only_for_a_peer_that_is_near_and_once() -> None:
    async def work() -> None:
        async def post(message: Message) -> None:
            raise AssertionError(message)

        far = IpcEnd("far", post, lambda: 0, lambda: False)
        with pytest.raises(PeerFault, match="may not"):
            far.take(Land(0, b"x"))
        near = IpcEnd("near", post, lambda: 0, lambda: True)
        near.take(Land(0, b"x"))
        with pytest.raises(PeerFault, match="not again"):
            near.take(Land(0, b"x"))
        for each in (far, near):
            await each.leave()

    loop.run(work(), 30)


def test_rooms_that_nothing_is_sent_to_are_bounded() -> None:
    async def work() -> None:
        async def post(message: Message) -> None:
            raise AssertionError(message)

        end = IpcEnd("peer", post, lambda: 0, lambda: True)
        for tag in range(4096):
            end.take(Room(tag, 0, 1, 0, 0, 1))
        with pytest.raises(PeerFault, match="4096"):
            end.take(Room(4096, 0, 1, 0, 0, 1))
        await end.leave()

    loop.run(work(), 30)


def test_a_process_that_uses_no_device_says_so(late: LateDevices) -> None:
    late.reached.clear()

    async def work() -> None:
        async with linked(PairedTransport()) as (_, there):
            with pytest.raises(Unavailable, match="no device is in use"):
                await there.receive(5, memoryview(bytearray(100)))

    loop.run(work(), 30)


def test_landing_memory_is_used_again_by_the_next_session(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        async with linked(PairedTransport()) as (here, there):
            await asyncio.gather(
                here.send(5, memoryview(bytes(100))), there.receive(5, memoryview(bytearray(100)))
            )

    shared = counted(monkeypatch, "tests.support.late.device.make_shared")
    for _ in range(3):
        loop.run(work(), 30)
    assert shared == [1]
