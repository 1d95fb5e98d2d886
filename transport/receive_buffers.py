"""Memory for a state that is being received: as large as its stream, with real pages only for the
bytes that are received."""

from __future__ import annotations

import ctypes
import logging
import mmap
import sys
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch

from datastates.errors import OverBudget
from datastates.state.device_digest import Digester
from datastates.state.digest import chunk_digest
from datastates.state.geometry import assemble, bytes_of, empty, is_whole, rebuild
from datastates.state.in_place import LiveTensor
from datastates.state.manifest import CHUNK_BYTES, TensorSpec
from datastates.state.xxh3 import can_digest, digests_of
from datastates.system.devices import Mark, Stream, devices

_HUGE_BYTES = 2 << 20
_MADV_DONTNEED = 4
_MADV_POPULATE_WRITE = 23
_MAP_NORESERVE = 0x4000 if sys.platform == "linux" else 0

_libc = ctypes.CDLL(None, use_errno=True)

Extent = tuple[int, int]
"""Start and length in bytes."""


class StreamMemory:
    """Memory in which byte ``i`` of a stream is at byte ``i``. It is freed with its last view.

    It uses huge pages if the kernel gives them: touching them for the first time costs a third of
    touching small ones, and a helper thread touches them ahead of the transfer.
    """

    def __init__(self, chunk_count: int) -> None:
        self._length = max(1, chunk_count) * CHUNK_BYTES
        try:
            reserved = mmap.mmap(
                -1,
                self._length + _HUGE_BYTES,
                flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE,
            )
        except (OSError, ValueError, OverflowError) as exc:
            raise OverBudget(
                f"{self._length} bytes of memory cannot be reserved for the state ({exc}): choose"
                " less with only=…"
            ) from exc
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # a kernel without huge pages
                reserved.madvise(mmap.MADV_HUGEPAGE)
        address = ctypes.addressof(ctypes.c_char.from_buffer(reserved))
        first = -address % _HUGE_BYTES
        self._address = address + first
        self._view = memoryview(reserved)[first : first + self._length]
        self._is_closed = False
        self._helper: threading.Thread | None = None

    def memory(self, start: int, length: int) -> memoryview:
        """A stretch of it, writable."""
        return self._view[start : start + length]

    def tensor(self, start: int, length: int) -> torch.Tensor:
        """A stretch of it as flat ``uint8``, with its own storage."""
        return (
            torch.frombuffer(self.memory(start, length), dtype=torch.uint8)
            if length
            else torch.empty(0, dtype=torch.uint8, device="cpu")
        )

    def warm(self, extents: Sequence[Extent]) -> None:
        """Begin to touch these stretches, in this order, on a separate thread."""
        if extents and self._helper is None:
            self._helper = threading.Thread(
                target=self._touch, args=(extents,), name="datastates-landing", daemon=True
            )
            self._helper.start()

    def reopen(self, chunk_count: int) -> bool:
        """Reuse the existing pages; False if there are too few."""
        self._is_closed = False
        return chunk_count * CHUNK_BYTES <= self._length

    def close(self, keep: Iterable[Extent] | None = None) -> None:
        """Stop touching.

        With ``keep``, all other pages are returned to the kernel, and must not be read again."""
        self._is_closed = True
        if self._helper is not None:
            self._helper.join()
            self._helper = None
        if keep is not None:
            done = 0
            for start, length in [*sorted(keep), (self._length, 0)]:
                begin = -(-done // mmap.PAGESIZE) * mmap.PAGESIZE
                end = start // mmap.PAGESIZE * mmap.PAGESIZE
                if begin < end:
                    _advise(self._address + begin, end - begin, _MADV_DONTNEED)
                done = start + length

    def _touch(self, extents: Sequence[Extent]) -> None:
        for start, length in extents:
            if self._is_closed:
                return
            begin = start // mmap.PAGESIZE * mmap.PAGESIZE
            _advise(self._address + begin, start + length - begin, _MADV_POPULATE_WRITE)


class StreamMemoryCache:
    """Caches the memory of the last clone for the next one. Writing to pages that were touched
    before is many times as fast."""

    def __init__(self) -> None:
        self._kept: StreamMemory | None = None
        self._lock = threading.Lock()

    def take(self, chunk_count: int) -> StreamMemory:
        """Memory for at least ``chunk_count`` chunks, with arbitrary contents."""
        with self._lock:
            kept, self._kept = self._kept, None
        return kept if kept is not None and kept.reopen(chunk_count) else StreamMemory(chunk_count)

    def give(self, stream_memory: StreamMemory) -> None:
        """Cache a closed memory that is not read any more, and release the one before it."""
        with self._lock:
            self._kept = stream_memory

    def close(self) -> None:
        """Release the cached memory; idempotent."""
        with self._lock:
            self._kept = None


def _advise(address: int, length: int, advice: int) -> None:
    """Call madvise without the interpreter's lock.

    If the kernel does not know the advice, pages are touched when they are written."""
    if sys.platform == "linux":
        _libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(length), advice)


