"""The transport within one process keeps the contract."""

from __future__ import annotations

import asyncio

import pytest

from datastates.errors import Disconnected
from datastates.system.admission import Admission, Limits
from datastates.transport.connections import ConnectionLimiter
from datastates.transport.contract import Transport
from datastates.transport.in_process import MemoryTransport
from tests.support.transport_suite import TransportSuite


class TestMemory(TransportSuite):
    @pytest.fixture
    def transport(self) -> Transport:
        return MemoryTransport()

    @pytest.fixture
    def url(self) -> str:
        return "memory://"


def test_connections_within_a_process_are_counted_too() -> None:
    async def work() -> None:
        transport, limiter = MemoryTransport(), ConnectionLimiter(Admission(Limits(connections=2)))
        listener = await transport.listen(
            "memory://", lambda channel: asyncio.sleep(0), limiter=limiter
        )
        ends = [await transport.dial(listener.url, timeout_s=1) for _ in range(3)]
        with pytest.raises(Disconnected):
            await ends[0].receive(10)
        assert (limiter.admission.connections, limiter.admission.displaced) == (2, 1)
        await listener.close()

    asyncio.run(work())
