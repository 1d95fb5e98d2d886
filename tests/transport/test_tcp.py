"""Control over TCP: lengths, errors that name the address, TLS, and what a forked child holds."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import socket
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from datastates.errors import Disconnected, InvalidInput, PeerFault, Unavailable
from datastates.transport import connections, tcp
from datastates.transport.contract import Channel, Tls
from tests.transport.certificates import certificate
from tests.transport.worlds import PATIENCE_S

LIMIT = 1 << 20


@asynccontextmanager
async def meeting(
    url: str = "ucx://127.0.0.1:0", *, server: Tls | None = None, client: Tls | None = None
) -> AsyncIterator[tuple[tcp.TcpChannel, Channel]]:
    """Both ends of a channel."""
    async with listening(url, tls=server) as (listener, arrivals):
        here, there = await meet(listener, arrivals, client)
        try:
            yield here, there
        finally:
            await here.close()
            await there.close()


async def meet(
    listener: tcp.TcpListener, arrivals: asyncio.Queue[Channel], tls: Tls | None = None
) -> tuple[tcp.TcpChannel, Channel]:
    here = await tcp.dial(listener.url, timeout_s=PATIENCE_S, tls=tls)
    await here.send(b"a word")  # whoever says nothing has not arrived
    there = await arrivals.get()
    assert await there.receive(LIMIT) == b"a word"
    return here, there


@asynccontextmanager
async def listening(
    url: str = "ucx://127.0.0.1:0", *, tls: Tls | None = None
) -> AsyncIterator[tuple[tcp.TcpListener, asyncio.Queue[Channel]]]:
    arrivals: asyncio.Queue[Channel] = asyncio.Queue()
    listener = await tcp.listen(url, arrivals.put, tls=tls)
    try:
        yield listener, arrivals
    finally:
        await listener.close()


@asynccontextmanager
async def raw(
    handle: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
) -> AsyncIterator[str]:
    """A server that is none of ours."""
    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    try:
        yield f"ucx://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


def run(work: Awaitable[None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(PATIENCE_S):
            await work

    asyncio.run(bounded())


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]"])
def test_every_way_to_write_this_machine_works(host: str) -> None:
    async def work() -> None:
        async with meeting(f"ucx://{host}:0") as (here, there):
            await here.send(b"hello")
            assert await there.receive(5) == b"hello"
            assert here.peer.rpartition(":")[0] in {"127.0.0.1", "[::1]"}

    if host == "[::1]" and not _has_ipv6():
        pytest.skip("this machine has no IPv6")
    run(work())


@pytest.mark.parametrize(
    "url",
    [
        "ucx://",
        "ucx://host",
        "ucx://:4711",
        "ucx://host:99999",
        "ucx://host:x",
        "ucx://[::1:4711",
        "127.0.0.1:4711",
    ],
)
def test_a_url_without_host_and_port_is_refused(url: str) -> None:
    async def work() -> None:
        with pytest.raises(InvalidInput):
            await tcp.dial(url, timeout_s=1)
        with pytest.raises(InvalidInput):
            await tcp.listen(url, _forget)

    run(work())


def test_addresses_that_are_not_ours_cannot_be_listened_on() -> None:
    async def work() -> None:
        for url in [
            "ucx://192.0.2.1:0",
            "ucx://no-such-host.invalid:0",
            f"ucx://{'x' * 70}.invalid:0",
        ]:
            with pytest.raises(Unavailable, match=url.split("/")[2][:20]):
                await tcp.listen(url, _forget)

    run(work())


def test_who_does_not_answer_is_given_up_in_time_and_named() -> None:
    async def work() -> None:
        with socket.socket() as full:
            # a listener that takes nobody: its queue is full after the first
            full.bind(("127.0.0.1", 0))
            full.listen(0)
            host, port = full.getsockname()
            with socket.create_connection((host, port)):
                began = time.monotonic()
                with pytest.raises(Disconnected, match=str(port)):
                    await tcp.dial(f"ucx://{host}:{port}", timeout_s=0.3)
                assert time.monotonic() - began < PATIENCE_S / 2
        with pytest.raises(Disconnected, match="cannot be reached"):
            await tcp.dial(f"ucx://{'x' * 70}.invalid:1", timeout_s=PATIENCE_S)

    run(work())


def test_an_announced_length_is_checked_before_anything_is_read_for_it() -> None:
    async def announce(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"\xff\xff\xff\xff")
        await writer.drain()
        writer.close()

    async def work() -> None:
        async with raw(announce) as url:
            channel = await tcp.dial(url, timeout_s=PATIENCE_S)
            with pytest.raises(PeerFault, match="4294967295 bytes, at most 1048576"):
                await channel.receive(LIMIT)
            with pytest.raises(Disconnected, match="closed here"):
                await channel.receive(LIMIT)

    run(work())


@pytest.mark.parametrize("is_secret", [False, True], ids=["plain", "TLS"])
def test_a_first_word_that_comes_in_pieces_is_a_word_and_only_when_it_is_whole(
    certificates: Tls, is_secret: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a word costs neither a channel nor TLS; after the first, words come as before,
    however short."""
    made: list[tcp.TcpChannel] = []

    class Counted(tcp.TcpChannel):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            made.append(self)

    monkeypatch.setattr(tcp, "TcpChannel", Counted)
    trusted = Tls(trusted=certificates.trusted) if is_secret else None
    context = tcp.client_context(trusted)

    async def scenario() -> None:
        async with listening(tls=certificates if is_secret else None) as (listener, arrivals):
            where = tcp.split(listener.url)[1:]
            incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
            word = (3).to_bytes(4) + b"abc"
            if context is not None:
                with pytest.raises(ssl.SSLWantReadError):
                    context.wrap_bio(incoming, outgoing, server_hostname=where[0]).do_handshake()
                word = outgoing.read()
            reader, writer = await asyncio.open_connection(*where)
            for byte in word[:-1]:
                writer.write(bytes([byte]))
                await asyncio.sleep(0)
            await writer.drain()
            other = await tcp.dial(listener.url, timeout_s=PATIENCE_S, tls=trusted)
            await other.send(b"whole")
            theirs = await arrivals.get()
            assert await theirs.receive(LIMIT) == b"whole"
            assert len(made) == 2  # the dialled one, and its other end
            writer.write(word[-1:])
            if context is None:
                channel = await arrivals.get()
                writer.write((1).to_bytes(4) + b"d")
                assert [await channel.receive(LIMIT), await channel.receive(LIMIT)] == [
                    b"abc",
                    b"d",
                ]
                await channel.close()
            else:
                assert (await reader.read(1))[0] == 22  # TLS answers
            writer.close()
            await other.close()
            await theirs.close()

    run(scenario())