# The route of each chunk: large stretches are received at their places, small ones are packed
# together and scattered later.


DIRECT_BYTES = 256 << 10
"""A stretch of at least this size has its own message."""


@dataclass(frozen=True, slots=True, eq=False)
class Stretch:
    """A wanted tensor in the stream.

    ``home`` is the bytes of the live tensor, flat. If None, they belong in the stream memory."""

    start: int
    length: int
    home: torch.Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Contiguous bytes of a chunk. They belong at ``start`` in ``home``, or in the stream memory if
    that is None."""

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
    """The bytes of one message.

    ``memory`` is their place. If None, they are received elsewhere and copied to ``pieces``."""

    offset: int
    length: int
    memory: memoryview | None
    pieces: tuple[Piece, ...]


def route(
    lengths: Sequence[int], stretches: Sequence[Stretch], stream_memory: StreamMemory
) -> dict[int, tuple[Segment, ...]]:
    """The segments of every chunk that a stretch touches; ``stretches`` are in ascending order
    and do not overlap."""
    pieces: dict[int, list[Piece]] = {}
    for stretch in stretches:
        for index, piece in _cut(stretch):
            found = pieces.setdefault(index, [])
            last = found[-1] if found else None
            # pieces next to each other in the stream memory become one
            if (
                last is not None
                and last.home is None is piece.home
                and last.offset + last.length == piece.offset
            ):
                found[-1] = Piece(last.offset, last.length + piece.length, None, last.start)
            else:
                found.append(piece)
    return {
        index: tuple(_segments(lengths[index], found, stream_memory))
        for index, found in pieces.items()
    }


def _cut(stretch: Stretch) -> Iterator[tuple[int, Piece]]:
    done = 0
    while done < stretch.length:
        index, offset = divmod(stretch.start + done, CHUNK_BYTES)
        length = min(stretch.length - done, CHUNK_BYTES - offset)
        yield (
            index,
            Piece(
                offset,
                length,
                stretch.home,
                done if stretch.home is not None else stretch.start + done,
            ),
        )
        done += length


def _segments(
    length: int, pieces: Sequence[Piece], stream_memory: StreamMemory
) -> Iterator[Segment]:
    begin, packed = 0, list[Piece]()
    for piece in pieces:
        is_on_device = piece.home is not None and devices().is_on(piece.home)
        if is_on_device or (piece.length < DIRECT_BYTES and piece.length != length):
            packed.append(piece)
            continue
        memory = (
            stream_memory.memory(piece.start, piece.length) if piece.home is None else piece.view()
        )
        if begin < piece.offset:
            yield Segment(begin, piece.offset - begin, None, tuple(packed))
            packed = []
        yield Segment(piece.offset, piece.length, memory, (piece,))
        begin = piece.offset + piece.length
    if begin < length:
        yield Segment(begin, length - begin, None, tuple(packed))


# Copies from host memory to live tensors on devices. They run after the work that the owner of the
# tensors queued before, and before the work that it queues afterwards.


class DeviceWriter:
    """A stream for each device that receives something. Made and joined on the thread that owns the
    tensors, which must stay alive.

    Do not change memory that a copy reads until a mark that was made after the copy is reached.
    """

    def __init__(self, homes: Iterable[torch.Tensor]) -> None:
        self._streams: dict[torch.device, Stream] = {}
        for device in dict.fromkeys(devices().of(home) for home in homes if devices().is_on(home)):
            side = self._streams[device] = devices().stream(device)
            devices().wait(side, devices().mark(devices().current(device)))

    def stream(self, device: torch.device) -> Stream:
        """The stream of a device; valid before ``join``."""
        return self._streams[device]

    def put(self, homes: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        """Begin to copy; on any thread. The host waits if ``sources`` are not pinned."""
        for device in dict.fromkeys(map(devices().of, homes)):
            pairs = [
                pair for pair in zip(homes, sources, strict=True) if devices().of(pair[0]) == device
            ]
            with devices().on(self._streams[device]), torch.no_grad():
                torch._foreach_copy_(
                    [home for home, _ in pairs], [source for _, source in pairs], non_blocking=True
                )

    def marks(self, homes: Iterable[torch.Tensor]) -> Sequence[Mark]:
        """The points behind the copies into these tensors so far."""
        return [
            devices().mark(self._streams[device])
            for device in dict.fromkeys(map(devices().of, homes))
        ]

    def join(self) -> None:
        """Make every copy visible to the owner of the tensors; idempotent."""
        while self._streams:
            device, side = self._streams.popitem()
            mark = devices().mark(side)
            devices().wait(devices().current(device), mark)
            # the host waits once for each clone: the source of the copies is given away after this
            mark.synchronize()


# Moving bytes that came packed together to their places, once their digest was right.


def scatter(
    segments: Sequence[Segment],
    memory: Sequence[memoryview],
    stream_memory: StreamMemory,
    device_writer: DeviceWriter,
    *,
    is_in_stream: bool,
) -> Sequence[Mark]:
    """Begin to move the bytes. ``memory`` is where each segment was received. With
    ``is_in_stream``, packed segments already are in their place in the stream.

    The memory is read until the returned marks are reached.
    """
    homes, sources = list[torch.Tensor](), list[torch.Tensor]()
    for segment, received in zip(segments, memory, strict=True):
        for piece in segment.pieces if segment.memory is None else ():
            data = received[piece.offset - segment.offset :][: piece.length]
            if piece.home is None:
                if not is_in_stream:
                    stream_memory.memory(piece.start, piece.length)[:] = data
            elif not devices().is_on(piece.home):
                piece.view()[:] = data
            else:
                homes.append(piece.home[piece.start : piece.start + piece.length])
                # pinned where the scratch buffer is
                sources.append(torch.frombuffer(data, dtype=torch.uint8))
    device_writer.put(homes, sources)
    return device_writer.marks(homes)


# Buffers for bytes of a chunk that cannot be received in place.


class Scratch:
    """Buffers of at most ``count`` chunks together, made when they are needed.

    Contents of pinned buffers are copied to a device. Each has a whole chunk, and is used again."""

    def __init__(self, count: int, *, is_pinned: bool = False) -> None:
        self._left, self._free = count, list[tuple[torch.Tensor, Sequence[Mark]]]()
        self._bytes, self._most = 0, count * CHUNK_BYTES
        self._is_pinned = is_pinned
        self._lock = threading.Lock()

    def take(self, length: int) -> torch.Tensor | None:
        """A buffer of at least ``length`` bytes; None if too many are in use. Waits if only devices
        still use the last ones."""
        if self._is_pinned:
            return self._take_pinned()
        with self._lock:
            if self._bytes and self._bytes + length > self._most:
                return None
            self._bytes += length
        return torch.empty(length, dtype=torch.uint8, device="cpu")

    def _take_pinned(self) -> torch.Tensor | None:
        with self._lock:
            # devices are done with the first ones
            ready = (
                index
                for index, (_, marks) in enumerate(self._free)
                if all(mark.query() for mark in marks)
            )
            index = next(ready, None)
            if index is not None:
                return self._free.pop(index)[0]
            if not self._left and not self._free:
                return None
            given = None if self._left else self._free.pop(0)
            self._left -= given is None
        if given is not None:
            for mark in given[1]:
                mark.synchronize()
            return given[0]
        return devices().pinned((CHUNK_BYTES,), torch.uint8)

    def give(self, buffer: torch.Tensor, marks: Sequence[Mark] = ()) -> None:
        """Take back a buffer, which is free again once these marks are reached."""
        with self._lock:
            if self._is_pinned:
                self._free.append((buffer, marks))
            else:
                self._bytes -= buffer.numel()


# The tensors of a state before its bytes are there, over the memory into which the bytes will
# come.


_GIVEN_BYTES = 64 << 10
"""Tensors of at least this size that the objects do not have yet become part of them as they
are, without a copy."""


def holders(specs: Sequence[TensorSpec], wanted: Sequence[bool]) -> dict[int, None]:
    """The indices of wanted tensors, and of those to which they are tied."""
    found = dict.fromkeys(index for index, is_wanted in enumerate(wanted) if is_wanted)
    found.update(
        (alias, None) for index in list(found) if (alias := specs[index].alias) is not None
    )
    return found


def placeholders(
    specs: Sequence[TensorSpec], wanted: Collection[int], stream_memory: StreamMemory
) -> list[torch.Tensor | None]:
    """Every wanted tensor, over untouched memory: of the stream memory or, for a tensor of several
    shards, its own."""
    tensors: list[torch.Tensor | None] = [None] * len(specs)
    for index in wanted:
        spec = specs[index]
        if spec.alias is None and is_whole(spec):
            shard = spec.shards[0]
            tensors[index] = rebuild(stream_memory.tensor(shard.start, shard.length), spec)
        elif spec.alias is None:
            tensors[index] = rebuild(empty(spec), spec)
    tie(specs, tensors, wanted)
    return tensors


def gather(
    specs: Sequence[TensorSpec],
    tensors: list[torch.Tensor | None],
    wanted: Collection[int],
    stream_memory: StreamMemory,
) -> None:
    """Put in its place each wanted tensor of several shards, assembled from the shards in the
    stream_memory."""
    for index in wanted:
        if specs[index].alias is None and not is_whole(specs[index]):
            flat = assemble(
                specs[index], lambda shard: stream_memory.tensor(shard.start, shard.length)
            )
            tensors[index] = rebuild(flat, specs[index])


def tie(
    specs: Sequence[TensorSpec], tensors: list[torch.Tensor | None], wanted: Collection[int]
) -> None:
    """Put the same tensor in every place where tied ones are wanted."""
    for index in wanted:
        alias = specs[index].alias
        if alias is not None:
            tensors[index] = tensors[alias]


def givable(
    specs: Sequence[TensorSpec],
    tensors: Sequence[torch.Tensor | None],
    wanted: Collection[int],
    homes: Mapping[int, object],
) -> dict[int, Extent]:
    """Placeholders that may become part of the objects, by id, with their places."""
    found = {}
    for index in wanted:
        spec, tensor = specs[index], tensors[index]
        if (
            spec.alias is not None
            or index in homes
            or tensor is None
            or not is_whole(spec)
            or bytes_of(spec) < _GIVEN_BYTES
        ):
            continue
        if all(stride or size == 1 for stride, size in zip(spec.strides, spec.shape, strict=True)):
            found[id(tensor)] = (spec.shards[0].start, spec.shards[0].length)
    return found


# Memory on a device in which chunks are checked. Each chunk arrives whole, is digested on the
# device, and is copied to its places.


_logger = logging.getLogger(__name__)

_MOST_LAUNCHES = 16
"""More launches take longer than the host: without Triton's kernels the host checks all chunks."""


