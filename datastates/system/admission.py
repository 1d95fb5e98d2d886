"""Limits on connections, counted from ``accept`` on, by address and in all. They leave the
descriptors that the training needs.

A place is *held* if its connection has proved a token, or if one of its requests is being answered.
When all places are taken, the address with most places that are not held loses the oldest of them.
Silent connections therefore do not block others. This module uses no sockets and no event loop: the
acceptor calls it, and closes connections that it refuses.
"""

from __future__ import annotations

import ipaddress
import os
import resource
import threading
import weakref
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import lru_cache

_SHARE = 4
"""Connections of all servers get at most a quarter of a process's descriptors, and none of the
last quarter."""

_MANY = 1 << 20  # where there is no limit on descriptors
_REMEMBERED = 1024  # addresses: parsing an address costs more than the other checks of a connection


@dataclass(frozen=True, slots=True)
class Limits:
    """The most connections at a time. ``per_address`` counts an IPv6 network of 64 bits as one
    address, because one host owns all of it.

    A connection for clones has ``proof_s`` seconds to prove the token, including the TLS handshake.
    """

    connections: int = 256
    per_address: int = 64
    proof_s: float = 10.0


class Descriptors:
    """The descriptors that connections may use, in all servers of a process together. ``taken`` is
    the number of connections; none gets a descriptor from ``most_used`` on.

    Safe from any thread."""

    def __init__(self, soft_limit: int) -> None:
        self.limit = max(1, soft_limit // _SHARE)
        self.most_used = soft_limit - self.limit
        self.taken = 0
        self._lock = threading.Lock()
        self._sharers: weakref.WeakSet[Admission] = weakref.WeakSet()

    def join(self, admission: Admission) -> None:
        with self._lock:
            self._sharers.add(admission)

    @property
    def share(self) -> int:
        """The share of one server, so that many connections at one server do not block other
        servers."""
        with self._lock:
            return max(1, self.limit // max(1, len(self._sharers)))

    def take(self) -> bool:
        """Count one more connection, if one more is allowed; returns whether it is."""
        with self._lock:
            is_free = self.taken < self.limit
            self.taken += is_free
            return is_free

    def give(self) -> None:
        with self._lock:
            self.taken -= 1


class Place:
    """The place of a connection that was let in, until ``release``."""

    __slots__ = ("_admission", "_give_way", "host", "is_held", "is_released")

    def __init__(self, admission: Admission, host: str, give_way: Callable[[], None]) -> None:
        self._admission, self._give_way, self.host = admission, give_way, host
        self.is_held = self.is_released = False

    def hold(self) -> None:
        """Keep the place from now on, so that it does not give way."""
        self.is_held = True

    def release_hold(self) -> None:
        """Let the place give way again to newcomers."""
        self.is_held = False

    def release(self) -> None:
        """Free the place of a closed connection; idempotent."""
        self._admission._release(self)


class Admission:
    """The places of one server; every call is made on its thread. ``unlimited`` are addresses
    without a separate limit, such as proxies. This machine is one of them. ``refused`` counts
    connections that were not let in, ``displaced`` those that gave way.
    """

    def __init__(
        self,
        limits: Limits | None = None,
        *,
        descriptors: Descriptors | None = None,
        unlimited: Collection[str] = (),
    ) -> None:
        self.limits = Limits() if limits is None else limits
        self._descriptors = process_descriptors() if descriptors is None else descriptors
        self._descriptors.join(self)
        self._unlimited = frozenset(map(_host, unlimited))
        self._places: dict[str, dict[Place, None]] = {}  # by host, the oldest first
        self.connections = self.refused = self.displaced = 0

    def admit(self, address: str, descriptor: int, give_way: Callable[[], None]) -> Place | None:
        """A place for a connection from an address, or None: then close it.

        ``give_way`` closes the connection when its place is needed."""
        host = _host(address)
        # the kernel gives the lowest free number, so it is about the number in use
        if descriptor >= self._descriptors.most_used or not self._make_room(host):
            self.refused += 1
            return None
        place = Place(self, host, give_way)
        self._places.setdefault(host, {})[place] = None
        self.connections += 1
        return place

    def of(self, address: str) -> int:
        return len(self._places.get(_host(address), ()))

    def _make_room(self, host: str) -> bool:
        """Take a descriptor for one more connection, after another connection has given way if
        necessary; returns whether there is one."""
        has_own_limit = host not in self._unlimited and not _is_loopback(host)
        if (
            has_own_limit
            and len(self._places.get(host, ())) >= self.limits.per_address
            and not self._displace([host])
        ):
            return False
        if self.connections >= self.limits.connections and not self._displace(self._places):
            return False
        if self.connections >= self._descriptors.share:
            self._displace(self._places)
        return self._descriptors.take() or (
            self._displace(self._places) and self._descriptors.take()
        )

    def _displace(self, hosts: Collection[str]) -> bool:
        """Close the oldest connection that is not held, of the host that has most of them; returns
        whether there was one."""
        idle = [[place for place in self._places[host] if not place.is_held] for host in hosts]
        most = max(idle, key=len, default=[])
        if not most:
            return False
        most[0].release()
        self.displaced += 1
        most[0]._give_way()
        return True

    def _release(self, place: Place) -> None:
        if place.is_released:
            return
        place.is_released = True
        places = self._places[place.host]
        del places[place]
        if not places:
            del self._places[place.host]
        self.connections -= 1
        self._descriptors.give()


def process_descriptors() -> Descriptors:
    """The places of this process: all its servers share them."""
    return _ours


def _count_afresh() -> None:
    """Count the connections of this process; a forked child serves none of its parent's."""
    global _ours
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    _ours = Descriptors(_MANY if soft == resource.RLIM_INFINITY else soft)


_ours: Descriptors
_count_afresh()
os.register_at_fork(after_in_child=_count_afresh)


@lru_cache(_REMEMBERED)
def _host(address: str) -> str:
    """The key of an address: an IPv4 address in canonical form, 64 bits of an IPv6 address, any
    other text unchanged."""
    try:
        said = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(said, ipaddress.IPv6Address):
        if said.ipv4_mapped is not None:
            return str(said.ipv4_mapped)
        return (
            str(said)
            if said.is_loopback
            else str(ipaddress.IPv6Network((said, 64), strict=False).network_address)
        )
    return str(said)


@lru_cache(_REMEMBERED)
def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return True  # a Unix socket: this machine