def test_half_a_frame_is_no_frame() -> None:
    async def half(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"\0\0\0\x05ab")
        writer.close()

    async def work() -> None:
        async with raw(half) as url:
            channel = await tcp.dial(url, timeout_s=PATIENCE_S)
            with pytest.raises(Disconnected, match=channel.peer):
                await channel.receive(LIMIT)
            await channel.close()

    run(work())


def test_a_receive_that_was_cancelled_within_a_frame_loses_nothing() -> None:
    async def work() -> None:
        rest = asyncio.Event()

        async def slow(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"\0\0\0\x05ab")
            await rest.wait()
            writer.write(b"cde\0\0\0\x01f")
            writer.close()

        async with raw(slow) as url:
            channel = await tcp.dial(url, timeout_s=PATIENCE_S)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    await channel.receive(LIMIT)
            rest.set()
            assert await channel.receive(LIMIT) == b"abcde"
            assert await channel.receive(LIMIT) == b"f"
            await channel.close()

    run(work())


def test_what_was_sent_before_closing_arrives() -> None:
    async def work() -> None:
        async with meeting() as (here, there):
            frames = [bytes([n]) * 50_000 for n in range(20)]

            async def send() -> None:
                for frame in frames:
                    await here.send(frame)
                await here.close()

            sending = asyncio.create_task(send())
            assert [await there.receive(LIMIT) for _ in frames] == frames
            with pytest.raises(Disconnected, match="closed the connection"):
                await there.receive(LIMIT)
            await sending

    run(work())


