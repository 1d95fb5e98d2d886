"""The handshake: who does not know the token learns nothing, and nothing can be changed on the
way."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from pathlib import Path

import pytest

from datastates.errors import Disconnected, InvalidInput, PeerFault, Unauthorized, Unavailable
from datastates.transport import protocol
from datastates.transport.handshake import SecureChannel, admit, greet, read_token
from datastates.transport.protocol import (
    Challenge,
    Hello,
    Identity,
    Ping,
    Proof,
    Ready,
    Welcome,
    decode,
    encode,
)
from tests.support.secrets_kept import keep
from tests.transport.wires import Change, QueueChannel
from tests.transport.worlds import PATIENCE_S

TOKEN = b"0123456789abcdef"
CLIENT = Ready((), b"client's address", 10_000)
SERVER = Ready(("x",), b"server's address", 5_000, Identity("f00d", "node", "0"))
Side = tuple[SecureChannel, Ready] | BaseException


async def shake(
    left: QueueChannel,
    right: QueueChannel,
    client: bytes = TOKEN,
    server: bytes = TOKEN,
    *,
    timeout_s: float = PATIENCE_S,
) -> tuple[Side, Side]:
    """What both sides got."""
    sides: tuple[Awaitable[tuple[SecureChannel, Ready]], ...] = (
        greet(left, CLIENT, token=client, timeout_s=timeout_s),
        admit(right, lambda: SERVER, token=server, timeout_s=timeout_s),
    )
    near, far = await asyncio.gather(*sides, return_exceptions=True)
    return near, far


async def shaken(left: QueueChannel, right: QueueChannel) -> tuple[SecureChannel, SecureChannel]:
    near, far = await shake(left, right)
    assert not isinstance(near, BaseException)
    assert not isinstance(far, BaseException)
    return near[0], far[0]


def messages(channel: QueueChannel) -> list[str]:
    return [type(decode(frame, peer="")).__name__ for frame in channel.sent]


@pytest.mark.parametrize("token", [b"", TOKEN])
def test_both_sides_learn_of_each_other(token: bytes) -> None:
    async def test() -> None:
        left, right = QueueChannel.pair()
        near, far = await shake(left, right, token, token)
        assert not isinstance(near, BaseException)
        assert not isinstance(far, BaseException)
        assert (near[1], far[1]) == (SERVER, CLIENT)
        for one, other in [(near[0], far[0]), (far[0], near[0])]:
            for number in range(3):
                await one.send(encode(Ping(number)))
                assert await other.receive() == Ping(number)

    asyncio.run(test())


@pytest.mark.parametrize(
    ("client", "server"),
    [(b"another token 16", TOKEN), (b"", TOKEN), (TOKEN, b""), (TOKEN, TOKEN[:-1] + b"F")],
)
def test_a_client_with_another_token_is_turned_away_and_told_nothing(
    client: bytes, server: bytes
) -> None:
    async def test() -> None:
        left, right = QueueChannel.pair()
        near, far = await shake(left, right, client, server)
        assert isinstance(near, Unauthorized)
        assert isinstance(far, Unauthorized)
        assert "DATASTATES_TOKEN" in str(near)
        assert messages(right) == ["Challenge", "Denied"]
        assert messages(left) == ["Hello", "Proof"]
        assert left.is_closed
        assert right.is_closed

    asyncio.run(test())


def test_a_server_that_does_not_know_the_token_is_not_believed() -> None:
    async def test() -> None:
        left, right = QueueChannel.pair()

        async def impostor() -> None:
            await right.receive(1 << 14)
            await right.send(encode(Challenge(protocol.PROTOCOL_VERSION, bytes(32))))
            proof = decode(await right.receive(1 << 14), peer="")
            assert isinstance(proof, Proof)
            await right.send(encode(Welcome(proof.mac)))  # the client's own code, turned round

        near, _ = await asyncio.gather(
            greet(left, CLIENT, token=TOKEN, timeout_s=PATIENCE_S),
            impostor(),
            return_exceptions=True,
        )
        assert isinstance(near, Unauthorized)
        assert "does not know the token" in str(near)
        assert all(b"address" not in frame for frame in left.sent)

    asyncio.run(test())


def test_a_proof_is_good_for_one_connection_only() -> None:
    async def test() -> None:
        left, right = QueueChannel.pair()
        await shaken(left, right)
        again, other = QueueChannel.pair()
        for frame in left.sent:
            await again.send(frame)
        with pytest.raises(Unauthorized):
            await admit(other, lambda: SERVER, token=TOKEN, timeout_s=PATIENCE_S)

    asyncio.run(test())


def test_other_versions_are_named_on_both_sides() -> None:
    async def test() -> None:
        left, right = QueueChannel.pair()
        left.change = lambda number, frame: (
            [encode(Hello(protocol.MAGIC, 7, bytes(32)))] if number == 0 else [frame]
        )
        right.change = lambda number, frame: (
            [encode(Challenge(9, bytes(32)))] if number == 0 else [frame]
        )
        near, far = await shake(left, right)
        assert isinstance(near, PeerFault)
        assert isinstance(far, PeerFault)
        assert "version 9 of the protocol, this side 2" in str(near)
        assert "version 7 of the protocol, this side 2" in str(far)

    asyncio.run(test())


def test_another_magic_is_the_peers_fault() -> None:
    async def test() -> None:
        left, right = QueueChannel.pair()
        await left.send(encode(Hello(b"bitcoin", 1, bytes(32))))
        with pytest.raises(PeerFault, match="bitcoin"):
            await admit(right, lambda: SERVER, token=TOKEN, timeout_s=PATIENCE_S)
        assert not right.sent
        assert right.is_closed

    asyncio.run(test())


@pytest.mark.parametrize("side", ["client", "server"])
def test_a_peer_that_says_nothing_is_given_up(side: str) -> None:
    async def test() -> None:
        left, right = QueueChannel.pair()
        work = (
            greet(left, CLIENT, token=b"", timeout_s=0.05)
            if side == "client"
            else admit(right, lambda: SERVER, token=b"", timeout_s=0.05)
        )
        with pytest.raises(Disconnected, match=r"within 0\.05 s"):
            await work
        assert (left if side == "client" else right).is_closed

    asyncio.run(test())


def test_a_server_that_is_full_says_so_to_those_who_may_come_in() -> None:
    def full() -> Ready:
        raise Unavailable("64 peers already")

    async def test() -> None:
        left, right = QueueChannel.pair()
        near, far = await asyncio.gather(
            greet(left, CLIENT, token=TOKEN, timeout_s=PATIENCE_S),
            admit(right, full, token=TOKEN, timeout_s=PATIENCE_S),
            return_exceptions=True,
        )
        assert isinstance(near, Unavailable)
        assert isinstance(far, Unavailable)
        assert "64 peers" in str(near)

    asyncio.run(test())


def test_a_flipped_bit_anywhere_in_the_handshake_is_noticed() -> None:
    """Of either side's frames, each byte, one bit."""

    async def test() -> None:
        for side in (0, 1):
            left, right = QueueChannel.pair()
            await shaken(left, right)
            for frame, body in enumerate((left, right)[side].sent):
                for place in range(len(body)):
                    pair = QueueChannel.pair()

                    def flip(
                        number: int, sent: bytes, frame: int = frame, place: int = place
                    ) -> list[bytes]:
                        return [
                            (
                                sent
                                if number != frame
                                else bytes(
                                    [
                                        *sent[:place],
                                        sent[place] ^ (1 << place % 8),
                                        *sent[place + 1 :],
                                    ]
                                )
                            )
                        ]

                    pair[side].change = flip
                    near, far = await shake(*pair)
                    noticed = [each for each in (near, far) if isinstance(each, BaseException)]
                    assert noticed, f"byte {place} of frame {frame} of side {side}"
                    assert all(
                        isinstance(each, PeerFault | Unauthorized | Disconnected)
                        for each in noticed
                    ), noticed

    asyncio.run(test())


