"""Which addresses a receiver in a chain may be sent to. A source names only its peers' own addresses, and a receiver checks them again."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

__all__ = ["is_at", "may_dial"]

_SCHEMES = {"tcp", "ucx"}
_Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def is_at(url: str, remote: tuple[str, int] | None) -> bool:
    """Whether a url has the address from which its owner is connected; always True if no network is between the two."""
    if remote is None:
        return True
    found, own = _place(url), _address(remote[0])
    return found is not None and found == own


def may_dial(url: str, source: tuple[str, int] | None) -> bool:
    """Whether a receiver may dial the url that a source names: an address with a port, and on this machine or link only if the source
    is."""
    if source is None:
        return True
    found, own = _place(url), _address(source[0])
    if found is None or own is None or found.is_unspecified or found.is_multicast or found.is_reserved:
        return False
    return (own.is_loopback or not found.is_loopback) and (own.is_link_local or not found.is_link_local)


def _place(url: str) -> _Address | None:
    """The address that a url names; None if it is not one of our urls, or has more than an address and a port."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return None
    host = parts.hostname or ""
    written = f"[{host}]" if ":" in host else host
    if parts.scheme not in _SCHEMES or not port or url.lower() != f"{parts.scheme}://{written}:{port}":
        return None
    return _address(host)


def _address(host: str) -> _Address | None:
    try:
        found = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
    return found.ipv4_mapped or found if isinstance(found, ipaddress.IPv6Address) else found