def test_who_is_not_read_by_waits_and_closes_in_time_all_the_same() -> None:
    async def work() -> None:
        async with meeting() as (here, there):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(_send_for_ever(here), 0.5)
            began = time.monotonic()
            await asyncio.gather(here.close(), here.close())
            assert time.monotonic() - began < PATIENCE_S / 2
            await asyncio.sleep(0)
            assert here._writer.get_extra_info("socket").fileno() < 0
            assert there.peer

    run(work())


def test_a_listener_outlives_what_its_guests_do(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        async def accept(channel: Channel) -> None:
            raise ValueError("a defect")

        listener = await tcp.listen("ucx://127.0.0.1:0", accept)
        for _ in range(3):
            channel = await tcp.dial(listener.url, timeout_s=PATIENCE_S)
            await channel.send(b"a word")
            with pytest.raises(Disconnected):
                await channel.receive(LIMIT)
            await channel.close()
        await listener.close()

    run(work())
    assert "ValueError: a defect" in caplog.text


@pytest.mark.filterwarnings("ignore:This process.*fork:DeprecationWarning")
def test_a_forked_child_holds_neither_port_nor_connection() -> None:
    async def work() -> None:
        async with listening() as (listener, arrivals):
            here, there = await meet(listener, arrivals)
            ready, say = os.pipe()
            child = os.fork()
            if child == 0:
                os.write(say, b"!")  # what happens after a fork has happened
                signal.pause()
                os._exit(0)
            try:
                os.read(ready, 1)
                await listener.close()
                again = await tcp.listen(listener.url, _forget)
                await again.close()
                here._writer.transport.abort()  # as if this process died: nothing is said
                with pytest.raises(Disconnected):
                    await there.receive(LIMIT)
                await here.close()
                await there.close()
            finally:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)  # noqa: ASYNC222 # it was killed
                os.close(ready)
                os.close(say)

    run(work())


def test_whoever_says_nothing_has_not_arrived_and_is_gone_with_the_listener() -> None:
    async def work() -> None:
        async with listening() as (listener, arrivals):
            silent = await tcp.dial(listener.url, timeout_s=PATIENCE_S)
            here, there = await meet(listener, arrivals)
            assert arrivals.empty()
        with pytest.raises(Disconnected):
            await silent.receive(LIMIT)
        await here.send(b"those who are here stay")
        assert await there.receive(LIMIT)
        for end in (silent, here, there):
            await end.close()

    run(work())


@pytest.mark.parametrize("turns", range(6))
def test_a_listener_that_is_closed_as_somebody_arrives_leaves_no_connection(turns: int) -> None:
    async def work() -> None:
        async with listening() as (listener, _):
            _, host, port = tcp.split(listener.url)
            with socket.create_connection((host, port), timeout=PATIENCE_S) as arriving:
                for _ in range(turns):
                    await asyncio.sleep(0)
                gc.disable()  # which would close what was forgotten
                try:
                    await listener.close()
                    with contextlib.suppress(ConnectionResetError):
                        assert not arriving.recv(1)
                finally:
                    gc.enable()

    run(work())


