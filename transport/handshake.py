"""How two processes prove to each other that they know the token, before either reveals anything
else.

    client -> Hello(magic, version, nonce)
    server -> Challenge(version, nonce)
    client -> Proof(HMAC(token, "client", transcript))          a wrong one is answered with Denied
    server -> Welcome(HMAC(token, "server", transcript))
    both   -> Ready(…), the first frame that carries a code

The transcript is the digest of both first frames as they travelled. The keys of the two directions
are derived from token and transcript as in HKDF (RFC 5869), so no frame of one connection, or of
one direction, is valid in another.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import importlib.util
import ipaddress
import os
import secrets
import struct
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

from datastates.errors import (
    DatastatesError,
    Disconnected,
    InvalidInput,
    PeerFault,
    Unauthorized,
    Unsupported,
)
from datastates.system.failures import describe, revive
from datastates.system.files import read_secret

from .contract import Channel
from .protocol import (
    FIRST_FRAME_BYTES,
    FRAME_BYTES,
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

MAC_BYTES = 16
_place_sealed = struct.Struct(">cQ")


class FrameSigner:
    """The codes of one direction: HMAC-SHA256 over (direction, counter, body), the first 16
    bytes."""

    def __init__(self, key: bytes, direction: bytes) -> None:
        self._keyed = hmac.new(key, digestmod=hashlib.sha256)
        self._direction, self._count = direction, 0

    def next(self, body: bytes | memoryview) -> bytes:
        """The code of the next frame."""
        mac = self._keyed.copy()
        mac.update(_place_sealed.pack(self._direction, self._count))
        mac.update(body)
        self._count += 1
        return mac.digest()[:MAC_BYTES]


class SecureChannel:
    """A channel whose two ends have proved themselves. One task sends, one receives; after a
    cancelled ``send`` it cannot be used any more."""

    def __init__(
        self, channel: Channel, outgoing: FrameSigner, incoming: FrameSigner, root: bytes
    ) -> None:
        self.peer, self.host, self.is_secret, self.remote = (
            channel.peer,
            channel.host,
            channel.is_secret,
            channel.remote,
        )
        self._channel, self._outgoing, self._incoming, self._root = (
            channel,
            outgoing,
            incoming,
            root,
        )

    def derive(self, purpose: bytes) -> bytes:
        """32 bytes that only the two ends of this connection know."""
        return hmac.digest(self._root, b"datastates " + purpose + b"\x01", "sha256")

    async def send(self, body: bytes) -> None:
        """Send an encoded message."""
        await self._channel.send(body + self._outgoing.next(body))

    async def receive(self) -> Message:
        """The next message.

        :raises PeerFault: it was changed, repeated, left out or reflected on its way, or is not a
            message.
        """
        frame = memoryview(await self._channel.receive(FRAME_BYTES))
        body, mac = frame[:-MAC_BYTES], frame[-MAC_BYTES:]
        if not hmac.compare_digest(self._incoming.next(body), mac):
            raise PeerFault(
                f"a frame from {self.peer} fails its authentication code: something on the way"
                " changes what is sent"
            )
        return decode(body, peer=self.peer)

    async def close(self) -> None:
        """Close the channel; idempotent."""
        await self._channel.close()


# How two processes prove to each other that they know the token, before either reveals anything
# else.


TOKEN_BYTES = 16
"""The least number of bytes of a token: anyone who observes a handshake can try out short ones."""

_CLIENT = b"c"
_SERVER = b"s"
_Expected = TypeVar("_Expected", bound=Message)


async def greet(
    channel: Channel, ready: Ready, *, token: bytes, timeout_s: float
) -> tuple[SecureChannel, Ready]:
    """The client's side: returns an authenticated channel, and the server's ``Ready``.

    :raises Unauthorized: one side does not know the other's token.
    :raises PeerFault: the other end does not speak this protocol and version.
    :raises Disconnected: it did not finish in time.
    """
    try:
        return await _bounded(channel, timeout_s, _greet(channel, ready, token))
    except Disconnected as exc:
        hint = "" if channel.is_secret else " (if that server uses TLS, pass tls= or --tls-ca)"
        raise Disconnected(f"{exc}{hint}") from exc


async def admit(
    channel: Channel, ready: Callable[[], Ready], *, token: bytes, timeout_s: float
) -> tuple[SecureChannel, Ready]:
    """The server's side.

    ``ready`` is called once the client has proved itself; an error that it raises is sent to the
    client."""
    return await _bounded(channel, timeout_s, _admit(channel, ready, token))


def read_token(
    token: str | bytes | None = None,
    token_file: str | os.PathLike[str] | None = None,
    environ: Mapping[str, str] | None = None,
) -> bytes:
    """The token that both sides share: the argument, or the content of the file, or
    ``DATASTATES_TOKEN``. Empty if there is none.

    :raises InvalidInput: two were given, the file cannot be read, or others can read it too, or it
        has fewer than 16 bytes.
    """
    if token is not None and token_file is not None:
        raise InvalidInput("both token and token_file were given: give one of them")
    if token_file is not None:
        origin = f"token_file {os.fspath(token_file)!r}"
        raw = read_secret(token_file, origin).strip()
    elif token is not None:
        origin, raw = "token", token.encode() if isinstance(token, str) else token
    else:
        origin, raw = (
            "DATASTATES_TOKEN",
            (os.environ if environ is None else environ)
            .get("DATASTATES_TOKEN", "")
            .strip()
            .encode(),
        )
        if not raw:
            return b""
    if len(raw) < TOKEN_BYTES:
        hint = "make one with: datastates token FILE"
        raise InvalidInput(
            f"{origin} has {len(raw)} bytes, and fewer than {TOKEN_BYTES} can be guessed: {hint}"
        )
    return raw


def check_writers(url: str, token: bytes) -> None:
    """Refuse to let peers write without a token. A ``memory:`` address needs none, since
    only this process reaches it.

    :raises InvalidInput: there is no token.
    """
    if not token and not url.startswith("memory:"):
        raise InvalidInput(
            "clients that may write must show a token, on 127.0.0.1 too, which every user of the"
            " machine reaches: set DATASTATES_TOKEN, give token_file= (datastates token FILE makes"
            " one), or leave out is_writable=True (--writable)"
        )


async def _bounded(
    channel: Channel,
    timeout_s: float,
    handshake: Coroutine[None, None, tuple[SecureChannel, Ready]],
) -> tuple[SecureChannel, Ready]:
    try:
        async with asyncio.timeout(timeout_s):
            return await handshake
    except TimeoutError as exc:
        await channel.close()
        raise Disconnected(
            f"{channel.peer} did not finish the handshake within {timeout_s:g} s: does datastates"
            " serve there?"
        ) from exc
    except BaseException:
        await channel.close()
        raise


async def _greet(channel: Channel, ready: Ready, token: bytes) -> tuple[SecureChannel, Ready]:
    hello = encode(Hello(MAGIC, PROTOCOL_VERSION, secrets.token_bytes(32)))
    await channel.send(hello)
    frame = await channel.receive(FIRST_FRAME_BYTES)
    _check_version(channel, _expect(Challenge, frame, channel).version)
    transcript = _transcript(hello, frame)
    await channel.send(encode(Proof(_proof(token, _CLIENT, transcript))))
    answer = decode(await channel.receive(FIRST_FRAME_BYTES), peer=channel.peer)
    if isinstance(answer, Denied):
        had = "the token" if token else "connecting without a token"
        raise Unauthorized(
            f"{channel.peer} refused {had}: set DATASTATES_TOKEN, or pass token= or token_file=, as"
            " the server was given it"
        )
    if not isinstance(answer, Welcome):
        raise PeerFault(
            f"{channel.peer} sent {type(answer).__name__} where Welcome belongs: is it datastates"
            " that serves there?"
        )
    if not hmac.compare_digest(answer.mac, _proof(token, _SERVER, transcript)):
        raise Unauthorized(
            f"{channel.peer} does not know the token: it is another server than you think, or was"
            " given another token"
        )
    sealed = _seal(channel, token, transcript, mine=_CLIENT, its=_SERVER)
    await sealed.send(encode(ready))
    return sealed, await _first(sealed)


async def _admit(
    channel: Channel, ready: Callable[[], Ready], token: bytes
) -> tuple[SecureChannel, Ready]:
    frame = await channel.receive(FIRST_FRAME_BYTES)
    hello = _expect(Hello, frame, channel)
    if hello.magic != MAGIC:
        raise PeerFault(
            f"{channel.peer} began with {hello.magic!r} instead of {MAGIC!r}: it is no datastates"
        )
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


async def _first(sealed: SecureChannel) -> Ready:
    message = await sealed.receive()
    if isinstance(message, Refused):
        raise revive(message.failure)
    if not isinstance(message, Ready):
        raise PeerFault(f"{sealed.peer} sent {type(message).__name__} where Ready belongs")
    return message


def _expect(kind: type[_Expected], frame: bytes, channel: Channel) -> _Expected:
    message = decode(frame, peer=channel.peer)
    if not isinstance(message, kind):
        raise PeerFault(
            f"{channel.peer} sent {type(message).__name__} where {kind.__name__} belongs: is it"
            " datastates?"
        )
    return message


def _check_version(channel: Channel, version: int) -> None:
    if version != PROTOCOL_VERSION:
        raise PeerFault(
            f"{channel.peer} speaks version {version} of the protocol, this side"
            f" {PROTOCOL_VERSION}: update the older one"
        )


def _transcript(hello: bytes, challenge: bytes) -> bytes:
    lengths = len(hello).to_bytes(4, "big") + len(challenge).to_bytes(4, "big")
    return hashlib.sha256(b"datastates transcript" + lengths + hello + challenge).digest()


def _proof(token: bytes, role: bytes, transcript: bytes) -> bytes:
    return hmac.digest(token, b"datastates proof " + role + transcript, "sha256")


def _seal(
    channel: Channel, token: bytes, transcript: bytes, *, mine: bytes, its: bytes
) -> SecureChannel:
    master = hmac.digest(transcript, token, "sha256")
    outgoing, incoming = (
        FrameSigner(hmac.digest(master, b"datastates frames " + role + b"\x01", "sha256"), role)
        for role in (mine, its)
    )
    return SecureChannel(
        channel, outgoing, incoming, hmac.digest(master, b"datastates further keys\x01", "sha256")
    )


# Which addresses a receiver in a chain may be sent to. A source names only its peers' own
# addresses, and a receiver checks them again.


_SCHEMES = {"tcp", "ucx"}
_Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def is_at(url: str, remote: tuple[str, int] | None) -> bool:
    """Whether a url has the address from which its owner is connected; always True if no network
    is between the two."""
    if remote is None:
        return True
    found, own = _place_ahead(url), _address(remote[0])
    return found is not None and found == own


def may_dial(url: str, source: tuple[str, int] | None) -> bool:
    """Whether a receiver may dial the url that a source names: an address with a port, and on
    this machine or link only if the source is."""
    if source is None:
        return True
    found, own = _place_ahead(url), _address(source[0])
    if (
        found is None
        or own is None
        or found.is_unspecified
        or found.is_multicast
        or found.is_reserved
    ):
        return False
    return (own.is_loopback or not found.is_loopback) and (
        own.is_link_local or not found.is_link_local
    )


def _place_ahead(url: str) -> _Address | None:
    """The address that a url names; None if it is not one of our urls, or has more than an
    address and a port."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return None
    host = parts.hostname or ""
    written = f"[{host}]" if ":" in host else host
    if (
        parts.scheme not in _SCHEMES
        or not port
        or url.lower() != f"{parts.scheme}://{written}:{port}"
    ):
        return None
    return _address(host)


