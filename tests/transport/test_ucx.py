"""UCX keeps the contract, between processes too, when the other one is killed or stopped."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from datastates.errors import Disconnected
from datastates.transport import loop
from datastates.transport.contract import Channel, Link, Transport
from datastates.transport.registry import transport_for
from tests.support import warm
from tests.support.transport_suite import TransportSuite
from tests.transport.worlds import PATIENCE_S

AT_ONCE_S = 30.0
"""What takes a tenth of a second takes longer on a busy machine."""

pytest.importorskip("ucxx", reason="UCXX is not installed: pip install 'datastates[cu13]'")

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
    await channel.send(await transport.address())
    data = memoryview(bytes(range(256)) * (1 << 14))
    await link.send(1, data)
    print("sent", flush=True)
    if sys.argv[1] == "stream":  # more than the buffers on the way hold, and the rest never comes
        sending = asyncio.ensure_future(link.send(2, memoryview(b"x" * (256 << 20))))
        await channel.send(b"sending")
        await asyncio.wait({sending})
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
    process = warm.Popen([sys.executable, "-c", PEER, how], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process, process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


async def linked(url: str) -> tuple[Channel, Link]:
    """The channel and the link to a peer."""
    transport = transport_for(url)
    channel = await transport.dial(url, timeout_s=PATIENCE_S)
    await channel.send(await transport.address())
    return channel, await transport.link(await channel.receive(8192))


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
            channel, link = await linked(url)
            memory = bytearray(4 << 20)
            await link.receive(1, memoryview(memory))
            assert memory == bytes(range(256)) * (1 << 14)
            await channel.send(b"end")
            await link.abort()
            await channel.close()

        loop.run(work(), timeout_s=PATIENCE_S)
        assert process.wait(AT_ONCE_S) == 0


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_peer_that_is_killed_or_stopped_lets_go_of_our_memory(how: signal.Signals) -> None:
    with peer("stay") as (process, url):

        async def work() -> None:
            channel, link = await linked(url)
            await link.receive(1, memoryview(bytearray(4 << 20)))
            memory = bytearray(4 << 20)
            waiting = asyncio.ensure_future(link.receive(2, memoryview(memory)))
            os.kill(process.pid, how)
            if how is signal.SIGKILL:
                with pytest.raises(Disconnected):
                    await asyncio.wait_for(asyncio.shield(waiting), AT_ONCE_S)
            else:
                done, _ = await asyncio.wait({waiting}, timeout=0.5)
                assert not done, (
                    "nobody says that a peer was stopped: sessions find out by its silence"
                )
            began = time.monotonic()
            await link.abort()
            assert time.monotonic() - began < AT_ONCE_S
            with pytest.raises(Disconnected):
                await waiting
            assert not any(memory)
            await channel.close()

        loop.run(work(), timeout_s=PATIENCE_S)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_message_that_breaks_off_half_way_is_written_no_further_after_the_abort(
    how: signal.Signals,
) -> None:
    with peer("stream") as (process, url):

        async def work() -> None:
            channel, link = await linked(url)
            await link.receive(1, memoryview(bytearray(4 << 20)))
            memory = bytearray(256 << 20)
            waiting = asyncio.ensure_future(link.receive(2, memoryview(memory)))
            while not memory[1 << 20]:  # noqa: ASYNC110 # UCX says nothing half way
                # not 0: the loop would take the processor from what moves the bytes
                await asyncio.sleep(0.001)
            os.kill(process.pid, how)
            began = time.monotonic()
            await link.abort()
            assert time.monotonic() - began < AT_ONCE_S
            with pytest.raises(Disconnected):
                await waiting
            written = memory.count(b"x")
            assert 0 < written < len(memory)
            if how is signal.SIGSTOP:
                os.kill(process.pid, signal.SIGCONT)
            await asyncio.sleep(0.3)
            assert memory.count(b"x") == written
            await channel.close()

        loop.run(work(), timeout_s=120)


async def echo() -> None:
    """One message through this process's own worker."""
    transport = transport_for("ucx://")
    link = await transport.link(await transport.address())
    into, data = bytearray(5 << 20), os.urandom(5 << 20)
    await asyncio.gather(link.send(3, memoryview(data)), link.receive(3, memoryview(into)))
    assert into == data
    await link.abort()


def test_it_comes_back_after_the_loop_was_stopped_and_leaves_nothing() -> None:
    def left() -> tuple[int, int, int]:
        loop.stop()
        return (
            len(os.listdir("/proc/self/fd")),
            len(os.listdir("/proc/self/task")),
            threading.active_count(),
        )

    loop.run(echo(), timeout_s=PATIENCE_S)
    before = left()
    for _ in range(3):
        loop.run(echo(), timeout_s=PATIENCE_S)
    deadline = time.monotonic() + PATIENCE_S
    while any(now > then for now, then in zip(left(), before, strict=True)):
        # idle worker threads end by themselves
        assert time.monotonic() < deadline, (before, left())


