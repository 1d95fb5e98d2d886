"""How each chunk is received: which stretches go straight to their places, and which are packed together, to be scattered later."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from datastates.content.manifest import CHUNK_BYTES
from datastates.system.devices import devices

from .shadow import Shadow

if TYPE_CHECKING:
    import torch

__all__ = ["DIRECT_BYTES", "Piece", "Segment", "Stretch", "route"]

DIRECT_BYTES = 256 << 10
"""From this size on, a stretch is worth a message of its own."""


@dataclass(frozen=True, slots=True, eq=False)
class Stretch:
    """A wanted tensor in the stream. ``home`` is the bytes of the live tensor, flat; None: it belongs in the shadow."""

    start: int
    length: int
    home: torch.Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Bytes of a chunk that belong together: in ``home`` from ``start`` on, or at that place of the shadow."""

    offset: int
    length: int
    home: torch.Tensor | None
    start: int

    def view(self) -> memoryview:
        """These bytes of ``home``, which is on the CPU."""
        assert self.home is not None
        return memoryview(self.home.numpy().data)[self.start : self.start + self.length]


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """The bytes of one message. ``memory`` is their place; None: they are received elsewhere, and ``pieces`` say what goes where."""

    offset: int
    length: int
    memory: memoryview | None
    pieces: tuple[Piece, ...]


def route(lengths: Sequence[int], stretches: Sequence[Stretch], shadow: Shadow) -> dict[int, tuple[Segment, ...]]:
    """The segments of every chunk that a stretch touches; ``stretches`` are in ascending order and do not overlap."""
    pieces: dict[int, list[Piece]] = {}
    for stretch in stretches:
        for index, piece in _cut(stretch):
            _append(pieces.setdefault(index, []), piece)
    return {index: tuple(_segments(lengths[index], found, shadow)) for index, found in pieces.items()}


def _cut(stretch: Stretch) -> Iterator[tuple[int, Piece]]:
    done = 0
    while done < stretch.length:
        index, offset = divmod(stretch.start + done, CHUNK_BYTES)
        length = min(stretch.length - done, CHUNK_BYTES - offset)
        yield index, Piece(offset, length, stretch.home, done if stretch.home is not None else stretch.start + done)
        done += length


def _append(pieces: list[Piece], piece: Piece) -> None:
    """Append a piece; pieces that lie side by side in the shadow become one."""
    last = pieces[-1] if pieces else None
    if last is not None and last.home is None is piece.home and last.offset + last.length == piece.offset:
        pieces[-1] = Piece(last.offset, last.length + piece.length, None, last.start)
    else:
        pieces.append(piece)


def _segments(length: int, pieces: Sequence[Piece], shadow: Shadow) -> Iterator[Segment]:
    begin, packed = 0, list[Piece]()
    for piece in pieces:
        memory = _straight(piece, length, shadow)
        if memory is None:
            packed.append(piece)
            continue
        if begin < piece.offset:
            yield Segment(begin, piece.offset - begin, None, tuple(packed))
            packed = []
        yield Segment(piece.offset, piece.length, memory, (piece,))
        begin = piece.offset + piece.length
    if begin < length:
        yield Segment(begin, length - begin, None, tuple(packed))


def _straight(piece: Piece, length: int, shadow: Shadow) -> memoryview | None:
    if piece.length < DIRECT_BYTES and piece.length != length:
        return None
    if piece.home is None:
        return shadow.memory(piece.start, piece.length)
    return None if devices().is_on(piece.home) else piece.view()
