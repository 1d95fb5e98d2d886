"""Copies of the newest states on the devices from which they come.

One operator on the training's own stream makes a snapshot, so whatever the training queues next comes after it. No update waits for the
copy to the host, which reads from the snapshot. No state is in a snapshot alone: a restore reads its values from memory or disk as always,
and its tensors from here if they are here. So a snapshot can be dropped whenever its memory is wanted, and nothing needs to be told.

The memory of a snapshot belongs to one stream, that of the capture for which it was made. It is overwritten only on that stream, once
nothing else reads it: the crossing has ended, which the host knows, and each restore has made that stream wait for its reads.
"""

from __future__ import annotations

import functools
import logging
import operator
from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

from datastates.content.geometry import rebuild
from datastates.content.manifest import ALIGNED_BYTES, CHUNK_BYTES, TensorSpec
from datastates.content.shards import is_whole
from datastates.system.devices import Mark, Stream, devices
from datastates.system.interrupts import Mutex

from .routes import Route, Source

__all__ = ["Packing", "Snapshot", "Snapshots", "packing_of", "piece_of", "tensors_of"]

_logger = logging.getLogger(__name__)

_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)

_SPARED = 8
"""An eighth of a device stays free, besides the most that the training has taken of it so far."""


@dataclass(frozen=True, slots=True)
class Packing:
    """The layout of a snapshot of a plan's tensors on one device. Each stretch of the stream is whole, and has the same offset from a whole
    KiB as in the stream.

    ``parts`` are in order, as words of one kind; a number stands for that many words of zeros. Each of ``stretches`` is its start in the
    stream, its first byte here and the byte after its last.
    """

    parts: tuple[torch.Tensor | int, ...]
    word: torch.dtype
    stretches: tuple[tuple[int, int, int], ...]
    size: int


class Plan(Protocol):
    """What is needed of a copy plan here: what lies where, the zeros between tensors, and the packings of devices so far."""

    routes: dict[torch.device, Route]
    gaps: list[tuple[int, int, int]]
    packings: dict[torch.device, Packing]


@dataclass(slots=True, eq=False)
class Snapshot:
    """A copy of a state's tensors on one device. ``memory`` belongs to ``stream``, and is valid from the mark ``written`` on.

    ``digest`` is the state's, once memory has the state: by then the host has seen that ``written`` was reached. ``readers`` is the
    number of restores that are reading it.
    """

    uid: str
    packing: Packing
    memory: torch.Tensor
    stream: Stream
    written: Mark
    digest: str | None = None
    is_crossing: bool = True
    readers: int = 0

    @property
    def stretches(self) -> list[tuple[int, torch.Tensor]]:
        """Its bytes, each stretch with its start in the stream of the state."""
        return [(start, self.memory[first:last]) for start, first, last in self.packing.stretches]

    def piece(self, start: int, length: int) -> torch.Tensor | None:
        """``length`` bytes of the stream from ``start`` on; None if they do not lie here."""
        index = bisect_right(self.packing.stretches, start, key=operator.itemgetter(0)) - 1
        if index < 0:
            return None
        begin, first, last = self.packing.stretches[index]
        at = first + start - begin
        return self.memory[at : at + length] if at + length <= last else None


@dataclass(slots=True)
class _Usage:
    """What is known of a device: the most memory that the training has taken of it besides snapshots, and its allocator's failures."""

    failures: int
    peak: int = 0
    needed: int = 0


