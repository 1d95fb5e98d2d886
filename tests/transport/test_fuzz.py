"""Mutated control messages against a live server on TCP, before, during and after a correct
handshake, and mutated data connections.

Each ends in an error reply or a closed connection within a second, none in a hang, an unexpected
exception or memory that stays taken, and the server goes on serving. The seed is fixed: a failure
names the message, and comes again.
"""

from __future__ import annotations

import asyncio
import logging
import random
import struct
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import pytest
from msgspec import msgpack

from datastates.errors import Disconnected, PeerFault
from datastates.transport import connections, tcp
from datastates.transport.connections import ConnectionLimiter
from datastates.transport.contract import Channel, Listener, Tls
from datastates.transport.data_connection import HEADER_BYTES, TcpTransport
from datastates.transport.handshake import SecureChannel, greet
from datastates.transport.in_process import MemoryTransport
from datastates.transport.protocol import (
    FIRST_FRAME_BYTES,
    MAGIC,
    PROTOCOL_VERSION,
    Answer,
    Ask,
    Digests,
    Failed,
    Find,
    Hello,
    Log,
    Message,
    Moved,
    Open,
    Push,
    Question,
    Ready,
    Refs,
    Release,
    Resolve,
    Took,
    Want,
    decode,
    encode,
)
from datastates.transport.server import Server
from datastates.transport.session import Session
from tests.support.effort import seeds
from tests.transport.stores import CHUNK, UID, MemoryStore
from tests.transport.test_protocol import EVERY
from tests.transport.worlds import PATIENCE_S, STATE

