"""Two hosts on one machine: network namespaces with a virtual link between them. Root on Linux
only."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

INTERFACE = "eth0"
SENDER = "10.99.0.1"
RECEIVER = "10.99.0.2"
_CLONE_NEWNET = 0x40000000


@contextmanager
def two_hosts(gbit: float | None = None) -> Iterator[dict[str, str]]:
    """The namespaces of sender and receiver by role, removed after the block. The link has ``gbit``
    Gbit/s, or the speed of the cores."""
    names = {role: f"ds-bench-{os.getpid()}-{role}" for role in ("sender", "receiver")}
    try:
        for name in names.values():
            _ip("netns", "add", name)
        _ip(
            "-n",
            names["sender"],
            "link",
            "add",
            INTERFACE,
            "type",
            "veth",
            "peer",
            "name",
            INTERFACE,
            "netns",
            names["receiver"],
        )
        for role, address in (("sender", SENDER), ("receiver", RECEIVER)):
            _ip("-n", names[role], "addr", "add", f"{address}/24", "dev", INTERFACE)
            for link in (INTERFACE, "lo"):
                _ip("-n", names[role], "link", "set", link, "up")
            if gbit is not None:
                bucket = ("tbf", "rate", f"{gbit * 1e9:.0f}bit", "burst", "2mb", "latency", "20ms")
                _call("tc", "-n", names[role], "qdisc", "add", "dev", INTERFACE, "root", *bucket)
        yield names
    finally:
        for name in names.values():
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def enter(namespace: str) -> None:
    """Move the calling thread, and all threads that it starts, permanently to a host.

    Call it before there are other threads."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/var/run/netns", namespace).open() as there:
        if libc.setns(there.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {namespace}")


def _ip(*words: str) -> None:
    _call("ip", *words)


def _call(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
