"""The hosts that other tests use: they reach each other, count what they send, can be cut off,
and leave nothing behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from tests.support.hosts import Host, hosts, need_hosts

ECHO = """
import socket
listener = socket.create_server(("", 0))
print(listener.getsockname()[1], flush=True)
while True:
    peer, _ = listener.accept()
    while data := peer.recv(1 << 16):
        peer.sendall(data[-1:])
    peer.close()
"""
CALL = """
import socket, sys
peer = socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=1)
peer.sendall(bytes(int(sys.argv[3])))
peer.shutdown(socket.SHUT_WR)
while peer.recv(1 << 16):
    pass
"""


@pytest.fixture
def three() -> Iterator[list[Host]]:
    need_hosts()
    with hosts(3) as made:
        yield made


def echo(host: Host) -> int:
    """A server on this host; its port."""
    process = host.start(sys.executable, "-c", ECHO, stdout=subprocess.PIPE)
    assert process.stdout is not None
    return int(process.stdout.readline())


def call(host: Host, other: Host, port: int, size: int = 1) -> None:
    host.run(sys.executable, "-c", CALL, other.address, port, size)


def reaches(host: Host, other: Host, port: int) -> bool:
    try:
        call(host, other, port)
    except RuntimeError:
        return False
    return True


def test_hosts_reach_each_other_and_the_machine_reaches_none(three: list[Host]) -> None:
    port = echo(three[0])

    call(three[1], three[0], port)
    call(three[2], three[0], port)

    with pytest.raises(OSError, match=r"timed out|unreachable|refused"):
        socket.create_connection((three[0].address, port), timeout=0.2).close()


def test_counters_say_who_sent_how_much(three: list[Host]) -> None:
    port = echo(three[0])
    before = [(host.sent_bytes(), host.received_bytes()) for host in three]

    call(three[1], three[0], port, 10 << 20)

    sent = [host.sent_bytes() - old for host, (old, _) in zip(three, before, strict=True)]
    received = [host.received_bytes() - old for host, (_, old) in zip(three, before, strict=True)]
    assert 10 << 20 <= sent[1] < 11 << 20
    assert 10 << 20 <= received[0] < 11 << 20
    assert max(sent[0], sent[2], received[1], received[2]) < 1 << 20


def test_a_host_that_is_cut_off_is_not_reached_until_it_is_mended(three: list[Host]) -> None:
    port = echo(three[0])

    three[0].cut()
    with pytest.raises(RuntimeError, match=r"timed out|No route"):
        call(three[1], three[0], port)

    three[0].mend()
    until = time.monotonic() + 10  # a neighbour that was not there is asked for again after a while
    while not reaches(three[1], three[0], port):
        assert time.monotonic() < until


def test_nothing_is_left_whatever_happened() -> None:
    need_hosts()
    names: list[str] = []
    processes: list[subprocess.Popen[str]] = []

    def fail() -> None:
        with hosts(2) as made:
            names.extend(host.namespace for host in made)
            processes.append(made[0].start("sleep", "1000"))
            raise KeyError

    with pytest.raises(KeyError):
        fail()

    assert processes[0].returncode == -signal.SIGKILL
    left = os.listdir("/run/netns")
    assert not [name for name in left if name.startswith(names[0][:-1])]
