"""Chunks are read where they lie in another process of this host; where that cannot be, they
come over the transport."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress

import msgspec
import numpy as np
import pytest

from datastates.errors import Corrupt, Disconnected
from datastates.transport import loop, same_host
from datastates.transport.contract import Terms
from datastates.transport.fetch import Fetched, fetch
from datastates.transport.protocol import Open, Opened
from datastates.transport.same_host import LocalPeers, meet
from datastates.transport.server import Server
from datastates.transport.session import Session
from tests.support import warm
from tests.transport.stores import UID, MemorySink, MemorySource, MemoryStore
from tests.transport.stores import chunks as chunks_of
from tests.transport.worlds import PATIENCE_S

LENGTH, COUNT = 1 << 20, 40


class Placed(MemorySource):
    """Its chunks lie where it says; a ``lie`` about the third of them."""

    lie = ""

    def addresses(self) -> Sequence[int]:
        found = [same_host.address_of(memoryview(piece)) for piece in self.pieces]
        if self.lie:
            found[2] = found[3] if self.lie == "another chunk" else 4096
        return found


class PlacedStore(MemoryStore):
    """Opens such sources."""

    def open(self, uid: str) -> MemorySource:
        return Placed(super().open(uid).pieces)


def serve(lie: str) -> None:
    """Another process: it serves until its input ends, and says what was taken of it."""
    Placed.lie = lie
    server = Server(
        PlacedStore({UID: chunks_of(1, COUNT, LENGTH)}), "ucx://127.0.0.1:0", timeout_s=PATIENCE_S
    )
    loop.run(server.start())
    say(server.url)
    for _ in sys.stdin:
        say(f"{server.sent.bytes} {server.sent.chunks}")
    loop.run(server.close())


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


@pytest.fixture
def lie() -> str:
    return ""


@pytest.fixture
def other(lie: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", f"from tests.transport.test_near import serve; serve({lie!r})"]
    with warm.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


def line_of(process: subprocess.Popen[str], ask: str = "") -> str:
    if ask:
        assert process.stdin is not None
        process.stdin.write(f"{ask}\n")
        process.stdin.flush()
    assert process.stdout is not None
    return process.stdout.readline().strip()


def end(pid: int) -> None:
    """Kill a process, unless it is gone, and wait until it is."""
    with suppress(ProcessLookupError):
        gone = os.pidfd_open(pid)
        os.kill(pid, signal.SIGKILL)
        select.select([gone], [], [])
        os.close(gone)


async def clone(url: str, sink: list[MemorySink], kill: int = 0) -> tuple[Fetched, bool]:
    """What was moved, and whether the transport moved any of it; the process ``kill`` dies as
    soon as something was moved."""
    session = await Session.connect(url, timeout_s=PATIENCE_S)
    try:
        opened, feed = await session.open(UID)
        assert feed is not None
        sink.append(MemorySink(opened.manifest))

        def on_progress(done: int, total: int) -> None:
            if kill and done < total:
                end(kill)

        done = await fetch(sink[0], [feed], timeout_s=PATIENCE_S, on_progress=on_progress)
        await feed.close()
        return done, session._plane._link is not None
    finally:
        await session.close()


def test_chunks_are_read_from_the_other_process_and_counted_there(
    other: subprocess.Popen[str],
) -> None:
    sinks: list[MemorySink] = []
    done, is_wired = loop.run(clone(line_of(other), sinks), PATIENCE_S)
    assert sinks[0].memory == chunks_of(1, COUNT, LENGTH)
    assert (done.chunks, is_wired) == (COUNT, False)
    assert line_of(other, "stats").split() == [str(sum(map(len, sinks[0].memory))), str(COUNT)]


@pytest.mark.parametrize("side", ["server", "client"])
def test_who_does_not_want_it_clones_over_the_transport(
    side: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    if side == "server":
        monkeypatch.setenv(same_host.SWITCH, "0")
    other = request.getfixturevalue("other")
    url = line_of(other)
    monkeypatch.setenv(same_host.SWITCH, "1" if side == "server" else "0")
    sinks: list[MemorySink] = []
    done, is_wired = loop.run(clone(url, sinks), PATIENCE_S)
    assert sinks[0].memory == chunks_of(1, COUNT, LENGTH)
    assert (done.chunks, is_wired) == (COUNT, True)


@pytest.mark.parametrize("lie", ["nothing"])
def test_what_cannot_be_read_comes_over_the_transport(other: subprocess.Popen[str]) -> None:
    sinks: list[MemorySink] = []
    _, is_wired = loop.run(clone(line_of(other), sinks), PATIENCE_S)
    assert sinks[0].memory == chunks_of(1, COUNT, LENGTH)
    assert is_wired


@pytest.mark.parametrize("lie", ["another chunk"])
def test_what_lies_elsewhere_fails_its_digest(other: subprocess.Popen[str]) -> None:
    sinks: list[MemorySink] = []
    with pytest.raises(Corrupt, match="chunk 2"):
        loop.run(clone(line_of(other), sinks), PATIENCE_S)


def test_a_source_that_dies_is_found_at_once(other: subprocess.Popen[str]) -> None:
    with pytest.raises(Disconnected):
        loop.run(clone(line_of(other), [], other.pid), PATIENCE_S / 2)


def test_a_process_that_is_gone_is_not_read_even_if_its_pid_is_anothers(
    other: subprocess.Popen[str],
) -> None:
    line_of(other)
    here, there = socket.socketpair()
    target, into = same_host.ProcessMemory(os.getpid(), here), memoryview(bytearray(10))
    data = np.arange(10, dtype=np.uint8)
    assert target.read(same_host.address_of(data.data), [into])
    there.close()
    assert not target.read(same_host.address_of(data.data), [into])
    target.close()
    assert not target.read(same_host.address_of(data.data), [into])


def test_memory_of_several_pieces_is_filled_in_order(other: subprocess.Popen[str]) -> None:
    line_of(other)
    here, there = socket.socketpair()
    target = same_host.ProcessMemory(os.getpid(), here)  # the call itself does not mind
    data = np.arange(1000, dtype=np.uint8)
    pieces = [memoryview(bytearray(size)) for size in (1, 0, 600, 399)]
    assert target.read(same_host.address_of(data.data), [piece for piece in pieces if piece.nbytes])
    assert b"".join(pieces) == data.tobytes()
    here.close()
    there.close()


# --- who is let in --------------------------------------------------------------------------------


TERMS = Terms(bytes(16), bytes(32), "peer", ("127.0.0.1", 1))


def visitor(limiter: LocalPeers) -> socket.socket:
    guest = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    guest.settimeout(PATIENCE_S)
    guest.connect("\0" + limiter.name)
    return guest


def heard(guest: socket.socket) -> bytes:
    with suppress(ConnectionResetError):
        return guest.recv(32)
    return b""


async def knock(limiter: LocalPeers, terms: Terms) -> bool:
    """Whether a process that this one started is let in by its door; it would read this one."""
    script = f"""