TOKEN = b"0123456789abcdef"
CASES = 4_000
PARTS = {
    "first frames": 14,
    "second frames": 6,
    "torn connections": 4,
    "wrong codes": 1,
    "joins": 2,
    "authenticated": 13,
}
SHARES = {name: part * CASES // sum(PARTS.values()) for name, part in PARTS.items()}
MEMORY_BYTES = 64 << 20
SLOWEST_S = 1.0
"""Of processor time, at the most, for a message and its answer: the machine may be busy."""
BODIES = [encode(message) for message in EVERY]


class TcpMemory(MemoryTransport):
    """Control over real sockets, data within the process."""

    async def listen(
        self,
        url: str,
        accept: Callable[[Channel], Awaitable[None]],
        *,
        tls: Tls | None = None,
        limiter: ConnectionLimiter | None = None,
    ) -> Listener:
        return await tcp.listen(url, accept, tls=tls, limiter=limiter, join=TcpTransport()._join)

    async def dial(self, url: str, *, timeout_s: float, tls: Tls | None = None) -> Channel:
        return await tcp.dial(url, timeout_s=timeout_s, tls=tls)


# --- mutations ------------------------------------------------------------------------------------


def _flip(rng: random.Random, body: bytes) -> bytes:
    changed = bytearray(body)
    for _ in range(rng.choice([1, 1, 2, 8])):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _truncate(rng: random.Random, body: bytes) -> bytes:
    return body[: rng.randrange(len(body))]


def _extend(rng: random.Random, body: bytes) -> bytes:
    return body + rng.randbytes(rng.choice([1, 10, 1000, 10_000]))


def _splice(rng: random.Random, body: bytes) -> bytes:
    other = rng.choice(BODIES)
    return body[: rng.randrange(len(body))] + other[rng.randrange(len(other)) :]


def _oversize(rng: random.Random, body: bytes) -> bytes:
    """A length that no frame has: str32, bin32, array32, map32, ext32."""
    at = rng.randrange(len(body))
    return (
        body[:at]
        + bytes([rng.choice(b"\xdb\xc6\xdd\xdf\xc9")])
        + struct.pack(">I", rng.choice([1 << 20, 1 << 31, (1 << 32) - 1]))
        + body[at:]
    )


def _nest(rng: random.Random, body: bytes) -> bytes:
    deep = rng.choice([b"\x91", b"\x81\xa1x", b"\xdc\x00\x01"]) * rng.choice([100, 1000, 5000])
    fields = msgpack.decode(body)
    return b"\x82\xa4type" + msgpack.encode(fields["type"]) + b"\xa4more" + deep[:12_000]


def _retype(rng: random.Random, body: bytes) -> bytes:
    fields = msgpack.decode(body)
    values: list[object] = [
        None,
        -1,
        1 << 63,
        2.5,
        float("nan"),
        "x",
        "x" * 10_000,
        b"",
        b"\xff" * 5000,
        [],
        [[]] * 500,
        {},
        {"type": "Refs"},
        True,
    ]
    fields[rng.choice([*fields, "type", "id", "handle"])] = rng.choice(values)
    return msgpack.encode(fields)


def _alter(rng: random.Random, body: bytes) -> bytes:
    """Another value of the same type, somewhere: mostly a message still, but not one that
    belongs there."""

    def altered(value: object) -> object:
        if isinstance(value, dict) and value:
            key = rng.choice(list(value))
            return {**value, key: altered(value[key])} if key != "type" else value
        if isinstance(value, list) and value:
            at = rng.randrange(len(value))
            return [*value[:at], altered(value[at]), *value[at + 1 :]]
        if isinstance(value, int):
            return rng.choice(
                [0, 1, 2, 19, 20, 63, 64, CHUNK, CHUNK + 1, (1 << 31) - 1, rng.randrange(1 << 31)]
            )
        if isinstance(value, str):
            return rng.choice(
                ["", "x", "main", UID, "\udfff".encode("utf-8", "replace").decode(), "x" * 300]
            )
        return rng.randbytes(rng.choice([0, 10, 32])) if isinstance(value, bytes) else value

    return msgpack.encode(altered(msgpack.decode(body)))


def _noise(rng: random.Random, body: bytes) -> bytes:
    return rng.randbytes(rng.choice([1, 10, 100, 10_000]))


def _keep(rng: random.Random, body: bytes) -> bytes:
    return body


MUTATIONS = [
    _flip,
    _flip,
    _truncate,
    _extend,
    _splice,
    _oversize,
    _nest,
    _retype,
    _retype,
    _alter,
    _alter,
    _alter,
    _noise,
    _keep,
]


def fitting(number: int) -> list[bytes]:
    """Messages that fit a session whose client holds the state open: what is left of them is
    often understood."""
    ask = number + 2
    wants: list[Message] = [
        Want(0, (index,), number << 8, (len(STATE[index]),)) for index in (0, 1)
    ]
    wants.append(Want(0, (0,), number << 8, (CHUNK - 1, 1)))
    questions: list[Question] = [
        Refs(),
        Find("loss < 1", 10),
        Log("main", 10),
        Resolve("main"),
        Resolve("x"),
    ]
    questions += [Open(UID), Open(UID, near=True), Open("0"), Release(0), Push(0, 10)]
    questions += [Digests(0, (0, 1, 2)), Digests(0, (len(STATE),)), Digests(7, (0,))]
    wants.append(Moved(b"somewhere", number % 2 == 0))
    took = [Took(0, 2, CHUNK), Took(7, 1, 1)]
    return [
        encode(message)
        for message in [*wants, *took, *(Ask(ask, question) for question in questions)]
    ]


def mutated(rng: random.Random, bodies: list[bytes] = BODIES) -> bytes:
    return rng.choice(MUTATIONS)(rng, rng.choice(bodies)) or b"\0"


# --- clients that send them -----------------------------------------------------------------------


class Fuzzer:
    """Sends to one server and notes how it was answered."""

    def __init__(self, server: Server, rng: random.Random) -> None:
        self.server, self.rng = server, rng
        self.transport = TcpMemory()
        self.outcomes: Counter[str] = Counter()
        self.slowest_s = 0.0

    async def dial(self) -> tcp.TcpChannel:
        return await tcp.dial(self.server.url, timeout_s=PATIENCE_S)

    async def first_frame(self) -> None:
        channel = await self.dial()
        body = mutated(self.rng, [encode(Hello(MAGIC, PROTOCOL_VERSION, bytes(32))), *BODIES])
        await self._send_and_see(channel, body)
        await channel.close()

    async def second_frame(self) -> None:
        channel = await self.dial()
        await channel.send(encode(Hello(MAGIC, PROTOCOL_VERSION, self.rng.randbytes(32))))
        await channel.receive(FIRST_FRAME_BYTES)
        await self._send_and_see(channel, mutated(self.rng))
        await channel.close()

    async def torn(self) -> None:
        """A length that is too large, or larger than what follows; then the end."""
        channel = await self.dial()
        body = mutated(self.rng)
        announced = self.rng.choice(
            [len(body) + 1, FIRST_FRAME_BYTES, FIRST_FRAME_BYTES + 1, 1 << 31, (1 << 32) - 1, 0]
        )
        channel._writer.write(struct.pack(">I", announced) + body)
        if announced > FIRST_FRAME_BYTES:
            assert await self._end(channel) == "closed", announced
        await channel.close()
        self.outcomes["torn"] += 1

    async def join(self) -> None:
        """What begins like a connection for data and is none: it names no session."""
        header = (
            self.rng.choice(MUTATIONS[:4])(
                self.rng, tcp.JOIN + self.rng.randbytes(HEADER_BYTES - len(tcp.JOIN))
            )
            or b"D"
        )
        began = time.process_time()
        reader, writer = await asyncio.open_connection(*tcp.split(self.server.url)[1:])
        writer.write(tcp.JOIN[:1] + header[1:])
        writer.write_eof()
        with suppress(ConnectionError):
            async with asyncio.timeout(PATIENCE_S):
                assert await reader.read() == b"", header
        writer.close()
        self._took(began)
        self.outcomes["join: closed"] += 1

    def _took(self, began: float) -> None:
        self.slowest_s = max(self.slowest_s, time.process_time() - began)

    async def wrong_code(self) -> None:
        channel, sealed = await self._authenticated()
        body = self.rng.choice(BODIES)
        await channel.send(
            self.rng.choice(
                [
                    body,
                    body + bytes(16),
                    sealed._outgoing.next(body)[:15],
                    body + self.rng.randbytes(16),
                ]
            )
        )
        end = await self._end(channel)
        assert end == "closed", body
        self.outcomes["wrong code: closed"] += 1
        await channel.close()

    async def authenticated(self, count: int) -> None:
        """Messages with right codes, each followed by a question: it is answered, or the
        connection is closed."""
        channel, sealed = await self._authenticated()
        for number in range(count):
            body = mutated(self.rng, fitting(number) if self.rng.random() < 0.7 else BODIES)
            outcome = await self._ask_behind(sealed, body, 1_000_000 + number)
            self.outcomes[outcome] += 1
            if outcome == "closed":
                await channel.close()
                channel, sealed = await self._authenticated()
                # what is wanted is held open, mostly
                await self._ask_behind(sealed, encode(Ask(0, Open(UID))), 1)
        await channel.close()

    async def _authenticated(self) -> tuple[tcp.TcpChannel, SecureChannel]:
        channel = await self.dial()
        sealed, _ = await greet(
            channel,
            Ready(("memory",), await self.transport.address(), 60_000),
            token=TOKEN,
            timeout_s=PATIENCE_S,
        )
        return channel, sealed

    async def _ask_behind(self, sealed: SecureChannel, body: bytes, number: int) -> str:
        """``closed``, or ``answered``, by an error or as asked; what is no message at all must
        close the connection."""
        began = time.process_time()
        try:
            async with asyncio.timeout(PATIENCE_S):
                await sealed.send(body)
                await sealed.send(encode(Ask(number, Refs())))
                while True:
                    reply = await sealed.receive()
                    if isinstance(reply, Answer | Failed) and reply.id == number:
                        break
        except Disconnected:
            return "closed"
        except TimeoutError:
            pytest.fail(f"neither an answer nor the end within {PATIENCE_S} s: {body!r}")
        finally:
            self._took(began)
        try:
            decode(body, peer="")
        except PeerFault:
            pytest.fail(f"what is no message was taken: {body!r}")
        return "answered"

    async def _send_and_see(self, channel: tcp.TcpChannel, body: bytes) -> None:
        began = time.process_time()
        try:
            await channel.send(body)
            end = await self._end(channel)
        except Disconnected:
            end = "closed"
        self._took(began)
        self.outcomes[end] += 1

    async def _end(self, channel: tcp.TcpChannel) -> str:
        """How the server answers a bad frame: by closing, perhaps after a word."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                while True:
                    try:
                        frame = await channel.receive(1 << 20)
                    except Disconnected:
                        return "closed"
                    if b"Challenge" in frame:
                        return "challenged"
        except TimeoutError:
            pytest.fail("the server neither answers nor closes")


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.long
@pytest.mark.parametrize("seed", seeds(5, more=20))
def test_no_mutated_message_hangs_crashes_or_bloats_the_server(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    caplog.set_level(logging.WARNING)
    # connections are taken as they come: thousands are made here, one after another
    monkeypatch.setattr(connections, "_BURST", 1 << 20)

    async def test() -> Counter[str]:
        complaints: list[dict[str, object]] = []
        asyncio.get_running_loop().set_exception_handler(
            lambda loop, context: complaints.append(context)
        )
        before = asyncio.all_tasks()
        transport = TcpMemory()
        server = Server(
            MemoryStore({UID: STATE}),
            "ucx://127.0.0.1:0",
            token=TOKEN,
            timeout_s=PATIENCE_S,
            transport=transport,
        )
        await server.start()
        fuzzer = Fuzzer(server, random.Random(seed))
        await fuzzer.authenticated(50)  # what is made once is made before memory is counted
        memory = resident_bytes()
        for _ in range(SHARES["first frames"]):
            await fuzzer.first_frame()
        for _ in range(SHARES["second frames"]):
            await fuzzer.second_frame()
        for _ in range(SHARES["torn connections"]):
            await fuzzer.torn()
        for _ in range(SHARES["wrong codes"]):
            await fuzzer.wrong_code()
        for _ in range(SHARES["joins"]):
            await fuzzer.join()
        await fuzzer.authenticated(SHARES["authenticated"])
        assert fuzzer.slowest_s < SLOWEST_S
        assert resident_bytes() - memory < MEMORY_BYTES

        peer = await Session.connect(server.url, token=TOKEN, transport=fuzzer.transport)
        assert (await peer.resolve("main")).uid == UID
        await peer.close()
        async with asyncio.timeout(PATIENCE_S):
            while server.sessions:  # noqa: ASYNC110 # they end as their tasks run
                await asyncio.sleep(0.01)
        await server.close()
        await asyncio.sleep(0)
        assert not complaints, complaints[:3]
        assert not {task for task in asyncio.all_tasks() - before if not task.done()}
        return fuzzer.outcomes

    outcomes = asyncio.run(test())
    assert sum(outcomes.values()) >= CASES
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR], caplog.text
    assert outcomes["closed"] > CASES // 20
    assert outcomes["answered"] > CASES // 20
    assert outcomes["challenged"] > CASES // 400
