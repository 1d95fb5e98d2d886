"""Frames after the handshake: each carries a code over its direction, its number and its body."""

from __future__ import annotations

import hashlib
import hmac
import struct

from datastates.errors import PeerFault
from datastates.transport.contract import Channel
from datastates.transport.protocol import FRAME_BYTES, Message, decode

__all__ = ["MAC_BYTES", "Seal", "Sealed"]

MAC_BYTES = 16
_place = struct.Struct(">cQ")


class Seal:
    """The codes of one direction: HMAC-SHA256 over (direction, counter, body), the first 16 bytes."""

    def __init__(self, key: bytes, direction: bytes) -> None:
        self._keyed = hmac.new(key, digestmod=hashlib.sha256)
        self._direction, self._count = direction, 0

    def next(self, body: bytes | memoryview) -> bytes:
        """The code of the next frame."""
        mac = self._keyed.copy()
        mac.update(_place.pack(self._direction, self._count))
        mac.update(body)
        self._count += 1
        return mac.digest()[:MAC_BYTES]


class Sealed:
    """A channel whose two ends have proved themselves. One task sends, one receives; after a cancelled ``send`` it cannot be used any
    more."""

    def __init__(self, channel: Channel, outgoing: Seal, incoming: Seal, root: bytes) -> None:
        self.peer, self.host, self.is_secret, self.remote = channel.peer, channel.host, channel.is_secret, channel.remote
        self._channel, self._outgoing, self._incoming, self._root = channel, outgoing, incoming, root

    def derive(self, purpose: bytes) -> bytes:
        """32 bytes that only the two ends of this connection know."""
        return hmac.digest(self._root, b"datastates " + purpose + b"\x01", "sha256")

    async def send(self, body: bytes) -> None:
        """Send an encoded message."""
        await self._channel.send(body + self._outgoing.next(body))

    async def receive(self) -> Message:
        """The next message.

        :raises PeerFault: it was changed, repeated, left out or reflected on its way, or is not a message.
        """
        frame = memoryview(await self._channel.receive(FRAME_BYTES))
        body, mac = frame[:-MAC_BYTES], frame[-MAC_BYTES:]
        if not hmac.compare_digest(self._incoming.next(body), mac):
            raise PeerFault(f"a frame from {self.peer} fails its authentication code: something on the way changes what is sent")
        return decode(body, peer=self.peer)

    async def close(self) -> None:
        """Close the channel; idempotent."""
        await self._channel.close()
