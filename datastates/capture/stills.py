"""Finds, by digests on the device, chunks that stay the same from capture to capture, which are then not copied to the host.

A *still* chunk is one of frozen parameters whose digest was the same in the last two captures. ``look`` runs on the training thread, in the
order of its stream, so that a digest is that of the captured state. ``learn`` runs on the crossing thread, once the lanes have arrived.
Digests only save copies: if a device cannot compute them, or computes others than the host, everything is copied.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from datastates.content.blocks import Part, can_digest, cut
from datastates.content.digester import Digester, is_ready
from datastates.content.manifest import CHUNK_BYTES, LARGE_BYTES
from datastates.content.xxh3 import digests_of
from datastates.system.devices import devices

if TYPE_CHECKING:
    import torch

__all__ = ["Look", "Stills", "beside", "is_within", "stills_of"]

_logger = logging.getLogger(__name__)

_MOST_LAUNCHES = 1000
"""The most operators that are worth it on a training's stream: without Triton's kernels only short chunks are digested there."""

_PATIENCE, _LONGEST_PAUSE = 3, 64
"""After this many looks in a row that found nothing still, captures are left out between looks: 1, 2, 4, … up to the second number."""


class Source(Protocol):
    """A tensor, or a part of one, that is contiguous in the stream of a state from ``start`` on."""

    flat: torch.Tensor
    start: int


@dataclass(slots=True)
class Look:
    """One capture's digests of chunks that may be still: ``skipped`` are the chunks that are copied only if they turn out to have changed.

    ``lanes`` holds one tensor: it is on the device, until it is replaced by its copy on the host.
    """

    stills: Stills
    lanes: list[torch.Tensor]
    skipped: frozenset[int]
    _found: dict[int, bytes] = field(default_factory=dict)

    def learn(self) -> dict[int, bytes]:
        """The digest of each chunk, now that the lanes have arrived; the next captures compare with it, too."""
        if not self._found:
            self._found = self.stills._learn(self.lanes[0])
        return self._found

    def try_out(self, digest_of: Callable[[int], bytes]) -> None:
        """For the first capture, compare each digest with the host's digest of the copied bytes."""
        if not self.stills.is_tried:
            self.stills._try_out(all(digest == digest_of(chunk) for chunk, digest in self.learn().items()))


class Stills:
    """The chunks of one plan on one device that may be still. ``parts`` says where their tensors lie.

    ``is_tried``: the host has compared the digests of one capture.
    """

    def __init__(self, parts: dict[int, list[Part]], lengths: Sequence[int]) -> None:
        self.parts = parts
        self._digester = Digester([(lengths[chunk], each) for chunk, each in parts.items()])
        self.is_tried = False
        self._is_given_up = False
        self._last: dict[int, bytes] = {}
        self._still: frozenset[int] = frozenset()
        self._in_vain = self._left_out = 0

    @property
    def launches(self) -> int:
        """About how many operators ``look`` queues."""
        return self._digester.launches

    def look(self) -> Look | None:
        """Queue the digests on the current stream; None if the device does not compute them, or if everything changes between captures."""
        if self._is_given_up or not is_ready(self._digester.like):
            return None
        if self._left_out:
            self._left_out -= 1
            return None
        try:
            return Look(self, [self._digester.lanes()], self._still)
        except Exception as exc:  # a kernel may not compile here, or memory may be short
            self._give_up(f"cannot be digested there ({exc!r})")
            return None

    def stretches(self, chunks: Iterable[int]) -> list[tuple[int, torch.Tensor]]:
        """The contents of these chunks: the start of each stretch in the stream, and its bytes."""
        return [(chunk * CHUNK_BYTES + offset, data) for chunk in sorted(chunks) for offset, data in self.parts[chunk]]

    def _learn(self, lanes: torch.Tensor) -> dict[int, bytes]:
        found = dict(zip(self.parts, digests_of(lanes.numpy(), self._digester.lengths), strict=True))
        self._still = frozenset(chunk for chunk, digest in found.items() if self._last.get(chunk) == digest)
        self._in_vain = 0 if self._still or not self._last else self._in_vain + 1
        self._left_out = min(_LONGEST_PAUSE, 1 << (self._in_vain - _PATIENCE)) if self._in_vain >= _PATIENCE else 0
        self._last = found
        return found

    def _try_out(self, is_right: bool) -> None:
        self.is_tried = True
        if not is_right:
            self._give_up("had other digests there than on the host")

    def _give_up(self, why: str) -> None:
        self._is_given_up, self._still = True, frozenset()
        _logger.warning("frozen parameters on a device %s: they are copied at each capture", why)


def stills_of(sources: Iterable[Source], lengths: Sequence[int]) -> dict[torch.device, Stills]:
    """For each device, the chunks that consist of these sources alone, and that the device can digest."""
    parts: dict[int, list[Part]] = {}
    for source in sorted(sources, key=lambda each: each.start):
        if source.flat.numel() >= LARGE_BYTES and devices().is_on(source.flat):
            for chunk, offset, data in cut(source.start, source.flat):
                parts.setdefault(chunk, []).append((offset, data))
    at: dict[torch.device, dict[int, list[Part]]] = {}
    for chunk, found in parts.items():
        if can_digest(lengths[chunk], found):
            at.setdefault(devices().of(found[0][1]), {})[chunk] = found
    made = {device: Stills(found, lengths) for device, found in at.items()}
    return {device: each for device, each in made.items() if each.launches <= _MOST_LAUNCHES}


def beside(stretches: Iterable[tuple[int, torch.Tensor]], chunks: frozenset[int]) -> Iterator[tuple[int, torch.Tensor]]:
    """The parts of these stretches that lie outside ``chunks``, in as few pieces as possible."""
    for start, flat in stretches:
        first, end = start, start + flat.numel()
        for chunk in sorted(chunks.intersection(range(start // CHUNK_BYTES, -(-end // CHUNK_BYTES)))):
            if first < chunk * CHUNK_BYTES:
                yield first, flat[first - start : chunk * CHUNK_BYTES - start]
            first = (chunk + 1) * CHUNK_BYTES
        if first < end:
            yield first, flat[first - start :] if first > start else flat


def is_within(source: Source, chunks: frozenset[int]) -> bool:
    """Whether all of a source lies in these chunks."""
    return chunks.issuperset(range(source.start // CHUNK_BYTES, -(-(source.start + source.flat.numel()) // CHUNK_BYTES)))