class StagingBuffer:
    """Memory for a chunk on a device. Belongs to one thread at a time."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self._digesters: dict[int, tuple[Digester, torch.Tensor]] = {}

    def digester(self, length: int) -> tuple[Digester, torch.Tensor]:
        """The digester for a chunk of this length, and host memory for its result."""
        found = self._digesters.get(length)
        if found is None:
            here = devices().pinned((1, 8), torch.int64)
            found = self._digesters[length] = (
                Digester([(length, [(0, self.memory[:length])])]),
                here,
            )
        return found

    def can_digest(self, length: int) -> bool:
        """Whether the device can digest a chunk of this length in few enough launches to be worth
        it."""
        return (
            can_digest(length, [(0, self.memory[:length])])
            and self.digester(length)[0].launches <= _MOST_LAUNCHES
        )


class StagingBuffers:
    """At most ``count`` staging buffers on the device of ``like``, made when they are first needed.
    Safe from any thread.

    All work on them is queued on the stream of ``device_writer``. Therefore a buffer may be
    given back before copies from it are done.
    """

    def __init__(self, like: torch.Tensor, device_writer: DeviceWriter, count: int) -> None:
        self._like, self._device_writer, self._left = like, device_writer, count
        self._stream = device_writer.stream(devices().of(like))
        self._free: list[StagingBuffer] = []
        self._is_worth: dict[int, bool] = {}
        self._is_given_up = False
        self._lock = threading.Lock()

    def take(self, length: int) -> StagingBuffer | None:
        """A buffer for a chunk of this length; None if all are in use, or the host should check
        the chunk."""
        with self._lock:
            if (
                self._is_given_up
                or not self._is_worth.get(length, True)
                or not (self._free or self._left)
            ):
                return None
            staging = self._free.pop() if self._free else None
            self._left -= staging is None
        if staging is None:
            try:
                with devices().on(self._stream):
                    staging = StagingBuffer(self._like.new_empty(CHUNK_BYTES, dtype=torch.uint8))
            except RuntimeError as exc:
                self._give_up(f"find no room there ({exc!r})")
                return None
        with self._lock:
            if length not in self._is_worth:
                self._is_worth[length] = staging.can_digest(length)
            if self._is_worth[length]:
                return staging
        self.give(staging)
        return None

    def give(self, staging: StagingBuffer) -> None:
        """Take back a buffer."""
        with self._lock:
            self._free.append(staging)

    def ready(self) -> Mark:
        """The point behind which other streams may write to the buffers that are taken now."""
        return devices().mark(self._stream)

    def bring(self, staging: StagingBuffer, data: torch.Tensor) -> None:
        """Begin to copy a chunk from pinned memory; that memory is free again after
        ``is_right``."""
        with devices().on(self._stream):
            staging.memory[: data.numel()].copy_(data, non_blocking=True)

    def is_right(self, staging: StagingBuffer, length: int, digest: bytes) -> bool:
        """Whether a chunk in a buffer has this digest.

        The host waits for 64 bytes, and checks a wrong chunk itself."""
        found: bytes | None = None
        try:
            found = self._digest(staging, length)
        except Exception as exc:  # a kernel that cannot be compiled here, or no memory for it
            self._give_up(f"cannot be digested there ({exc!r})")
        if found == digest:
            return True
        here = devices().pinned((length,), torch.uint8)
        with devices().on(self._stream):
            here.copy_(staging.memory[:length])
        is_right = chunk_digest(memoryview(here.numpy().data)) == digest
        if is_right and found is not None:
            self._give_up("had other digests there than on the host")
        return is_right

    def put(self, staging: StagingBuffer, pieces: Sequence[Piece]) -> None:
        """Begin to copy a chunk with the right digest to its places."""
        homes = [
            piece.home[piece.start : piece.start + piece.length]
            for piece in pieces
            if piece.home is not None
        ]
        assert len(homes) == len(pieces), "all of it belongs on the device"
        self._device_writer.put(
            homes, [staging.memory[piece.offset :][: piece.length] for piece in pieces]
        )

    def _digest(self, staging: StagingBuffer, length: int) -> bytes:
        digester, here = staging.digester(length)
        with devices().on(self._stream):
            here.copy_(digester.lanes(), non_blocking=True)
        devices().mark(self._stream).synchronize()
        (found,) = digests_of(here.numpy(), digester.lengths)
        return found

    def _give_up(self, why: str) -> None:
        with self._lock:
            was_given_up, self._is_given_up = self._is_given_up, True
        if not was_given_up:
            _logger.warning("chunks of a clone on a device %s: the host checks them", why)


def staging_buffers_of(
    homes: Mapping[int, LiveTensor], device_writer: DeviceWriter, count: int
) -> dict[torch.device, StagingBuffers]:
    """The staging buffers of each device that receives something."""
    found: dict[torch.device, StagingBuffers] = {}
    for home in homes.values():
        if devices().is_on(home.flat) and devices().of(home.flat) not in found:
            found[devices().of(home.flat)] = StagingBuffers(home.flat, device_writer, count)
    return found


def wholly_on(segments: Sequence[Segment]) -> torch.device | None:
    """The one device to which everything wanted of a chunk belongs; None if there is no such
    device."""
    pieces = [piece for segment in segments for piece in segment.pieces]
    if any(piece.home is None or not devices().is_on(piece.home) for piece in pieces):
        return None
    found = {devices().of(piece.home) for piece in pieces if piece.home is not None}
    return found.pop() if len(found) == 1 else None
