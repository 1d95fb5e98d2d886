"""Several hosts on one machine: network namespaces on a bridge. Root on Linux only; elsewhere their
tests skip with the reason.

Each host sees its own loopback and one interface ``eth0`` with an address of its own, so that what
leaves a host can be counted and its link be cut. The hosts share the file system and the pids. The
bridge lies in a namespace of its own: in the machine's own one its firewall would apply (Docker's
drops what crosses a bridge), and names could clash.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import secrets
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from . import warm

INTERFACE = "eth0"
BRIDGE = "br0"


class Host:
    """A network namespace with one interface, whose address is ``address``; ``port`` is the
    other end of its cable, at the switch."""

    def __init__(self, namespace: str, address: str, switch: str, port: str) -> None:
        self.namespace, self.address = namespace, address
        self._switch, self._port = switch, port
        self._processes: list[subprocess.Popen[str]] = []

    def start(self, *command: object, **options: Any) -> subprocess.Popen[str]:
        """A process of this host; it is killed with the hosts at the latest.

        ``options`` are those of ``Popen``."""
        process = warm.Popen([str(word) for word in command], netns=self.namespace, **options)
        self._processes.append(process)
        return process

    def run(self, *command: object, timeout_s: float = 30) -> str:
        """What a command of this host says, once it ended well."""
        return _run(*map(str, command), timeout_s=timeout_s, netns=self.namespace)

    def cut(self) -> None:
        """Take the link to all others down, as if the switch had failed: the address stays, and
        nobody is told."""
        _run("ip", "-n", self._switch, "link", "set", self._port, "down")

    def mend(self) -> None:
        """Bring it up again."""
        _run("ip", "-n", self._switch, "link", "set", self._port, "up")

    def shape(self, rate: str) -> None:
        """Limit what leaves this host, as in ``1gbit``."""
        self.run(
            "tc",
            "qdisc",
            "replace",
            "dev",
            INTERFACE,
            "root",
            "tbf",
            "rate",
            rate,
            "burst",
            "1mb",
            "latency",
            "50ms",
        )

    def listen(self) -> socket.socket:
        """A socket of this process that listens at the host's address, at any port."""

        def enter() -> None:
            with open(f"/run/netns/{self.namespace}") as namespace:
                if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), warm.NEW_NETWORK):
                    raise OSError(ctypes.get_errno(), f"no entry to {self.namespace}")
            made.append(socket.create_server((self.address, 0)))

        made: list[socket.socket] = []
        # only this thread is in the namespace, and its sockets stay there
        thread = threading.Thread(target=enter, name="in-a-namespace")
        thread.start()
        thread.join()
        return made[0]

    def sent_bytes(self) -> int:
        """What left this host so far, headers and all."""
        return self._bytes("tx")

    def received_bytes(self) -> int:
        """What arrived at this host so far."""
        return self._bytes("rx")

    def _bytes(self, way: str) -> int:
        shown = json.loads(_run("ip", "-n", self.namespace, "-s", "-j", "link", "show", INTERFACE))
        return int(shown[0]["stats64"][way]["bytes"])

    def close(self) -> None:
        """Kill what still runs here."""
        for process in self._processes:
            if process.poll() is None:
                process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None:
                    stream.close()


@contextmanager
def hosts(count: int) -> Iterator[list[Host]]:
    """Some hosts that reach each other and nothing else; whatever happens, nothing of them is
    left after the block."""
    key = secrets.token_hex(4)
    switch = f"ds-{key}-switch"
    made = [
        Host(f"ds-{key}-{index}", f"10.0.0.{index + 1}", switch, f"port{index}")
        for index in range(count)
    ]
    try:
        _run("ip", "netns", "add", switch)
        _run("ip", "-n", switch, "link", "add", BRIDGE, "type", "bridge")
        _run("ip", "-n", switch, "link", "set", BRIDGE, "up")
        for host in made:
            _plug(host, switch)
        yield made
    finally:
        for host in made:
            host.close()
        for namespace in (switch, *(host.namespace for host in made)):  # its interfaces go with it
            subprocess.run(
                ["ip", "netns", "del", namespace], capture_output=True, check=False, timeout=30
            )


def _plug(host: Host, switch: str) -> None:
    _run("ip", "netns", "add", host.namespace)
    inside = ("ip", "-n", host.namespace)
    _run(
        *inside,
        "link",
        "add",
        INTERFACE,
        "type",
        "veth",
        "peer",
        "name",
        host._port,
        "netns",
        switch,
    )
    _run("ip", "-n", switch, "link", "set", host._port, "master", BRIDGE, "up")
    _run(*inside, "addr", "add", f"{host.address}/24", "dev", INTERFACE)
    _run(*inside, "link", "set", INTERFACE, "up")
    _run(*inside, "link", "set", "lo", "up")


@functools.cache
def why_no_hosts() -> str | None:
    """Why no hosts can be made here; None when they can."""
    if shutil.which("ip") is None:
        return "there is no ip here (Debian's iproute2)"
    if os.geteuid() != 0:
        return "only root makes network namespaces"
    try:
        with hosts(2) as (one, other):
            one.run("ip", "route", "get", other.address)
    except (subprocess.SubprocessError, OSError, RuntimeError) as exc:
        return f"this machine makes no network namespaces: {exc}"
    return None


def need_hosts() -> None:
    """Skip the test, with the reason, where no hosts can be made.

    ``DATASTATES_REQUIRE_HOSTS=1`` makes that a failure."""
    reason = why_no_hosts()
    if reason is None:
        return
    if os.environ.get("DATASTATES_REQUIRE_HOSTS") == "1":
        pytest.fail(reason)
    pytest.skip(reason)


def _run(*command: str, timeout_s: float = 30, netns: str | None = None) -> str:
    done = warm.run(list(command), capture_output=True, timeout=timeout_s, netns=netns)
    if done.returncode:
        raise RuntimeError(
            f"{' '.join(command)} ended with {done.returncode}:"
            f" {done.stderr.strip() or done.stdout.strip()}"
        )
    return done.stdout