def test_beyond_a_rate_connections_are_taken_in_batches_and_whoever_speaks_is_heard(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wakes, take = [], connections.Acceptor._take

    def noted(self: connections.Acceptor) -> None:
        wakes.append(time.monotonic())
        take(self)

    monkeypatch.setattr(connections.Acceptor, "_take", noted)
    monkeypatch.setattr(connections, "_BURST", 0.001)

    async def work() -> None:
        async with listening() as (listener, arrivals):
            _, host, port = tcp.split(listener.url)
            for _ in range(100):
                with socket.socket() as stranger:
                    stranger.setblocking(False)
                    await asyncio.get_running_loop().sock_connect(stranger, (host, port))
            for end in await meet(listener, arrivals):
                await end.close()

    run(work())
    assert len(wakes) <= (wakes[-1] - wakes[0]) / connections._TICK_S + 2


# TLS


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Tls:
    """For 127.0.0.1 and localhost; signed by itself."""
    return certificate(tmp_path_factory.mktemp("tls"))


def test_frames_travel_over_tls(certificates: Tls) -> None:
    async def work() -> None:
        async with meeting(server=certificates, client=Tls(trusted=certificates.trusted)) as (
            here,
            there,
        ):
            frames = [os.urandom(n * 1000) for n in range(200)]

            async def send() -> None:
                for frame in frames:
                    await here.send(frame)

            _, received = await asyncio.gather(send(), _receive(there, len(frames)))
            assert received == frames
            waiting = asyncio.create_task(here.receive(LIMIT))
            await there.close()
            with pytest.raises(Disconnected):
                await waiting

    run(work())


def test_a_certificate_that_is_not_trusted_or_of_another_host_is_refused(
    certificates: Tls, tmp_path: Path
) -> None:
    other = certificate(tmp_path, "DNS:elsewhere.example")

    async def work() -> None:
        for server, client in [
            (certificates, Tls()),
            (certificates, other),
            (other, Tls(trusted=other.trusted)),
        ]:
            async with listening(tls=server) as (listener, arrivals):
                with pytest.raises(Disconnected, match="cannot be trusted"):
                    await tcp.dial(listener.url, timeout_s=PATIENCE_S, tls=client)
                assert arrivals.empty()

    run(work())


def test_with_tls_on_one_side_only_nobody_gets_in(
    certificates: Tls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp, "_TLS_S", PATIENCE_S)

    async def work() -> None:
        async with listening(tls=certificates) as (listener, arrivals):
            channel = await tcp.dial(listener.url, timeout_s=PATIENCE_S)
            await channel.send(b"hello")
            async with asyncio.timeout(PATIENCE_S / 2):
                # at once, not when TLS's handshake has taken too long
                with pytest.raises(Disconnected):
                    await channel.receive(LIMIT)
            await channel.close()
            assert arrivals.empty()
        async with listening() as (listener, arrivals):
            dialling = asyncio.create_task(
                tcp.dial(listener.url, timeout_s=PATIENCE_S, tls=Tls(trusted=certificates.trusted))
            )
            with pytest.raises(Disconnected):  # the first bytes of TLS are a length out of bounds
                await dialling
            assert arrivals.empty()

    run(work())


def test_missing_files_for_tls_are_named(tmp_path: Path) -> None:
    async def work() -> None:
        gone = tmp_path / "gone.pem"
        with pytest.raises(InvalidInput, match=r"gone\.pem"):
            await tcp.listen("ucx://127.0.0.1:0", _forget, tls=Tls(certificate=gone))
        with pytest.raises(InvalidInput, match=r"gone\.pem"):
            await tcp.dial("ucx://127.0.0.1:1", timeout_s=1, tls=Tls(trusted=gone))
        with pytest.raises(InvalidInput, match="certificate"):
            await tcp.listen("ucx://127.0.0.1:0", _forget, tls=Tls())

    run(work())


async def _send_for_ever(channel: Channel) -> None:
    while True:
        await channel.send(bytes(LIMIT))


async def _receive(channel: Channel, count: int) -> list[bytes]:
    return [await channel.receive(LIMIT) for _ in range(count)]


async def _forget(channel: Channel) -> None:
    await channel.close()


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as tried:
            tried.bind(("::1", 0))
    except OSError:
        return False
    return True