def _address(host: str) -> _Address | None:
    try:
        found = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
    return found.ipv4_mapped or found if isinstance(found, ipaddress.IPv6Address) else found


# The choice of a session's data plane, from the planes and the wish of each side.


Offer = tuple[tuple[str, ...], str]
"""The planes that a side can use, and the one that it wishes for, if any."""


def offer(planes: Sequence[str], scheme: str, data: str, *, is_secret: bool = False) -> Offer:
    """The offer that a side makes in ``Ready``, from its transport's planes and its user's choice
    (``config.Data``). ``ipc`` is offered only if the user chose it. ``is_secret`` means that there
    is TLS, which UCX lacks. UCX is then used only if a user chose it.

    :raises InvalidInput: the user chose UCX, and the url rules it out.
    :raises Unsupported: the user chose UCX, which is not installed.
    """
    if data == "ipc":
        if "tcp" not in planes:
            raise InvalidInput('data="ipc" needs a url of another process: write tcp://')
        return ("tcp", "ipc"), ""
    if "ucx" not in planes:
        if data == "ucx" and scheme == "tcp":
            raise InvalidInput(
                'data="ucx" was asked for at a url that begins with tcp://, which never uses UCX:'
                " write ucx://"
            )
        return tuple(planes), ""
    if data == "tcp":
        return tuple(each for each in planes if each != "ucx"), ""
    if importlib.util.find_spec("ucxx") is None:
        if data == "ucx":
            raise Unsupported(
                "data='ucx' needs UCXX, which is not installed: pip install 'datastates[cu13]' (it"
                " needs no GPU), or use tcp"
            )
        return tuple(each for each in planes if each != "ucx"), ""
    if data == "ucx":
        return tuple(planes), "ucx"
    return tuple(planes), "rdma" if has_rdma() and not is_secret else ""


