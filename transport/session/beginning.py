"""How a session begins: both ends prove the token, agree on a data plane, and find out whether they are processes of one host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from datastates.errors import Unsupported
from datastates.transport.contract import Channel, Terms, Tls, Transport
from datastates.transport.protocol import Identity, Ready
from datastates.transport.wire import near, tcp
from datastates.transport.wire.joining import NAME_BYTES
from datastates.transport.wire.registry import transport_for

from .answers import Service
from .choice import agree, offer
from .handshake import admit, greet
from .neighbours import meet
from .sealed import Sealed

__all__ = ["Begun", "let_in", "reach"]

_DAY_S = 86_400.0


@dataclass(frozen=True, slots=True)
class Begun:
    """Two ends that have proved themselves. ``own`` and ``its`` are what each said of itself; ``plane`` is the data plane that they agreed
    on; ``neighbour`` is the memory of the other process, if that can be read."""

    sealed: Sealed
    transport: Transport
    own: Ready
    its: Ready
    plane: str
    terms: Terms
    neighbour: near.Near | None
    service: Service | None

    async def close(self) -> None:
        """Release everything; no session came of it."""
        if self.neighbour is not None:
            self.neighbour.close()
        await self.sealed.close()


async def reach(
    url: str, channel: Channel | None, *, transport: Transport | None, token: bytes, timeout_s: float, tls: Tls | None, data: str
) -> Begun:
    """Begin at the end that dials ``url``, unless ``channel`` is already open to it; errors as in ``Session.connect``."""
    transport = transport_for(url) if transport is None else transport
    planes, wish = offer(transport.planes, transport.scheme, data, is_secret=tls is not None)
    channel = await transport.dial(url, timeout_s=timeout_s, tls=tls) if channel is None else channel
    own = Ready(planes, transport.located, _milliseconds(timeout_s), wish=wish)
    sealed, its = await greet(channel, own, token=token, timeout_s=timeout_s)
    try:
        return await _begun(sealed, transport, own, its, _terms(sealed, timeout_s, url, tls))
    except BaseException:
        await sealed.close()
        raise


async def let_in(
    channel: Channel,
    service: Service,
    *,
    transport: Transport,
    identity: Identity,
    token: bytes,
    timeout_s: float,
    admission: Callable[[], None],
    data: str,
) -> Begun:
    """Begin at the end that was dialled; errors as in ``Session.serve``."""

    def ready() -> Ready:
        admission()
        return own

    planes, wish = offer(transport.planes, transport.scheme, data, is_secret=channel.is_secret)
    own = Ready(planes, transport.located, _milliseconds(timeout_s), identity, wish, service.neighbours.name)
    sealed, its = await admit(channel, ready, token=token, timeout_s=timeout_s)
    try:
        return await _begun(sealed, transport, own, its, _terms(sealed, timeout_s), service)
    except BaseException:
        await sealed.close()
        raise


async def _begun(sealed: Sealed, transport: Transport, own: Ready, its: Ready, terms: Terms, service: Service | None = None) -> Begun:
    plane = agree(own, its, sealed.peer)
    neighbour = await meet(its.near, terms) if sealed.remote is not None and its.near else None
    if plane == "ipc" and service is None and neighbour is None:
        raise Unsupported(
            f"{sealed.peer} is no other process of this host and user, or its memory may not be read, and data='ipc' is for those: connect "
            "with data='auto'"
        )
    return Begun(sealed, transport, own, its, plane, terms, neighbour, service)


def _terms(sealed: Sealed, timeout_s: float, url: str | None = None, tls: Tls | None = None) -> Terms:
    """What both ends know of the session; only the end that dialled knows where."""
    name, key = sealed.derive(b"name")[:NAME_BYTES], sealed.derive(b"data")
    if url is None or sealed.remote is None:
        return Terms(name, key, sealed.peer, timeout_s=timeout_s)
    return Terms(name, key, sealed.peer, sealed.remote, tcp.split(url)[1], tcp.client_context(tls), timeout_s)


def _milliseconds(timeout_s: float) -> int:
    """As it travels: more than a day is a day."""
    return round(min(max(timeout_s, 0.1), _DAY_S) * 1000)
