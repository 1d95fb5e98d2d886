"""Memory on a device in which chunks are checked: each arrives whole, is digested there, and is copied from there to its places."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence

import torch

from datastates.content.blocks import can_digest
from datastates.content.digest import chunk_digest
from datastates.content.digester import Digester
from datastates.content.manifest import CHUNK_BYTES
from datastates.content.xxh3 import digests_of
from datastates.objects.homes import Home
from datastates.system.devices import Mark, devices

from .routes import Piece, Segment
from .unloading import Unloading

__all__ = ["Desk", "Desks", "desks_of", "wholly_on"]

_logger = logging.getLogger(__name__)

_MOST_LAUNCHES = 16
"""More launches take longer than the host: without Triton's kernels the host checks all chunks."""


class Desk:
    """Room for a chunk on a device. Belongs to one thread at a time."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self._digesters: dict[int, tuple[Digester, torch.Tensor]] = {}

    def digester(self, length: int) -> tuple[Digester, torch.Tensor]:
        """The digester for a chunk of this length that lies here, and host memory for its result."""
        found = self._digesters.get(length)
        if found is None:
            here = devices().pinned((1, 8), torch.int64)
            found = self._digesters[length] = Digester([(length, [(0, self.memory[:length])])]), here
        return found

    def can_digest(self, length: int) -> bool:
        """Whether the device can digest a chunk of this length that lies here, in few enough launches to be worth it."""
        return can_digest(length, [(0, self.memory[:length])]) and self.digester(length)[0].launches <= _MOST_LAUNCHES


class Desks:
    """At most ``count`` desks on the device of ``like``, made when they are first needed. Safe from any thread.

    All work on them is queued on one stream, that of ``unloading``, so a desk may be given back while copies from it are still to come.
    """

    def __init__(self, like: torch.Tensor, unloading: Unloading, count: int) -> None:
        self._like, self._unloading, self._left = like, unloading, count
        self._stream = unloading.stream(devices().of(like))
        self._free: list[Desk] = []
        self._is_worth: dict[int, bool] = {}
        self._is_given_up = False
        self._lock = threading.Lock()

    def take(self, length: int) -> Desk | None:
        """A desk for a chunk of this length; None if all are in use, or the host should check the chunk."""
        with self._lock:
            if self._is_given_up or not self._is_worth.get(length, True) or not (self._free or self._left):
                return None
            desk = self._free.pop() if self._free else None
            self._left -= desk is None
        if desk is None:
            try:
                with devices().on(self._stream):
                    desk = Desk(self._like.new_empty(CHUNK_BYTES, dtype=torch.uint8))
            except RuntimeError as exc:
                self._give_up(f"find no room there ({exc!r})")
                return None
        with self._lock:
            if length not in self._is_worth:
                self._is_worth[length] = desk.can_digest(length)
            if self._is_worth[length]:
                return desk
        self.give(desk)
        return None

    def give(self, desk: Desk) -> None:
        """Take back a desk that was taken."""
        with self._lock:
            self._free.append(desk)

    def ready(self) -> Mark:
        """The point behind which other streams may write to the desks that are taken now."""
        return devices().mark(self._stream)

    def bring(self, desk: Desk, data: torch.Tensor) -> None:
        """Begin to copy a chunk from pinned memory; that memory is free again after ``is_right``."""
        with devices().on(self._stream):
            desk.memory[: data.numel()].copy_(data, non_blocking=True)

    def is_right(self, desk: Desk, length: int, digest: bytes) -> bool:
        """Whether a chunk that lies on a desk has this digest. The host waits for 64 bytes, and checks a wrong chunk itself."""
        found: bytes | None = None
        try:
            found = self._digest(desk, length)
        except Exception as exc:  # a kernel that cannot be compiled here, or no memory for it
            self._give_up(f"cannot be digested there ({exc!r})")
        if found == digest:
            return True
        here = devices().pinned((length,), torch.uint8)
        with devices().on(self._stream):
            here.copy_(desk.memory[:length])
        is_right = chunk_digest(memoryview(here.numpy().data)) == digest
        if is_right and found is not None:
            self._give_up("had other digests there than on the host")
        return is_right

    def put(self, desk: Desk, pieces: Sequence[Piece]) -> None:
        """Begin to copy a chunk with the right digest to its places."""
        homes = [piece.home[piece.start : piece.start + piece.length] for piece in pieces if piece.home is not None]
        assert len(homes) == len(pieces), "all of it belongs on the device"
        self._unloading.put(homes, [desk.memory[piece.offset :][: piece.length] for piece in pieces])

    def _digest(self, desk: Desk, length: int) -> bytes:
        digester, here = desk.digester(length)
        with devices().on(self._stream):
            here.copy_(digester.lanes(), non_blocking=True)
        devices().mark(self._stream).synchronize()
        (found,) = digests_of(here.numpy(), digester.lengths)
        return found

    def _give_up(self, why: str) -> None:
        with self._lock:
            was_given_up, self._is_given_up = self._is_given_up, True
        if not was_given_up:
            _logger.warning("chunks of a clone on a device %s: the host checks them", why)


def desks_of(homes: Mapping[int, Home], unloading: Unloading, count: int) -> dict[torch.device, Desks]:
    """The desks of each device on which something lands."""
    found: dict[torch.device, Desks] = {}
    for home in homes.values():
        if devices().is_on(home.flat) and devices().of(home.flat) not in found:
            found[devices().of(home.flat)] = Desks(home.flat, unloading, count)
    return found


def wholly_on(segments: Sequence[Segment]) -> torch.device | None:
    """The one device to which everything wanted of a chunk belongs; None if there is no such device."""
    pieces = [piece for segment in segments for piece in segment.pieces]
    if any(piece.home is None or not devices().is_on(piece.home) for piece in pieces):
        return None
    found = {devices().of(piece.home) for piece in pieces if piece.home is not None}
    return found.pop() if len(found) == 1 else None
