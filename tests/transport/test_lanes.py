"""Our own data plane: it keeps the contract, only whoever knows the session's key joins it, and
states travel over it."""

from __future__ import annotations

import asyncio
import errno
import random
import secrets
import select
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from datastates.errors import Disconnected, InvalidInput, PeerFault
from datastates.transport import data_connection, loop, tcp
from datastates.transport.contract import Link, Terms, Tls
from datastates.transport.data_connection import (
    HEADER_BYTES,
    LANES,
    MOST,
    Lanes,
    TcpTransport,
    _LanesLink,
)
from datastates.transport.server import Server
from datastates.transport.session import Session
from tests.support.transport_suite import TransportSuite, linked
from tests.transport.certificates import certificate
from tests.transport.stores import CHUNK, UID, MemorySource, MemoryStore
from tests.transport.worlds import PATIENCE_S, STATE, offer, opened, receive, until

TOKEN = b"0123456789abcdef"
PLACE = b"both ends here"


class PairedTransport(TcpTransport):
    """Every second link is the other end of the one before it, as if two processes had a
    session."""

    def __init__(self, server: Tls | None = None, client: Tls | None = None) -> None:
        super().__init__()
        self.server, self.client = server, client
        self.listener: tcp.TcpListener | None = None
        self.halves: dict[asyncio.Task[Any] | None, Lanes] = {}
        self.listening = asyncio.Lock()

    async def address(self) -> bytes:
        return PLACE

    async def link(self, address: bytes) -> Link:
        if address != PLACE:
            raise PeerFault("none of ours")
        task = asyncio.current_task()
        if task in self.halves:
            return await self.halves.pop(task).link(b"lanes")
        async with self.listening:  # many begin at once, and one listener is enough
            if self.listener is None:
                self.listener = await tcp.listen(
                    "tcp://127.0.0.1:0", _refuse, tls=self.server, join=self._join
                )
        name, key = secrets.token_bytes(16), secrets.token_bytes(32)
        theirs = self.end("tcp", Terms(name, key, "client:1", timeout_s=PATIENCE_S), lambda: 0)
        assert isinstance(theirs, Lanes)
        self.halves[task] = theirs
        _, host, port = tcp.split(self.listener.url)
        terms = Terms(
            name, key, "server:1", (host, port), host, tcp.client_context(self.client), PATIENCE_S
        )
        return await Lanes(terms, lambda: 0, lambda: None).link(b"lanes")

    async def finish(self) -> None:
        if self.listener is not None:
            await self.listener.close()
        await self.close()


async def _refuse(channel: object) -> None:
    raise AssertionError("only data comes here")


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Tls:
    return certificate(tmp_path_factory.mktemp("tls"))


