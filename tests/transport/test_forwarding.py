"""Whom a source may send its receivers to, and how little they believe it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from datastates.transport import loop
from datastates.transport.chain import Forwarder
from datastates.transport.data_connection import TcpTransport
from datastates.transport.handshake import is_at, may_dial
from datastates.transport.requests import Chains
from datastates.transport.server import Server
from datastates.transport.session import Session
from tests.transport.stores import UID, MemorySink, MemoryStore
from tests.transport.worlds import PATIENCE_S, STATE

TOKEN = b"0123456789abcdef"
FAR, HERE, LINK = ("10.0.0.2", 4711), ("127.0.0.1", 4711), ("169.254.7.7", 4711)


@pytest.mark.parametrize(
    ("url", "remote", "expected"),
    [
        ("tcp://10.0.0.2:5", FAR, True),
        ("ucx://10.0.0.2:65535", FAR, True),
        ("tcp://[::ffff:10.0.0.2]:5", FAR, True),
        ("tcp://10.0.0.3:5", FAR, False),
        ("tcp://127.0.0.1:5", FAR, False),
        ("tcp://localhost:5", HERE, False),
        ("tcp://10.0.0.2", FAR, False),
        ("tcp://10.0.0.2:0", FAR, False),
        ("http://10.0.0.2:5", FAR, False),
        ("tcp://10.0.0.2:5/x", FAR, False),
        ("tcp://10.0.0.2:5?x", FAR, False),
        ("tcp://me@10.0.0.2:5", FAR, False),
        ("tcp://10.0.0.2:5\n", FAR, False),
        ("tcp://[fe80::1", FAR, False),
        ("", FAR, False),
        ("memory://relay", None, True),
    ],
)
def test_a_source_passes_on_only_where_its_peer_is(
    url: str, remote: tuple[str, int] | None, expected: bool
) -> None:
    assert is_at(url, remote) is expected


@pytest.mark.parametrize(
    ("url", "source", "expected"),
    [
        ("tcp://10.0.0.9:5", FAR, True),
        ("ucx://[2a00::1]:5", FAR, True),
        ("tcp://127.0.0.1:5432", FAR, False),
        ("tcp://[::1]:5432", FAR, False),
        ("tcp://[::ffff:127.0.0.1]:5432", FAR, False),
        ("tcp://169.254.169.254:80", FAR, False),
        ("tcp://[fe80::1]:80", FAR, False),
        ("tcp://0.0.0.0:80", FAR, False),
        ("tcp://224.0.0.1:80", FAR, False),
        ("tcp://elsewhere.example:80", FAR, False),
        ("http://10.0.0.9:80", FAR, False),
        ("tcp://127.0.0.1:5", HERE, True),
        ("tcp://169.254.169.254:80", HERE, False),
        ("tcp://169.254.9.9:5", LINK, True),
        ("memory://relay", None, True),
    ],
)
def test_a_receiver_dials_nothing_near_itself_because_a_source_says_so(
    url: str, source: tuple[str, int] | None, expected: bool
) -> None:
    assert may_dial(url, source) is expected


class Lying(Chains):
    """Sends everybody to other services."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0

    def join(self, uid: str, relay_url: str, failed: Sequence[str]) -> str | None:
        self.asked += 1
        return f"tcp://169.254.169.{self.asked}:80"


def test_a_receiver_that_is_sent_about_takes_the_state_from_the_source_itself() -> None:
    async def test() -> None:
        relays, dialled = Lying(), list[str]()
        server = Server(
            MemoryStore({UID: STATE}),
            "tcp://127.0.0.1:0",
            token=TOKEN,
            timeout_s=PATIENCE_S,
            transport=TcpTransport(),
            relays=relays,
        )
        await server.start()
        near = TcpTransport()

        async def connect(url: str) -> Session:
            dialled.append(url)
            return await Session.connect(url, token=TOKEN, transport=near, timeout_s=PATIENCE_S)

        forwarder = await Forwarder.join(
            server.url, UID, connect=connect, transport=near, token=TOKEN, tls=None
        )
        sink = MemorySink(forwarder.manifest)
        await forwarder.fetch(sink, timeout_s=PATIENCE_S, on_progress=None)
        assert [bytes(chunk) for chunk in sink.memory] == STATE
        assert dialled == [server.url]
        assert relays.asked < 20
        await forwarder.close()
        await server.close()

    loop.run(asyncio.wait_for(test(), 30))


def test_a_source_that_names_others_for_ever_gives_the_state_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It does so even when it is asked for its own bytes."""
    monkeypatch.setattr(
        "datastates.transport.requests.IncomingRequests._join",
        lambda self, question: "tcp://169.254.169.1:80",
    )

    async def test() -> None:
        server = Server(
            MemoryStore({UID: STATE}),
            "tcp://127.0.0.1:0",
            token=TOKEN,
            timeout_s=PATIENCE_S,
            transport=TcpTransport(),
        )
        await server.start()
        near = TcpTransport()

        async def connect(url: str) -> Session:
            return await Session.connect(url, token=TOKEN, transport=near, timeout_s=PATIENCE_S)

        forwarder = await Forwarder.join(
            server.url, UID, connect=connect, transport=near, token=TOKEN, tls=None
        )
        sink = MemorySink(forwarder.manifest)
        await forwarder.fetch(sink, timeout_s=PATIENCE_S, on_progress=None)
        assert [bytes(chunk) for chunk in sink.memory] == STATE
        await forwarder.close()
        await server.close()

    loop.run(asyncio.wait_for(test(), 30))


def test_a_relay_elsewhere_than_its_owner_is_told_to_nobody() -> None:
    async def test() -> None:
        relays = Chains()
        server = Server(
            MemoryStore({UID: STATE}),
            "tcp://127.0.0.1:0",
            token=TOKEN,
            timeout_s=PATIENCE_S,
            transport=TcpTransport(),
            relays=relays,
        )
        await server.start()
        one, two = [
            await Session.connect(
                server.url, token=TOKEN, transport=TcpTransport(), timeout_s=PATIENCE_S
            )
            for _ in range(2)
        ]
        await one.open(UID, relay="tcp://10.9.9.9:5432", here=False)
        opened, _ = await two.open(UID, relay="tcp://127.0.0.1:7", here=False)
        assert opened.upstream is None
        assert relays.line(UID) == ("tcp://127.0.0.1:7",)
        await one.close()
        await two.close()
        await server.close()

    loop.run(asyncio.wait_for(test(), 30))
