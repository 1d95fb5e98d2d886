"""Moving bytes that came packed together to their places, once their digest was right."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from datastates.system.devices import Mark, devices

from .routes import Segment
from .shadow import Shadow
from .unloading import Unloading

__all__ = ["scatter"]


def scatter(
    segments: Sequence[Segment], memory: Sequence[memoryview], shadow: Shadow, unloading: Unloading, *, is_in_shadow: bool
) -> Sequence[Mark]:
    """Begin to move the bytes. ``memory`` is where each segment was received; ``is_in_shadow``: packed ones came to their place in the
    stream.

    The memory is read until the returned marks are reached.
    """
    homes, sources = list[torch.Tensor](), list[torch.Tensor]()
    for segment, received in zip(segments, memory, strict=True):
        for piece in segment.pieces if segment.memory is None else ():
            data = received[piece.offset - segment.offset :][: piece.length]
            if piece.home is None:
                if not is_in_shadow:
                    shadow.memory(piece.start, piece.length)[:] = data
            elif not devices().is_on(piece.home):
                piece.view()[:] = data
            else:
                homes.append(piece.home[piece.start : piece.start + piece.length])
                sources.append(torch.frombuffer(data, dtype=torch.uint8))  # pinned where the scratch buffer is
    unloading.put(homes, sources)
    return unloading.marks(homes)
