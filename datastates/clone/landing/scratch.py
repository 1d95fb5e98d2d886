"""A few buffers of a chunk each, used again and again, for what cannot be received where it belongs."""

from __future__ import annotations

import threading

import torch

from datastates.content.manifest import CHUNK_BYTES
from datastates.system.devices import devices

__all__ = ["Scratch"]


class Scratch:
    """At most ``count`` buffers, made when first needed; ``is_pinned``: what lands goes on to a device."""

    def __init__(self, count: int, *, is_pinned: bool = False) -> None:
        self._left, self._free = count, list[torch.Tensor]()
        self._is_pinned = is_pinned
        self._lock = threading.Lock()

    def take(self) -> torch.Tensor | None:
        """A buffer of ``CHUNK_BYTES``; None when all are in use."""
        with self._lock:
            if self._free:
                return self._free.pop()
            if not self._left:
                return None
            self._left -= 1
        if self._is_pinned:
            return devices().pinned((CHUNK_BYTES,), torch.uint8)
        return torch.empty(CHUNK_BYTES, dtype=torch.uint8, device="cpu")

    def give(self, buffer: torch.Tensor) -> None:
        """A buffer that was taken is free again."""
        with self._lock:
            self._free.append(buffer)
