"""The messages between a training and the process that runs UCX for it: frames of MessagePack on a socket between the two.

Orders go to the helper, reports come back. Either side treats what it receives as bytes from a process that may have been taken over: every
field has bounds, and a report that nobody asked for ends the helper.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Final, Generic, TypeVar

import msgspec
from msgspec import Meta, Struct

__all__ = [
    "ADDRESS_BYTES",
    "Close",
    "Closed",
    "Connect",
    "Connected",
    "Ended",
    "Failed",
    "Go",
    "Inbox",
    "Order",
    "Receive",
    "Report",
    "Send",
    "Started",
    "frame",
    "orders",
    "reports",
]

ADDRESS_BYTES: Final = 8 << 10

_FRAME_BYTES = 64 << 10
_HEADER = 4

_T = TypeVar("_T")
_Number = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
_Tag = Annotated[int, Meta(ge=0)]
_Address = Annotated[bytes, Meta(min_length=1, max_length=ADDRESS_BYTES)]
_Text = Annotated[str, Meta(max_length=500)]


class Started(Struct, frozen=True, tag=0, array_like=True):
    """The worker is ready. ``resources`` are its transports with their devices (``tcp/eth0``); ``open`` is what could not be forbidden."""

    address: _Address
    versions: tuple[_Text, _Text]
    resources: Annotated[tuple[_Text, ...], Meta(max_length=256)]
    open: Annotated[tuple[_Text, ...], Meta(max_length=16)]


class Go(Struct, frozen=True, tag=1, array_like=True):
    """The memory may be mapped: the outgoing region for writing too, if devices do not accept it otherwise."""

    is_writable: bool


class Connect(Struct, frozen=True, tag=2, array_like=True):
    """Make an endpoint."""

    link: _Number
    address: _Address


class Connected(Struct, frozen=True, tag=3, array_like=True):
    """The endpoint was made, unless there is a ``problem``."""

    link: _Number
    problem: _Text | None = None


class Send(Struct, frozen=True, tag=4, array_like=True):
    """Send bytes from the outgoing memory."""

    number: _Number
    link: _Number
    tag: _Tag
    start: _Number
    length: _Number


class Receive(Struct, frozen=True, tag=5, array_like=True):
    """Receive into the incoming memory."""

    number: _Number
    link: _Number
    tag: _Tag
    start: _Number
    length: _Number


class Ended(Struct, frozen=True, tag=6, array_like=True):
    """A message was sent or received, unless there is a ``problem``. Its memory is not touched any more."""

    number: _Number
    problem: _Text | None = None
    is_too_long: bool = False


class Close(Struct, frozen=True, tag=7, array_like=True):
    """Stop what is under way on an endpoint, and release it."""

    link: _Number


class Closed(Struct, frozen=True, tag=8, array_like=True):
    """An endpoint is gone: everything under way on it has ended."""

    link: _Number


class Failed(Struct, frozen=True, tag=9, array_like=True):
    """UCX does not start; the helper ends."""

    problem: _Text


Order = Go | Connect | Send | Receive | Close
Report = Started | Failed | Connected | Ended | Closed

_encode = msgspec.msgpack.Encoder().encode


def frame(message: Order | Report) -> bytes:
    """The message as a frame."""
    body = _encode(message)
    return len(body).to_bytes(_HEADER, "little") + body


class Inbox(Generic[_T]):
    """Reassembles frames."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[_T]) -> None:
        self._decode = decoder.decode
        self._rest = bytearray()

    def take(self, data: bytes) -> Iterator[_T]:
        """The messages that are complete now.

        :raises ValueError: these are no messages.
        """
        rest = self._rest
        rest += data
        start = 0
        while len(rest) - start >= _HEADER:
            end = start + _HEADER + int.from_bytes(rest[start : start + _HEADER], "little")
            if end - start > _FRAME_BYTES:
                raise ValueError(f"a frame of {end - start} bytes, at most {_FRAME_BYTES} are allowed")
            if len(rest) < end:
                break
            yield self._decode(rest[start + _HEADER : end])
            start = end
        del rest[:start]


def orders() -> Inbox[Order]:
    """The inbox for the orders that the helper receives."""
    return Inbox(msgspec.msgpack.Decoder(Order))


def reports() -> Inbox[Report]:
    """The inbox for the reports that the training receives."""
    return Inbox(msgspec.msgpack.Decoder(Report))
