"""How two processes prove to each other that they know the token, before either reveals anything else.

    client -> Hello(magic, version, nonce)
    server -> Challenge(version, nonce)
    client -> Proof(HMAC(token, "client", transcript))          a wrong one is answered with Denied
    server -> Welcome(HMAC(token, "server", transcript))
    both   -> Ready(…), the first frame that carries a code

The transcript is the digest of both first frames as they travelled. The keys of the two directions are derived from token and
transcript as in HKDF (RFC 5869), so no frame of one connection, or of one direction, is valid in another.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import os
import secrets
from collections.abc import Callable, Coroutine, Mapping
from typing import TypeVar

from datastates.errors import DatastatesError, Disconnected, InvalidInput, PeerFault, Unauthorized
from datastates.system.secret_file import read_secret
from datastates.transport.contract import Channel
from datastates.transport.failures import describe, revive
from datastates.transport.protocol import (
    FIRST_FRAME_BYTES,
    MAGIC,
    PROTOCOL_VERSION,
    Challenge,
    Denied,
    Hello,
    Message,
    Proof,
    Ready,
    Refused,
    Welcome,
    decode,
    encode,
)

from .sealed import Seal, Sealed

__all__ = ["TOKEN_BYTES", "admit", "greet", "read_token"]

TOKEN_BYTES = 16
"""The least number of bytes of a token: anyone who observes a handshake can try out short ones."""

_CLIENT, _SERVER = b"c", b"s"
_Expected = TypeVar("_Expected", bound=Message)


async def greet(channel: Channel, ready: Ready, *, token: bytes, timeout_s: float) -> tuple[Sealed, Ready]:
    """The client's side: returns an authenticated channel, and what the server says of itself.

    :raises Unauthorized: one side does not know the other's token.
    :raises PeerFault: the other end does not speak this protocol and version.
    :raises Disconnected: it did not finish in time.
    """
    try:
        return await _bounded(channel, timeout_s, _greet(channel, ready, token))
    except Disconnected as exc:
        hint = "" if channel.is_secret else " (if that server uses TLS, pass tls= or --tls-ca)"
        raise Disconnected(f"{exc}{hint}") from exc


async def admit(channel: Channel, ready: Callable[[], Ready], *, token: bytes, timeout_s: float) -> tuple[Sealed, Ready]:
    """The server's side. ``ready`` is called once the client has proved itself; an error that it raises is sent to the client."""
    return await _bounded(channel, timeout_s, _admit(channel, ready, token))


def read_token(
    token: str | bytes | None = None, token_file: str | os.PathLike[str] | None = None, environ: Mapping[str, str] | None = None
) -> bytes:
    """The token that both sides share: as given, from a file, or from ``DATASTATES_TOKEN``; empty if there is none.

    :raises InvalidInput: two were given, the file cannot be read, or others can read it too, or it has fewer than 16 bytes.
    """
    if token is not None and token_file is not None:
        raise InvalidInput("both token and token_file were given: give one of them")
    if token_file is not None:
        origin = f"token_file {os.fspath(token_file)!r}"
        raw = read_secret(token_file, origin).strip()
    elif token is not None:
        origin, raw = "token", token.encode() if isinstance(token, str) else token
    else:
        origin, raw = "DATASTATES_TOKEN", (os.environ if environ is None else environ).get("DATASTATES_TOKEN", "").strip().encode()
        if not raw:
            return b""
    if len(raw) < TOKEN_BYTES:
        hint = "make one with: datastates token FILE"
        raise InvalidInput(f"{origin} has {len(raw)} bytes, and fewer than {TOKEN_BYTES} can be guessed: {hint}")
    return raw


def check_writers(url: str, token: bytes) -> None:
    """Refuse to let peers write without a token. A ``memory:`` address needs none: only this process reaches it.

    :raises InvalidInput: there is no token.
    """
    if not token and not url.startswith("memory:"):
        raise InvalidInput(
            "whoever may write must show a token, on 127.0.0.1 too, where every user of the machine is: set DATASTATES_TOKEN, "
            "give token_file= (make one with: datastates token FILE), or leave out is_writable=True (--writable)"
        )


async def _bounded(channel: Channel, timeout_s: float, handshake: Coroutine[None, None, tuple[Sealed, Ready]]) -> tuple[Sealed, Ready]:
    try:
        async with asyncio.timeout(timeout_s):
            return await handshake
    except TimeoutError as exc:
        await channel.close()
        raise Disconnected(f"{channel.peer} did not finish the handshake within {timeout_s:g} s: does datastates serve there?") from exc
    except BaseException:
        await channel.close()
        raise