import asyncio
from datastates.transport.contract import Terms
from datastates.transport.same_host import meet
print(asyncio.run(meet({limiter.name!r}, Terms({terms.name!r}, {terms.key!r}, "x"))) is not None)
"""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, stdout=subprocess.PIPE
    )
    out, _ = await process.communicate()
    return out.strip() == b"True"


@pytest.mark.parametrize("knows", ["all", "another key", "another session", "it is over"])
def test_only_who_knows_the_session_is_let_in(knows: str) -> None:
    async def test() -> None:
        limiter = LocalPeers()
        await limiter.open()
        limiter.expect(TERMS)
        if knows == "it is over":
            limiter.forget(TERMS.name)
        said = {
            "another key": Terms(bytes(16), b"x" * 32, ""),
            "another session": Terms(b"x" * 16, bytes(32), ""),
        }.get(knows, TERMS)
        assert await knock(limiter, said) is (knows == "all")
        if knows != "all":
            assert not limiter.has(TERMS.name)
        await limiter.close()

    loop.run(test(), PATIENCE_S)


@pytest.mark.parametrize("turns", range(5))
def test_a_door_that_closes_while_somebody_comes_in_sends_them_away(
    turns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(same_host, "_MEET_S", 10 * PATIENCE_S)

    async def test() -> None:
        limiter = LocalPeers()
        await limiter.open()
        with visitor(limiter) as guest:
            for _ in range(turns):
                await asyncio.sleep(0)
            await limiter.close()
            assert await asyncio.to_thread(heard, guest) == b""

    loop.run(test(), PATIENCE_S)


def test_whoever_proves_that_they_are_near_when_the_session_is_over_is_sent_away() -> None:
    async def test() -> None:
        limiter = LocalPeers()
        await limiter.open()
        limiter.expect(TERMS)
        with visitor(limiter) as guest:
            hello = TERMS.name + bytes(32)
            guest.sendall(hello)
            nonce = await asyncio.to_thread(heard, guest)
            limiter.forget(TERMS.name)
            guest.sendall(same_host._code(TERMS, b"client", hello + nonce))
            assert await asyncio.to_thread(heard, guest) == b""
            assert not limiter.has(TERMS.name)
        await limiter.close()

    loop.run(test(), PATIENCE_S)


def test_addresses_are_told_to_nobody_who_only_says_that_it_is_near() -> None:
    async def test() -> None:
        server = Server(
            PlacedStore({UID: chunks_of(1, 4, LENGTH)}), "tcp://127.0.0.1:0", timeout_s=PATIENCE_S
        )
        await server.start()
        # of this process: it is not near itself
        session = await Session.connect(server.url, timeout_s=PATIENCE_S)
        body = await session.ask(Open(UID, near=True))
        assert not msgspec.msgpack.decode(body, type=Opened).addresses
        await session.close()
        await server.close()

    loop.run(test(), PATIENCE_S)


@pytest.mark.parametrize(
    "name",
    ["", "datastates-", "/tmp/.X11-unix/X0", "datastates-" + "0" * 33, "datastates-" + "0" * 32],
)
def test_a_door_of_another_name_is_not_tried_and_one_that_is_not_there_is_none(name: str) -> None:
    assert loop.run(meet(name, TERMS), 10) is None


def test_the_process_itself_is_no_neighbour() -> None:
    async def test() -> None:
        limiter = LocalPeers()
        await limiter.open()
        limiter.expect(TERMS)
        assert await meet(limiter.name, TERMS) is None
        await limiter.close()

    loop.run(test(), 10)
