"""What UCX can do here, tried: ``python -m datastates.cli.loopback`` moves 64 MiB between two workers, as clones are moved.

A process of its own for ``doctor``: a UCX that is broken may end it, or hang. Prints one JSON object.
"""

from __future__ import annotations

import asyncio
import re
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import repeat

import msgspec

from datastates.manifest import CHUNK_BYTES

__all__ = ["Found", "main"]

TRIED_BYTES = 64 << 20
_AT_ONCE = 8
_RESOURCE = re.compile(r"^#\s+resource\b.* (\w+/\S+)\s*$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Found:
    """The versions, the transports with their devices (``tcp/eth0``), and how fast bytes arrived."""

    ucxx: str
    ucx: str
    resources: tuple[str, ...]
    bytes_per_s: float


async def _try() -> Found:
    from datastates.transport.ucx import UcxTransport

    sender, receiver = UcxTransport(), UcxTransport()
    here, there = [await each.address() for each in (sender, receiver)]  # which starts the workers
    import ucxx  # after our own worker, which silences a warning of UCX's

    link, back = await sender.link(there), await receiver.link(here)
    data, into = bytearray(range(256)) * (CHUNK_BYTES // 256), [bytearray(CHUNK_BYTES) for _ in range(_AT_ONCE)]

    async def move(tags: Iterable[int]) -> None:
        await asyncio.gather(
            *(back.receive(tag, memoryview(into[tag % _AT_ONCE])) for tag in tags), *(link.send(tag, memoryview(data)) for tag in tags)
        )

    await move(range(_AT_ONCE))
    began = time.perf_counter()
    for _ in repeat(None, TRIED_BYTES // CHUNK_BYTES // _AT_ONCE):
        await move(range(_AT_ONCE))
    seconds = time.perf_counter() - began
    if any(each != data for each in into):
        raise RuntimeError("bytes arrived changed")
    info = receiver._started()[0]._context.info
    for transport in (sender, receiver):
        await transport.close()
    version = ".".join(map(str, ucxx.get_ucx_version()))
    return Found(ucxx.__version__, version, tuple(_RESOURCE.findall(info)), TRIED_BYTES / seconds)


def main() -> None:
    """Try it, and say what was found."""
    from datastates.transport import loop

    sys.stdout.write(msgspec.json.encode(loop.run(_try())).decode() + "\n")


if __name__ == "__main__":
    main()
