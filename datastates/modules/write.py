"""The last step, for states that become durable: writes them to disk."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from datastates.store.roles import CaptureTier, DurableTier
from datastates.store.tier import Payload, Placed
from datastates.system.logs import event
from datastates.system.recorder import Recorder

from .contract import Priority
from .journal import Journal
from .work import Writing

__all__ = ["Write"]

_logger = logging.getLogger(__name__)


class Write:
    """Copies a state from memory to this node's disk, and tells the lineage that it is there."""

    name, priority = "write", int(Priority.WRITE)

    def __init__(self, memory: CaptureTier, local: DurableTier, journal: Journal, recorder: Recorder) -> None:
        self._memory, self._local, self._journal, self._recorder = memory, local, journal, recorder

    def process(self, writing: Writing) -> None:
        """Write the state without verifying it: its digests were made from this very memory, and reading verifies them."""
        began = time.monotonic()
        each = [self._put(writing, rank) for rank in self._memory.ranks(writing.uid)]
        placed = each[0]
        put, step = time.monotonic(), placed.manifest.origin.step
        self._recorder.span("put", began, put, writing.uid, step)
        self._count(each)  # before any caller hears that it is durable
        self._journal.mark(writing.uid, *each)
        writing.manifest = placed.manifest
        ended = time.monotonic()
        self._recorder.span("mark", put, ended, writing.uid, step)
        self._recorder.span("write", began, ended, writing.uid, step)
        if _logger.isEnabledFor(logging.DEBUG):
            added = sum(part.bytes_new for part in each)
            durable = event("state.durable", state=writing.uid, step=step, bytes=added, seconds=ended - began)
            _logger.debug("state %s, step %d, is durable after %.3f s", writing.uid, step, ended - began, extra=durable)

    def _put(self, writing: Writing, rank: int) -> Placed:
        with self._memory.open_part(writing.uid, rank, verify=False) as reader:
            chunks = [reader.chunk(index) for index in range(len(reader.manifest.content.chunks))]
            return self._local.put(Payload(reader.manifest, chunks), base=writing.base, is_of_base=writing.is_of_base)

    def _count(self, each: Sequence[Placed]) -> None:
        self._recorder.count("written")
        for placed in each:
            manifest = placed.manifest
            is_shared = [not pack.name.startswith(manifest.origin.uid) for pack in manifest.packs]
            self._recorder.count("bytes_written", placed.bytes_new)
            self._recorder.count("chunks_shared", sum(is_shared[ref.pack] for ref in manifest.refs))