async def _drain(sealed: SecureChannel) -> None:
    while True:
        await sealed.receive()


def _repeat(number: int, frame: bytes) -> list[bytes]:
    return [frame, frame]


def _leave_out(number: int, frame: bytes) -> list[bytes]:
    return [] if number == 3 else [frame]


def _shorten(number: int, frame: bytes) -> list[bytes]:
    return [frame[:10]]


def _extend(number: int, frame: bytes) -> list[bytes]:
    return [frame + b"\0"]


@pytest.mark.parametrize("change", [_repeat, _leave_out, _shorten, _extend])
def test_frames_cannot_be_repeated_left_out_or_cut(change: Change) -> None:
    async def test() -> None:
        left, right = QueueChannel.pair()
        near, far = await shaken(left, right)
        left.change = change
        for number in range(3):
            await near.send(encode(Ping(number)))
        with pytest.raises(PeerFault, match="authentication code"):
            await asyncio.wait_for(_drain(far), PATIENCE_S)

    asyncio.run(test())


def test_frames_cannot_be_turned_round_or_moved_to_another_connection() -> None:
    async def test() -> None:
        left, right = QueueChannel.pair()
        near, far = await shaken(left, right)
        await near.send(encode(Ping(1)))
        frame = left.sent[-1]
        await right.send(frame)
        with pytest.raises(PeerFault, match="authentication code"):
            await near.receive()
        assert await far.receive() == Ping(1)
        other = QueueChannel.pair()
        _, stranger = await shaken(*other)
        await other[0].send(frame)
        with pytest.raises(PeerFault, match="authentication code"):
            await stranger.receive()

    asyncio.run(test())


