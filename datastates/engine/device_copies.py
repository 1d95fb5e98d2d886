"""Tensors on devices: their routes into the arena, snapshots that stay there, and digests of chunks
that they compute.

Digests find chunks that stay the same from capture to capture (``FrozenChunks``). They are not
copied to the host.
"""

from __future__ import annotations

import functools
import logging
import operator
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch

from datastates.state.device_digest import Digester, has_kernels, is_ready
from datastates.state.geometry import is_whole, rebuild
from datastates.state.manifest import ALIGNED_BYTES, CHUNK_BYTES, LARGE_BYTES, TensorSpec
from datastates.state.xxh3 import Part, can_digest, digests_of, split_by_chunk
from datastates.storage.arena import Arena
from datastates.system.devices import Mark, Stream, devices
from datastates.system.interrupts import Mutex

HOST = torch.device("cpu")

Pairs = tuple[list[torch.Tensor], list[torch.Tensor]]
"""Targets, and a source for each."""

_SMALL_BYTES = 1 << 20
"""Tensors up to this size that are copied at once are first put aside on their device. This takes
one launch for all of them, and the training waits for no copy to the host."""

_ASIDE_BYTES = 64 << 20
"""The most bytes that are put aside."""


class CopySource(Protocol):
    """A tensor, or a part of one, that is contiguous in the stream of a state from ``start`` on."""

    flat: torch.Tensor
    start: int
    is_deferred: bool


@dataclass(frozen=True, slots=True)
class Route:
    """The sources in one place, in the order of the stream: those put aside at once, those copied
    at once, and those copied later.

    ``runs`` are the contiguous runs of ``small``: the start of each in the stream, and its first
    and last byte in their concatenation.
    """

    small: tuple[CopySource, ...] = ()
    large: tuple[CopySource, ...] = ()
    deferred: tuple[CopySource, ...] = ()
    runs: tuple[tuple[int, int, int], ...] = ()


NOTHING = Route()


def routes_of(sources: Iterable[CopySource]) -> dict[torch.device, Route]:
    """The route of each place that has tensors. The whole host is one place."""
    at: dict[torch.device, list[CopySource]] = {}
    for source in sorted(sources, key=_start):
        at.setdefault(
            devices().of(source.flat) if devices().is_on(source.flat) else HOST, []
        ).append(source)
    return {place: _route(found, is_host=place == HOST) for place, found in at.items()}


def aside_of(
    small: Sequence[CopySource], runs: Iterable[tuple[int, int, int]] = ()
) -> list[tuple[int, torch.Tensor]]:
    """One copy of all small sources, as stretches that are contiguous in the stream, each with
    its start there; ``runs`` if known."""
    aside = torch.cat([source.flat for source in small])
    return [(start, aside[first:last]) for start, first, last in runs or _joined(small)]


def placed(
    stretches: Iterable[tuple[int, torch.Tensor]], slots: Sequence[int], arena: Arena
) -> Pairs:
    """The targets of stretches of the stream. Each is split into as few pieces as the slots of
    the state, which may be scattered, and their registrations allow."""
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
    while (
        count < length
        and slots[chunk + 1] == slots[chunk] + CHUNK_BYTES
        and arena.is_joint(slots[first], slots[chunk + 1])
    ):
        chunk, count = chunk + 1, min(length, count + CHUNK_BYTES)
    return count


def _joined(small: Sequence[CopySource]) -> Iterator[tuple[int, int, int]]:
    """For each contiguous run of sources: its start in the stream, and its first and last byte
    in their concatenation."""
    start, first, last = small[0].start, 0, 0
    for source in small:
        if source.start != start + last - first:
            yield start, first, last
            start, first = source.start, last
        last += source.flat.numel()
    yield start, first, last


