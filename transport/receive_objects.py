"""A clone into live objects: through memory that is copied at the end, or in place."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING

from datastates.errors import Closed, Conflict, Corrupt, Unavailable
from datastates.state import in_place
from datastates.state.data_position import Redivision
from datastates.state.digest import pieces_digest
from datastates.state.geometry import is_whole
from datastates.state.in_place import LiveTensor, live_tensors_for, wait_for_copies
from datastates.state.manifest import CHUNK_BYTES
from datastates.state.report import RestoreReport, Target
from datastates.state.restore import check_into, reads, write
from datastates.state.tree import unflatten
from datastates.system.devices import Mark, devices

from .contract import OnDevice, Sink
from .protocol import CHUNKS
from .receive_buffers import (
    DIRECT_BYTES,
    DeviceWriter,
    Piece,
    Scratch,
    Segment,
    StagingBuffer,
    StreamMemory,
    StreamMemoryCache,
    Stretch,
    gather,
    givable,
    holders,
    placeholders,
    route,
    scatter,
    staging_buffers_of,
    tie,
    wholly_on,
)
from .untrusted import CheckedManifest, distrusting

if TYPE_CHECKING:
    import torch

_CORES = 8
"""With so many cores the host checks what arrives in its memory faster than a device does, which
takes each chunk by itself."""


@dataclass(slots=True)
class _Arriving:
    """A chunk that is being received: the memory of its segments, the scratch buffer that holds
    some of them, and the staging buffer on a device."""

    memory: list[memoryview]
    scratch: torch.Tensor | None
    staging: StagingBuffer | None = None


class ObjectsSink(Sink):
    """Receives a state into ``objects``. Made, committed and closed on the thread that owns them;
    misfits are refused when it is made.

    With ``atomic``, nothing in the objects is touched before ``commit``. Without it, large tensors
    are received in place: from the beginning until ``commit`` the objects are dirty, or until
    ``close`` if no buffer was handed out. ``only`` and ``strict`` are as in ``restore_into``.
    ``skip_equal`` leaves out chunks that the objects hold already (not with ``atomic``). ``keep``
    keeps every accepted chunk for ``pieces`` until ``close``. ``scratch`` is the size, in chunks,
    of what may be on its way and cannot be received in place. ``memory_cache`` keeps the memory of
    one clone for the next.

    :raises InvalidInput: the state does not fit the objects.
    :raises Corrupt: the manifest's tree is not one of named objects.
    """

    def __init__(
        self,
        checked: CheckedManifest,
        objects: Mapping[str, object],
        *,
        only: str | Sequence[str] | None = None,
        strict: bool = True,
        atomic: bool = True,
        skip_equal: bool = False,
        keep: bool = False,
        scratch: int = 16,
        memory_cache: StreamMemoryCache | None = None,
    ) -> None:
        self.manifest = checked.manifest
        self.lengths = checked.lengths
        self._parts = checked
        self._objects, self._only, self._strict, self._keeps = (
            objects,
            only,
            strict,
            keep,
        )
        self._own, self._wants = (
            Redivision(checked.manifest.origin.world_size, 0, 1),
            reads(objects, only),
        )
        self._wanted = holders(
            self._parts.specs, [self._wants(spec.path) for spec in self._parts.specs]
        )
        self._memory_cache = memory_cache
        self._stream_memory = (
            StreamMemory(len(self.lengths))
            if memory_cache is None
            else memory_cache.take(len(self.lengths))
        )
        with distrusting():
            self._tensors = placeholders(self._parts.specs, self._wanted, self._stream_memory)
        targets = self._check()
        self._homes = {} if atomic else self._find_homes(targets)
        self._routes = self._route(is_atomic=atomic)
        self._scratch = Scratch(
            scratch,
            is_pinned=any(devices().is_on(home.flat) for home in self._homes.values()),
        )
        self._missing = dict.fromkeys(sorted(self._routes))
        self._accepted: set[int] = set()
        self._arriving: dict[int, _Arriving] = {}
        self._lock = threading.Lock()
        self._token = object()
        self._is_touched = self._is_committed = self._is_closed = False
        self._given: list[tuple[int, int]] = []
        if skip_equal and not atomic:
            self._skip_equal()
        self._stream_memory.warm(list(self._fresh_extents()))
        if self._homes:
            wait_for_copies(objects)
            in_place.mark(((home.path, home.live) for home in self._homes.values()), self._token)
        self._device_writer = DeviceWriter(home.flat for home in self._homes.values())
        self._staging_buffers = staging_buffers_of(
            self._homes, self._device_writer, min(scratch, CHUNKS)
        )
        self._there = {
            index: device
            for index, each in self._routes.items()
            if (device := wholly_on(each)) is not None
        }

    # --- the transfer: any thread -----------------------------------------------------------------

    def missing(self) -> Sequence[int]:
        """The chunks that hold something that is wanted, and were neither accepted nor are on
        their way."""
        with self._lock:
            return list(self._missing)

    def buffers(self, index: int) -> Sequence[memoryview] | None:
        self._check_open(is_thorough=False)
        segments = self._routes[index]
        scratch, memory = None, list[memoryview]()
        length = sum(segment.length for segment in segments if segment.memory is None)
        if length and not self._keeps:
            scratch = self._scratch.take(length)
            if scratch is None:
                return None
        packed = None if scratch is None else memoryview(scratch.numpy().data)
        for segment in segments:
            if segment.memory is not None:
                memory.append(segment.memory)
            elif packed is not None:
                memory.append(packed[: segment.length])
                packed = packed[segment.length :]
            else:
                start = index * CHUNK_BYTES + segment.offset
                memory.append(self._stream_memory.memory(start, segment.length))
        with self._lock:
            self._is_touched = bool(self._homes)
            del self._missing[index]
            self._arriving[index] = _Arriving(memory, scratch)
        return memory

    def device_buffer(self, index: int) -> OnDevice | None:
        """The place to receive a chunk that belongs on one device. None if ``buffers`` is
        better."""
        self._check_open(is_thorough=False)
        device = self._there.get(index)
        staging = (
            None
            if device is None or self._keeps
            else self._staging_buffers[device].take(self.lengths[index])
        )
        if device is None or staging is None:
            return None
        with self._lock:
            self._is_touched = True
            del self._missing[index]
            self._arriving[index] = _Arriving([], None, staging)
        return OnDevice(
            staging.memory[: self.lengths[index]], self._staging_buffers[device].ready()
        )

    def accept(self, index: int) -> bool:
        """Check a chunk that was received, and move packed bytes to their places."""
        with self._lock:
            arriving = self._arriving[index]
        digest = self.manifest.content.chunks[index].digest
        marks: Sequence[Mark] = ()
        is_right = self._accept_there(index, arriving, digest)
        if is_right is None:
            is_right = pieces_digest(arriving.memory) == digest
            if is_right:
                marks = scatter(
                    self._routes[index],
                    arriving.memory,
                    self._stream_memory,
                    self._device_writer,
                    is_in_stream=self._keeps,
                )
        self._settle(index, is_accepted=is_right, marks=marks)
        return is_right

    def forget(self, index: int) -> None:
        self._settle(index, is_accepted=False)

    def pieces(self, index: int) -> Sequence[memoryview] | None:
        """The bytes of an accepted chunk; None if they are not all kept. Valid until ``close``."""
        with self._lock:
            if index not in self._accepted or self._is_closed:
                return None
        found = []
        for segment in self._routes[index]:
            if segment.memory is not None:
                found.append(segment.memory)
            elif self._keeps:
                start = index * CHUNK_BYTES + segment.offset
                found.append(self._stream_memory.memory(start, segment.length))
            else:
                return None
        return found

    # --- the end: the thread that owns the objects ------------------------------------------------

    @property
    def is_dirty(self) -> bool:
        """Whether this clone has left the objects half old, half new."""
        return (
            self._is_touched
            and not self._is_committed
            and in_place.are_marked((home.live for home in self._homes.values()), self._token)
        )

    def commit(self) -> RestoreReport:
        """Put the state, whose chunks are all right, into the objects, which are then whole and
        clean.

        :raises Unavailable: chunks are missing; nothing is written.
        :raises Conflict: something else was written into the objects since the clone began.
        :raises InvalidInput: the objects changed meanwhile and no longer fit, or one refused its
            state: then they are dirty.
        """
        self._check_open(is_thorough=True)
        left = len(self._routes) - len(self._accepted)
        if left:
            raise Unavailable(
                f"{left} of {len(self._routes)} chunks are still missing: resume the clone before"
                " it is committed"
            )
        self._device_writer.join()
        tensors = [
            self._homes[index].live if index in self._homes else tensor
            for index, tensor in enumerate(self._tensors)
        ]
        gather(self._parts.specs, tensors, self._wanted, self._stream_memory)
        tie(self._parts.specs, tensors, self._wanted)
        tree = unflatten(self._parts.skeleton, self._parts.values, tensors)
        extents = givable(self._parts.specs, tensors, self._wanted, self._homes)
        tree = self._own(tree, self._objects, self._wants)
        findings = check_into(
            self._objects, tree, only=self._only, strict=self._strict, owned=extents
        )
        wait_for_copies(self._objects)
        try:
            with distrusting():
                report = replace(write(findings), notes=tuple(self._own.notes))
        except BaseException:
            in_place.mark(((target.path, target.live) for target in findings.targets), self._token)
            raise
        finally:  # what was written before an error lives in the objects, too
            self._given = [extent for key, extent in extents.items() if key not in findings.kept]
        self._is_committed = True
        in_place.clean(home.live for home in self._homes.values())
        if not self._keeps:
            self.close()
        return report

    def close(self) -> None:
        """Release the memory; do not look at ``pieces`` any more.

        Idempotent. Objects that were partly written stay dirty."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        self._device_writer.join()
        if not self._is_touched and in_place.are_marked(
            (home.live for home in self._homes.values()), self._token
        ):
            in_place.clean(home.live for home in self._homes.values())
        self._stream_memory.close(keep=self._given if self._given else None)
        self._tensors.clear()
        self._routes.clear()
        self._arriving.clear()
        if self._memory_cache is not None and not self._given:
            self._memory_cache.give(self._stream_memory)

    # --- where everything goes --------------------------------------------------------------------

    def _check(self) -> list[Target]:
        """Refuse what does not fit, before a byte is requested."""
        with distrusting():
            tree = unflatten(
                self._parts.skeleton, self._parts.values, self._tensors, is_sketch=True
            )
            if not isinstance(tree, dict):
                raise Corrupt("the manifest that the peer sent is of a state without named objects")
            tree = self._own(tree, self._objects, self._wants)
            return check_into(
                self._objects, tree, only=self._only, strict=self._strict, has_values=False
            ).targets

    def _find_homes(self, targets: Sequence[Target]) -> dict[int, LiveTensor]:
        specs = self._parts.specs
        index_of = {
            id(self._tensors[index]): index
            for index in self._wanted
            if specs[index].alias is None and is_whole(specs[index])
        }
        return live_tensors_for(targets, index_of, specs)

    def _route(self, *, is_atomic: bool) -> dict[int, tuple[Segment, ...]]:
        stretches = []
        for index in self._wanted:
            spec = self._parts.specs[index]
            home = self._homes.get(index)
            flat = None if home is None else home.flat
            stretches += [
                Stretch(shard.start, shard.length, flat) for shard in spec.shards if shard.length
            ]
        stretches.sort(key=lambda stretch: stretch.start)
        if not is_atomic:
            return route(self.lengths, stretches, self._stream_memory)
        # Whole chunks: a chunk is received in one piece, including what is not wanted of it.
        touched = {
            index: None
            for each in stretches
            for index in range(
                each.start // CHUNK_BYTES, -(-(each.start + each.length) // CHUNK_BYTES)
            )
        }
        whole: dict[int, tuple[Segment, ...]] = {}
        for index in touched:
            start, length = index * CHUNK_BYTES, self.lengths[index]
            memory = self._stream_memory.memory(start, length)
            whole[index] = (Segment(0, length, memory, (Piece(0, length, None, start),)),)
        return whole

    def _fresh_extents(self) -> Iterator[tuple[int, int]]:
        """The extents of the stream memory that will be written, in the order of the requests."""
        for index in self._missing:
            for segment in self._routes[index]:
                if self._keeps and segment.memory is None:
                    yield index * CHUNK_BYTES + segment.offset, segment.length
                for piece in segment.pieces:
                    if piece.home is None and piece.length >= DIRECT_BYTES:
                        yield piece.start, piece.length

    # --- chunks -----------------------------------------------------------------------------------

    def _check_open(self, *, is_thorough: bool) -> None:
        if self._is_closed:
            raise Closed("the clone has ended: begin another one")
        # all are looked at before the commit
        homes = self._homes.values() if is_thorough else islice(self._homes.values(), 1)
        if not in_place.are_marked((home.live for home in homes), self._token):
            raise Conflict(
                "something else was written to the objects that are cloned into: begin the clone"
                " again"
            )

    def _accept_there(self, index: int, arriving: _Arriving, digest: bytes) -> bool | None:
        """``accept`` on the one device to which all of a chunk belongs; None if the host has to
        do it."""
        device = self._there.get(index)
        if device is None or (arriving.scratch is None and arriving.staging is None):
            return None
        staging_buffers, length = self._staging_buffers[device], self.lengths[index]
        if arriving.staging is None and arriving.scratch is not None:
            if len(os.sched_getaffinity(0)) >= _CORES:
                return None
            arriving.staging = staging_buffers.take(
                length
            )  # given back with the chunk, right or not
            if arriving.staging is None:
                return None
            staging_buffers.bring(arriving.staging, arriving.scratch[:length])
        assert arriving.staging is not None, "it came there, or was brought"
        is_right = staging_buffers.is_right(arriving.staging, length, digest)
        if is_right:
            staging_buffers.put(
                arriving.staging,
                [piece for segment in self._routes[index] for piece in segment.pieces],
            )
        return is_right

    def _settle(self, index: int, *, is_accepted: bool, marks: Sequence[Mark] = ()) -> None:
        with self._lock:
            arriving = self._arriving.pop(index)
            if is_accepted:
                self._accepted.add(index)
            else:
                self._missing[index] = None
        if arriving.scratch is not None:
            self._scratch.give(arriving.scratch, marks)
        if arriving.staging is not None:
            self._staging_buffers[self._there[index]].give(arriving.staging)

    def _skip_equal(self) -> None:
        """Mark chunks whose bytes the objects already hold as accepted."""
        for index in list(self._missing):
            pieces = [piece for segment in self._routes[index] for piece in segment.pieces]
            held = [
                piece.home
                for piece in pieces
                if piece.home is not None and not devices().is_on(piece.home)
            ]
            if (
                len(held) < len(pieces)
                or sum(piece.length for piece in pieces) != self.lengths[index]
            ):
                continue
            views = [piece.view() for piece in pieces]
            if pieces_digest(views) == self.manifest.content.chunks[index].digest:
                del self._missing[index]
                self._accepted.add(index)
                for piece, view in zip(pieces, views, strict=True) if self._keeps else ():
                    self._stream_memory.memory(index * CHUNK_BYTES + piece.offset, piece.length)[
                        :
                    ] = view
