"""Memory for states that peers push: memory that captures need is not given away, however many push, and however little can be written."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from datastates.config import BackPressure
from datastates.errors import OverBudget, Unavailable
from datastates.opening.core import Core

__all__ = ["PushRoom", "Room"]

_ASK_AGAIN_S = 0.05


class PushRoom:
    """The bytes of one repository's arena that pushed states may have together, while they are on their way and until they are durable."""

    def __init__(self, core: Core, patience_s: float) -> None:
        self._core, self._patience_s = core, patience_s
        self._lock = threading.Lock()
        self._coming = 0

    def share(self) -> Room:
        """Room for one state."""
        return Room(self)

    def acquire(self, lengths: Sequence[int]) -> list[int]:
        """Take slots for chunks of these lengths, besides what captures need. Waits at most ``patience_s`` for earlier pushes to be
        written.

        :raises OverBudget: there are never so many.
        :raises Unavailable: there are not so many now.
        """
        until, size = time.monotonic() + self._patience_s, sum(lengths)
        if not (is_taken := self._take(size)):
            self._write()
        while not (is_taken or self._take(size)):
            if time.monotonic() > until:
                raise Unavailable(
                    f"states that were pushed before take the memory that there is for them, and could not be written in "
                    f"{self._patience_s:g} s: push again later"
                )
            time.sleep(_ASK_AGAIN_S)
        try:
            slots = self._core.host().acquire(lengths, BackPressure.WAIT, within_s=max(0.0, until - time.monotonic()))
        except BaseException:
            self.give(size)
            raise
        if slots is None:
            self.give(size)
            raise Unavailable(f"no room for {size} bytes could be made in {self._patience_s:g} s: push again later")
        return slots

    def give(self, size: int) -> None:
        """Note that so many bytes are no longer on their way: they were given back, or belong to the memory tier now."""
        with self._lock:
            self._coming -= size

    def _take(self, size: int) -> bool:
        engaged = self._core.engage()
        host, memory, arena = engaged.host, engaged.memory, engaged.arena
        limit = arena.capacity - host.needed_bytes
        if size > limit:
            raise OverBudget(
                f"a state of {size} bytes is pushed here, where {limit} of {arena.capacity} are not needed by the training: open the "
                "repository there with more memory_bytes"
            )
        here = memory.bytes_of(host.unwritten_clones())
        with self._lock:
            is_room = self._coming + here + size <= limit
            self._coming += size if is_room else 0
        return is_room

    def _write(self) -> None:
        host = self._core.host()
        for uid in host.unwritten_clones():
            host.want(uid)


class Room:
    """The room that one state has, until ``close``."""

    def __init__(self, room: PushRoom) -> None:
        self._room = room
        self._size = 0

    def acquire(self, lengths: Sequence[int]) -> list[int]:
        """The slots of the state (see ``PushRoom.acquire``)."""
        slots = self._room.acquire(lengths)
        self._size += sum(lengths)
        return slots

    def close(self) -> None:
        """Give up the room of a state that is here, or that does not come; idempotent."""
        self._room.give(self._size)
        self._size = 0