def _route(sources: list[CopySource], *, is_host: bool) -> Route:
    small: list[CopySource] = []
    large: list[CopySource] = []
    left = 0 if is_host else _ASIDE_BYTES
    for source in sources:
        length = source.flat.numel()
        if source.is_deferred or not length:
            continue
        is_small = length <= min(_SMALL_BYTES, left)
        left -= length * is_small
        (small if is_small else large).append(source)
    runs = tuple(_joined(small)) if small else ()
    return Route(
        tuple(small), tuple(large), tuple(source for source in sources if source.is_deferred), runs
    )


def _start(source: CopySource) -> int:
    return source.start


# --- Snapshots: copies of the newest states on the devices from which they come ---


_logger = logging.getLogger(__name__)

_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)

_SPARED = 8
"""An eighth of a device stays free, in addition to the most that the training has taken of it."""


@dataclass(frozen=True, slots=True)
class Packing:
    """The layout of a snapshot of a plan's tensors on one device. Each stretch of the stream is
    whole, and has the same offset from a whole KiB as in the stream.

    ``parts`` are in order, as words of one kind. A number means that many words of zeros. Each of
    ``stretches`` is its start in the stream, its first byte here and the byte after its last.
    """

    parts: tuple[torch.Tensor | int, ...]
    word: torch.dtype
    stretches: tuple[tuple[int, int, int], ...]
    size: int


class Plan(Protocol):
    """The needed facts of a copy plan: the places of its tensors, the zeros between them, and the
    packings of devices so far."""

    routes: dict[torch.device, Route]
    gaps: list[tuple[int, int, int]]
    packings: dict[torch.device, Packing]


@dataclass(slots=True, eq=False)
class Snapshot:
    """A copy of a state's tensors on one device. ``memory`` belongs to ``stream``, and is valid
    from the mark ``written`` on.

    ``digest`` is the state's, once memory has the state: by then the host has seen that ``written``
    was reached. ``readers`` is the number of restores that are reading it.
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
        """``length`` bytes of the stream from ``start``. None if they are not here."""
        index = bisect_right(self.packing.stretches, start, key=operator.itemgetter(0)) - 1
        if index < 0:
            return None
        begin, first, last = self.packing.stretches[index]
        at = first + start - begin
        return self.memory[at : at + length] if at + length <= last else None


@dataclass(slots=True)
class _Usage:
    """The usage of a device: the most memory that the training has taken of it in addition to
    snapshots, and its allocator's failures."""

    failures: int
    peak: int = 0
    needed: int = 0