class TestLanes(TransportSuite):
    @pytest.fixture
    def transport(self) -> Iterator[PairedTransport]:
        transport = PairedTransport()
        yield transport
        loop.run(transport.finish())

    @pytest.fixture
    def url(self) -> str:
        return "tcp://127.0.0.1:0"

    def test_nothing_is_received_into_memory_that_is_read_only(
        self, transport: PairedTransport
    ) -> None:
        async def work() -> None:
            async with linked(transport) as (_, there):
                with pytest.raises(InvalidInput, match="read-only"):
                    await there.receive(9, memoryview(b"fixed"))

        self.run(work())

    def test_a_process_without_descriptors_fails_the_transfer_and_nothing_waits(
        self, transport: PairedTransport, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(*arguments: object) -> None:
            raise OSError(errno.EMFILE, "Too many open files")

        async def work() -> None:
            async with linked(transport) as ends:
                (dialling,) = (
                    end
                    for end in ends
                    if isinstance(end, _LanesLink) and end._terms.where is not None
                )
                with monkeypatch.context() as full:
                    full.setattr("datastates.transport.data_connection.socket.socket", refuse)
                    for moving in (
                        dialling.receive(1, memoryview(bytearray(9))),
                        dialling.send(2, memoryview(b"x")),
                    ):
                        with pytest.raises(
                            Disconnected, match=r"cannot be reached .*Too many open files"
                        ):
                            await asyncio.wait_for(moving, PATIENCE_S)

        self.run(work())

    def test_messages_of_any_size_arrive_whole(self, transport: PairedTransport) -> None:
        sizes = [0, 1, 15, 16, 17, (4 << 20) - 1, 4 << 20, 9 << 20]

        async def work() -> None:
            async with linked(transport) as (here, there):
                data, memory = (
                    [random.Random(size).randbytes(size) for size in sizes],
                    [bytearray(size) for size in sizes],
                )
                sends = [here.send(tag, memoryview(each)) for tag, each in enumerate(data)]
                await asyncio.gather(
                    *sends,
                    *(there.receive(tag, memoryview(each)) for tag, each in enumerate(memory)),
                )
                assert memory == data

        self.run(work())

    @pytest.mark.parametrize("count", [1, 2, 3, 4, 7])
    def test_chunks_in_pieces_are_told_of_however_many_there_are(
        self, transport: PairedTransport, count: int
    ) -> None:
        """Some are told of together: none may wait for others that never come."""
        sizes, moved = [1000, 300_000, 17], list[int]()

        async def work() -> None:
            async with linked(transport) as (here, there):
                data = [
                    [random.Random(size + n).randbytes(size) for size in sizes]
                    for n in range(count)
                ]
                memory = [[bytearray(size) for size in sizes] for _ in range(count)]
                tags = [3 * n for n in range(count)]
                waiting = [
                    there.receive_all(tag, [memoryview(piece) for piece in each], moved.append)
                    for tag, each in zip(tags, memory, strict=True)
                ]
                await there.posted()
                sends = [
                    here.send_all(tag, [memoryview(piece) for piece in each], moved.append)
                    for tag, each in zip(tags, data, strict=True)
                ]
                await asyncio.gather(*sends, *waiting)
                assert memory == data
                assert len(moved) == 2 * count * len(sizes)
                with pytest.raises(PeerFault, match="used twice"):
                    await asyncio.gather(
                        *(
                            there.receive_all(5, [memoryview(bytearray(1))], lambda _: None)
                            for _ in range(2)
                        )
                    )

        self.run(work())

    def test_what_is_here_when_a_link_ends_is_told_of_and_the_rest_fails(
        self, transport: PairedTransport
    ) -> None:
        async def work() -> None:
            async with linked(transport) as (here, there):
                memory = [bytearray(100_000) for _ in range(8)]
                waiting = [
                    there.receive_all(tag, [memoryview(each)], lambda _: None)
                    for tag, each in enumerate(memory)
                ]
                await here.send_all(0, [memoryview(bytes(range(250)) * 400)], lambda _: None)
                await until(lambda: memory[0][-1] == 249)
                await there.abort()
                found = await asyncio.gather(*waiting, return_exceptions=True)
                assert [type(each) for each in found[1:]] == [Disconnected] * 7

        self.run(work())


class TestLanesOverTls(TestLanes):
    @pytest.fixture
    def transport(self, certificates: Tls) -> Iterator[PairedTransport]:
        transport = PairedTransport(certificates, Tls(trusted=certificates.trusted))
        yield transport
        loop.run(transport.finish())


# --- sessions -------------------------------------------------------------------------------------


@asynccontextmanager
async def serving(store: MemoryStore, **options: Any) -> Any:
    """A server over TCP and the transport of a client, as in two processes."""
    far, near = TcpTransport(), TcpTransport()
    server = Server(
        store, "tcp://127.0.0.1:0", token=TOKEN, timeout_s=PATIENCE_S, transport=far, **options
    )
    await server.start()
    try:
        yield server, near, far
    finally:
        await server.close(grace_s=0)
        assert not near._sessions, "a session that is over leaves its name behind"
        assert not far._sessions


def _closed(ends: list[socket.socket]) -> list[socket.socket]:
    """Those whose other side has closed; nothing else is ever sent to them."""
    readable, _, _ = select.select(ends, [], [], 0)
    return [end for end in readable if end.recv(1, socket.MSG_PEEK) == b""]


def run(work: Any) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(2 * PATIENCE_S):
            await work

    loop.run(bounded())


@pytest.mark.parametrize("is_secret", [False, True])
def test_states_are_cloned_and_pushed_over_one_port(
    is_secret: bool, request: pytest.FixtureRequest
) -> None:
    tls: Tls | None = request.getfixturevalue("certificates") if is_secret else None

    async def test() -> None:
        store = MemoryStore({UID: STATE})
        async with serving(store, tls=tls) as (server, near, _):
            trusted = None if tls is None else Tls(trusted=tls.trusted)
            session = await Session.connect(
                server.url, token=TOKEN, transport=near, tls=trusted, timeout_s=PATIENCE_S
            )
            assert session.data == "tcp"
            feed = await opened(session)
            got = await asyncio.gather(
                *(receive(feed, n, 10, 1000 + n, CHUNK // 2) for n in range(len(STATE)))
            )
            assert got == STATE
            given = offer()
            assert await session.push(MemorySource(STATE), given.state.uid, given) == given.state
            assert [bytes(chunk) for chunk in store.sinks[0].memory] == STATE
            port = tcp.split(server.url)[2]
            assert {end.getpeername()[1] for end in _lanes_of(near)} == {port}
            await session.close()

    run(test())


def test_a_plane_that_was_reset_is_made_anew() -> None:
    async def test() -> None:
        async with serving(MemoryStore({UID: STATE})) as (server, near, far):
            session = await Session.connect(
                server.url, token=TOKEN, transport=near, timeout_s=PATIENCE_S
            )
            feed = await opened(session)
            for round_ in range(3):
                assert await receive(feed, round_) == STATE[round_]
                assert (near if round_ % 2 else far).cut()
                assert await asyncio.gather(*(receive(feed, n) for n in range(8))) == STATE[:8]
            await session.close()

    run(test())


def test_nothing_is_dialled_before_a_chunk_is_wanted() -> None:
    async def test() -> None:
        async with serving(MemoryStore({UID: STATE})) as (server, near, _):
            session = await Session.connect(
                server.url, token=TOKEN, transport=near, timeout_s=PATIENCE_S
            )
            feed = await opened(session)
            assert not _lanes_of(near)
            assert await receive(feed, 0) == STATE[0]
            await until(lambda: len(_lanes_of(near)) == LANES)
            await session.close()

    run(test())


def test_whoever_does_not_know_the_sessions_key_does_not_join() -> None:
    async def test() -> None:
        async with serving(MemoryStore({UID: STATE})) as (server, near, far):
            session = await Session.connect(
                server.url, token=TOKEN, transport=near, timeout_s=PATIENCE_S
            )
            feed = await opened(session)
            (name,) = near._sessions
            where = tcp.split(server.url)[1:]
            for terms in (
                Terms(name, bytes(32), "x", where),
                Terms(bytes(16), near._sessions[name].terms.key, "x", where),
            ):
                for direction in (b"<", b">"):
                    with pytest.raises((PeerFault, OSError)):
                        await asyncio.to_thread(_greet, terms, direction)
            assert await asyncio.gather(*(receive(feed, n) for n in range(8))) == STATE[:8]
            await until(lambda: len(_lanes_of(far)) == LANES)
            await session.close()

    run(test())


def test_what_was_said_on_one_connection_is_good_on_no_other() -> None:
    """Whoever has listened to a join knows the session's name and a proof over another nonce."""

    async def test() -> None:
        async with serving(MemoryStore({UID: STATE})) as (server, near, far):
            session = await Session.connect(
                server.url, token=TOKEN, transport=near, timeout_s=PATIENCE_S
            )
            (name,) = near._sessions
            heard = data_connection._header.pack(tcp.JOIN, name, 0, b"<", bytes(32))
            for proof in (bytes(32), secrets.token_bytes(32)):
                reader, writer = await asyncio.open_connection(*tcp.split(server.url)[1:])
                writer.write(heard)
                await reader.readexactly(32)
                writer.write(proof)
                assert await reader.read() == b""
                writer.close()
            assert not _lanes_of(far)
            await session.close()

    run(test())


_NOISE = random.Random(0).randbytes(HEADER_BYTES)


@pytest.mark.parametrize(
    "said",
    [b"D", tcp.JOIN, tcp.JOIN + bytes(16), _NOISE, tcp.JOIN + _NOISE],
    ids=["its first byte", "no header", "half a header", "noise", "noise for a header"],
)
def test_what_names_no_session_is_closed(said: bytes) -> None:
    async def test() -> None:
        async with serving(MemoryStore({UID: STATE})) as (server, _, _):
            reader, writer = await asyncio.open_connection(*tcp.split(server.url)[1:])
            writer.write(b"D" + said[1:] if said[:1] != b"D" else said)
            writer.write_eof()
            with suppress(ConnectionError):
                assert await reader.read() == b""
            writer.close()

    run(test())


def test_more_lanes_than_there_may_be_are_turned_away() -> None:
    async def test() -> None:
        async with serving(MemoryStore({UID: STATE})) as (server, near, far):
            session = await Session.connect(
                server.url, token=TOKEN, transport=near, timeout_s=PATIENCE_S
            )
            feed = await opened(session)
            assert await receive(feed, 0) == STATE[0]
            await until(lambda: len(_lanes_of(far)) == LANES)
            (lanes,) = near._sessions.values()
            ends = [await asyncio.to_thread(_greet, lanes.terms, b"<") for _ in range(MOST)]
            await until(lambda: len(_closed(ends)) == LANES)
            assert len(_lanes_of(far)) == MOST
            for end in ends:
                end.close()
            await session.close()

    run(test())


def test_an_encrypted_session_takes_no_lane_in_plain(certificates: Tls) -> None:
    async def test() -> None:
        async with serving(MemoryStore({UID: STATE}), tls=certificates) as (server, near, far):
            trusted = Tls(trusted=certificates.trusted)
            session = await Session.connect(
                server.url, token=TOKEN, transport=near, tls=trusted, timeout_s=PATIENCE_S
            )
            (lanes,) = near._sessions.values()
            plain = Terms(lanes.terms.name, lanes.terms.key, "x", lanes.terms.where)
            with pytest.raises((OSError, PeerFault)):
                # nothing comes, as long as TLS is waited for
                await asyncio.to_thread(_greet, plain, b"<", 3)
            assert not _lanes_of(far)
            await session.close()

    run(test())


def test_a_peer_that_sends_bytes_nobody_waits_for_hangs_nobody() -> None:
    """Its tags are wrong: nothing arrives, and the session ends as with any peer that is alive
    and sends nothing."""

    async def test() -> None:
        async def never(index: int) -> None:
            await asyncio.get_running_loop().create_future()

        async with serving(MemoryStore({UID: STATE}, before=never)) as (server, near, _):
            session = await Session.connect(server.url, token=TOKEN, transport=near, timeout_s=0.5)
            feed = await opened(session)
            link = await server.sessions[0]._plane.link()
            waiting = asyncio.create_task(receive(feed, 0))
            bogus = asyncio.create_task(link.send(1, memoryview(bytes(1000))))
            began = time.monotonic()
            with pytest.raises(Disconnected):
                await waiting
            assert time.monotonic() - began < PATIENCE_S / 2
            bogus.cancel()
            await asyncio.gather(bogus, return_exceptions=True)
            await session.close()

    run(test())


def _lanes_of(transport: TcpTransport) -> list[socket.socket]:
    return [
        lane._connection
        for lanes in transport._sessions.values()
        for lane in (lanes._link._lanes if lanes._link is not None else ())
        if lane._connection.fileno() >= 0
    ]


def _greet(terms: Terms, direction: bytes, timeout_s: float = PATIENCE_S) -> socket.socket:
    assert terms.where is not None
    connection = socket.create_connection(terms.where, timeout=timeout_s)
    try:
        return data_connection.greet(connection, terms, 0, direction)
    except (OSError, PeerFault, ssl.SSLError):
        connection.close()
        raise


def test_threads_end_with_their_session() -> None:
    async def test() -> None:
        async with serving(MemoryStore({UID: STATE})) as (server, near, _):
            session = await Session.connect(
                server.url, token=TOKEN, transport=near, timeout_s=PATIENCE_S
            )
            feed = await opened(session)
            assert await receive(feed, 0) == STATE[0]
            assert _lane_threads()
            await session.close()
        for thread in _lane_threads():
            await asyncio.to_thread(thread.join, PATIENCE_S)
        assert not _lane_threads()

    run(test())


def _lane_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "datastates-lane"]
