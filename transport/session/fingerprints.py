"""BLAKE3 digests of the chunks of states that are held open. They reach peers over the control channel, and bind bytes that come any other
way.

A manifest names its chunks by xxh3, which guards against rot only: other bytes with the same xxh3 can be made in milliseconds.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from blake3 import blake3

from datastates.errors import Corrupt
from datastates.transport.store import Source, SupportsCheck

__all__ = ["DAMAGED", "DIGEST_BYTES", "Fingerprints", "digest_of"]

DIGEST_BYTES: Final = 32

DAMAGED: Final = bytes(DIGEST_BYTES)
"""Sent for a chunk that does not match its manifest here."""

_STATES = 64  # how many states' digests are kept: 32 bytes for each 4 MiB
_AT_ONCE = 2  # threads that compute: the training needs the other processors


def digest_of(pieces: Sequence[memoryview]) -> bytes:
    """BLAKE3 of the bytes in some pieces of memory, in order; releases the interpreter's lock."""
    hasher = blake3()
    for piece in pieces:
        hasher.update(piece)
    return hasher.digest()


class Fingerprints:
    """Digests that are computed once for all sessions that share this, in threads of its own. Belongs to the loop thread."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_AT_ONCE, "datastates-digest")
        self._kept: OrderedDict[bytes, dict[int, bytes]] = OrderedDict()
        self._coming: dict[tuple[bytes, int], asyncio.Task[bytes]] = {}

    async def of(self, state: bytes, index: int, source: Source) -> bytes:
        """The digest of a chunk. ``state`` identifies what ``source`` holds. The source must stay open until this returns, cancelled or
        not."""
        found = self._kept.get(state, {}).get(index)
        if found is not None:
            self._kept.move_to_end(state)
            return found
        key = state, index
        coming = self._coming.get(key)
        if coming is not None and not coming.done():
            await asyncio.wait({coming})
            return await self.of(state, index, source) if coming.cancelled() or coming.exception() is not None else coming.result()
        coming = self._coming[key] = asyncio.create_task(self._compute(source, index))
        try:
            while not coming.done():
                await asyncio.wait({coming})
            digest = coming.result()
        except asyncio.CancelledError:
            coming.cancel()
            await asyncio.wait({coming})
            raise
        finally:
            if self._coming.get(key) is coming:
                del self._coming[key]
        if digest != DAMAGED:
            self._keep(state, index, digest)
        return digest

    def close(self) -> None:
        """Let its threads end; idempotent."""
        self._threads.shutdown(wait=False)

    def _keep(self, state: bytes, index: int, digest: bytes) -> None:
        self._kept.setdefault(state, {})[index] = digest
        self._kept.move_to_end(state)
        while len(self._kept) > _STATES:
            self._kept.popitem(last=False)

    async def _compute(self, source: Source, index: int) -> bytes:
        pieces = await source.chunk(index)
        check = source.is_whole if isinstance(source, SupportsCheck) else None
        work = asyncio.get_running_loop().run_in_executor(self._threads, _compute, pieces, index, check)
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            await asyncio.wait({work})  # a millisecond; after that nobody reads the source any more
            raise


def _compute(pieces: Sequence[memoryview], index: int, check: Callable[[int, Sequence[memoryview]], bool] | None) -> bytes:
    try:
        return digest_of(pieces) if check is None or check(index, pieces) else DAMAGED
    except Corrupt:
        return DAMAGED
