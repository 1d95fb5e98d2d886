"""Clients of a web server. Each of them sends a request, reads the whole response, pauses, and
sends the next request."""

from __future__ import annotations

import asyncio
import random
import re
import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0}


@dataclass(frozen=True, slots=True)
class Asked:
    """One request: a path with its query, and a JSON body when it is a POST."""

    path: str
    body: bytes | None = None

    def encode(self, host: str) -> bytes:
        """The request as HTTP/1.1 on a connection that stays open."""
        if self.body is None:
            return f"GET {self.path} HTTP/1.1\r\nHost: {host}\r\nAccept: application/json\r\n\r\n".encode()
        head = (
            f"POST {self.path} HTTP/1.1\r\nHost: {host}\r\nContent-Type:"
            f" application/json\r\nContent-Length: {len(self.body)}\r\n\r\n"
        )
        return head.encode() + self.body


@dataclass(slots=True)
class Load:
    """The results of the clients: seconds until each complete response, bytes of the bodies, and
    responses other than 200."""

    seconds: list[float] = field(default_factory=list)
    bytes: int = 0
    refused: int = 0
    rate: float = 0.0


def percentile(samples: Sequence[float], share: float) -> float:
    """The value that a share of the samples does not exceed. NaN if there are none."""
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


def think(
    base: str,
    requests: Sequence[Asked],
    *,
    readers: int,
    think_s: float,
    seconds: float,
    seed: int = 0,
) -> Load:
    """``readers`` connections for ``seconds``. Each waits between 0 and twice ``think_s`` between
    two requests."""
    return asyncio.run(_think(base, requests, readers, think_s, seconds, seed))


async def _think(
    base: str, requests: Sequence[Asked], readers: int, think_s: float, seconds: float, seed: int
) -> Load:
    load, host = Load(), urlsplit(base).netloc
    encoded = [request.encode(host) for request in requests]
    until = time.perf_counter() + seconds
    began = time.perf_counter()
    await asyncio.gather(
        *(
            _read(host, encoded, think_s, until, random.Random(seed * 1000 + each), load)
            for each in range(readers)
        )
    )
    load.rate = len(load.seconds) / (time.perf_counter() - began)
    return load


async def _read(
    host: str,
    requests: Sequence[bytes],
    think_s: float,
    until: float,
    rng: random.Random,
    load: Load,
) -> None:
    name, _, port = host.partition(":")
    reader, writer = await asyncio.open_connection(name, int(port), limit=1 << 24)
    try:
        await asyncio.sleep(rng.random() * think_s)
        while time.perf_counter() < until:
            began = time.perf_counter()
            writer.write(rng.choice(requests))
            status, length = await _answer(reader)
            load.seconds.append(time.perf_counter() - began)
            load.bytes += length
            load.refused += status != 200
            if think_s:
                await asyncio.sleep(rng.random() * 2 * think_s)
    finally:
        writer.close()


async def _answer(reader: asyncio.StreamReader) -> tuple[int, int]:
    """Status and length of the body, which is discarded."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    status = int(head.split(b" ", 2)[1])
    found = re.search(rb"content-length: (\d+)", head)
    if found:
        await reader.readexactly(int(found[1]))
        return status, int(found[1])
    total = 0
    while size := int(await reader.readuntil(b"\r\n"), 16):  # chunked
        await reader.readexactly(size + 2)
        total += size
    await reader.readexactly(2)
    return status, total


def saturate(
    base: str, requests: Sequence[Asked], *, readers: int, seconds: float
) -> tuple[Load, str]:
    """The same without pauses, by wrk on the first request if it is installed, otherwise by this
    module. Returns which one it was."""
    program = shutil.which("wrk")
    if program is None or requests[0].body is not None:
        return think(base, requests, readers=readers, think_s=0.0, seconds=seconds), "own loader"
    command = [
        program,
        "-t1",
        f"-c{readers}",
        f"-d{max(1, round(seconds))}s",
        "--timeout",
        "60s",
        "--latency",
        base + requests[0].path,
    ]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    times = [
        float(number) * _UNITS[unit]
        for number, unit in re.findall(r"^\s+(?:50|99)%\s+([\d.]+)(us|ms|s|m)$", said, re.MULTILINE)
    ]
    if len(times) != 2 or not all(times):  # no response in time
        return think(base, requests, readers=readers, think_s=0.0, seconds=seconds), "own loader"
    load = Load(rate=float(_found(r"Requests/sec:\s+([\d.]+)", said)[0]))
    load.seconds = [times[0]] * 98 + [times[1]] * 2  # wrk prints its percentiles only
    load.refused = int(_found(r"Non-2xx or 3xx responses: (\d+)", said, "0")[0])
    return load, "wrk"


def _found(pattern: str, text: str, default: str | None = None) -> tuple[str, ...]:
    found = re.search(pattern, text)
    if found is None and default is None:
        raise SystemExit(f"wrk said nothing like {pattern}:\n{text}")
    return (default or "",) if found is None else found.groups()
