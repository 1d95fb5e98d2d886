"""A connection from ``accept`` until its other end has proved itself: it has a place, and a deadline for the proof."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from datastates.system.admission import Admission, Place

__all__ = ["Arrival", "Door"]


class Door:
    """The door through which connections come in, counted by an ``Admission``. Belongs to the loop thread.

    ``late`` counts those whose time was up, ``foreign`` those that began with nothing that could be ours. ``unproved`` counts these and all
    others that ended without having proved anything, except late ones and those that had to give way.
    """

    def __init__(self, admission: Admission | None = None) -> None:
        self.admission = Admission() if admission is None else admission
        self.late = self.foreign = self.unproved = 0

    @property
    def refused(self) -> int:
        """The number of connections that never became a peer's."""
        return self.admission.refused + self.admission.displaced + self.late + self.unproved

    def enter(self, address: str, descriptor: int, end: Callable[[], None]) -> Arrival | None:
        """A place for a connection, whose end ``end`` causes; None if there is no room."""
        place = self.admission.admit(address, descriptor, end)
        return None if place is None else Arrival(self, place, end)


class Arrival:
    """A connection that was let in. Until it is held it gives way to others, and it ends when its time is up, at ``due`` on the loop's
    clock."""

    def __init__(self, door: Door, place: Place, end: Callable[[], None]) -> None:
        self._door, self._place, self._end = door, place, end
        self._is_counted = False
        loop = asyncio.get_running_loop()
        self.due = loop.time() + door.admission.limits.proof_s
        self._timer = loop.call_at(self.due, self._expire)

    def hold(self) -> None:
        """Keep the connection for as long as its other end likes, which has proved itself."""
        self._timer.cancel()
        self._place.hold()
        self._is_counted = True

    def hand_over(self) -> Place:
        """The place. From now on the caller is responsible for it and for the deadline; the connection still gives way to others."""
        self._timer.cancel()
        self._is_counted = True
        return self._place

    def release(self) -> None:
        """Give the place back once the connection is closed; idempotent."""
        self._timer.cancel()
        if not (self._is_counted or self._place.is_released):  # it was not sent away either
            self._door.unproved += 1
            self._is_counted = True
        self._place.release()

    def _expire(self) -> None:
        if not self._place.is_released:
            self._door.late += 1
        self._is_counted = True
        self._end()
