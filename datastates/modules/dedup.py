"""The second step: moves the state into memory, each distinct chunk once."""

from __future__ import annotations

from datastates.store.roles import CaptureTier

from .contract import Priority
from .work import Work

__all__ = ["Dedup"]


class Dedup:
    """Hands a state's slots over to the memory tier; slots of chunks that other states hold already are returned."""

    name, priority = "dedup", int(Priority.DEDUP)

    def __init__(self, memory: CaptureTier) -> None:
        self._memory = memory

    def process(self, work: Work) -> None:
        """Hand the slots over to the tier, and empty the list; if the tier refuses, the caller keeps them."""
        work.bytes_new = self._memory.adopt(work.digested(), work.slots).bytes_new
