"""A state as a safetensors file that is not stored anywhere: its header is computed, its bytes are read and checked on demand."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from datastates.content.geometry import dtype_of, rebuild
from datastates.content.manifest import CHUNK_BYTES, TensorSpec
from datastates.content.shards import is_whole
from datastates.errors import InvalidInput
from datastates.export.tensors import Entry, header_of, in_order, words_about
from datastates.lineage.states import State
from datastates.objects.report import Selection
from datastates.store.reading import read_flat, specs_of
from datastates.store.tier import Reader

__all__ = ["StateFile"]

PIECE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class _Part:
    """A tensor that begins at ``start`` in the file; ``spec`` says where its bytes are stored."""

    start: int
    bytes: int
    spec: TensorSpec


class StateFile:
    """The file of one open state: every tensor that ``only`` selects, under its path, as ``plan_export`` lays them out; tied tensors are
    written each.

    :raises InvalidInput: ``only`` selects something that is not there.
    """

    def __init__(self, reader: Reader, state: State, only: Sequence[str] | None) -> None:
        self._reader = reader
        specs = specs_of(reader)
        chosen = _choose(specs, only, state)
        entries = in_order(Entry(spec.path, dtype_of(spec.dtype), spec.shape) for spec in chosen.values())
        self._header = header_of(entries, words_about(state))
        self._parts: list[_Part] = []
        self.size = len(self._header)
        for entry in entries:
            spec = chosen[entry.name]
            self._parts.append(_Part(self.size, entry.bytes, spec if spec.alias is None else specs[spec.alias]))
            self.size += entry.bytes

    def pieces(self, start: int, end: int) -> Iterator[bytes]:
        """The bytes ``[start, end)`` of the file in pieces of about a MiB, none of them empty.

        :raises Corrupt: a chunk fails its digest; none of its bytes were returned.
        """
        gathered, count = [], 0
        for small in self._pieces(start, end):
            gathered.append(small)
            count += len(small)
            if count >= PIECE_BYTES:
                yield b"".join(gathered)
                gathered, count = [], 0
        if count:
            yield b"".join(gathered)

    def close(self) -> None:
        """Release the state."""
        self._reader.close()

    def _pieces(self, start: int, end: int) -> Iterator[bytes]:
        if start < len(self._header):
            yield self._header[start:end]
        for part in self._parts:
            first, last = max(start - part.start, 0), min(end - part.start, part.bytes)
            if first < last:
                yield from (
                    _plain(self._reader, part.spec, first, last) if _is_plain(part) else _turned(self._reader, part.spec, first, last)
                )


def _choose(specs: Sequence[TensorSpec], only: Sequence[str] | None, state: State) -> dict[str, TensorSpec]:
    selection = Selection(only or None)
    chosen = {spec.path: spec for spec in specs if selection.wants(spec.path)}
    selection.refuse_unused(spec.path for spec in specs)
    if not chosen:
        raise InvalidInput(f"state {state.uid} has no tensors: there is nothing to download")
    return chosen


def _is_plain(part: _Part) -> bool:
    """Whether the bytes are stored in row-major order, in one piece."""
    if not is_whole(part.spec):
        return False
    expected = 1
    for size, stride in zip(reversed(part.spec.shape), reversed(part.spec.strides), strict=True):
        if size != 1 and stride != expected:
            return part.bytes == 0
        expected *= size
    return True


def _plain(reader: Reader, spec: TensorSpec, first: int, last: int) -> Iterator[bytes]:
    (shard,) = spec.shards
    at, end = shard.start + first, shard.start + last
    while at < end:
        chunk, offset = divmod(at, CHUNK_BYTES)
        piece = reader.chunk(chunk)[offset : min(offset + PIECE_BYTES, offset + end - at)]
        yield bytes(piece)
        at += piece.nbytes


def _turned(reader: Reader, spec: TensorSpec, first: int, last: int) -> Iterator[bytes]:
    """The bytes of a tensor that is stored in another order, in several shards, or once for many elements: block by block.

    Needs memory for the whole tensor: served bytes are read, not mapped, so that a truncated file does not crash the server.
    """
    tensor = rebuild(read_flat(reader, spec), spec)
    item, dim, inner = tensor.element_size(), tensor.dim(), 1
    while dim > 1 and inner * tensor.shape[dim - 1] * item <= PIECE_BYTES:
        dim -= 1
        inner *= tensor.shape[dim]
    # Blocks are rows [at, at + rows) of dimension ``dim - 1``, at each index of the dimensions before it.
    size, row = tensor.shape[dim - 1], inner * item
    rows = max(1, PIECE_BYTES // row)
    for outer in range(first // (size * row), -(-last // (size * row))):
        base = outer * size * row
        block = tensor[_indices(outer, tensor.shape[: dim - 1])]
        for at in range(max(first - base, 0) // row // rows * rows, size, rows):
            begin = base + at * row
            if begin >= last:
                return
            dense = block[at : at + rows].contiguous().reshape(-1).view(torch.uint8)
            yield dense.numpy()[max(first - begin, 0) : last - begin].tobytes()


def _indices(flat: int, shape: Sequence[int]) -> tuple[int, ...]:
    """The indices of an element, from its number in row-major order."""
    found = []
    for position, size in enumerate(shape):
        number, flat = divmod(flat, math.prod(shape[position + 1 :]))
        assert number < size
        found.append(number)
    return tuple(found)