def test_a_flipped_bit_in_any_frame_is_noticed() -> None:
    async def test() -> None:
        body = encode(Ping(77))
        for place in range((len(body) + 16) * 8):
            left, right = QueueChannel.pair()
            near, far = await shaken(left, right)

            def flip(number: int, frame: bytes, place: int = place) -> list[bytes]:
                changed = bytearray(frame)
                changed[place // 8] ^= 1 << place % 8
                return [bytes(changed)]

            left.change = flip
            await near.send(body)
            with pytest.raises(PeerFault, match="authentication code"):
                await far.receive()

    asyncio.run(test())


# --- tokens ---------------------------------------------------------------------------------------


def test_a_token_comes_from_the_caller_a_file_or_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "token"
    keep(file, "from the file 16+\n")
    environ = {"DATASTATES_TOKEN": "from the environment"}
    assert read_token("from the caller!", environ=environ) == b"from the caller!"
    assert read_token(b"\xff" * 16) == b"\xff" * 16
    assert read_token(token_file=file, environ=environ) == b"from the file 16+"
    assert read_token(environ=environ) == b"from the environment"
    assert read_token(environ={}) == b""


def test_tokens_that_cannot_be_used_are_refused_by_name(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    keep(empty, "\n")
    with pytest.raises(InvalidInput, match="token has 5 bytes"):
        read_token("short")
    with pytest.raises(InvalidInput, match="token has 0 bytes"):
        read_token("")
    with pytest.raises(InvalidInput, match="DATASTATES_TOKEN has 5 bytes"):
        read_token(environ={"DATASTATES_TOKEN": "short"})
    with pytest.raises(InvalidInput, match="empty' has 0 bytes"):
        read_token(token_file=empty)
    with pytest.raises(InvalidInput, match="missing' cannot be read"):
        read_token(token_file=tmp_path / "missing")
    for mode in (0o644, 0o602, 0o777):
        empty.chmod(mode)
        with pytest.raises(
            InvalidInput, match=rf"every user of this machine \(mode {mode:04o}\): chmod o="
        ):
            read_token(token_file=empty)
    with pytest.raises(InvalidInput, match="one of them"):
        read_token("0123456789abcdef", empty)