class Snapshots:
    """The snapshots of one repository: at most ``budget`` bytes on each device. The oldest is
    dropped for the next.

    ``take`` belongs to training threads. Any thread may call the other methods.
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
        """A copy of a state's tensors on a device, made in the order of the current stream; None if
        there is no memory for it.

        The first capture of a plan gets none, because it is not known before how much memory a step
        with this plan takes.
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
                self._log_once(device, packing.size, room)
            memory = self._memory_for(packing, current, room)
            if memory is None:
                return None
            words = memory.view(packing.word)
            try:
                zeros = words.new_zeros(ALIGNED_BYTES // words.itemsize)
                torch.cat(
                    [zeros[:part] if isinstance(part, int) else part for part in packing.parts],
                    out=words,
                )
            except torch.OutOfMemoryError:
                self._give_up(device, "there is no memory for one more")
                return None
            snapshot = Snapshot(uid, packing, memory, current, devices().mark(current))
            self._held.append(snapshot)
        return snapshot

    @contextmanager
    def reading(self, uid: str, digest: str) -> Iterator[Sequence[Snapshot]]:
        """The snapshots of a state, one for each device, for reading on the current streams;
        queue everything that reads them within the block."""
        with self._lock:
            found = [each for each in self._held if each.uid == uid and each.digest == digest]
            for each in found:
                each.readers += 1
        try:
            yield found
        finally:
            try:
                for each in found:
                    reading = devices().mark(devices().current(each.stream.device))
                    devices().wait(each.stream, reading)
            finally:
                with self._lock:
                    for each in found:
                        each.readers -= 1

    def keep(self, branch: str, uid: str) -> None:
        """Keep the snapshots of the state to which a training would go back. Among its branch's
        snapshots that are not the newest, they are dropped last."""
        with self._lock:
            self._kept[branch] = uid

    def release(self) -> None:
        """Give all memory back; later captures take some again."""
        with self._lock:
            self._held.clear()
            self._kept.clear()

    # All below runs under the lock

    def _memory_for(self, packing: Packing, stream: Stream, room: int) -> torch.Tensor | None:
        """New memory within ``room``, or the memory of the oldest snapshot that may be dropped."""
        device, size, kept = stream.device, packing.size, frozenset(self._kept.values())
        free = [
            each
            for each in self._on(device)
            if not each.is_crossing and not each.readers and each.uid not in kept
        ]
        while self._held_on(device) + size > room:
            if not free:
                return None
            oldest = free.pop(0)
            self._held.remove(oldest)
            if oldest.memory.numel() == size and oldest.stream == stream:
                return oldest.memory
        try:
            return next(part for part in packing.parts if not isinstance(part, int)).new_empty(
                size, dtype=torch.uint8
            )
        except torch.OutOfMemoryError:
            self._give_up(device, "there is no memory for one more")
            return None

    def _room_on(self, device: torch.device) -> int:
        """How much memory of a device all snapshots may take now; if the training is short of
        memory, all of them are given up."""
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
        _logger.warning(
            "no states are kept on %s any more, as %s: from now on updates wait for the copies to"
            " the host",
            device,
            why,
        )

    def _log_once(self, device: torch.device, size: int, room: int) -> None:
        if not self._has_said:
            self._has_said = True
            _logger.warning(
                "no state is kept on %s: one takes %d bytes, and there is room for %d"
                " (device_bytes=%d, and an eighth of the device stays free beside what the training"
                " takes)",
                device,
                size,
                max(0, room),
                self._budget,
            )

    def _on(self, device: torch.device) -> list[Snapshot]:
        return [each for each in self._held if each.stream.device == device]

    def _held_on(self, device: torch.device) -> int:
        return sum(each.memory.numel() for each in self._on(device))


def packing_of(route: Route, gaps: Collection[tuple[int, int, int]]) -> Packing:
    """The packing of all tensors on a device. ``gaps`` are the plan's."""
    holes = {chunk * CHUNK_BYTES + first: last - first for chunk, first, last in gaps}
    parts = list[CopySource | int]()
    stretches = list[tuple[int, int, int]]()
    size, end = 0, -1
    for source in sorted(
        (*route.small, *route.large, *route.deferred), key=lambda each: each.start
    ):
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
    words = (
        part // word.itemsize if isinstance(part, int) else part.flat.view(word) for part in parts
    )
    return Packing(tuple(words), word, tuple(stretches), size)


def _widest(parts: Sequence[CopySource | int]) -> torch.dtype:
    """The widest words of which all parts consist. torch joins wide ones faster, and 2**31 or
    more only by a launch for each part."""
    lengths = [
        part if isinstance(part, int) else part.flat.numel() | int(part.flat.storage_offset())
        for part in parts
    ]
    common = functools.reduce(operator.or_, lengths, 0)
    return next(word for word in _WORDS if not common % word.itemsize)


def piece_of(near: Sequence[Snapshot], spec: TensorSpec) -> torch.Tensor | None:
    """The stored bytes of a tensor that is whole in one of these snapshots. None if it is not."""
    if spec.alias is not None or not is_whole(spec) or not spec.shards or not spec.shards[0].length:
        return None
    found = (each.piece(spec.shards[0].start, spec.shards[0].length) for each in near)
    return next((piece for piece in found if piece is not None), None)


def tensors_of(near: Sequence[Snapshot], specs: Sequence[TensorSpec]) -> Mapping[int, torch.Tensor]:
    """The tensors of a state in these snapshots, by index. Callers must not write to them."""
    pieces = {index: piece_of(near, spec) for index, spec in enumerate(specs)} if near else {}
    return {
        index: rebuild(piece, specs[index]) for index, piece in pieces.items() if piece is not None
    }


# --- Still chunks, found by digests on the device and not copied to the host ---


_MOST_LAUNCHES = 1000
"""The most operators that are worth it on a training's stream: without Triton's kernels only
short chunks are digested there."""

_PATIENCE = 3
_LONGEST_PAUSE = 64
"""After this many looks in a row that found nothing still, captures are left out between looks:
1, 2, 4, … up to the second number."""


class FrozenSource(Protocol):
    """A tensor, or a part of one, that is contiguous in the stream of a state from ``start`` on."""

    flat: torch.Tensor
    start: int


@dataclass(slots=True)
class FrozenCheck:
    """One capture's digests of chunks that may be still: ``skipped`` are the chunks that are copied
    only if they turn out to have changed.

    ``lanes`` holds one tensor: it is on the device, until it is replaced by its copy on the host.
    """

    stills: FrozenChunks
    lanes: list[torch.Tensor]
    skipped: frozenset[int]
    _found: dict[int, bytes] = field(default_factory=dict)

    def learn(self) -> dict[int, bytes]:
        """The digest of each chunk, now that the lanes have arrived; the next captures compare
        with it, too."""
        if not self._found:
            self._found = self.stills._learn(self.lanes[0])
        return self._found

    def try_out(self, digest_of: Callable[[int], bytes]) -> None:
        """For the first capture, compare each digest with the host's digest of the copied bytes."""
        if not self.stills.is_tried:
            self.stills._try_out(
                all(digest == digest_of(chunk) for chunk, digest in self.learn().items())
            )


class FrozenChunks:
    """The chunks of one plan on one device that may be still. ``parts`` has the places of their
    tensors.

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

    def look(self) -> FrozenCheck | None:
        """Queue the digests on the current stream; None if the device does not compute them, or
        if everything changes between captures."""
        if self._is_given_up or not is_ready(self._digester.like):
            return None
        if self._left_out:
            self._left_out -= 1
            return None
        try:
            return FrozenCheck(self, [self._digester.lanes()], self._still)
        except Exception as exc:  # a kernel may not compile here, or memory may be short
            self._give_up(f"cannot be digested there ({exc!r})")
            return None

    def stretches(self, chunks: Iterable[int]) -> list[tuple[int, torch.Tensor]]:
        """The contents of these chunks: the start of each stretch in the stream, and its bytes."""
        return [
            (chunk * CHUNK_BYTES + offset, data)
            for chunk in sorted(chunks)
            for offset, data in self.parts[chunk]
        ]

    def _learn(self, lanes: torch.Tensor) -> dict[int, bytes]:
        found = dict(
            zip(self.parts, digests_of(lanes.numpy(), self._digester.lengths), strict=True)
        )
        self._still = frozenset(
            chunk for chunk, digest in found.items() if self._last.get(chunk) == digest
        )
        self._in_vain = 0 if self._still or not self._last else self._in_vain + 1
        self._left_out = (
            min(_LONGEST_PAUSE, 1 << (self._in_vain - _PATIENCE))
            if self._in_vain >= _PATIENCE
            else 0
        )
        self._last = found
        return found

    def _try_out(self, is_right: bool) -> None:
        self.is_tried = True
        if not is_right:
            self._give_up("had other digests there than on the host")

    def _give_up(self, why: str) -> None:
        self._is_given_up, self._still = True, frozenset()
        _logger.warning("frozen parameters on a device %s: they are copied at each capture", why)


def stills_of(
    sources: Iterable[FrozenSource], lengths: Sequence[int]
) -> dict[torch.device, FrozenChunks]:
    """For each device, the chunks that consist of these sources alone, and that the device can
    digest."""
    parts: dict[int, list[Part]] = {}
    for source in sorted(sources, key=lambda each: each.start):
        if source.flat.numel() >= LARGE_BYTES and devices().is_on(source.flat):
            for chunk, offset, data in split_by_chunk(source.start, source.flat):
                parts.setdefault(chunk, []).append((offset, data))
    at: dict[torch.device, dict[int, list[Part]]] = {}
    for chunk, found in parts.items():
        if can_digest(lengths[chunk], found):
            at.setdefault(devices().of(found[0][1]), {})[chunk] = found
    made = {device: FrozenChunks(found, lengths) for device, found in at.items()}
    return {device: each for device, each in made.items() if each.launches <= _MOST_LAUNCHES}


def beside(
    stretches: Iterable[tuple[int, torch.Tensor]], chunks: frozenset[int]
) -> Iterator[tuple[int, torch.Tensor]]:
    """The parts of these stretches outside ``chunks``, in as few pieces as possible."""
    for start, flat in stretches:
        first, end = start, start + flat.numel()
        for chunk in sorted(
            chunks.intersection(range(start // CHUNK_BYTES, -(-end // CHUNK_BYTES)))
        ):
            if first < chunk * CHUNK_BYTES:
                yield first, flat[first - start : chunk * CHUNK_BYTES - start]
            first = (chunk + 1) * CHUNK_BYTES
        if first < end:
            yield first, flat[first - start :] if first > start else flat


def is_within(source: FrozenSource, chunks: frozenset[int]) -> bool:
    """Whether all of a source is in these chunks."""
    return chunks.issuperset(
        range(source.start // CHUNK_BYTES, -(-(source.start + source.flat.numel()) // CHUNK_BYTES))
    )


# --- Digests by the device of chunks that cross, so that the host need not read them ---


class DeviceDigests:
    """The chunks of one plan that one device digests: the chunks that consist of these stretches
    alone, without ``left_out``.

    ``lanes`` belongs to the crossing thread, all other methods to the stage thread.
    """

    def __init__(
        self,
        stretches: Iterable[tuple[int, torch.Tensor]],
        lengths: Sequence[int],
        left_out: Collection[int],
    ) -> None:
        parts: dict[int, list[Part]] = {}
        for start, flat in stretches:
            for chunk, offset, data in split_by_chunk(start, flat):
                parts.setdefault(chunk, []).append((offset, data))
        fit = {
            chunk: each
            for chunk, each in parts.items()
            if chunk not in left_out and can_digest(lengths[chunk], each)
        }
        self._chunks = list(fit)
        self._digester = (
            Digester([(lengths[chunk], each) for chunk, each in fit.items()]) if fit else None
        )
        self._is_tried = self._is_given_up = False

    def lanes(self) -> torch.Tensor | None:
        """Queue the digests on the current stream; None if there are none to be had yet."""
        if (
            self._digester is None
            or self._is_given_up
            or not has_kernels(self._digester.like)
            or not is_ready(self._digester.like)
        ):
            return None
        try:
            return self._digester.lanes()
        except Exception as exc:  # memory may be short there
            self._give_up(f"cannot be digested there ({exc!r})")
            return None

    def learn(self, lanes: torch.Tensor, digest_of: Callable[[int], bytes]) -> Mapping[int, bytes]:
        """The digests by chunk, from lanes that have arrived on the host; none if the device
        computes others than ``digest_of``."""
        assert self._digester is not None, "it gave the lanes"
        found = dict(
            zip(self._chunks, digests_of(lanes.numpy(), self._digester.lengths), strict=True)
        )
        if not self._is_tried:
            self._is_tried = True
            if any(digest_of(chunk) != digest for chunk, digest in found.items()):
                self._give_up("had other digests there than on the host")
        return {} if self._is_given_up else found

    def _give_up(self, why: str) -> None:
        self._is_given_up = True
        _logger.warning("chunks of a state on a device %s: the host digests them", why)
