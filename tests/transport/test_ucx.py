"""UCX keeps the contract, between processes too, when the other one is killed or stopped."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from datastates.errors import Disconnected
from datastates.transport import loop
from datastates.transport.contract import Transport
from datastates.transport.registry import transport_for

from .suite import TransportSuite

pytest.importorskip("ucxx", reason="UCXX is not installed: pip install 'datastates[cu12]'")

PEER = """
import asyncio, sys
from datastates.transport import loop
from datastates.transport.registry import transport_for

async def main():
    transport = transport_for("ucx://")
    arrived = asyncio.get_running_loop().create_future()
    over = asyncio.Event()
    async def accept(channel):
        arrived.set_result(channel)
        await over.wait()
    listener = await transport.listen("ucx://127.0.0.1:0", accept)
    print(listener.url, flush=True)
    channel = await arrived
    link = await transport.link(await channel.receive(8192))
    await channel.send(transport.address())
    data = memoryview(bytes(range(256)) * (1 << 14))
    await link.send(1, data)
    print("sent", flush=True)
    if sys.argv[1] == "end":
        await channel.receive(10)
        over.set()
        return
    await channel.receive(10)
loop.run(main())
"""


@contextmanager
def peer(how: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process that sends one message of 4 MiB, and then waits."""
    process = subprocess.Popen([sys.executable, "-c", PEER, how], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process, process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


class TestUcx(TransportSuite):
    @pytest.fixture
    def transport(self) -> Transport:
        return transport_for("ucx://")

    @pytest.fixture
    def url(self) -> str:
        return "ucx://127.0.0.1:0"


def test_a_message_from_another_process_arrives_and_both_end_at_once() -> None:
    with peer("end") as (process, url):

        async def work() -> None:
            transport = transport_for(url)
            channel = await transport.dial(url, timeout_s=5)
            await channel.send(transport.address())
            link = await transport.link(await channel.receive(8192))
            memory = bytearray(4 << 20)
            await link.receive(1, memoryview(memory))
            assert memory == bytes(range(256)) * (1 << 14)
            await channel.send(b"end")
            await link.abort()
            await channel.close()

        loop.run(work(), timeout_s=30)
        began = time.monotonic()
        assert process.wait(10) == 0
        assert time.monotonic() - began < 5


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_peer_that_is_killed_or_stopped_lets_go_of_our_memory(how: signal.Signals) -> None:
    with peer("stay") as (process, url):

        async def work() -> None:
            transport = transport_for(url)
            channel = await transport.dial(url, timeout_s=5)
            await channel.send(transport.address())
            link = await transport.link(await channel.receive(8192))
            await link.receive(1, memoryview(bytearray(4 << 20)))
            memory = bytearray(4 << 20)
            waiting = asyncio.ensure_future(link.receive(2, memoryview(memory)))
            os.kill(process.pid, how)
            if how is signal.SIGKILL:
                with pytest.raises(Disconnected):
                    await asyncio.wait_for(asyncio.shield(waiting), 5)
            else:
                done, _ = await asyncio.wait({waiting}, timeout=0.5)
                assert not done, "nobody says that a peer was stopped: sessions find out by its silence"
            began = time.monotonic()
            await link.abort()
            assert time.monotonic() - began < 3
            with pytest.raises(Disconnected):
                await waiting
            assert not any(memory)
            await channel.close()

        loop.run(work(), timeout_s=30)
