"""Fills live tensors on devices from host memory: in few calls, and without waiting for each.

A chunk that lies in memory of which a device may read while the host goes on is copied from there. Others are poured into two rooms of such
memory by turns: while one crosses, the next chunks are read into the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from datastates.capture.crossing import copy
from datastates.content.blocks import Part, cut
from datastates.content.manifest import CHUNK_BYTES, TensorSpec
from datastates.objects.homes import Home
from datastates.store.pouring import Piece, SupportsPouring
from datastates.store.tier import Reader
from datastates.system.devices import Mark, devices

__all__ = ["Lift"]

_ROOM_CHUNKS = 16
"""The number of chunks that one of the rooms holds."""


class Lift:
    """Fills ``homes``, all of which lie on devices. Belongs to one thread; what it does follows what the current streams have to do."""

    def __init__(self, reader: Reader, specs: Sequence[TensorSpec], homes: Mapping[int, Home]) -> None:
        assert isinstance(reader, SupportsPouring), "the caller looked"
        self._reader = reader
        self._parts: dict[int, list[Part]] = {}  # by chunk, the live bytes that belong there
        for index, home in homes.items():
            for chunk, offset, part in cut(specs[index].shards[0].start, home.flat):
                self._parts.setdefault(chunk, []).append((offset, part))
        self._devices = dict.fromkeys(devices().of(home.flat) for home in homes.values())

    def check(self) -> None:
        """Check all chunks.

        :raises Corrupt: one fails its digest.
        """
        self._reader.check(list(self._parts))

    def fill(self) -> None:
        """Copy all of it, and wait until it is there.

        :raises Corrupt: a chunk fails its digest now; others are in live tensors already.
        """
        try:
            pinned = {chunk: found for chunk in self._parts if (found := self._reader.pinned(chunk)) is not None}
            self._copy(pinned)
            self._fill_by_rooms([chunk for chunk in self._parts if chunk not in pinned])
        finally:  # the sources are given away after this, also when something failed half-way
            for mark in self._marks():
                mark.synchronize()

    def _fill_by_rooms(self, chunks: Sequence[int]) -> None:
        if not chunks:
            return
        rooms = [devices().pinned((min(_ROOM_CHUNKS, len(chunks)), CHUNK_BYTES), torch.uint8) for _ in range(2)]
        left: list[list[Mark]] = [[], []]
        for turn, at in enumerate(range(0, len(chunks), _ROOM_CHUNKS)):
            some, room = chunks[at : at + _ROOM_CHUNKS], rooms[turn % 2]
            for mark in left[turn % 2]:
                mark.synchronize()
            here = dict(zip(some, room, strict=False))
            self._reader.pour({chunk: [Piece(0, memoryview(here[chunk][: self._end(chunk)].numpy().data))] for chunk in some})
            self._copy(here)
            left[turn % 2] = self._marks()

    def _copy(self, here: Mapping[int, torch.Tensor]) -> None:
        """Begin to copy chunks from where they lie in host memory."""
        targets = [part for chunk in here for _, part in self._parts[chunk]]
        sources = [data[offset : offset + part.numel()] for chunk, data in here.items() for offset, part in self._parts[chunk]]
        copy((targets, sources), non_blocking=True)

    def _end(self, chunk: int) -> int:
        """The last byte of a chunk that is needed, and one more."""
        return max(offset + part.numel() for offset, part in self._parts[chunk])

    def _marks(self) -> list[Mark]:
        return [devices().mark(devices().current(device)) for device in self._devices]