def run_script(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own, with ``echo`` and ``loop`` at hand; what it prints."""
    start = textwrap.dedent("""
        import asyncio, os, sys, time
        from datastates.transport import loop
        from datastates.transport.registry import transport_for
        from tests.transport.test_ucx import echo
    """)
    command = [sys.executable, "-c", start + textwrap.dedent(script)]
    return warm.run(
        command,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, **environment},
    )


def test_a_forked_child_has_a_helper_of_its_own_and_leaves_its_parents_alone() -> None:
    done = run_script("""
        import warnings
        warnings.simplefilter("ignore", DeprecationWarning)  # from Python 3.12 on of each fork beside threads
        loop.run(echo())
        before = transport_for("ucx://").helper.pid
        for how in (sys.exit, os._exit):
            child = os.fork()
            if child == 0:
                loop.run(echo())
                how(7 if transport_for("ucx://").helper.pid != before else 2)
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
            loop.run(echo())
        print(transport_for("ucx://").helper.pid == before, flush=True)
    """)
    assert (done.returncode, done.stdout.splitlines()) == (0, ["7", "7", "True"]), done.stderr
    assert not done.stderr


def test_a_program_that_uses_ucxx_itself_is_left_alone() -> None:
    done = run_script("""
        import ucxx
        from ucxx.types import Tag

        async def own():
            address = ucxx.get_ucx_address_from_buffer(bytes(ucxx.get_worker_address()))
            endpoint = await ucxx.create_endpoint_from_worker_address(address)
            into = bytearray(100)
            sending = endpoint.send(b"u" * 100, tag=Tag(3), force_tag=True)
            await asyncio.gather(sending, endpoint.recv(into, tag=Tag(3), force_tag=True))
            await endpoint.close()
            assert into == b"u" * 100

        async def main():
            await own()
            await asyncio.to_thread(loop.run, echo(), 20)
            await own()
            await asyncio.to_thread(loop.stop)
            await own()
            await asyncio.to_thread(loop.run, echo(), 20)

        asyncio.run(main())
        print("both work", flush=True)
    """)
    assert (done.returncode, done.stdout) == (0, "both work\n"), done.stderr


@pytest.mark.parametrize(
    ("before", "after"), [("", ""), ("import torch", ""), ("", "import torch")]
)
def test_a_process_ends_at_once_and_says_nothing_whatever_else_it_loads(
    before: str, after: str
) -> None:
    done = run_script(f"""
        {before}
        loop.run(echo())
        {after}
        print(time.time(), flush=True)
    """)
    ended = time.time()
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    # 0.1 on a quiet machine, torch more; what hangs does so for ever
    assert ended - float(done.stdout) < AT_ONCE_S


def test_what_ucx_logs_never_reaches_standard_output() -> None:
    done = run_script("loop.run(echo())", UCX_LOG_LEVEL="info")
    assert (done.returncode, done.stdout) == (0, "")
    assert "UCX" in done.stderr


def test_the_users_own_settings_win() -> None:
    done = run_script("loop.run(echo())", UCX_TCP_TX_SEG_SIZE="nonsense")
    assert done.returncode != 0
    assert "UCX does not start" in done.stderr


def test_two_aborts_and_sends_afterwards_are_harmless() -> None:
    async def work() -> None:
        transport = transport_for("ucx://")
        link = await transport.link(await transport.address())
        waiting = [
            asyncio.ensure_future(link.receive(50 + n, memoryview(bytearray(1 << 20))))
            for n in range(20)
        ]
        await asyncio.sleep(0)
        await asyncio.gather(link.abort(), link.abort())
        assert all(
            isinstance(each, Disconnected)
            for each in await asyncio.gather(*waiting, return_exceptions=True)
        )
        await link.abort()
        for transfer in (link.send, link.receive):
            with pytest.raises(Disconnected, match="aborted"):
                await transfer(1, memoryview(bytearray(1)))

    loop.run(work(), timeout_s=PATIENCE_S)


def test_hundreds_of_messages_begun_at_once_cost_no_warning(
    capfd: pytest.CaptureFixture[str],
) -> None:
    async def work() -> None:
        transport = transport_for("ucx://")
        link = await transport.link(await transport.address())
        into = [bytearray(1000) for _ in range(600)]
        receiving = [link.receive(1 << 40 | n, memoryview(each)) for n, each in enumerate(into)]
        await asyncio.gather(
            *receiving, *(link.send(1 << 40 | n, memoryview(b"x" * 1000)) for n in range(600))
        )
        assert all(each == b"x" * 1000 for each in into)
        await link.abort()

    loop.run(work(), timeout_s=PATIENCE_S)
    assert "No Futures" not in capfd.readouterr().out
