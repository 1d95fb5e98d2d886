"""The tripwire alone: every sample is found where it was copied, wherever the slots of its
chunks lie."""

from __future__ import annotations

import pytest
import torch

from datastates.engine.tear_check import SAMPLES, STATE_SAMPLES, Tripwire, Watched
from datastates.state.manifest import CHUNK_BYTES

SLOTS = (3 * CHUNK_BYTES, 64, 2 * CHUNK_BYTES)


def place(arena: torch.Tensor, start: int, data: torch.Tensor) -> None:
    """Copy a stretch of the stream into its slots."""
    for position, piece in zip(
        range(start, start + data.numel(), 1 << 20), data.split(1 << 20), strict=True
    ):
        chunk, offset = divmod(position, CHUNK_BYTES)
        at = SLOTS[chunk] + offset
        arena[at : at + piece.numel()] = piece


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.float64, torch.complex128]
)
def test_a_changed_sample_of_a_copy_in_several_chunks_names_its_tensor(dtype: torch.dtype) -> None:
    size = min(8, dtype.itemsize)
    lengths = {
        "first": (3 << 20, STATE_SAMPLES),
        "second": (7 << 20, SAMPLES),
        "third": (2 << 20, STATE_SAMPLES),
    }
    arena, start, watched = torch.zeros(5 * CHUNK_BYTES, dtype=torch.uint8), 0, []
    for path, (length, count) in lengths.items():
        tensor = torch.randint(256, (length,), dtype=torch.uint8).view(dtype)
        watched.append(Watched(path, tensor, tensor.view(torch.uint8), start, count))
        place(arena, start, tensor.view(torch.uint8))
        start += length
    tripwire = Tripwire(watched)
    armed = tripwire.arm()

    def torn() -> list[str]:
        return tripwire.tripped(armed, armed.versions, SLOTS, arena)

    assert torn() == []
    for item in watched:
        step = (item.flat.numel() // size - 1) // (item.samples - 1)
        for index in range(item.samples):
            chunk, offset = divmod(item.start + index * step * size, CHUNK_BYTES)
            at = SLOTS[chunk] + offset
            arena[at] ^= 1
            assert torn() == [item.path], index
            arena[at] ^= 1
    assert torn() == []
