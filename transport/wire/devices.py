"""Finds which of this machine's network devices has an address."""

from __future__ import annotations

import ctypes
import ipaddress
import os
import socket
import struct
import sys
from collections.abc import Iterator

__all__ = ["device_of", "rdma_devices"]

_RDMA = "/sys/class/infiniband"


class _Interface(ctypes.Structure):
    """The part of ``struct ifaddrs`` that is read here."""


_Interface._fields_ = (
    ("next", ctypes.POINTER(_Interface)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.POINTER(ctypes.c_char)),
)


def device_of(host: str) -> str | None:
    """The device that has this address, ``lo`` for all of loopback. None if no device has it, or all of them do (``0.0.0.0``)."""
    try:
        wanted = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
    if wanted.is_loopback:
        return "lo"
    return next((device for device, address in _addresses() if address == wanted), None)


def rdma_devices() -> list[str]:
    """The InfiniBand and similar devices, as UCX names them: ``mlx5_0:1``."""
    if not os.path.isdir(_RDMA):
        return []
    return [f"{device}:{port}" for device in sorted(os.listdir(_RDMA)) for port in sorted(os.listdir(f"{_RDMA}/{device}/ports"))]


def _addresses() -> Iterator[tuple[str, ipaddress.IPv4Address | ipaddress.IPv6Address]]:
    libc = ctypes.CDLL(None, use_errno=True)
    first = ctypes.POINTER(_Interface)()
    if libc.getifaddrs(ctypes.byref(first)) != 0:
        return
    try:
        place = first
        while place:  # type: ignore[truthy-bool] # a null pointer is false
            each = place.contents
            if each.address:
                family = struct.unpack_from("H", bytes(each.address[:2]))[0] if sys.platform == "linux" else 0
                if family == socket.AF_INET:
                    yield each.name.decode(), ipaddress.IPv4Address(bytes(each.address[4:8]))
                elif family == socket.AF_INET6:
                    yield each.name.decode(), ipaddress.IPv6Address(bytes(each.address[8:24]))
            place = each.next
    finally:
        libc.freeifaddrs(first)
