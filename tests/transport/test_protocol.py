"""Messages: what is written is read, and no field is believed that is out of bounds."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import msgpack

from datastates.errors import PeerFault
from datastates.state.manifest import CHUNK_BYTES
from datastates.system.failures import Failure
from datastates.transport import protocol
from datastates.transport.protocol import (
    Answer,
    Ask,
    Bye,
    Challenge,
    Denied,
    Digests,
    Failed,
    Find,
    Gone,
    Hello,
    Identity,
    Laid,
    Land,
    Log,
    Message,
    Moved,
    Open,
    Part,
    Ping,
    Proof,
    Push,
    Ready,
    Refs,
    Refused,
    Release,
    Resolve,
    Room,
    Took,
    Want,
    Welcome,
    decode,
    encode,
)
from datastates.transport.sending import cut

FAILURE = Failure("syntax", "no", text="main~", column=6, expected=("a number",))
EVERY: list[Message] = [
    Hello(protocol.MAGIC, 1, bytes(32)),
    Challenge(1, bytes(32)),
    Proof(bytes(32)),
    Welcome(bytes(32)),
    Denied(),
    Ready(
        ("tcp", "ucx"), b"address", 10_000, Identity("f00d", "node", "0.1"), "ucx", "datastates-0"
    ),
    Ask(7, Digests(0, (0, 5))),
    Refused(FAILURE),
    Ask(1, Refs()),
    Ask(2, Find("metrics.loss < 1", 10, "cursor")),
    Ask(3, Log("main", 10)),
    Ask(4, Resolve("main~3")),
    Ask(5, Open("5e0f", "ucx://10.0.0.1:1", ("ucx://10.0.0.2:2",), False)),
    Ask(6, Release(0)),
    Ask(7, Push(0, 100)),
    Part(7, b"offer"),
    Answer(1, b"body", True),
    Failed(1, FAILURE),
    Want(0, (3,), (1 << 63) - 1, (CHUNK_BYTES, 1)),
    Want(0, tuple(range(32)), 1, (1,) * 2048),
    Gone(7, FAILURE),
    Moved(b"address", asks=True),
    Moved(b"", failure=FAILURE),
    Took(0, 16, 1 << 26),
    Land(1, bytes(100)),
    Room(5 << 32, 1, 9 << 20, 1, 4 << 20, 4 << 20, (5, 7), generation=2),
    Laid(5 << 32, 1, 4 << 20, generation=2),
    Ping(1 << 40),
    Bye(FAILURE),
]


@pytest.mark.parametrize("message", EVERY, ids=lambda message: type(message).__name__)
def test_what_is_written_is_read(message: Message) -> None:
    assert decode(encode(message), peer="there") == message


def test_every_message_is_tried_above() -> None:
    assert {type(message) for message in EVERY} == set(Message.__args__)


@pytest.mark.parametrize(
    "message",
    [
        Hello(b"datastates" * 2, 1, bytes(32)),
        Hello(protocol.MAGIC, 1 << 17, bytes(32)),
        Hello(protocol.MAGIC, 1, bytes(31)),
        Ready((), bytes((8 << 10) + 1), 1000),
        Ready((), b"", 99),
        Ask(-1, Refs()),
        Ask(1 << 31, Refs()),
        Ask(0, Find("x", 0)),
        Ask(0, Find("x", 10_001)),
        Ask(0, Find("x" * (17 << 10), 1)),
        Ask(0, Open("../../etc/passwd")),
        Ask(0, Open("5e0f\n")),
        Ask(0, Digests(0, ())),
        Ask(0, Digests(0, tuple(range(513)))),
        Moved(bytes((8 << 10) + 1)),
        Ask(0, Push(0, 0)),
        Ask(0, Push(0, protocol.BODY_BYTES + 1)),
        Want(0, (0,), 0, ()),
        Want(0, (), 0, (1,)),
        Want(0, tuple(range(33)), 0, (1,) * 33),
        Want(0, (0,), 0, (0,)),
        Want(0, (0,), 0, (CHUNK_BYTES + 1,)),
        Want(0, (0,), 0, (1,) * 2049),
        Want(0, (0,), 1 << 63, (1,)),
        Ping(-1),
    ],
    ids=str,
)
def test_a_field_out_of_bounds_is_the_peers_fault(message: Message) -> None:
    with pytest.raises(PeerFault, match="there sent no message of protocol 2"):
        decode(encode(message), peer="there")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x81" * 5000,
        b"\xdd\xff\xff\xff\xff",
        msgpack.encode({"type": "Unknown"}),
    ],
)
def test_garbage_is_the_peers_fault(body: bytes) -> None:
    with pytest.raises(PeerFault):
        decode(body, peer="there")


def test_what_is_nested_deeply_does_not_exhaust_the_stack() -> None:
    with pytest.raises(PeerFault):
        decode(b"\x82\xa4type\xa4Ping\xa1x" + b"\x91" * 500_000, peer="there")


def test_a_later_version_may_add_fields() -> None:
    assert decode(msgpack.encode({"type": "Ping", "sent": 3, "new": [1, 2]}), peer="there") == Ping(
        3
    )


@given(st.binary(min_size=1, max_size=200), st.data())
def test_cut_pieces_are_the_same_bytes(body: bytes, data: st.DataObject) -> None:
    def pieces() -> list[int]:
        edges = sorted({0, len(body), *data.draw(st.lists(st.integers(0, len(body)), max_size=6))})
        return [after - before for before, after in itertools.pairwise(edges)]

    old, start = [], 0
    for length in pieces():
        old.append(memoryview(body)[start : start + length])
        start += length
    wanted = pieces()
    new = cut([memoryview(b""), *old], wanted)
    assert [len(piece) for piece in new] == wanted
    assert b"".join(new) == body


def test_a_piece_within_one_old_piece_is_not_copied() -> None:
    memory = bytearray(range(100))
    first, second, third = cut([memoryview(memory)[:60], memoryview(memory)[60:]], [50, 20, 30])
    memory[:] = bytes(100)
    assert not any(first)
    assert list(second) == list(range(50, 70))
    assert not any(third)