async def _greet(channel: Channel, ready: Ready, token: bytes) -> tuple[Sealed, Ready]:
    hello = encode(Hello(MAGIC, PROTOCOL_VERSION, secrets.token_bytes(32)))
    await channel.send(hello)
    frame = await channel.receive(FIRST_FRAME_BYTES)
    _check_version(channel, _expect(Challenge, frame, channel).version)
    transcript = _transcript(hello, frame)
    await channel.send(encode(Proof(_proof(token, _CLIENT, transcript))))
    answer = decode(await channel.receive(FIRST_FRAME_BYTES), peer=channel.peer)
    if isinstance(answer, Denied):
        had = "the token" if token else "connecting without a token"
        raise Unauthorized(f"{channel.peer} refused {had}: set DATASTATES_TOKEN, or pass token= or token_file=, as the server was given it")
    if not isinstance(answer, Welcome):
        raise PeerFault(f"{channel.peer} sent {type(answer).__name__} where Welcome belongs: is it datastates that serves there?")
    if not hmac.compare_digest(answer.mac, _proof(token, _SERVER, transcript)):
        raise Unauthorized(f"{channel.peer} does not know the token: it is another server than you think, or was given another token")
    sealed = _seal(channel, token, transcript, mine=_CLIENT, its=_SERVER)
    await sealed.send(encode(ready))
    return sealed, await _first(sealed)


async def _admit(channel: Channel, ready: Callable[[], Ready], token: bytes) -> tuple[Sealed, Ready]:
    frame = await channel.receive(FIRST_FRAME_BYTES)
    hello = _expect(Hello, frame, channel)
    if hello.magic != MAGIC:
        raise PeerFault(f"{channel.peer} began with {hello.magic!r} instead of {MAGIC!r}: it is no datastates")
    challenge = encode(Challenge(PROTOCOL_VERSION, secrets.token_bytes(32)))
    await channel.send(challenge)
    _check_version(channel, hello.version)
    transcript = _transcript(frame, challenge)
    proof = _expect(Proof, await channel.receive(FIRST_FRAME_BYTES), channel)
    if not hmac.compare_digest(proof.mac, _proof(token, _CLIENT, transcript)):
        await channel.send(encode(Denied()))
        raise Unauthorized(f"{channel.peer} does not know the token: it was turned away")
    await channel.send(encode(Welcome(_proof(token, _SERVER, transcript))))
    sealed = _seal(channel, token, transcript, mine=_SERVER, its=_CLIENT)
    try:
        own = ready()
    except DatastatesError as exc:
        await sealed.send(encode(Refused(describe(exc))))
        await _first(sealed)  # closing a connection with unread bytes would discard the refusal
        raise
    await sealed.send(encode(own))
    return sealed, await _first(sealed)


async def _first(sealed: Sealed) -> Ready:
    message = await sealed.receive()
    if isinstance(message, Refused):
        raise revive(message.failure)
    if not isinstance(message, Ready):
        raise PeerFault(f"{sealed.peer} sent {type(message).__name__} where Ready belongs")
    return message


def _expect(kind: type[_Expected], frame: bytes, channel: Channel) -> _Expected:
    message = decode(frame, peer=channel.peer)
    if not isinstance(message, kind):
        raise PeerFault(f"{channel.peer} sent {type(message).__name__} where {kind.__name__} belongs: is it datastates?")
    return message


def _check_version(channel: Channel, version: int) -> None:
    if version != PROTOCOL_VERSION:
        raise PeerFault(f"{channel.peer} speaks version {version} of the protocol, this side {PROTOCOL_VERSION}: update the older one")


def _transcript(hello: bytes, challenge: bytes) -> bytes:
    lengths = len(hello).to_bytes(4, "big") + len(challenge).to_bytes(4, "big")
    return hashlib.sha256(b"datastates transcript" + lengths + hello + challenge).digest()


def _proof(token: bytes, role: bytes, transcript: bytes) -> bytes:
    return hmac.digest(token, b"datastates proof " + role + transcript, "sha256")


def _seal(channel: Channel, token: bytes, transcript: bytes, *, mine: bytes, its: bytes) -> Sealed:
    master = hmac.digest(transcript, token, "sha256")
    outgoing, incoming = (Seal(hmac.digest(master, b"datastates frames " + role + b"\x01", "sha256"), role) for role in (mine, its))
    return Sealed(channel, outgoing, incoming, hmac.digest(master, b"datastates further keys\x01", "sha256"))
