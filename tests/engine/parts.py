"""The part of one rank as its plan copies it, in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
import torch

from datastates.state.digest import chunk_digest, decode, encode, state_digest
from datastates.state.encoding import encode_values
from datastates.state.manifest import VERSION, Chunk, Content, Manifest, Origin
from datastates.storage.tier import Reader

if TYPE_CHECKING:
    from datastates.engine.plan import CopyPlan
    from datastates.state.tree import Flat


class InMemory(Reader):
    """One part of a state."""

    def __init__(self, manifest: Manifest, chunks: Sequence[bytes]) -> None:
        self.manifest, self._chunks = manifest, list(chunks)

    @classmethod
    def from_bytes(cls, data: Sequence[bytes]) -> InMemory:
        """The way back from ``as_bytes``."""
        return cls(decode(data[0], source="the part"), data[1:])

    def as_bytes(self) -> list[bytes]:
        """The manifest, and each chunk."""
        return [encode(self.manifest), *self._chunks]

    def chunk(self, index: int) -> memoryview:
        return memoryview(self._chunks[index])

    def span(self, start: int, length: int) -> memoryview | None:
        """It lends nothing."""

    def close(self) -> None:
        """Nothing to do."""


def copied(plan: CopyPlan) -> list[bytes]:
    """The chunks as the plan has them copied."""
    chunks = []
    for index, length in enumerate(plan.layout.chunk_lengths):
        slot = torch.zeros(length, dtype=torch.uint8)
        targets = torch.split(slot, plan.sizes[index])
        for pieces in (plan.eager[index], plan.deferred[index]):
            for place, source in zip(pieces.places, pieces.sources, strict=True):
                targets[place].copy_(source)
        chunks.append(slot.numpy().tobytes())
    return chunks


def part_of(flat: Flat, plan: CopyPlan, rank: int, size: int) -> InMemory:
    """The part that this rank captures; its manifest was written and read."""
    chunks = copied(plan)
    digests = tuple(Chunk(chunk_digest(chunk), len(chunk)) for chunk in chunks)
    content = Content(
        plan.layout.skeleton, msgspec.Raw(encode_values(flat.values)), plan.layout.tensors, digests
    )
    origin = Origin("u", (), (), None, None, 0, 0, 0, None, {}, {}, rank, size)
    manifest = Manifest(VERSION, state_digest(content, ()), origin, content)
    return InMemory.from_bytes([encode(manifest), *chunks])
