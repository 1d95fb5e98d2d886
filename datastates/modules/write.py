"""The last step, for the states that are to be durable: to disk."""

from __future__ import annotations

from datastates.store.roles import CaptureTier, DurableTier
from datastates.store.tier import Payload

from .contract import Priority
from .journal import Journal
from .work import Writing

__all__ = ["Write"]


class Write:
    """Copies a state from memory to this node's disk, and tells the lineage that it is there."""

    name, priority = "write", int(Priority.WRITE)

    def __init__(self, memory: CaptureTier, local: DurableTier, journal: Journal) -> None:
        self._memory, self._local, self._journal = memory, local, journal

    def process(self, writing: Writing) -> None:
        """The digests were made from this very memory: reading verifies them, writing need not."""
        with self._memory.open(writing.uid, verify=False) as reader:
            chunks = [reader.chunk(index) for index in range(len(reader.manifest.content.chunks))]
            placed = self._local.put(Payload(reader.manifest, chunks), base=writing.base, is_of_base=writing.is_of_base)
            del chunks
        self._journal.mark(writing.uid, placed)
        writing.manifest = placed.manifest