def agree(own: Ready, its: Ready, peer: str) -> str:
    """The plane on which both sides agree. Each side computes it.

    :raises Unsupported: they have none in common, or one side insists on UCX, which the other
        cannot use.
    """
    common = [each for each in own.planes if each in its.planes]
    if "ucx" in (own.wish, its.wish) and "ucx" not in common:
        asking, other = ("this side", peer) if own.wish == "ucx" else (peer, "this side")
        raise Unsupported(
            f"{asking} has data='ucx', and {other} cannot use UCX (not installed, data='tcp',"
            " or a tcp:// url): choose the same data plane on both sides"
        )
    if "ipc" in common:
        return "ipc"
    if "ucx" in common and ("ucx" in (own.wish, its.wish) or own.wish == its.wish == "rdma"):
        return "ucx"
    left = [each for each in common if each != "ucx"]
    if not left:
        raise Unsupported(
            f"{peer} moves bytes over {', '.join(its.planes) or 'nothing'}, this side over"
            f" {', '.join(own.planes) or 'nothing'}"
        )
    return left[0]


def has_rdma(devices: Path = Path("/sys/class/infiniband")) -> bool:
    """Whether there is an adapter that the loaded UCX can use: the one that comes with UCXX
    supports none."""
    try:
        return has_system_ucx() and any(devices.iterdir())
    except OSError:
        return False


def has_system_ucx() -> bool:
    """Whether the system's UCX is loaded, and not the one that comes with UCXX."""
    return os.environ.get("RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY", "").lower() in {
        "1",
        "true",
        "yes",
        "on",
    }