class Snapshots:
    """The snapshots of one repository: at most ``budget`` bytes on each device; the oldest makes room for the next.

    ``take`` belongs to training threads; any thread may call the rest.
    """

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._held: list[Snapshot] = []
        self._kept: dict[str, str] = {}
        self._usage: dict[torch.device, _Usage] = {}
        self._is_given_up = not budget
        self._has_said = False
        self._lock = Mutex()

    def take(self, uid: str, plan: Plan, device: torch.device) -> Snapshot | None:
        """A copy of a state's tensors on a device, made in the order of the current stream; None if there is no memory for it.

        The first capture of a plan gets none, because it is not known before how much memory a step with this plan takes.
        """
        if self._is_given_up or device not in plan.routes:
            return None
        packing = plan.packings.get(device)
        is_first = packing is None
        if packing is None:
            packing = plan.packings[device] = packing_of(plan.routes[device], plan.gaps)
        current = devices().current(device)
        with self._lock, torch.inference_mode(False), torch.no_grad():
            room = self._room_on(device)
            if is_first:
                self._held = [each for each in self._held if each.stream.device != device]
            if is_first or self._is_given_up:
                return None
            if packing.size > room:
                self._say_once(device, packing.size, room)
            memory = self._memory_for(packing, current, room)
            if memory is None:
                return None
            words = memory.view(packing.word)
            zeros = words.new_zeros(ALIGNED_BYTES // words.itemsize)
            torch.cat([zeros[:part] if isinstance(part, int) else part for part in packing.parts], out=words)
            snapshot = Snapshot(uid, packing, memory, current, devices().mark(current))
            self._held.append(snapshot)
        return snapshot

    @contextmanager
    def reading(self, uid: str, digest: str) -> Iterator[Sequence[Snapshot]]:
        """The snapshots of a state, one for each device, for reading on the current streams; queue everything that reads them within the
        block."""
        with self._lock:
            found = [each for each in self._held if each.uid == uid and each.digest == digest]
            for each in found:
                each.readers += 1
        try:
            yield found
        finally:
            try:
                for each in found:
                    devices().wait(each.stream, devices().mark(devices().current(each.stream.device)))
            finally:
                with self._lock:
                    for each in found:
                        each.readers -= 1

    def keep(self, branch: str, uid: str) -> None:
        """Keep the snapshots of the state to which a training would go back: of those of its branch that are not the newest, they make room
        last."""
        with self._lock:
            self._kept[branch] = uid

    def let_go(self) -> None:
        """Give all memory back; later captures take some again."""
        with self._lock:
            self._held.clear()
            self._kept.clear()

    # All below runs under the lock

    def _memory_for(self, packing: Packing, stream: Stream, room: int) -> torch.Tensor | None:
        """New memory within ``room``, or that of the oldest snapshot that may be dropped."""
        device, size, kept = stream.device, packing.size, frozenset(self._kept.values())
        free = [each for each in self._on(device) if not each.is_crossing and not each.readers and each.uid not in kept]
        while self._held_on(device) + size > room:
            if not free:
                return None
            oldest = free.pop(0)
            self._held.remove(oldest)
            if oldest.memory.numel() == size and oldest.stream == stream:
                return oldest.memory
        try:
            return next(part for part in packing.parts if not isinstance(part, int)).new_empty(size, dtype=torch.uint8)
        except torch.OutOfMemoryError:
            self._give_up(device, "there is no memory for one more")
            return None

    def _room_on(self, device: torch.device) -> int:
        """How much memory of a device all snapshots may take now; if the training is short of memory, all of them are given up."""
        try:
            memory, held = devices().memory(device), self._held_on(device)
        except RuntimeError as exc:  # the user's own allocator, which keeps no counts
            self._give_up(device, f"its memory is not known ({exc})")
            return 0
        usage = self._usage.setdefault(device, _Usage(memory.failures))
        if memory.peak != usage.peak:  # the new peak was reached besides what is held since
            usage.peak, usage.needed = memory.peak, max(usage.needed, memory.peak - held)
        spare = memory.reach - memory.total // _SPARED - usage.needed
        if memory.failures > usage.failures:
            self._give_up(device, "its allocator ran out of memory")
        elif held > spare:
            self._give_up(device, "less than an eighth of it would stay free")
        return min(self._budget, spare)

    def _give_up(self, device: torch.device, why: str) -> None:
        self._is_given_up = True
        self._held.clear()
        _logger.warning("no states are kept on %s any more, as %s: from now on updates wait for the copies to the host", device, why)

    def _say_once(self, device: torch.device, size: int, room: int) -> None:
        if not self._has_said:
            self._has_said = True
            _logger.warning(
                "no state is kept on %s: one takes %d bytes, and there is room for %d (device_bytes=%d, and an eighth of the device stays"
                " free beside what the training takes)",
                device, size, max(0, room), self._budget,
            )  # fmt: skip

    def _on(self, device: torch.device) -> list[Snapshot]:
        return [each for each in self._held if each.stream.device == device]

    def _held_on(self, device: torch.device) -> int:
        return sum(each.memory.numel() for each in self._on(device))


def packing_of(route: Route, gaps: Collection[tuple[int, int, int]]) -> Packing:
    """How everything that lies on a device is packed; ``gaps`` are those of the plan."""
    holes = {chunk * CHUNK_BYTES + first: last - first for chunk, first, last in gaps}
    parts = list[Source | int]()
    stretches = list[tuple[int, int, int]]()
    size, end = 0, -1
    for source in sorted((*route.small, *route.large, *route.deferred), key=lambda each: each.start):
        hole = holes.get(end, 0)
        is_joined = source.start == end + hole
        zeros = hole if is_joined else (source.start - size) % ALIGNED_BYTES
        if zeros:
            parts.append(zeros)
        size += zeros
        begin, first = stretches.pop()[:2] if is_joined else (source.start, size)
        parts.append(source)
        size += source.flat.numel()
        end = source.start + source.flat.numel()
        stretches.append((begin, first, size))
    word = _widest(parts)
    words = (part // word.itemsize if isinstance(part, int) else part.flat.view(word) for part in parts)
    return Packing(tuple(words), word, tuple(stretches), size)


def _widest(parts: Sequence[Source | int]) -> torch.dtype:
    """The widest words of which all parts consist. torch joins wide ones faster, and 2**31 or more only by a launch for each part."""
    lengths = [part if isinstance(part, int) else part.flat.numel() | int(part.flat.storage_offset()) for part in parts]
    common = functools.reduce(operator.or_, lengths, 0)
    return next(word for word in _WORDS if not common % word.itemsize)


def piece_of(near: Sequence[Snapshot], spec: TensorSpec) -> torch.Tensor | None:
    """The stored bytes of a tensor that lies whole in one of these snapshots; None if it does not."""
    if spec.alias is not None or not is_whole(spec) or not spec.shards or not spec.shards[0].length:
        return None
    found = (each.piece(spec.shards[0].start, spec.shards[0].length) for each in near)
    return next((piece for piece in found if piece is not None), None)


def tensors_of(near: Sequence[Snapshot], specs: Sequence[TensorSpec]) -> Mapping[int, torch.Tensor]:
    """The tensors of a state that lie in these snapshots, by index; callers must not write to them."""
    pieces = {index: piece_of(near, spec) for index, spec in enumerate(specs)} if near else {}
    return {index: rebuild(piece, specs[index]) for index, piece in pieces.items() if piece is not None}
