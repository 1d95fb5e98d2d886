"""Cuts the bytes of a chunk as its receiver wants them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

__all__ = ["cut"]


def cut(pieces: Sequence[memoryview], lengths: Sequence[int]) -> list[memoryview]:
    """The same bytes as pieces of other lengths: views if a new piece lies in one old piece, else copies.

    Old and new pieces have the same total length.
    """
    rest = _flat(pieces)
    current = next(rest, memoryview(b""))
    new = []
    for length in lengths:
        if not current:
            current = next(rest)
        if length <= len(current):
            new.append(current[:length])
            current = current[length:]
            continue
        joined = bytearray()
        while len(joined) < length:
            current = current or next(rest)
            taken = length - len(joined)
            joined += current[:taken]
            current = current[taken:]
        new.append(memoryview(joined))
    return new


def _flat(pieces: Sequence[memoryview]) -> Iterator[memoryview]:
    for piece in pieces:
        if piece.nbytes:
            yield piece if piece.format == "B" and piece.ndim == 1 else piece.cast("B")
