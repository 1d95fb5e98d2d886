"""Putting what came packed together where it belongs, once its digest was right."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from datastates.system.devices import devices

from .routes import Piece, Segment
from .shadow import Shadow

__all__ = ["scatter"]


def scatter(segments: Sequence[Segment], memory: Sequence[memoryview], shadow: Shadow, *, is_in_shadow: bool) -> None:
    """``memory`` is where each segment was received; ``is_in_shadow``: packed ones came to where they stand in the stream."""
    written = set()
    for segment, received in zip(segments, memory, strict=True):
        for piece in segment.pieces if segment.memory is None else ():
            data = received[piece.offset - segment.offset :][: piece.length]
            if piece.home is None:
                if not is_in_shadow:
                    shadow.memory(piece.start, piece.length)[:] = data
            elif not devices().is_on(piece.home):
                piece.view()[:] = data
            else:
                _to_device(piece, data)
                written.add(devices().of(piece.home))
    for device in written:
        devices().mark(devices().current(device)).synchronize()


def _to_device(piece: Piece, data: memoryview) -> None:
    assert piece.home is not None
    source = torch.frombuffer(data, dtype=torch.uint8)  # pinned where the scratch buffer is
    piece.home[piece.start : piece.start + piece.length].copy_(source, non_blocking=True)
