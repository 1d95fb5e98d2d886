"""The second step: into memory, each distinct chunk once."""

from __future__ import annotations

from datastates.store.roles import CaptureTier

from .contract import Priority
from .work import Work

__all__ = ["Dedup"]


class Dedup:
    """Hands a state's slots over to the memory tier, where chunks that other states hold give theirs back."""

    name, priority = "dedup", int(Priority.DEDUP)

    def __init__(self, memory: CaptureTier) -> None:
        self._memory = memory

    def process(self, work: Work) -> None:
        """Hand the slots over to the tier, and the list is empty; if it refuses, they stay the caller's."""
        work.bytes_new = self._memory.adopt(work.digested(), work.slots).bytes_new
