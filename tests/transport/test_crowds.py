"""Connections that prove nothing, over real sockets: they are few, they do not last, and they
keep nobody out."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import pytest

from datastates.transport.contract import Tls
from datastates.transport.limits import Limits
from datastates.transport.server import Server
from datastates.transport.session import Session
from tests.transport.stores import UID, MemoryStore
from tests.transport.test_fuzz import TOKEN, TcpMemory
from tests.transport.test_tcp import certificates  # noqa: F401 # a fixture
from tests.transport.worlds import PATIENCE_S, STATE, until

FIRST_WORDS = {
    "nothing": b"",
    "half a length": b"\0\0",
    "half a hello": b"\0\0\0\x40abc",
    "half of TLS": b"\x16\x03\x01\x02\0\x01",
    "junk": b"GET / HTTP/1.1\r\n",
}
LIMITS = Limits(sessions=4)
MOST = 32


@asynccontextmanager
async def served(
    tls: Tls | None = None, timeout_s: float = 5.0
) -> AsyncIterator[tuple[Server, TcpMemory]]:
    transport = TcpMemory()
    server = Server(
        MemoryStore({UID: STATE}),
        "queue://127.0.0.1:0",
        token=TOKEN,
        tls=tls,
        transport=transport,
        limits=LIMITS,
        timeout_s=timeout_s,
    )
    await server.start()
    try:
        yield server, transport
    finally:
        await server.close(grace_s=0)


async def crowd(server: Server, count: int, words: bytes) -> list[socket.socket]:
    """So many connections, each of which says so much and no more."""
    loop, where = asyncio.get_running_loop(), urlsplit(server.url)
    made = []
    for _ in range(count):
        connection = socket.socket()
        connection.setblocking(False)
        await loop.sock_connect(connection, (where.hostname, where.port))
        with contextlib.suppress(OSError):
            await loop.sock_sendall(connection, words)
        made.append(connection)
    return made


@pytest.mark.parametrize("words", FIRST_WORDS.values(), ids=FIRST_WORDS)
@pytest.mark.parametrize("is_secret", [False, True], ids=["plain", "tls"])
def test_connections_that_prove_nothing_are_bounded_and_keep_nobody_out(
    certificates: Tls,  # noqa: F811 # as above
    is_secret: bool,
    words: bytes,
) -> None:
    tls = certificates if is_secret else None

    async def work() -> None:
        async with served(tls) as (server, transport):
            before = len(os.listdir("/proc/self/fd"))
            strangers = await crowd(server, 150, words)
            await until(
                lambda: server.limiter.admission.connections + server.limiter.refused >= 150
            )
            assert server.limiter.admission.connections <= MOST
            # whoever gives way is closed in a moment
            assert len(os.listdir("/proc/self/fd")) <= before + 150 + MOST + 10
            peer = await Session.connect(
                server.url, token=TOKEN, tls=tls, transport=transport, timeout_s=PATIENCE_S
            )
            assert await peer.refs()
            strangers += await crowd(server, 150, words)
            assert await peer.refs()
            await peer.close()
            for each in strangers:
                each.close()
            # the last wait in the kernel
            await until(
                lambda: server.limiter.refused == 300 and not server.limiter.admission.connections
            )
            assert server.arrived == 1

    asyncio.run(asyncio.wait_for(work(), PATIENCE_S))


@pytest.mark.parametrize("words", FIRST_WORDS.values(), ids=FIRST_WORDS)
# as above
def test_connections_that_prove_nothing_in_time_end(certificates: Tls, words: bytes) -> None:  # noqa: F811
    async def work() -> None:
        async with served(certificates, timeout_s=0.3) as (server, _):
            strangers = await crowd(server, 10, words)
            await until(
                lambda: server.limiter.refused == 10 and not server.limiter.admission.connections
            )
            for each in strangers:
                each.close()

    asyncio.run(asyncio.wait_for(work(), PATIENCE_S))


def test_connections_that_are_reset_at_once_leave_nothing_and_nothing_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def work() -> None:
        async with served() as (server, _):
            for words in (b"\0", b"\0\0\0\x40abc", b"") * 30:
                for each in await crowd(server, 1, words):
                    each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    each.close()
            await until(
                lambda: server.limiter.refused == 90 and not server.limiter.admission.connections
            )

    asyncio.run(asyncio.wait_for(work(), PATIENCE_S))
    gc.collect()  # of tasks that failed asyncio tells when they are collected
    assert not [each for each in caplog.records if each.levelname == "ERROR"]


def test_a_server_that_closes_leaves_no_connection() -> None:
    async def work() -> None:
        before = set(os.listdir("/proc/self/fd"))
        async with served() as (server, _):
            strangers = await crowd(server, 20, b"") + await crowd(server, 10, b"\0\0")
            await until(lambda: server.limiter.admission.connections == 30)
        assert server.limiter.admission.connections == 0
        for each in strangers:
            each.close()
        await until(lambda: set(os.listdir("/proc/self/fd")) <= before)

    asyncio.run(asyncio.wait_for(work(), PATIENCE_S))
