"""A trial of UCX on this machine: 64 MiB are moved between two workers, as in a clone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import repeat
from typing import TYPE_CHECKING

from datastates.content.manifest import CHUNK_BYTES
from datastates.errors import DatastatesError, Unavailable

if TYPE_CHECKING:
    from datastates.transport.wire.ucx import UcxTransport

__all__ = ["TRIED_BYTES", "Found", "try_ucx"]

TRIED_BYTES = 64 << 20
_AT_ONCE = 8
_PATIENCE_S = 60.0


@dataclass(frozen=True, slots=True)
class Found:
    """The versions, the transports with their devices (``tcp/eth0``), the speed at which bytes arrived, and what could not be forbidden to
    the processes that run UCX.
    """

    ucxx: str
    ucx: str
    resources: tuple[str, ...]
    bytes_per_s: float
    unconfined: tuple[str, ...]


def try_ucx() -> Found:
    """Run the trial. UCX runs in separate processes, which may hang or die.

    :raises DatastatesError: it does not work.
    """
    from datastates.transport import loop

    try:
        return loop.run(_try(), timeout_s=_PATIENCE_S)
    except TimeoutError as exc:
        raise Unavailable(f"moving {TRIED_BYTES >> 20} MiB takes more than {_PATIENCE_S:g} s") from exc


async def _try() -> Found:
    from datastates.transport.wire.ucx import UcxTransport

    sender, receiver = UcxTransport(), UcxTransport()
    try:
        for each in (sender, receiver):
            await each.bind(None)
        bytes_per_s = await _moved(sender, receiver)
        helper = receiver.helper
        assert helper is not None, "it has moved bytes"
        return Found(*helper.versions, helper.resources, bytes_per_s, helper.open)
    finally:
        for each in (sender, receiver):
            await each.close()


async def _moved(sender: UcxTransport, receiver: UcxTransport) -> float:
    """The speed in bytes a second."""
    link, back = await sender.link(await receiver.address()), await receiver.link(await sender.address())
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
        raise DatastatesError("bytes arrived changed")
    return TRIED_BYTES / seconds
