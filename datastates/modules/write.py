"""The last step, for states that become durable: writes them to disk."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack

from datastates.store.roles import CaptureTier, DurableTier, Put
from datastates.store.tier import Payload, Placed
from datastates.system.logs import event
from datastates.system.recorder import Recorder

from .contract import Priority
from .journal import Journal
from .work import Writing

__all__ = ["Write"]

_logger = logging.getLogger(__name__)


class Write:
    """Copies states from memory to this node's disk, and tells the lineage that they are there; those of one group together."""

    name, priority = "write", int(Priority.WRITE)

    def __init__(self, memory: CaptureTier, local: DurableTier, journal: Journal, recorder: Recorder) -> None:
        self._memory, self._local, self._journal, self._recorder = memory, local, journal, recorder

    def process(self, group: Sequence[Writing]) -> None:
        """Write states without verifying them: their digests were made from this very memory, and reading verifies them."""
        began = time.monotonic()
        with ExitStack() as stack:
            puts = [put for writing in group for put in self._puts(writing, stack)]
            placed = self._local.put_all(puts)
        of_each: dict[str, list[Placed]] = {}
        for part in placed:
            of_each.setdefault(part.manifest.origin.uid, []).append(part)
        put, newest = time.monotonic(), placed[-1].manifest.origin
        self._recorder.span("put", began, put, newest.uid, newest.step)
        for each in of_each.values():  # before any caller hears that it is durable
            self._count(each)
        self._journal.mark(of_each)
        for writing in group:
            each = of_each[writing.uid]
            writing.manifest, writing.size = each[0].manifest, sum(part.bytes_new for part in each)
        ended = time.monotonic()
        self._recorder.span("mark", put, ended, newest.uid, newest.step)
        self._recorder.span("write", began, ended, newest.uid, newest.step)
        for each in of_each.values() if _logger.isEnabledFor(logging.DEBUG) else ():
            origin, added = each[0].manifest.origin, sum(part.bytes_new for part in each)
            durable = event("state.durable", state=origin.uid, step=origin.step, bytes=added, seconds=ended - began)
            _logger.debug("state %s, step %d, is durable after %.3f s", origin.uid, origin.step, ended - began, extra=durable)

    def _puts(self, writing: Writing, stack: ExitStack) -> Iterator[Put]:
        for rank in self._memory.ranks(writing.uid):
            reader = stack.enter_context(self._memory.open_part(writing.uid, rank, verify=False))
            chunks = [reader.chunk(index) for index in range(len(reader.manifest.content.chunks))]
            yield Put(Payload(reader.manifest, chunks), writing.base, writing.is_of_base)

    def _count(self, each: Sequence[Placed]) -> None:
        self._recorder.count("written")
        for placed in each:
            manifest = placed.manifest
            self._recorder.count("bytes_written", placed.bytes_new)
            self._recorder.count("chunks_shared", sum(ref.pack >= bool(placed.bytes_new) for ref in manifest.refs))  # its own pack is first
