"""Where the chunks of a clone go."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from .contract import OnDevice

__all__ = ["Sink", "SupportsDevices"]


class Sink(Protocol):
    """A state that is being received. A chunk is *accepted* once its digest was right and its bytes are where they belong."""

    @property
    def lengths(self) -> tuple[int, ...]:
        """The bytes of each chunk of the state."""

    def missing(self) -> Sequence[int]:
        """The chunks that are still to be fetched, in the best order to ask for them."""

    def buffers(self, index: int) -> Sequence[memoryview] | None:
        """The memory into which a chunk is received: writable pieces in order, ``lengths[index]`` bytes together. Called on the loop
        thread.

        None: there is no room at the moment (all scratch buffers are in use); ask again after the next ``accept``.
        """

    def accept(self, index: int) -> bool:
        """Check what was received and put it where it belongs. Runs in a worker thread, for several chunks at once.

        False: the bytes fail the digest, and the chunk is missing again.
        """

    def forget(self, index: int) -> None:
        """Note that a chunk will not come, although ``buffers`` was called for it. Nobody writes to those any more; the chunk is missing
        again."""

    def pieces(self, index: int) -> Sequence[memoryview] | None:
        """The bytes of an accepted chunk, for a receiver that forwards it; None if they were not kept."""


@runtime_checkable
class SupportsDevices(Protocol):
    """A sink whose chunks may be received on devices."""

    def device_buffer(self, index: int) -> OnDevice | None:
        """Like ``buffers``: memory of a device for all of a chunk. None: ask for ``buffers``."""
