"""A stranger who speaks UCX's TCP: what anyone who reaches a port of UCX may do to the process
behind it."""

from __future__ import annotations

import os
import random
import socket
import struct
from contextlib import suppress
from pathlib import Path

from blake3 import blake3

_MAGIC = 0xCAFEBABE12345678
_PUT = 33
_LISTENING = "0A"


def children(pid: int) -> list[int]:
    """The processes that a process has started, and theirs."""
    own = [
        int(word)
        for task in os.listdir(f"/proc/{pid}/task")
        for word in Path(f"/proc/{pid}/task/{task}/children").read_text().split()
    ]
    return [each for child in own for each in (child, *children(child))]


def listening(pid: int) -> list[tuple[str, int]]:
    """Where a process listens, each place as one of this machine can reach it."""
    inodes = set()
    for name in os.listdir(f"/proc/{pid}/fd"):
        with suppress(OSError):
            inodes.add(
                os.readlink(f"/proc/{pid}/fd/{name}").removeprefix("socket:[").removesuffix("]")
            )
    places = []
    for row in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
        words = row.split()
        if words[3] == _LISTENING and words[9] in inodes:
            host, port = words[1].split(":")
            address = socket.inet_ntoa(bytes.fromhex(host)[::-1])
            places.append(("127.0.0.1" if address == "0.0.0.0" else address, int(port, 16)))
    return places


def remote_write(place: tuple[str, int], address: int, data: bytes) -> bytes:
    """ "PUT address, length", as any connection may say it to UCX; what is answered."""
    with socket.create_connection(place, timeout=3) as stranger:
        stranger.settimeout(0.5)
        with suppress(OSError):
            stranger.sendall(struct.pack("<QBIQQI", _MAGIC, _PUT, 20, address, len(data), 0) + data)
            return stranger.recv(100)
    return b""


def mangled(address: bytes, seed: int) -> bytes:
    """A worker's address with some bytes changed, and a checksum that agrees."""
    rng, head = random.Random(seed), b"datastates-ucx-1"
    raw = bytearray(address[len(head) + 16 :])
    for _ in range(rng.randint(1, 4)):
        raw[rng.randrange(len(raw))] = rng.randrange(256)
    return head + blake3(raw).digest(16) + bytes(raw)
