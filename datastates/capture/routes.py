"""Finds where the bytes of a state lie, on each device and on the host, and the stretches of the arena to which they go."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from datastates.content.manifest import CHUNK_BYTES
from datastates.store.arena import Arena
from datastates.system.devices import devices

__all__ = ["HOST", "NOTHING", "Pairs", "Route", "Source", "aside_of", "placed", "routes_of"]

HOST = torch.device("cpu")

Pairs = tuple[list[torch.Tensor], list[torch.Tensor]]
"""Targets, and a source for each."""

_SMALL_BYTES = 1 << 20
"""Tensors up to this size that are copied at once are first put aside on their device: it takes one launch for all of them, and the
training waits for no copy to the host."""

_ASIDE_BYTES = 64 << 20
"""The most bytes that are put aside."""


class Source(Protocol):
    """A tensor, or a part of one, that is contiguous in the stream of a state from ``start`` on."""

    flat: torch.Tensor
    start: int
    is_deferred: bool


@dataclass(frozen=True, slots=True)
class Route:
    """The sources in one place, in the order of the stream: those put aside at once, those copied at once, and those copied later.

    ``runs`` are the contiguous runs of ``small``: the start of each in the stream, and its first and last byte in their concatenation.
    """

    small: tuple[Source, ...] = ()
    large: tuple[Source, ...] = ()
    deferred: tuple[Source, ...] = ()
    runs: tuple[tuple[int, int, int], ...] = ()


NOTHING = Route()


def routes_of(sources: Iterable[Source]) -> dict[torch.device, Route]:
    """The route of each place where something lies; the whole host is one place."""
    at: dict[torch.device, list[Source]] = {}
    for source in sorted(sources, key=_start):
        at.setdefault(devices().of(source.flat) if devices().is_on(source.flat) else HOST, []).append(source)
    return {place: _route(found, is_host=place == HOST) for place, found in at.items()}


def aside_of(small: Sequence[Source], runs: Iterable[tuple[int, int, int]] = ()) -> list[tuple[int, torch.Tensor]]:
    """One copy of all small sources, as stretches that are contiguous in the stream, each with its start there; ``runs`` if known."""
    aside = torch.cat([source.flat for source in small])
    return [(start, aside[first:last]) for start, first, last in runs or _joined(small)]


def placed(stretches: Iterable[tuple[int, torch.Tensor]], slots: Sequence[int], arena: Arena) -> Pairs:
    """The targets of stretches of the stream. Each is split into as few pieces as the slots of the state, which may be scattered, and their
    registrations allow."""
    targets: list[torch.Tensor] = []
    sources: list[torch.Tensor] = []
    for start, flat in stretches:
        done, total = 0, flat.numel()
        while done < total:
            chunk, offset = divmod(start + done, CHUNK_BYTES)
            count = _together(chunk, offset, total - done, slots, arena)
            at = slots[chunk] + offset
            targets.append(arena.flat[at : at + count])
            sources.append(flat if count == total else flat[done : done + count])
            done += count
    return targets, sources


def _together(chunk: int, offset: int, length: int, slots: Sequence[int], arena: Arena) -> int:
    first, count = chunk, min(length, CHUNK_BYTES - offset)
    while count < length and slots[chunk + 1] == slots[chunk] + CHUNK_BYTES and arena.is_joint(slots[first], slots[chunk + 1]):
        chunk, count = chunk + 1, min(length, count + CHUNK_BYTES)
    return count


def _joined(small: Sequence[Source]) -> Iterator[tuple[int, int, int]]:
    """For each contiguous run of sources: its start in the stream, and its first and last byte in their concatenation."""
    start, first, last = small[0].start, 0, 0
    for source in small:
        if source.start != start + last - first:
            yield start, first, last
            start, first = source.start, last
        last += source.flat.numel()
    yield start, first, last


def _route(sources: list[Source], *, is_host: bool) -> Route:
    small: list[Source] = []
    large: list[Source] = []
    left = 0 if is_host else _ASIDE_BYTES
    for source in sources:
        length = source.flat.numel()
        if source.is_deferred or not length:
            continue
        is_small = length <= min(_SMALL_BYTES, left)
        left -= length * is_small
        (small if is_small else large).append(source)
    runs = tuple(_joined(small)) if small else ()
    return Route(tuple(small), tuple(large), tuple(source for source in sources if source.is_deferred), runs)


def _start(source: Source) -> int:
    return source.start
