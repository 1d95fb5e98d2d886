"""The digests that the chunks of one clone should have: asked of the origin, a window ahead of the chunks that are under way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from datastates.errors import Corrupt, DatastatesError, Disconnected
from datastates.transport.session.fingerprints import DAMAGED

__all__ = ["Binding", "Origin"]

_BATCH = 8  # chunks in one question; the next question is asked along with it


class Origin(Protocol):
    """A peer that knows what a state's chunks are."""

    @property
    def name(self) -> str:
        """The origin's name, for messages."""

    async def digests(self, indexes: Sequence[int]) -> Sequence[bytes]:
        """BLAKE3 of these chunks, over a channel that nobody else can write to."""


class Binding:
    """Digests by index, in the ``order`` in which the chunks will come. Belongs to the loop thread.

    ``origins`` returns the peers that may be asked now, the best first; if one cannot answer, the next is asked.
    """

    def __init__(self, order: Sequence[int], origins: Callable[[], Sequence[Origin]]) -> None:
        self._batches = [tuple(order[start : start + _BATCH]) for start in range(0, len(order), _BATCH)]
        self._place = {index: number for number, batch in enumerate(self._batches) for index in batch}
        self._origins = origins
        self._told: dict[int, asyncio.Future[tuple[Origin, bytes]]] = {}
        self._asking: set[asyncio.Task[None]] = set()

    def ahead(self, index: int) -> None:
        """Note that a chunk is being asked for: its digest will be needed, and those of the next chunks."""
        for number in (self._place[index], self._place[index] + 1):
            if number < len(self._batches) and self._batches[number][0] not in self._told:
                self._ask(self._batches[number])

    def of(self, index: int) -> asyncio.Future[tuple[Origin, bytes]]:
        """The digest of a chunk, with the origin that gave it; fails if no origin can."""
        self.ahead(index)
        return self._told[index]

    async def close(self) -> None:
        """Ask nothing more; waiting callers are cancelled."""
        for task in self._asking:
            task.cancel()
        for told in self._told.values():
            told.cancel()
        if self._asking:
            await asyncio.wait(self._asking)

    def _ask(self, batch: tuple[int, ...]) -> None:
        loop = asyncio.get_running_loop()
        for index in batch:
            self._told[index] = told = loop.create_future()
            told.add_done_callback(_look)
        task = asyncio.create_task(self._hear(batch))
        self._asking.add(task)
        task.add_done_callback(self._asking.discard)

    async def _hear(self, batch: tuple[int, ...]) -> None:
        left, asked = list(batch), list[Origin]()
        error: BaseException = Disconnected("there is no source left to say what the chunks of the state are")
        while left and (origin := next((each for each in self._origins() if each not in asked), None)) is not None:
            asked.append(origin)
            try:
                said = await origin.digests(left)
            except DatastatesError as exc:
                error = exc
                continue
            for index, digest in zip(list(left), said, strict=True):
                if digest == DAMAGED:
                    error = Corrupt(f"chunk {index} is damaged at {origin.name}: clone from another peer")
                    continue
                left.remove(index)
                if not self._told[index].done():
                    self._told[index].set_result((origin, digest))
        for index in left:
            if not self._told[index].done():
                self._told[index].set_exception(error)


def _look(told: asyncio.Future[tuple[Origin, bytes]]) -> None:
    if not told.cancelled():
        told.exception()  # marks it as retrieved: the chunk may never come
